//! Sharding of parameters and gradients over ranks.

mod fsdp;
pub mod hooks;

pub use fsdp::{Fsdp, Policy, WireBytes};
