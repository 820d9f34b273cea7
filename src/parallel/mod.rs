//! Sharding of parameters and gradients over ranks.

mod fsdp;
mod home;
pub mod hooks;
mod policy;

pub use fsdp::{Fsdp, WireBytes};
pub use policy::Policy;
