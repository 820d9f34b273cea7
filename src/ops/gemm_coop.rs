//! Grouped GEMM on matrix units: the candidate next to the register tiles of [`super::gemm`], for fp8 codes and bf16
//! operands on adapters with products of f16 and f32 sums, of 16x16x16 or 8x8x8. Its operands lie in [panels](super::panels).
//!
//! Every fp8 value is an f16 value and a product of two of them is exact in f32, so the result differs from the other
//! kernel's in the order of its sums only: same definition, same tolerance. A code of e4m3 that is NaN counts as 480: the
//! quantizer marks what it poisons in the de-scale, which comes after the sum.
//!
//! bf16 operands become halves first, scaled by a power of two along the contraction: exact within 2^29 of the largest value of
//! a row (column) that is contracted, off by at most 2^-39 of that value below. A NaN or an infinity makes its row (column) of
//! the result NaN.

use super::gemm::Flags;
use super::panels::{self, Codes, Contraction, Order};
use crate::Result;
use crate::gpu::{Caps, Fragments, Gpu, Kernel, MatrixUnits, Variant};
use crate::num::DType;
use crate::ops::quantize::{self, Quantized};
use crate::tensor::Tensor;

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/fragments.wgsl"),
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/gemm_params.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/lib/coop.wgsl"),
    include_str!("../../shaders/gemm_coop.wgsl")
);
/// Tiles that a large GPU has in work at a time, and the most steps that each of its cores takes in a short product, tile after tile.
const WAVE: usize = 256;
const SHORT: usize = 1024;

const MAIN: Kernel = Kernel { name: "gemm_coop.main", text: TEXT, entry: "main" };

/// The matrix units, and the subgroups that share a fragment, if there are some.
fn fragments(caps: &Caps) -> Option<Fragments> {
    #[cfg(test)]
    if let Some(fragments) = super::emulation::fragments() {
        return Some(fragments);
    }
    caps.fragments()
}

/// Edge of the tile that one workgroup computes: 2 x 2 subgroups of 4 x 4 fragments.
///
/// # Panics
/// Without matrix units: [`can_run`] was to be asked.
pub(super) fn tile(caps: &Caps) -> usize {
    8 * fragments(caps).expect("matrix units").units.edge() as usize
}

/// What the form `entry` contracts of both operands; a stack of gradients lies as weights do.
pub(super) fn contractions<'a>(entry: &str, stack: usize, offs: Option<&'a Tensor>) -> [Contraction<'a>; 2] {
    match entry {
        "nt" => [Contraction::Columns; 2],
        "nn" => [Contraction::Columns, Contraction::WeightRows],
        _ if stack > 1 => [Contraction::WeightRows, Contraction::GroupRows(None)],
        _ => [Contraction::GroupRows(offs); 2],
    }
}

/// Whether the kernel can compute a product of these operands here.
pub(super) fn can_run(caps: &Caps, a: DType, b: DType) -> bool {
    fragments(caps).is_some()
        && matches!(
            (a, b),
            (DType::E4M3 | DType::E5M2, DType::E4M3) | (DType::F16, DType::F16) | (DType::BF16, DType::BF16)
        )
}

/// Whether a product of so many tiles, each `depth` steps of the contraction deep, is over so soon that short code serves it best.
pub(super) fn is_short(depth: usize, tiles: usize) -> bool {
    depth.next_multiple_of(panels::BLOCK) * tiles.div_ceil(WAVE) <= SHORT
}

