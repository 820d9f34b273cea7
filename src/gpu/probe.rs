//! What can only be found out by trying, when an adapter is opened.
//!
//! Matrix units: their kernels are tested through naga and in emulation for adapters that nobody here has; what is left is what
//! the adapter's driver makes of a fragment: a text that does not compile, another order of elements, lost subnormal halves or
//! subgroups of another width leave the adapter without matrix units, with a warning. Where subgroups come in two widths (AMD's
//! have 32 or 64 lanes), the probe tells which one the driver takes.
//!
//! Halves: whether `pack2x16float` rounds to nearest even and keeps subnormals, which WGSL leaves open and drivers do differently.

use super::{Access, Binding, Caps, Fragments, Gpu, Kernel, MatrixUnits, Variant};
use crate::{Error, Result};
use half::f16;

crate::params! { struct Probe { rows: u32 } }
crate::params! { struct Pairs { count: u32 } }

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/fragments.wgsl"), include_str!("../../shaders/lib/probe.wgsl"));
const PROBE: Kernel = Kernel { name: "probe", text: TEXT, entry: "main" };
const HALVES_TEXT: &str = include_str!("../../shaders/lib/probe_halves.wgsl");
const HALVES: Kernel = Kernel { name: "probe_halves", text: HALVES_TEXT, entry: "main" };

/// Subgroups of the workgroup that multiplies.
const SUBGROUPS: usize = 2;

/// The kernels, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let fragments = [(MatrixUnits::Coop8, 32), (MatrixUnits::Coop16, 32), (MatrixUnits::Coop16, 64)];
    let mut all: Vec<_> = fragments.map(|(units, lanes)| (PROBE, variant(units, lanes))).into();
    all.push((HALVES, Variant::new()));
    all
}

fn variant(units: MatrixUnits, lanes: u32) -> Variant {
    Variant::new().fragments(Fragments { units, lanes, vary: false })
}

/// Uploads `inputs`, runs the kernel, and gives the `size` bytes that it writes.
fn launch<P: super::Params>(
    gpu: &Gpu,
    (kernel, variant): (Kernel, Variant),
    params: &P,
    inputs: &[Vec<u8>],
    (size, groups): (u64, u32),
) -> Result<Vec<u8>> {
    let mut bindings = Vec::new();
    for bytes in inputs {
        let buffer = gpu.alloc("probe operand", bytes.len() as u64)?;
        gpu.upload(&buffer, 0, bytes)?;
        bindings.push(Binding { buffer, offset: 0, size: bytes.len() as u64, access: Access::Read });
    }
    let out = gpu.alloc("probe results", size)?;
    bindings.push(Binding { buffer: out.clone(), offset: 0, size, access: Access::Write });
    gpu.dispatch(&kernel, &variant, params, &bindings, groups)?;
    gpu.download(&out, 0, size)
}

/// The matrix units that are to be tried: all but those of 16x16x16 that subgroups of 32 lanes share, on which the kernels have run.
pub(super) fn unproven(caps: &Caps) -> Option<MatrixUnits> {
    let usual = caps.subgroup_max == 32 && !caps.subgroups_vary;
    caps.coop.filter(|units| !usual || *units != MatrixUnits::Coop16)
}

/// Multiplies a few numbers on these matrix units of `gpu`, in subgroups of `lanes`.
///
/// # Errors
/// What the device reported, or what was wrong.
pub(super) fn multiply(gpu: &Gpu, units: MatrixUnits, lanes: u32) -> Result<()> {
    let edge = units.edge() as usize;
    let bytes = operands(edge).map(|x| x.iter().flat_map(|h| h.to_le_bytes()).collect::<Vec<u8>>());
    let want = expected(edge, lanes);
    let (kernel, params) = ((PROBE, variant(units, lanes)), Probe { rows: units.edge() });
    let got = launch(gpu, kernel, &params, &bytes, (4 * want.len() as u64, 1))?;
    let got: Vec<f32> = got.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    judge(&got, &want).map_err(|why| Error::gpu(why, "--no-coop does without matrix units"))
}

