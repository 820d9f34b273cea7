//! Collectives in pieces, for a wire that takes only so many bytes per call.
//!
//! MPI counts are `i32`: a call of 2 GiB or more cannot be expressed, and a library that tries
//! overflows. Pieces also bound the staging memory. A piece of an all-gather comes back as
//! `[ranks, piece]` and belongs into a strided place of `[ranks, len]`, hence the staging. An empty
//! payload makes no call at all: the address of an empty byte vector is 1 in Rust, which is what
//! Open MPI 4.1 calls `MPI_IN_PLACE`.

use crate::Result;
use std::ops::Range;

/// `0..len` in pieces of `step` (the last may be shorter); one empty piece for `len` = 0.
pub(super) fn pieces(step: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let step = step.max(1);
    (0..len.max(1)).step_by(step).map(move |start| start..len.min(start.saturating_add(step)))
}

/// An all-gather of `send` into `recv` (`[ranks, send.len()]`) through `piece`, which all-gathers
/// at most `limit` received bytes (but at least one per rank), unless `send` is empty. Errors are `piece`'s.
pub fn all_gather(
    limit: usize,
    ranks: usize,
    send: &[u8],
    recv: &mut [u8],
    mut piece: impl FnMut(&[u8], &mut [u8]) -> Result<()>,
) -> Result<()> {
    let len = send.len();
    if len == 0 {
        return Ok(());
    }
    let mut staged = Vec::new();
    for part in pieces(limit / ranks, len) {
        if part.len() == len {
            return piece(send, recv);
        }
        staged.resize(ranks * part.len(), 0);
        piece(&send[part.clone()], &mut staged)?;
        for (row, got) in recv.chunks_exact_mut(len).zip(staged.chunks_exact(part.len())) {
            row[part.clone()].copy_from_slice(got);
        }
    }
    Ok(())
}

/// An all-to-all of `send` into `recv` (both `[ranks, block]`) through `piece`, which exchanges at
/// most `limit` bytes (but at least one per rank), unless the blocks are empty. Errors are `piece`'s.
pub fn all_to_all(
    limit: usize,
    ranks: usize,
    send: &[u8],
    recv: &mut [u8],
    mut piece: impl FnMut(&[u8], &mut [u8]) -> Result<()>,
) -> Result<()> {
    let block = send.len() / ranks;
    if block == 0 {
        return Ok(());
    }
    let (mut packed, mut staged) = (Vec::new(), Vec::new());
    for part in pieces(limit / ranks, block) {
        if part.len() == block {
            return piece(send, recv);
        }
        packed.clear();
        send.chunks_exact(block).for_each(|to| packed.extend_from_slice(&to[part.clone()]));
        staged.resize(packed.len(), 0);
        piece(&packed, &mut staged)?;
        for (from, got) in recv.chunks_exact_mut(block).zip(staged.chunks_exact(part.len())) {
            from[part.clone()].copy_from_slice(got);
        }
    }
    Ok(())
}

/// A broadcast of `buf` through `piece`, which broadcasts at most `limit` bytes.
pub fn broadcast(limit: usize, buf: &mut [u8], mut piece: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
    buf.chunks_mut(limit.max(1)).try_for_each(&mut piece)
}
