//! Text to token ids and back: bytes, Hugging Face `tokenizer.json`, tiktoken `.model`.

use std::path::Path;

use crate::{Error, Result};

mod hf;
mod tiktoken;

use hf::HfTokenizer;
use tiktoken::TiktokenTokenizer;

/// The id that starts a document with [`Tokenizer::bytes`].
const BYTES_BOS: u32 = 256;
/// The id that ends a document with [`Tokenizer::bytes`].
const BYTES_EOS: u32 = 257;

/// A tokenizer of one of the three kinds.
pub struct Tokenizer {
    kind: Kind,
}

enum Kind {
    Bytes,
    Hf(Box<HfTokenizer>),
    Tiktoken(Box<TiktokenTokenizer>),
}

impl Tokenizer {
    /// The default: a token per UTF-8 byte, BOS 256, EOS 257, so V = 258.
    pub fn bytes() -> Self {
        Tokenizer { kind: Kind::Bytes }
    }

    /// The tokenizer that `path` (`model.tokenizer_path`) names.
    ///
    /// A file `*.json` is read as a Hugging Face tokenizer, any other as a tiktoken model. Of a folder,
    /// `tokenizer.json` is taken if it is there, else its only `*.model` file.
    ///
    /// # Errors
    /// A missing, ambiguous or malformed file, by name.
    pub fn load(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { tokenizer_in(path)? } else { path.to_path_buf() };
        let kind = if file.extension().is_some_and(|e| e == "json") {
            Kind::Hf(Box::new(HfTokenizer::load(&file)?))
        } else {
            Kind::Tiktoken(Box::new(TiktokenTokenizer::load(&file)?))
        };
        Ok(Tokenizer { kind })
    }

    /// The tokenizer at `path`, or bytes when there is none.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn load_or_bytes(path: Option<&Path>) -> Result<Self> {
        path.map_or_else(|| Ok(Self::bytes()), Self::load)
    }

    /// The ids of `text`, without BOS and EOS. The names of special tokens in `text` are ordinary text.
    ///
    /// # Errors
    /// Only a Hugging Face tokenizer can fail, with its own words.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Hf(t) => t.encode(text),
            Kind::Tiktoken(t) => Ok(t.encode(text)),
        }
    }

    /// A whole document: BOS (if there is one) + ids + EOS (if there is one).
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = self.bos_id().into_iter().collect();
        ids.extend(self.encode(text)?);
        ids.extend(self.eos_id());
        Ok(ids)
    }

    /// The text of `ids`. Special tokens are left out; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// An id that the tokenizer does not know, with its position.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let vocab = self.vocab_size();
        if let Some((i, id)) = ids.iter().enumerate().find(|&(_, &id)| id >= vocab) {
            let what = format!("token id {id} at position {i} is not below the tokenizer's {vocab} words");
            return Err(Error::user(what, "decode with the tokenizer that made the ids"));
        }
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Hf(t) => t.decode(ids),
            Kind::Tiktoken(t) => t.decode(ids),
        }
    }

    /// The number of words, special tokens included: every id is below it.
    pub fn vocab_size(&self) -> u32 {
        match &self.kind {
            Kind::Bytes => BYTES_EOS + 1,
            Kind::Hf(t) => t.vocab_size(),
            Kind::Tiktoken(t) => t.vocab_size(),
        }
    }

    /// The id that starts a document; `None` when the tokenizer has none.
    pub fn bos_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(BYTES_BOS),
            Kind::Hf(t) => t.bos_id(),
            Kind::Tiktoken(t) => Some(t.bos_id()),
        }
    }

    /// The id that ends a document; `None` when the tokenizer has none.
    pub fn eos_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(BYTES_EOS),
            Kind::Hf(t) => t.eos_id(),
            Kind::Tiktoken(t) => Some(t.eos_id()),
        }
    }

    /// The kind, for the log: `bytes`, `tokenizer.json` or `tiktoken`.
    pub fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Bytes => "bytes",
            Kind::Hf(_) => "tokenizer.json",
            Kind::Tiktoken(_) => "tiktoken",
        }
    }
}

/// The tokenizer file of a folder.
fn tokenizer_in(folder: &Path) -> Result<std::path::PathBuf> {
    let json = folder.join("tokenizer.json");
    if json.is_file() {
        return Ok(json);
    }
    let io = |e| Error::io(folder, e, "is the folder readable?");
    let mut models = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_file() && path.extension().is_some_and(|e| e == "model") {
            models.push(path);
        }
    }
    if models.len() == 1 {
        return Ok(models.remove(0));
    }
    let what = format!("{} holds no tokenizer.json and {} .model files", folder.display(), models.len());
    Err(Error::user(what, "let model.tokenizer_path name the tokenizer file itself"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_there_and_back() {
        let t = Tokenizer::bytes();
        assert_eq!((t.vocab_size(), t.bos_id(), t.eos_id()), (258, Some(256), Some(257)));
        for text in ["", "a", "naïve – ☃", "\r\n\0"] {
            let ids = t.encode_document(text).unwrap();
            assert_eq!((ids[0], ids[ids.len() - 1], ids.len()), (256, 257, text.len() + 2));
            assert_eq!(t.decode(&ids).unwrap(), text);
        }
    }

    #[test]
    fn an_unknown_id_is_an_error_with_its_place() {
        let error = Tokenizer::bytes().decode(&[65, 258]).unwrap_err().to_string();
        assert!(error.contains("258 at position 1"), "{error}");
    }
}
