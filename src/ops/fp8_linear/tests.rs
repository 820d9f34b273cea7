//! Which kernels a linear asks for, where forms of a product are computed by different ones: seen on a planner of an adapter with
//! matrix units, which needs none.

use super::{InputGradient, Operand, Recipe, backward_of, forward_with, wish_of_input};
use crate::gpu::{Caps, Decisions, DeviceChoice, GemmKernel, Gpu, MatrixUnits};
use crate::num::DType;
use crate::ops::gemm_choice::Form;
use crate::ops::panels::Order;
use crate::ops::quantize::Ready;
use crate::ops::swiglu;
use crate::tensor::Tensor;

const SIZES: [usize; 3] = [256, 128, 192];

/// A planner of a GPU with matrix units that may not compute products of these forms and operands.
pub(super) fn planner(without: &[(Form, &str)]) -> Gpu {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let folder = tempfile::tempdir().unwrap();
    let mut decisions = Decisions::load(folder.path(), gpu.name(), gpu.driver());
    for &(form, operands) in without {
        let (op, kernel) = (format!("gemm {} {operands}", form.name()), GemmKernel::Coop);
        decisions.begin(&op, kernel.name()).unwrap();
        decisions.end(Some("planted".into())).unwrap();
    }
    let coop = Some(MatrixUnits::Coop16);
    gpu.planner_with_decisions(Caps { software: false, subgroup_max: 32, coop, ..gpu.caps() }, decisions)
}

/// The operands of a linear: x (M, K), w (N, K), d_out (M, N), in bf16.
fn operands(gpu: &Gpu) -> [Tensor; 3] {
    let [m, n, k] = SIZES;
    [[m, k], [n, k], [m, n]].map(|shape| Tensor::empty(gpu, "operand", &shape, DType::BF16).unwrap())
}

/// The kernels of a forward and a backward pass by name, each with its order of codes and whether it takes tops, where it says so.
fn kernels(gpu: &Gpu, recipe: Recipe) -> Vec<String> {
    let [x, w, d_out] = operands(gpu);
    let input = Operand::new(&x, None);
    forward_with(gpu, &input, &w, recipe).unwrap();
    backward_of(gpu, (&d_out, Ready::default()), &input, &w, recipe, InputGradient::New, None).unwrap();
    named(gpu)
}

fn named(gpu: &Gpu) -> Vec<String> {
    let told = |word: &&str| word.starts_with("IN_PANELS=") || word.starts_with("TOPS=");
    let short =
        |key: String| key.split(' ').take(1).chain(key.split(' ').filter(told)).collect::<Vec<_>>().join(" ");
    let mut names: Vec<String> = gpu.kernels().into_iter().map(short).collect();
    names.retain(|name| name != "gemm_sum.sum");
    names.sort();
    names.dedup();
    names
}

#[test]
fn each_product_has_operands_in_its_own_order() {
    let rows = |panels: u32| format!("quantize_rows.rows IN_PANELS={panels} TOPS=0");
    let columns = |panels: u32| format!("quantize_strips.columns IN_PANELS={panels}");
    let coop = || "gemm_coop.main".to_owned();
    let all = vec![coop(), rows(1), "quantize_strips.both IN_PANELS=1".into(), columns(1)];
    assert_eq!(kernels(&planner(&[]), Recipe::Rowwise), all);
    // bf16 goes the same way, as halves.
    assert_eq!(kernels(&planner(&[]), Recipe::HighPrecision), all);
    let fp8 = planner(&[(Form::Tn, "fp8")]);
    let split = vec![coop(), "gemm_tiled.main".into(), rows(1), columns(0), columns(1)];
    assert_eq!(kernels(&fp8, Recipe::Rowwise), split, "the weight's gradient alone without matrix units");
    let nn = planner(&[(Form::Nn, "fp8")]);
    let split = vec![coop(), "gemm_tiled.main".into(), rows(0), rows(1), columns(0), columns(1)];
    assert_eq!(kernels(&nn, Recipe::Rowwise), split, "the input's gradient alone without matrix units");
}

