// Grouped GEMM on matrix units (16x16x16, f16 operands, f32 sums): the three forms of gemm.wgsl, for fp8 codes
// and halves.
// Four subgroups share a tile of 128 x 128 outputs, 64 x 64 each: 4 x 4 fragments in registers.
// The simple algorithm: load a slice of 32 contraction steps of both operands, decode it to f16 into workgroup memory,
// multiply fragments, repeat; at the end scale, round and store.
// What this adds, each measured (see docs/numbers.md):
// 1. e4m3 becomes f16 / 256 by moving bits, exactly; the scale at the end carries the factor 65536.
// 2. 24 KiB of workgroup memory, so that two workgroups share a core and one multiplies while the other waits.
// 3. Fragments are loaded one slice ahead of their products, and stores hide behind the last products of a slice.
// 4. An operand whose rows run along the contraction is read in windows of 64 bytes a row; a slice takes half of each
//    16 bytes. So the order of contraction steps is not that of memory, and both operands follow the same one.
// 5. Rows of workgroup memory are padded by 8 halves, and threads take rows in an order without bank conflicts.
// 6. 16 tiles of rows share their columns before the next columns begin, for the cache.
// The decode gives four values in the order 0 2 1 3. Along the contraction both operands agree on it (`swap`); across
// it, output rows or columns come out permuted by fours, and the epilogue reads them back in order.
// Rows and columns past the end read the last one and are not stored. Steps past the contraction's end are zero in A.
// Variants: A_ALONG / A_ACROSS (and B_): 1 where the operand's rows run along the contraction / across it, else 0;
// F8 / F16: e4m3 codes, or halves (bf16 values that quantize.wgsl has scaled), which need no decode and no factor;
// HALVES: slices of a window, 2 where an operand of codes lies along, else 1; QUADS: quads in 16 bytes;
// WIDE / NARROW: rows of both operands are whole multiples of 16 bytes, or not; TAIL: the contraction is no multiple of 64.
enable f16;
enable wgpu_cooperative_matrix;

// 16 bytes: eight halves, stored at once.
struct H8 { x: vec4<f16>, y: vec4<f16> }

//!repeat w WIDE
@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
//!end
//!repeat w NARROW
@group(0) @binding(1) var<storage, read> a: array<AB>;
@group(0) @binding(2) var<storage, read> b: array<AB>;
//!end
@group(0) @binding(3) var<storage, read> offs: array<u32>;
@group(0) @binding(4) var<storage, read> row_scale: array<f32>;
@group(0) @binding(5) var<storage, read> col_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<OUT>;

var<workgroup> ta: array<H8, TA>;
var<workgroup> tb: array<H8, TB>;
var<workgroup> te: array<f32, 1024>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let tile = tile_of(grid_index(wg, nwg));
  let sg = li / LANES;
  let lane = li % LANES;
  let wrow = (sg / 2u) * 64u;
  let wcol = (sg % 2u) * 64u;
//!repeat i 4
//!repeat j 4
  var c$i_$j = coop_mat16x16<f32, C>();
//!end
//!end
//!repeat w A_ALONG
  let aq = div_up(p.k, 4u);
  let fa = wrow * 5u;
//!repeat r ALONG_LOADS
  let ap$r = along_place(li + $ru * THREADS);
  let ar$r = min(tile.row0 + ap$r.x, tile.end - 1u);
  let ai$r = ar$r * (aq / QUADS) + ap$r.y;
  let as$r = ap$r.x * 5u + ap$r.y;
  var av$r = vec4<u32>();
//!end
//!end
//!repeat w A_ACROSS
  let aq = div_up(p.m, 4u);
  let fa = wrow / 8u;
//!repeat r ACROSS_LOADS
  let ap$r = across_place(li + $ru * THREADS);
  let ac$r = min(tile.row0 / (4u * QUADS) + ap$r.y, div_up(aq, QUADS) - 1u);
  let ai$r = (tile.first + step_of(0u, ap$r.x)) * (aq / QUADS) + ac$r;
  let as$r = ap$r.x * 17u + ap$r.y * (QUADS / 2u);
  var av$r = vec4<u32>();
