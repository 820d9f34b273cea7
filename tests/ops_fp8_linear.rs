//! The differentiable fp8 linear op on the running adapter: against CUDA's outputs, and against the f64 products of the
//! same codes within the rounding of an f32 sum and of the result.

mod common;

use common::Fixture;
use moe8::autograd::Tape;
use moe8::gpu::{DeviceChoice, Gpu, Options};
use moe8::num::rng::Stream;
use moe8::num::{DType, bf16};
use moe8::ops::fp8_linear::{self, InputGradient, Operand, Recipe};
use moe8::params::{ParamId, Weights};
use moe8::reference::compare::{bf16_ulp, same_bits, sqnr_at_least, within};
use moe8::reference::fp8_linear::{self as reference, Layer};
use moe8::reference::gemm::{self, Scales};
use moe8::tensor::Tensor;
use std::sync::{Arc, OnceLock};

fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| Gpu::open(&DeviceChoice::from_env()).expect("an adapter"))
}

/// Standard normal values, rounded to bf16.
fn normal(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(0, name);
    (0..len as u64).map(|i| bf16::round(stream.normal(i))).collect()
}

/// A layer with its operands: x (M, K), w (E, N, K) or, without groups, (N, K), d_out (M, N).
struct Case {
    ends: Option<Vec<u32>>,
    m: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    d_out: Vec<f32>,
}

/// What the op gives, downloaded.
struct Results {
    out: Vec<f32>,
    d_x: Vec<f32>,
    d_w: Vec<f32>,
}

impl Case {
    fn new(ends: Option<&[u32]>, m: usize, n: usize, k: usize) -> Case {
        let e = ends.map_or(1, <[u32]>::len);
        let ends = ends.map(<[u32]>::to_vec);
        Case { ends, m, n, k, x: normal("x", m * k), w: normal("w", e * n * k), d_out: normal("d", m * n) }
    }

    fn reference_ends(&self) -> Vec<u32> {
        self.ends.clone().unwrap_or_else(|| vec![self.m as u32])
    }

    fn run(&self, g: &Gpu, dtype: DType, recipe: Recipe) -> Results {
        let (m, n, k) = (self.m, self.n, self.k);
        let shape = self.ends.as_ref().map_or(vec![n, k], |ends| vec![ends.len(), n, k]);
        let x = Tensor::from_f32(g, "x", &[m, k], dtype, &self.x).unwrap();
        let w = Tensor::from_f32(g, "w", &shape, dtype, &self.w).unwrap();
        let d_out = Tensor::from_f32(g, "d_out", &[m, n], dtype, &self.d_out).unwrap();
        let offs = self.ends.as_ref().map(|ends| Tensor::from_u32(g, "offs", ends).unwrap());
        let out = fp8_linear::forward(g, &x, &w, offs.as_ref(), recipe).unwrap();
        let (d_x, d_w) = fp8_linear::backward(g, &d_out, &x, &w, offs.as_ref(), recipe, true).unwrap();
        let d_x = d_x.unwrap();
        for (t, like) in [(&out, &d_out), (&d_x, &x), (&d_w, &w)] {
            assert_eq!((t.shape(), t.dtype()), (like.shape(), like.dtype()));
        }
        let get = |t: &Tensor| t.to_f32(g).unwrap();
        Results { out: get(&out), d_x: get(&d_x), d_w: get(&d_w) }
    }

    /// The three products in f64, of these operands.
    fn products(&self, recipe: Recipe, [x, w, d_out]: [&[f32]; 3]) -> [Vec<f64>; 3] {
        let (ends, n, k) = (self.reference_ends(), self.n, self.k);
        let recipe = match recipe {
            Recipe::HighPrecision => {
                let wide = |v: &[f32]| v.iter().map(|&v| v as f64).collect::<Vec<_>>();
                let (x, w, d_out) = (wide(x), wide(w), wide(d_out));
                return [
                    gemm::nt(&x, &w, &ends, n, k, Scales::NONE),
                    gemm::nn(&d_out, &w, &ends, n, k, Scales::NONE),
                    gemm::tn(&d_out, &x, &ends, n, k, Scales::NONE),
                ];
            }
            Recipe::Rowwise => reference::Recipe::Rowwise,
            Recipe::Tensorwise => reference::Recipe::Tensorwise,
            Recipe::RowwiseGwHp => reference::Recipe::RowwiseWithGwHp,
        };
        let layer = Layer { recipe, offs: &ends, n, k };
        [reference::fprop(layer, x, w), reference::dgrad(layer, d_out, w), reference::wgrad(layer, d_out, x)]
    }

