// Quantization to fp8: codes q = fp8(x * s) and de-scales r = 1/s, with s from the largest magnitude ("top") along a
// row, along a column of a group of rows, or of the whole tensor. Only integers decide: magnitudes are compared as
// bits, a power-of-two r is made from the bits of top, and the one true division is done digit by digit.
//   rows                         TEAM lanes a row: top, then codes; the second read of x hits the cache
//   init, col_top, col_cast      one lane a column quad and CHUNK rows; groups as long as the matrix stay parallel
//   init, tensor_top, tensor_scale, tensor_cast
// What this adds to the simple algorithm: r grows with top, so col_top raises r itself with atomicMax, which is exact
// in any order. A NaN or an infinity makes r a NaN (payload 1 or 0): integer maxima let it win over every number.

struct Quantize {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
}

struct Init {
  n: u32,
  word: u32,
}

struct Rounding {
  pow2: u32, // 1: round s down to a power of two
}

// One number may stand for different bindings of different entry points.
@group(0) @binding(0) var<uniform> p: Quantize;
@group(0) @binding(0) var<uniform> init_params: Init;
@group(0) @binding(0) var<uniform> rounding: Rounding;
@group(0) @binding(1) var<storage, read_write> scales: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read> x: array<X>;
@group(0) @binding(3) var<storage, read_write> codes: array<Q>;
@group(0) @binding(3) var<storage, read> offs: array<u32>;
@group(0) @binding(4) var<storage, read_write> column_codes: array<Q>;

var<workgroup> tops: array<u32, LANES>;

// Bits of the magnitudes.
fn magnitude(q: X) -> vec4<u32> {
  return bitcast<vec4<u32>>(x_get(q)) & vec4<u32>(0x7fffffffu);
}

fn largest(v: vec4<u32>) -> u32 {
  return max(max(v.x, v.y), max(v.z, v.w));
}

// Which elements of column quad c exist.
fn exists(c: u32) -> vec4<bool> {
  return vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.cols);
}

// The maximum of `t` over TEAM neighbouring lanes, for lane `li`.
fn reduce(t: u32, li: u32) -> u32 {
  if TEAM == 1u {
    return t;
  }
  tops[li] = t;
  workgroupBarrier();
  for (var width = TEAM / 2u; width > 0u; width /= 2u) {
    if li % TEAM < width {
      tops[li] = max(tops[li], tops[li + width]);
    }
    workgroupBarrier();
  }
  return tops[li - li % TEAM];
}

@compute @workgroup_size(LANES)
fn rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, n) * (LANES / TEAM) + li / TEAM;
  let quads = div_up(p.cols, 4u);
  let first = row * quads + li % TEAM;
  let end = select(first, (row + 1u) * quads, row < p.rows);
  var top = vec4<u32>();
  for (var i = first; i < end; i += TEAM) {
    top = max(top, magnitude(x[i]));
  }
  let r = descale_bits(reduce(largest(top), li));
  for (var i = first; i < end; i += TEAM) {
    let r4 = select(vec4<u32>(FLOOR), vec4<u32>(r), exists(i - row * quads));
    codes[i] = encode(x[i], scale_bits(r4), r4);
  }
  if row < p.rows && li % TEAM == 0u {
    atomicStore(&scales[row], r);
  }
}

// Sets the first n scales to `word`.
@compute @workgroup_size(LANES)
fn init(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, n) * LANES + li;
  if i < init_params.n {
    atomicStore(&scales[i], init_params.word);
  }
}

// Up to CHUNK rows of one group, and the column quad of lane `li`.
struct Strip {
  rows: Rows,
  quad: u32,
}

fn strip(tile: u32, li: u32) -> Strip {
  let strips = div_up(div_up(p.cols, 4u), LANES);
  let quad = (tile % strips) * LANES + li;
  let rows = chunk_rows(tile / strips, CHUNK, p.groups, p.group_rows, p.rows);
  return Strip(rows, quad);
}

fn raise(at: u32, column: u32, top: u32) {
  if column < p.cols {
    atomicMax(&scales[at + column], descale_bits(top));
  }
}

