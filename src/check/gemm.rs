//! The grouped products in their three forms against the f64 product of the same codes, over ragged groups, and stacks of them.

use super::data::{Codes, Operand, are_bindable, scales};
use super::sums::sums;
use crate::Result;
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::gemm::{self as op, GemmOptions, Scale};
use crate::ops::gemm_choice::Form;
use crate::ops::panels::Codes as InOrder;
use crate::reference::compare::{bf16_ulp, within};
use crate::reference::gemm::{self as reference, Scales};
use crate::tensor::Tensor;

/// What one comparison gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Form, shape, group ends, codes and result's dtype.
    pub case: String,
    /// The kernel that ran.
    pub kernel: String,
    /// What is wrong, if anything.
    pub error: Option<String>,
}

/// Group ends (`None`: one group of all rows), M, N, K: 1, primes, one past a tile and a slice, whole tiles, an empty
/// group first, between and last, none but empty ones, rows past the last end, all rows in one group.
/// One more has weight gradients in parts. Three more are long enough for the loop that matrix units have for long products, one in
/// each form.
static TABLE: [(Option<&[u32]>, usize, usize, usize); 18] = [
    (None, 1, 1, 1),
    (None, 33, 45, 131),
    (None, 129, 130, 65),
    (None, 257, 144, 192),
    (None, 128, 256, 128),
    (Some(&[0, 7, 13]), 13, 7, 100),
    (Some(&[4, 4, 17]), 17, 13, 17),
    (Some(&[0, 0, 0]), 16, 5, 9),
    (Some(&[130, 130, 257, 300]), 310, 132, 96),
    (Some(&[300, 300, 300]), 300, 144, 80),
    (Some(&[64, 128, 192, 256]), 256, 128, 128),
    (Some(&[1, 66, 70]), 200, 272, 64),
    (None, 301, 8, 261),
    (Some(&[130, 130, 131, 300]), 310, 16, 96),
    (Some(&[0, 3, 500, 500]), 530, 20, 36),
    (Some(&[7, 130]), 131, 20, 1100),
    (None, 130, 1090, 36),
    (Some(&MANY), 4410, 17, 16),
];

/// Ends of thousands of groups of two rows and of none.
static MANY: [u32; 4400] = {
    let mut ends = [0; 4400];
    let mut i = 0;
    while i < ends.len() {
        ends[i] = (i as u32).div_ceil(2) * 2;
        i += 1;
    }
    ends
};

/// Stacks: how many, and as above; nt of each, and tn of those without groups, which has parts from 129 rows on. Parts of the first
/// three can be bound by themselves, as kernels want that compute them one by one; the fifth is long for matrix units.
static STACKS: [Stack; 7] = [
    (2, None, 100, 192, 60),
    (3, Some(&[4, 4, 20, 20]), 24, 16, 20),
    (3, None, 260, 64, 36),
    (3, None, 111, 131, 67),
    (2, Some(&[7, 130]), 131, 21, 1100),
    (2, None, 301, 261, 45),
    (3, Some(&[130, 130, 257, 300]), 310, 133, 65),
];

/// How many, group ends, M, N, K.
type Stack = (usize, Option<&'static [u32]>, usize, usize, usize);

/// Runs the table, every case in all three forms, the stacks, and sums of them: with the kernels that `gpu` chooses, or what `--kernel` names can
/// compute of it.
///
/// # Errors
/// What the device reported; a wrong result is an [`Outcome`].
pub fn gemm(gpu: &Gpu) -> Result<Vec<Outcome>> {
    let cases = of_wish(gpu, cases())?;
    let planner = gpu.planner();
    for case in &cases {
        case.run(&planner)?;
    }
    gpu.prepare(&planner)?;
    let mut outcomes = cases.iter().map(|case| case.run(gpu)).collect::<Result<Vec<_>>>()?;
    outcomes.extend(sums(gpu)?);
    Ok(outcomes)
}

/// What the kernel that `--kernel` names can compute, if it names one: for the rest another would stand in.
fn of_wish<'a>(gpu: &Gpu, all: Vec<Case<'a>>) -> Result<Vec<Case<'a>>> {
    let planner = gpu.planner();
    let mut kept = Vec::new();
    for case in all {
        let kernel = case.run(&planner)?.kernel;
        let wished = gpu.options().kernel.is_none_or(|wish| kernel == wish.name());
        if wished && (case.stack == 1 || kernel == GemmKernel::Coop.name() || case.has_bindable_parts()) {
            kept.push(case);
        }
    }
    Ok(kept)
}