    /// Every element within `length * 2^-24 * sum |a b|` (f32 sums) and half a unit of the result's dtype.
    fn check(&self, dtype: DType, recipe: Recipe, got: &Results) {
        let (m, n, k) = (self.m, self.n, self.k);
        let magnitude = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
        let want = self.products(recipe, [&self.x, &self.w, &self.d_out]);
        let sums = self.products(recipe, [&magnitude(&self.x), &magnitude(&self.w), &magnitude(&self.d_out)]);
        let e = self.reference_ends().len();
        let parts = [
            ("out", &got.out, vec![m, n], k),
            ("d_x", &got.d_x, vec![m, k], n),
            ("d_w", &got.d_w, vec![e, n, k], m),
        ];
        for (((what, got, shape, length), want), sums) in parts.into_iter().zip(want).zip(sums) {
            let bound: Vec<f64> = want.iter().zip(&sums).map(|(w, s)| bound(dtype, length, *w, *s)).collect();
            let got: Vec<f64> = got.iter().map(|&v| v as f64).collect();
            within(&got, &want, &bound, &shape)
                .unwrap_or_else(|e| panic!("{recipe:?} {dtype} {:?} {m} x {n} x {k} {what}: {e}", self.ends));
        }
    }
}

fn bound(dtype: DType, length: usize, want: f64, sum: f64) -> f64 {
    let f32_sum = (length + 2) as f64 * 2f64.powi(-24) * sum;
    let half_unit = if dtype == DType::BF16 { bf16_ulp(want) / 2.0 } else { want.abs() * 2f64.powi(-24) };
    // The factor: a sum just past a power of two has units twice as large.
    2.0 * f32_sum + half_unit * (1.0 + 1e-9)
}

#[test]
fn agrees_with_cuda() {
    for name in ["op_small.safetensors", "op_one_expert.safetensors"] {
        let file = Fixture::read(name);
        let (w, shape) = file.floats("W");
        let (x, shape_x) = file.floats("A");
        let ends = Some(file.words("offs"));
        let d_out = file.floats("dO").0;
        let case = Case { ends, m: shape_x[0], n: shape[1], k: shape[2], x, w, d_out };
        let got = case.run(gpu(), DType::BF16, Recipe::Rowwise);
        for (what, got) in [("out", &got.out), ("dA", &got.d_x), ("dW", &got.d_w)] {
            sqnr_at_least(&file.floats(what).0, got, 50.0).unwrap_or_else(|e| panic!("{name} {what}: {e}"));
        }
        case.check(DType::BF16, Recipe::Rowwise, &got);
    }
}

/// Group ends (`None`: a dense layer), M, N, K: primes, 1, 100, empty groups first, in the middle, last and all, rows
/// past the last end, one group much larger than the others.
const TABLE: [(Option<&[u32]>, usize, usize, usize); 10] = [
    (None, 1, 1, 1),
    (None, 33, 45, 131),
    (None, 7, 17, 100),
    (Some(&[1]), 1, 13, 7),
    (Some(&[0, 7, 13]), 13, 7, 100),
    (Some(&[4, 4, 17]), 17, 13, 17),
    (Some(&[1, 14, 14]), 14, 1, 13),
    (Some(&[0, 0, 0]), 16, 5, 9),
    (Some(&[16, 16, 274]), 290, 13, 20),
    (Some(&[7, 8, 21, 38]), 54, 17, 13),
];

