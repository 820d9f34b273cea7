//! Choosing a kernel: what all ops with several candidates share.
//!
//! An op says what its choice depends on as a type, its [`Call`], and lists its kernels by preference. The first that can run
//! and pays is taken, unless the user names another, or `moe8 tune` found another the fastest, or one not to be used
//! ([`crate::gpu::Decisions`]).

use crate::gpu::{Choice, Gpu};
use crate::num::DType;

/// A call of an op, as far as the choice of its kernel depends on it.
pub trait Call: Sized + 'static {
    /// The op's kernels.
    type Kernel: Copy + PartialEq + 'static;

    /// All candidates by preference; the last one can always run, and is used even where it was found wrong.
    const TABLE: &'static [Candidate<Self>];

    /// The kernel's name.
    fn name(kernel: Self::Kernel) -> &'static str;

    /// The kernel that the user demands, or one of other ops.
    fn named(gpu: &Gpu) -> Option<Self::Kernel>;

    /// What a kernel is rejected for: the op, and what its variants differ in most.
    fn op(&self) -> String;

    /// One word for the sizes whose fastest kernel is found by measurement.
    fn size(&self) -> &'static str;

    /// What the fastest kernel is kept for.
    fn class(&self) -> String {
        format!("{} {}", self.op(), self.size())
    }
}

/// A kernel and what it asks for.
pub struct Candidate<C: Call> {
    /// The kernel.
    pub kernel: C::Kernel,
    /// Whether it can compute such a call on such an adapter; if not, why.
    pub can_run: fn(&Gpu, &C) -> Result<(), &'static str>,
    /// Whether it is a good choice there, by rule; if not, why.
    pub pays: fn(&Gpu, &C) -> Result<(), &'static str>,
}

/// The name of operands of `dtype` in those of ops.
pub(super) fn operands(dtype: DType) -> &'static str {
    match dtype {
        DType::E4M3 | DType::E5M2 => "fp8",
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 | DType::U32 => "other",
    }
}

/// Why a kernel was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Why {
    /// `--kernel` names it.
    Named,
    /// `--kernel` names one that cannot run.
    Left,
    /// `moe8 tune` found it the fastest.
    Tuned,
    /// It is the first of the table that can run and pays.
    Rule,
}

/// The kernel for a call on this adapter. A planner remembers what it was asked, see [`Gpu::choices`].
pub fn choose<C: Call>(gpu: &Gpu, call: &C) -> C::Kernel {
    if gpu.is_planner() {
        let (kernel, why) = explain(gpu, call);
        gpu.note_choice(Choice { class: call.class(), kernel: C::name(kernel), why });
        return kernel;
    }
    decide(gpu, call, |_, _| ()).0
}

/// The kernel for a call on this adapter, and why in words.
pub fn explain<C: Call>(gpu: &Gpu, call: &C) -> (C::Kernel, String) {
    let mut passed = Vec::new();
    let (kernel, why) = decide(gpu, call, |kernel, why| passed.push((kernel, why.to_string())));
    let fastest = || {
        let fastest = gpu.decisions().fastest(&call.class())?;
        Some(format!("tuned: {:.1}x faster than {}", fastest.times, fastest.than.as_ref()?))
    };
    let not = || passed.iter().map(|(k, why)| format!("; not {}: {why}", C::name(*k))).collect::<String>();
    let words = match why {
        Why::Named => format!("--kernel {}", C::name(kernel)),
        Why::Tuned => fastest().unwrap_or_else(|| "tuned: no other can run".into()),
        Why::Rule => "by capability".to_string() + &not(),
        Why::Left => match passed.iter().find(|(k, _)| Some(*k) == C::named(gpu)) {
            Some((named, why)) => format!("not --kernel {}: {why}", C::name(*named)),
            None => "--kernel names one of other ops".into(),
        },
    };
    (kernel, words)
}

/// The kernels that can compute a call on this adapter, and are not rejected there.
pub fn candidates<C: Call>(gpu: &Gpu, call: &C) -> Vec<C::Kernel> {
    let can_run = |c: &&Candidate<C>| (c.can_run)(gpu, call).is_ok();
    let kernels = C::TABLE.iter().filter(can_run).map(|c| c.kernel);
    kernels.filter(|kernel| rejection(gpu, call, *kernel).is_none()).collect()
}

