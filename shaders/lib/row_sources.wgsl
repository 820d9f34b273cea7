// Where the rows come from that quantize_rows.wgsl quantizes, in units of eight columns of bf16: the variant sets the name of one
// source to 1. INPUTS says how many bindings a source reads; what it makes is stored too, after all other bindings.
//   line    what all units of a row need
//   load    what a unit is made of, so that all loads are on their way before the first is used
//   make    the unit
//   keep    stores what was made, at unit number `at`
//   again   the unit that `keep` stored there, or that was there
// All units of a normed row come before the first is made: `added`, `with_squares` and `team_sum` give what `make` needs then.

//!repeat s IN_MEMORY
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;

fn line(row: u32) -> u32 {
  return row * div_up(p.cols, 8u);
}

fn load(first: u32, unit: u32) -> vec4<u32> {
  return x[first + unit];
}

fn make(v: vec4<u32>, first: u32, unit: u32) -> vec4<u32> {
  return v;
}

fn keep(at: u32, v: vec4<u32>) {
}

fn again(at: u32) -> vec4<u32> {
  return x[at];
}
//!end
//!repeat s MADE
@group(0) @binding(INPUTS + GROUPED + 3u + TOPS) var<storage, read_write> made: array<vec4<u32>>;

fn keep(at: u32, v: vec4<u32>) {
  made[at] = v;
}

// A lane reads what it wrote itself.
fn again(at: u32) -> vec4<u32> {
  return made[at];
}

// Bits of `v` rounded to bf16 by bf16_put, in the high halves. NaN are rare: one test a quad, and half the operations.
fn rounded(v: vec4<f32>) -> vec4<u32> {
  let u = bitcast<vec4<u32>>(v);
  if any((u & vec4<u32>(0x7fffffffu)) > vec4<u32>(INF)) {
    return bitcast<vec4<u32>>(x_get(x_put(v)));
  }
  return (u + vec4<u32>(0x7fffu) + ((u >> vec4<u32>(16u)) & vec4<u32>(1u))) & vec4<u32>(0xffff0000u);
}

fn quad_of(bits: vec4<u32>) -> X {
  return vec2<u32>((bits.x >> 16u) | bits.y, (bits.z >> 16u) | bits.w);
}
//!end
//!repeat s GATED
// silu(gate) * up, what swiglu.wgsl makes.
@group(0) @binding(1) var<storage, read> gate: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> up: array<vec4<u32>>;

struct Pair {
  gate: vec4<u32>,
  up: vec4<u32>,
}

fn line(row: u32) -> u32 {
  return row * div_up(p.cols, 8u);
}

fn load(first: u32, unit: u32) -> Pair {
  return Pair(gate[first + unit], up[first + unit]);
}

fn quick_gated(gate: X, up: X) -> X {
  return quad_of(rounded(bitcast<vec4<f32>>(rounded(silu(x_get(gate)))) * x_get(up)));
}

fn make(v: Pair, first: u32, unit: u32) -> vec4<u32> {
  return vec4<u32>(quick_gated(v.gate.xy, v.up.xy), quick_gated(v.gate.zw, v.up.zw));
}
//!end
//!repeat s ROUTED
// Rows of tokens in the order of experts, times their slots' weights with WEIGHTED.
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> order: array<u32>;
//!repeat j WEIGHTED
@group(0) @binding(3) var<storage, read> weights: array<f32>;
//!end

struct Line {
  first: u32,
  weight: f32,
}

fn line(row: u32) -> Line {
  let slot = order[row];
  var line = Line(slot / p.top_k * div_up(p.cols, 8u), 1.0);
//!repeat j WEIGHTED
  line.weight = weights[slot];
//!end
  return line;
}

fn load(line: Line, unit: u32) -> vec4<u32> {
  return x[line.first + unit];
}

// Zero past the width, whatever a NaN weight made of the padding.
fn weighted(q: X, weight: f32, column: u32) -> X {
  let inside = vec4<u32>(column) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.cols);
  return quad_of(rounded(select(vec4<f32>(0.0), x_get(q) * weight, inside)));
}

fn make(v: vec4<u32>, line: Line, unit: u32) -> vec4<u32> {
//!repeat j WEIGHTED
  return vec4<u32>(weighted(v.xy, line.weight, 8u * unit), weighted(v.zw, line.weight, 8u * unit + 4u));
//!end
  return v;
}
//!end
//!repeat s NORMED
// x * rstd * weight, what rmsnorm.wgsl makes; x is a sum of two tensors with ADD, and is stored too.
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;
//!repeat j ADD
@group(0) @binding(3) var<storage, read> more: array<vec4<u32>>;
@group(0) @binding(INPUTS + GROUPED + 4u + TOPS) var<storage, read_write> sum_out: array<vec4<u32>>;
//!end

struct Terms {
  x: vec4<u32>,
//!repeat j ADD
  more: vec4<u32>,
//!end
}

fn line(row: u32) -> u32 {
  return row * div_up(p.cols, 8u);
}

fn load(first: u32, unit: u32) -> Terms {
  var v: Terms;
  v.x = x[first + unit];
//!repeat j ADD
  v.more = more[first + unit];
//!end
  return v;
}

fn added(v: Terms) -> vec4<u32> {
//!repeat j ADD
  return vec4<u32>(quad_of(rounded(x_get(v.x.xy) + x_get(v.more.xy))), quad_of(rounded(x_get(v.x.zw) + x_get(v.more.zw))));
//!end
  return v.x;
}

fn keep_sum(at: u32, v: vec4<u32>) {
//!repeat j ADD
  sum_out[at] = v;
//!end
}

// There are twice as many lanes a row in rmsnorm.wgsl: this lane's units are the quads of two of them, of which it keeps the sums.
struct Squares {
  even: vec4<f32>,
  odd: vec4<f32>,
}

fn with_squares(s: Squares, v: vec4<u32>, exists: bool) -> Squares {
  let even = select(vec4<f32>(0.0), x_get(v.xy), exists);
  let odd = select(vec4<f32>(0.0), x_get(v.zw), exists);
  return Squares(s.even + even * even, s.odd + odd * odd);
}

var<workgroup> parts: array<vec2<f32>, LANES>;

// The sum over the row, as that kernel's tree takes it.
fn team_sum(s: Squares, li: u32) -> f32 {
  parts[li] = vec2<f32>(sum4(s.even), sum4(s.odd));
  workgroupBarrier();
  for (var half = TEAM / 2u; half > 0u; half /= 2u) {
    if li % TEAM < half {
      parts[li] += parts[li + half];
    }
    workgroupBarrier();
  }
  let both = parts[li - li % TEAM];
  return both.x + both.y;
}

fn make(v: vec4<u32>, rstd: f32, unit: u32) -> vec4<u32> {
  let w = weight[unit];
  let low = rounded(normed(x_get(v.xy), rstd, x_get(w.xy), 2u * unit));
  let high = rounded(normed(x_get(v.zw), rstd, x_get(w.zw), 2u * unit + 1u));
  return vec4<u32>(quad_of(low), quad_of(high));
}
//!end
