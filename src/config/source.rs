//! From a TOML file and the command line to a [`Config`]: later sources win, every value keeps where it
//! came from, and nothing that moe8 cannot honour passes in silence.

use std::fmt;
use std::path::Path;

use super::keys::{self, Policy};
use super::read::{Entry, read_override, read_toml};
use super::table::{Config, KEYS};
use super::validate::range_hint;
use super::value::Raw;
use crate::{Error, Result};

/// Where a value came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    #[default]
    Default,
    /// `model.flavor`.
    Flavor,
    /// Another value, which replaces it unless it is set: says which.
    Derived(&'static str),
    /// The TOML file.
    File {
        /// Line number, from 1.
        line: usize,
    },
    /// An override on the command line.
    CommandLine,
}

impl Source {
    /// Whether the user set the value.
    pub fn is_user(self) -> bool {
        matches!(self, Source::File { .. } | Source::CommandLine)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Default => f.write_str("default"),
            Source::Flavor => f.write_str("flavor"),
            Source::Derived(from) => f.write_str(from),
            Source::File { line } => write!(f, "file, line {line}"),
            Source::CommandLine => f.write_str("command line"),
        }
    }
}

/// The source of each key, in the order of [`KEYS`].
#[derive(Clone, Debug, PartialEq)]
pub struct Sources(pub(super) Vec<Source>);

impl Default for Sources {
    fn default() -> Self {
        Sources(vec![Source::Default; KEYS.len()])
    }
}

impl Sources {
    /// The source of the key `path` (`section.name`); panics on a name that is no key.
    pub fn of(&self, path: &str) -> Source {
        self.0[keys::find(path).unwrap_or_else(|| panic!("no configuration key {path}"))]
    }

    pub(super) fn set(&mut self, path: &str, source: Source) {
        self.0[keys::find(path).unwrap_or_else(|| panic!("no configuration key {path}"))] = source;
    }
}

/// What [`Config::load`] gives.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration. Not yet checked: see [`Config::validate`].
    pub config: Config,
    /// Sentences for the user: keys without effect, other names used.
    pub warnings: Vec<String>,
}

impl Config {
    /// Reads `file`, if any, then `overrides`, each `section.key=value` or, for a switch, `section.key`,
    /// with or without leading dashes. Unknown keys, values of the wrong kind and keys that moe8 cannot
    /// honour are errors; keys without effect are in [`Loaded::warnings`].
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Loaded> {
        match file {
            None => Self::from_toml("", "the configuration", overrides),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|e| {
                    Error::io(
                        path,
                        e,
                        "name an existing TOML file with --config, such as configs/quickstart.toml",
                    )
                })?;
                Self::from_toml(&text, &path.display().to_string(), overrides)
            }
        }
    }

    /// As [`Config::load`], from TOML text; `name` stands for the file in errors.
    pub fn from_toml(text: &str, name: &str, overrides: &[String]) -> Result<Loaded> {
        let mut entries = read_toml(text).map_err(|(line, what)| {
            Error::user(format!("{name}:{line}: {what}"), "see https://toml.io for the syntax")
        })?;
        for text in overrides {
            entries.push(read_override(text)?);
        }
        let mut loaded = Loaded { config: Config::default(), warnings: Vec::new() };
        let indices = resolve(&entries, name, &mut loaded.warnings)?;
        // The flavour sets all of model.args, so it comes first.
        let flavor = keys::find("model.flavor");
        let (first, rest): (Vec<_>, Vec<_>) =
            entries.iter().zip(indices).partition(|(_, i)| Some(*i) == flavor);
        for (entry, index) in first {
            apply(&mut loaded.config, entry, index, name)?;
        }
        loaded.config.use_flavor();
        for (entry, index) in rest {
            apply(&mut loaded.config, entry, index, name)?;
        }
        loaded.config.derive();
        check_policies(&mut loaded)?;
        loaded.warnings.extend(loaded.config.caveats());
        Ok(loaded)
    }
}

/// `name:line: ` for a file's entry, `--` for the command line's.
fn place(entry: &Entry, file: &str) -> String {
    match entry.source {
        Source::File { line } => format!("{file}:{line}: {}", entry.path),
        _ => format!("--{}", entry.path),
    }
}

