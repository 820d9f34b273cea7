//! Reading `text`, `jsonl` and `tokens` data into one stream.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::store::Tokens;
use super::{DataSpec, DatasetKind, TokenWidth};
use crate::train::tokenizer::Tokenizer;
use crate::{Error, Result};

const PATH_HINT: &str = "training.dataset_path must name a file or folder that exists and may be read";

/// Text that is tokenized at once, over all cores.
const GROUP_BYTES: usize = 8 << 20;
/// Bytes of a token file read at once.
const BLOCK_BYTES: usize = 1 << 20;

/// The stream of `spec`'s files, and how many documents it has, in words that end in ", " (or nothing).
pub(super) fn read(spec: &DataSpec, tokenizer: &Tokenizer) -> Result<(Tokens, String)> {
    let Some(path) = spec.path.as_deref() else {
        let what =
            format!("training.dataset is {:?}, but training.dataset_path is not set", spec.kind.name());
        return Err(Error::user(what, "name the file or folder to read, or use the \"synthetic\" data set"));
    };
    if spec.kind == DatasetKind::Tokens {
        return Ok((read_tokens(spec, path)?, String::new()));
    }
    let mut collector = Collector::new(spec.vocab_size, tokenizer);
    for file in files_of(path, if spec.kind == DatasetKind::Text { "txt" } else { "jsonl" })? {
        match spec.kind {
            DatasetKind::Text => read_text(&file, &mut collector)?,
            _ => read_jsonl(&file, &mut collector)?,
        }
    }
    collector.flush()?;
    if collector.documents == 0 {
        return Err(Error::user(format!("{} holds no documents", path.display()), "is it the right file?"));
    }
    let words = format!("{} documents, ", collector.documents);
    Ok((collector.tokens, words))
}

/// `path` itself, or the files of the folder `path` with this extension, in order of name.
fn files_of(path: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let io = |e| Error::io(path, e, PATH_HINT);
    if !std::fs::metadata(path).map_err(io)?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.is_file() && file.extension().is_some_and(|e| e == extension) {
            files.push(file);
        }
    }
    if files.is_empty() {
        let what = format!("the folder {} holds no .{extension} files", path.display());
        return Err(Error::user(
            what,
            "name the file itself, or a folder that has some (subfolders are not searched)",
        ));
    }
    files.sort();
    Ok(files)
}

/// One document: the whole file.
fn read_text(path: &Path, collector: &mut Collector) -> Result<()> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e, PATH_HINT))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::user(format!("{}: byte {at} is not UTF-8", path.display()), "convert the file to UTF-8")
    })?;
    if text.is_empty() {
        log::warn!("{} is empty and was left out", path.display());
        return Ok(());
    }
    collector.push(text, path.display().to_string())
}

/// A line of a `jsonl` file; other fields are allowed and not read.
#[derive(serde::Deserialize)]
struct Line {
    text: String,
}

/// One document per line; blank lines are skipped.
fn read_jsonl(path: &Path, collector: &mut Collector) -> Result<()> {
    let io = |e| Error::io(path, e, PATH_HINT);
    let mut reader = BufReader::new(File::open(path).map_err(io)?);
    let (mut line, mut number) = (Vec::new(), 0u64);
    loop {
        line.clear();
        number += 1;
        if reader.read_until(b'\n', &mut line).map_err(io)? == 0 {
            return Ok(());
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_slice(&line).map_err(|e| {
            let words = e.to_string();
            // The parser saw one line only, so its own line number would mislead.
            let why = words.split(" at line ").next().unwrap_or(&words);
            let what = format!("{}:{number}:{}: {why}", path.display(), e.column());
            Error::user(what, "every line must be a JSON object with a string field \"text\"")
        })?;
        collector.push(parsed.text, format!("{}:{number}", path.display()))?;
    }
}

/// Gathers documents and tokenizes them in groups.
struct Collector<'a> {
    tokenizer: &'a Tokenizer,
    vocab: u32,
    tokens: Tokens,
    documents: usize,
    waiting: Vec<(String, String)>,
    waiting_bytes: usize,
}

impl<'a> Collector<'a> {
    fn new(vocab: u32, tokenizer: &'a Tokenizer) -> Self {
        let tokens = Tokens::new(vocab);
        Collector { tokenizer, vocab, tokens, documents: 0, waiting: Vec::new(), waiting_bytes: 0 }
    }