fn variant(
    [by_steps, short]: [bool; 2],
    [a, out]: [DType; 2],
    flags: Flags,
    fragments: Fragments,
) -> Variant {
    let Fragments { units, lanes, .. } = fragments;
    let (threads, tile) = (4 * lanes, 8 * units.edge());
    let half = u32::from(a == DType::F16);
    let by_steps = u32::from(by_steps);
    // A subgroup's results leave a fragment of 16x16 at a time, or a row of four of 8x8.
    let [turns, turn_quads] = if units == MatrixUnits::Coop16 { [4, 4] } else { [1, 8] };
    Variant::new()
        .fragments(fragments)
        .constant("TILE", tile)
        .constant("TURNS", turns)
        .constant("TURN_QUADS", turn_quads)
        .constant("SHORT", short.into())
        .constant("LONG", (!short).into())
        .constant("BY_STEPS", by_steps)
        .constant("BY_ROWS", 1 - by_steps)
        .constant("F8", 1 - half)
        .constant("F16", half)
        .constant("A_E5M2", u32::from(a == DType::E5M2))
        .constant("PANELS", panels::panels_per_block(a) as u32)
        .constant("GROUPED", flags.grouped.into())
        .constant("SCALED", flags.scaled.into())
        .constant("ACCUMULATE", flags.accumulate.into())
        .constant("ALONE", (!flags.summed).into())
        .constant("SUMMED", flags.summed.into())
        .constant("ADDS", (flags.accumulate || flags.summed).into())
        .constant("THREADS", threads)
        .constant("LOADS", 2 * tile / threads)
        .constant("STORE_STEPS", units.edge() * turn_quads / lanes)
        .constant("BF16_OUT", u32::from(out == DType::BF16))
        .constant("F32_OUT", u32::from(out == DType::F32))
        .quad("OUT", out)
}

/// The kernel of the form `entry` and its variant, short or long (see [`is_short`]), for operands in panels; other bindings and
/// parameters are those of the register-tile kernel.
///
/// # Panics
/// Without matrix units: [`can_run`] was to be asked.
pub(super) fn kernel(
    entry: &str,
    short: bool,
    kinds: [DType; 2],
    flags: Flags,
    caps: &Caps,
) -> (Kernel, Variant) {
    let variant = variant([entry == "tn", short], kinds, flags, fragments(caps).expect("matrix units"));
    #[cfg(test)]
    if let Some(kernel) = emulated::kernel() {
        return (kernel, super::emulation::told(variant));
    }
    (MAIN, variant)
}

