// Grouped GEMM in f32 on register tiles, for every adapter. Three forms, one thread an 8 x 8 tile of the result:
//   nt  out(M, N) = A(M, K) W[g](N, K)^T      both read along K
//   nn  out(M, N) = A(M, K) W[g](K, N)        W read along its rows
//   tn  out[g](M, N) = A_g(R_g, M)^T B_g(R_g, N)    contraction over the rows of group g
// The simple algorithm: one loop over the contraction, one multiply-add per element of the tile.
// What this adds:
// 1. An 8 x 8 tile in registers: 16 quads loaded for 256 multiply-adds (nt, nn), 4 for 64 (tn).
// 2. Loads of whole quads, decoded on the way in (X_get), and no workgroup memory: on software adapters it costs more
//    than it saves, and on GPUs the neighbours' loads hit the cache.
// 3. The scales of both operands, multiplied once per element at the end (lib/gemm_store.wgsl).
// 4. tn in parts: where the result has too few tiles to fill a GPU, each group's rows are cut into runs of `run`, every run leaves its
//    own f32 sum, and gemm_sum.wgsl adds them in order. Runs are equally long, so a group with most rows has most of them.
// Rows and columns past the end read the last one and are not stored; the padding of a row's last quad is zero.

// The thread's row of the workgroup's tiles. A constant where there is one: software adapters then see that A's
// addresses are the same for all lanes, and load once instead of eight times.
fn lane_row(y: u32) -> u32 {
  if WY == 1u {
    return 0u;
  }
  return y;
}

fn store_rows(rows: Rows, row0: u32, col0: u32, acc: ptr<function, array<vec4<f32>, 16>>) {
  let nq = div_up(p.n, 4u);
  let height = min(rows.end - row0, 8u);
  for (var i = 0u; i < height; i++) {
    let at = (row0 + i) * nq + col0 / 4u;
    store(rows.group, row0 + i, col0, at, (*acc)[2u * i]);
    if col0 + 4u < p.n {
      store(rows.group, row0 + i, col0 + 4u, at + 1u, (*acc)[2u * i + 1u]);
    }
  }
}

// Rows of no group: zero, or as they are where a product is added.
fn zero_rows(rows: Rows, row0: u32, col0: u32) {
  if ACCUMULATE == 1u {
    return;
  }
  let nq = div_up(p.n, 4u);
  let height = min(rows.end - row0, 8u);
  for (var i = 0u; i < height; i++) {
    for (var q = col0 / 4u; q < min(col0 / 4u + 2u, nq); q++) {
      out[(row0 + i) * nq + q] = out_put(vec4<f32>(0.0));
    }
  }
}

@compute @workgroup_size(WX, WY)
fn nt(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_id) li: vec3<u32>) {
  let strips = div_up(p.n, 8u * WX);
  let tile = grid_index(wg, nwg);
  let rows = tile_rows(tile / strips, 8u * WY, p.groups, p.m);
  let row0 = rows.first + 8u * lane_row(li.y);
  let col0 = ((tile % strips) * WX + li.x) * 8u;
  if row0 >= rows.end || col0 >= p.n {
    return;
  }
  if GROUPED == 1u && rows.group == p.groups {
    zero_rows(rows, row0, col0);
    return;
  }
  let kq = div_up(p.k, 4u);
  let base = rows.group * p.n;
//!repeat i 8
  let ia$i = min(row0 + $iu, rows.end - 1u) * kq;
  let ib$i = (base + min(col0 + $iu, p.n - 1u)) * kq;
  var lo$i = vec4<f32>();
  var hi$i = vec4<f32>();
//!end
  for (var k = 0u; k < kq; k++) {
//!repeat i 8
    let b$i = b_get(b[ib$i + k]);
//!end
//!repeat i 8
    let a$i = a_get(a[ia$i + k]);
    lo$i += vec4<f32>(dot(a$i, b0), dot(a$i, b1), dot(a$i, b2), dot(a$i, b3));
    hi$i += vec4<f32>(dot(a$i, b4), dot(a$i, b5), dot(a$i, b6), dot(a$i, b7));
//!end
  }
  var acc = array<vec4<f32>, 16>(lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, lo4, hi4, lo5, hi5, lo6, hi6, lo7, hi7);
  store_rows(rows, row0, col0, &acc);
}

