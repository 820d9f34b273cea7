// Grouped GEMM in f32 where one size is at most 16, as a router's number of experts: the three forms of gemm.wgsl, bound by memory.
//   nt  out(M, N) = A(M, K) W[g](N, K)^T            N narrow: A is read once, a sum per row and expert
//   nn  out(M, N) = A(M, K) W[g](K, N)              K narrow: out is written once
//   tn  out[g](M, N) = A_g(R_g, M)^T B_g(R_g, N)    M narrow: B is read once
// The simple algorithm: a thread reads (writes) quads of the wide tensor, and holds all of the narrow size in registers.
// What this adds:
// 1. nt: LANES threads share ROWS rows and add up their parts as a tree through workgroup memory; a workgroup has 4 such teams.
// 2. nn: a thread keeps its columns of W for HEIGHT rows.
// 3. tn: four rows are on their way at a time, and groups are cut into parts, as in gemm.wgsl.
// QUADS is the narrow size in quads. Rows and columns past the end read the last one and are not stored; the padding of a
// row's last quad is zero.

const LANES = 32u;
const HEIGHT = 32u;
const STRIP = 64u; // column quads of a workgroup (nn, tn)

var<workgroup> others: array<vec4<f32>, 2u * LANES * ROWS * QUADS>;

// A quad of the result, where the row's group is; rows of no group are zero, or as they are where a product is added.
fn put(rows: Rows, i: u32, j: u32, v: vec4<f32>) {
  let at = i * div_up(p.n, 4u) + j / 4u;
  if GROUPED == 0u || rows.group < p.groups {
    store(rows.group, i, j, at, v);
  } else if ACCUMULATE == 0u {
    out[at] = out_put(vec4<f32>(0.0));
  }
}

@compute @workgroup_size(4 * LANES)
fn nt(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let rows = tile_rows(grid_index(wg, nwg), 4u * ROWS, p.groups, p.m);
  let team = li / LANES;
  let lane = li % LANES;
  let row0 = rows.first + team * ROWS;
  let kq = div_up(p.k, 4u);
  let base = min(rows.group, p.groups - 1u) * p.n;
//!repeat q QUADS
//!repeat c 4
  let w$q_$c = (base + min(4u * $qu + $cu, p.n - 1u)) * kq;
//!end
//!end
//!repeat r ROWS
  let a$r = min(row0 + $ru, p.m - 1u) * kq;
//!repeat q QUADS
  var sum$r_$q = vec4<f32>();
//!end
//!end
  for (var k = lane; k < kq; k += LANES) {
//!repeat r ROWS
    let x$r = a_get(a[a$r + k]);
//!end
//!repeat q QUADS
    {
//!repeat c 4
      let y$c = b_get(b[w$q_$c + k]);
//!end
//!repeat r ROWS
      sum$r_$q += vec4<f32>(dot(x$r, y0), dot(x$r, y1), dot(x$r, y2), dot(x$r, y3));
//!end
    }
//!end
  }
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    let at = (team * (LANES / 2u) + lane % half) * ROWS * QUADS;
    if lane / half == 1u {
//!repeat r ROWS
//!repeat q QUADS
      others[at + $ru * QUADS + $qu] = sum$r_$q;
//!end
//!end
    }
    workgroupBarrier();
    if lane < half {
//!repeat r ROWS
//!repeat q QUADS
      sum$r_$q += others[at + $ru * QUADS + $qu];
//!end
//!end
    }
    workgroupBarrier();
  }
  if lane == 0u {
//!repeat r ROWS
    if row0 + $ru < rows.end {
//!repeat q QUADS
      put(rows, row0 + $ru, 4u * $qu, sum$r_$q);
//!end
    }
//!end
  }
}

@compute @workgroup_size(STRIP)
fn nn(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let nq = div_up(p.n, 4u);
  let strips = div_up(nq, STRIP);
  let tile = grid_index(wg, nwg);
  let rows = tile_rows(tile / strips, HEIGHT, p.groups, p.m);
  let quad = (tile % strips) * STRIP + li;
  if quad >= nq {
    return;
  }
  let kq = div_up(p.k, 4u);
  let base = min(rows.group, p.groups - 1u) * p.k;
//!repeat q QUADS
//!repeat c 4
  let w$q_$c = b_get(b[(base + min(4u * $qu + $cu, p.k - 1u)) * nq + quad]);
//!end
//!end
  let end = min(rows.first + HEIGHT, rows.end);
  for (var i = rows.first; i < end; i++) {
    var sum = vec4<f32>();
//!repeat q QUADS
    let x$q = a_get(a[i * kq + $qu]);
//!repeat c 4
    sum += x$q[$c] * w$q_$c;
//!end
//!end
    put(rows, i, 4u * quad, sum);
  }
}

@compute @workgroup_size(STRIP)
fn tn(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let nq = div_up(p.n, 4u);
  let strips = div_up(nq, STRIP);
  let tile = grid_index(wg, nwg);
  let part = tile / strips;
  let rows = part_rows(part, p.run, p.groups, p.k);
  let quad = (tile % strips) * STRIP + li;
  if quad >= nq || rows.group >= p.groups {
    return;
  }
//!repeat q QUADS
//!repeat c 4
  var sum$q_$c = vec4<f32>();
//!end
//!end
  var r = rows.first;
  for (; r + 4u <= rows.end; r += 4u) {
//!repeat i 4
    let y$i = b_get(b[(r + $iu) * nq + quad]);
//!repeat q QUADS
    let x$i_$q = a_get(a[(r + $iu) * QUADS + $qu]);
//!end
//!end
//!repeat i 4
//!repeat q QUADS
//!repeat c 4
    sum$q_$c += x$i_$q[$c] * y$i;
//!end
//!end
//!end
  }
  for (; r < rows.end; r++) {
    let y = b_get(b[r * nq + quad]);
//!repeat q QUADS
    let x$q = a_get(a[r * QUADS + $qu]);
//!repeat c 4
    sum$q_$c += x$q[$c] * y;
//!end
//!end
  }
  let base = part * p.m;
//!repeat q QUADS
//!repeat c 4
  if 4u * $qu + $cu < p.m {
    let i = 4u * $qu + $cu;
    store(rows.group, i, 4u * quad, (base + i) * nq + quad, sum$q_$c);
  }
//!end
//!end
}
