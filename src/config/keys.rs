//! The table of keys, seen from outside: look-up by name, other names, nearest name.
//!
//! The rows themselves are in [`super::table`], where each also makes the struct field.

use super::table::{Config, KEYS};
use super::validate::{LARGEST, range};
use super::value::{COUNT, Raw};

/// What moe8 does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Does what it says.
    Honoured,
    /// Changes nothing that moe8 computes; a value other than `harmless` is warned of, with `why`.
    Warned {
        /// The value, as TOML, that needs no warning.
        harmless: &'static str,
        /// Why it has no effect, or what happens instead.
        why: &'static str,
    },
    /// Would change what is computed, and moe8 cannot do it: a value other than `only` is an error.
    Refused {
        /// The one value, as TOML, that moe8 accepts.
        only: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// Means something only when the named key is not at its default.
    PartOf(&'static str),
}

/// One configuration key. The functions reach the field of [`Config`] that the same table row declares.
pub struct Key {
    /// Section with dots: `training`, `model.args`.
    pub section: &'static str,
    /// Name within the section.
    pub name: &'static str,
    /// What it does, one or more sentences.
    pub doc: &'static str,
    /// What moe8 does with it.
    pub policy: Policy,
    /// What may be written, in words.
    pub kind: fn() -> String,
    /// The words that may be written, when they are a fixed set.
    pub choices: fn() -> &'static [&'static str],
    /// The value in a configuration, as TOML.
    pub get: fn(&Config) -> String,
    /// Sets the value; false where it is not of this key's kind.
    pub set: fn(&mut Config, &Raw) -> bool,
}

impl Key {
    /// `section.name`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }

    /// The least and the most that an integer without a sign may be; none for other kinds.
    pub(super) fn limits(&self) -> Option<(usize, usize)> {
        let count = (self.kind)().starts_with(COUNT);
        count.then(|| range(&self.path()).unwrap_or((0, LARGEST)))
    }

    /// What may be written, in words, with the limits of a number that has some.
    pub fn expected(&self) -> String {
        let limits = match self.limits() {
            None | Some((0, LARGEST)) => COUNT.to_string(),
            Some((lo, LARGEST)) => format!("a whole number >= {lo}"),
            Some((lo, hi)) => format!("a whole number from {lo} to {hi}"),
        };
        (self.kind)().replace(COUNT, &limits)
    }

    /// Whether a bare `--section.name` on the command line is complete.
    pub fn is_switch(&self) -> bool {
        (self.kind)() == <bool as super::value::Setting>::kind()
    }
}

/// The index in [`KEYS`] of the key named `path`, exactly.
pub fn find(path: &str) -> Option<usize> {
    let (section, name) = path.rsplit_once('.')?;
    KEYS.iter().position(|k| k.section == section && k.name == name)
}

/// Another name for a key.
pub struct Alias {
    /// The other name, `section.name`.
    pub name: &'static str,
    /// The key's own name.
    pub key: &'static str,
    /// What to tell the user, if they could be surprised.
    pub note: Option<&'static str>,
}

/// Names that torchtitan used before or after July 2025, or by mistake.
pub const ALIASES: &[Alias] = &[
    Alias {
        name: "float8.moe_fqns",
        key: "float8.moe_fqns_prototype",
        note: Some(
            "torchtitan of July 2025 ignored this spelling without a word; moe8 reads it as moe_fqns_prototype",
        ),
    },
    Alias { name: "training.batch_size", key: "training.local_batch_size", note: None },
    Alias { name: "lr_scheduler.min_lr_factor", key: "lr_scheduler.lr_min", note: None },
    Alias { name: "checkpoint.enable", key: "checkpoint.enable_checkpoint", note: None },
    Alias { name: "checkpoint.model_weights_only", key: "checkpoint.last_save_model_only", note: None },
    Alias { name: "compile.enable", key: "training.compile", note: None },
];

