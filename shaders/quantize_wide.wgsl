// Quantization of bf16 by rows, by columns of groups, and by both, for GPUs: what quantize.wgsl computes, in units of eight
// columns (16 bytes of x). The magnitudes of a unit lie as x does, two in a word.
//   rows       a team of TEAM lanes holds a row in registers: top, then codes. x is read once
//   columns    a tile is some rows of a group and ACROSS units. First the tops of each tile, then, in a second dispatch, their
//              maximum over the group and the codes
// What this adds to the simple algorithm:
// 1. Loads of 16 bytes, BATCH rows (or UNITS parts of a row) in flight per lane.
// 2. Codes by way of halves, two at a time: a sixth of the operations of the exact encoder (`codes`).
// 3. No atomics and no scales to initialise: tiles leave their tops side by side, and who casts takes the maximum.
// 4. With TOPS, `rows` takes the columns' tops too, so that both axes cost two reads and not three.
// IN_PANELS: codes go into panels (lib/panels.wgsl) of the contraction, with its padding; by columns they are transposed on the way.

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

var<workgroup> merged: array<vec4<u32>, LANES>;
//!repeat b BATCH
var<workgroup> tops$b: array<u32, LANES>;
//!end

// Tops over lanes that are `step` apart: for lane li < step those of its unit.
fn merge(li: u32, step: u32, even: vec4<u32>, odd: vec4<u32>) -> vec4<u32> {
  workgroupBarrier();
  merged[li] = together(even, odd);
  workgroupBarrier();
  var a = vec4<u32>();
  var b = vec4<u32>();
  for (var i = li % step; i < LANES; i += step) {
    a = max(a, evens(merged[i]));
    b = max(b, odds(merged[i]));
  }
  return together(a, b);
}

// CHUNK rows of one group, LANES / TEAM teams with BATCH rows each at a time. A lane has every TEAM-th unit of its rows.
@compute @workgroup_size(LANES)
fn rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let chunk = grid_index(wg, n);
  let range = chunk_rows(chunk, CHUNK, p.groups, p.group_rows, p.rows);
  let units = div_up(p.cols, 8u);
  let lane = li % TEAM;
//!repeat t TOPS
//!repeat i UNITS
  var even$i = vec4<u32>();
  var odd$i = vec4<u32>();
//!end
//!end
  for (var start = range.first; start < range.end; start += BATCH * (LANES / TEAM)) {
    // Past the end of the chunk the last row again, past the end of a row its last unit.
//!repeat b BATCH
    let row$b = start + $bu * (LANES / TEAM) + li / TEAM;
    let at$b = min(row$b, range.end - 1u) * units;
//!repeat i UNITS
    let v$b_$i = x[at$b + unit_of($iu, lane, units)];
//!end
//!end
//!repeat b BATCH
    var top$b = vec4<u32>();
//!repeat i UNITS
    top$b = max(top$b, max(evens(v$b_$i), odds(v$b_$i)));
//!end
    tops$b[li] = largest(top$b);
//!end
//!repeat t TOPS
//!repeat b BATCH
//!repeat i UNITS
    even$i = max(even$i, evens(v$b_$i));
    odd$i = max(odd$i, odds(v$b_$i));
//!end
//!end
//!end
    workgroupBarrier();
    for (var width = TEAM / 2u; width > 0u; width /= 2u) {
      if lane < width {
//!repeat b BATCH
        tops$b[li] = max(tops$b[li], tops$b[li + width]);
//!end
      }
      workgroupBarrier();
    }
//!repeat b BATCH
    let r$b = descale_bits((tops$b[li - lane] >> 1u) & 0x7fff0000u);
    if row$b < range.end {
      if lane == 0u {
        descales[row$b] = r$b;
      }
      if IN_PANELS == 1u {
        for (var unit = units + lane; unit < div_up(units, 8u) * 8u; unit += TEAM) {
          codes[place(row$b, unit)] = Unit();
        }
      }
      if r$b > CAREFUL {
        careful_row(row$b, units, lane, r$b);
      } else {
        let s = factors(vec4<u32>(r$b));
//!repeat i UNITS
        if WHOLE == 1u || $iu * TEAM + lane < units {
          codes[place(row$b, $iu * TEAM + lane)] = quick_unit(v$b_$i, s, s);
        }
//!end
      }
    }
//!end
    // Before the next rows' tops are written.
    workgroupBarrier();
  }
//!repeat t TOPS
//!repeat i UNITS
  let all$i = merge(li, TEAM, even$i, odd$i);
  if li < TEAM && (WHOLE == 1u || $iu * TEAM + lane < units) && range.first < range.end {
    column_tops[chunk * units + $iu * TEAM + lane] = all$i;
  }
//!end
//!end
}

fn unit_of(i: u32, lane: u32, units: u32) -> u32 {
  if WHOLE == 1u {
    return i * TEAM + lane;
  }
  return min(i * TEAM + lane, units - 1u);
}

fn careful_row(row: u32, units: u32, lane: u32, r: u32) {
  for (var unit = lane; unit < units; unit += TEAM) {
    codes[place(row, unit)] = careful_unit(x[row * units + unit], unit, vec4<u32>(r), vec4<u32>(r));
  }
}

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
  var range = vec2<u32>();
  for (var i = 0u; i <= g; i++) {
    let rows = group_rows(i, p.rows);
    range = vec2<u32>(range.y, range.y + div_up(rows.y - rows.x, CHUNK));
  }
  return range;
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
  let t = top & vec4<u32>(0xffffu);
  let u = top >> vec4<u32>(16u);
  let a = descale4(vec4<u32>(t.x, u.x, t.y, u.y));
  let b = descale4(vec4<u32>(t.z, u.z, t.w, u.w));
  if range.first == group_start(range.group) && down == 0u {
    store_descales(range.group, unit, a, b);
  }
//!repeat w IN_PANELS
  cast_panels(range, unit, down, a, b);
  return;
//!end
  if max(largest(a), largest(b)) > CAREFUL {
    for (var row = range.first + down; row < range.end; row += LANES / ACROSS) {
      codes[place(row, unit)] = careful_unit(x[row * units + unit], unit, a, b);
    }
    return;
  }
  let fa = factors(a);
  let fb = factors(b);
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

// r of four columns whose tops are given as bf16.
fn descale4(t: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(
    descale_bits(t.x << 16u), descale_bits(t.y << 16u), descale_bits(t.z << 16u), descale_bits(t.w << 16u));
}

fn group_start(g: u32) -> u32 {
  if GROUPED == 0u {
    return g * p.group_rows;
  }
  return group_rows(g, p.rows).x;
}

fn store_descales(g: u32, unit: u32, a: vec4<u32>, b: vec4<u32>) {
  for (var i = 0u; i < min(p.cols - 8u * unit, 8u); i++) {
    descales[g * p.cols + 8u * unit + i] = select(a, b, i >= 4u)[i % 4u];
  }
}

// Groups without rows have no tile; where there is one, the last tile is of no group.
fn empty_groups(first_unit: u32, li: u32) {
  for (var g = 0u; g < p.groups; g++) {
    let rows = group_rows(g, p.rows);
    if rows.x == rows.y && li < ACROSS && first_unit + li < div_up(p.cols, 8u) {
      store_descales(g, first_unit + li, vec4<u32>(FLOOR), vec4<u32>(FLOOR));
    }
  }
}
