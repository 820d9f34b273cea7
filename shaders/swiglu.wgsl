// SwiGLU: h = silu(gate) * up with silu(x) = x * sigmoid(x). One thread takes EACH quads, WG apart, and loads them first.
// In bf16 the framework that we follow runs two ops and each rounds what it stores: silu(gate), and in backward
// d_h * up, are rounded to bf16 on the way. In f32 that rounding is the identity.
// Padding needs no care: silu(0) * 0 and its gradients are zero.

struct Swiglu {
  quads: u32, // of the whole tensor
}

@group(0) @binding(0) var<uniform> p: Swiglu;
@group(0) @binding(1) var<storage, read> gate: array<X>;
@group(0) @binding(2) var<storage, read> up: array<X>;
@group(0) @binding(3) var<storage, read_write> h: array<X>;

// Backward.
@group(0) @binding(3) var<storage, read> d_h: array<X>;
@group(0) @binding(4) var<storage, read_write> d_gate: array<X>;
@group(0) @binding(5) var<storage, read_write> d_up: array<X>;

// What an op of its own would have stored and the next one loaded.
fn stored(v: vec4<f32>) -> vec4<f32> {
  return x_get(x_put(v));
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let first = grid_index(wg, nwg) * WG * EACH + li;
//!repeat i EACH
  let at$i = first + $iu * WG;
  let g$i = gate[min(at$i, p.quads - 1u)];
  let u$i = up[min(at$i, p.quads - 1u)];
//!end
//!repeat i EACH
  if at$i < p.quads {
    h[at$i] = x_put(stored(silu(x_get(g$i))) * x_get(u$i));
  }
//!end
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let first = grid_index(wg, nwg) * WG * EACH + li;
//!repeat i EACH
  let at$i = first + $iu * WG;
  let g$i = gate[min(at$i, p.quads - 1u)];
  let u$i = up[min(at$i, p.quads - 1u)];
  let d$i = d_h[min(at$i, p.quads - 1u)];
//!end
//!repeat i EACH
  if at$i < p.quads {
    let g = x_get(g$i);
    let d = x_get(d$i);
    let s = sigmoid(g);
    d_up[at$i] = x_put(d * stored(g * s));
    d_gate[at$i] = x_put(stored(d * x_get(u$i)) * (s * (1.0 + g * (1.0 - s))));
  }
//!end
}