fn cases() -> Vec<Case<'static>> {
    let mut all = Vec::new();
    for (i, &(ends, m, n, k)) in TABLE.iter().enumerate() {
        for form in Form::ALL {
            let out = if i % 2 == 0 { DType::BF16 } else { DType::F32 };
            let kinds = [[Codes::Any, Codes::Tiny, Codes::Normal][i % 3], Codes::WideRows, Codes::E5m2];
            // Gradients in e5m2 are the first operand of the two backward forms.
            let of_e5m2 = form != Form::Nt && i % 3 == 2;
            for codes in kinds.into_iter().filter(|codes| *codes != Codes::E5m2 || of_e5m2) {
                let accumulate = form != Form::Nt && i % 4 > 1;
                all.push(Case { form, ends, dims: [m, n, k], stack: 1, codes, out, accumulate });
            }
        }
    }
    for (i, &(stack, ends, m, n, k)) in STACKS.iter().enumerate() {
        for form in [Form::Nt, Form::Tn].into_iter().take(if ends.is_some() { 1 } else { 2 }) {
            let out = if i % 2 == 0 { DType::BF16 } else { DType::F32 };
            for codes in [Codes::Any, Codes::WideRows, Codes::E5m2].into_iter().take(1 + i % 3) {
                if form == Form::Tn || codes != Codes::E5m2 {
                    all.push(Case { form, ends, dims: [m, n, k], stack, codes, out, accumulate: false });
                }
            }
        }
    }
    all
}

/// One product: `dims` are rows of tokens, width of the output, width of the input, as in [`crate::reference::gemm`].
struct Case<'a> {
    form: Form,
    ends: Option<&'a [u32]>,
    dims: [usize; 3],
    /// Results at once.
    stack: usize,
    codes: Codes,
    out: DType,
    accumulate: bool,
}