/// The chosen kernel; `passed` hears of every candidate that was not taken, and why.
fn decide<C: Call>(gpu: &Gpu, call: &C, mut passed: impl FnMut(C::Kernel, &str)) -> (C::Kernel, Why) {
    let named = C::named(gpu);
    if named.is_none()
        && let Some(kernel) = tuned(gpu, call)
    {
        return (kernel, Why::Tuned);
    }
    for candidate in C::TABLE {
        let kernel = candidate.kernel;
        if let Err(why) = (candidate.can_run)(gpu, call) {
            passed(kernel, why);
        } else if named == Some(kernel) {
            return (kernel, Why::Named);
        } else if named.is_some() {
            passed(kernel, "not what --kernel names");
        } else if let Some(why) = rejection(gpu, call, kernel) {
            passed(kernel, why);
        } else if let Err(why) = (candidate.pays)(gpu, call) {
            passed(kernel, why);
        } else {
            return (kernel, Why::Rule);
        }
    }
    (last_resort::<C>(), Why::Left)
}

fn last_resort<C: Call>() -> C::Kernel {
    C::TABLE.last().expect("an op has kernels").kernel
}

/// The kernel that was found the fastest for such calls, if it can run as the adapter was opened.
fn tuned<C: Call>(gpu: &Gpu, call: &C) -> Option<C::Kernel> {
    let decisions = gpu.decisions();
    if decisions.is_empty() {
        return None;
    }
    let fastest = decisions.fastest(&call.class())?;
    let candidate = C::TABLE.iter().find(|c| C::name(c.kernel) == fastest.kernel)?;
    let fits = (candidate.can_run)(gpu, call).is_ok();
    let kernel = Some(candidate.kernel).filter(|_| fits)?;
    rejection(gpu, call, kernel).is_none().then_some(kernel)
}

/// Why a kernel is not to be used here, if so.
fn rejection<'a, C: Call>(gpu: &'a Gpu, call: &C, kernel: C::Kernel) -> Option<&'a str> {
    let decisions = gpu.decisions();
    if decisions.is_empty() || kernel == last_resort::<C>() {
        return None;
    }
    decisions.rejection(&call.op(), C::name(kernel))
}

#[cfg(test)]
mod tests {
    use super::{Call, choose, explain};
    use crate::gpu::{
        Caps, Choice, DeviceChoice, GemmKernel, Gpu, MatrixUnits, Options, QuantizeKernel, kernels_of,
    };
    use crate::num::DType;
    use crate::ops::attention::{self, Shape};
    use crate::ops::attention_choice::{Attention, Pass};
    use crate::ops::attention_coop;
    use crate::ops::gemm::{self, GemmOptions};
    use crate::ops::gemm_choice::{Form, Product};
    use crate::ops::quantize;
    use crate::ops::quantize_choice::{Axes, Quantization};
    use crate::tensor::Tensor;

    /// A planner of a GPU with matrix units whose largest binding is this.
    fn planner(max_binding: u64) -> Gpu {
        planner_with(MatrixUnits::Coop16, max_binding)
    }

    fn planner_with(units: MatrixUnits, max_binding: u64) -> Gpu {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let caps = Caps { software: false, subgroup_max: 32, coop: Some(units), max_binding, ..gpu.caps() };
        gpu.planner_with(caps)
    }

