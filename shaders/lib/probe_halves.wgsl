// Floats as halves, as the driver packs them.
struct Pairs {
  count: u32,
}

@group(0) @binding(0) var<uniform> p: Pairs;
@group(0) @binding(1) var<storage, read> x: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> halves: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, n) * 64u + li;
  if i < p.count {
    halves[i] = pack2x16float(x[i]);
  }
}
