// Quantization of bf16 by columns of groups, for GPUs: what quantize.wgsl computes, in units of eight columns (16 bytes of x). A
// workgroup has a strip, ACROSS units of all rows of one group: it takes the tops of its columns, then casts them. It waits for no
// other workgroup, and there is one dispatch.
// What this adds to the simple algorithm:
// 1. Loads of 16 bytes; a lane has eight neighbouring rows in flight, which make a unit of eight steps where codes go into panels.
// 2. HELD times STEP rows stay in registers between tops and casts. Those past them are read first, and cast last and backwards:
//    what was read last is most likely still in the cache.
// 3. Neighbouring workgroups have neighbouring strips, so that lines of memory wider than a strip come from the cache.
// 4. Codes by way of halves, two at a time: a sixth of the operations of the exact encoder (lib/units.wgsl).
// BOTH: the codes of rows too, a group's tiles of rows before its strips, which then find x in the cache.
// IN_PANELS: codes go into panels (lib/panels.wgsl) of the contraction, with its padding, transposed on the way.

struct Strips {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
}

@group(0) @binding(0) var<uniform> p: Strips;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> offs: array<u32>;
@group(0) @binding(3) var<storage, read_write> descales: array<u32>;
@group(0) @binding(4) var<storage, read_write> codes: array<Unit>;
//!repeat b BOTH
@group(0) @binding(5) var<storage, read_write> row_descales: array<u32>;
@group(0) @binding(6) var<storage, read_write> row_codes: array<Unit>;
//!end

// Rows that the lanes of a unit have at a time.
const STEP = LANES / ACROSS * 8u;
// Lanes of a unit that merge first.
const PARTS = min(LANES / ACROSS, 16u);

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let strips = div_up(div_up(p.cols, 8u), ACROSS);
  var left = grid_index(wg, n);
//!repeat b COLUMNS_ALONE
  if left < strips * (p.groups + GROUPED) {
    strip(left / strips, left % strips * ACROSS, li);
  }
//!end
//!repeat b BOTH
  for (var g = 0u; g < p.groups + GROUPED; g++) {
    let rows = rows_of(g);
    let tiles = div_up(rows.y - rows.x, LANES / TEAM);
    if left < tiles {
      row_tile(rows.x + left * (LANES / TEAM), rows.y, li);
      return;
    }
    left -= tiles;
    if left < strips {
      strip(g, left * ACROSS, li);
      return;
    }
    left -= strips;
  }
//!end
}

// Rows of group `g` as first and one past the last. Those past the last offset are group `groups`.
fn rows_of(g: u32) -> vec2<u32> {
  if GROUPED == 0u {
    return vec2<u32>(g, g + 1u) * p.group_rows;
  }
  if g == p.groups {
    return vec2<u32>(group_rows(g - 1u, p.rows).y, p.rows);
  }
  return group_rows(g, p.rows);
}

fn strip(group: u32, first_unit: u32, li: u32) {
  let rows = rows_of(group);
  let units = div_up(p.cols, 8u);
  let unit = first_unit + li % ACROSS;
  let first = rows.x + li / ACROSS * 8u;
  if group == p.groups {
    no_codes(first, rows.y, unit);
    return;
  }
  // Past the end of the group its last row again, past the end of a row its last unit.
  let last = max(rows.y, 1u) - 1u;
  let column = min(unit, units - 1u);
  var even = vec4<u32>();
  var odd = vec4<u32>();
  for (var row = first + HELD * STEP; row < rows.y; row += STEP) {
//!repeat r 8
    let v$r = x[min(row + $ru, last) * units + column];
//!end
//!repeat r 8
    even = max(even, evens(v$r));
    odd = max(odd, odds(v$r));
//!end
  }
//!repeat h HELD
//!repeat r 8
  var v$h_$r = vec4<u32>();
//!end
  if first + $hu * STEP < rows.y {
//!repeat r 8
    v$h_$r = x[min(first + $hu * STEP + $ru, last) * units + column];
//!end
  }
//!end
//!repeat h HELD
//!repeat r 8
  even = max(even, evens(v$h_$r));
  odd = max(odd, odds(v$h_$r));
//!end
//!end
  let r = descales_of(merge_parts(li, even, odd));
  if unit >= units {
    return;
  }
  if li < ACROSS {
    store_descales(group, unit, r);
  }
  let to = place_of(group, rows, unit);
  if max(largest(r.a), largest(r.b)) > CAREFUL {
    careful_strip(to, first, r);
    return;
  }
  let fa = factors(r.a);
  let fb = factors(r.b);
//!repeat h HELD
  if first + $hu * STEP < to.padded {
//!repeat r 8
    let q$r = quick_unit(v$h_$r, fa, fb);
//!end
    store(to, first + $hu * STEP, q0, q1, q2, q3, q4, q5, q6, q7);
  }
//!end
  for (var turn = div_up(max(to.padded, first) - first, STEP); turn > HELD; turn--) {
    let row = first + (turn - 1u) * STEP;
//!repeat r 8
    let v$r = x[min(row + $ru, last) * units + column];
//!end
//!repeat r 8
    let q$r = quick_unit(v$r, fa, fb);
//!end
    store(to, row, q0, q1, q2, q3, q4, q5, q6, q7);
  }
}