@compute @workgroup_size(WX, WY)
fn nn(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_id) li: vec3<u32>) {
  let strips = div_up(p.n, 8u * WX);
  let tile = grid_index(wg, nwg);
  let rows = tile_rows(tile / strips, 8u * WY, p.groups, p.m);
  let row0 = rows.first + 8u * lane_row(li.y);
  let col0 = ((tile % strips) * WX + li.x) * 8u;
  if row0 >= rows.end || col0 >= p.n {
    return;
  }
  if GROUPED == 1u && rows.group == p.groups {
    zero_rows(rows, row0, col0);
    return;
  }
  let kq = div_up(p.k, 4u);
  let nq = div_up(p.n, 4u);
  let q0 = col0 / 4u;
  let q1 = min(q0 + 1u, nq - 1u);
//!repeat i 8
  let ia$i = min(row0 + $iu, rows.end - 1u) * kq;
  var lo$i = vec4<f32>();
  var hi$i = vec4<f32>();
//!end
  for (var k = 0u; k < kq; k++) {
//!repeat i 8
    let a$i = a_get(a[ia$i + k]);
//!end
//!repeat c 4
    let w$c = (rows.group * p.k + min(4u * k + $cu, p.k - 1u)) * nq;
    let bl$c = b_get(b[w$c + q0]);
    let bh$c = b_get(b[w$c + q1]);
//!repeat i 8
    lo$i += a$i[$c] * bl$c;
    hi$i += a$i[$c] * bh$c;
//!end
//!end
  }
  var acc = array<vec4<f32>, 16>(lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, lo4, hi4, lo5, hi5, lo6, hi6, lo7, hi7);
  store_rows(rows, row0, col0, &acc);
}

@compute @workgroup_size(WX, WY)
fn tn(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_id) li: vec3<u32>) {
  let strips = div_up(p.n, 8u * WX);
  let heights = div_up(p.m, 8u * WY);
  let tile = grid_index(wg, nwg);
  let part = tile / (strips * heights);
  let rows = part_rows(part, p.run, p.groups, p.k);
  let row0 = (((tile / strips) % heights) * WY + lane_row(li.y)) * 8u;
  let col0 = ((tile % strips) * WX + li.x) * 8u;
  if row0 >= p.m || col0 >= p.n || rows.group >= p.groups {
    return;
  }
  let mq = div_up(p.m, 4u);
  let nq = div_up(p.n, 4u);
  let a0 = row0 / 4u;
  let a1 = min(a0 + 1u, mq - 1u);
  let b0 = col0 / 4u;
  let b1 = min(b0 + 1u, nq - 1u);
//!repeat i 8
  var lo$i = vec4<f32>();
  var hi$i = vec4<f32>();
//!end
  for (var r = rows.first; r < rows.end; r++) {
    let al = a_get(a[r * mq + a0]);
    let ah = a_get(a[r * mq + a1]);
    let bl = b_get(b[r * nq + b0]);
    let bh = b_get(b[r * nq + b1]);
//!repeat i 4
    lo$i += al[$i] * bl;
    hi$i += al[$i] * bh;
//!end
    lo4 += ah.x * bl;
    hi4 += ah.x * bh;
    lo5 += ah.y * bl;
    hi5 += ah.y * bh;
    lo6 += ah.z * bl;
    hi6 += ah.z * bh;
    lo7 += ah.w * bl;
    hi7 += ah.w * bh;
  }
  var acc = array<vec4<f32>, 16>(lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, lo4, hi4, lo5, hi5, lo6, hi6, lo7, hi7);
  let base = part * p.m;
  let height = min(p.m - row0, 8u);
  for (var i = 0u; i < height; i++) {
    let at = (base + row0 + i) * nq + b0;
    store(rows.group, row0 + i, col0, at, acc[2u * i]);
    if col0 + 4u < p.n {
      store(rows.group, row0 + i, col0 + 4u, at + 1u, acc[2u * i + 1u]);
    }
  }
}
