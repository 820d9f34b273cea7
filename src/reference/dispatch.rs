//! From tokens to experts and back: rows are gathered in expert order, and the K results of a token summed.
//!
//! T tokens with K chosen experts each give R = T*K **slots**, slot `t * K + j`. Sorted by expert, and within
//! one expert by slot (a stable sort), they are the R **routed rows**. Definition: torchtitan's MoE (July
//! 2025), without its padding.

use super::{Real, narrow, widen};

/// The permutation between slots and routed rows, and the experts' shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Routed rows of each expert, (E).
    pub counts: Vec<u32>,
    /// First routed row of each expert, (E): exclusive sums of the counts.
    pub starts: Vec<u32>,
    /// End row of each expert, (E): inclusive sums, the `offs` of the grouped GEMM.
    pub ends: Vec<u32>,
    /// The slot that stands in each routed row, (R).
    pub slot_of_row: Vec<u32>,
    /// The routed row of each slot, (R): the inverse.
    pub row_of_slot: Vec<u32>,
}

/// chosen (T, K), each below `experts` -> the plan.
pub fn plan(chosen: &[u32], experts: usize) -> Plan {
    let mut counts = vec![0; experts];
    chosen.iter().for_each(|&e| counts[e as usize] += 1);
    let ends: Vec<u32> = counts.iter().scan(0, |sum, c| Some(add_to(sum, *c))).collect();
    let starts = ends.iter().zip(&counts).map(|(end, c)| end - c).collect();
    let mut slot_of_row: Vec<u32> = (0..chosen.len() as u32).collect();
    slot_of_row.sort_by_key(|&slot| chosen[slot as usize]); // stable
    let mut row_of_slot = vec![0; chosen.len()];
    slot_of_row.iter().enumerate().for_each(|(row, &slot)| row_of_slot[slot as usize] = row as u32);
    Plan { counts, starts, ends, slot_of_row, row_of_slot }
}

fn add_to(sum: &mut u32, more: u32) -> u32 {
    *sum += more;
    *sum
}

/// Sizes of the rows: K slots per token, D elements per row.
#[derive(Clone, Copy, Debug)]
pub struct Width {
    /// K.
    pub top_k: usize,
    /// D.
    pub dim: usize,
}

/// x (T, D) -> routed (R, D): the token of each row's slot, times the slot's weight if `weights` (T, K) are
/// given (scores before the experts).
pub fn gather<T: Real>(plan: &Plan, width: Width, x: &[T], weights: Option<&[T]>) -> Vec<T> {
    let (x, weights) = (widen(x), weights.map(widen));
    let mut routed = Vec::new();
    for &slot in &plan.slot_of_row {
        let row = &x[slot as usize / width.top_k * width.dim..][..width.dim];
        let weight = weights.as_ref().map_or(1.0, |w| w[slot as usize]);
        routed.extend(row.iter().map(|v| v * weight));
    }
    narrow(&routed)
}

/// d_routed (R, D) -> d_x (T, D) and d_weights (T, K); the second is only meaningful when weights were given.
///
/// A token's gradient is the sum over its slots in order.
pub fn gather_backward<T: Real>(
    plan: &Plan,
    width: Width,
    (x, weights): (&[T], Option<&[T]>),
    d_routed: &[T],
) -> (Vec<T>, Vec<T>) {
    let d_x = combine(plan, width, d_routed, weights);
    let d_weights = slot_products(plan, width, x, d_routed);
    (d_x, d_weights)
}

/// y (R, D) -> out (T, D): the sum over a token's slots, in order, of their rows, times the slots' weights if
/// given (scores after the experts).
pub fn combine<T: Real>(plan: &Plan, width: Width, y: &[T], weights: Option<&[T]>) -> Vec<T> {
    assert_eq!(y.len(), plan.slot_of_row.len() * width.dim, "combine: elements of y, rows * {}", width.dim);
    let (y, weights) = (widen(y), weights.map(widen));
    let mut out = vec![0.0; y.len() / width.top_k];
    for (slot, &row) in plan.row_of_slot.iter().enumerate() {
        let weight = weights.as_ref().map_or(1.0, |w| w[slot]);
        let sum = &mut out[slot / width.top_k * width.dim..][..width.dim];
        let row = &y[row as usize * width.dim..][..width.dim];
        sum.iter_mut().zip(row).for_each(|(s, y)| *s += y * weight);
    }
    narrow(&out)
}

/// d_out (T, D) -> d_y (R, D) and d_weights (T, K); the second is only meaningful when weights were given.
pub fn combine_backward<T: Real>(
    plan: &Plan,
    width: Width,
    (y, weights): (&[T], Option<&[T]>),
    d_out: &[T],
) -> (Vec<T>, Vec<T>) {
    let d_y = gather(plan, width, d_out, weights);
    let d_weights = slot_products(plan, width, d_out, y);
    (d_y, d_weights)
}

/// For every slot the product of its token's row and its routed row: tokens (T, D), routed (R, D) -> (T, K).
fn slot_products<T: Real>(plan: &Plan, width: Width, tokens: &[T], routed: &[T]) -> Vec<T> {
    let (tokens, routed) = (widen(tokens), widen(routed));
    let product = |(slot, &row): (usize, &u32)| {
        let token = &tokens[slot / width.top_k * width.dim..][..width.dim];
        let routed = &routed[row as usize * width.dim..][..width.dim];
        T::narrow(token.iter().zip(routed).map(|(a, b)| a * b).sum())
    };
    plan.row_of_slot.iter().enumerate().map(product).collect()
}
