//! What a logged step leaves behind: a line of JSON in `metrics.jsonl`, and upstream's line for the log.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::{Error, Result};

/// One logged step. As JSON, numbers keep every digit that tells them apart; NaN and infinities become `null`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRecord {
    /// From 1, as upstream counts.
    pub step: u64,
    /// Mean over the tokens of the global batch, in nats.
    pub loss: f64,
    /// Norm of all gradients before the clip.
    pub grad_norm: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// Tokens per second of one rank since the last logged step.
    pub tokens_per_second: f64,
    /// The most device memory that this rank held since the last logged step.
    pub memory_bytes: u64,
    /// For each MoE layer, its number and the tokens each expert got in this step, all ranks together.
    /// A map `{"layers.N": [..]}` in JSON.
    #[serde(serialize_with = "as_layers")]
    pub tokens_per_expert: Vec<(usize, Vec<u32>)>,
    /// Kernel launches in this step.
    pub dispatches: u64,
    /// Command buffers submitted in this step.
    pub submits: u64,
    /// Transfers from host to device in this step.
    pub uploads: u64,
    /// Transfers from device to host in this step.
    pub downloads: u64,
}

fn as_layers<S: Serializer>(layers: &[(usize, Vec<u32>)], s: S) -> std::result::Result<S::Ok, S::Error> {
    let mut map = s.serialize_map(Some(layers.len()))?;
    for (layer, counts) in layers {
        map.serialize_entry(&format!("layers.{layer}"), counts)?;
    }
    map.end()
}

/// What the log line needs besides the record; constant during a run.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Memory of the device, for the share in use; the share is left out when it is unknown.
    pub memory_capacity: Option<u64>,
    /// Floating-point operations that the model needs per token, forward and backward.
    pub flops_per_token: f64,
    /// The device's peak in operations per second; `mfu` is left out when it is unknown.
    pub peak_flops: Option<f64>,
}

/// Upstream's colours (torchtitan, `tools/utils.py`).
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const ORANGE: &str = "\x1b[38;2;180;60;0m";
const TURQUOISE: &str = "\x1b[38;2;54;234;195m";
const BLUE: &str = "\x1b[34m";
const CYAN: &str = "\x1b[36m";
const MAGENTA: &str = "\x1b[35m";
const RESET: &str = "\x1b[39m";

/// The log line of a step: the fields, order and widths of torchtitan's `components/metrics.py` (July 2025),
/// `step:  1  loss:  8.1409  grad_norm:  1.2345  memory:  0.52GiB(0.66%)  tps: 8,912  tflops: 0.67  mfu: 0.07%`.
pub fn log_line(record: &StepRecord, rates: &Rates, color: bool) -> String {
    let r = record;
    let gib = r.memory_bytes as f64 / (1u64 << 30) as f64;
    let share = rates.memory_capacity.filter(|&c| c > 0).map_or(String::new(), |capacity| {
        format!("({:.2}%)", 100.0 * r.memory_bytes as f64 / capacity as f64)
    });
    let flops = rates.flops_per_token * r.tokens_per_second;
    let mut fields = vec![
        (RED, format!("step: {:2}", r.step)),
        (GREEN, format!("loss: {:7.4}", r.loss)),
        (ORANGE, format!("grad_norm: {:7.4}", r.grad_norm)),
        (TURQUOISE, format!("memory: {gib:5.2}GiB{share}")),
        (BLUE, format!("tps: {}", thousands(r.tokens_per_second, 0))),
        (CYAN, format!("tflops: {}", thousands(flops / 1e12, 2))),
    ];
    if let Some(peak) = rates.peak_flops.filter(|&p| p > 0.0) {
        fields.push((MAGENTA, format!("mfu: {:.2}%", 100.0 * flops / peak)));
    }
    let join = |words: Vec<String>| words.join("  ");
    if color {
        join(fields.into_iter().map(|(c, text)| format!("{c}{text}")).collect()) + RESET
    } else {
        join(fields.into_iter().map(|(_, text)| text).collect())
    }
}

/// `x` with so many decimals and commas between groups of three digits, as Python's `{:,}`.
pub fn thousands(x: f64, decimals: usize) -> String {
    group_digits(&format!("{:.decimals$}", if decimals == 0 { x.round_ties_even() } else { x }))
}

/// A number in decimal notation with commas between groups of three digits; NaN and infinities as they are.
pub fn group_digits(text: &str) -> String {
    let digits = text.trim_start_matches('-');
    let whole = digits.split('.').next().unwrap_or(digits);
    if !whole.bytes().all(|b| b.is_ascii_digit()) {
        return text.to_string();
    }
    let mut out = text[..text.len() - digits.len()].to_string();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out + &digits[whole.len()..]
}

/// `<dump_folder>/metrics.jsonl`, which grows by whole lines.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    length: u64,
}

/// More than any line of ours: how far back a torn line is looked for.
const TAIL_BYTES: u64 = 1 << 20;

const HINT: &str = "free some space, or let job.dump_folder name a folder you may write to";

