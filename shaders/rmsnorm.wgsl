// RMSNorm over rows: y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps); with ADD, x is the sum of two tensors, and
// is written too.
// The simple algorithm, one thread a row with its own sums, is the variant of software adapters. What GPUs add:
//   1. LANES threads share a row and add up their parts as a tree in workgroup memory; a workgroup has ROWS rows.
//   2. A thread keeps HELD quads of its row between the two passes; a longer row's rest is read twice.
//   3. With FUSED, backward sums the weight's gradient over p.chunk rows a thread in the same pass.
// quantize_rows.wgsl has a forward too, which quantizes its rows at once; it adds up squares in this one's order.
// The weight's gradient is a sum over all rows in two stages of fixed order: sums over some rows for each column (from
// backward, or from `partial` over CHUNK rows), and `total`, their sum.

struct Rmsnorm {
  rows: u32,
  cols: u32,
  chunk: u32, // rows that a thread takes one after another (backward)
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
//!repeat w ADD
@group(0) @binding(5) var<storage, read> more: array<X>;
@group(0) @binding(6) var<storage, read_write> sum_out: array<X>;
//!end

// Backward by rows.
@group(0) @binding(3) var<storage, read> d_y: array<X>;
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_x: array<X>;
//!repeat w FUSED
@group(0) @binding(6) var<storage, read_write> team_sums: array<vec4<f32>>;
//!end
//!repeat w ONTO
@group(0) @binding(6 + FUSED) var<storage, read> so_far: array<X>;
//!end

// Backward by columns; x stays at 1, d_y and rstd where they were.
@group(0) @binding(0) var<uniform> c: Columns;
@group(0) @binding(2) var<storage, read_write> sums: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> d_weight: array<W>;

const WG = ROWS * LANES;

var<workgroup> parts: array<f32, WG>;

// The sum of `v` over the LANES threads of a row.
fn row_sum(v: f32, li: u32) -> f32 {
  if LANES == 1u {
    return v;
  }
  workgroupBarrier();
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

//!repeat w TREE
var<workgroup> columns: array<vec4<f32>, WG>;

// The sum of `v` over the threads whose number is `li` modulo `width`, for those below `width`.
fn column_sum(v: vec4<f32>, li: u32, width: u32) -> vec4<f32> {
  workgroupBarrier();
  columns[li] = v;
  for (var half = WG / width / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if li < half * width {
      columns[li] += columns[li + half * width];
    }
  }
  return columns[li];
}
//!end

// Quad `at` of x, the sum if there are two; rounded as it is stored.
fn value(at: u32) -> vec4<f32> {
//!repeat w ADD
  return x_get(x_put(x_get(x[at]) + x_get(more[at])));
//!end
  return x_get(x[at]);
}

fn store(v: vec4<f32>, r: f32, base: u32, q: u32) {
//!repeat w ADD
  sum_out[base + q] = x_put(v);
//!end
  y[base + q] = x_put(normed(v, r, w_get(weight[q]), q));
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, nwg) * ROWS + li / LANES;
  let lane = li % LANES;
  let quads = div_up(p.cols, 4u);
  let base = min(row, p.rows - 1u) * quads; // rows past the end only take part in the barriers
  var sum = vec4<f32>();
//!repeat i HELD
  let v$i = select(vec4<f32>(0.0), value(base + min(lane + $iu * LANES, quads - 1u)), lane + $iu * LANES < quads);
  sum += v$i * v$i;
//!end
  for (var q = lane + HELD * LANES; q < quads; q += LANES) {
    let v = value(base + q);
    sum += v * v;
  }
  let r = norm_factor(row_sum(sum4(sum), li));
  if row >= p.rows {
    return;
  }
//!repeat i HELD
  if lane + $iu * LANES < quads {
    store(v$i, r, base, lane + $iu * LANES);
  }
//!end
  for (var q = lane + HELD * LANES; q < quads; q += LANES) {
    store(value(base + q), r, base, q);
  }
  if lane == 0u {
    rstd_out[row] = r;
  }
}

// `v`, added to the gradient so far at `at` with ONTO.
fn d_x_with(at: u32, v: vec4<f32>) -> X {
//!repeat w ONTO
  return x_put(x_get(so_far[at]) + v);
//!end
  return x_put(v);
}

// d_x = rstd * (g - x_hat * mean(g * x_hat)) with g = d_y * w, x_hat = x * rstd; added to so_far with ONTO.
@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % LANES;
  let quads = div_up(p.cols, 4u);
  let first = (grid_index(wg, nwg) * ROWS + li / LANES) * p.chunk;
//!repeat i HELD
  let q$i = min(lane + $iu * LANES, quads - 1u);
  let w$i = select(vec4<f32>(0.0), w_get(weight[q$i]), lane + $iu * LANES < quads);
  var s$i = vec4<f32>();
//!end
  for (var k = 0u; k < p.chunk; k++) {
    let row = first + k;
    let here = row < p.rows;
    let base = min(row, p.rows - 1u) * quads;
    let r = rstd[min(row, p.rows - 1u)];
    var sum = vec4<f32>();
//!repeat i HELD
    let x$i = x[base + q$i];
    let d$i = d_y[base + q$i];
//!repeat w ONTO
    let o$i = x_get(so_far[base + q$i]);
//!end
//!repeat w PLAIN
    let o$i = vec4<f32>();
//!end
//!end
//!repeat i HELD
    let p$i = x_get(d$i) * (x_get(x$i) * r);
    sum += p$i * w$i;
    s$i += select(vec4<f32>(0.0), p$i, here);
//!end
    for (var q = lane + HELD * LANES; q < quads; q += LANES) {
      sum += x_get(d_y[base + q]) * w_get(weight[q]) * (x_get(x[base + q]) * r);
    }
    let mean = row_sum(sum4(sum), li) / f32(p.cols);
//!repeat i HELD
    if here && lane + $iu * LANES < quads {
      d_x[base + q$i] = x_put(o$i + inside(r * (x_get(d$i) * w$i - (x_get(x$i) * r) * mean), q$i));
    }
//!end
    for (var q = lane + HELD * LANES; q < quads && here; q += LANES) {
      let g = x_get(d_y[base + q]) * w_get(weight[q]);
      d_x[base + q] = d_x_with(base + q, inside(r * (g - (x_get(x[base + q]) * r) * mean), q));
    }
  }
//!repeat w FUSED
//!repeat i HELD
  let t$i = column_sum(s$i, li, LANES);
  if li < LANES && lane + $iu * LANES < quads {
    team_sums[grid_index(wg, nwg) * quads + q$i] = t$i;
  }
//!end
//!end
}

// One thread: one quad of columns of CHUNK rows.
@compute @workgroup_size(WG)
fn partial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, nwg) * WG + li;
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

// WIDTH quads of columns a workgroup, all of its threads adding up rows, TOGETHER of them loaded at once.
@compute @workgroup_size(WG)
fn total(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let q = grid_index(wg, nwg) * WIDTH + li % WIDTH;
  let column = min(q, c.quads - 1u);
  var sum = vec4<f32>();
  let step = WG / WIDTH;
  for (var row = li / WIDTH; row < c.rows; row += TOGETHER * step) {
//!repeat i TOGETHER
    let v$i = partials[min(row + $iu * step, c.rows - 1u) * c.quads + column];
//!end
//!repeat i TOGETHER
    sum += select(vec4<f32>(0.0), v$i, row + $iu * step < c.rows);
//!end
  }
//!repeat w TREE
  sum = column_sum(sum, li, WIDTH);
//!end
  if li < WIDTH && q < c.quads {
    d_weight[q] = w_put(sum);
  }
}