impl Case<'_> {
    fn run(&self, gpu: &Gpu) -> Result<Outcome> {
        let [m, n, k] = self.dims;
        let all = [m as u32];
        let ends = self.ends.unwrap_or(&all);
        let e = ends.len();
        let stack = self.stack;
        let w = if self.ends.is_some() { vec![e, n, k] } else { vec![n, k] };
        // Shapes of both operands and of the result, the length of the contraction, and the scales of rows and columns.
        let (a, b, out, length, rows, cols) = match self.form {
            Form::Nt if stack > 1 => {
                (vec![m, k], vec![stack * e, n, k], vec![stack, m, n], k, m, stack * e * n)
            }
            Form::Tn if stack > 1 => (vec![stack, m, n], vec![m, k], vec![stack, n, k], m, stack * n, k),
            Form::Nt => (vec![m, k], w, vec![m, n], k, m, e * n),
            Form::Nn => (vec![m, n], w, vec![m, k], n, m, e * k),
            Form::Tn => (vec![m, n], vec![m, k], w, m, e * n, e * k),
        };
        // Magnitudes that differ along the contraction are beyond halves: only the largest 2^29 keep all their bits.
        let kind = |along: bool| match self.codes {
            Codes::WideRows if !along => Codes::WideColumns,
            codes => codes,
        };
        let a = Operand::new("a", &a, kind(self.form != Form::Tn));
        let b = match self.codes {
            Codes::E5m2 => Operand::new("b", &b, Codes::Any),
            _ => Operand::new("b", &b, kind(self.form == Form::Nt)),
        };
        let (row, col) = (scales("row", rows), scales("col", cols));
        let before = gpu.launches();
        let got = self.on_device(gpu, &a, &b, &row, &col, &out)?;
        let kernel = super::launched(gpu, &before, "gemm");
        if gpu.is_planner() {
            return Ok(Outcome { case: self.name(), kernel, error: None });
        }
        let product = |a: &[f64], b: &[f64]| self.product([a, b], ends, [&row, &col]);
        let prior = if self.accumulate { 1.0 } else { 0.0 };
        let want: Vec<f64> = product(&a.values(), &b.values()).iter().map(|v| v + prior).collect();
        let size = |o: &Operand| o.values().iter().map(|v| v.abs()).collect::<Vec<_>>();
        let sums = product(&size(&a), &size(&b));
        let bound: Vec<f64> =
            want.iter().zip(&sums).map(|(w, s)| bound(self.out, length, *w, s + prior)).collect();
        let got: Vec<f64> = got.iter().map(|&v| f64::from(v)).collect();
        let error = within(&got, &want, &bound, &out).err();
        Ok(Outcome { case: self.name(), kernel, error })
    }

    /// The f64 product, of a stack one result after the other.
    fn product(&self, [a, b]: [&[f64]; 2], ends: &[u32], [row, col]: [&[f32]; 2]) -> Vec<f64> {
        let [_, n, k] = self.dims;
        let part = |p: usize, len: usize| p * len / self.stack..(p + 1) * len / self.stack;
        let result = |p: usize| {
            let (a, row) = match self.form {
                Form::Tn => (&a[part(p, a.len())], &row[part(p, row.len())]),
                _ => (a, row),
            };
            let (b, col) = match self.form {
                Form::Nt => (&b[part(p, b.len())], &col[part(p, col.len())]),
                _ => (b, col),
            };
            let scales = match self.codes {
                Codes::WideRows => Scales::NONE,
                _ => Scales { row: Some(row), col: Some(col) },
            };
            match self.form {
                Form::Nt => reference::nt(a, b, ends, n, k, scales),
                Form::Nn => reference::nn(a, b, ends, n, k, scales),
                Form::Tn => reference::tn(a, b, ends, n, k, scales),
            }
        };
        (0..self.stack).flat_map(result).collect()
    }

    /// Whether parts of the stacked operand, its scales and the result can be bound by themselves.
    fn has_bindable_parts(&self) -> bool {
        let [m, n, k] = self.dims;
        let (e, codes) =
            (self.ends.map_or(1, <[u32]>::len), if self.codes == Codes::WideRows { 8 } else { 4 });
        let quads = |rows: usize, cols: usize| rows * cols.div_ceil(4);
        let parts = match self.form {
            Form::Tn => [quads(m, n) * codes, 4 * n, quads(n, k) * self.out.quad_bytes()],
            _ => [quads(e * n, k) * codes, 4 * e * n, quads(m, n) * self.out.quad_bytes()],
        };
        are_bindable(&parts)
    }

    fn name(&self) -> String {
        let [m, n, k] = self.dims;
        let plus = if self.accumulate { ", added" } else { "" };
        format!(
            "{}{} {m} x {n} x {k}, ends {:?}, {:?} codes, {}{plus}",
            if self.stack > 1 { format!("{} at once of ", self.stack) } else { String::new() },
            self.form.name(),
            &self.ends.map_or(&[][..], |ends| &ends[..ends.len().min(8)]),
            self.codes,
            self.out
        )
    }

    fn on_device(
        &self,
        gpu: &Gpu,
        a: &Operand,
        b: &Operand,
        row: &[f32],
        col: &[f32],
        shape: &[usize],
    ) -> Result<Vec<f32>> {
        let [_, n, k] = self.dims;
        let (a, b) = (a.upload(gpu)?, b.upload(gpu)?);
        let offs = self.ends.map(|ends| Tensor::from_u32(gpu, "ends", ends)).transpose()?;
        let row = Tensor::from_flat_f32(gpu, "row scales", row)?;
        let col = Tensor::from_flat_f32(gpu, "column scales", col)?;
        let scales = match self.form {
            Form::Nt => (Scale::per_row(&row), Scale::per_group(&col, n)),
            Form::Nn => (Scale::per_row(&row), Scale::per_group(&col, k)),
            Form::Tn => (Scale::per_group(&row, n), Scale::per_group(&col, k)),
        };
        let scales = if self.codes == Codes::WideRows { None } else { Some(scales) };
        let options = GemmOptions { offs: offs.as_ref(), scales, kernel: None };
        let ones = || {
            let ones = vec![1.0; shape.iter().product()];
            Tensor::from_f32(gpu, "result", shape, self.out, &ones)
        };
        let stacked = |codes: &Tensor| InOrder::Rows(codes.clone());
        let out = match self.form {
            Form::Nt if self.stack > 1 => {
                op::nt_stacked(gpu, &stacked(&a), &stacked(&b), self.stack, self.out, options)?
            }
            Form::Tn if self.stack > 1 => {
                let out = ones()?;
                op::tn_stacked(gpu, &stacked(&a), &stacked(&b), &out, options)?;
                out
            }
            Form::Nt => op::nt(gpu, &a, &b, self.out, options)?,
            Form::Nn if self.accumulate => {
                let out = ones()?;
                op::nn_onto(gpu, &a, &b, &out, options)?;
                out
            }
            Form::Nn => op::nn(gpu, &a, &b, self.out, options)?,
            Form::Tn => {
                let out = ones()?;
                op::tn_into(gpu, &a, &b, &out, self.accumulate, options)?;
                out
            }
        };
        assert_eq!(out.shape(), shape);
        out.to_f32(gpu)
    }
}

