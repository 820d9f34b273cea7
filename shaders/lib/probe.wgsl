// Whether fragments of 8 x 8 are what the kernels take them for: every subgroup of 32 loads, multiplies and stores some in each way
// that those do. Results of each: c = A B^T from zero, 2 c + A B, and how many lanes the subgroup has.
struct Probe {
  rows: u32, // of an operand: 8
}

@group(0) @binding(0) var<uniform> p: Probe;
@group(0) @binding(1) var<storage, read> a: array<H4>;       // for each subgroup 8 rows of 8 halves
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>; // the same
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;

var<workgroup> tile: array<H8, 32>;    // rows of 8 halves and 8 of padding
var<workgroup> results: array<F4, 48>; // rows of 8 floats and 4 of padding

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) li: u32, @builtin(subgroup_size) lanes: u32) {
  let sg = li / 32u;
  let lane = li % 32u;
  if lane < p.rows {
    let v = b[sg * p.rows + lane];
    tile[(sg * 8u + lane) * 2u] = $H8_PUT(
      vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
      vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
  }
  workgroupBarrier();
  let left = coopLoadT<FragmentA>(&a[sg * 16u]$AT, 2u * QUAD);
  let across = coopLoad<FragmentB>(&tile[sg * 16u].x, 4u * QUAD);
  let along = coopLoadT<FragmentB>(&tile[sg * 16u].x, 4u * QUAD);
  let own = sg * 24u;
  let stride = 3u * QUAD;
  let mine = own + lane / 2u * 3u + lane % 2u;
  var c = FragmentC();
  c = coopMultiplyAdd(left, across, c);
  coopStoreT(c, &results[own]$AT, stride);
  subgroupBarrier();
  if lane < 16u {
    let sums = $F4_GET(results[mine]);
    out[sg * 32u + lane] = sums;
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
  if lane < 16u {
    out[sg * 32u + 16u + lane] = $F4_GET(results[mine]);
  }
  if lane == 0u {
    out[64u + sg] = vec4<f32>(f32(lanes));
  }
}
