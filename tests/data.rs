//! Data sets, tokenizers and weight files against files on disk.

use std::path::{Path, PathBuf};

use moe8::train::data::{Batch, DataSpec, DatasetKind, Loader, Synthetic, TokenWidth, row_of};
use moe8::train::tokenizer::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
}

fn spec(kind: DatasetKind, path: &Path, vocab_size: u32) -> DataSpec {
    DataSpec { kind, path: Some(path.to_path_buf()), vocab_size, token_width: None, seed: 0 }
}

fn u16s(path: &Path) -> Vec<u32> {
    let bytes = std::fs::read(path).unwrap();
    bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect()
}

/// The message of a loader that must not open.
fn refusal(spec: &DataSpec, seq_len: usize) -> String {
    match Loader::new(spec, &Tokenizer::bytes(), seq_len) {
        Ok(loader) => panic!("opened: {}", loader.summary()),
        Err(e) => e.to_string(),
    }
}

/// Rows as one stream, row after row: inputs of each and its last label.
fn stream(batch: &Batch) -> Vec<u32> {
    let rows = batch.inputs.chunks(batch.seq).zip(batch.labels.chunks(batch.seq));
    rows.flat_map(|(x, y)| x.iter().copied().chain([y[y.len() - 1]])).collect()
}

// ---- tokenizers ----

#[test]
fn tiktoken_gives_the_tokens_of_upstream() {
    let tokenizer = Tokenizer::load(&fixture("")).unwrap();
    assert_eq!((tokenizer.kind(), tokenizer.vocab_size()), ("tiktoken", 2256));
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(2000), Some(2001)));
    let want = u16s(&fixture("jargon60_tiktoken2256.u16"));
    let data = spec(DatasetKind::Jsonl, &fixture("jargon60.jsonl"), 2256);
    let loader = Loader::new(&data, &tokenizer, want.len() - 1).unwrap();
    assert!(
        loader.summary().contains(&format!("60 documents, {} tokens", want.len())),
        "{}",
        loader.summary()
    );
    assert_eq!(stream(&loader.batch(0, 1).unwrap()), want);
    assert_eq!(loader.eos_id(), Some(2001));
}

/// The same on files that are too large to be kept here.
#[test]
#[ignore = "set MOE8_JARGON to a folder with jargon.jsonl, test_tiktoken.model and jargon_tiktoken2256.u16"]
fn tiktoken_gives_the_tokens_of_upstream_for_the_whole_file() {
    let folder = PathBuf::from(std::env::var_os("MOE8_JARGON").expect("MOE8_JARGON is not set"));
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let want = u16s(&folder.join("jargon_tiktoken2256.u16"));
    let data = spec(DatasetKind::Jsonl, &folder.join("jargon.jsonl"), 2256);
    let loader = Loader::new(&data, &tokenizer, want.len() - 1).unwrap();
    assert_eq!(stream(&loader.batch(0, 1).unwrap()), want);
}

