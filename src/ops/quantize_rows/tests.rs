//! Codes in panels against codes row by row, and rows that are quantized while they are made against rows that are made first: equal
//! bit for bit. Poisoned memory shows what is not written.

use crate::gpu::Gpu;
use crate::num::rng::Stream;
use crate::num::{DType, bf16};
use crate::ops::dispatch::{self, Plan};
use crate::ops::panels::{Codes, Contraction, Order};
use crate::ops::quantize::oracle::{self, bytes, gpu};
use crate::ops::quantize::{self, Quantized, Ready, Wish};
use crate::ops::quantize_choice::Axes;
use crate::ops::quantize_wide::Groups;
use crate::ops::rmsnorm::{self, Norm};
use crate::ops::swiglu;
use crate::tensor::Tensor;

/// Normal values in columns of different sizes, with a row of zeros, a NaN, an infinity and, next to the padding, large ones.
fn values(gpu: &Gpu, name: &str, shape: &[usize]) -> Tensor {
    let (cols, stream) = (shape[shape.len() - 1], Stream::new(0, name));
    let numel: usize = shape.iter().product();
    let value = |i: usize| bf16::round(stream.normal(i as u64) * 2f32.powi((i % cols % 9) as i32 - 4));
    let mut values: Vec<f32> = (0..numel).map(value).collect();
    let rows = numel / cols;
    for (row, col, value) in [(4, cols - 1, 3e38), (9, 0, f32::INFINITY), (12, cols / 2, f32::NAN)] {
        if row < rows {
            values[row * cols + col] = value;
        }
    }
    if rows > 2 {
        values[2 * cols..3 * cols].fill(0.0);
    }
    Tensor::from_f32(gpu, name, shape, DType::BF16, &values).unwrap()
}

fn same(gpu: &Gpu, what: &str, a: &Quantized<Codes>, b: &Quantized<Codes>) {
    oracle::same(what, (gpu, a), (gpu, b));
}

#[test]
fn panels_hold_the_codes_of_rows() {
    let gpu = gpu();
    let ends = Tensor::from_u32(&gpu, "ends", &[0, 3, 70, 70, 134, 200]).unwrap();
    let weight = values(&gpu, "weight", &[3, 66, 24]);
    let cases = [
        (values(&gpu, "x", &[230, 72]), Groups::of_rows(Some(&ends)), DType::E4M3),
        (weight.clone(), Groups::of_weight(&weight), DType::F16),
    ];
    for (x, groups, dtype) in cases {
        assert!(quantize::use_wide(&gpu, &x, Axes::Rows, Order::Panels));
        let check = |panels: &Quantized<Codes>, rows: &Quantized<Codes>, along: Contraction<'_>| {
            assert_eq!([panels, rows].map(|q| q.codes.order()), [Order::Panels, Order::Rows]);
            let codes = rows.codes.to_panels(&gpu, along).unwrap();
            let packed = Quantized { codes, descale: rows.descale.clone() };
            same(&gpu, &format!("{along:?} {:?} {dtype}", x.shape()), panels, &packed);
        };
        let orders = [Order::Panels, Order::Rows];
        let [rows, by_rows] = orders.map(|o| quantize::along_rows(&gpu, &x, dtype, o).unwrap());
        check(&rows, &by_rows, Contraction::Columns);
        let [columns, by_columns] =
            orders.map(|o| quantize::columns(&gpu, &x, groups, None, dtype, o).unwrap());
        check(&columns, &by_columns, groups.contraction());
        let (rows, columns) = quantize::both_axes(&gpu, &x, groups, dtype, Order::Panels).unwrap();
        check(&rows, &by_rows, Contraction::Columns);
        check(&columns, &by_columns, groups.contraction());
    }
}

