//! From text to entries `key = value`, not yet looked up: a TOML file, and one override of the command line.

use toml::de::{DeArray, DeTable, DeValue};

use super::keys;
use super::source::Source;
use super::table::KEYS;
use super::value::{BEYOND, Raw};
use crate::{Error, Result};

/// One `key = value` as it was found.
#[derive(Debug)]
pub(super) struct Entry {
    /// Full name, as written.
    pub path: String,
    /// The value.
    pub raw: Raw,
    /// Where.
    pub source: Source,
}

/// One override: `section.key=value` or a bare `section.key`. Dashes in names are underscores, and
/// `section.no_key` is `section.key=false`, as in upstream's parser.
pub(super) fn read_override(text: &str) -> Result<Entry> {
    let bare = text.trim_start_matches('-');
    let (name, value) = match bare.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (bare, None),
    };
    let path = name.trim().replace('-', "_");
    let entry = |path: String, raw| Ok(Entry { path, raw, source: Source::CommandLine });
    if let Some(value) = value {
        return entry(path, Raw::Word(value.to_string()));
    }
    if is_switch(&path) {
        return entry(path, Raw::Bool(true));
    }
    let positive = path.rsplit_once(".no_").map(|(section, key)| format!("{section}.{key}"));
    match positive {
        Some(positive) if is_switch(&positive) => entry(positive, Raw::Bool(false)),
        _ if index_of(&path).is_some() => {
            Err(Error::user(format!("--{path} has no value"), format!("write --{path}=VALUE")))
        }
        // Named as unknown by `resolve`, with advice.
        _ => entry(path, Raw::Bool(true)),
    }
}

fn index_of(path: &str) -> Option<usize> {
    keys::find(keys::alias(path).map_or(path, |a| a.key))
}

/// Whether a bare `--path` on the command line is complete: the key is true or false.
pub fn is_switch(path: &str) -> bool {
    index_of(path).is_some_and(|i| KEYS[i].is_switch())
}

/// The entries of a TOML text in the order of their lines, or the line and words of its first error.
pub(super) fn read_toml(text: &str) -> std::result::Result<Vec<Entry>, (usize, String)> {
    let line = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
    let table = DeTable::parse(text)
        .map_err(|e| (e.span().map_or(1, |s| line(s.start)), e.message().replace('\n', ", ")))?;
    let mut entries = Vec::new();
    flatten(table.get_ref(), "", &line, &mut entries);
    entries.sort_by_key(|e| match e.source {
        Source::File { line } => line,
        _ => 0,
    });
    Ok(entries)
}

fn is_section(path: &str) -> bool {
    KEYS.iter().any(|k| k.section == path)
}

/// Adds the values of `table` and of the tables in it, with dotted names.
fn flatten(table: &DeTable<'_>, prefix: &str, line: &dyn Fn(usize) -> usize, entries: &mut Vec<Entry>) {
    for (key, value) in table {
        let name = key.get_ref();
        let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
        match value.get_ref() {
            // An empty table says nothing, but it may be misspelt, or stand where a value belongs.
            DeValue::Table(inner) if !inner.is_empty() || is_section(&path) => {
                flatten(inner, &path, line, entries);
            }
            other => {
                let source = Source::File { line: line(key.span().start) };
                entries.push(Entry { path, raw: raw_value(other), source });
            }
        }
    }
}

/// A TOML value without its span. Integers and floats that are out of range become [`Raw::Other`].
fn raw_value(value: &DeValue<'_>) -> Raw {
    let list = |items: &DeArray<'_>| Raw::List(items.iter().map(|v| raw_value(v.get_ref())).collect());
    match value {
        DeValue::String(s) => Raw::Str(s.to_string()),
        DeValue::Integer(i) => {
            i64::from_str_radix(i.as_str(), i.radix()).map_or(Raw::Other(BEYOND), Raw::Int)
        }
        DeValue::Float(x) => x.as_str().parse().map_or(Raw::Other("number out of range"), Raw::Float),
        DeValue::Boolean(b) => Raw::Bool(*b),
        DeValue::Datetime(_) => Raw::Other("date"),
        DeValue::Array(items) => list(items),
        DeValue::Table(_) => Raw::Other("table"),
    }
}