//!end
//!end
//!repeat w B_ALONG
  let bq = div_up(p.k, 4u);
  let fb = wcol * 5u;
//!repeat r ALONG_LOADS
  let bp$r = along_place(li + $ru * THREADS);
  let br$r = tile.group * p.n + min(tile.col0 + bp$r.x, p.n - 1u);
  let bi$r = br$r * (bq / QUADS) + bp$r.y;
  let bs$r = bp$r.x * 5u + bp$r.y;
  var bv$r = vec4<u32>();
//!end
//!end
//!repeat w B_ACROSS
  let bq = div_up(p.n, 4u);
  let fb = wcol / 8u;
//!repeat r ACROSS_LOADS
  let bp$r = across_place(li + $ru * THREADS);
  let bc$r = min(tile.col0 / (4u * QUADS) + bp$r.y, div_up(bq, QUADS) - 1u);
  let bi$r = (tile.weight + tile.first + step_of(0u, bp$r.x)) * (bq / QUADS) + bc$r;
  let bs$r = bp$r.x * 17u + bp$r.y * (QUADS / 2u);
  var bv$r = vec4<u32>();
//!end
//!end
//!repeat i 4
  var fa0_$i = coop_mat16x16<f16, A>();
  var fa1_$i = coop_mat16x16<f16, A>();
  var fb0_$i = coop_mat16x16<f16, B>();
  var fb1_$i = coop_mat16x16<f16, B>();
