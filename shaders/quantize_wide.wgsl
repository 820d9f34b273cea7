// Quantization of bf16 by columns of groups, for GPUs: what quantize.wgsl computes, in units of eight columns (16 bytes of x). The
// magnitudes of a unit lie as x does, two in a word. A tile is some rows of a group and ACROSS units: first the tops of each tile
// (unless quantize_rows.wgsl has left them), then, in a second dispatch, their maximum over the group and the codes.
// What this adds to the simple algorithm:
// 1. Loads of 16 bytes, BATCH rows in flight per lane.
// 2. Codes by way of halves, two at a time: a sixth of the operations of the exact encoder (lib/units.wgsl).
// 3. No atomics and no scales to initialise: tiles leave their tops side by side, and who casts takes the maximum.
// IN_PANELS: codes go into panels (lib/panels.wgsl) of the contraction, with its padding, transposed on the way.

struct Wide {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
  casts: u32,      // blocks of ACROSS units to cast,
  tops: u32,       // or to take the tops of
}

@group(0) @binding(0) var<uniform> p: Wide;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> offs: array<u32>;
@group(0) @binding(3) var<storage, read_write> descales: array<u32>;
@group(0) @binding(4) var<storage, read_write> codes: array<Unit>;
@group(0) @binding(5) var<storage, read_write> column_tops: array<vec4<u32>>;

@compute @workgroup_size(LANES)
fn columns(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let tile = grid_index(wg, n);
  let casts = p.casts * chunks(CAST);
  if tile < casts {
    // Backwards: what was read last is most likely still in the cache.
    let at = casts - 1u - tile;
    cast_tile(at % p.casts * ACROSS, at / p.casts, li);
  } else if tile < casts + p.tops * chunks(CHUNK) {
    top_tile((tile - casts) % p.tops * ACROSS, (tile - casts) / p.tops, li);
  }
}

// Most chunks that the groups and the rows past them can have.
fn chunks(height: u32) -> u32 {
  if GROUPED == 1u {
    return div_up(p.rows, height) + p.groups;
  }
  return p.groups * max(div_up(p.group_rows, height), 1u);
}

fn top_tile(first_unit: u32, chunk: u32, li: u32) {
  let range = chunk_rows(chunk, CHUNK, p.groups, p.group_rows, p.rows);
  let units = div_up(p.cols, 8u);
  let unit = min(first_unit + li % ACROSS, units - 1u);
  var even = vec4<u32>();
  var odd = vec4<u32>();
  for (var row = range.first + li / ACROSS; row < range.end; row += BATCH * (LANES / ACROSS)) {
//!repeat b BATCH
    let v$b = x[min(row + $bu * (LANES / ACROSS), range.end - 1u) * units + unit];
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

// The chunks of CHUNK rows of group `g`: the first, and one past the last.
fn chunks_of(g: u32) -> vec2<u32> {
  if GROUPED == 0u {
    let count = div_up(p.group_rows, CHUNK);
    return vec2<u32>(g * count, (g + 1u) * count);
  }
  return parts_of(g, CHUNK, p.rows);
}

fn cast_tile(first_unit: u32, tile: u32, li: u32) {
  let range = chunk_rows(tile, CAST, p.groups, p.group_rows, p.rows);
  let units = div_up(p.cols, 8u);
  let unit = first_unit + li % ACROSS;
  let down = li / ACROSS;
  if tile + 1u == chunks(CAST) {
    empty_groups(first_unit, li);
  }
  if range.group >= p.groups {
    if unit < units && IN_PANELS == 0u {
      for (var row = range.first + down; row < range.end; row += LANES / ACROSS) {
        codes[place(row, unit)] = Unit();
      }
    }
    return;
  }
  var even = vec4<u32>();
  var odd = vec4<u32>();
  let of_group = chunks_of(range.group);
  for (var i = of_group.x + down; i < of_group.y; i += LANES / ACROSS) {
    let v = column_tops[i * units + min(unit, units - 1u)];
    even = max(even, evens(v));
    odd = max(odd, odds(v));
  }
  let top = merge(li, ACROSS, even, odd);
  if unit >= units {
    return;
  }
  let r = descales_of(top);
  if range.first == group_start(range.group) && down == 0u {
    store_descales(range.group, unit, r);
  }
//!repeat w IN_PANELS
  cast_panels(range, unit, down, r);
  return;
//!end
  if max(largest(r.a), largest(r.b)) > CAREFUL {
    for (var row = range.first + down; row < range.end; row += LANES / ACROSS) {
      codes[place(row, unit)] = careful_unit(x[row * units + unit], unit, r.a, r.b);
    }
    return;
  }
  let fa = factors(r.a);
  let fb = factors(r.b);
  for (var row = range.first + down; row < range.end; row += BATCH * (LANES / ACROSS)) {
//!repeat b BATCH
    let v$b = x[min(row + $bu * (LANES / ACROSS), range.end - 1u) * units + unit];
//!end
//!repeat b BATCH
    if row + $bu * (LANES / ACROSS) < range.end {
      codes[place(row + $bu * (LANES / ACROSS), unit)] = quick_unit(v$b, fa, fb);
    }
//!end
  }
}

fn group_start(g: u32) -> u32 {
  if GROUPED == 0u {
    return g * p.group_rows;
  }
  return group_rows(g, p.rows).x;
}

// Groups without rows have no tile; where there is one, the last tile is of no group.
fn empty_groups(first_unit: u32, li: u32) {
  for (var g = 0u; g < p.groups; g++) {
    let rows = group_rows(g, p.rows);
    if rows.x == rows.y && li < ACROSS && first_unit + li < div_up(p.cols, 8u) {
      store_descales(g, first_unit + li, Descales(vec4<u32>(FLOOR), vec4<u32>(FLOOR)));
    }
  }
}

//!repeat w IN_PANELS
// Codes of a unit of columns into panels: eight rows a lane, which make a unit of eight steps in each of its columns.
fn cast_panels(range: Rows, unit: u32, down: u32, r: Descales) {
  let units = div_up(p.cols, 8u);
  let start = group_start(range.group);
  let panel = first_panel(range.group, start);
  let fa = factors(r.a);
  let fb = factors(r.b);
  let careful = max(largest(r.a), largest(r.b)) > CAREFUL;
  let padded = range.first + div_up(range.end - range.first, 64u) * 64u;
  for (var row = range.first + down * 8u; row < padded; row += LANES / ACROSS * 8u) {
//!repeat r 8
    let v$r = x[min(row + $ru, range.end - 1u) * units + unit];
//!end
//!repeat r 8
    var q$r = quick_unit(v$r, fa, fb);
//!end
    if careful {
      // A loop: the exact encoder is long.
      var exact: array<Unit, 8>;
      for (var i = 0u; i < 8u; i++) {
        exact[i] = careful_unit(x[min(row + i, range.end - 1u) * units + unit], unit, r.a, r.b);
      }
//!repeat r 8
      q$r = exact[$r];
//!end
    }
//!repeat r 8
    if row + $ru >= range.end {
      q$r = Unit();
    }
//!end
    store_panels(panel, row - start, unit, q0, q1, q2, q3, q4, q5, q6, q7);
  }
}
//!end