/// A and B of each subgroup: small whole numbers, those of every second column of B so far down that halves are subnormal there.
fn operands(edge: usize) -> [Vec<f16>; 2] {
    let whole = |i: usize, step: usize| ((i * step + i / edge * 3) % 7) as f32 - 3.0;
    let count = SUBGROUPS * edge * edge;
    let a = (0..count).map(|i| f16::from_f32(whole(i, 5)));
    let b = (0..count).map(|i| f16::from_f32(whole(i, 3) * if i % 2 == 0 { 1.0 } else { 2f32.powi(-16) }));
    [a.collect(), b.collect()]
}

/// What the kernel is to write: products, and four times for each subgroup how many lanes it has.
fn expected(edge: usize, lanes: u32) -> Vec<f32> {
    let [a, b] = operands(edge).map(|x| x.iter().map(|h| h.to_f32()).collect::<Vec<_>>());
    let mut all = Vec::new();
    for (a, b) in a.chunks(edge * edge).zip(b.chunks(edge * edge)) {
        let product = |of: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
            let cell = |i: usize| (0..edge).map(|k| a[i / edge * edge + k] * of(k, i % edge)).sum();
            (0..edge * edge).map(cell).collect()
        };
        let across = product(&|k, n| b[n * edge + k]);
        let along = product(&|k, n| b[k * edge + n]);
        all.extend(&across);
        all.extend(across.iter().zip(along).map(|(c, d)| 2.0 * c + d));
    }
    all.extend([lanes as f32; 4 * SUBGROUPS]);
    all
}

/// Compares; a wrong width is told first, since it makes the products wrong too.
fn judge(got: &[f32], want: &[f32]) -> std::result::Result<(), String> {
    let products = want.len() - 4 * SUBGROUPS;
    let differs = |range: std::ops::Range<usize>| range.into_iter().find(|&i| want[i] != got[i]);
    if let Some(at) = differs(products..want.len()) {
        return Err(format!("its subgroups have {} lanes, not {}", got[at], want[at]));
    }
    match differs(0..products) {
        None => Ok(()),
        Some(at) => Err(format!("value {at} of the first products is {}, not {}", got[at], want[at])),
    }
}

/// Whether floats become halves by rounding to nearest even, down to the smallest subnormal, and keep their sign; and whether halves may
/// be subnormal at all.
///
/// # Errors
/// What the device reported.
pub(super) fn halves(gpu: &Gpu) -> Result<[bool; 2]> {
    let values = floats();
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (pairs, size) = (values.len() / 2, 2 * values.len() as u64);
    let params = Pairs { count: pairs as u32 };
    let kernel = (HALVES, Variant::new());
    let got = launch(gpu, kernel, &params, &[bytes], (size, pairs.div_ceil(64) as u32))?;
    Ok(way_of_rounding(got.chunks_exact(2).map(|h| u16::from_le_bytes([h[0], h[1]]))))
}

/// The same of the halves that [`floats`] became. Bits, since a zero has a sign, and so has its code; any way of rounding gives a half
/// or its neighbour.
fn way_of_rounding(got: impl Iterator<Item = u16>) -> [bool; 2] {
    let off: Vec<u16> = got.zip(floats()).map(|(h, x)| h.abs_diff(f16::from_f32(x).to_bits())).collect();
    [off.iter().all(|off| *off == 0), off.iter().all(|off| [0, 1, 0x8000].contains(off))]
}

