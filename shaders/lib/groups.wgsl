// Which rows a tile of a grouped GEMM covers. Needs the binding `offs` (exclusive end row of each group) and GROUPED.

struct Rows {
  group: u32,
  first: u32, // first row of the tile
  end: u32,   // one past the last row that belongs to the tile's group
}

// Tile `tile` of height `bm`: every group starts a new tile, empty groups have none, and the rows past the last
// offset are group `groups`. A tile past the last one comes back with first >= end.
fn tile_rows(tile: u32, bm: u32, groups: u32, m: u32) -> Rows {
  if GROUPED == 0u {
    return Rows(0u, tile * bm, m);
  }
  var left = tile;
  var start = 0u;
  for (var g = 0u; g <= groups; g++) {
    var end = m;
    if g < groups {
      end = min(max(offs[g], start), m);
    }
    let tiles = div_up(end - start, bm);
    if left < tiles {
      return Rows(g, start + left * bm, end);
    }
    left -= tiles;
    start = end;
  }
  return Rows(groups, m, m);
}

// Part `part` of a contraction over rows in groups: each group is cut into runs of `run` rows, or with 0 is one part, also when it is
// empty. Past the last part the group is `groups`.
fn part_rows(part: u32, run: u32, groups: u32, m: u32) -> Rows {
  if run == 0u {
    let rows = group_rows(min(part, groups - 1u), m);
    return Rows(min(part, groups), rows.x, rows.y);
  }
  let rows = tile_rows(part, run, groups, m);
  return Rows(select(rows.group, groups, rows.first >= rows.end), rows.first, min(rows.end, rows.first + run));
}

// The parts of group `g`: the first, and one past the last.
fn parts_of(g: u32, run: u32, m: u32) -> vec2<u32> {
  if GROUPED == 0u {
    return vec2<u32>(0u, div_up(m, run));
  }
  // As tile_rows counts, also where offsets fall.
  var parts = vec2<u32>();
  var start = 0u;
  for (var i = 0u; i <= g; i++) {
    let end = min(max(offs[i], start), m);
    parts = vec2<u32>(parts.y, parts.y + div_up(end - start, run));
    start = end;
  }
  return parts;
}

// Rows of group `g` as first and one past the last.
fn group_rows(g: u32, m: u32) -> vec2<u32> {
  if GROUPED == 0u {
    return vec2<u32>(0u, m);
  }
  var start = 0u;
  if g > 0u {
    start = min(offs[g - 1u], m);
  }
  return vec2<u32>(start, min(max(offs[g], start), m));
}
