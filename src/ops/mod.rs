//! Forward and backward of each op as plain functions that record GPU work.
//!
//! An op checks shapes (a breach is a panic with both shapes: callers are ours), allocates its result, and records
//! its dispatches. It never waits for the device and never reads back.

pub mod adamw;
pub mod attention;
pub mod attention_choice;
mod attention_coop;
pub mod choice;
pub mod clip;
pub mod cross_entropy;
pub mod dispatch;
pub mod elementwise;
pub mod embedding;
pub(crate) mod emulation;
pub mod expert_bias;
pub mod fp8_linear;
pub mod gemm;
pub mod gemm_choice;
mod gemm_coop;
mod gemm_narrow;
mod gemm_tiled;
pub(crate) mod panels;
pub mod quantize;
pub mod quantize_choice;
mod quantize_rows;
mod quantize_strips;
mod quantize_wide;
pub mod rmsnorm;
pub mod rope;
pub mod router;
pub mod swiglu;

use crate::gpu::{Kernel, Variant};

/// How the threads of a workgroup share rows of quads: `lanes` threads a row, each `held` quads at a time, `rows` rows.
#[derive(Clone, Copy, Debug)]
struct Team {
    rows: usize,
    lanes: usize,
    held: usize,
}

impl Team {
    /// For rows of `quads` quads: on GPUs two or three loads a thread, until a team is a typical subgroup, then four or more, at most
    /// `most`; neighbours read neighbours.
    fn of(quads: usize, most: usize, software: bool) -> Team {
        if software {
            let lanes = quads.next_power_of_two().clamp(8, 64);
            return Team { rows: 64 / lanes, lanes, held: 1 };
        }
        // The largest power of two that is no more than this part of the row.
        let part = |share: usize| 1usize << (quads / share).max(1).ilog2();
        let lanes = part(2).min(32).max(part(4)).clamp(16, 256);
        Team { rows: 256 / lanes, lanes, held: quads.div_ceil(lanes).clamp(1, most) }
    }

    /// Workgroups for `rows` rows.
    fn groups(self, rows: usize) -> u32 {
        rows.div_ceil(self.rows) as u32
    }

    /// `variant` with the constants ROWS, LANES and HELD.
    fn constants(self, variant: Variant) -> Variant {
        let all = [("ROWS", self.rows), ("LANES", self.lanes), ("HELD", self.held)];
        all.into_iter().fold(variant, |v, (name, value)| v.constant(name, value as u32))
    }

    /// One of each kind, for validation without a GPU.
    fn kinds() -> Vec<Team> {
        let mut all = vec![Team::of(16, 8, true)];
        all.extend([1, 16, 32, 64, 96, 564, 1280, 4096].map(|quads| Team::of(quads, 8, false)));
        all
    }
}

/// Every kernel in every variant that the ops can ask for, for validation without a GPU.
pub fn kernels() -> Vec<(Kernel, Variant)> {
    [
        adamw::kernels(),
        attention::kernels(),
        attention_coop::kernels(),
        clip::kernels(),
        cross_entropy::kernels(),
        dispatch::kernels(),
        elementwise::kernels(),
        embedding::kernels(),
        expert_bias::kernels(),
        gemm::kernels(),
        gemm_coop::kernels(),
        gemm_narrow::kernels(),
        panels::kernels(),
        gemm_tiled::kernels(),
        quantize::kernels(),
        quantize_rows::kernels(),
        quantize_strips::kernels(),
        quantize_wide::kernels(),
        rmsnorm::kernels(),
        rope::kernels(),
        router::kernels(),
        swiglu::kernels(),
    ]
    .concat()
}