/// Every half's neighbourhood in every second binade, of both signs: itself, the tie above it, and a float to either side of that.
fn floats() -> Vec<f32> {
    let mut all = Vec::new();
    for exponent in (0..30u16).step_by(2) {
        for mantissa in (0..1024u16).step_by(33) {
            let [low, high] = [0, 1].map(|up| f16::from_bits((exponent << 10) + mantissa + up).to_f32());
            let tie = (low + high) / 2.0;
            for x in [low, tie, f32::from_bits(tie.to_bits() - 1), f32::from_bits(tie.to_bits() + 1)] {
                all.extend([x, -x]);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{SUBGROUPS, expected, floats, halves, judge, operands, unproven, way_of_rounding};
    use crate::gpu::{Caps, DeviceChoice, Gpu, MatrixUnits};
    use half::f16;

    #[test]
    fn units_that_have_not_run_are_tried() {
        let known = Gpu::open(&DeviceChoice::from_env()).expect("an adapter").caps();
        let [of_8, of_16] = [Some(MatrixUnits::Coop8), Some(MatrixUnits::Coop16)];
        for (coop, lanes, vary, tried) in [
            (of_16, 32, false, false),
            (of_16, 64, false, true),
            (of_16, 64, true, true),
            (of_8, 32, false, true),
            (None, 64, true, false),
        ] {
            let caps = Caps { coop, subgroup_max: lanes, subgroups_vary: vary, ..known };
            let want = if tried { coop } else { None };
            assert_eq!(unproven(&caps), want, "{coop:?}, {lanes} lanes, two widths: {vary}");
        }
    }

    #[test]
    fn the_numbers_tell_faults_apart() {
        for (edge, lanes, other) in [(8, 32, 64.0), (16, 64, 32.0)] {
            let (right, values) = (expected(edge, lanes), 2 * edge * edge);
            assert_eq!(right.len(), SUBGROUPS * (values + 4));
            assert_eq!(judge(&right, &right), Ok(()));
            // Everything is exact in f32, and in halves only with subnormals.
            let [_, b] = operands(edge);
            assert!(b.iter().any(|h| h.to_f32() != 0.0 && h.to_f32().abs() < 2f32.powi(-14)));
            assert!(right.iter().all(|x| x.abs() < 512.0 && (x * 65536.0).fract() == 0.0));
            let mut turned = right.clone();
            for i in 0..edge * edge {
                turned[i] = right[i % edge * edge + i / edge];
            }
            assert!(judge(&turned, &right).unwrap_err().contains("first products"));
            let mut swapped = right.clone();
            swapped.swap(1, values + 1);
            assert!(judge(&swapped, &right).is_err(), "the subgroups have operands of their own");
            let mut wide = right.clone();
            wide[SUBGROUPS * values] = other;
            wide[0] += 1.0;
            assert_eq!(judge(&wide, &right), Err(format!("its subgroups have {other} lanes, not {lanes}")));
        }
    }

    /// Drivers that round toward zero, away at ties, or lose subnormals or the sign of zero are found out.
    #[test]
    fn floats_tell_ways_of_rounding_apart() {
        let even = |x: f32| f16::from_f32(x).to_bits();
        let toward_zero = |x: f32| {
            let h = f16::from_f32(x);
            h.to_bits() - u16::from(h.to_f32().abs() > x.abs())
        };
        let away = |x: f32| even(f32::from_bits(x.to_bits() + 1));
        let flushed = |x: f32| if x.abs() < 2f32.powi(-14) { even(x) & 0x8000 } else { even(x) };
        let unsigned = |x: f32| if even(x) == 0x8000 { 0 } else { even(x) };
        let way = |of: &dyn Fn(f32) -> u16| way_of_rounding(floats().into_iter().map(of));
        let [exact, inexact, lost] = [[true, true], [false, true], [false, false]];
        assert_eq!(
            [way(&even), way(&toward_zero), way(&away), way(&unsigned)],
            [exact, inexact, inexact, inexact]
        );
        assert_eq!(way(&flushed), lost);
        assert!(floats().iter().all(|x| f16::from_f32(*x).is_finite()));
    }

    #[test]
    fn lavapipe_packs_exactly() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let way = halves(&gpu).unwrap();
        assert!(way == [true; 2] || !gpu.name().contains("llvmpipe"), "{}: {way:?}", gpu.name());
    }
}
