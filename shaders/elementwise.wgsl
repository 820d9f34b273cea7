// Sums, casts and scalings of equal shapes; one thread a quad.
// The simple algorithm is all of it: read, compute in f32, round once. One entry serves the five ops; the variant
// sets one of ADD, CAST, ACCUMULATE, SCALE, ZERO to 1 and writes in INPUTS bindings beside `out`.

struct Elementwise {
  quads: u32,
  factor: f32,
}

@group(0) @binding(0) var<uniform> p: Elementwise;
@group(0) @binding(1) var<storage, read_write> out: array<OUT>;
//!repeat i INPUTS
@group(0) @binding(2 + $i) var<storage, read> in$i: array<IN$i>;
//!end

fn value(at: u32) -> vec4<f32> {
//!repeat i ADD
  return in0_get(in0[at]) + in1_get(in1[at]);
//!end
//!repeat i CAST
  return in0_get(in0[at]);
//!end
//!repeat i ACCUMULATE
  return out_get(out[at]) + in0_get(in0[at]);
//!end
//!repeat i SCALE
  return out_get(out[at]) * p.factor;
//!end
//!repeat i ZERO
  return vec4<f32>(0.0);
//!end
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  if at < p.quads {
    out[at] = out_put(value(at));
  }
}