/// What was wished of `x`, which was made with it, is what is made of `x` afterwards.
fn check(gpu: &Gpu, what: &str, x: &Tensor, ready: &Ready, wish: Wish<'_>) {
    let what = format!("{what} {:?} {} {:?}", x.shape(), wish.dtype, wish.order);
    let rows = ready.rows.as_ref().unwrap_or_else(|| panic!("{what}: made apart"));
    let later = quantize::along_rows(gpu, x, wish.dtype, wish.order).unwrap();
    same(gpu, &format!("{what} rows"), rows, &later);
    assert_eq!(ready.tops.is_some(), wish.tops.is_some(), "{what}");
    if let Some(groups) = wish.tops {
        let columns = |tops| quantize::columns(gpu, x, groups, tops, wish.dtype, wish.order).unwrap();
        same(gpu, &format!("{what} columns"), &columns(ready.tops.as_ref()), &columns(None));
    }
}

/// Rows, columns (1, primes, not whole units, one past a tile, more units than lanes) and, where tops are wished for, group ends: also
/// empty groups and rows past the last end. Few, for each is a kernel of its own, which software adapters take long to compile.
const TABLE: [(usize, usize, Option<&[u32]>); 4] =
    [(1, 8, Some(&[1])), (67, 7, Some(&[0, 5, 5, 66])), (45, 1037, Some(&[0, 41])), (130, 72, Some(&[]))];

fn wish_of<'a>(i: usize, offs: &'a Tensor, ends: Option<&[u32]>) -> Wish<'a> {
    let (dtype, order) = [(DType::E4M3, Order::Panels), (DType::F16, Order::Rows)][i % 2];
    let groups = |ends: &[u32]| Groups::of_rows((!ends.is_empty()).then_some(offs));
    Wish { dtype, order, tops: ends.map(groups) }
}

#[test]
fn a_gated_row_is_quantized_as_it_is_made() {
    let gpu = gpu();
    for (i, (rows, cols, ends)) in TABLE.into_iter().enumerate() {
        let [gate, up] = ["gate", "up"].map(|name| values(&gpu, name, &[rows, cols]));
        let offs = Tensor::from_u32(&gpu, "ends", ends.unwrap_or_default()).unwrap();
        let wish = wish_of(i, &offs, ends);
        let h = swiglu::forward(&gpu, &gate, &up).unwrap();
        let (fused, ready) = swiglu::forward_for(&gpu, &gate, &up, Some(wish)).unwrap();
        assert!(bytes(&gpu, &fused) == bytes(&gpu, &h), "swiglu {rows} x {cols}: h differs");
        check(&gpu, "swiglu", &fused, &ready, wish);
    }
}

/// A plan for `rows` routed rows of one a token, with group ends; not what a router would give, but any order will do.
fn plan(gpu: &Gpu, rows: usize, ends: &[u32]) -> Plan {
    let index = |name: &str, values: &[u32]| Tensor::from_u32(gpu, name, values).unwrap();
    let order: Vec<u32> = (0..rows as u32).rev().collect();
    Plan {
        counts: index("counts", &vec![0; ends.len().max(1)]),
        offs: index("offs", ends),
        order: index("order", &order),
        slot: index("slot", &order),
        top_k: 1,
    }
}

#[test]
fn a_routed_row_is_quantized_as_it_is_made() {
    let gpu = gpu();
    for (i, (rows, cols, ends)) in TABLE.into_iter().enumerate() {
        let x = values(&gpu, "x", &[rows, cols]);
        let plan = plan(&gpu, rows, ends.unwrap_or_default());
        let stream = Stream::new(0, "weights");
        // Times 1.5 there are ties to round; a NaN hides what else its group's columns hold.
        let weight = |i| if i % 2 == 0 { 1.5 } else { stream.normal(i) };
        let mut weights: Vec<f32> = (0..rows as u64).map(weight).collect();
        if i == 1 {
            weights[rows / 3] = f32::NAN;
        }
        let weights = Tensor::from_flat_f32(&gpu, "weights", &weights).unwrap();
        let weights = (i != 3).then_some(&weights);
        let wish = wish_of(i, &plan.offs, ends);
        let out = dispatch::gather(&gpu, &x, &plan, weights).unwrap();
        let (fused, ready) = dispatch::gather_for(&gpu, &x, &plan, weights, Some(wish)).unwrap();
        assert!(bytes(&gpu, &fused) == bytes(&gpu, &out), "gather {rows} x {cols}: rows differ");
        check(&gpu, "gather", &fused, &ready, wish);
    }
}

