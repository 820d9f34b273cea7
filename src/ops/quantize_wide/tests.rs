//! Columns in several cuts, by tops that each tile merges and by de-scales that a pass makes, against the simple kernels, bit for bit.
//! Poisoned memory shows what is not written.

use super::{Groups, Pass, Shape, run};
use crate::num::DType;
use crate::ops::panels::Order;
use crate::ops::quantize;
use crate::ops::quantize::oracle::{gpu, same, simple, values};
use crate::tensor::Tensor;

/// Rows, columns (1, primes, one past a block), group ends (empty groups, all rows in one, rows of none, none at all), the cut, what the
/// codes are.
type Case = (usize, usize, Option<&'static [u32]>, Shape, (DType, Order));

const fn cut(across: usize, chunk: usize, turns: usize) -> Shape {
    Shape { across, batch: 2, turns, chunk, cast: super::LANES / across * super::STEPS * turns }
}

const TABLE: [Case; 7] = [
    (1, 8, Some(&[1]), cut(1, 32, 1), (DType::E4M3, Order::Panels)),
    (139, 37, Some(&[0, 3, 67, 67, 132]), cut(8, 32, 2), (DType::E4M3, Order::Panels)),
    (139, 37, Some(&[0, 3, 67, 67, 132]), cut(4, 64, 1), (DType::E4M3, Order::Rows)),
    (641, 72, Some(&[0, 257]), cut(8, 32, 2), (DType::E4M3, Order::Panels)),
    (641, 72, None, cut(8, 128, 2), (DType::E4M3, Order::Panels)),
    (291, 136, None, cut(8, 32, 1), (DType::F16, Order::Panels)),
    (5, 5, Some(&[0, 0, 0]), cut(1, 32, 1), (DType::E4M3, Order::Rows)),
];

const MERGED: &[Pass] = &[Pass::Cast { merged: true }];
const GIVEN: &[Pass] = &[Pass::Descales, Pass::Cast { merged: false }];

#[test]
fn columns_make_the_codes_of_the_simple_kernels() {
    let [gpu, simple] = [gpu(), simple()];
    for (rows, cols, ends, shape, (dtype, order)) in TABLE {
        let values = values(rows, cols);
        let [(x, offs), (y, y_offs)] = [&gpu, &simple].map(|gpu| {
            let offs = ends.map(|ends| Tensor::from_u32(gpu, "ends", ends).unwrap());
            (Tensor::from_f32(gpu, "x", &[rows, cols], DType::BF16, &values).unwrap(), offs)
        });
        let [groups, want] = [offs.as_ref(), y_offs.as_ref()].map(Groups::of_rows);
        let want = quantize::columns(&simple, &y, want, None, dtype, order).unwrap();
        for passes in [MERGED, GIVEN] {
            let got = run(&gpu, &x, groups, None, (dtype, order), (shape, passes)).unwrap();
            let what = format!("{rows} x {cols} {ends:?} {shape:?} {dtype} {order:?} {passes:?}");
            same(&what, (&gpu, &got), (&simple, &want));
        }
    }
}

/// The groups of a weight lie one after another.
#[test]
fn columns_of_weights() {
    let [gpu, simple] = [gpu(), simple()];
    let shape = [3, 70, 72];
    let values = values(shape[0] * shape[1], shape[2]);
    let [w, v] = [&gpu, &simple].map(|gpu| Tensor::from_f32(gpu, "w", &shape, DType::BF16, &values).unwrap());
    for (dtype, order) in
        [(DType::E4M3, Order::Panels), (DType::E4M3, Order::Rows), (DType::F16, Order::Panels)]
    {
        let want = quantize::along_weight_columns(&simple, &v, dtype, order).unwrap();
        for passes in [MERGED, GIVEN] {
            let cut = (cut(8, 32, 1), passes);
            let got = run(&gpu, &w, Groups::of_weight(&w), None, (dtype, order), cut).unwrap();
            same(&format!("weight {dtype} {order:?} {passes:?}"), (&gpu, &got), (&simple, &want));
        }
    }
}

/// As measured on the H200: a pass for de-scales where casts would read tops again and again.
#[test]
fn descales_are_made_first_where_tops_are_many() {
    for (rows, groups, cols, ragged, want) in [
        (16384, 1, 8192, false, GIVEN),
        (16384, 1, 5120, false, GIVEN),
        (16384, 1, 5120, true, GIVEN),
        (16384, 1, 2048, false, MERGED),
        (16384, 8, 5120, true, GIVEN),
        (16384, 8, 5120, false, MERGED),
        (16384, 8, 2048, true, MERGED),
        (16384, 1, 256, false, MERGED),
    ] {
        let (chunks, tiles) = (rows / 32, rows / 256 + groups - 1);
        let sizes = [chunks, groups, tiles, cols / super::UNIT];
        let got = [Order::Panels, Order::Rows].map(|order| Pass::casts(sizes, ragged, order));
        assert_eq!(got, [want, MERGED], "{rows} rows in {groups} groups x {cols}, by offsets: {ragged}");
    }
}
