// Cross entropy of rows of logits, whose gradient replaces them:
//   loss = log(sum exp(x - max)) + max - x[label];   gradient = (exp(x - max) / sum - [i is label]) * scale
// The simple algorithm, in three passes over the row (maximum, sum, gradient), is the variant of software adapters; a sum
// is made of blocks of 32 quads, so that its error does not grow with the length of the row. What GPUs add (FAST):
//   1. LANES threads share a row (lib/lanes.wgsl).
//   2. Maximum and sum in one pass: a sum is relative to the largest value so far, and shrinks when that grows.
//   3. A thread takes HELD quads at a time. A row that fits them all (ONCE) is read once, and its exponentials are kept.
//   4. Only the quad that the width breaks is masked, and only the label's quad looks at the label.

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

// Below every number that a row may have, and exp of its distance to any of them is 0.
const LOW = -3.4e38;

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.vocab, 4u);
  let own = grid_index(wg, n) * (WG / LANES) + li / LANES;
  let row = min(own, p.rows - 1u); // rows past the end only take part in the barriers
  let lane = li % LANES;
  let base = row * quads;
  let label = labels[row];
  let of_label = x_get(logits[base + label / 4u])[label % 4u];
//!repeat w SIMPLE

  var top4 = vec4<f32>(LOW);
  for (var q = 0u; q < quads; q++) {
    top4 = max(top4, load(base, q, LOW));
  }
  let top = max(max(top4.x, top4.y), max(top4.z, top4.w));
  var sum4 = vec4<f32>();
  for (var block = 0u; block < quads; block += 32u) {
    var part = vec4<f32>();
    for (var q = block; q < min(block + 32u, quads); q++) {
      part += exp(load(base, q, LOW) - top);
    }
    sum4 += part;
  }
  let sum = (sum4.x + sum4.y) + (sum4.z + sum4.w);
//!end
//!repeat w FAST
  let whole = p.vocab / 4u;

  var own_top = LOW;
  var sum4 = vec4<f32>();
//!repeat i HELD
  var v$i = vec4<f32>();
//!end
  for (var block = lane; block < quads; block += HELD * LANES) {
    var top4 = vec4<f32>(own_top);
//!repeat i HELD
    v$i = x_get(logits[base + min(block + $iu * LANES, quads - 1u)]);
//!end
//!repeat i HELD
    if block + $iu * LANES >= whole {
      v$i = select(vec4<f32>(LOW), v$i, columns(block + $iu * LANES) < vec4<u32>(p.vocab));
    }
//!end
//!repeat i HELD
    top4 = max(top4, v$i);
//!end
    let before = own_top;
    own_top = max(max(top4.x, top4.y), max(top4.z, top4.w));
    var part = vec4<f32>();
//!repeat i HELD
    v$i = exp(v$i - own_top);
    part += v$i;
//!end
    sum4 = sum4 * exp(before - own_top) + part;
  }
  let top = lanes_max(li, own_top);
  let sum = lanes_sum(li, ((sum4.x + sum4.y) + (sum4.z + sum4.w)) * exp(own_top - top));
//!end

  if own >= p.rows {
    return;
  }
  if lane == 0u {
    losses[row] = log(sum) + (top - of_label);
  }
  if GRADIENT == 1u {
//!repeat w SIMPLE
    for (var q = 0u; q < quads; q++) {
      let wanted = select(vec4<f32>(0.0), vec4<f32>(1.0), columns(q) == vec4<u32>(label));
      let d = (exp(load(base, q, top) - top) / sum - wanted) * p.scale;
      logits[base + q] = x_put(select(vec4<f32>(0.0), d, columns(q) < vec4<u32>(p.vocab)));
    }
//!end
//!repeat w FAST
    let factor = p.scale / sum;
    let kept = exp(own_top - top) * factor;
    for (var block = lane; block < quads; block += HELD * LANES) {
//!repeat j ONCE
//!repeat i HELD
      v$i *= kept;
//!end
//!end
//!repeat j TWICE
//!repeat i HELD
      v$i = x_get(logits[base + min(block + $iu * LANES, quads - 1u)]);
//!end
//!repeat i HELD
      v$i = exp(v$i - top) * factor;
//!end
//!end
//!repeat i HELD
      let q$i = block + $iu * LANES;
      if q$i == label / 4u {
        v$i -= select(vec4<f32>(0.0), vec4<f32>(p.scale), columns(q$i) == vec4<u32>(label));
      }
      if q$i >= whole {
        v$i = select(vec4<f32>(0.0), v$i, columns(q$i) < vec4<u32>(p.vocab));
      }
      if q$i < quads {
        logits[base + q$i] = x_put(v$i);
      }
//!end
    }
//!end
  }
}
