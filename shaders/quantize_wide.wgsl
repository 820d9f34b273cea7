// Quantization of bf16 by columns of groups, for GPUs: what quantize.wgsl computes, in units of eight columns (16 bytes of x). The
// magnitudes of a unit lie as x does, two in a word. A tile is some rows of a group and ACROSS units: first the tops of each tile
// (unless quantize_rows.wgsl has left them), then their maximum over the group and the codes.
// What this adds to the simple algorithm:
// 1. Loads of 16 bytes, several rows in flight per lane; a cast into panels has them under way while it looks for the tops.
// 2. Codes by way of halves, two at a time: a sixth of the operations of the exact encoder (lib/units.wgsl).
// 3. No atomics and no scales to initialise: tiles leave their tops side by side, and who casts takes the maximum (MERGED), or, where
//    all casts together would read the tops many times, a pass in between (DESCALES).
// IN_PANELS: codes go into panels (lib/panels.wgsl) of the contraction, with its padding, transposed on the way.

struct Wide {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
  blocks: u32,     // of ACROSS units
}

@group(0) @binding(0) var<uniform> p: Wide;
@group(0) @binding(1) var<storage, read> offs: array<u32>;
//!repeat y TOPS
@group(0) @binding(2) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> column_tops: array<vec4<u32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let chunk = grid_index(wg, n) / p.blocks;
  let first_unit = grid_index(wg, n) % p.blocks * ACROSS;
  let range = chunk_rows(chunk, CHUNK, p.groups, p.group_rows, p.rows);
  let units = div_up(p.cols, 8u);
  let unit = min(first_unit + li % ACROSS, units - 1u);
  var even = vec4<u32>();
  var odd = vec4<u32>();
  for (var row = range.first + li / ACROSS; row < range.end; row += BATCH * DOWN) {
//!repeat b BATCH
    let v$b = x[min(row + $bu * DOWN, range.end - 1u) * units + unit];
//!end
//!repeat b BATCH
    even = max(even, evens(v$b));
    odd = max(odd, odds(v$b));
//!end
  }
  let all = merge(li, ACROSS, even, odd);
  if li < ACROSS && first_unit + li < units && range.first < range.end {
    column_tops[chunk * units + unit] = all;
  }
}
//!end
//!repeat y DESCALES
@group(0) @binding(2) var<storage, read> column_tops: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> descales: array<u32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let group = grid_index(wg, n) / p.blocks;
  if group >= p.groups {
    return;
  }
  let unit = grid_index(wg, n) % p.blocks * ACROSS + li % ACROSS;
  let top = top_of_group(group, unit, li);
  if li < ACROSS && unit < div_up(p.cols, 8u) {
    store_descales(group, unit, descales_of(top));
  }
}
//!end
//!repeat y CASTS
@group(0) @binding(2) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> codes: array<Unit>;
//!repeat m MERGED
@group(0) @binding(4) var<storage, read> column_tops: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> descales: array<u32>;
//!end
//!repeat m GIVEN
@group(0) @binding(4) var<storage, read> descales: array<u32>;
//!end

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let tile = grid_index(wg, n);
  let tiles = p.blocks * most_chunks(CAST);
  if tile >= tiles {
    return;
  }
  // Backwards: what was read last is most likely still in the cache.
  let at = tiles - 1u - tile;
  let first_unit = at % p.blocks * ACROSS;
//!repeat m MERGED
  if tile < p.blocks {
    empty_groups(first_unit, li);
  }
//!end
  let range = chunk_rows(at / p.blocks, CAST, p.groups, p.group_rows, p.rows);
  if range.group < p.groups {
    cast_tile(range, first_unit, li);
  } else {
    no_codes(range, first_unit + li % ACROSS, li / ACROSS);
  }
}

// Most chunks that the groups and the rows past them can have.
fn most_chunks(height: u32) -> u32 {
  if GROUPED == 1u {
    return div_up(p.rows, height) + p.groups;
  }
  return p.groups * max(div_up(p.group_rows, height), 1u);
}

fn group_start(g: u32) -> u32 {
  if GROUPED == 0u {
    return g * p.group_rows;
  }
  return group_rows(g, p.rows).x;
}

// Rows of no group have the code 0; panels have no place for them.
fn no_codes(range: Rows, unit: u32, down: u32) {
  if IN_PANELS == 1u || unit >= div_up(p.cols, 8u) {
    return;
  }
  for (var row = range.first + down; row < range.end; row += DOWN) {
    codes[place(row, unit)] = Unit();
  }
}

