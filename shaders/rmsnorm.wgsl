// RMSNorm over rows: y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps).
// LANES threads share a row: 1 on software adapters, a whole workgroup on GPUs, which adds up its parts as a tree in
// workgroup memory; a workgroup has ROWS rows.
// The weight's gradient is a sum over all rows in two stages of fixed order: `partial` sums CHUNK rows for each column,
// `total` the partial sums.

struct Rmsnorm {
  rows: u32,
  cols: u32,
  eps: f32,
}

struct Columns {
  rows: u32,   // of x (partial), of the partial sums (total)
  quads: u32,
}

@group(0) @binding(0) var<uniform> p: Rmsnorm;

// Forward.
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> weight: array<W>;
@group(0) @binding(3) var<storage, read_write> y: array<X>;
@group(0) @binding(4) var<storage, read_write> rstd_out: array<f32>;

// Backward by rows.
@group(0) @binding(3) var<storage, read> d_y: array<X>;
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_x: array<X>;

// Backward by columns; x stays at 1, d_y and rstd where they were.
@group(0) @binding(0) var<uniform> c: Columns;
@group(0) @binding(2) var<storage, read_write> sums: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> d_weight: array<W>;

var<workgroup> parts: array<f32, ROWS * LANES>;

// The sum of `v` over the LANES threads of a row.
fn row_sum(v: f32, li: u32) -> f32 {
  if LANES == 1u {
    return v;
  }
  parts[li] = v;
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if li % LANES < half {
      parts[li] += parts[li + half];
    }
  }
  workgroupBarrier();
  return parts[li - li % LANES];
}

fn sum4(v: vec4<f32>) -> f32 {
  return (v.x + v.y) + (v.z + v.w);
}

// Zero past the width, whatever a NaN in the row made of the padding.
fn inside(v: vec4<f32>, quad: u32) -> vec4<f32> {
  return select(vec4<f32>(0.0), v, vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.cols));
}

@compute @workgroup_size(ROWS * LANES)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, nwg) * ROWS + li / LANES;
  let lane = li % LANES;
  let quads = select(0u, div_up(p.cols, 4u), row < p.rows); // rows past the end wait at the barriers with the others
  let base = row * quads;
  var sum = vec4<f32>();
  for (var q = lane; q < quads; q += LANES) {
    let v = x_get(x[base + q]);
    sum += v * v;
  }
  let r = inverseSqrt(row_sum(sum4(sum), li) / f32(p.cols) + p.eps);
  for (var q = lane; q < quads; q += LANES) {
    y[base + q] = x_put(inside(x_get(x[base + q]) * r * w_get(weight[q]), q));
  }
  if lane == 0u && row < p.rows {
    rstd_out[row] = r;
  }
}

// d_x = rstd * (g - x_hat * mean(g * x_hat)) with g = d_y * w, x_hat = x * rstd.
@compute @workgroup_size(ROWS * LANES)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, nwg) * ROWS + li / LANES;
  let lane = li % LANES;
  let quads = select(0u, div_up(p.cols, 4u), row < p.rows);
  let base = row * quads;
  let r = rstd[min(row, p.rows - 1u)];
  var sum = vec4<f32>();
  for (var q = lane; q < quads; q += LANES) {
    sum += x_get(d_y[base + q]) * w_get(weight[q]) * (x_get(x[base + q]) * r);
  }
  let mean = row_sum(sum4(sum), li) / f32(p.cols);
  for (var q = lane; q < quads; q += LANES) {
    let g = x_get(d_y[base + q]) * w_get(weight[q]);
    d_x[base + q] = x_put(inside(r * (g - (x_get(x[base + q]) * r) * mean), q));
  }
}

// One thread: one quad of columns of CHUNK rows.
@compute @workgroup_size(ROWS * LANES)
fn partial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, nwg) * (ROWS * LANES) + li;
  let first = (i / c.quads) * CHUNK;
  if first >= c.rows {
    return;
  }
  var sum = vec4<f32>();
  for (var row = first; row < min(first + CHUNK, c.rows); row++) {
    let at = row * c.quads + i % c.quads;
    sum += x_get(d_y[at]) * (x_get(x[at]) * rstd[row]);
  }
  sums[i] = sum;
}

@compute @workgroup_size(ROWS * LANES)
fn total(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, nwg) * (ROWS * LANES) + li;
  if i >= c.quads {
    return;
  }
  var sum = vec4<f32>();
  for (var row = 0u; row < c.rows; row++) {
    sum += partials[row * c.quads + i];
  }
  d_weight[i] = w_put(sum);
}
