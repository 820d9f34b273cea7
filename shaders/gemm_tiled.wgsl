// Grouped GEMM in f32 through workgroup memory, for GPUs without matrix units and for f32 operands: the three forms of gemm.wgsl.
// A workgroup of 256 threads computes a tile of 128 x 128 outputs, 8 x 8 each.
// The simple algorithm: load a slice of 16 contraction steps of both operands into workgroup memory, multiply, repeat.
// What this adds:
// 1. One half of the threads loads A, the other B: four quads each, which are a block of 4 x 4 values. Where an operand's rows run
//    along the contraction, the block is transposed in registers. So workgroup memory holds, for every contraction step, the
//    tile's 128 values as 32 quads, and a thread multiplies with whole quads only.
// 2. The next slice's quads are loaded before this slice is multiplied, and wait in registers, still encoded.
// 3. A thread's 8 rows are two blocks of 4, 64 apart, and so are its columns: neighbours read neighbouring quads.
// 4. Quads are stored in an order that depends on the step (v ^ 2u), so that the transposed blocks fall into different banks.
// 5. On GPUs all 16 steps of a slice and all stores stand written out (WRITTEN 1, LOOPED 0, BLOCKS 4); software adapters would compile
//    that for long, and loop over blocks of 4 steps and over rows (0, 1, 1).
// 6. 16 KiB of workgroup memory in all, what every adapter must have.
// Rows and columns past the end read the last one and are not stored; steps past the contraction's end are zero in both operands.
// Variants: A_ALONG, B_ALONG: 1 where the operand's rows run along the contraction, 0 where across it (nt: 1 1, nn: 1 0, tn: 0 0);
// the quads of A and B take the same number of bytes.

// Quad v of step s of A at 32 s + (v ^ 2u), u = s / 4; of B 512 further.
var<workgroup> slice: array<vec4<f32>, 1024>;

struct Tile {
  group: u32,
  row0: u32,   // first row and column of the result's tile
  col0: u32,
  end: u32,    // one past the last row of the tile's group
  first: u32,  // first and one past the last step of the contraction
  last: u32,
  weight: u32, // B's row that is step 0, or column 0, of the group
  place: u32,  // row of `out` that is row 0 of the tile's rows
}

// Where workgroup `tile` works. nt and nn: rows in groups; tn: parts of groups of contraction steps.
fn tile_of(tile: u32) -> Tile {
  let strips = div_up(p.n, 128u);
  let col0 = (tile % strips) * 128u;
  if A_ALONG == 1u {
    let rows = tile_rows(tile / strips, 128u, p.groups, p.m);
    let weight = rows.group * select(p.k, p.n, B_ALONG == 1u);
    // The rows past the last offset belong to no group, and contract nothing.
    let last = select(p.k, 0u, GROUPED == 1u && rows.group == p.groups);
    return Tile(rows.group, rows.first, col0, rows.end, 0u, last, weight, 0u);
  }
  let heights = div_up(p.m, 128u);
  let part = tile / (strips * heights);
  let rows = part_rows(part, p.run, p.groups, p.k);
  let row0 = ((tile / strips) % heights) * 128u;
  // The grid has room for the most parts that there can be.
  let end = select(0u, p.m, rows.group < p.groups);
  return Tile(rows.group, row0, col0, end, rows.first, rows.end, 0u, part * p.m);
}

// Where a thread finds its four quads of an operand in slice t: quad i at `at[i] + t * stride`, of step `k + i * each + 16 t`.
struct Source {
  at: vec4<u32>,
  stride: u32,
  k: u32,
  each: u32,
}

// Rows along the contraction, of kq quads: block (u, v) is quad u of the slice in rows 4 v ...
fn along(row0: u32, last: u32, kq: u32, u: u32, v: u32) -> Source {
  let rows = min(vec4<u32>(row0 + 4u * v) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last));
  return Source(rows * kq + u, 4u, 4u * u, 0u);
}