/// Rows and columns of normed rows: as [`TABLE`], and rows of as many units as the largest team has here, but for three columns.
const NORMED: [(usize, usize); 4] = [(1, 8), (67, 7), (45, 1021), (130, 72)];

/// Bytes of y, of its factors and, of a sum, of the sum; and what is left of the wish.
fn norm(
    gpu: &Gpu,
    x: &Tensor,
    more: Option<&Tensor>,
    wish: Option<Wish<'_>>,
) -> ([Vec<u8>; 3], Tensor, Ready) {
    let (weight, eps) = (&values(gpu, "weight", &[x.cols()]), 1e-5);
    let (sum, (y, rstd, ready)) = match more {
        None => (None, rmsnorm::forward_for(gpu, Norm { x, weight, sum: None, eps }, wish).unwrap()),
        Some(more) => {
            let (sum, normed) = rmsnorm::forward_of_sum_for(gpu, [x, more], weight, eps, wish).unwrap();
            (Some(sum), normed)
        }
    };
    let sum = sum.map(|sum| bytes(gpu, &sum)).unwrap_or_default();
    ([bytes(gpu, &y), bytes(gpu, &rstd), sum], y, ready)
}

#[test]
fn a_normed_row_is_quantized_as_it_is_made() {
    let gpu = gpu();
    for (i, (rows, cols)) in NORMED.into_iter().enumerate() {
        let [x, more] = ["x", "more"].map(|name| values(&gpu, name, &[rows, cols]));
        let more = [None, Some(&more), Some(&more), None][i];
        let none = Tensor::from_u32(&gpu, "ends", &[]).unwrap();
        let wish = wish_of(i, &none, (i != 2).then_some(&[]));
        let (apart, ..) = norm(&gpu, &x, more, None);
        let (fused, y, ready) = norm(&gpu, &x, more, Some(wish));
        for (what, a, b) in [("y", 0), ("rstd", 1), ("sum", 2)].map(|(what, i)| (what, &fused[i], &apart[i]))
        {
            assert!(a == b, "norm {rows} x {cols}: {what} differs");
        }
        check(&gpu, "norm", &y, &ready, wish);
    }
}

/// Rows too long for a team's registers and columns in groups are normed first, and no less right.
#[test]
fn normed_rows_that_do_not_fit_are_left() {
    let gpu = gpu();
    for (i, (cols, ends)) in [(8200, &[][..]), (24, &[2, 5])].into_iter().enumerate() {
        let x = values(&gpu, "x", &[5, cols]);
        let offs = Tensor::from_u32(&gpu, "ends", ends).unwrap();
        let (fused, _, ready) = norm(&gpu, &x, None, Some(wish_of(i, &offs, Some(ends))));
        assert!(ready.rows.is_none() && ready.tops.is_none(), "{cols} columns in groups {ends:?}");
        assert!(fused == norm(&gpu, &x, None, None).0);
    }
}

/// Where a driver's halves are not exact, the codes come from the exact encoder: of rows, and of the columns of short and long groups.
#[test]
fn codes_do_not_depend_on_the_drivers_halves() {
    let [exact, inexact] = [gpu(), gpu().with_inexact_halves()];
    for shape in [[70, 72], [1100, 24]] {
        let [(rows, columns), (other_rows, other_columns)] = [&exact, &inexact].map(|gpu| {
            let x = values(gpu, "x", &shape);
            quantize::both_axes(gpu, &x, Groups::of_rows(None), DType::E4M3, Order::Panels).unwrap()
        });
        oracle::same(&format!("rows of {shape:?}"), (&inexact, &other_rows), (&exact, &rows));
        oracle::same(&format!("columns of {shape:?}"), (&inexact, &other_columns), (&exact, &columns));
    }
    let took = |gpu: &Gpu, how: &str| gpu.kernels().iter().any(|kernel| kernel.contains(how));
    assert!(took(&exact, "HALVES=1") && took(&inexact, "EXACT=1") && !took(&inexact, "HALVES=1"));
}
