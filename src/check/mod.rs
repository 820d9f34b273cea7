//! The kernels' own test, as the program runs it on the adapter at hand: [`gemm()`] compares every matrix kernel that the
//! adapter can run with the f64 product over a table of ragged cases, [`attention()`] does so for attention and its gradients,
//! [`time()`] measures products, [`tune()`] finds the fastest kernel of each class of calls of ops that have several.

mod attention;
mod data;
mod gemm;
mod sums;
mod time;
mod trial;
mod tune;

pub use attention::attention;
pub use gemm::{Outcome, gemm};
pub use time::{Timing, time};
pub use trial::{AnyKernel, Subject, Trial};
pub use tune::{Progress, tune};

use crate::gpu::Gpu;
use std::collections::BTreeMap;

/// The kernels of `op` that were launched since there were as many launches as `before`, as `--kernel` names them.
fn launched(gpu: &Gpu, before: &BTreeMap<&'static str, u64>, op: &str) -> String {
    let now = gpu.launches();
    let ran = |end: &str| {
        let stem = format!("{op}{end}.");
        now.iter().any(|(name, n)| name.starts_with(&stem) && before.get(name).is_none_or(|b| b < n))
    };
    let all = [("", "scalar"), ("_tiled", "tiled"), ("_narrow", "narrow"), ("_coop", "coop")];
    all.iter().filter(|(end, _)| ran(end)).map(|(_, name)| *name).collect::<Vec<_>>().join(" + ")
}
