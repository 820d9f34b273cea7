//! Sharding of parameters and gradients over ranks.

mod fsdp;
mod home;
pub mod hooks;

pub use fsdp::{Fsdp, Policy, WireBytes};
