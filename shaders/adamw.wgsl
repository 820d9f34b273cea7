// AdamW with decoupled weight decay over a whole segment; one thread a quad, everything f32 but a gradient that may be bf16.
// With COPIES = 1 the new parameter is also written in bf16, rounded as a cast of it would be, so that none has to read it again.
//   p *= 1 - lr wd;  g = coefficient * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
// The host passes 1 - lr wd, lr / (1 - b1^t) and 1 / (1 - b2^t), computed in f64.

struct AdamW {
  quads: u32,
  keep: f32,      // 1 - lr * weight_decay
  beta1: f32,
  rest1: f32,     // 1 - beta1
  beta2: f32,
  rest2: f32,     // 1 - beta2
  step_size: f32, // lr / (1 - beta1^t)
  correct2: f32,  // 1 / (1 - beta2^t)
  eps: f32,
}

@group(0) @binding(0) var<uniform> p: AdamW;
@group(0) @binding(1) var<storage, read> grad: array<G>;
@group(0) @binding(2) var<storage, read> coefficient: array<f32>;
@group(0) @binding(3) var<storage, read_write> param: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> first: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> second: array<vec4<f32>>;
//!repeat i COPIES
@group(0) @binding(6) var<storage, read_write> low: array<LOW>;
//!end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  if at >= p.quads {
    return;
  }
  let g = g_get(grad[at]) * coefficient[0];
  let m = p.beta1 * first[at] + p.rest1 * g;
  let v = p.beta2 * second[at] + p.rest2 * (g * g);
  first[at] = m;
  second[at] = v;
  let updated = param[at] * p.keep - p.step_size * (m / (sqrt(v * p.correct2) + p.eps));
  param[at] = updated;
//!repeat i COPIES
  low[at] = low_put(updated);
//!end
}
