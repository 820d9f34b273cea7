//! Hugging Face `tokenizer.json` files.

use std::path::Path;

use crate::{Error, Result};

/// Names that start a document, tried in order when `tokenizer_config.json` names none.
const BOS_NAMES: [&str; 4] = ["<|begin_of_text|>", "<s>", "<bos>", "<|bos|>"];
/// Names that end one.
const EOS_NAMES: [&str; 5] = ["<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endoftext|>"];

pub(super) struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: u32,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl HfTokenizer {
    pub(super) fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|e| {
            Error::io(path, e, "let model.tokenizer_path name a tokenizer file or its folder")
        })?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&text).map_err(|e| {
            let what = format!("{} is not a Hugging Face tokenizer: {e}", path.display());
            Error::user(what, "the file must be a tokenizer.json as the tokenizers library saves it")
        })?;
        // A training stream is neither cut nor padded, whatever the file asks for.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::user(e.to_string(), "report this"))?;
        let vocab = inner.get_vocab(true);
        let highest = vocab.values().max().copied().unwrap_or(0);
        let vocab_size = (inner.get_vocab_size(true) as u32).max(highest + 1);
        let config = config_beside(path)?;
        let special = |key: &str, usual: &[&str]| -> Result<Option<u32>> {
            match name_in(&config, key) {
                Some(name) => inner.token_to_id(&name).map(Some).ok_or_else(|| {
                    let what =
                        format!("tokenizer_config.json names {key} {name:?}, which {} lacks", path.display());
                    Error::user(what, "take both files from the same model")
                }),
                None => Ok(usual.iter().find_map(|n| inner.token_to_id(n))),
            }
        };
        let (bos, eos) = (special("bos_token", &BOS_NAMES)?, special("eos_token", &EOS_NAMES)?);
        if eos.is_none() {
            log::warn!("{}: no end-of-text token is known; documents are joined without one", path.display());
        }
        Ok(HfTokenizer { vocab_size, bos, eos, inner })
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::user(
                format!("the tokenizer failed: {e}"),
                "is the text what the tokenizer expects?",
            )),
        }
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        let text = self.inner.decode(ids, true);
        text.map_err(|e| {
            Error::user(format!("tokens cannot be decoded: {e}"), "use the tokenizer that made them")
        })
    }

    pub(super) fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    pub(super) fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    pub(super) fn eos_id(&self) -> Option<u32> {
        self.eos
    }
}

/// `tokenizer_config.json` of the same folder; `Null` when there is none.
fn config_beside(path: &Path) -> Result<serde_json::Value> {
    let file = path.with_file_name("tokenizer_config.json");
    let Ok(text) = std::fs::read(&file) else { return Ok(serde_json::Value::Null) };
    serde_json::from_slice(&text).map_err(|e| {
        Error::user(
            format!("{}: {e}", file.display()),
            "repair the file, or remove it to use the usual names",
        )
    })
}

/// The token that `key` names, written as a string or as `{"content": ...}`.
fn name_in(config: &serde_json::Value, key: &str) -> Option<String> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(String::from)
}