// `merge` (lib/units.wgsl) for many lanes, in two turns.
fn merge_parts(li: u32, even: vec4<u32>, odd: vec4<u32>) -> vec4<u32> {
  merged[li] = together(even, odd);
  workgroupBarrier();
  var a = vec4<u32>();
  var b = vec4<u32>();
  if li < ACROSS * PARTS {
    for (var i = li; i < LANES; i += ACROSS * PARTS) {
      a = max(a, evens(merged[i]));
      b = max(b, odds(merged[i]));
    }
    merged[li] = together(a, b);
  }
  workgroupBarrier();
  for (var i = li % ACROSS; i < ACROSS * PARTS; i += ACROSS) {
    a = max(a, evens(merged[i]));
    b = max(b, odds(merged[i]));
  }
  return together(a, b);
}

// Where the codes of a unit of columns go.
struct Place {
  start: u32, // rows of the group
  end: u32,
  padded: u32, // one past the last row that is stored
  panel: u32,  // its first panel
  unit: u32,
}

fn place_of(group: u32, rows: vec2<u32>, unit: u32) -> Place {
  var to = Place(rows.x, rows.y, rows.y, 0u, unit);
//!repeat w IN_PANELS
  to.padded = rows.x + div_up(rows.y - rows.x, 64u) * 64u;
  to.panel = first_panel(group, rows.x);
//!end
  return to;
}

// The codes of eight rows.
fn store(to: Place, row: u32, q0: Unit, q1: Unit, q2: Unit, q3: Unit, q4: Unit, q5: Unit, q6: Unit, q7: Unit) {
//!repeat w IN_PANELS
//!repeat r 8
  let k$r = select(q$r, Unit(), row + $ru >= to.end);
//!end
  store_panels(to.panel, row - to.start, to.unit, k0, k1, k2, k3, k4, k5, k6, k7);
  return;
//!end
//!repeat r 8
  if row + $ru < to.end {
    codes[(row + $ru) * div_up(p.cols, 8u) + to.unit] = q$r;
  }
//!end
}

// A strip of the exact encoder, which is long: a loop, and nothing from registers.
fn careful_strip(to: Place, first: u32, r: Descales) {
  for (var row = first; row < to.padded; row += STEP) {
    var q: array<Unit, 8>;
    for (var i = 0u; i < 8u; i++) {
      q[i] = careful_unit(x[min(row + i, to.end - 1u) * div_up(p.cols, 8u) + to.unit], to.unit, r.a, r.b);
    }
    store(to, row, q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]);
  }
}

// Rows of no group have the code 0; panels have no place for them.
fn no_codes(first: u32, end: u32, unit: u32) {
  if IN_PANELS == 1u || unit >= div_up(p.cols, 8u) {
    return;
  }
  for (var start = first; start < end; start += STEP) {
    for (var row = start; row < min(start + 8u, end); row++) {
      codes[row * div_up(p.cols, 8u) + unit] = Unit();
    }
  }
}

//!repeat b BOTH
// The codes of row `first` and those after it, before `end`: a row by each team of TEAM lanes, UNITS units a lane.
fn row_tile(first: u32, end: u32, li: u32) {
  let units = div_up(p.cols, 8u);
  let lane = li % TEAM;
  let row = first + li / TEAM;
  let line = min(row, end - 1u) * units;
//!repeat i UNITS
  let v$i = x[line + min($iu * TEAM + lane, units - 1u)];
//!end
  var top = vec4<u32>();
//!repeat i UNITS
  top = max(top, max(evens(v$i), odds(v$i)));
//!end
  let r = descale_bits(row_top(li, largest(top)));
  if row >= end {
    return;
  }
  if lane == 0u {
    row_descales[row] = r;
  }
  if IN_PANELS == 1u {
    for (var unit = units + lane; unit < div_up(units, 8u) * 8u; unit += TEAM) {
      row_codes[place(row, unit)] = Unit();
    }
  }
  if r > CAREFUL {
    for (var unit = lane; unit < units; unit += TEAM) {
      row_codes[place(row, unit)] = careful_unit(x[line + unit], unit, vec4<u32>(r), vec4<u32>(r));
    }
    return;
  }
  let s = factors(vec4<u32>(r));
//!repeat i UNITS
  if $iu * TEAM + lane < units {
    row_codes[place(row, $iu * TEAM + lane)] = quick_unit(v$i, s, s);
  }
//!end
}
//!end
