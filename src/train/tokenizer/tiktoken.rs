//! tiktoken `.model` files with Llama 3's split pattern and special tokens.

use std::path::Path;

use base64::Engine as _;
use tiktoken_rs::CoreBPE;

use crate::{Error, Result};

/// How Llama 3 cuts text into pieces before merging (torchtitan, `datasets/tokenizer/tiktoken.py`, June 2025).
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Special tokens after the ranks (same file).
const SPECIAL_TOKENS: u32 = 256;

/// The same file feeds the encoder at most this many characters at a time,
const MAX_ENCODE_CHARS: usize = 400_000;
/// and cuts runs of only white space, or of none, at this many.
const MAX_RUN_CHARS: usize = 25_000;

const MODEL_HINT: &str = "a tiktoken model has one `<base64 of the bytes> <rank>` a line, ranks from 0; a Hugging Face tokenizer is named *.json";

pub(super) struct TiktokenTokenizer {
    bpe: CoreBPE,
    ranks: u32,
}

impl TiktokenTokenizer {
    pub(super) fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::io(path, e, "let model.tokenizer_path name a tokenizer file or its folder")
        })?;
        let ranks = parse_ranks(path, &text)?;
        let n = ranks.len() as u32;
        let special = special_names().into_iter().zip(n..).collect();
        let bpe = CoreBPE::new(ranks.into_iter().collect(), special, LLAMA3_PATTERN)
            .map_err(|e| Error::user(format!("{}: {e}", path.display()), MODEL_HINT))?;
        Ok(TiktokenTokenizer { bpe, ranks: n })
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        pieces(text).into_iter().flat_map(|piece| self.bpe.encode_ordinary(piece)).collect()
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        let ordinary: Vec<u32> = ids.iter().copied().filter(|&id| id < self.ranks).collect();
        let bytes = self.bpe.decode_bytes(&ordinary).map_err(|e| {
            Error::user(format!("tokens cannot be decoded: {e:?}"), "use the tokenizer that made them")
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn vocab_size(&self) -> u32 {
        self.ranks + SPECIAL_TOKENS
    }

    /// `<|begin_of_text|>`
    pub(super) fn bos_id(&self) -> u32 {
        self.ranks
    }

    /// `<|end_of_text|>`
    pub(super) fn eos_id(&self) -> u32 {
        self.ranks + 1
    }
}

/// The byte strings and ranks of a model file: ranks 0..n in any order, every single byte among them (the
/// encoder falls back to them).
fn parse_ranks(path: &Path, text: &str) -> Result<Vec<(Vec<u8>, u32)>> {
    let bad = |line: usize, why: &str| Error::user(format!("{}:{line}: {why}", path.display()), MODEL_HINT);
    let mut ranks = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let (word, rank) = line.trim().split_once(' ').ok_or_else(|| bad(i + 1, "expected two fields"))?;
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(word)
            .map_err(|e| bad(i + 1, &format!("{word:?} is not base64: {e}")))?;
        let rank: u32 = rank.parse().map_err(|_| bad(i + 1, &format!("{rank:?} is not a rank")))?;
        ranks.push((bytes, rank));
    }
    let mut seen = vec![false; ranks.len()];
    for (_, rank) in &ranks {
        match seen.get_mut(*rank as usize) {
            Some(s) if !*s => *s = true,
            _ => {
                return Err(bad(
                    ranks.len(),
                    &format!("rank {rank} is doubled or not below the number of ranks"),
                ));
            }
        }
    }
    let words: std::collections::HashSet<&[u8]> = ranks.iter().map(|(b, _)| b.as_slice()).collect();
    if words.len() != ranks.len() {
        return Err(bad(ranks.len(), "a byte string occurs twice"));
    }
    if let Some(b) = (0..=255u8).find(|b| !words.contains(&[*b][..])) {
        return Err(bad(ranks.len(), &format!("the single byte {b:#04x} has no rank")));
    }
    Ok(ranks)
}

/// Llama 3's names for the 256 special tokens, in order.
fn special_names() -> Vec<String> {
    let mut names: Vec<String> = ["begin_of_text", "end_of_text"].map(String::from).to_vec();
    names.extend((0..4).map(|i| format!("reserved_special_token_{i}")));
    names
        .extend(["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"].map(String::from));
    names.extend((5..SPECIAL_TOKENS - 5).map(|i| format!("reserved_special_token_{i}")));
    names.into_iter().map(|n| format!("<|{n}|>")).collect()
}

/// The pieces that are encoded on their own: blocks of [`MAX_ENCODE_CHARS`], cut where a run of white space
/// or of other characters grows past [`MAX_RUN_CHARS`], as upstream cuts them.
fn pieces(text: &str) -> Vec<&str> {
    if text.len() <= MAX_RUN_CHARS {
        return vec![text];
    }
    let mut out = Vec::new();
    let (mut start, mut block, mut run, mut run_is_space) = (0, 0, 0, false);
    for (i, c) in text.char_indices() {
        let space = c.is_whitespace();
        if block == MAX_ENCODE_CHARS {
            out.push(&text[start..i]);
            (start, block, run, run_is_space) = (i, 0, 0, space);
        }
        if block == 0 || space != run_is_space {
            (run, run_is_space) = (1, space);
        } else {
            run += 1;
            if run > MAX_RUN_CHARS {
                out.push(&text[start..i]);
                (start, run) = (i, 1);
            }
        }
        block += 1;
    }
    out.push(&text[start..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_256_special_tokens_and_none_twice() {
        let names = special_names();
        assert_eq!(names.len(), 256);
        assert_eq!((names[0].as_str(), names[1].as_str()), ("<|begin_of_text|>", "<|end_of_text|>"));
        assert_eq!(
            (names[9].as_str(), names[255].as_str()),
            ("<|eot_id|>", "<|reserved_special_token_250|>")
        );
        let set: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(set.len(), 256);
    }

    #[test]
    fn long_texts_are_cut_as_upstream_cuts_them() {
        let lengths = |text: &str| pieces(text).iter().map(|p| p.chars().count()).collect::<Vec<_>>();
        assert_eq!(lengths(""), [0]);
        assert_eq!(lengths(&"a".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"é".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&format!("{}{}", "a".repeat(20_000), " ".repeat(25_001))), [45_000, 1]);
        assert_eq!(lengths(&"a b ".repeat(100_001)), [400_000, 4]);
        assert_eq!(lengths(&"ab".repeat(25_000)), [25_000, 25_000]);
        assert_eq!(pieces(&"xy ".repeat(200_000)).concat(), "xy ".repeat(200_000));
    }

    #[test]
    fn bad_model_files_say_where() {
        for (text, want) in [
            ("AA== 0\nnonsense\n", "x.model:2: expected two fields"),
            ("AA==* 0\n", "is not base64"),
            ("AA== zero\n", "\"zero\" is not a rank"),
            ("AA== 0\nAQ== 0\n", "rank 0 is doubled"),
            ("AA== 1\n", "rank 1 is doubled or not below"),
            ("AA== 0\nAA== 1\n", "occurs twice"),
            ("AA== 0\n", "single byte 0x01 has no rank"),
            ("", "single byte 0x00 has no rank"),
        ] {
            let error = parse_ranks(Path::new("x.model"), text).unwrap_err().to_string();
            assert!(error.contains(want), "{text:?}: {error}");
        }
    }
}
