// Whether fragments are what the kernels take them for: every subgroup of LANES loads, multiplies and stores some in each way
// that those do. Results of each: c = A B^T from zero, 2 c + A B, and how many lanes the subgroup has.
struct Probe {
  rows: u32, // of an operand: EDGE
}

@group(0) @binding(0) var<uniform> p: Probe;
@group(0) @binding(1) var<storage, read> a: array<H4>;        // for each subgroup EDGE rows of as many halves
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>; // the same
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;

const QUADS = EDGE / 4u; // of a row
const ALL = EDGE * QUADS;
// Rows of halves and 8 of padding, rows of floats and 4 of padding.
const HALVES_ROW = EDGE / 8u + 1u;
const FLOATS_ROW = QUADS + 1u;

var<workgroup> tile: array<H8, 2u * EDGE * HALVES_ROW>;
var<workgroup> results: array<F4, 2u * EDGE * FLOATS_ROW>;

@compute @workgroup_size(2u * LANES)
fn main(@builtin(local_invocation_index) li: u32, @builtin(subgroup_size) lanes: u32) {
  let sg = li / LANES;
  let lane = li % LANES;
  let eights = EDGE / 8u;
  if lane < p.rows * eights {
    let v = b[sg * p.rows * eights + lane];
    tile[(sg * EDGE + lane / eights) * HALVES_ROW + lane % eights] = $H8_PUT(
      vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
      vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
  }
  workgroupBarrier();
  let from_a = sg * ALL;
  let from_b = sg * EDGE * HALVES_ROW;
  let row_b = 2u * HALVES_ROW * QUAD;
  let left = coopLoadT<FragmentA>(&a[from_a]$AT, QUADS * QUAD);
  let across = coopLoad<FragmentB>(&tile[from_b].x, row_b);
  let along = coopLoadT<FragmentB>(&tile[from_b].x, row_b);
  let own = sg * EDGE * FLOATS_ROW;
  let stride = FLOATS_ROW * QUAD;
  var c = FragmentC();
  c = coopMultiplyAdd(left, across, c);
  coopStoreT(c, &results[own]$AT, stride);
  subgroupBarrier();
  for (var i = lane; i < ALL; i += LANES) {
    let mine = own + i / QUADS * FLOATS_ROW + i % QUADS;
    let sums = $F4_GET(results[mine]);
    out[sg * 2u * ALL + i] = sums;
    results[mine].x = sums.x * 2.0;
    results[mine].y = sums.y * 2.0;
    results[mine].z = sums.z * 2.0;
    results[mine].w = sums.w * 2.0;
  }
  subgroupBarrier();
  c = coopLoadT<FragmentC>(&results[own]$AT, stride);
  c = coopMultiplyAdd(left, along, c);
  subgroupBarrier();
  coopStoreT(c, &results[own]$AT, stride);
  subgroupBarrier();
  for (var i = lane; i < ALL; i += LANES) {
    out[(sg * 2u + 1u) * ALL + i] = $F4_GET(results[own + i / QUADS * FLOATS_ROW + i % QUADS]);
  }
  if lane == 0u {
    out[4u * ALL + sg] = vec4<f32>(f32(lanes));
  }
}
