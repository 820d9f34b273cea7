//! Strips in several cuts against the simple kernels, bit for bit; where strips pay. Poisoned memory shows what is not written.

use super::{Shape, Work, run};
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::panels::Order;
use crate::ops::quantize;
use crate::ops::quantize::oracle::{gpu, same, simple, values};
use crate::ops::quantize_wide::Groups;
use crate::tensor::Tensor;

/// Rows, columns (1, primes, one past a strip), group ends (empty groups, all rows in one, rows of none, more rows than stay in
/// registers, one past them), the cut, the order, whether along both axes. Few, for each is a kernel of its own.
type Case = (usize, usize, Option<&'static [u32]>, Shape, Order, bool);

const fn cut(lanes: usize, across: usize, held: usize, team: usize) -> Shape {
    Shape { lanes, across, held, team }
}

const TABLE: [Case; 7] = [
    (1, 8, Some(&[1]), cut(64, 2, 1, 4), Order::Panels, true),
    (139, 37, Some(&[0, 3, 67, 67, 132]), cut(64, 1, 0, 2), Order::Rows, true),
    (139, 37, Some(&[0, 3, 67, 67, 132]), cut(64, 1, 0, 2), Order::Panels, true),
    (291, 72, Some(&[0, 257]), cut(64, 2, 1, 1), Order::Rows, false),
    (291, 72, Some(&[0, 257]), cut(64, 2, 1, 1), Order::Panels, false),
    (641, 40, None, cut(64, 4, 0, 8), Order::Panels, true),
    (5, 5, Some(&[0, 0, 0]), cut(64, 8, 0, 1), Order::Rows, false),
];

#[test]
fn strips_make_the_codes_of_the_simple_kernels() {
    let [gpu, simple] = [gpu(), simple()];
    for (rows, cols, ends, shape, order, both) in TABLE {
        let values = values(rows, cols);
        let upload = |gpu: &Gpu| {
            let offs = ends.map(|ends| Tensor::from_u32(gpu, "ends", ends).unwrap());
            (Tensor::from_f32(gpu, "x", &[rows, cols], DType::BF16, &values).unwrap(), offs)
        };
        let [(x, offs), (y, y_offs)] = [&gpu, &simple].map(upload);
        let [groups, want] = [offs.as_ref(), y_offs.as_ref()].map(Groups::of_rows);
        let what = format!("{rows} x {cols} {ends:?} {shape:?} {order:?}");
        let (by_row, by_column) = run(&gpu, &x, groups, (DType::E4M3, order), shape, both).unwrap();
        let want = quantize::columns(&simple, &y, want, None, DType::E4M3, order).unwrap();
        same(&what, (&gpu, &by_column), (&simple, &want));
        assert_eq!(by_row.is_some(), both);
        if let Some(by_row) = by_row {
            let want = quantize::along_rows(&simple, &y, DType::E4M3, order).unwrap();
            same(&format!("{what}, rows"), (&gpu, &by_row), (&simple, &want));
        }
    }
}

/// The groups of a weight lie one after another, in panels too; halves.
#[test]
fn strips_of_weights_and_halves() {
    let [gpu, simple] = [gpu(), simple()];
    let shape = [3, 70, 24];
    let values = values(shape[0] * shape[1], shape[2]);
    let [w, v] = [&gpu, &simple].map(|gpu| Tensor::from_f32(gpu, "w", &shape, DType::BF16, &values).unwrap());
    let table = [
        (DType::E4M3, Order::Panels, true),
        (DType::F16, Order::Rows, false),
        (DType::F16, Order::Panels, false),
    ];
    for (dtype, order, both) in table {
        let what = format!("weight {dtype} {order:?}");
        let (rows, columns) =
            run(&gpu, &w, Groups::of_weight(&w), (dtype, order), cut(64, 2, 1, 2), both).unwrap();
        let want = quantize::along_weight_columns(&simple, &v, dtype, order).unwrap();
        same(&what, (&gpu, &columns), (&simple, &want));
        if let Some(rows) = rows {
            let want = quantize::along_rows(&simple, &v, dtype, order).unwrap();
            same(&format!("{what}, rows"), (&gpu, &rows), (&simple, &want));
        }
    }
}

/// What was measured on the H200: the cuts that are fastest there, and where tiles in two dispatches are.
#[test]
fn strips_where_they_pay() {
    let work = |rows, units, groups, ragged, both| {
        let order = Order::Panels;
        Work { rows, units, groups, ragged, order, both, many: true }
    };
    let some = |lanes, across, held, team| Some(cut(lanes, across, held, team));
    for (rows, units, groups, ragged, both, want) in [
        // Weights of 256 x 256, 768 x 256, 8 x 256 x 512, 8 x 2048 x 5120, 8 x 5120 x 2048, 5120 x 5120.
        (256, 32, 1, false, false, some(64, 1, 1, 1)),
        (768, 32, 1, false, false, some(128, 1, 1, 1)),
        (256, 64, 8, false, false, some(128, 4, 1, 1)),
        (2048, 640, 8, false, false, some(256, 4, 3, 1)),
        (5120, 256, 8, false, false, some(256, 8, 3, 1)),
        (5120, 640, 1, false, false, some(256, 4, 3, 1)),
        // Groups by offsets: 16384 x 5120, 1024 and 512 in 8 groups, 32768 x 2048 in 64.
        (2048, 640, 8, true, false, some(256, 4, 3, 1)),
        (2048, 128, 8, true, false, some(256, 2, 2, 1)),
        (2048, 64, 8, true, false, None),
        (512, 256, 64, true, false, some(256, 4, 1, 1)),
        // Both axes.
        (2048, 640, 8, true, true, some(256, 4, 3, 32)),
        (2048, 32, 8, true, true, some(256, 2, 2, 4)),
        (256, 64, 8, false, true, some(128, 4, 1, 8)),
        // One long group.
        (16384, 32, 1, false, false, None),
        (16384, 640, 1, false, true, None),
        (2048, 32, 1, false, false, None),
    ] {
        let got = Shape::of(work(rows, units, groups, ragged, both));
        assert_eq!(got, want, "{rows} rows x {units} units x {groups}, ragged: {ragged}, both: {both}");
    }
    let by_rows = Work { order: Order::Rows, ..work(2048, 640, 8, true, true) };
    assert_eq!(Shape::of(by_rows), None, "both axes of ragged groups into rows");
    let narrow = Work { order: Order::Rows, ..work(2048, 128, 8, true, false) };
    assert_eq!(Shape::of(narrow), None, "half a sector at a time, and more than a cache holds");
    let rows = |units| Shape::of(Work { order: Order::Rows, ..work(2048, units, 8, true, false) });
    assert_eq!([rows(256), rows(640)], [None, some(256, 4, 3, 1)], "ragged groups into rows");
    let few = Work { many: false, ..work(2048, 640, 8, false, false) };
    assert_eq!(Shape::of(few), None, "long groups where registers are few");
    let few = Work { many: false, ..work(256, 64, 8, false, true) };
    assert_eq!(Shape::of(few), some(128, 4, 0, 16));
}
