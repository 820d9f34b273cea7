//! Reading a file of results, and saying what another file is.

use super::row::Row;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

const HINT: &str =
    "compare takes two files that `moe8 bench --output FILE` or `moe8 bench --json` wrote, without --profile";

/// How other outputs of this program begin.
const BEGINNINGS: [(&str, &str); 3] = [
    ("adapter,driver,software,", "is a sheet of `moe8 bench --csv`"),
    ("kernel,variant,workgroups,", "is a sheet of `moe8 bench step --profile --csv`"),
    ("moe8 ", "is a table of `moe8 bench`"),
];

/// Keys by which other JSON of this program is known.
const KEYS: [(&[&str], &str); 3] = [
    (&["kernel", "variant", "launches"], "is a profile of `moe8 bench step --profile`"),
    (&["step", "loss"], "is the metrics.jsonl of a training run"),
    (&["fastest", "rejected"], "is what `moe8 tune` found"),
];

/// Rows from a file: a JSON array, or one object a line.
///
/// # Errors
/// No such file, or other contents: which, as far as they are known.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    let other = |what: String| Error::user(format!("{} {what}", path.display()), HINT);
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e, HINT))?;
    let text = String::from_utf8(bytes).map_err(|_| other("is no text".into()))?;
    if text.trim().is_empty() {
        return Err(other("is empty".into()));
    }
    if let Some((_, what)) = BEGINNINGS.iter().find(|(beginning, _)| text.starts_with(beginning)) {
        return Err(other((*what).into()));
    }
    let values = values(&text).map_err(|e| match looks_like_rows(&text) {
        true => other(format!("is damaged or cut off: not JSON to its end ({e})")),
        false => other("is none of `moe8 bench --output`: no JSON".into()),
    })?;
    if values.is_empty() {
        return Err(other("has no rows".into()));
    }
    let of = values.len();
    let rows = values.into_iter().enumerate().map(|(i, value)| {
        let known = KEYS.iter().find(|(keys, _)| keys.iter().all(|key| value.get(key).is_some()));
        let row = serde_json::from_value::<Row>(value.clone()).map_err(|e| e.to_string());
        let row = row.and_then(|row| if row.op.is_empty() { Err("it has no op".into()) } else { Ok(row) });
        row.map_err(|why| match known {
            Some((_, what)) => other((*what).into()),
            None => other(format!("is JSON, but its row {} of {of} is none of `moe8 bench`: {why}", i + 1)),
        })
    });
    rows.collect()
}

/// Whether a text begins as [`read`] wants it, so that where a parser stopped says something.
fn looks_like_rows(text: &str) -> bool {
    let text = text.trim_start();
    text.strip_prefix('[').unwrap_or(text).trim_start().starts_with('{')
}

/// The objects of a JSON array, or of lines.
fn values(text: &str) -> serde_json::Result<Vec<Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Array(all)) => Ok(all),
        Ok(one) => Ok(vec![one]),
        Err(_) if text.trim_start().starts_with('{') => {
            text.lines().filter(|l| !l.trim().is_empty()).map(serde_json::from_str).collect()
        }
        Err(e) => Err(e),
    }
}