    /// Adds the document `text` that stands at `origin`.
    fn push(&mut self, text: String, origin: String) -> Result<()> {
        self.waiting_bytes += text.len();
        self.waiting.push((text, origin));
        if self.waiting_bytes < GROUP_BYTES { Ok(()) } else { self.flush() }
    }

    /// Tokenizes what waits, in order.
    fn flush(&mut self) -> Result<()> {
        for (ids, (_, origin)) in encode_all(self.tokenizer, &self.waiting)?.iter().zip(&self.waiting) {
            if let Some((i, id)) = ids.iter().enumerate().find(|&(_, &id)| id >= self.vocab) {
                let what = format!(
                    "token id {id} at position {i} of document {origin} is not below the model's vocabulary of {}",
                    self.vocab
                );
                let hint = format!(
                    "set model.args.vocab_size to at least the tokenizer's {}",
                    self.tokenizer.vocab_size()
                );
                return Err(Error::user(what, hint));
            }
            self.tokens.extend(ids);
            self.documents += 1;
        }
        self.waiting.clear();
        self.waiting_bytes = 0;
        Ok(())
    }
}

/// The ids of every document, on as many threads as there are cores.
fn encode_all(tokenizer: &Tokenizer, documents: &[(String, String)]) -> Result<Vec<Vec<u32>>> {
    if documents.is_empty() {
        return Ok(Vec::new());
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = documents.len().div_ceil(cores);
    std::thread::scope(|scope| {
        let encode = |part: &[(String, String)]| -> Result<Vec<Vec<u32>>> {
            part.iter().map(|(text, _)| tokenizer.encode_document(text)).collect()
        };
        let threads: Vec<_> = documents.chunks(share).map(|part| scope.spawn(move || encode(part))).collect();
        let mut all = Vec::with_capacity(documents.len());
        for thread in threads {
            all.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

/// Raw token ids.
fn read_tokens(spec: &DataSpec, path: &Path) -> Result<Tokens> {
    let io = |e| Error::io(path, e, PATH_HINT);
    let mut file = File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if meta.is_dir() {
        return Err(Error::user(format!("{} is a folder", path.display()), "name one file of token ids"));
    }
    let width = width_of(spec, path)?;
    let bytes = meta.len();
    if bytes == 0 {
        return Err(Error::user(
            format!("{} is empty", path.display()),
            "it should hold raw little-endian ids",
        ));
    }
    if bytes % width as u64 != 0 {
        let what =
            format!("{} has {bytes} bytes, which is no multiple of {width}: it is cut short", path.display());
        return Err(Error::user(
            what,
            "copy the file again, or correct the width of its tokens (.u16 or .u32)",
        ));
    }
    let mut tokens = Tokens::new(spec.vocab_size);
    tokens.reserve((bytes / width as u64) as usize);
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    loop {
        block.clear();
        (&mut file).take(BLOCK_BYTES as u64).read_to_end(&mut block).map_err(io)?;
        if block.is_empty() {
            return Ok(tokens);
        }
        let ids: Vec<u32> = block.chunks_exact(width).map(little_endian).collect();
        if let Some((i, id)) = ids.iter().enumerate().find(|&(_, &id)| id >= spec.vocab_size) {
            let at = tokens.len() + i;
            let what = format!(
                "{}: token id {id} at position {at} is not below the model's vocabulary of {}",
                path.display(),
                spec.vocab_size
            );
            return Err(Error::user(
                what,
                "set model.args.vocab_size higher, or check the width of the ids (.u16 or .u32)",
            ));
        }
        tokens.extend(&ids);
    }
}

/// The number that two or four bytes spell.
fn little_endian(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}

/// Bytes per id of a `tokens` file.
fn width_of(spec: &DataSpec, path: &Path) -> Result<usize> {
    let width = match (spec.token_width, path.extension().and_then(|e| e.to_str())) {
        (Some(width), _) => width,
        (None, Some("u16")) => TokenWidth::U16,
        (None, Some("u32")) => TokenWidth::U32,
        (None, Some("bin")) if spec.vocab_size <= 1 << 16 => TokenWidth::U16,
        (None, Some("bin")) => TokenWidth::U32,
        _ => {
            let what = format!("the name of {} does not tell how wide its token ids are", path.display());
            return Err(Error::user(what, "name it *.u16, *.u32 or *.bin (u16 up to 65536 words, else u32)"));
        }
    };
    Ok(if width == TokenWidth::U16 { 2 } else { 4 })
}
