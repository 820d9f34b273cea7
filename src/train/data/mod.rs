//! Training data: documents to one endless stream of token ids, cut into rows.
//!
//! Packing (torchtitan, `datasets/hf_datasets.py`, July 2025): the documents in order, each BOS + tokens +
//! EOS, form a stream that starts again at its end. Row i is elements `i*(S+1) .. (i+1)*(S+1)` of it: the
//! first S are the inputs, the last S the labels. No padding, no loss mask.
//!
//! Which rows a rank sees depends on the global batch alone (see [`row_of`]), so two ranks with four rows
//! each see what one rank with eight sees. (Upstream gives each rank its own part of the documents instead.)

use std::path::PathBuf;
use std::str::FromStr;

use crate::train::tokenizer::Tokenizer;
use crate::{Error, Result};

mod files;
mod store;
mod synthetic;

use store::Tokens;
pub use synthetic::{Entropies, Synthetic};

/// Where tokens come from (`training.dataset`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetKind {
    /// The embedded generator, [`Synthetic`]: needs no file and no tokenizer.
    Synthetic,
    /// UTF-8 text: a file, or a folder of `*.txt` in order of name; a document per file.
    Text,
    /// JSON lines `{"text": ...}`: a file, or a folder of `*.jsonl` in order of name; a document per line.
    Jsonl,
    /// Raw little-endian token ids in one file, taken as they are (no BOS or EOS is added).
    Tokens,
}

impl DatasetKind {
    /// Every kind with its name in the configuration.
    pub const NAMES: [(&'static str, DatasetKind); 4] = [
        ("synthetic", DatasetKind::Synthetic),
        ("text", DatasetKind::Text),
        ("jsonl", DatasetKind::Jsonl),
        ("tokens", DatasetKind::Tokens),
    ];

    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

impl FromStr for DatasetKind {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        if let Some(&(_, kind)) = Self::NAMES.iter().find(|(name, _)| *name == s) {
            return Ok(kind);
        }
        let hint = if s.starts_with("c4") {
            "moe8 downloads nothing: use \"synthetic\", which is built in, or \"jsonl\" with \
             training.dataset_path naming a file of {\"text\": ...} lines, such as upstream's c4_test data"
        } else {
            "use \"synthetic\", \"text\", \"jsonl\" or \"tokens\""
        };
        Err(Error::user(format!("training.dataset {s:?} is unknown"), hint))
    }
}

/// How wide the ids of a `tokens` file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

/// What [`Loader::new`] needs to know of the data, besides the tokenizer and the row length.
#[derive(Clone, Debug)]
pub struct DataSpec {
    /// Where tokens come from.
    pub kind: DatasetKind,
    /// The file or folder (`training.dataset_path`); unused by `synthetic`.
    pub path: Option<PathBuf>,
    /// V of the model: every id must be below it. At least 2.
    pub vocab_size: u32,
    /// Width of the ids of a `tokens` file. `None` decides by its name: `.u16`, `.u32`, and `.bin` by V
    /// (u16 up to 65536 words, else u32).
    pub token_width: Option<TokenWidth>,
    /// Seed of `synthetic`: other seeds are other texts of the same language.
    pub seed: u64,
}

/// Consecutive rows, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids `[batch, seq]`.
    pub inputs: Vec<u32>,
    /// The id that follows each input, `[batch, seq]`.
    pub labels: Vec<u32>,
    /// B, the number of rows.
    pub batch: usize,
    /// S, the tokens of a row.
    pub seq: usize,
}

/// The row that local sample 0 of `rank` takes at `step` (from 0): rows `step * ranks * local ..` belong to
/// the step, and rank r takes the r-th run of `local` of them.
pub fn row_of(step: u64, rank: u64, ranks: u64, local: u64) -> u64 {
    (step * ranks + rank) * local
}

/// Random access to the rows of a data set.
pub struct Loader {
    source: Source,
    seq_len: usize,
    eos_id: Option<u32>,
    summary: String,
}

enum Source {
    Stored(Tokens),
    Synthetic(Synthetic),
}

impl Loader {
    /// Opens the data of `spec` and tokenizes all of it, for rows of `seq_len` inputs.
    ///
    /// Memory: 2 bytes a token up to V = 65536, else 4. `synthetic` takes none and does not use `tokenizer`.
    ///
    /// # Errors
    /// A missing, unreadable, empty, truncated or malformed file (with the line), an id that is not below V
    /// (with position and value), data shorter than one row, `seq_len` 0, V below 2.
    pub fn new(spec: &DataSpec, tokenizer: &Tokenizer, seq_len: usize) -> Result<Self> {
        if seq_len == 0 {
            return Err(Error::user("training.seq_len is 0", "give it at least 1"));
        }
        if spec.vocab_size < 2 {
            let what = format!("the model has a vocabulary of {}", spec.vocab_size);
            return Err(Error::user(what, "set model.args.vocab_size to at least 2"));
        }
        if spec.kind == DatasetKind::Synthetic {
            let source = Synthetic::new(spec.vocab_size, spec.seed);
            let summary = source.summary(seq_len);
            return Ok(Loader { source: Source::Synthetic(source), seq_len, eos_id: None, summary });
        }
        let (tokens, documents) = files::read(spec, tokenizer)?;
        let row = seq_len + 1;
        if tokens.len() < row {
            let what =
                format!("the data set has {} tokens, but one row takes seq_len + 1 = {row}", tokens.len());
            return Err(Error::user(what, "lower training.seq_len or give more data"));
        }
        let summary = format!(
            "{}: {documents}{} tokens, {} rows of {row} before it starts again",
            spec.kind.name(),
            tokens.len(),
            tokens.len() / row
        );
        Ok(Loader { source: Source::Stored(tokens), seq_len, eos_id: tokenizer.eos_id(), summary })
    }

    /// Rows `first_row .. first_row + count`; [`row_of`] tells which. The same call always gives the same batch.
    ///
    /// # Errors
    /// `count` 0.
    pub fn batch(&self, first_row: u64, count: usize) -> Result<Batch> {
        if count == 0 {
            return Err(Error::user("training.local_batch_size is 0", "give it at least 1"));
        }
        let seq = self.seq_len;
        let mut inputs = Vec::with_capacity(count * seq);
        let mut labels = Vec::with_capacity(count * seq);
        for i in 0..count as u64 {
            let row = self.row(first_row + i);
            inputs.extend_from_slice(&row[..seq]);
            labels.extend_from_slice(&row[1..]);
        }
        Ok(Batch { inputs, labels, batch: count, seq })
    }

    /// The S + 1 tokens of row `index`.
    fn row(&self, index: u64) -> Vec<u32> {
        match &self.source {
            Source::Stored(tokens) => tokens.row(index, self.seq_len + 1),
            Source::Synthetic(s) => s.row(index, self.seq_len + 1),
        }
    }

    /// The id that ends a document in this data, for document masks; `None` when there is no such id, as
    /// with `synthetic`, whose rows are one document each.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// One line for the log: documents, tokens, rows; of `synthetic` the entropy per token.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// The mean loss, in nats per token, that no model can stay below; known for `synthetic` only.
    pub fn entropy(&self) -> Option<f64> {
        match &self.source {
            Source::Stored(_) => None,
            Source::Synthetic(s) => Some(s.entropies(self.seq_len).full),
        }
    }
}
