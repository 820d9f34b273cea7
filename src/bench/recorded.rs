//! Group sizes as a run left them in its `metrics.jsonl`.

use super::data::{LARGEST, Split};
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

const HINT: &str = "--groups takes uniform, ragged, or the metrics.jsonl of a run of a model with experts";

/// The groups of all MoE layers in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// File, step and run.
    pub source: String,
    /// The tokens per expert of each layer, under its name.
    pub layers: Vec<Split>,
}

impl Recorded {
    /// The last step of a file. Runs append to it and count their steps from 1, so this is a step of the last run.
    ///
    /// # Errors
    /// No such file, or a last line that is no step of a model with experts.
    pub fn read(path: &Path) -> Result<Recorded> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e, HINT))?;
        let wrong = |what: String| Error::user(format!("{}: {what}", path.display()), HINT);
        let lines: Vec<(usize, &str)> = text.lines().enumerate().filter(|l| !l.1.trim().is_empty()).collect();
        let (number, last) = *lines.last().ok_or_else(|| wrong("it is empty".into()))?;
        let line = number + 1;
        let last: Value =
            serde_json::from_str(last).map_err(|e| wrong(format!("line {line} is no step of a run: {e}")))?;
        let step = step_of(&last).ok_or_else(|| wrong(format!("line {line} has no step")))?;
        let runs = count_runs(lines.iter().map(|l| l.1));
        let source = format!("{}, step {step} of run {runs} of {runs}", path.display());
        let layers = last["tokens_per_expert"].as_object().filter(|l| !l.is_empty());
        let layers = layers
            .ok_or_else(|| Error::user(format!("{source}: no tokens_per_expert, so no experts"), HINT))?
            .iter()
            .map(|(name, counts)| {
                let sizes =
                    sizes(counts).map_err(|what| Error::user(format!("{source}, {name}: {what}"), HINT));
                Ok(Split { name: name.clone(), sizes: sizes? })
            })
            .collect::<Result<_>>()?;
        Ok(Recorded { source, layers })
    }

    /// Whether a shape (`[M, ..]`, with E in the last of four places) has the rows and groups of every layer.
    ///
    /// # Errors
    /// It has not: the two contradict each other.
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        let fits = |l: &Split| shape[0] == l.rows() && shape.get(3).is_none_or(|e| *e == l.sizes.len());
        let Some(layer) = self.layers.iter().find(|l| !fits(l)) else { return Ok(()) };
        let name = |shape: &[usize]| shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
        let mut right = shape.to_vec();
        right[0] = layer.rows();
        if let Some(groups) = right.get_mut(3) {
            *groups = layer.sizes.len();
        }
        let asked = shape.get(3).map_or(String::new(), |e| format!(" in {e} groups"));
        let what = format!(
            "--shape {} has {} rows{asked}, but {} of {} has {} rows in {} groups",
            name(shape),
            shape[0],
            layer.name,
            self.source,
            layer.rows(),
            layer.sizes.len()
        );
        let alike =
            self.layers.iter().all(|l| (l.rows(), l.sizes.len()) == (layer.rows(), layer.sizes.len()));
        let hint = match alike {
            true => format!("write --shape {}, or choose --groups uniform or ragged", name(&right)),
            false => "its layers differ in size, so no shape is that of all: leave out --shape".into(),
        };
        Err(Error::user(what, hint))
    }

    /// What is replayed, and which numbers of a default shape it replaces.
    pub fn describe(&self) -> String {
        let layer = |l: &Split| format!("{} {} rows in {} groups", l.name, l.rows(), l.sizes.len());
        let layers: Vec<String> = self.layers.iter().map(layer).collect();
        format!("groups of {}: {} (they set M and E of the shape)", self.source, layers.join(", "))
    }
}

fn step_of(line: &Value) -> Option<u64> {
    line["step"].as_u64()
}

/// Runs in a file: one begins with every step that is not after the one before. Damaged lines of old runs harm nobody.
fn count_runs<'a>(lines: impl Iterator<Item = &'a str>) -> usize {
    let steps = lines.filter_map(|line| serde_json::from_str(line).ok().as_ref().and_then(step_of));
    let mut before = u64::MAX;
    steps.filter(|step| std::mem::replace(&mut before, *step) >= *step).count()
}

/// The sizes of a layer's groups, or what is wrong with them.
fn sizes(counts: &Value) -> std::result::Result<Vec<usize>, String> {
    let counts = counts.as_array().ok_or_else(|| format!("{counts} is no list of tokens per expert"))?;
    let size = |(expert, n): (usize, &Value)| {
        let size = n.as_u64().map(|n| n as usize).filter(|n| *n <= LARGEST);
        size.ok_or_else(|| {
            format!("expert {expert} has {n} tokens; a whole number from 0 to {LARGEST} is needed")
        })
    };
    let sizes = counts.iter().enumerate().map(size).collect::<std::result::Result<Vec<_>, _>>()?;
    let rows: usize = sizes.iter().sum();
    match rows {
        1..=LARGEST => Ok(sizes),
        _ => Err(format!("its experts have {rows} tokens in all; 1 to {LARGEST} are needed")),
    }
}