    #[test]
    fn either_kind_of_matrix_units_gets_its_fragments() {
        let shape = Shape { batch: 1, seq: 64, heads: 2, kv_heads: 1, head_dim: 48, block: None };
        for units in MatrixUnits::ALL {
            let gpu = planner_with(units, 1 << 30);
            let make =
                |shape: &[usize], dtype| Tensor::empty(&gpu, "operand", shape, dtype).expect("it fits");
            let (a, w) = (make(&[300, 64], DType::E4M3), make(&[200, 64], DType::E4M3));
            gemm::nt(&gpu, &a, &w, DType::BF16, GemmOptions::default()).expect("a product");
            let (q, k) = (make(&[64, 96], DType::BF16), make(&[64, 48], DType::BF16));
            let operands = attention_coop::Operands::new(&gpu, [&q, &k, &k], shape).expect("halves");
            let (out, lse) = attention_coop::forward(&gpu, &operands, shape, None).expect("attention");
            attention_coop::backward(&gpu, &out, &operands, (&out, &lse), [&q, &k, &k], shape, None)
                .expect("gradients");
            // By rule only where it has run.
            let call = Attention { pass: Pass::Forward, dtype: DType::BF16, shape };
            let rule = if units == MatrixUnits::Coop16 { GemmKernel::Coop } else { GemmKernel::Scalar };
            assert_eq!(choose(&gpu, &call), rule);
            let edge = format!("EDGE={} ", units.edge());
            let all: Vec<_> = gpu.kernels().into_iter().filter(|kernel| kernel.contains("_coop.")).collect();
            assert!(all.len() == 4 && all.iter().all(|kernel| kernel.contains(&edge)), "{units}: {all:?}");
        }
    }

    /// Subgroups that no adapter has run attention in, and drivers that lose small halves, which only codes do without.
    #[test]
    fn what_an_adapter_was_found_to_do_decides() {
        let usual = planner(1 << 30);
        let shape = Shape { batch: 1, seq: 64, heads: 2, kv_heads: 1, head_dim: 48, block: None };
        let attention = Attention { pass: Pass::Forward, dtype: DType::BF16, shape };
        let product = |dtype| Product { form: Form::Nt, operands: [dtype; 2], sizes: [64; 3], groups: None };
        let chosen = |caps: Caps| {
            let gpu = usual.planner_with(caps);
            let products = [DType::E4M3, DType::BF16].map(|dtype| choose(&gpu, &product(dtype)));
            (choose(&gpu, &attention), products)
        };
        use GemmKernel::{Coop, Scalar, Tiled};
        assert_eq!(chosen(usual.caps()), (Coop, [Coop, Coop]));
        assert_eq!(chosen(Caps { subgroup_max: 64, ..usual.caps() }), (Scalar, [Coop, Coop]));
        assert_eq!(chosen(Caps { subnormal_halves: false, ..usual.caps() }), (Scalar, [Coop, Tiled]));
    }

    /// Rows of 65 codes are 68 bytes, but 128 in panels: what fits the binding by rows only is multiplied by rows.
    #[test]
    fn operands_too_large_in_panels_are_multiplied_by_rows() {
        let (m, n, k) = (1000, 20, 65);
        let products = |gpu: &Gpu| {
            let make = |shape: &[usize]| Tensor::empty(gpu, "operand", shape, DType::E4M3).expect("it fits");
            let (a, w, w_t) = (make(&[m, k]), make(&[n, k]), make(&[k, n]));
            gemm::nt(gpu, &a, &w, DType::BF16, GemmOptions::default()).expect("some kernel fits");
            gemm::nn(gpu, &a, &w_t, DType::F32, GemmOptions::default()).expect("some kernel fits");
            // Groups of one row have a block of 64 each.
            let ends = Tensor::flat(gpu, "ends", 60, DType::U32).expect("it fits");
            let options = GemmOptions { offs: Some(&ends), ..GemmOptions::default() };
            gemm::tn(gpu, &make(&[60, 40]), &make(&[60, 16]), DType::BF16, options)
                .expect("some kernel fits");
            gpu.launches()
        };
        let large = products(&planner(1 << 30));
        assert_eq!(large["gemm_coop.main"], 3, "{large:?}");
        let small = products(&planner(100_000));
        assert_eq!((small["gemm_tiled.main"], small.len()), (3, 1), "{small:?}");
        // The limit itself: 1000 rows of two blocks.
        let product = Product { form: Form::Nt, operands: [DType::E4M3; 2], sizes: [m, n, k], groups: None };
        assert_eq!(choose(&planner(128_000), &product), GemmKernel::Coop);
        let (kernel, why) = explain(&planner(127_999), &product);
        assert!(kernel == GemmKernel::Tiled && why.contains("coop: an operand in panels"), "{why}");
    }