//!end
  let windows = div_up(tile.last - tile.first, 32u * HALVES);
  if windows > 0u {
    // Slice 0 into workgroup memory; the next one, or the window's other half, stays in registers.
//!repeat w A_ALONG
//!repeat r ALONG_LOADS
    av$r = a_window(ai$r, ar$r, ap$r.y, 0u, aq);
    ta[as$r] = eight(av$r, 0u);
//!repeat y F16
    av$r = a_window(ai$r, ar$r, ap$r.y, window(1u), aq);
//!end
//!end
//!end
//!repeat w A_ACROSS
//!repeat r ACROSS_LOADS
    av$r = a_slice(tile, 0u, ai$r, ap$r.x, ac$r, aq);
    ta[as$r] = eight(av$r, 0u);
//!repeat y F8
    ta[as$r + 1u] = eight(av$r, 1u);
//!end
    av$r = a_slice(tile, 1u, ai$r, ap$r.x, ac$r, aq);
//!end
//!end
//!repeat w B_ALONG
//!repeat r ALONG_LOADS
    bv$r = b_window(bi$r, br$r, bp$r.y, 0u, bq);
    tb[bs$r] = eight(bv$r, 0u);
//!repeat y F16
    bv$r = b_window(bi$r, br$r, bp$r.y, window(1u), bq);
//!end
//!end
//!end
//!repeat w B_ACROSS
//!repeat r ACROSS_LOADS
    bv$r = b_slice(tile, 0u, bi$r, bp$r.x, bc$r, bq);
    tb[bs$r] = eight(bv$r, 0u);
//!repeat y F8
    tb[bs$r + 1u] = eight(bv$r, 1u);
//!end
    bv$r = b_slice(tile, 1u, bi$r, bp$r.x, bc$r, bq);
//!end
//!end
  }
  for (var w = 0u; w < windows; w++) {
//!repeat h HALVES
    {
      // Slice HALVES * w + $h is in workgroup memory; the second half of the slice before is in fa1, fb1.
      workgroupBarrier();
//!repeat i 4
//!repeat x A_ALONG
      fa0_$i = coopLoadT<coop_mat16x16<f16, A>>(&ta[fa + $iu * 80u].x, 10u);
//!end
//!repeat x A_ACROSS
      fa0_$i = coopLoad<coop_mat16x16<f16, A>>(&ta[fa + $iu * 2u].x, 34u);
//!end
//!repeat x B_ALONG
      fb0_$i = coopLoad<coop_mat16x16<f16, B>>(&tb[fb + $iu * 80u].x, 10u);
//!end
//!repeat x B_ACROSS
      fb0_$i = coopLoadT<coop_mat16x16<f16, B>>(&tb[fb + $iu * 2u].x, 34u);
//!end
//!end
//!repeat j 4
//!repeat i 4
      c$i_$j = coopMultiplyAdd(fa1_$i, fb1_$j, c$i_$j);
//!end
//!end
//!repeat i 4
//!repeat x A_ALONG
      fa1_$i = coopLoadT<coop_mat16x16<f16, A>>(&ta[fa + $iu * 80u + 2u].x, 10u);
//!end
//!repeat x A_ACROSS
      fa1_$i = coopLoad<coop_mat16x16<f16, A>>(&ta[fa + $iu * 2u + 272u].x, 34u);
//!end
//!repeat x B_ALONG
      fb1_$i = coopLoad<coop_mat16x16<f16, B>>(&tb[fb + $iu * 80u + 2u].x, 10u);
//!end
//!repeat x B_ACROSS
      fb1_$i = coopLoadT<coop_mat16x16<f16, B>>(&tb[fb + $iu * 2u + 272u].x, 34u);
//!end
//!end
//!repeat j 3
//!repeat i 4
      c$i_$j = coopMultiplyAdd(fa0_$i, fb0_$j, c$i_$j);
//!end
//!end
      workgroupBarrier();
      // The next slice into workgroup memory, the one after it into registers.
      let next = HALVES * w + $hu + 2u;
//!repeat x A_ALONG
//!repeat r ALONG_LOADS
      ta[as$r] = eight(av$r, 1u - $hu);
//!end
//!end
//!repeat x A_ACROSS
//!repeat r ACROSS_LOADS
      ta[as$r] = eight(av$r, 0u);
//!repeat y F8
      ta[as$r + 1u] = eight(av$r, 1u);
//!end
//!end
//!end
//!repeat x B_ALONG
//!repeat r ALONG_LOADS
      tb[bs$r] = eight(bv$r, 1u - $hu);
//!end
//!end
//!repeat x B_ACROSS
//!repeat r ACROSS_LOADS
      tb[bs$r] = eight(bv$r, 0u);
//!repeat y F8
      tb[bs$r + 1u] = eight(bv$r, 1u);
//!end
//!end
//!end
//!repeat x A_ALONG
      if $hu == 0u {
        let to = window(w + REFILL);
//!repeat r ALONG_LOADS
        av$r = a_window(ai$r, ar$r, ap$r.y, to, aq);
//!end
      }
//!end
//!repeat x B_ALONG
      if $hu == 0u {
        let to = window(w + REFILL);
//!repeat r ALONG_LOADS
        bv$r = b_window(bi$r, br$r, bp$r.y, to, bq);
//!end
      }
//!end
//!repeat x A_ACROSS
//!repeat r ACROSS_LOADS
      av$r = a_slice(tile, next, ai$r, ap$r.x, ac$r, aq);
//!end
//!end
//!repeat x B_ACROSS
//!repeat r ACROSS_LOADS
      bv$r = b_slice(tile, next, bi$r, bp$r.x, bc$r, bq);
//!end
//!end
//!repeat i 4
      c$i_3 = coopMultiplyAdd(fa0_$i, fb0_3, c$i_3);
//!end
    }
//!end
  }
//!repeat j 4
//!repeat i 4
  c$i_$j = coopMultiplyAdd(fa1_$i, fb1_$j, c$i_$j);
//!end
//!end
  workgroupBarrier();
  let te0 = sg * 256u;
  let stride = 16u;
//!repeat j 4
  let scale$j = col_factor(tile, tile.col0 + wcol + $ju * 16u + (lane % 4u) * 4u);
//!repeat i 4
  coopStoreT(c$i_$j, &te[te0], stride);
  subgroupBarrier();
//!repeat s STORE_STEPS
  emit(tile, te0, lane + $su * LANES, wrow + $iu * 16u, wcol + $ju * 16u, scale$j);
//!end
  subgroupBarrier();
//!end
//!end
}
