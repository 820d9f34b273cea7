//! Comparisons that say where they fail: the first or the worst element, its coordinate and both values.
//!
//! Each returns `Err` with a sentence; a test unwraps it. `shape` only serves the coordinate, but its product
//! must be the length of both slices. tests/harness.rs plants a wrong element and a wrong row in each.

use super::{Real, widen};

/// Signal-to-quantization-noise ratio in dB: `20 log10(|signal| / |signal - other|)`, 2-norms in f64.
///
/// torchao's `compute_error`. Infinite when both are equal; NaN when a value is NaN.
pub fn sqnr_db<T: Real>(signal: &[T], other: &[T]) -> f64 {
    assert_eq!(signal.len(), other.len(), "sqnr_db of {} and {} elements", signal.len(), other.len());
    let (signal, other) = (widen(signal), widen(other));
    let power: f64 = signal.iter().map(|a| a * a).sum();
    let noise: f64 = signal.iter().zip(&other).map(|(a, b)| (a - b) * (a - b)).sum();
    if noise == 0.0 { f64::INFINITY } else { 10.0 * (power / noise).log10() }
}

/// Fails unless `other` is within `least` dB of `signal`.
pub fn sqnr_at_least<T: Real>(signal: &[T], other: &[T], least: f64) -> Result<(), String> {
    same_length(signal.len(), other.len(), &[signal.len()])?;
    let db = sqnr_db(signal, other);
    if db >= least {
        return Ok(());
    }
    Err(format!("SQNR is {db:.2} dB over {} elements, at least {least} wanted", signal.len()))
}

/// Fails at the first element that is not equal (`==`): codes, indices, counts.
pub fn first_mismatch<V: PartialEq + std::fmt::Debug>(
    got: &[V],
    want: &[V],
    shape: &[usize],
) -> Result<(), String> {
    same_length(got.len(), want.len(), shape)?;
    mismatch(got, want, shape, |a, b| a == b)
}

/// Fails at the first f32 whose bits differ; any NaN equals any NaN, and 0 differs from -0.
pub fn same_bits(got: &[f32], want: &[f32], shape: &[usize]) -> Result<(), String> {
    same_length(got.len(), want.len(), shape)?;
    mismatch(got, want, shape, |a, b| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

/// Fails unless `|got - want| <= atol + rtol |want|` for every element, naming the worst.
///
/// NaN equals NaN and an infinity equals itself; anything else that is not finite fails.
pub fn close<T: Real>(got: &[T], want: &[T], shape: &[usize], atol: f64, rtol: f64) -> Result<(), String> {
    let want_wide = widen(want);
    let bounds: Vec<f64> = want_wide.iter().map(|w| atol + rtol * w.abs()).collect();
    within(got, want, &bounds, shape).map_err(|e| format!("{e}\n  (atol {atol:e}, rtol {rtol:e})"))
}

/// Fails unless `|got[i] - want[i]| <= bound[i]` for every element, naming the one that exceeds its bound
/// most.
pub fn within<T: Real>(got: &[T], want: &[T], bound: &[f64], shape: &[usize]) -> Result<(), String> {
    same_length(got.len(), want.len(), shape)?;
    same_length(bound.len(), want.len(), shape)?;
    let (got, want) = (widen(got), widen(want));
    let excess = |i: usize| excess(got[i], want[i], bound[i]);
    let wrong = (0..got.len()).filter(|&i| excess(i) > 1.0).count();
    let Some(worst) = (0..got.len()).max_by(|&a, &b| excess(a).total_cmp(&excess(b))) else {
        return Ok(());
    };
    if wrong == 0 {
        return Ok(());
    }
    let difference = (got[worst] - want[worst]).abs();
    Err(format!(
        "{wrong} of {} elements differ; worst at {:?}: got {:e}, want {:e}, off by {difference:e}, bound {:e}",
        got.len(),
        coordinate(worst, shape),
        got[worst],
        want[worst],
        bound[worst]
    ))
}

/// The spacing of bf16 numbers at `x`: 2^-7 of the power of two below `|x|`; never below the smallest
/// normal's.
pub fn bf16_ulp(x: f64) -> f64 {
    let exponent = (x.abs().max(f32::MIN_POSITIVE as f64)).log2().floor();
    2f64.powf(exponent - 7.0)
}

/// How many times its bound the difference is; infinite for values that cannot be compared.
fn excess(got: f64, want: f64, bound: f64) -> f64 {
    if (got.is_nan() && want.is_nan()) || got == want {
        return 0.0;
    }
    let ratio = (got - want).abs() / bound; // 0/0 cannot occur: the values differ
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

fn mismatch<V: std::fmt::Debug>(
    got: &[V],
    want: &[V],
    shape: &[usize],
    equal: impl Fn(&V, &V) -> bool,
) -> Result<(), String> {
    let wrong = || got.iter().zip(want).enumerate().filter(|(_, (a, b))| !equal(a, b));
    let Some((i, (a, b))) = wrong().next() else {
        return Ok(());
    };
    let (count, all) = (wrong().count(), got.len());
    Err(format!(
        "{count} of {all} elements differ; first at {:?}: got {a:?}, want {b:?}",
        coordinate(i, shape)
    ))
}

fn same_length(got: usize, want: usize, shape: &[usize]) -> Result<(), String> {
    let product: usize = shape.iter().product();
    if got == want && got == product {
        return Ok(());
    }
    Err(format!("lengths differ: got {got} elements, want {want}, shape {shape:?} holds {product}"))
}

/// The index of element `i` along each dimension of `shape`.
fn coordinate(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut at: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&d| {
            let index = i % d;
            i /= d;
            index
        })
        .collect();
    at.reverse();
    at
}
