//! Where a block's whole parameters lie once they are gathered.

use super::hooks;
use crate::Result;
use crate::gpu::{Buffer, Gpu};
use crate::num::DType;
use crate::params::{Place, Store};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Whole parameters side by side in one buffer.
#[derive(Clone)]
pub(super) struct Home {
    pub buffer: Arc<Buffer>,
    pub offsets: Vec<u64>,
    pub total: u64,
}

impl Home {
    /// Memory for parameters of these sizes.
    pub fn new(gpu: &Gpu, sizes: &[u64]) -> Result<Home> {
        let (offsets, total) = offsets(sizes, gpu.caps().align);
        Ok(Home { buffer: gpu.alloc_shared("gathered parameters", total)?, offsets, total })
    }

    /// The same for one rank, whose shards are whole: laid out as they are, so that one cast fills several.
    pub fn like_shards(gpu: &Gpu, sizes: &[u64], places: &[&Place], dtype: DType) -> Result<Home> {
        let shrink = (DType::F32.quad_bytes() / dtype.quad_bytes()) as u64;
        let (mut offsets, mut total) = (Vec::<u64>::new(), 0u64);
        for (i, (place, size)) in places.iter().zip(sizes).enumerate() {
            let at = match i.checked_sub(1) {
                Some(b) if places[b].segment == place.segment => {
                    offsets[b] + (place.offset - places[b].offset) / shrink
                }
                _ => total.next_multiple_of(gpu.caps().align.max(256)),
            };
            offsets.push(at);
            total = at + size;
        }
        Ok(Home { buffer: gpu.alloc_shared("gathered parameters", total)?, offsets, total })
    }

    /// One rank's all-gather into [`Home::like_shards`]: one launch for all shards of `master` that lie in one segment.
    pub fn cast(&self, gpu: &Gpu, master: &Store, places: &[&Place], dtype: DType) -> Result<()> {
        let mut first = 0;
        for run in places.chunk_by(|a, b| a.segment == b.segment) {
            let shards = master.range(run[0], run[run.len() - 1]);
            let target = Tensor::view(&self.buffer, self.offsets[first], shards.shape(), dtype);
            hooks::pre_all_gather(gpu, &shards, &target)?;
            first += run.len();
        }
        Ok(())
    }
}

/// One rank's all-gather of a block that stays: into `low`, a store in bf16 that is laid out as `master` is; one launch per segment.
pub(super) fn cast(gpu: &Gpu, master: &Store, low: &Store, places: &[&Place]) -> Result<()> {
    for run in places.chunk_by(|a, b| a.segment == b.segment) {
        let (first, last) = (run[0], run[run.len() - 1]);
        hooks::pre_all_gather(gpu, &master.range(first, last), &low.range(first, last))?;
    }
    Ok(())
}

/// Offsets of pieces of these sizes, each a multiple of `align`, and the end.
pub(super) fn offsets(sizes: &[u64], align: u64) -> (Vec<u64>, u64) {
    let mut end = 0u64;
    let at = sizes
        .iter()
        .map(|size| {
            let start = end.next_multiple_of(align.max(256));
            end = start + size;
            start
        })
        .collect();
    (at, end)
}
