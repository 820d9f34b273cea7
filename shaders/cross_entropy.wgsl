// Cross entropy of rows of logits, whose gradient replaces them:
//   loss = log(sum exp(x - max)) + max - x[label];   gradient = (exp(x - max) / sum - [i is label]) * scale
// The simple algorithm, in three passes over the row (maximum, sum, gradient), is the variant of software adapters; a sum
// is made of blocks of 32 quads, so that its error does not grow with the length of the row. What GPUs add (FAST):
//   1. LANES threads share a row (lib/lanes.wgsl).
//   2. Maximum and sum in one pass: a sum is relative to the largest value so far, and shrinks when that grows.
//   3. A thread takes HELD quads at a time. A row that fits them all (ONCE) is read once, and its exponentials are kept. A
//      longer one is read again backwards: what was read last may still be in the cache.
//   4. Only the last quads, which may pass the width, are masked.
//   5. The label's quad is written once more, so that no other has to look at the label.
//   6. Rounding to bf16 does not look for NaN: a row that has one is known by its sum, and written once more.

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

// Quad `v`, which has no NaN, in the logits' dtype.
fn put(v: vec4<f32>) -> X {
//!repeat w NARROW
  return bf16_put_number(v);
//!end
//!repeat w WIDE
  return v;
//!end
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
  let labelled = base + label / 4u;
  let at_label = x_get(logits[labelled]);
  let is_label = columns(label / 4u) == vec4<u32>(label);
  let of_label = dot(select(vec4<f32>(0.0), at_label, is_label), vec4<f32>(1.0));
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
//!repeat w ONCE
//!repeat i HELD
  let q$i = lane + $iu * LANES;
  let r$i = logits[base + min(q$i, quads - 1u)];
//!end
  var top4 = vec4<f32>(LOW);
//!repeat i HELD
  var v$i = x_get(r$i);
  if $iu + 1u == HELD {
    v$i = select(vec4<f32>(LOW), v$i, columns(q$i) < vec4<u32>(p.vocab));
  }
  top4 = max(top4, v$i);
//!end
  let own_top = max(max(top4.x, top4.y), max(top4.z, top4.w));
  var sum4 = vec4<f32>();
//!repeat i HELD
  v$i = exp(v$i - own_top);
  sum4 += v$i;
//!end
//!end
//!repeat w TWICE
  let step = HELD * LANES;
  let blocks = div_up(quads, step);
  var own_top = LOW;
  var sum4 = vec4<f32>();
  for (var block = 0u; block < blocks; block++) {
    let first = block * step + lane;
//!repeat i HELD
    let r$i = logits[base + min(first + $iu * LANES, quads - 1u)];
//!end
    var top4 = vec4<f32>(own_top);
//!repeat i HELD
    var v$i = x_get(r$i);
//!end
    if block + 1u == blocks {
//!repeat i HELD
      v$i = select(vec4<f32>(LOW), v$i, columns(first + $iu * LANES) < vec4<u32>(p.vocab));
//!end
    }
//!repeat i HELD
    top4 = max(top4, v$i);
//!end
    let before = own_top;
    own_top = max(max(top4.x, top4.y), max(top4.z, top4.w));
    var part = vec4<f32>();
//!repeat i HELD
    part += exp(v$i - own_top);
//!end
    sum4 = sum4 * exp(before - own_top) + part;
  }
//!end
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
//!repeat j ONCE
    let kept = exp(own_top - top) * factor;
//!repeat i HELD
    v$i *= kept;
    if $iu + 1u < HELD {
      logits[base + q$i] = put(v$i);
    } else if q$i < quads {
      logits[base + q$i] = put(select(vec4<f32>(0.0), v$i, columns(q$i) < vec4<u32>(p.vocab)));
    }
//!end
//!end
//!repeat j TWICE
    for (var left = blocks; left > 0u; left--) {
      let first = (left - 1u) * step + lane;
//!repeat i HELD
      let r$i = logits[base + min(first + $iu * LANES, quads - 1u)];
//!end
//!repeat i HELD
      let v$i = exp(x_get(r$i) - top) * factor;
//!end
      if left != blocks {
//!repeat i HELD
        logits[base + first + $iu * LANES] = put(v$i);
//!end
      } else {
//!repeat i HELD
        let q$i = first + $iu * LANES;
        if q$i < quads {
          logits[base + q$i] = put(select(vec4<f32>(0.0), v$i, columns(q$i) < vec4<u32>(p.vocab)));
        }
//!end
      }
    }
//!end
    // Again by the thread that wrote it.
    if lane == label / 4u % LANES {
      let d = exp(at_label - top) * factor - select(vec4<f32>(0.0), vec4<f32>(p.scale), is_label);
      logits[labelled] = x_put(select(vec4<f32>(0.0), d, columns(label / 4u) < vec4<u32>(p.vocab)));
    }
    if (bitcast<u32>(factor) & 0x7fffffffu) >= 0x7f800000u {
      let nan = bitcast<f32>(bitcast<u32>(factor) | 0x7fc00000u);
      for (var q = lane; q < quads; q += LANES) {
        logits[base + q] = x_put(select(vec4<f32>(0.0), vec4<f32>(nan), columns(q) < vec4<u32>(p.vocab)));
      }
    }
//!end
  }
}