// Rows across it, of nq quads: block (u, v) is rows 4 u ... of the slice in column quad v.
fn across(row0: u32, first: u32, quad0: u32, nq: u32, u: u32, v: u32) -> Source {
  let rows = vec4<u32>(row0 + first + 4u * u) + vec4<u32>(0u, 1u, 2u, 3u);
  return Source(rows * nq + min(quad0 + v, nq - 1u), 16u * nq, first + 4u * u, 1u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let tile = tile_of(grid_index(wg, nwg));
  let tx = li % 16u;
  let ty = li / 16u;
  if tile.row0 >= tile.end {
    return;
  }
  let of_b = li >= 128u;
  let half = li % 128u;
  let is_along = select(A_ALONG, B_ALONG, of_b) == 1u;
  let u = select(half / 32u, half % 4u, is_along);
  let v = select(half % 32u, half / 4u, is_along);
  var source: Source;
  if of_b {
    if B_ALONG == 1u {
      source = along(tile.weight + tile.col0, tile.weight + p.n - 1u, div_up(p.k, 4u), u, v);
    } else {
      source = across(tile.weight, tile.first, tile.col0 / 4u, div_up(p.n, 4u), u, v);
    }
  } else {
    if A_ALONG == 1u {
      source = along(tile.row0, tile.end - 1u, div_up(p.k, 4u), u, v);
    } else {
      source = across(0u, tile.first, tile.row0 / 4u, div_up(p.m, 4u), u, v);
    }
  }
  let into = select(0u, 512u, of_b) + 128u * u + (v ^ (2u * u));
//!repeat i 8
  var lo$i = vec4<f32>();
  var hi$i = vec4<f32>();
//!end
//!repeat i 4
  var q$i = A();
//!end
  if of_b {
//!repeat i 4
    if source.k + $iu * source.each < tile.last { q$i = b[source.at[$i]]; }
//!end
  } else {
//!repeat i 4
    if source.k + $iu * source.each < tile.last { q$i = a[source.at[$i]]; }
//!end
  }
  for (var first = tile.first; first < tile.last; first += 16u) {
    // Everyone has multiplied the slice before.
    workgroupBarrier();
//!repeat i 4
    var v$i: vec4<f32>;
    if of_b { v$i = b_get(q$i); } else { v$i = a_get(q$i); }
//!end
    if is_along {
      slice[into] = vec4<f32>(v0.x, v1.x, v2.x, v3.x);
      slice[into + 32u] = vec4<f32>(v0.y, v1.y, v2.y, v3.y);
      slice[into + 64u] = vec4<f32>(v0.z, v1.z, v2.z, v3.z);
      slice[into + 96u] = vec4<f32>(v0.w, v1.w, v2.w, v3.w);
    } else {
      slice[into] = v0;
      slice[into + 32u] = v1;
      slice[into + 64u] = v2;
      slice[into + 96u] = v3;
    }
    workgroupBarrier();
    source.at += vec4<u32>(source.stride);
    source.k += 16u;
//!repeat i 4
    q$i = A();
//!end
    if of_b {
//!repeat i 4
      if source.k + $iu * source.each < tile.last { q$i = b[source.at[$i]]; }
//!end
    } else {
//!repeat i 4
      if source.k + $iu * source.each < tile.last { q$i = a[source.at[$i]]; }
//!end
    }
//!repeat r LOOPED
    for (var block = 0u; block < 4u; block++) {
//!end
//!repeat r WRITTEN
    {
      let block = 0u;
//!end
//!repeat w BLOCKS
      let w$w = block + $wu;
      let fa$w = 128u * w$w + (ty ^ (2u * w$w));
      let fb$w = 512u + 128u * w$w + (tx ^ (2u * w$w));
//!repeat s 4
      {
        let al = slice[fa$w + 32u * $su];
        let ah = slice[fa$w + 32u * $su + 16u];
        let bl = slice[fb$w + 32u * $su];
        let bh = slice[fb$w + 32u * $su + 16u];
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
//!end
//!end
    }
  }
  let zero = GROUPED == 1u && A_ALONG == 1u && tile.group == p.groups;
//!repeat r WRITTEN
//!repeat i 8
  put(tile, zero, tile.row0 + 4u * ty + ($iu / 4u) * 64u + $iu % 4u, tile.col0 + 4u * tx, lo$i);
  put(tile, zero, tile.row0 + 4u * ty + ($iu / 4u) * 64u + $iu % 4u, tile.col0 + 4u * tx + 64u, hi$i);
//!end
//!end
//!repeat r LOOPED
  var acc = array<vec4<f32>, 16>(lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, lo4, hi4, lo5, hi5, lo6, hi6, lo7, hi7);
  for (var i = 0u; i < 8u; i++) {
    let row = tile.row0 + 4u * ty + (i / 4u) * 64u + i % 4u;
    put(tile, zero, row, tile.col0 + 4u * tx, acc[2u * i]);
    put(tile, zero, row, tile.col0 + 4u * tx + 64u, acc[2u * i + 1u]);
  }
//!end
}

// Stores a quad of the result, where there is one; the rows past the last offset are zero, or as they are where a product is added.
fn put(tile: Tile, zero: bool, row: u32, col: u32, value: vec4<f32>) {
  if row >= tile.end || col >= p.n {
    return;
  }
  let at = (tile.place + row) * div_up(p.n, 4u) + col / 4u;
  if zero {
    if ACCUMULATE == 0u {
      out[at] = out_put(vec4<f32>(0.0));
    }
  } else {
    store(tile.group, row, col, at, value);
  }
}