/// Each recipe in one dtype per kind of layer (the golden cases have grouped bf16): a kernel's variants take long to
/// compile on software adapters.
#[test]
fn products_of_the_same_codes() {
    for (ends, m, n, k) in TABLE {
        let case = Case::new(ends, m, n, k);
        let kinds: &[(DType, Recipe)] = match ends {
            None => &[
                (DType::F32, Recipe::HighPrecision),
                (DType::F32, Recipe::Rowwise),
                (DType::BF16, Recipe::RowwiseGwHp),
                (DType::BF16, Recipe::Tensorwise),
            ],
            Some(_) => &[(DType::BF16, Recipe::HighPrecision), (DType::F32, Recipe::Rowwise)],
        };
        for &(dtype, recipe) in kinds {
            case.check(dtype, recipe, &case.run(gpu(), dtype, recipe));
        }
    }
}

/// NaN past the last end, in x and in d_out: those rows come out zero and nothing else changes by a bit.
#[test]
fn tail_rows_are_zero_and_touch_nothing() {
    for recipe in [Recipe::HighPrecision, Recipe::Rowwise] {
        let ends = [5u32, 5, 18];
        let (m, n, k) = (18, 13, 20);
        let clean = Case::new(Some(&ends), m, n, k);
        let mut tail = Case::new(Some(&ends), m, n, k);
        tail.m += 16;
        tail.x.resize(tail.m * k, f32::NAN);
        tail.d_out.resize(tail.m * n, f32::INFINITY);
        let (clean, got) = (clean.run(gpu(), DType::BF16, recipe), tail.run(gpu(), DType::BF16, recipe));
        same_bits(&got.out[..m * n], &clean.out, &[m, n]).unwrap();
        same_bits(&got.d_x[..m * k], &clean.d_x, &[m, k]).unwrap();
        same_bits(&got.d_w, &clean.d_w, &[3, n, k]).unwrap();
        assert!(got.out[m * n..].iter().chain(&got.d_x[m * k..]).all(|v| v.to_bits() == 0), "{recipe:?}");
        assert!(got.d_w[n * k..2 * n * k].iter().all(|v| v.to_bits() == 0), "{recipe:?}: empty group");
    }
}

/// Row 2 of x and row 4 of d_out, both in group 1: their rows, and their columns' weight gradients of that group.
#[test]
fn bad_rows_poison_what_depends_on_them_only() {
    let (ends, m, n, k) = ([2u32, 6, 9], 9, 7, 10);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = Case::new(Some(&ends), m, n, k);
        let clean = case.run(gpu(), DType::F32, Recipe::Rowwise);
        case.x[2 * k + 3] = bad;
        case.d_out[4 * n + 5] = bad;
        let got = case.run(gpu(), DType::F32, Recipe::Rowwise);
        let poisoned = |got: &[f32], clean: &[f32], hit: &dyn Fn(usize) -> bool| {
            for (i, (got, clean)) in got.iter().zip(clean).enumerate() {
                let right = if hit(i) { got.is_nan() } else { got.to_bits() == clean.to_bits() };
                assert!(right, "{bad}: element {i} is {got}, was {clean}");
            }
        };
        poisoned(&got.out, &clean.out, &|i| i / n == 2);
        poisoned(&got.d_x, &clean.d_x, &|i| i / k == 4);
        poisoned(&got.d_w, &clean.d_w, &|i| i / (n * k) == 1 && (i % k == 3 || i / k % n == 5));
    }
}

/// With new memory full of NaN, and with all shader checks on.
#[test]
fn options_change_no_bit() {
    let case = Case::new(Some(&[4, 4, 17]), 20, 13, 17);
    let want = case.run(gpu(), DType::BF16, Recipe::Rowwise);
    let poison = Options { poison: true, ..Options::default() };
    let safe = Options { safe_shaders: true, ..Options::default() };
    for options in [poison, safe] {
        let g = Gpu::open_with(&DeviceChoice::from_env(), options).unwrap();
        let got = case.run(&g, DType::BF16, Recipe::Rowwise);
        for (got, want) in [(&got.out, &want.out), (&got.d_x, &want.d_x), (&got.d_w, &want.d_w)] {
            same_bits(got, want, &[want.len()]).unwrap();
        }
    }
}

