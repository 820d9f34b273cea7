//! Modules and the Llama4 model.

mod build;
mod convert;
mod init;
mod llama4;
mod moe;

pub use convert::{Conversion, Converters};
pub use init::{Seed, initial_value};
pub use llama4::{Batch, Forward, Llama4};
pub use moe::{Moe, MoeForward};