/// `length * 2^-24 * sum |a b|` for sums in f32, and half a unit of the result's dtype. The factor 2: matrix units cut
/// off where others round, and a sum just past a power of two has units twice as large.
pub(super) fn bound(dtype: DType, length: usize, want: f64, sum: f64) -> f64 {
    let f32_sum = (length + 2) as f64 * 2f64.powi(-24) * sum;
    let half_unit = if dtype == DType::BF16 { bf16_ulp(want) / 2.0 } else { want.abs() * 2f64.powi(-24) };
    2.0 * f32_sum + half_unit * (1.0 + 1e-9)
}

#[cfg(test)]
mod tests {
    use super::{Case, Form, Outcome, cases};
    use crate::check::data::Codes;
    use crate::check::sums::sums;
    use crate::gpu::{DeviceChoice, Fragments, Gpu, Options};
    use crate::ops::emulation::{Emulation, OF_8, OF_16, OF_16_BY_64};

    fn gpu() -> Gpu {
        let options = Options { poison: true, ..Options::default() };
        Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
    }

    fn is_right(outcome: &Outcome) {
        assert_eq!((outcome.kernel.as_str(), &outcome.error), ("coop", &None), "{}", outcome.case);
    }

    /// Two of the table, which differ in what groups own, in their operands, results and what is added.
    fn quick(case: &Case<'_>) -> bool {
        match case.dims {
            [310, 132, 96] => case.form == Form::Nn && case.codes == Codes::E5m2,
            [200, 272, 64] => case.form == Form::Tn && case.codes == Codes::WideRows,
            _ => false,
        }
    }

    /// The table on `fragments` in emulation.
    fn table(fragments: Fragments) {
        let (_emulation, gpu) = (Emulation::start(fragments), gpu());
        cases().iter().for_each(|case| is_right(&case.run(&gpu).unwrap()));
        sums(&gpu).unwrap().iter().for_each(is_right);
    }

    #[test]
    fn emulated_fragments_of_16_by_64_lanes_serve_two_forms() {
        let (_emulation, gpu) = (Emulation::start(OF_16_BY_64), gpu());
        let all = cases();
        let outcomes: Vec<_> = all.iter().filter(|c| quick(c)).map(|c| c.run(&gpu).unwrap()).collect();
        assert_eq!(outcomes.len(), 2);
        outcomes.iter().for_each(is_right);
    }

    /// `cargo test --lib check::gemm::tests::emulated -- --ignored`: seven minutes on one core for each kind of fragments.
    #[test]
    #[ignore = "seven minutes on a software adapter"]
    fn emulated_fragments_of_16_by_64_lanes_serve_all() {
        table(OF_16_BY_64);
    }

    /// As above.
    #[test]
    #[ignore = "seven minutes on a software adapter"]
    fn emulated_fragments_of_16_serve_all() {
        table(OF_16);
    }

    /// As above.
    #[test]
    #[ignore = "seven minutes on a software adapter"]
    fn emulated_fragments_of_8_serve_all() {
        table(OF_8);
    }

    /// The kernels' own guard, where a driver chooses another width than was counted.
    #[test]
    fn results_are_nan_in_subgroups_of_another_width() {
        let (_emulation, gpu) = (Emulation::of_width(OF_16_BY_64, 32), gpu());
        for case in cases().iter().filter(|c| quick(c)) {
            let error = case.run(&gpu).unwrap().error.expect("an error");
            let (wrong, rest) = error.split_once(" of ").expect("how many are wrong");
            let all = rest.starts_with(&format!("{wrong} elements"));
            assert!(all && error.contains("got NaN"), "{error}");
        }
    }
}
