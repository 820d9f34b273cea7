// Logits to scores, scores to the top-k experts and their weights, and back; one thread a token, everything f32.
// The simple algorithm: softmax or sigmoid over the row, then k times the largest (score + bias) that comes after the
// last one chosen. Scores are compared as integers that order like the floats, equal ones by index and NaN above all,
// so that the chosen experts are always k different ones.

struct Router {
  tokens: u32,
  experts: u32,
  top_k: u32,
  scale: f32,
}

@group(0) @binding(0) var<uniform> p: Router;

// Keeps the divisor of the normed weights from zero.
const FLOOR = 1e-20;

// Which elements of quad `q` exist.
fn inside(q: u32) -> vec4<bool> {
  return vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.experts);
}

// a / b, where `inverse` is 1 / b. Drivers make a product of a division whose divisor does not change in a loop, or do not, and the
// bits differ; written so they have no choice.
fn over(a: vec4<f32>, b: f32, inverse: f32) -> vec4<f32> {
  let q = a * inverse;
  return fma(fma(-q, vec4<f32>(b), a), vec4<f32>(inverse), q);
}

//!repeat i FORWARD
@group(0) @binding(1) var<storage, read> logits: array<X>;
@group(0) @binding(2) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> scores: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> weights: array<f32>;

// Integers that order like the floats; NaN is the largest.
fn key(v: vec4<f32>) -> vec4<u32> {
  let u = bitcast<vec4<u32>>(v);
  let ordered = select(u | vec4<u32>(0x80000000u), ~u, u >= vec4<u32>(0x80000000u));
  return select(ordered, vec4<u32>(0xffffffffu), (u & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u));
}

fn softmax(base: u32, quads: u32) {
  var top4 = vec4<f32>(-3.4e38);
  for (var q = 0u; q < quads; q++) {
    top4 = max(top4, select(vec4<f32>(-3.4e38), x_get(logits[base + q]), inside(q)));
  }
  let top = max(max(top4.x, top4.y), max(top4.z, top4.w));
  var sum4 = vec4<f32>();
  for (var q = 0u; q < quads; q++) {
    let e = select(vec4<f32>(0.0), exp(x_get(logits[base + q]) - top), inside(q));
    scores[base + q] = e;
    sum4 += e;
  }
  let sum = (sum4.x + sum4.y) + (sum4.z + sum4.w);
  let inverse = 1.0 / sum;
  for (var q = 0u; q < quads; q++) {
    scores[base + q] = over(scores[base + q], sum, inverse);
  }
}

fn sigmoid(base: u32, quads: u32) {
  for (var q = 0u; q < quads; q++) {
    let x = x_get(logits[base + q]);
    let e = exp(-abs(x)); // never overflows
    let s = select(vec4<f32>(1.0), e, x < vec4<f32>(0.0)) / (1.0 + e);
    scores[base + q] = select(vec4<f32>(0.0), s, inside(q));
  }
}

// Chooses the experts of token `t`; the sum of their scores.
fn choose(t: u32, base: u32, quads: u32) -> f32 {
  var last = 0xffffffffu; // key of the last one chosen
  var after = 0u;         // experts of that key are left from here on
  var sum = 0.0;
  for (var k = 0u; k < p.top_k; k++) {
    var best = 0u; // below every key
    var at = 0u;
    for (var q = 0u; q < quads; q++) {
      let keys = select(vec4<u32>(0u), key(scores[base + q] + bias[q]), inside(q));
//!repeat c 4
      if keys[$c] > best && (keys[$c] < last || (keys[$c] == last && 4u * q + $cu >= after)) {
        best = keys[$c];
        at = 4u * q + $cu;
      }
//!end
    }
    last = best;
    after = at + 1u;
    let score = scores[base + at / 4u][at % 4u];
    ids[t * p.top_k + k] = at;
    weights[t * p.top_k + k] = score;
    sum += score;
  }
  return sum;
}

@compute @workgroup_size(64)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let t = grid_index(wg, n) * 64u + li;
  if t >= p.tokens {
    return;
  }
  let quads = div_up(p.experts, 4u);
  if SIGMOID == 1u {
    sigmoid(t * quads, quads);
  } else {
    softmax(t * quads, quads);
  }
  let z = choose(t, t * quads, quads) + FLOOR;
  let inverse = 1.0 / z;
  for (var k = 0u; k < p.top_k; k++) {
    var w = weights[t * p.top_k + k];
    if NORM == 1u {
      w = over(vec4<f32>(w), z, inverse).x;
    }
    weights[t * p.top_k + k] = w * p.scale;
  }
}
//!end
//!repeat i BACKWARD
@group(0) @binding(1) var<storage, read> d_weights: array<f32>;
@group(0) @binding(2) var<storage, read> scores: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> d_logits: array<X>;

// What a weight's gradient leaves for its own expert `k` of the `top_k` from `first` on, as d_s_k / (scale / Z). With
// w_k = scale * s_k / Z, Z = sum s + FLOOR if NORM, else 1:
//   d_s_k = scale / Z * (d_w_k - sum_j d_w_j s_j / Z), the second term only if NORM,
// where the difference is taken inside of the sum: d_w_k Z - sum_j d_w_j s_j = sum_j (d_w_k - d_w_j) s_j + d_w_k FLOOR. One
// chosen expert alone gets what FLOOR leaves, 1e-20 of it; the difference of two sums that are nearly equal would be whatever
// the driver's rounding leaves.
fn own(base: u32, first: u32, k: u32, inverse: f32) -> f32 {
  let d_w = d_weights[first + k];
  if NORM == 0u {
    return d_w;
  }
  var sum = 0.0;
  for (var j = 0u; j < p.top_k; j++) {
    sum += (d_w - d_weights[first + j]) * score(base, ids[first + j]);
  }
  return (sum + d_w * FLOOR) * inverse;
}

fn score(base: u32, e: u32) -> f32 {
  return scores[base + e / 4u][e % 4u];
}

// Softmax: d_logit = s (d_s - sum_j s_j d_s_j); sigmoid: d_logit = d_s s (1 - s). If NORM, the sum over j is
// scale / Z * sum_j d_w_j s_j * FLOOR / Z, by the same cancellation.
@compute @workgroup_size(64)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let t = grid_index(wg, n) * 64u + li;
  if t >= p.tokens {
    return;
  }
  let quads = div_up(p.experts, 4u);
  let base = t * quads;
  let first = t * p.top_k;
  var sum = 0.0;
  var dot = 0.0;
  for (var k = 0u; k < p.top_k; k++) {
    let s = score(base, ids[first + k]);
    sum += s;
    dot += d_weights[first + k] * s;
  }
  let inverse = 1.0 / (sum + FLOOR);
  var factor = p.scale;
  if NORM == 1u {
    factor *= inverse;
    dot *= FLOOR * inverse;
  }
  for (var q = 0u; q < quads; q++) {
    var d = vec4<f32>();
    for (var k = 0u; k < p.top_k; k++) {
      let e = ids[first + k];
      if e / 4u == q {
        d = select(d, vec4<f32>(own(base, first, k, inverse)), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(e % 4u));
      }
    }
    let s = scores[base + q];
    var r = factor * (s * (d - dot));
    if SIGMOID == 1u {
      r = factor * (d * s * (1.0 - s));
    }
    d_logits[base + q] = x_put(select(vec4<f32>(0.0), r, inside(q)));
  }
}
//!end
