//! `moe8 config`: the resolved configuration as TOML, and the list of keys.

use std::fmt::Write as _;

use super::keys::{ALIASES, Policy};
use super::source::Source;
use super::table::{Config, KEYS};

impl Config {
    /// The configuration as TOML that [`Config::from_toml`] reads back to the same values. Each line says
    /// where its value came from and whether it has an effect; values that follow from others stand in
    /// comments, since they would not follow any more when written.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        let mut section = "";
        for (key, source) in KEYS.iter().zip(&self.sources.0) {
            if key.section != section {
                section = key.section;
                let gap = if out.is_empty() { "" } else { "\n" };
                let _ = writeln!(out, "{gap}[{section}]");
            }
            let mark = if matches!(source, Source::Derived(_)) { "# " } else { "" };
            let line = format!("{mark}{} = {}", key.name, (key.get)(self));
            let _ = writeln!(out, "{line:44} # {source}{}", effect(key.policy));
        }
        out
    }
}

/// What to add to a key's source in a listing.
fn effect(policy: Policy) -> String {
    match policy {
        Policy::Honoured => String::new(),
        Policy::Warned { .. } => "; no effect".into(),
        Policy::Refused { only, .. } => format!("; only {only}"),
        Policy::PartOf(master) => format!("; with {master}"),
    }
}

/// The table of keys in words: name, kind, default, meaning, and what moe8 does with it.
pub fn list_keys() -> String {
    let config = Config::default();
    let mut out = String::new();
    for key in KEYS {
        let _ = writeln!(out, "{}: {}; default {}", key.path(), key.expected(), (key.get)(&config));
        let _ = writeln!(out, "    {}", key.doc.trim());
        let _ = match key.policy {
            Policy::Honoured => Ok(()),
            Policy::Warned { why, .. } => writeln!(out, "    No effect: {why}."),
            Policy::Refused { only, hint } => writeln!(out, "    Only {only}: {hint}."),
            Policy::PartOf(master) => writeln!(out, "    Used with {master}."),
        };
    }
    let _ = writeln!(out, "\nOther names:");
    for alias in ALIASES {
        let _ = writeln!(out, "    {} = {}", alias.name, alias.key);
    }
    out
}
