//! Every comparison is seen to fail: a wrong element and a wrong row are planted in a matrix that otherwise
//! agrees.

use moe8::reference::compare::{bf16_ulp, close, first_mismatch, same_bits, sqnr_at_least, sqnr_db, within};

const SHAPE: [usize; 3] = [3, 5, 7];

fn matrix() -> Vec<f32> {
    (0..105).map(|i| 1.0 + (i as f32 * 0.7).sin()).collect()
}

/// The element at [1, 2, 3] wrong by 0.02; the row [1, 2] zeroed.
fn planted() -> [(&'static str, Vec<f32>); 2] {
    let (mut element, mut row) = (matrix(), matrix());
    element[52] += 0.02;
    row[49..56].fill(0.0);
    [("element", element), ("row", row)]
}

/// Runs `compare` on the true matrix and on both planted ones.
fn must_catch(name: &str, compare: impl Fn(&[f32], &[f32]) -> Result<(), String>) {
    compare(&matrix(), &matrix()).unwrap_or_else(|e| panic!("{name} fails on equal matrices: {e}"));
    for (what, wrong) in planted() {
        let message = compare(&wrong, &matrix()).expect_err(&format!("{name} misses a wrong {what}"));
        println!("{name}: {message}");
        assert!(message.contains("[1, 2, "), "{name} does not say where: {message}");
    }
}

#[test]
fn every_comparison_catches_a_wrong_element_and_a_wrong_row() {
    must_catch("same_bits", |a, b| same_bits(a, b, &SHAPE));
    must_catch("first_mismatch", |a, b| {
        let codes = |x: &[f32]| x.iter().map(|v| (v * 1e4) as i32).collect::<Vec<_>>();
        first_mismatch(&codes(a), &codes(b), &SHAPE)
    });
    must_catch("close", |a, b| close(a, b, &SHAPE, 1e-6, 1e-3));
    must_catch("close (f64)", |a, b| {
        let wide = |x: &[f32]| x.iter().map(|&v| v as f64).collect::<Vec<_>>();
        close(&wide(a), &wide(b), &SHAPE, 0.0, 1e-12)
    });
    must_catch("within", |a, b| {
        let ulps: Vec<f64> = b.iter().map(|&v| bf16_ulp(v as f64)).collect();
        within(a, b, &ulps, &SHAPE)
    });
}

/// A ratio of norms sees a zeroed row; a single wrong element only if it is asked for that much.
#[test]
fn sqnr_catches_what_its_threshold_allows() {
    let [(_, element), (_, row)] = planted();
    sqnr_at_least(&matrix(), &matrix(), 300.0).unwrap();
    sqnr_at_least(&matrix(), &row, 30.0).expect_err("a zeroed row of 15 passes 30 dB");
    sqnr_at_least(&matrix(), &element, 60.0).expect_err("one wrong element passes 60 dB");
    assert!(sqnr_db(&matrix(), &element) > 50.0, "which is why it is not the only gate");
    assert_eq!(sqnr_db(&[1.0f32, 0.0], &[1.0, 0.1]).round(), 20.0);
    let mut nan = matrix();
    nan[3] = f32::NAN;
    sqnr_at_least(&matrix(), &nan, 0.0).expect_err("NaN passes");
}

#[test]
fn values_that_are_not_finite_are_compared_as_values() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (a, b, equal) in
        [(nan, nan, true), (inf, inf, true), (inf, -inf, false), (nan, 1.0, false), (1.0, inf, false)]
    {
        assert_eq!(close(&[a], &[b], &[1], 1.0, 1.0).is_ok(), equal, "close {a} {b}");
        assert_eq!(close(&[b], &[a], &[1], 1.0, 1.0).is_ok(), equal, "close {b} {a}");
        assert_eq!(same_bits(&[a], &[b], &[1]).is_ok(), equal, "same_bits {a} {b}");
    }
    same_bits(&[0.0], &[-0.0], &[1]).expect_err("the sign of zero");
    close(&[0.0f32], &[-0.0], &[1], 0.0, 0.0).unwrap();
}

#[test]
fn lengths_and_shapes_must_agree() {
    let m = matrix();
    for (got, want, shape) in
        [(&m[1..], &m[..], &SHAPE[..]), (&m[..], &m[..], &[3, 5]), (&[], &m[..], &SHAPE[..])]
    {
        close(got, want, shape, 1e9, 1e9).expect_err("close");
        same_bits(got, want, shape).expect_err("same_bits");
        first_mismatch(got, want, shape).expect_err("first_mismatch");
        within(got, want, &[1e9; 105], shape).expect_err("within");
    }
    sqnr_at_least(&m[1..], &m[..], 0.0).expect_err("sqnr_at_least");
    close::<f32>(&[], &[], &[0, 4], 0.0, 0.0).unwrap();
}