/// Both bf16 operands as halves, scaled along what is contracted of each.
pub(super) fn halves(
    gpu: &Gpu,
    [of_a, of_b]: [Contraction<'_>; 2],
    a: &Tensor,
    b: &Tensor,
    order: Order,
) -> Result<[Quantized<Codes>; 2]> {
    let along = |x: &Tensor, contraction| {
        let half = DType::F16;
        match contraction {
            Contraction::Columns => quantize::along_rows(gpu, x, half, order),
            Contraction::WeightRows => quantize::along_weight_columns(gpu, x, half, order),
            Contraction::GroupRows(offs) => quantize::along_columns(gpu, x, offs, half, order),
        }
    };
    Ok([along(a, of_a)?, along(b, of_b)?])
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for [by_steps, short] in [[false; 2], [true, false], [false, true], [true; 2]] {
        for a in [DType::E4M3, DType::E5M2, DType::F16] {
            for bits in 0..8u8 {
                let [grouped, scaled, accumulate] = [1, 2, 4].map(|bit| bits & bit != 0);
                let (out, lanes) = if grouped { (DType::F32, 32) } else { (DType::BF16, 64) };
                let [wide, narrow] = [(MatrixUnits::Coop16, lanes), (MatrixUnits::Coop8, 32)]
                    .map(|(units, lanes)| Fragments { units, lanes, vary: lanes == 64 });
                for summed in [false, true].into_iter().take(if short && !by_steps { 2 } else { 1 }) {
                    let flags = Flags { grouped, scaled, accumulate, summed };
                    all.push((MAIN, variant([by_steps, short], [a, out], flags, wide)));
                    all.push((MAIN, variant([by_steps, short], [a, out], flags, narrow)));
                }
            }
        }
    }
    all
}

mod emulated;

#[cfg(test)]
mod tests {
    use super::{Order, contractions, halves};
    use crate::gpu::{DeviceChoice, Gpu};
    use crate::num::{DType, bf16, rng::Stream};
    use crate::tensor::Tensor;
    use half::f16;

    /// The debug model's products are short, large ones are not, and the self-test has long ones of every form: its table's last
    /// three, by depth or by tiles.
    #[test]
    fn short_is_what_is_over_soon() {
        for (depth, tiles, short) in [
            (256, 768, true),
            (512, 272, true),
            (1024, 256, true),
            (1025, 1, false),
            (4096, 4096, false),
            (1100, 3, false),
            (1090, 2, false),
            (2, 4400, false),
        ] {
            assert_eq!(super::is_short(depth, tiles), short, "{depth} steps, {tiles} tiles");
        }
    }

    /// The claim of `quantize::along_rows`: a bf16 value, scaled with its row's largest to below 2^16, is exact as a half down
    /// to 2^-29 of the largest, and off by at most 2^-39 of it below: under half a unit of bf16 (2^-9) either way.
    #[test]
    fn halves_lose_less_than_bf16_rounds() {
        for top in [1.0f64, 1.75, 1.992_187_5] {
            let scale = if top > 1.75 { 2f64.powi(14) } else { 2f64.powi(15) };
            for mantissa in 0..128 {
                for below in 0..80 {
                    let x = (1.0 + f64::from(mantissa) / 128.0) * 2f64.powi(-below);
                    if x > top {
                        continue;
                    }
                    let half = f16::from_f64(x * scale);
                    assert!(half.is_finite());
                    let off = (f64::from(half) / scale - x).abs();
                    let most = if x * scale >= 2f64.powi(-14) { 0.0 } else { 2f64.powi(-39) * top };
                    assert!(off <= most, "{x:e} of {top}: off by {off:e}");
                    assert!(off <= 2f64.powi(-9) * x || off <= 2f64.powi(-39) * top);
                }
            }
        }
    }

    #[test]
    fn both_operands_become_halves_times_their_scales() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let (m, n, k) = (13, 7, 22);
        let stream = Stream::new(0, "halves");
        let values = |len: usize| -> Vec<f32> {
            (0..len as u64).map(|i| bf16::round(stream.normal(i) * 2f32.powi((i % 17) as i32 - 8))).collect()
        };
        let ends = Tensor::from_u32(&gpu, "ends", &[5, 5, 13]).unwrap();
        // Shapes of both operands, and which scale belongs to (row, column) of each. Within 2^17 nothing is rounded.
        let weight = |rows: usize| vec![3, rows, k];
        let own = |row: usize, _: usize| row;
        let column = |rows: usize| move |row: usize, col: usize| row / rows * k + col;
        let group = |row: usize, col: usize| if row < 5 { col } else { 2 * k + col };
        type Place<'a> = Box<dyn Fn(usize, usize) -> usize + 'a>;
        let cases: [(&str, Vec<usize>, [Place<'_>; 2]); 3] = [
            ("nt", weight(n), [Box::new(own), Box::new(own)]),
            ("nn", weight(n), [Box::new(own), Box::new(column(n))]),
            ("tn", vec![m, k], [Box::new(group), Box::new(group)]),
        ];
        for (entry, b_shape, [a_place, b_place]) in cases {
            let a_shape = vec![m, k];
            let [a, b] = [&a_shape, &b_shape].map(|s| values(s.iter().product()));
            let at = Tensor::from_f32(&gpu, "a", &a_shape, DType::BF16, &a).unwrap();
            let bt = Tensor::from_f32(&gpu, "b", &b_shape, DType::BF16, &b).unwrap();
            let [qa, qb] = halves(&gpu, contractions(entry, 1, Some(&ends)), &at, &bt, Order::Rows).unwrap();
            for (values, q, place) in [(a, qa, a_place), (b, qb, b_place)] {
                let codes = q.codes.into_rows();
                let (buffer, offset) = codes.memory();
                let bytes = gpu.download(buffer, offset, codes.bytes()).unwrap();
                let descale = q.descale.to_f32(&gpu).unwrap();
                let padded = 4 * codes.quads();
                for (i, want) in values.iter().enumerate() {
                    let (row, col) = (i / k, i % k);
                    let code = &bytes[2 * (row * padded + col)..][..2];
                    let got = f16::from_le_bytes([code[0], code[1]]).to_f32() * descale[place(row, col)];
                    assert!(
                        (got - want).abs() <= want.abs() * 2f32.powi(-9),
                        "{entry} {row} {col}: {got} {want}"
                    );
                }
                let pad = &bytes[2 * k..2 * padded];
                assert!(pad.iter().all(|b| *b == 0), "{entry}: padding {pad:?}");
            }
        }
    }
}
