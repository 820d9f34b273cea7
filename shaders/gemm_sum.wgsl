// The second half of a GEMM in parts: out = sum over parts, in order, then scales and accumulation as in one part. What this
// adds to the simple loop: eight loads are on their way at a time.

@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>; // (splits, groups, M, N) quads
@group(0) @binding(2) var<storage, read> row_scale: array<f32>;
@group(0) @binding(3) var<storage, read> col_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<OUT>;

@compute @workgroup_size(64)
fn sum(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let nq = div_up(p.n, 4u);
  let total = p.groups * p.m * nq;
  let at = grid_index(wg, nwg) * 64u + li;
  if at >= total {
    return;
  }
  var acc = vec4<f32>();
  var part = 0u;
  for (; part + 8u <= p.splits; part += 8u) {
//!repeat i 8
    let v$i = parts[(part + $iu) * total + at];
//!end
//!repeat i 8
    acc += v$i;
//!end
  }
  for (; part < p.splits; part++) {
    acc += parts[part * total + at];
  }
  let row = at / nq;
  store(row / p.m, row % p.m, (at % nq) * 4u, at, acc);
}
