// The top of a row that TEAM lanes share, of LANES in a workgroup, powers of two. Every lane of the workgroup calls, and waits before it
// calls again.

var<workgroup> row_tops: array<u32, LANES>;

// The largest magnitude of lane li's row, as the bits of an f32, from the largest that each lane has (lib/units.wgsl).
fn row_top(li: u32, mine: u32) -> u32 {
  let lane = li % TEAM;
  row_tops[li] = mine;
  workgroupBarrier();
  for (var width = TEAM / 2u; width > 0u; width /= 2u) {
    if lane < width {
      row_tops[li] = max(row_tops[li], row_tops[li + width]);
    }
    workgroupBarrier();
  }
  return (row_tops[li - lane] >> 1u) & 0x7fff0000u;
}
