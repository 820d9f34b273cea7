// Cross entropy of rows of logits, whose gradient replaces them:
//   loss = log(sum exp(x - max)) + max - x[label];   gradient = (exp(x - max) / sum - [i is label]) * scale
// LANES threads share a row: one on software adapters, a workgroup on GPUs (lib/lanes.wgsl).
// The simple algorithm in three passes over the row: maximum, sum, gradient. What this adds: a thread's sum is made of
// blocks of 32 quads, so that its error does not grow with the length of the row.

struct CrossEntropy {
  rows: u32,
  vocab: u32,
  scale: f32,
}

@group(0) @binding(0) var<uniform> p: CrossEntropy;
@group(0) @binding(1) var<storage, read> labels: array<u32>;
@group(0) @binding(2) var<storage, read_write> logits: array<X>;
@group(0) @binding(3) var<storage, read_write> losses: array<f32>;

// The columns of quad `q`.
fn columns(q: u32) -> vec4<u32> {
  return vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u);
}

// Quad `q` of the row at `base`, `other` past the width.
fn load(base: u32, q: u32, other: f32) -> vec4<f32> {
  return select(vec4<f32>(other), x_get(logits[base + q]), columns(q) < vec4<u32>(p.vocab));
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.vocab, 4u);
  let own = grid_index(wg, n) * (WG / LANES) + li / LANES;
  let row = min(own, p.rows - 1u); // rows past the end only take part in the barriers
  let lane = li % LANES;
  let base = row * quads;

  var top4 = vec4<f32>(-3.4e38);
  for (var q = lane; q < quads; q += LANES) {
    top4 = max(top4, load(base, q, -3.4e38));
  }
  let top = lanes_max(li, max(max(top4.x, top4.y), max(top4.z, top4.w)));

  let label = labels[row];
  let of_label = x_get(logits[base + label / 4u])[label % 4u];
  var sum4 = vec4<f32>();
  for (var block = lane; block < quads; block += 32u * LANES) {
    var part = vec4<f32>();
    for (var q = block; q < min(block + 32u * LANES, quads); q += LANES) {
      part += select(vec4<f32>(0.0), exp(load(base, q, top) - top), columns(q) < vec4<u32>(p.vocab));
    }
    sum4 += part;
  }
  let sum = lanes_sum(li, (sum4.x + sum4.y) + (sum4.z + sum4.w));
  if own >= p.rows {
    return;
  }
  if lane == 0u {
    losses[row] = log(sum) + (top - of_label);
  }
  if GRADIENT == 1u {
    for (var q = lane; q < quads; q += LANES) {
      let share = exp(load(base, q, top) - top) / sum;
      let wanted = select(vec4<f32>(0.0), vec4<f32>(1.0), columns(q) == vec4<u32>(label));
      let d = (share - wanted) * p.scale;
      logits[base + q] = x_put(select(vec4<f32>(0.0), d, columns(q) < vec4<u32>(p.vocab)));
    }
  }
}
