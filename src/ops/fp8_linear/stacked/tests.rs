//! How many launches a stack needs, and which kernels: seen on a planner of an adapter with matrix units, which needs none. And that a
//! stack's codes are those of its matrices alone.

use super::super::tests::planner;
use super::{backward_stacked, can_stack, forward_stacked};
use crate::gpu::{Caps, DeviceChoice, Gpu, MatrixUnits, Options};
use crate::num::DType;
use crate::num::rng::Stream;
use crate::ops::fp8_linear::{InputGradient, Operand, Recipe};
use crate::ops::panels::{Codes, Order};
use crate::ops::quantize::{self, Quantized};
use crate::ops::quantize_wide::Groups;
use crate::tensor::Tensor;

/// P, E, and M, N, K.
type Sizes = (usize, Option<usize>, [usize; 3]);

/// The input, the weights and d_out of a stack in bf16.
fn operands(gpu: &Gpu, (count, experts, [m, n, k]): Sizes) -> (Operand, Tensor, Tensor) {
    let make = |shape: &[usize]| Tensor::empty(gpu, "operand", shape, DType::BF16).unwrap();
    let weights: Vec<usize> = [count].into_iter().chain(experts).chain([n, k]).collect();
    let offs = experts.map(|e| Tensor::flat(gpu, "offs", e, DType::U32).unwrap());
    (Operand::new(&make(&[m, k]), offs.as_ref()), make(&weights), make(&[count, m, n]))
}

/// Dispatches of both passes, and how many of each are products.
fn launches(gpu: &Gpu, sizes: Sizes, recipe: Recipe) -> [[u64; 2]; 2] {
    let (input, w, d_out) = operands(gpu, sizes);
    let seen = || [gpu.counters().dispatches, gpu.launches().get("gemm_coop.main").copied().unwrap_or(0)];
    let start = seen();
    forward_stacked(gpu, &input, &w, recipe).unwrap();
    let between = seen();
    backward_stacked(gpu, &d_out, &input, &w, recipe, InputGradient::New, None).unwrap();
    let end = seen();
    [[0, 1].map(|i| between[i] - start[i]), [0, 1].map(|i| end[i] - between[i])]
}

#[test]
fn a_stack_shares_its_launches() {
    let short = [256, 128, 192];
    let debug_model = [16384, 256, 256];
    for (sizes, recipe, forward, backward) in [
        // Codes of x and of the weights. Then codes of d_out, of the weights and of x, a product for the sum of the input's gradients, and one in
        // runs, with their sum.
        ((3, None, short), Recipe::Rowwise, [3, 1], [6, 2]),
        // bf16 goes the same way, as halves.
        ((3, None, short), Recipe::HighPrecision, [3, 1], [6, 2]),
        // Tall columns take two launches, and there are fewer runs.
        ((3, None, debug_model), Recipe::Rowwise, [3, 1], [8, 2]),
        ((1, None, short), Recipe::Rowwise, [3, 1], [6, 2]),
        // d_out once as codes and once as halves; of each weight codes of one scale, in four launches, and those in panels.
        ((3, None, short), Recipe::RowwiseGwHp, [3, 1], [23, 4]),
        // In groups only the weights' codes are shared: two launches for each d_out, two for x, and gradients in runs one by one.
        ((2, Some(4), [1024, 256, 256]), Recipe::Rowwise, [3, 1], [13, 4]),
    ] {
        let found = launches(&planner(&[]), sizes, recipe);
        assert_eq!(found, [forward, backward], "{sizes:?} {recipe:?}");
    }
}

/// One result decides whether the text is short, not how many there are.
#[test]
fn a_stack_takes_the_text_of_its_products() {
    for (count, k, short) in [(5, 256, "SHORT=1"), (2, 2048, "SHORT=0")] {
        let gpu = planner(&[]);
        let (input, w, _) = operands(&gpu, (count, None, [16384, 256, k]));
        forward_stacked(&gpu, &input, &w, Recipe::Rowwise).unwrap();
        let product = gpu.kernels().into_iter().find(|name| name.starts_with("gemm_coop.")).unwrap();
        assert!(product.contains(short), "{count}: {product}");
    }
}

