//! Sums, means and maxima over ranks, in rank order: the same bits in every run, on every backend.
//!
//! Each element is `((x0 + x1) + x2) + ...` over ranks 0, 1, 2, ... in the element's own type (f32
//! for bf16 on the wire); a mean divides that sum by the number of ranks, as `ReduceOp.AVG` of
//! `torch.distributed` means it. (Nccl scales first; for a power of two of ranks that is equal but
//! for underflow.)

use super::Communicator;
use crate::{Error, Result};
use bytemuck::Pod;
use half::bf16;

/// What becomes of the ranks' values of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Their sum.
    Sum,
    /// Their sum divided by the number of ranks.
    Mean,
    /// The largest; NaN when one of them is NaN.
    Max,
}

/// Reduces `send` (`[size, recv.len()]`) over ranks; rank `r` gets row `r` of the result.
///
/// FSDP's gradient reduction in f32 (`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`,
/// torch 2.8). Every rank must give the same length. Errors: [`Error::Comm`].
pub fn reduce_scatter_f32(comm: &dyn Communicator, send: &[f32], recv: &mut [f32], op: Op) -> Result<()> {
    let rows = exchanged(comm, send, recv.len())?;
    fold(&rows, recv, op);
    Ok(())
}

/// As [`reduce_scatter_f32`] with bf16 on the wire: half the bytes, and still summed in f32, so
/// the only rounding is the caller's to bf16.
pub fn reduce_scatter_bf16(comm: &dyn Communicator, send: &[bf16], recv: &mut [f32], op: Op) -> Result<()> {
    let rows: Vec<f32> = exchanged(comm, send, recv.len())?.into_iter().map(bf16::to_f32).collect();
    fold(&rows, recv, op);
    Ok(())
}

/// Reduces `buf` over ranks; every rank gets the whole result. Meant for small vectors: each rank
/// receives `size * buf.len()` elements. Errors: [`Error::Comm`].
pub fn all_reduce_f32(comm: &dyn Communicator, buf: &mut [f32], op: Op) -> Result<()> {
    let rows = gathered(comm, buf)?;
    fold(&rows, buf, op);
    Ok(())
}

/// As [`all_reduce_f32`] in f64.
pub fn all_reduce_f64(comm: &dyn Communicator, buf: &mut [f64], op: Op) -> Result<()> {
    let rows = gathered(comm, buf)?;
    fold(&rows, buf, op);
    Ok(())
}

/// As [`all_reduce_f32`] for counts; a mean is rounded down.
///
/// A result that is no u32 is an [`Error::Comm`] on every rank, and `buf` is as it was.
pub fn all_reduce_u32(comm: &dyn Communicator, buf: &mut [u32], op: Op) -> Result<()> {
    let rows: Vec<u64> = gathered(comm, buf)?.into_iter().map(u64::from).collect();
    let mut wide = vec![0u64; buf.len()];
    fold(&rows, &mut wide, op);
    if let Some((i, x)) = wide.iter().enumerate().find(|(_, x)| **x > u64::from(u32::MAX)) {
        return Err(Error::comm(
            format!("count {i} is {x} over all ranks; a u32 holds at most {}", u32::MAX),
            "reduce counts more often, or in f64",
        ));
    }
    buf.iter_mut().zip(wide).for_each(|(b, w)| *b = w as u32);
    Ok(())
}

/// Every rank's `mine`, in rank order: `[size, mine.len()]`.
fn gathered<T: Pod>(comm: &dyn Communicator, mine: &[T]) -> Result<Vec<T>> {
    let mut rows = vec![T::zeroed(); comm.size() * mine.len()];
    comm.all_gather(bytemuck::cast_slice(mine), bytemuck::cast_slice_mut(&mut rows))?;
    Ok(rows)
}

/// What every rank has for this one, in rank order: `[size, len]`.
#[track_caller]
fn exchanged<T: Pod>(comm: &dyn Communicator, send: &[T], len: usize) -> Result<Vec<T>> {
    let n = comm.size();
    assert!(
        send.len() == n * len,
        "reduce_scatter of {} elements among {n} ranks into {len} each",
        send.len()
    );
    let mut rows = vec![T::zeroed(); send.len()];
    comm.all_to_all(bytemuck::cast_slice(send), bytemuck::cast_slice_mut(&mut rows))?;
    Ok(rows)
}

/// Reduces the rows of `rows` (`[ranks, out.len()]`), first to last, into `out`.
fn fold<T: Number>(rows: &[T], out: &mut [T], op: Op) {
    if out.is_empty() {
        return;
    }
    let ranks = rows.len() / out.len();
    let combine = if op == Op::Max { T::max } else { T::add };
    out.copy_from_slice(&rows[..out.len()]);
    for row in rows.chunks_exact(out.len()).skip(1) {
        out.iter_mut().zip(row).for_each(|(o, x)| *o = combine(*o, *x));
    }
    if op == Op::Mean {
        out.iter_mut().for_each(|o| *o = o.over(ranks));
    }
}

/// What [`fold`] needs of an element.
trait Number: Copy {
    fn add(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

impl Number for f32 {
    fn add(self, other: f32) -> f32 {
        self + other
    }

    // Unlike `f32::max`, keeps a NaN: a maximum that hides it would hide a broken rank.
    fn max(self, other: f32) -> f32 {
        if self >= other || self.is_nan() { self } else { other }
    }

    fn over(self, ranks: usize) -> f32 {
        self / ranks as f32
    }
}

impl Number for f64 {
    fn add(self, other: f64) -> f64 {
        self + other
    }

    fn max(self, other: f64) -> f64 {
        if self >= other || self.is_nan() { self } else { other }
    }

    fn over(self, ranks: usize) -> f64 {
        self / ranks as f64
    }
}

impl Number for u64 {
    fn add(self, other: u64) -> u64 {
        self + other
    }

    fn max(self, other: u64) -> u64 {
        Ord::max(self, other)
    }

    fn over(self, ranks: usize) -> u64 {
        self / ranks as u64
    }
}