//!repeat m GIVEN
fn descales_there(group: u32, unit: u32) -> Descales {
  let first = group * p.cols;
  let last = first + p.cols - 1u;
  var r: Descales;
//!repeat i 4
  r.a[$i] = descales[min(first + 8u * unit + $iu, last)];
  r.b[$i] = descales[min(first + 8u * unit + 4u + $iu, last)];
//!end
  return r;
}
//!end
//!repeat m MERGED
// Groups without rows have no tile: the last tile does this too. Where there are such groups it is of none, and has nothing else to do.
fn empty_groups(first_unit: u32, li: u32) {
  for (var g = 0u; g < p.groups; g++) {
    let rows = group_rows(g, p.rows);
    if rows.x == rows.y && li < ACROSS && first_unit + li < div_up(p.cols, 8u) {
      store_descales(g, first_unit + li, Descales(vec4<u32>(FLOOR), vec4<u32>(FLOOR)));
    }
  }
}
//!end
// The codes of a tile: the de-scales of its columns while the first rows are under way.
//!text DESCALES_OF_TILE
//!repeat m MERGED
  let r = descales_of(top_of_group(range.group, unit, li));
  if unit < units && range.first == start && down == 0u {
    store_descales(range.group, unit, r);
  }
//!end
//!repeat m GIVEN
  let r = descales_there(range.group, unit);
//!end
  if unit >= units {
    return;
  }
  let fa = factors(r.a);
  let fb = factors(r.b);
  let careful = max(largest(r.a), largest(r.b)) > CAREFUL;
//!end
fn cast_tile(range: Rows, first_unit: u32, li: u32) {
  let units = div_up(p.cols, 8u);
  let unit = first_unit + li % ACROSS;
  let down = li / ACROSS;
  let start = group_start(range.group);
//!repeat w IN_ROWS
//!put DESCALES_OF_TILE
  if careful {
    for (var row = range.first + down; row < range.end; row += DOWN) {
      codes[place(row, unit)] = careful_unit(x[row * units + unit], unit, r.a, r.b);
    }
    return;
  }
  for (var row = range.first + down; row < range.end; row += BATCH * DOWN) {
//!repeat b BATCH
    let v$b = x[min(row + $bu * DOWN, range.end - 1u) * units + unit];
//!end
//!repeat b BATCH
    if row + $bu * DOWN < range.end {
      codes[place(row + $bu * DOWN, unit)] = quick_unit(v$b, fa, fb);
    }
//!end
  }
//!end
//!repeat w IN_PANELS
  // Eight rows a lane, which make a unit of eight steps in each of its columns, TURNS times.
  let row = range.first + down * 8u;
  let last = max(range.end, 1u) - 1u;
  let column = min(unit, units - 1u);
//!repeat t TURNS
//!repeat r 8
  let v$t_$r = x[min(row + ($tu * 8u * DOWN + $ru), last) * units + column];
//!end
//!end
//!put DESCALES_OF_TILE
  let panel = first_panel(range.group, start);
  let padded = range.first + div_up(range.end - range.first, 64u) * 64u;
  if careful {
    careful_panels(range, padded, panel, start, row, unit, r);
    return;
  }
//!repeat t TURNS
  if row + $tu * 8u * DOWN < padded {
    let first = row + $tu * 8u * DOWN;
//!repeat r 8
    let q$r = select(quick_unit(v$t_$r, fa, fb), Unit(), first + $ru >= range.end);
//!end
    store_panels(panel, first - start, unit, q0, q1, q2, q3, q4, q5, q6, q7);
  }
//!end
//!end
}

//!repeat w IN_PANELS
// The same by the exact encoder, which is long: a loop, and nothing from registers.
fn careful_panels(range: Rows, padded: u32, panel: u32, start: u32, first: u32, unit: u32, r: Descales) {
  for (var row = first; row < padded; row += 8u * DOWN) {
    var q: array<Unit, 8>;
    for (var i = 0u; i < 8u; i++) {
      let code = careful_unit(x[min(row + i, range.end - 1u) * div_up(p.cols, 8u) + unit], unit, r.a, r.b);
      q[i] = select(code, Unit(), row + i >= range.end);
    }
    store_panels(panel, row - start, unit, q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]);
  }
}
//!end
//!end
// Lanes below each other in a tile.
const DOWN = LANES / ACROSS;
//!repeat y LEAVES_DESCALES

// The chunks of CHUNK rows of group `g`: the first, and one past the last.
fn chunks_of(g: u32) -> vec2<u32> {
  if GROUPED == 0u {
    let count = div_up(p.group_rows, CHUNK);
    return vec2<u32>(g * count, (g + 1u) * count);
  }
  return parts_of(g, CHUNK, p.rows);
}

// The tops of the columns of a unit over a group, for all lanes; those of a unit past the last are its neighbour's.
fn top_of_group(group: u32, unit: u32, li: u32) -> vec4<u32> {
  let units = div_up(p.cols, 8u);
  let column = min(unit, units - 1u);
  let chunks = chunks_of(group);
  var even = vec4<u32>();
  var odd = vec4<u32>();
  for (var i = chunks.x + li / ACROSS; i < chunks.y; i += 4u * DOWN) {
//!repeat b 4
    let v$b = column_tops[min(i + $bu * DOWN, chunks.y - 1u) * units + column];
//!end
//!repeat b 4
    even = max(even, evens(v$b));
    odd = max(odd, odds(v$b));
//!end
  }
  return merge(li, ACROSS, even, odd);
}
//!end
