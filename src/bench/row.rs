//! One measured case as a row: JSON, CSV, Markdown, and two files of them side by side.

use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// One case. Times are of one run of the case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// The adapter's name.
    pub adapter: String,
    /// The driver's name and version.
    pub driver: String,
    /// The adapter runs on the CPU.
    pub software: bool,
    /// The crate's version.
    pub version: String,
    /// What was measured.
    pub op: String,
    /// Its sizes.
    pub shape: String,
    /// How rows fall into groups; `-` without groups.
    pub groups: String,
    /// Of the operands.
    pub dtype: String,
    /// The kernel's name and variant; several are joined by ` + `.
    pub kernel: String,
    /// Kernel launches of one run.
    pub dispatches: u64,
    /// Median over the repetitions, milliseconds; none when the result was wrong.
    pub median_ms: Option<f64>,
    /// The fastest repetition, milliseconds.
    pub min_ms: Option<f64>,
    /// (slowest - fastest) / median of the repetitions.
    pub spread: Option<f64>,
    /// 10^12 useful floating-point operations per second, of those bound by arithmetic.
    pub tflops: Option<f64>,
    /// 10^9 bytes per second, each input byte read once and each output byte written once, of those bound by memory.
    pub gbps: Option<f64>,
    /// Tokens per second, of training steps.
    pub tokens_per_second: Option<f64>,
    /// Milliseconds in which the host records a training step and hands it over, while the device is at the one before.
    pub host_ms: Option<f64>,
    /// Of the best GEMM measured in the same run, or of the adapter's measured copy bandwidth.
    pub share_of_peak: Option<f64>,
    /// The largest difference from the reference as a part of the root mean square of the reference.
    pub error: Option<f64>,
    /// `gpu`: timestamps. `wall`: the host's clock.
    pub clock: String,
    /// Why there are no times: what is wrong with the result.
    pub failed: Option<String>,
}

impl Row {
    /// What tells a case from another.
    fn key(&self) -> [&str; 4] {
        [&self.op, &self.shape, &self.groups, &self.dtype]
    }

    /// As one line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a row has only numbers and words")
    }
}

const COLUMNS: [&str; 15] = [
    "op",
    "shape",
    "groups",
    "dtype",
    "median ms",
    "min ms",
    "spread",
    "TFLOP/s",
    "GB/s",
    "tokens/s",
    "of peak",
    "error",
    "clock",
    "launches",
    "kernel",
];

fn number(x: Option<f64>) -> String {
    match x {
        None => String::new(),
        Some(x) if x != 0.0 && (x.abs() < 1e-3 || x.is_nan()) => format!("{x:.2e}"),
        Some(x) if x.abs() >= 1e5 => format!("{x:.0}"),
        Some(x) => format!("{x:.4}"),
    }
}

fn cells(row: &Row) -> [String; 15] {
    let text = |s: &str| s.to_string();
    let kernel = row.failed.as_ref().map_or_else(|| row.kernel.clone(), |why| format!("WRONG: {why}"));
    [
        text(&row.op),
        text(&row.shape),
        text(&row.groups),
        text(&row.dtype),
        number(row.median_ms),
        number(row.min_ms),
        number(row.spread),
        number(row.tflops),
        number(row.gbps),
        number(row.tokens_per_second),
        number(row.share_of_peak),
        number(row.error),
        text(&row.clock),
        row.dispatches.to_string(),
        kernel,
    ]
}

/// Rows as a table under a line that names the adapter.
pub fn markdown(rows: &[Row]) -> String {
    let mut out = String::new();
    if let Some(row) = rows.first() {
        let software = if row.software { "; SOFTWARE ADAPTER: says nothing about a GPU" } else { "" };
        let _ = writeln!(out, "moe8 {} on {} ({}){software}\n", row.version, row.adapter, row.driver);
    }
    let _ = writeln!(out, "| {} |", COLUMNS.join(" | "));
    let _ = writeln!(out, "|{}", "---|".repeat(COLUMNS.len()));
    for row in rows {
        let _ = writeln!(out, "| {} |", cells(row).join(" | ").replace('\n', " "));
    }
    out
}

/// Rows as comma-separated values with a head line; adapter, driver and whether it is software come first.
pub fn csv(rows: &[Row]) -> String {
    let quote = |s: &str| format!("\"{}\"", s.replace('"', "\"\""));
    let mut out = format!("adapter,driver,software,{}\n", COLUMNS.join(",").replace(' ', "_"));
    for row in rows {
        let software = if row.software { "yes" } else { "no" };
        let head = [row.adapter.as_str(), row.driver.as_str(), software].map(quote).join(",");
        let _ = writeln!(out, "{head},{}", cells(row).map(|c| quote(&c)).join(","));
    }
    out
}

/// Objects of JSON as one array, one object a line.
pub fn file(objects: &[String]) -> String {
    format!("[\n{}\n]\n", objects.join(",\n"))
}

/// Two sets of rows side by side: times, and how many times as fast the second one is.
pub fn compare(a: &[Row], b: &[Row]) -> String {
    let name = |rows: &[Row]| {
        rows.first().map_or(String::new(), |r| format!("{} ({}), moe8 {}", r.adapter, r.driver, r.version))
    };
    let mut out = format!("a: {}\nb: {}\n\n", name(a), name(b));
    out.push_str("| op | shape | groups | dtype | a ms | b ms | a/b | a rate | b rate |\n|---|---|---|---|---|---|---|---|---|\n");
    let mut lines: Vec<(Option<&Row>, Option<&Row>)> =
        a.iter().map(|r| (Some(r), b.iter().find(|o| o.key() == r.key()))).collect();
    lines.extend(b.iter().filter(|r| !a.iter().any(|o| o.key() == r.key())).map(|r| (None, Some(r))));
    for (a, b) in lines {
        let Some(one) = a.or(b) else { continue };
        let ms = |r: Option<&Row>| r.and_then(|r| r.median_ms);
        let ratio = ms(a).zip(ms(b)).map(|(a, b)| a / b);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} |",
            one.key().join(" | "),
            side(a, ms(a)),
            side(b, ms(b)),
            number(ratio),
            rate(a),
            rate(b)
        );
    }
    out
}

fn side(row: Option<&Row>, ms: Option<f64>) -> String {
    match row {
        None => "-".into(),
        Some(row) if row.failed.is_some() => "WRONG".into(),
        Some(_) => number(ms),
    }
}

fn rate(row: Option<&Row>) -> String {
    let Some(row) = row else { return "-".into() };
    let rates = [(row.tokens_per_second, "tokens/s"), (row.tflops, "TFLOP/s"), (row.gbps, "GB/s")];
    let first = rates.iter().find_map(|(x, unit)| x.map(|x| format!("{} {unit}", number(Some(x)))));
    first.unwrap_or_else(|| "-".into())
}
