//! Modules and the Llama4 model.

mod convert;
mod init;
mod llama4;

pub use convert::{Conversion, Converters};
pub use init::{Seed, initial_value};
pub use llama4::{Batch, Forward, Llama4};
