//! How the contraction of a weight gradient is cut into parts, where the tiles of its result are too few to fill an adapter. Every
//! part leaves its own f32 sums, and `gemm_sum` adds those of a group in order.

use super::Dims;
use crate::ops::panels::BLOCK;

/// The fewest rows that are worth a run of their own.
const SHORTEST_RUN: usize = 128;
/// Most parts of a group, if groups are equal.
const MOST_PARTS: usize = 64;

/// How the contraction of a `tn` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Rows of each; 0: a part is a group.
    pub run: usize,
    /// Most that there can be, whatever the groups' sizes.
    pub most: usize,
}

impl Parts {
    /// Groups are not cut.
    pub fn whole(groups: usize) -> Parts {
        Parts { run: 0, most: groups }
    }

    /// For a `tn` of `tiles` workgroups over groups `grouped` by offsets or one of all rows: groups where their tiles alone are `full`,
    /// enough for the adapter, else runs of whole blocks of which there are enough. Groups end in half a run, more or less.
    pub fn of(dims: Dims, grouped: bool, tiles: usize, full: usize) -> Parts {
        let wanted = full.div_ceil(tiles.max(1));
        let longest = (dims.k / dims.groups.max(1)).div_ceil(SHORTEST_RUN);
        let each = wanted.min(longest).clamp(1, MOST_PARTS);
        if each == 1 || dims.groups == 0 {
            return Parts::whole(dims.groups);
        }
        let ends = if grouped { dims.groups / 2 } else { 0 };
        let run = dims.k.div_ceil(each * dims.groups - ends).next_multiple_of(BLOCK).max(SHORTEST_RUN);
        Parts { run, most: if grouped { dims.k / run + dims.groups } else { dims.k.div_ceil(run) } }
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Dims, Parts, SHORTEST_RUN};
    use crate::num::rng::Stream;

    /// Whatever the sizes of groups, there are no more parts than the grid and the sums have room for, and enough for the adapter.
    #[test]
    fn parts_fit_and_fill() {
        for (k, groups, tiles, full) in [
            (16384, 8, 64, 256),
            (16384, 1, 4, 256),
            (16385, 8, 64, 256),
            (1000, 7, 7, 256),
            (300, 3, 3, 512),
            (257, 1, 1, 512),
            (1 << 20, 2, 2, 512),
            (128, 1, 1, 512),
            (4096, 8, 256, 256),
            (129, 0, 0, 256),
        ] {
            let parts = Parts::of(Dims { m: 64, n: 64, k, groups, stack: 1 }, groups > 1, tiles, full);
            if parts.run == 0 {
                assert_eq!(parts.most, groups);
                assert!(tiles >= full || k <= SHORTEST_RUN * groups || groups == 0, "{k} {groups}: not cut");
                continue;
            }
            assert!(parts.run.is_multiple_of(BLOCK) && parts.run >= SHORTEST_RUN);
            let stream = Stream::new(k as u64, "ends");
            let mut ends: Vec<usize> =
                (1..groups).map(|i| stream.word(i as u64) as usize % (k + 1)).collect();
            ends.extend([0, k]);
            ends.sort_unstable();
            let count: usize = ends.windows(2).map(|w| (w[1] - w[0]).div_ceil(parts.run)).sum();
            assert!(count <= parts.most, "{k} {groups}: {count} parts, room for {}", parts.most);
            assert!(parts.most * tiles / groups <= 2 * full.max(tiles), "{k} {groups}: {parts:?}");
        }
    }
}
