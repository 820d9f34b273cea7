// The second half of a GEMM in parts: out = sum over parts, in order, then scales and accumulation as in one part. What this
// adds to the simple loop: eight loads are on their way at a time.

@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>; // (parts, M, N) quads, group after group
@group(0) @binding(2) var<storage, read> offs: array<u32>;
@group(0) @binding(3) var<storage, read> row_scale: array<f32>;
@group(0) @binding(4) var<storage, read> col_scale: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<OUT>;

@compute @workgroup_size(64)
fn sum(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let nq = div_up(p.n, 4u);
  let quads = p.m * nq; // of a part
  let at = grid_index(wg, nwg) * 64u + li;
  if at >= p.groups * quads {
    return;
  }
  let group = at / quads;
  let of_group = parts_of(group, p.run, p.k);
  let in_part = at % quads;
  var acc = vec4<f32>();
  var part = of_group.x;
  for (; part + 8u <= of_group.y; part += 8u) {
//!repeat i 8
    let v$i = parts[(part + $iu) * quads + in_part];
//!end
//!repeat i 8
    acc += v$i;
//!end
  }
  for (; part < of_group.y; part++) {
    acc += parts[part * quads + in_part];
  }
  store(group, in_part / nq, (in_part % nq) * 4u, at, acc);
}