impl MetricsFile {
    /// Opens the file for appending, and makes it and the folder if they are not there. A last line without
    /// its end, which a killed run can leave, is cut off with a warning.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder or the file cannot be made, read or written.
    pub fn open(dump_folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(dump_folder).map_err(|e| Error::io(dump_folder, e, HINT))?;
        let path = dump_folder.join("metrics.jsonl");
        let io = |e| Error::io(&path, e, HINT);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let kept = whole_lines(&mut file, length).map_err(io)?;
        if kept < length {
            log::warn!("{}: cut off {} bytes of an unfinished last line", path.display(), length - kept);
            file.set_len(kept).map_err(io)?;
        }
        Ok(MetricsFile { path, file, length: kept })
    }

    /// Appends `record` as one line, in one write.
    ///
    /// # Errors
    /// [`Error::Io`], the disk full included; the file then ends with the line before.
    pub fn append(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(|e| Error::io(&self.path, e.into(), HINT))?;
        line.push(b'\n');
        if let Err(e) = self.file.write_all(&line) {
            // Best effort: when this fails too, the next open cuts the line off.
            let _ = self.file.set_len(self.length);
            return Err(Error::io(&self.path, e, HINT));
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The length of `file` up to the end of its last whole line; the full length when no line ends near its end.
fn whole_lines(file: &mut File, length: u64) -> std::io::Result<u64> {
    let start = length.saturating_sub(TAIL_BYTES);
    let mut tail = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    Ok(match tail.iter().rposition(|&b| b == b'\n') {
        Some(i) => start + i as u64 + 1,
        None if start == 0 => 0,
        None => length,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> StepRecord {
        StepRecord {
            step: 1,
            loss: f64::from(8.140_925f32),
            grad_norm: 1.5,
            lr: 0.002,
            tokens_per_second: 8_911.5,
            memory_bytes: 558_345_749,
            tokens_per_expert: vec![(1, vec![3, 0]), (11, vec![2, 1]), (3, vec![])],
            dispatches: 400,
            submits: 2,
            uploads: 1,
            downloads: 0,
        }
    }

    #[test]
    fn the_log_line_is_upstreams() {
        let rates = Rates {
            memory_capacity: Some(85 << 30),
            flops_per_token: 75_480_576.0,
            peak_flops: Some(989e12),
        };
        let line = "step:  1  loss:  8.1409  grad_norm:  1.5000  memory:  0.52GiB(0.61%)  tps: 8,912  tflops: 0.67  mfu: 0.07%";
        assert_eq!(log_line(&record(), &rates, false), line);
        let bare = Rates { memory_capacity: None, peak_flops: None, ..rates };
        let large = StepRecord { step: 1000, loss: 123.0, tokens_per_second: 2e9, ..record() };
        let line = "step: 1000  loss: 123.0000  grad_norm:  1.5000  memory:  0.52GiB  tps: 2,000,000,000  tflops: 150,961.15";
        assert_eq!(log_line(&large, &bare, false), line);
    }

    #[test]
    fn colours_change_nothing_else() {
        let rates = Rates { memory_capacity: None, flops_per_token: 1.0, peak_flops: Some(1e6) };
        let mut colored = log_line(&record(), &rates, true);
        assert!(colored.starts_with(RED) && colored.ends_with(RESET));
        for c in [RED, GREEN, ORANGE, TURQUOISE, BLUE, CYAN, MAGENTA, RESET] {
            assert!(colored.contains(c), "{c:?}");
            colored = colored.replace(c, "");
        }
        assert_eq!(colored, log_line(&record(), &rates, false));
    }

    #[test]
    fn thousands_are_pythons() {
        for (x, decimals, want) in [
            (0.0, 0, "0"),
            (999.0, 0, "999"),
            (1000.0, 0, "1,000"),
            (999_999.5, 0, "1,000,000"),
            (-1234.5, 2, "-1,234.50"),
            (12.345, 2, "12.35"),
            (f64::NAN, 0, "NaN"),
            (f64::INFINITY, 2, "inf"),
        ] {
            assert_eq!(thousands(x, decimals), want);
        }
    }

    #[test]
    fn a_line_of_json_is_exact_to_the_byte() {
        let want = "{\"step\":1,\"loss\":8.140925407409668,\"grad_norm\":1.5,\"lr\":0.002,\"tokens_per_second\":8911.5,\
                    \"memory_bytes\":558345749,\"tokens_per_expert\":{\"layers.1\":[3,0],\"layers.11\":[2,1],\"layers.3\":[]},\
                    \"dispatches\":400,\"submits\":2,\"uploads\":1,\"downloads\":0}";
        assert_eq!(serde_json::to_string(&record()).unwrap(), want);
        let nan = serde_json::to_string(&StepRecord { loss: f64::NAN, ..record() }).unwrap();
        assert!(nan.contains("\"loss\":null"), "{nan}");
    }

    #[test]
    fn lines_are_appended_and_a_torn_one_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let line = serde_json::to_string(&record()).unwrap() + "\n";
        for runs in 1..=3 {
            let mut file = MetricsFile::open(&folder).unwrap();
            file.append(&record()).unwrap();
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), line.repeat(runs));
            let mut torn = OpenOptions::new().append(true).open(file.path()).unwrap();
            torn.write_all(&line.as_bytes()[..runs * 7]).unwrap();
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let mut metrics = MetricsFile { path: dir.path().join("metrics.jsonl"), file, length: 0 };
        let error = metrics.append(&record()).unwrap_err().to_string();
        assert!(
            error.contains("metrics.jsonl: No space left") && error.contains("free some space"),
            "{error}"
        );
    }
}