/// Two weights over one [`Operand`] give what they give alone, with fewer dispatches.
#[test]
fn a_shared_input_is_quantized_once() {
    let g = &Gpu::open(&DeviceChoice::from_env()).unwrap();
    let (m, n, k) = (9, 5, 8);
    let make = |name, shape: &[usize]| {
        Tensor::from_f32(g, name, shape, DType::BF16, &normal(name, shape.iter().product())).unwrap()
    };
    let (x, d_out) = (make("x", &[m, k]), make("d", &[m, n]));
    let weights = [make("w1", &[2, n, k]), make("w3", &[2, n, k])];
    let offs = Tensor::from_u32(g, "offs", &[4, 9]).unwrap();
    let before = g.counters().dispatches;
    let alone = weights.each_ref().map(|w| {
        let out = fp8_linear::forward(g, &x, w, Some(&offs), Recipe::Rowwise).unwrap();
        (out, fp8_linear::backward(g, &d_out, &x, w, Some(&offs), Recipe::Rowwise, false).unwrap().1)
    });
    let between = g.counters().dispatches;
    let input = Operand::new(&x, Some(&offs));
    let shared = weights.each_ref().map(|w| {
        let out = fp8_linear::forward_with(g, &input, w, Recipe::Rowwise).unwrap();
        (
            out,
            fp8_linear::backward_with(g, &d_out, &input, w, Recipe::Rowwise, InputGradient::None).unwrap().1,
        )
    });
    // Saved: one row-wise quantization (1 dispatch) and one column-wise (1 to 3, by the adapter's kernel).
    let saved = (between - before).checked_sub(g.counters().dispatches - between);
    assert!(saved.is_some_and(|saved| (2..=4).contains(&saved)), "{saved:?} dispatches saved");
    for ((out, d_w), (want, d_want)) in shared.iter().zip(&alone) {
        same_bits(&out.to_f32(g).unwrap(), &want.to_f32(g).unwrap(), &[m, n]).unwrap();
        same_bits(&d_w.to_f32(g).unwrap(), &d_want.to_f32(g).unwrap(), &[2, n, k]).unwrap();
    }
}

