//! The configuration: a TOML file in torchtitan's format of July 2025, then `--section.key=value`
//! overrides, into one typed [`Config`].
//!
//! One table ([`KEYS`], made in `table.rs`) declares every key once: its field and type, its default, its
//! documentation and what moe8 does with it ([`Policy`]). Parsing, unknown-key errors, printing and the list
//! of keys all walk that table.
//!
//! ```
//! use moe8::config::Config;
//! let overrides = ["training.steps=10".to_string(), "model.args.top_k=2".to_string()];
//! let loaded = Config::from_toml("[training]\nseq_len = 128\n", "example.toml", &overrides)?;
//! loaded.config.validate(1)?;
//! assert_eq!((loaded.config.training.seq_len, loaded.config.args.top_k), (128, 2));
//! # Ok::<(), moe8::Error>(())
//! ```

mod choices;
mod keys;
mod model_args;
mod print;
mod read;
mod source;
mod table;
mod validate;
mod value;

#[cfg(test)]
mod tests;

pub use choices::*;
pub use keys::{ALIASES, Alias, Key, Policy, advice, nearest};
pub use model_args::{ParamCounts, Vocabulary};
pub use print::list_keys;
pub use read::is_switch;
pub use source::{Loaded, Source, Sources};
pub use table::*;
pub use value::{Raw, Setting};
