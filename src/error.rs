//! What a user can cause, as one type: each variant says the value, the limit and what to do.
//!
//! Broken contracts between our own functions are `assert!`s instead, and the GPU's errors are
//! collected by one sink in [`crate::gpu`] and surface here as [`Error::Gpu`] at the next submit.

use std::path::{Path, PathBuf};

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure that the caller can act on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value that the user gave is unusable.
    #[error("{what}\n  hint: {hint}")]
    User {
        /// What is wrong, with the value and the limit.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// The operating system refused a file operation.
    #[error("{}: {source}\n  hint: {hint}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
        /// What to do about it.
        hint: String,
    },
    /// The adapter or its driver reported an error.
    #[error("gpu: {what}\n  hint: {hint}")]
    Gpu {
        /// The driver's words, with the label of the kernel or buffer.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// Ranks disagree, or one of them went away.
    #[error("ranks: {what}\n  hint: {hint}")]
    Comm {
        /// What was expected and what came.
        what: String,
        /// What to do about it.
        hint: String,
    },
}

impl Error {
    /// A [`Error::User`] from its two sentences.
    pub fn user(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::User { what: what.into(), hint: hint.into() }
    }

    /// A [`Error::Gpu`] from its two sentences.
    pub fn gpu(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Gpu { what: what.into(), hint: hint.into() }
    }

    /// A [`Error::Comm`] from its two sentences.
    pub fn comm(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Comm { what: what.into(), hint: hint.into() }
    }

    /// A [`Error::Io`] for `path`.
    pub fn io(path: &Path, source: std::io::Error, hint: impl Into<String>) -> Self {
        Error::Io { path: path.to_path_buf(), source, hint: hint.into() }
    }
}