/// How many weights, group ends, M, N, K.
type Stack = (usize, Option<&'static [u32]>, usize, usize, usize);

/// P weights of one shape, one after the other: group ends, and M, N, K in units of the f32 scales between two places at which the adapter
/// binds, so that parts of a stack, and their scales, can be bound by themselves.
const STACKS: [Stack; 5] = [
    (1, None, 1, 1, 3),
    (2, None, 33, 2, 5),
    (3, None, 5, 6, 17),
    (2, Some(&[0, 7, 12]), 2, 1, 13),
    (3, Some(&[4, 4, 20]), 3, 3, 2),
];

/// A stack gives what its weights give one by one, and its input the sum of what comes of them, from the last to the first: a new one, or
/// onto what is there.
#[test]
fn stacks_equal_their_weights_one_by_one() {
    for stack in STACKS {
        let kinds: &[(DType, Recipe)] = match stack.1 {
            None => &[
                (DType::F32, Recipe::HighPrecision),
                (DType::F32, Recipe::Rowwise),
                (DType::BF16, Recipe::RowwiseGwHp),
                (DType::BF16, Recipe::Tensorwise),
            ],
            Some(_) => &[(DType::BF16, Recipe::HighPrecision), (DType::F32, Recipe::Rowwise)],
        };
        for &(dtype, recipe) in kinds {
            stack_equals(gpu(), stack, dtype, recipe);
        }
    }
}

fn stack_equals(g: &Gpu, (count, ends, m, n, k): Stack, dtype: DType, recipe: Recipe) {
    let [m, n, k] = [m, n, k].map(|units| units * (g.caps().align as usize / 4).max(4));
    let make = |name: &str, shape: &[usize]| {
        Tensor::from_f32(g, name, shape, dtype, &normal(name, shape.iter().product())).unwrap()
    };
    let what = format!("{count} of {ends:?} {m} x {n} x {k}, {dtype} {recipe:?}");
    let each = ends.map_or(vec![n, k], |ends| vec![ends.len(), n, k]);
    let all: Vec<usize> = [count].into_iter().chain(each.iter().copied()).collect();
    let (x, w, d_out) = (make("x", &[m, k]), make("ws", &all), make("ds", &[count, m, n]));
    let offs = ends.map(|ends| Tensor::from_u32(g, "offs", ends).unwrap());
    let input = Operand::new(&x, offs.as_ref());
    let equal = |name: &str, got: &Tensor, want: &Tensor| {
        let [got, want] = [got, want].map(|t| t.to_f32(g).unwrap());
        same_bits(&got, &want, &[got.len()]).unwrap_or_else(|e| panic!("{what}, {name}: {e}"));
    };
    let out = fp8_linear::forward_stacked(g, &input, &w, recipe).unwrap();
    assert_eq!((out.shape(), out.dtype()), (&[count, m, n][..], dtype));
    let place = make("place", &all);
    let (d_x, d_w) =
        fp8_linear::backward_stacked(g, &d_out, &input, &w, recipe, InputGradient::New, Some(&place))
            .unwrap();
    assert!(Arc::ptr_eq(d_w.memory().0, place.memory().0), "{what}: not in its place");
    let onto = make("sum", &[m, k]);
    let (sum, new) =
        fp8_linear::backward_stacked(g, &d_out, &input, &w, recipe, InputGradient::Onto(&onto), None)
            .unwrap();
    let (none, _) =
        fp8_linear::backward_stacked(g, &d_out, &input, &w, recipe, InputGradient::None, None).unwrap();
    assert!(none.is_none() && new.shape() == w.shape());
    let want_sum = make("sum", &[m, k]);
    let mut first = None;
    for p in (0..count).rev() {
        let [w, d_out, out, d_w, new] = [&w, &d_out, &out, &d_w, &new].map(|t| t.unstack(p));
        equal("out", &out, &fp8_linear::forward_with(g, &input, &w, recipe).unwrap());
        let wanted = first.as_ref().map_or(InputGradient::New, InputGradient::Onto);
        let (d_x, want_w) = fp8_linear::backward_with(g, &d_out, &input, &w, recipe, wanted).unwrap();
        first = d_x;
        fp8_linear::backward_with(g, &d_out, &input, &w, recipe, InputGradient::Onto(&want_sum)).unwrap();
        equal("d_w", &d_w, &want_w);
        equal("d_w without a place", &new, &want_w);
    }
    equal("d_x", &d_x.unwrap(), &first.unwrap());
    equal("d_x onto a sum", &sum.unwrap(), &want_sum);
}

/// One weight of ones (5, 5), whose gradients nobody wants.
struct Ones(Tensor);

impl Weights for Ones {
    fn weight(&self, _: ParamId) -> moe8::Result<Tensor> {
        Ok(self.0.clone())
    }
    fn gradient(&self, _: ParamId, _: Tensor) -> moe8::Result<()> {
        Ok(())
    }
    fn leave(&self, _: usize) -> moe8::Result<()> {
        Ok(())
    }
}

/// Gradients of one variable's uses are added: in place where the sum is the variable's own (two linears), and not where it
/// is another variable's too (a sum's two sides).
#[test]
fn gradients_of_several_uses_are_added() {
    let g = gpu();
    let make = |values: Vec<f32>| Tensor::from_f32(g, "t", &[2, 5], DType::F32, &values).unwrap();
    let weights = Ones(Tensor::from_f32(g, "w", &[5, 5], DType::F32, &[1.0; 25]).unwrap());
    let d: Vec<f32> = (0..10u8).map(f32::from).collect();
    let mut tape = Tape::new(g, &weights);
    let x = tape.leaf(make(vec![1.0; 10]));
    let [a, b] = tape.linears(&x, [(ParamId(0), Recipe::HighPrecision); 2], None).unwrap();
    let y = tape.add(&a, &b).unwrap();
    let c = tape.linear(&y, ParamId(0), None, Recipe::HighPrecision).unwrap();
    let z = tape.add(&y, &c).unwrap();
    let grads = tape.backward(&z, Some(make(d.clone())), &[&x, &y]).unwrap();
    let values = |i: usize| grads[i].as_ref().expect("a gradient").to_f32(g).unwrap();
    let sum = |d: &[f32]| d.chunks(5).flat_map(|row| [row.iter().sum::<f32>(); 5]).collect::<Vec<f32>>();
    let d_y: Vec<f32> = d.iter().zip(sum(&d)).map(|(d, s)| d + s).collect();
    let d_x: Vec<f32> = sum(&d_y).iter().map(|s| 2.0 * s).collect();
    assert_eq!((values(1), values(0)), (d_y, d_x));
}