#[test]
fn tiktoken_decodes_what_it_encodes() {
    let tokenizer = Tokenizer::load(&fixture("test_tiktoken.model")).unwrap();
    for text in ["", "Hello, world!", "naïve\r\n\r\n  ☃ 12345", "<|end_of_text|> is text here"] {
        let ids = tokenizer.encode_document(text).unwrap();
        assert_eq!((ids[0], ids[ids.len() - 1]), (2000, 2001));
        assert!(ids[1..ids.len() - 1].iter().all(|&id| id < 2000), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}

const HF: &str = r#"{"version":"1.0","truncation":null,"padding":null,
 "added_tokens":[{"id":4,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
  {"id":5,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
  {"id":6,"content":"<stop>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
 "normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
 "model":{"type":"WordLevel","vocab":{"[UNK]":0,"so":1,"it":2,"goes":3},"unk_token":"[UNK]"}}"#;

#[test]
fn hugging_face_tokenizers_are_read_with_and_without_a_config() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), HF).unwrap();
    let t = Tokenizer::load(dir.path()).unwrap();
    assert_eq!((t.kind(), t.vocab_size(), t.bos_id(), t.eos_id()), ("tokenizer.json", 7, Some(4), Some(5)));
    assert_eq!(t.encode_document("so it goes on").unwrap(), [4, 1, 2, 3, 0, 5]);
    assert_eq!(t.decode(&[4, 1, 2, 3, 5]).unwrap(), "so it goes");
    let config = dir.path().join("tokenizer_config.json");
    std::fs::write(&config, r#"{"bos_token":{"content":"<s>"},"eos_token":"<stop>"}"#).unwrap();
    assert_eq!(Tokenizer::load(dir.path()).unwrap().eos_id(), Some(6));
    std::fs::write(&config, r#"{"eos_token":"<gone>"}"#).unwrap();
    let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
    assert!(error.contains("names eos_token \"<gone>\""), "{error}");
}

#[test]
fn tokenizers_that_are_not_there_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokenizer.json");
    std::fs::write(&file, "{}").unwrap();
    for (path, want) in [
        (dir.path().join("x.model"), "x.model: No such file"),
        (file.clone(), "is not a Hugging Face tokenizer"),
        (fixture("../tokenizer/README.md"), "README.md:1: "),
    ] {
        let error = Tokenizer::load(&path).err().unwrap().to_string();
        assert!(error.contains(want), "{error}");
    }
    std::fs::remove_file(file).unwrap();
    let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
    assert!(error.contains("no tokenizer.json and 0 .model files"), "{error}");
}

// ---- packing ----

#[test]
fn documents_are_packed_as_upstream_packs_them() {
    let dir = tempfile::tempdir().unwrap();
    let jsonl = dir.path().join("d.jsonl");
    std::fs::write(&jsonl, "{\"text\":\"ab\"}\n\n  {\"id\":1,\"text\":\"c\"}\r\n{\"text\":\"\"}").unwrap();
    for (name, text) in [("2.txt", "c"), ("1.txt", "ab"), ("3.txt", ""), ("x.md", "no")] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    // An empty line of JSON is a document, an empty file is none.
    let of_jsonl = vec![256, 97, 98, 257, 256, 99, 257, 256, 257];
    let of_text = of_jsonl[..7].to_vec();
    for (kind, path, whole) in
        [(DatasetKind::Jsonl, jsonl.as_path(), of_jsonl), (DatasetKind::Text, dir.path(), of_text)]
    {
        for seq in 1..whole.len() {
            let loader = Loader::new(&spec(kind, path, 258), &Tokenizer::bytes(), seq).unwrap();
            let batch = loader.batch(0, 9).unwrap();
            assert_eq!((batch.batch, batch.seq), (9, seq));
            // The stream begins again at its end, and the leftover is kept.
            let want: Vec<u32> = whole.iter().copied().cycle().take(9 * (seq + 1)).collect();
            assert_eq!(stream(&batch), want, "{kind:?} S={seq}");
            for (x, y) in batch.inputs.chunks(seq).zip(batch.labels.chunks(seq)) {
                assert_eq!(x[1..], y[..seq - 1], "labels are inputs moved by one");
            }
        }
    }
}

#[test]
fn two_ranks_with_four_rows_see_what_one_with_eight_sees() {
    let tokens = spec(DatasetKind::Tokens, &fixture("jargon60_tiktoken2256.u16"), 2256);
    let synthetic = DataSpec { kind: DatasetKind::Synthetic, path: None, ..tokens.clone() };
    for data in [tokens, synthetic] {
        let loader = Loader::new(&data, &Tokenizer::bytes(), 61).unwrap();
        for step in [0, 1, 77] {
            let whole = loader.batch(row_of(step, 0, 1, 8), 8).unwrap();
            for ranks in [2, 4, 8] {
                let local = 8 / ranks;
                let parts: Vec<Batch> = (0..ranks)
                    .map(|r| loader.batch(row_of(step, r, ranks, local), local as usize).unwrap())
                    .collect();
                let inputs: Vec<u32> = parts.iter().flat_map(|b| b.inputs.clone()).collect();
                let labels: Vec<u32> = parts.iter().flat_map(|b| b.labels.clone()).collect();
                assert_eq!((inputs, labels), (whole.inputs.clone(), whole.labels.clone()), "{ranks} ranks");
            }
        }
    }
}

#[test]
fn token_files_are_read_by_width() {
    let dir = tempfile::tempdir().unwrap();
    let ids = [0u32, 1, 513, 65_535, 7];
    let narrow: Vec<u8> = ids.iter().flat_map(|&i| (i as u16).to_le_bytes()).collect();
    let wide: Vec<u8> = ids.iter().flat_map(|&i| i.to_le_bytes()).collect();
    for (name, bytes, width, vocab) in [
        ("a.u16", &narrow, None, 65_536),
        ("a.u32", &wide, None, 65_536),
        ("a.u32", &wide, None, 100_000),
        ("a.bin", &narrow, None, 65_536),
        ("a.bin", &wide, None, 65_537),
        ("a.bin", &wide, Some(TokenWidth::U32), 65_536),
        ("a", &narrow, Some(TokenWidth::U16), 65_536),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let data = DataSpec { token_width: width, ..spec(DatasetKind::Tokens, &path, vocab) };
        let loader = Loader::new(&data, &Tokenizer::bytes(), 4).unwrap();
        assert_eq!(stream(&loader.batch(0, 1).unwrap()), ids, "{name} {width:?} {vocab}");
    }
}

// ---- refusals ----

#[test]
fn bad_data_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    use DatasetKind::{Jsonl, Text, Tokens};
    for (kind, name, bytes, vocab, seq, want) in [
        (Tokens, "odd.u16", &b"\x01\x00\x02"[..], 300, 1, "3 bytes, which is no multiple of 2"),
        (Tokens, "odd.u32", b"\x01\x00\x02\x00\x00\x00", 300, 1, "6 bytes, which is no multiple of 4"),
        (Tokens, "empty.u16", b"", 300, 1, "empty.u16 is empty"),
        (Tokens, "name.dat", b"\0\0\0\0", 300, 1, "does not tell how wide"),
        (Tokens, "big.u16", b"\0\0\x01\0\x2c\x01", 300, 1, "token id 300 at position 2 is not below"),
        (Tokens, "short.u16", b"\0\0\x01\0\x02\0", 300, 3, "has 3 tokens, but one row takes seq_len + 1 = 4"),
        (Tokens, "zero.u16", b"\0\0\x01\0", 300, 0, "training.seq_len is 0"),
        (Tokens, "one.u16", b"\0\0\0\0", 1, 1, "vocabulary of 1"),
        (
            Jsonl,
            "bad.jsonl",
            b"{\"text\":\"a\"}\n\n{\"text\":1}\n",
            300,
            1,
            "bad.jsonl:3:9: invalid type: integer",
        ),
        (Jsonl, "key.jsonl", b"{\"txt\":\"a\"}\n", 300, 1, "key.jsonl:1:11: missing field `text`"),
        (Jsonl, "cut.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"b", 300, 1, "cut.jsonl:2:10: EOF"),
        (Jsonl, "none.jsonl", b"\n", 300, 1, "none.jsonl holds no documents"),
        (Jsonl, "vocab.jsonl", b"{\"text\":\"a\"}\n", 257, 1, "token id 257 at position 2 of document"),
        (Text, "latin.txt", b"na\xefve", 300, 1, "byte 2 is not UTF-8"),
        (Text, "empty.txt", b"", 300, 1, "empty.txt holds no documents"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(&spec(kind, &path, vocab), seq);
        assert!(error.contains(want) && error.contains("hint: "), "{name}: {error}");
    }
}

#[test]
fn data_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for kind in [DatasetKind::Text, DatasetKind::Jsonl, DatasetKind::Tokens] {
        let error = refusal(&spec(kind, &dir.path().join("gone.u16"), 300), 1);
        assert!(error.contains("gone.u16: No such file"), "{error}");
        let error = refusal(&DataSpec { path: None, ..spec(kind, dir.path(), 300) }, 1);
        assert!(error.contains("training.dataset_path is not set"), "{error}");
        let error = refusal(&spec(kind, dir.path(), 300), 1);
        assert!(error.contains("holds no .") || error.contains("is a folder"), "{error}");
    }
    let error = "c4_test".parse::<DatasetKind>().unwrap_err().to_string();
    assert!(error.contains("\"synthetic\"") && error.contains("\"jsonl\""), "{error}");
    for (name, kind) in DatasetKind::NAMES {
        assert_eq!((name.parse::<DatasetKind>().unwrap(), kind.name()), (kind, name));
    }
}

// ---- the synthetic language ----

/// Counts many rows and compares: the entropies of a plug-in estimate must be those the generator states.
#[test]
fn synthetic_entropy_is_what_it_says() {
    for (vocab, seq) in [(2u32, 7usize), (15, 64), (16, 33), (128, 256), (2256, 256)] {
        let language = Synthetic::new(vocab, 5);
        let stated = language.entropies(seq);
        let used = 128.min(vocab as usize);
        let markers = if used >= 16 { 4u32 } else { 0 };
        let rows = 4_000_000 / seq as u64;
        // counts[topic][previous][next]
        let mut counts = vec![vec![vec![0u32; used]; used]; 4];
        for i in 0..rows {
            let row = language.row(i, seq + 1);
            let mut topic = 0;
            for pair in row.windows(2) {
                if pair[0] < markers {
                    topic = pair[0] as usize;
                }
                counts[topic][pair[0] as usize][pair[1] as usize] += 1;
            }
        }
        let total = (rows * seq as u64) as f64;
        let full = conditional(counts.iter().flatten(), total);
        let bigrams: Vec<Vec<u32>> = (0..used)
            .map(|a| (0..used).map(|b| counts.iter().map(|of_topic| of_topic[a][b]).sum()).collect())
            .collect();
        let bigram = conditional(bigrams.iter(), total);
        let labels: Vec<u32> = (0..used).map(|b| bigrams.iter().map(|of_a| of_a[b]).sum()).collect();
        let unigram = conditional([&labels].into_iter(), total);
        for (what, got, want) in [
            ("full", full, stated.full),
            ("bigram", bigram, stated.bigram),
            ("unigram", unigram, stated.unigram),
        ] {
            // The estimate lacks about (cells - contexts) / (2 total) < 0.008 nats, plus its noise.
            assert!((want - got).abs() < 0.012, "V={vocab} {what}: counted {got}, stated {want}");
        }
        assert!(stated.full <= stated.bigram && stated.bigram < stated.unigram, "{stated:?}");
    }
}

/// Entropy of the next token given its context, from counts `[context][next]`.
fn conditional<'a>(contexts: impl Iterator<Item = &'a Vec<u32>>, total: f64) -> f64 {
    let mut sum = 0.0;
    for next in contexts {
        let n = f64::from(next.iter().sum::<u32>());
        sum -= next.iter().filter(|&&c| c > 0).map(|&c| f64::from(c) * (f64::from(c) / n).ln()).sum::<f64>();
    }
    sum / total
}

#[test]
fn synthetic_rows_are_a_function_of_seed_and_index() {
    let data =
        DataSpec { kind: DatasetKind::Synthetic, path: None, vocab_size: 258, token_width: None, seed: 1 };
    let loader = Loader::new(&data, &Tokenizer::bytes(), 100).unwrap();
    let batch = loader.batch(0, 50).unwrap();
    assert_eq!(batch, loader.batch(0, 50).unwrap());
    assert_eq!(batch.inputs[1700..1800], loader.batch(17, 1).unwrap().inputs);
    assert!(batch.inputs.iter().all(|&t| t < 128));
    assert!(batch.inputs.chunks(100).all(|row| row[0] < 4), "a row starts with its topic");
    let other = Loader::new(&DataSpec { seed: 2, ..data }, &Tokenizer::bytes(), 100).unwrap();
    assert_ne!(batch, other.batch(0, 50).unwrap());
    assert_eq!(loader.entropy(), other.entropy());
    assert!(loader.summary().contains("nats per token"), "{}", loader.summary());
}