    #[test]
    fn attention_too_large_in_tiles_is_computed_by_position() {
        let shape = Shape { batch: 2, seq: 129, heads: 4, kv_heads: 2, head_dim: 64, block: None };
        let run = |gpu: &Gpu| {
            let make =
                |heads: usize| Tensor::empty(gpu, "x", &[258, heads * 64], DType::BF16).expect("it fits");
            let (q, k, v) = (make(4), make(2), make(2));
            let (out, lse) = attention::forward(gpu, &q, &k, &v, shape, None).expect("some kernel fits");
            attention::backward(gpu, &out, &q, &k, &v, &out, &lse, shape, None).expect("some kernel fits");
            gpu.launches()
        };
        let padded = 2 * 256 * (4 + 2 + 2) * 64 * 2;
        assert_eq!(run(&planner(padded))["attention_coop.forward"], 1);
        let small = run(&planner(padded - 1));
        assert_eq!((small["attention.forward"], small["attention.by_key"]), (1, 1), "{small:?}");
        assert!(!small.keys().any(|name| name.contains("coop")), "{small:?}");
    }

    #[test]
    fn a_planner_remembers_what_was_chosen() {
        let planner = planner(1 << 30);
        let product = Product { form: Form::Tn, operands: [DType::BF16; 2], sizes: [64; 3], groups: Some(2) };
        assert_eq!(choose(&planner, &product), GemmKernel::Coop);
        choose(&planner, &product);
        let shape = Shape { batch: 1, seq: 64, heads: 1, kv_heads: 1, head_dim: 48, block: None };
        choose(&planner, &Attention { pass: Pass::Backward, dtype: DType::F32, shape });
        let x = Tensor::empty(&planner, "x", &[4, 12], DType::BF16).expect("a tensor");
        quantize::rowwise(&planner, &x).expect("codes");
        assert_eq!(
            Choice::lines(planner.choices()),
            [
                "attention backward f32 d64: scalar (by capability; not coop: no kernel for such operands on the matrix units)",
                "gemm tn bf16 small: coop (by capability; not narrow: no size that is narrow)",
                "quantize rows narrow: simple (by capability; not wide: rows that are not whole units of eight columns)",
            ]
        );
        let x = Tensor::empty(&planner, "x", &[4, 16], DType::BF16).expect("a tensor");
        assert_eq!(choose(&planner, &Quantization::of(&planner, &x, Axes::Both)), QuantizeKernel::Wide);
    }

    /// What a file of [`crate::gpu::Decisions`] may name is what there is.
    #[test]
    fn files_may_name_the_kernels_that_ops_have() {
        fn same<C: Call>(op: &str) {
            let mut names: Vec<&str> = C::TABLE.iter().map(|c| C::name(c.kernel)).collect();
            let mut known = kernels_of(op);
            names.sort_unstable();
            known.sort_unstable();
            assert_eq!(names, known, "{op}");
        }
        same::<Product>("gemm nt bf16 large");
        same::<Attention>("attention forward bf16 d64");
        same::<Quantization>("quantize rows narrow");
    }

    #[test]
    fn a_quantizer_can_be_demanded() {
        let open = |quantizer| {
            let options = Options { treat_as_hardware: true, quantizer, ..Options::default() };
            Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter").planner()
        };
        for (wish, cols, want, words) in [
            (None, 16, QuantizeKernel::Wide, "by capability"),
            (Some(QuantizeKernel::Simple), 16, QuantizeKernel::Simple, "--kernel simple"),
            (Some(QuantizeKernel::Wide), 16, QuantizeKernel::Wide, "--kernel wide"),
            (
                Some(QuantizeKernel::Wide),
                9,
                QuantizeKernel::Simple,
                "not --kernel wide: rows that are not whole",
            ),
        ] {
            let gpu = open(wish);
            let x = Tensor::empty(&gpu, "x", &[4, cols], DType::BF16).expect("a tensor");
            let (kernel, why) = explain(&gpu, &Quantization::of(&gpu, &x, Axes::Columns));
            assert!(kernel == want && why.starts_with(words), "{kernel:?}: {why}");
        }
    }
}