/// The index in [`KEYS`] of each entry. Two names of one key with two values, in one source, are an error:
/// nobody could say which is meant.
fn resolve(entries: &[Entry], file: &str, warnings: &mut Vec<String>) -> Result<Vec<usize>> {
    let mut indices = Vec::with_capacity(entries.len());
    for (n, entry) in entries.iter().enumerate() {
        let alias = keys::alias(&entry.path);
        let path = alias.map_or(entry.path.as_str(), |a| a.key);
        let index = keys::find(path).ok_or_else(|| {
            let what = format!("{}: unknown key", place(entry, file));
            Error::user(what, keys::advice(&entry.path))
        })?;
        let other = (0..n).find(|&m| {
            let before = &entries[m];
            indices[m] == index
                && before.path != entry.path
                && before.source.is_file() == entry.source.is_file()
                && typed(index, &before.raw) != typed(index, &entry.raw)
        });
        if let Some(m) = other {
            let (a, b) = (&entries[m], entry);
            let what = format!("{} = {}, but {} = {}", place(a, file), a.raw, place(b, file), b.raw);
            return Err(Error::user(what, "they are two names of one key: keep one of them"));
        }
        if let Some(note) = alias.and_then(|a| a.note) {
            warnings.push(format!("{}: {note}", place(entry, file)));
        }
        indices.push(index);
    }
    Ok(indices)
}

impl Source {
    fn is_file(self) -> bool {
        matches!(self, Source::File { .. })
    }
}

/// `raw` as the key's type prints it, so that `"a,b"` equals `["a", "b"]`; none if it does not fit.
fn typed(index: usize, raw: &Raw) -> Option<String> {
    let mut scratch = Config::default();
    (KEYS[index].set)(&mut scratch, raw).then(|| (KEYS[index].get)(&scratch))
}

/// Values that upstream has and moe8 does not: key, value, what to do.
const INSTEAD: &[(&str, &str, &str)] = &[
    ("training.dataset", "c4", DATASETS),
    ("training.dataset", "c4_test", DATASETS),
    ("optimizer.name", "Adam", "moe8 has AdamW only; with optimizer.weight_decay=0 it is Adam"),
    ("model.name", "llama3", "moe8 trains llama4 only: set model.name = \"llama4\""),
    ("model.name", "deepseek_v3", "moe8 trains llama4 only: set model.name = \"llama4\""),
    ("training.mixed_precision_param", "float16", "use \"bfloat16\" or \"float32\""),
];
const DATASETS: &str = "moe8 downloads no data: use \"synthetic\" (embedded, needs no file), or \"jsonl\" (one \
     {\"text\": ...} a line, the format of c4's files), \"text\" or \"tokens\" with training.dataset_path";

/// Sets one value.
fn apply(config: &mut Config, entry: &Entry, index: usize, file: &str) -> Result<()> {
    let key = &KEYS[index];
    if (key.set)(config, &entry.raw) {
        config.sources.0[index] = entry.source;
        return Ok(());
    }
    let word = entry.raw.text().unwrap_or_default();
    let instead = INSTEAD.iter().find(|(path, value, _)| *path == key.path() && *value == word);
    let hint = match (instead, keys::nearest(word, (key.choices)())) {
        (Some((_, _, hint)), _) => (*hint).to_string(),
        (None, Some(choice)) => format!("did you mean {choice:?}?"),
        (None, None) => match key.limits().filter(|_| entry.raw.is_integer()) {
            Some((lo, hi)) => range_hint(&key.path(), lo, hi),
            None => key.doc.trim().to_string(),
        },
    };
    let what = format!("{} = {}: expected {}", place(entry, file), entry.raw, key.expected());
    Err(Error::user(what, hint))
}

/// Errors and warnings for keys that the user set and moe8 cannot honour.
fn check_policies(loaded: &mut Loaded) -> Result<()> {
    let plain = Config::default();
    let Loaded { config, warnings } = loaded;
    for (key, source) in KEYS.iter().zip(&config.sources.0) {
        let (path, value) = (key.path(), (key.get)(config));
        match key.policy {
            _ if !source.is_user() => {}
            Policy::Refused { only, hint } if value != only => {
                return Err(Error::user(
                    format!("{path} = {value} ({source}): moe8 takes only {only}"),
                    hint,
                ));
            }
            Policy::Warned { harmless, why } if value != harmless => {
                warnings.push(format!("{path} = {value} ({source}) has no effect: {why}"));
            }
            // In a file such keys stand ready for their switch; on the command line they are meant.
            Policy::PartOf(master) if *source == Source::CommandLine && value != (key.get)(&plain) => {
                let master_key = &KEYS[keys::find(master).expect("the table is sound: tested")];
                let is = (master_key.get)(config);
                if is == (master_key.get)(&plain) {
                    warnings.push(format!("{path} = {value} ({source}) has no effect while {master} = {is}"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}