/// The alias named `path`.
pub fn alias(path: &str) -> Option<&'static Alias> {
    ALIASES.iter().find(|a| a.name == path)
}

/// Sections and keys of torchtitan that moe8 does not have, and what to do instead.
const ABSENT: &[(&str, &str)] = &[
    ("job.config_file", "name the file on the command line: --config FILE or --job.config_file=FILE"),
    ("mx", "moe8 has no MXFP8 yet: remove the section; float8.recipe_name has the recipes there are"),
    ("comm", "remove the section: moe8 has no NCCL time-outs or flight recorder"),
    ("memory_estimation", "remove the section: moe8 prints the memory it needs at every start"),
    ("fault_tolerance", "remove the section: moe8 has no TorchFT"),
    ("experimental", "remove the section: moe8 loads no Python modules"),
    ("validation", "remove the section: moe8 does not run a validation set yet"),
];

/// What to do about `path`, which is no key: the reason why moe8 lacks it, else the nearest name.
pub fn advice(path: &str) -> String {
    let absent = ABSENT.iter().find(|(name, _)| path == *name || path.starts_with(&format!("{name}.")));
    if let Some((_, hint)) = absent {
        return (*hint).to_string();
    }
    let names = KEYS.iter().map(Key::path).chain(ALIASES.iter().map(|a| a.name.to_string()));
    // A known name in the wrong section comes first; then the nearest spelling of the whole.
    let last = path.rsplit('.').next().unwrap_or(path);
    let moved = KEYS.iter().find(|k| k.name == last).map(Key::path);
    match moved.or_else(|| nearest(path, names)) {
        Some(name) => format!("did you mean {name}? `moe8 config --keys` lists all keys"),
        None => "`moe8 config --keys` lists all keys".to_string(),
    }
}

/// The candidate most like `word`, if any is like it at all (Jaro-Winkler similarity over 0.8).
pub fn nearest<S: AsRef<str>>(word: &str, candidates: impl IntoIterator<Item = S>) -> Option<String> {
    let mut best: Option<(f64, String)> = None;
    for c in candidates {
        let score = strsim::jaro_winkler(word, c.as_ref());
        if score > best.as_ref().map_or(0.8, |b| b.0) {
            best = Some((score, c.as_ref().to_string()));
        }
    }
    best.map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        let config = Config::default();
        for (i, key) in KEYS.iter().enumerate() {
            let path = key.path();
            assert_eq!(find(&path), Some(i), "{path} stands twice");
            assert!(!key.doc.trim().is_empty(), "{path} has no doc");
            let value = (key.get)(&config);
            match key.policy {
                Policy::PartOf(master) => assert!(find(master).is_some(), "{path}: no key {master}"),
                // Otherwise the default itself could not be used.
                Policy::Refused { only, .. } => assert_eq!(value, only, "{path}"),
                Policy::Warned { harmless, .. } => {
                    let raw =
                        super::super::read::read_toml(&format!("x = {harmless}")).unwrap().remove(0).raw;
                    assert!((key.set)(&mut config.clone(), &raw), "{path}: harmless = {harmless}");
                }
                Policy::Honoured => {}
            }
        }
        for a in ALIASES {
            assert!(find(a.key).is_some() && find(a.name).is_none(), "{}", a.name);
        }
    }

    #[test]
    fn advice_names_the_nearest_key() {
        for (wrong, right) in [
            ("training.step", "training.steps"),
            ("training.seqlen", "training.seq_len"),
            ("float8.recipe", "float8.recipe_name"),
            ("optimiser.lr", "optimizer.lr"),
            ("training.lr", "optimizer.lr"),
            ("model.args.topk", "model.args.top_k"),
            ("model.dim", "model.args.dim"),
        ] {
            let text = advice(wrong);
            assert!(text.contains(&format!("did you mean {right}?")), "{wrong}: {text}");
        }
        assert!(advice("mx.recipe_name").contains("no MXFP8"));
        assert!(advice("qqqqqq").starts_with("`moe8 config --keys`"));
    }
}