/// Codes that exist already are taken, those of another order are not.
#[test]
fn an_input_takes_what_its_maker_left() {
    let gpu = planner(&[]);
    let [x, w, d_out] = operands(&gpu);
    let readers = [(SIZES[1], Recipe::Rowwise); 2];
    let wish = wish_of_input(&gpu, (SIZES[0], &x), &readers, None, true);
    assert!(wish.is_some_and(|w| w.order == Order::Panels && w.dtype == DType::E4M3 && w.tops.is_some()));
    let (h, ready) = swiglu::forward_for(&gpu, &x, &x, wish).unwrap();
    let input = Operand::with(&h, None, ready);
    forward_with(&gpu, &input, &w, Recipe::Rowwise).unwrap();
    // The weight's codes are the only ones that are made.
    let made = gpu.counters().dispatches;
    assert_eq!(made, 3, "swiglu, quantization of the weight, product: {:?}", named(&gpu));
    let codes = input.wish_of_gradient(&gpu, SIZES[1], Recipe::Rowwise);
    let [gate, up] = [&d_out; 2];
    let (d_out, ready) = swiglu::forward_for(&gpu, gate, up, codes).unwrap();
    backward_of(&gpu, (&d_out, ready), &input, &w, Recipe::Rowwise, InputGradient::None, None).unwrap();
    // A cast of the gradient and one of the input, the product in runs and their sum.
    let made = gpu.counters().dispatches - made - 1;
    assert_eq!(made, 4, "{:?}", named(&gpu));
    let mixed = [(SIZES[1], Recipe::Rowwise), (SIZES[1], Recipe::HighPrecision)];
    assert!(wish_of_input(&gpu, (SIZES[0], &x), &mixed, None, true).is_none());
    assert!(wish_of_input(&gpu, (SIZES[0], &x), &[], None, true).is_none());
}

/// A place for the weight's gradient takes the bits that a new tensor has, and nothing beside it is touched.
#[test]
fn a_weight_gradient_goes_where_it_is_told() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let ([m, n, k], experts) = ([37, 16, 22], 3);
    let value = |i: usize| (i * 7919 % 223) as f32 / 64.0 - 1.7;
    for (dtype, recipe, grouped) in [
        (DType::F32, Recipe::HighPrecision, false),
        (DType::BF16, Recipe::HighPrecision, true),
        (DType::BF16, Recipe::Rowwise, false),
        (DType::F32, Recipe::Rowwise, true),
        (DType::BF16, Recipe::Tensorwise, false),
        (DType::BF16, Recipe::RowwiseGwHp, true),
    ] {
        let tensor = |shape: &[usize]| {
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            Tensor::from_f32(&gpu, "operand", shape, dtype, &values).unwrap()
        };
        let offs = grouped.then(|| Tensor::from_u32(&gpu, "offs", &[20, 20, 37]).unwrap());
        let (w, rows) = if grouped { (tensor(&[experts, n, k]), experts * n) } else { (tensor(&[n, k]), n) };
        let (x, d_out) = (tensor(&[m, k]), tensor(&[m, n]));
        let gradient = |place: Option<&Tensor>| {
            let (input, d_out) = (Operand::new(&x, offs.as_ref()), (&d_out, Ready::default()));
            backward_of(&gpu, d_out, &input, &w, recipe, InputGradient::None, place).unwrap().1
        };
        let (want, around) = (gradient(None), tensor(&[16 + rows + 16, k]));
        let place = around.slice_rows(16, 16 + rows).reshape(w.shape());
        let got = gradient(Some(&place));
        assert!(got.is_same_memory(&place) && got.shape() == want.shape(), "{recipe:?}: {:?}", got.shape());
        let (got, want) = (around.to_f32(&gpu).unwrap(), want.to_f32(&gpu).unwrap());
        let (first, last) = (16 * k, (16 + rows) * k);
        assert!(got[first..last] == want[..], "{recipe:?} {dtype}: the gradient");
        let untouched = tensor(&[16 + rows + 16, k]).to_f32(&gpu).unwrap();
        assert!(got[..first] == untouched[..first] && got[last..] == untouched[last..], "{recipe:?} {dtype}");
    }
}