@compute @workgroup_size(LANES)
fn col_top(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let s = strip(grid_index(wg, n), li);
  let quads = div_up(p.cols, 4u);
  if s.quad >= quads || s.rows.group >= p.groups {
    return;
  }
  var top = vec4<u32>();
  for (var row = s.rows.first; row < s.rows.end; row++) {
    top = max(top, magnitude(x[row * quads + s.quad]));
  }
  let at = s.rows.group * p.cols;
  raise(at, 4u * s.quad, top.x);
  raise(at, 4u * s.quad + 1u, top.y);
  raise(at, 4u * s.quad + 2u, top.z);
  raise(at, 4u * s.quad + 3u, top.w);
}

// r of one column; FLOOR past the width, so that a poisoned last column leaves the padding zero.
fn column_descale(at: u32, column: u32) -> u32 {
  if column < p.cols {
    return atomicLoad(&scales[at + column]);
  }
  return FLOOR;
}

@compute @workgroup_size(LANES)
fn col_cast(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let s = strip(grid_index(wg, n), li);
  let quads = div_up(p.cols, 4u);
  if s.quad >= quads {
    return;
  }
  if s.rows.group >= p.groups {
    for (var row = s.rows.first; row < s.rows.end; row++) {
      column_codes[row * quads + s.quad] = Q();
    }
    return;
  }
  let at = s.rows.group * p.cols;
  let c = 4u * s.quad;
  let r = vec4<u32>(
    column_descale(at, c), column_descale(at, c + 1u), column_descale(at, c + 2u), column_descale(at, c + 3u));
  let scale = scale_bits(r);
  for (var row = s.rows.first; row < s.rows.end; row++) {
    let i = row * quads + s.quad;
    column_codes[i] = encode(x[i], scale, r);
  }
}

// The whole tensor: scales are r, top, s.

@compute @workgroup_size(LANES)
fn tensor_top(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let first = grid_index(wg, n) * (LANES * CHUNK) + li;
  let end = min(first + LANES * CHUNK, p.rows * div_up(p.cols, 4u));
  var top = vec4<u32>();
  for (var i = first; i < end; i += LANES) {
    top = max(top, magnitude(x[i]));
  }
  let t = reduce(largest(top), li);
  if li % TEAM == 0u {
    atomicMax(&scales[1], t);
  }
}

// Bits of (n / 2^23) * 2^e / d to nearest, for a normal d > 0 and 2^23 <= n < 2^24: long division of the mantissas, 24
// digits. With n = 2^23 or 7 * 2^21 the remainder is never half of the divisor, so there are no ties.
fn quotient_bits(n: u32, e: u32, d: u32) -> u32 {
  let m = (d & 0x7fffffu) | 0x800000u;
  let less = select(0u, 1u, n < m);
  var rest = n << less;
  var q = 0u;
  for (var i = 0u; i < 24u; i++) {
    let digit = select(0u, 1u, rest >= m);
    q = (q << 1u) | digit;
    rest = (rest - digit * m) << 1u;
  }
  q += select(0u, 1u, rest > m);
  // q has its hidden bit, which adds the missing one to the exponent.
  return ((253u + e - (d >> 23u) - less) << 23u) + q;
}

// s = F / max(top, 1e-12) in f64, then f32 (the f64 quotient is never near an f32 tie), and r = 1/s in f32.
@compute @workgroup_size(1)
fn tensor_scale() {
  let top = atomicLoad(&scales[1]);
  var r = descale_bits(top);
  var s = scale_bits(vec4<u32>(r)).x;
  if top >= INF {
    s = 0u;
  } else if rounding.pow2 == 0u {
    s = CEILING;
    if top > 0x2b8cbcccu {
      s = quotient_bits(0xe00000u, TOP, top);
    }
    r = quotient_bits(0x800000u, 0u, s);
  }
  atomicStore(&scales[0], r);
  atomicStore(&scales[2], s);
}

@compute @workgroup_size(LANES)
fn tensor_cast(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.cols, 4u);
  let first = grid_index(wg, n) * (LANES * CHUNK) + li;
  let end = min(first + LANES * CHUNK, p.rows * quads);
  let r = atomicLoad(&scales[0]);
  let s = atomicLoad(&scales[2]);
  for (var i = first; i < end; i += LANES) {
    let r4 = select(vec4<u32>(FLOOR), vec4<u32>(r), exists(i % quads));
    codes[i] = encode(x[i], vec4<u32>(s), r4);
  }
}
