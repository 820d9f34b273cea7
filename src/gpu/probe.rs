//! Whether matrix units of 8x8x8 do here what their kernels take for granted.
//!
//! Those kernels are tested through naga and in emulation, where no adapter has such units; what is left to find out is what
//! the adapter's driver makes of a fragment, and that is found out when it is opened: a text that does not compile, another
//! order of elements, lost subnormal halves or subgroups of another width leave the adapter without matrix units, with a warning.

use super::{Access, Binding, Gpu, Kernel, MatrixUnits, Variant};
use crate::{Error, Result};
use half::f16;

crate::params! { struct Probe { rows: u32 } }

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/fragments.wgsl"), include_str!("../../shaders/lib/probe.wgsl"));
const PROBE: Kernel = Kernel { name: "probe", text: TEXT, entry: "main" };

/// Edge of a fragment.
const EDGE: usize = 8;
/// Subgroups of the workgroup, and lanes that each is to have.
const SUBGROUPS: usize = 2;
const LANES: f32 = 32.0;
/// Values that a subgroup writes, and all that are written.
const VALUES: usize = 2 * EDGE * EDGE;
const WRITTEN: usize = SUBGROUPS * (VALUES + 4);

/// The kernel, for validation without a GPU.
pub(super) fn kernel() -> (Kernel, Variant) {
    (PROBE, Variant::new().fragments(MatrixUnits::Coop8))
}

/// Multiplies a few numbers on the matrix units of `gpu`.
///
/// # Errors
/// What the device reported, or what was wrong.
pub(super) fn run(gpu: &Gpu) -> Result<()> {
    let bytes = |x: &[f16]| x.iter().flat_map(|h| h.to_le_bytes()).collect::<Vec<u8>>();
    let [a, b] = operands().map(|x| bytes(&x));
    let mut bindings = Vec::new();
    for (name, bytes) in [("probe a", &a), ("probe b", &b)] {
        let buffer = gpu.alloc(name, bytes.len() as u64)?;
        gpu.upload(&buffer, 0, bytes)?;
        bindings.push(Binding { buffer, offset: 0, size: bytes.len() as u64, access: Access::Read });
    }
    let size = 4 * WRITTEN as u64;
    let out = gpu.alloc("probe results", size)?;
    bindings.push(Binding { buffer: out.clone(), offset: 0, size, access: Access::Write });
    let (kernel, variant) = kernel();
    gpu.dispatch(&kernel, &variant, &Probe { rows: EDGE as u32 }, &bindings, 1)?;
    let bytes = gpu.download(&out, 0, size)?;
    let got: Vec<f32> = bytes.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    judge(&got).map_err(|why| Error::gpu(why, "--no-coop does without matrix units"))
}

/// A and B of each subgroup: small whole numbers, those of every second column of B so far down that halves are subnormal there.
fn operands() -> [Vec<f16>; 2] {
    let whole = |i: usize, step: usize| ((i * step + i / EDGE * 3) % 7) as f32 - 3.0;
    let count = SUBGROUPS * EDGE * EDGE;
    let a = (0..count).map(|i| f16::from_f32(whole(i, 5)));
    let b = (0..count).map(|i| f16::from_f32(whole(i, 3) * if i % 2 == 0 { 1.0 } else { 2f32.powi(-16) }));
    [a.collect(), b.collect()]
}

/// What the kernel is to write.
fn expected() -> Vec<f32> {
    let [a, b] = operands().map(|x| x.iter().map(|h| h.to_f32()).collect::<Vec<_>>());
    let mut all = Vec::with_capacity(WRITTEN);
    for (a, b) in a.chunks(EDGE * EDGE).zip(b.chunks(EDGE * EDGE)) {
        let product = |of: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
            let cell = |i: usize| (0..EDGE).map(|k| a[i / EDGE * EDGE + k] * of(k, i % EDGE)).sum();
            (0..EDGE * EDGE).map(cell).collect()
        };
        let across = product(&|k, n| b[n * EDGE + k]);
        let along = product(&|k, n| b[k * EDGE + n]);
        all.extend(&across);
        all.extend(across.iter().zip(along).map(|(c, d)| 2.0 * c + d));
    }
    all.extend([LANES; 4 * SUBGROUPS]);
    all
}

fn judge(got: &[f32]) -> std::result::Result<(), String> {
    match expected().iter().zip(got).position(|(want, got)| want != got) {
        None => Ok(()),
        Some(at) if at >= SUBGROUPS * VALUES => {
            Err(format!("its subgroups have {} lanes, not {LANES}", got[at]))
        }
        Some(at) => Err(format!("value {at} of the first products is {}, not {}", got[at], expected()[at])),
    }
}

#[cfg(test)]
mod tests {
    use super::{EDGE, LANES, SUBGROUPS, VALUES, WRITTEN, expected, judge, operands};

    #[test]
    fn the_numbers_tell_faults_apart() {
        let right = expected();
        assert_eq!(right.len(), WRITTEN);
        assert_eq!(judge(&right), Ok(()));
        // Everything is exact in f32, and in halves only with subnormals.
        let [_, b] = operands();
        assert!(b.iter().any(|h| h.to_f32() != 0.0 && h.to_f32().abs() < 2f32.powi(-14)));
        assert!(right.iter().all(|x| x.abs() < 512.0 && (x * 65536.0).fract() == 0.0));
        let mut turned = right.clone();
        for i in 0..EDGE * EDGE {
            turned[i] = right[i % EDGE * EDGE + i / EDGE];
        }
        assert!(judge(&turned).unwrap_err().contains("first products"));
        let mut other = right.clone();
        other.swap(1, VALUES + 1);
        assert!(judge(&other).is_err(), "the subgroups have operands of their own");
        let mut wide = right;
        wide[SUBGROUPS * VALUES] = 64.0;
        assert_eq!(judge(&wide), Err(format!("its subgroups have 64 lanes, not {LANES}")));
    }
}