#[test]
fn stacks_are_for_short_products_on_matrix_units() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let coop = Some(MatrixUnits::Coop16);
    let caps = Caps { software: false, subgroup_max: 32, coop, max_binding: 1 << 30, ..gpu.caps() };
    let caps = Caps { max_buffer: 1 << 30, align: 16, ..caps };
    let (large, debug_model) = (gpu.planner_with(caps), [16384, 256, 256]);
    for (caps, sizes, recipe, can) in [
        (caps, (3, None, debug_model), Recipe::Rowwise, true),
        (caps, (3, None, debug_model), Recipe::HighPrecision, true),
        (caps, (2, Some(8), debug_model), Recipe::RowwiseGwHp, true),
        (caps, (3, None, debug_model), Recipe::Tensorwise, false),
        (caps, (1, None, debug_model), Recipe::Rowwise, false),
        (caps, (3, None, [4096; 3]), Recipe::Rowwise, false),
        // Parts that cannot be bound: their rows', columns' or weights' scales.
        (caps, (3, None, [258, 128, 128]), Recipe::Rowwise, false),
        (caps, (3, None, [256, 126, 128]), Recipe::Rowwise, false),
        (caps, (3, None, [256, 128, 126]), Recipe::Rowwise, false),
        (Caps { align: 4096, ..caps }, (3, None, [1024, 128, 128]), Recipe::Rowwise, false),
        (Caps { max_binding: 16384 * 256 * 3, ..caps }, (3, None, debug_model), Recipe::Rowwise, false),
        (Caps { software: true, ..caps }, (3, None, debug_model), Recipe::Rowwise, false),
        (Caps { coop: None, ..caps }, (3, None, debug_model), Recipe::Rowwise, false),
        // A router's products have a kernel of their own.
        (caps, (3, None, [16384, 8, 256]), Recipe::HighPrecision, false),
    ] {
        let (input, w, _) = operands(&large, sizes);
        assert_eq!(
            can_stack(&gpu.planner_with(caps), &input, &w, recipe),
            can,
            "{sizes:?} {recipe:?} {caps:?}"
        );
    }
}

fn bytes(gpu: &Gpu, t: &Tensor) -> Vec<u8> {
    let (buffer, offset) = t.memory();
    gpu.download(buffer, offset, t.bytes()).unwrap()
}

/// In one dispatch by columns and in two, in panels and in rows of codes, along each axis and along both at once.
#[test]
fn codes_of_a_stack_are_those_of_its_matrices() {
    let options = Options { treat_as_hardware: true, poison: true, ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
    let (count, cols) = (3, 72);
    for (rows, order) in [(67, Order::Panels), (67, Order::Rows), (1100, Order::Panels)] {
        let (stream, each) = (Stream::new(0, "x"), rows * cols);
        let values: Vec<f32> =
            (0..count * each).map(|i| stream.normal(i as u64) * 2f32.powi((i / each) as i32)).collect();
        let tensor = |shape: &[usize], values: &[f32]| {
            Tensor::from_f32(&gpu, "x", shape, DType::BF16, values).unwrap()
        };
        let make = |x: &Tensor| -> [Quantized<Codes>; 4] {
            let (a, b) = quantize::both_axes(&gpu, x, Groups::of_weight(x), DType::E4M3, order).unwrap();
            let along_rows = quantize::along_rows(&gpu, x, DType::E4M3, order).unwrap();
            [along_rows, quantize::along_weight_columns(&gpu, x, DType::E4M3, order).unwrap(), a, b]
        };
        let all = make(&tensor(&[count, rows, cols], &values));
        for (p, values) in values.chunks(each).enumerate() {
            for (i, (stacked, alone)) in all.iter().zip(make(&tensor(&[rows, cols], values))).enumerate() {
                let part = stacked.part(p, count);
                assert_eq!(part.codes.shape(), [rows, cols]);
                let same = bytes(&gpu, part.codes.memory()) == bytes(&gpu, alone.codes.memory())
                    && bytes(&gpu, &part.descale) == bytes(&gpu, &alone.descale);
                assert!(same, "{rows} rows, {order:?}: matrix {p}, kind {i}");
            }
        }
    }
}
