// Grouped GEMM on matrix units (lib/fragments.wgsl): the three forms of gemm.wgsl, for operands in panels
// (lib/panels.wgsl) of fp8 codes or halves. In panels every operand runs along the contraction, so one kernel serves all
// forms: groups own rows of the result (nt, nn), or blocks of the contraction (tn).
// Four subgroups share a tile of outputs, a quarter each: 4 x 4 fragments in registers. With fragments of 16 x 16 that is 128 x 128
// outputs and 128 registers of sums a lane; with 8 x 8 it is 64 x 64 and 32, for GPUs with fewer registers, whose lanes get
// slow with more (the tile that MLX uses there).
// The simple algorithm: load 16 contraction steps of both operands, decode them to f16 into workgroup memory, multiply
// fragments, repeat; at the end scale, round and store.
// What this adds, each measured (see docs/numbers.md):
// 1. e4m3 becomes f16 / 256 by moving bits, exactly; the scale at the end carries the factor. e5m2 becomes f16 as it is.
// 2. At most 24 KiB of workgroup memory, so that two workgroups share a core and one multiplies while the other waits.
// 3. Fragments are loaded one slice (16 steps) ahead of their products, stores hide behind the last products of a slice,
//    and global loads of codes run two slices ahead of their stores, those of halves two panels.
// 4. A thread loads 16 bytes: codes for two slices (8 of them each; both operands take the same ones), halves for one.
// 5. Rows of workgroup memory are padded by 8 halves, and threads take rows in an order without bank conflicts.
// 6. 16 tiles of rows share their columns before the next columns begin, for the cache.
// 7. Few operations on the way out, which the other workgroup hides in part only: factors are read once, four fragments side
//    by side are scaled, tested for NaN and rounded together, and only the stores themselves are under a condition.
// 8. Two lengths: LONG is as fast as the loop can be, and the driver writes it out further; SHORT is for products that are over before
//    that pays, and for launches among many others, which find their code in no cache: a loop that stays as it is written, and
//    the four rows of fragments leave one after the other through the same instructions.
// 9. A launch may have a stack of results, p.stack of them: of weights that follow each other in memory (nt), or of gradients
//    (tn) without groups. It has the tiles of all, so that short products share a launch, and the last wave.
// 10. SUMMED: the products of a stack are added to one result, from the last to the first, each rounded and then added as if it were
//    a launch of its own; a thread reads again what it has stored itself.
// The decode gives four values in the order 0 2 1 3 in both operands. Rows and columns past the end read the last one and
// are not stored; the contraction is padded by zeros in memory.
// Variants: F8 / F16: codes, or halves (bf16 values that quantize.wgsl has scaled), which need no decode and no factor;
// A_E5M2: codes of A are e5m2; BY_ROWS / BY_STEPS: what groups own.

@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> offs: array<u32>;
@group(0) @binding(4) var<storage, read> row_scale: array<f32>;
@group(0) @binding(5) var<storage, read> col_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<OUT>;

const STEP = EDGE * 3u;           // from fragment to fragment of a slice, in H8
const SLICE_STRIDE = 6u * QUAD;   // from row to row of a slice, for fragments
const TURN_ROW = TURN_QUADS + 2u; // of the results of a turn, in F4
const TURN_STRIDE = TURN_ROW * QUAD;
const DOWN = LANES / TURN_QUADS;  // rows that a subgroup reads at a time

// A slice of each operand: rows of 16 halves and 8 of padding. And results of one turn of each subgroup, with 8 floats of padding a
// row: a fragment of 16 x 16 at a time, or a row of four of 8 x 8.
var<workgroup> ta: array<H8, TILE * 3u>;
var<workgroup> tb: array<H8, TILE * 3u>;
var<workgroup> te: array<F4, 4u * EDGE * TURN_ROW>;

// The results of a row of fragments: to workgroup memory (of a turn), and out.
//!text STORE
//!repeat y EDGE16
    coopStoreT(c$i_$j, &te[te0], stride);
//!end
//!repeat y EDGE8
//!repeat h 4
    coopStoreT(c$i_$h, &te[turn$h].x, stride);
//!end
//!end
//!end
//!text WAY_OUT
    // Four fragments side by side: a lane's quads of all of them are under way at once.
//!repeat j TURNS
//!repeat y LONG
//!put STORE
//!end
//!repeat y SHORT
    switch t {
//!repeat i 4
      case $iu: {
//!put STORE
      }
//!end
      default: {}
    }
//!end
    subgroupBarrier();
//!repeat s STORE_STEPS
    var v$s_$j = ($F4_GET(te[te0 + (at_row + $su * DOWN) * TURN_ROW + quad]) * by_row$s) * by_col$j;
//!end
    subgroupBarrier();
//!end
    if p.n % 4u != 0u {
//!repeat s STORE_STEPS
//!repeat j TURNS
      v$s_$j = select(vec4<f32>(0.0), v$s_$j, inside(col + $ju * 16u));
//!end
//!end
    }
    var sum = vec4<f32>();
//!repeat s STORE_STEPS
    let i$s = row + $ROW * EDGE + $su * DOWN;
    let at$s = (tile.base + i$s) * quads + col / 4u;
//!repeat j TURNS
    let mine$s_$j = i$s < tile.end && col + $ju * 16u < p.n;
//!repeat w ADDS
    if mine$s_$j && $ONTO {
      v$s_$j += out_get(out[at$s + $ju * 4u]);
    }
//!end
    sum += v$s_$j;
//!end
//!end
    if is_nan((sum.x + sum.y) + (sum.z + sum.w)) {
//!repeat s STORE_STEPS
//!repeat j TURNS
      v$s_$j = quiet(v$s_$j);
//!end
//!end
    }
    // Apart from the stores, so that only they are under a condition (7.).
//!repeat s STORE_STEPS
//!repeat j TURNS
    let r$s_$j = rounded(v$s_$j);
//!end
//!end
//!repeat s STORE_STEPS
//!repeat j TURNS
    if mine$s_$j {
      out[at$s + $ju * 4u] = r$s_$j;
    }
//!end
//!end
//!end

// The product of a tile, and its way out.
//!text PRODUCT
  let sg = li / LANES;
  let lane = li % LANES;
  let wrow = (sg / 2u) * (4u * EDGE);
  let wcol = (sg % 2u) * (4u * EDGE);
//!repeat i 4
//!repeat j 4
  var c$i_$j = FragmentC();
//!end
//!end
  // Where this thread's 16 bytes of panel 0 lie, and where they go.
  let a_step = p.m * 2u;
  let b_step = p.n * 2u;
  let last = max(tile.blocks, 1u) * PANELS - 1u;
//!repeat r LOADS
  let at$r = place(li + $ru * THREADS);
  let ai$r = tile.a_panel * a_step + min(tile.row0 + at$r.x, p.m - 1u) * 2u + at$r.y;
  let bi$r = tile.b_panel * b_step + min(tile.col0 + at$r.x, p.n - 1u) * 2u + at$r.y;
  let to$r = at$r.x * 3u + at$r.y;
//!end
  let fa = wrow * 3u;
  let fb = wcol * 3u;
//!repeat i 4
//!repeat k PIECES
  var fa$i_$k = FragmentA();
  var fb$i_$k = FragmentB();
//!end
//!end
//!repeat s 2
//!repeat r LOADS
  var av$s_$r = vec4<u32>();
  var bv$s_$r = vec4<u32>();
//!end
//!end
  if tile.blocks > 0u {
    // Slice 0 into fragments, slice 1 into workgroup memory; what follows stays in registers.
//!repeat r LOADS
    av0_$r = a[ai$r];
    bv0_$r = b[bi$r];
    av1_$r = a[ai$r + a_step];
    bv1_$r = b[bi$r + b_step];
    ta[to$r] = a_eight(av0_$r, 0u);
    tb[to$r] = b_eight(bv0_$r, 0u);
//!end
  }
  workgroupBarrier();
//!repeat i 4
//!repeat k PIECES
  fa$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
  fb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
  workgroupBarrier();
  if tile.blocks > 0u {
//!repeat r LOADS
//!repeat y F8
    ta[to$r] = a_eight(av0_$r, 1u);
    tb[to$r] = b_eight(bv0_$r, 1u);
    av0_$r = av1_$r;
    bv0_$r = bv1_$r;
//!end
//!repeat y F16
    ta[to$r] = a_eight(av1_$r, 0u);
    tb[to$r] = b_eight(bv1_$r, 0u);
    av0_$r = a[ai$r + min(2u, last) * a_step];
    bv0_$r = b[bi$r + min(2u, last) * b_step];
    av1_$r = a[ai$r + min(3u, last) * a_step];
    bv1_$r = b[bi$r + min(3u, last) * b_step];
//!end
//!end
  }
  // A panel of codes, 32 steps, a turn, in two slices.
  for (var w = 0u; w < 2u * tile.blocks; $NEXT) {
//!repeat e 2
    {
      // Fragments hold slice $e of the turn, workgroup memory the next one, registers what comes after it.
      workgroupBarrier();
//!repeat y F8
      if $eu == 0u {
        let next = min(w + 2u, last);
//!repeat r LOADS
        av1_$r = a[ai$r + next * a_step];
        bv1_$r = b[bi$r + next * b_step];
//!end
      }
//!end
//!repeat i 4
//!repeat k PIECES
      let na$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
      let nb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
//!repeat j 3
//!repeat k PIECES
//!repeat i 4
      c$i_$j = coopMultiplyAdd(fa$i_$k, fb$j_$k, c$i_$j);
//!end
//!end
//!end
      workgroupBarrier();
//!repeat y F8
//!repeat r LOADS
      ta[to$r] = a_eight(av0_$r, $eu);
      tb[to$r] = b_eight(bv0_$r, $eu);
      if $eu == 1u {
        av0_$r = av1_$r;
        bv0_$r = bv1_$r;
      }
//!end
//!end
//!repeat y F16
      let next = min(w * 2u + $eu + 4u, last);
//!repeat r LOADS
      ta[to$r] = a_eight(av$e_$r, 0u);
      tb[to$r] = b_eight(bv$e_$r, 0u);
      av$e_$r = a[ai$r + next * a_step];
      bv$e_$r = b[bi$r + next * b_step];
//!end
//!end
//!repeat k PIECES
//!repeat i 4
      c$i_3 = coopMultiplyAdd(fa$i_$k, fb3_$k, c$i_3);
//!end
//!end
//!repeat i 4
//!repeat k PIECES
      fa$i_$k = na$i_$k;
      fb$i_$k = nb$i_$k;
//!end
//!end
    }
//!end
  }
  // Of what a turn stores a lane reads quad lane % TURN_QUADS of the rows 0 2 1 3, 4 6 5 7 ...: no bank conflicts.
  let te0 = sg * (EDGE * TURN_ROW);
//!repeat y EDGE8
//!repeat h 4
  let turn$h = te0 + $hu * 2u; // outside of the store, which naga writes before sums that stand in it
//!end
//!end
  let stride = TURN_STRIDE;
  let quad = lane % TURN_QUADS;
  let down = lane / TURN_QUADS;
  let at_row = (down & ~3u) | ((down & 1u) << 1u) | ((down & 2u) >> 1u);
  let row = tile.row0 + wrow + at_row;
  let col = tile.col0 + wcol + quad * 4u;
//!repeat i 4
//!repeat s STORE_STEPS
  let by_row$i_$s = row_factor(tile, row + $iu * EDGE + $su * DOWN)$AS_WIDE;
//!end
//!end
//!repeat j TURNS
  let by_col$j = col_factor(tile, col + $ju * 16u);
//!end
  let quads = div_up(p.n, 4u);
//!repeat y LONG
//!let ROW $iu
//!repeat i 4
  {
//!repeat s STORE_STEPS
    let by_row$s = by_row$i_$s;
//!end
//!put WAY_OUT
  }
//!end
//!end
//!repeat y SHORT
//!let ROW t
  for (var t = 0u; t < 4u * one; t++) {
//!repeat s STORE_STEPS
    let by_row$s = select(select(by_row3_$s, by_row2_$s, t == 2u), select(by_row1_$s, by_row0_$s, t == 0u), t < 2u);
//!end
//!put WAY_OUT
  }
//!end
//!end

@compute @workgroup_size(THREADS)
fn main(
//!repeat y VARY
  @builtin(subgroup_size) lanes: u32,
//!end
  @builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let whole = tile_of(grid_index(wg, nwg));
//!repeat y SHORT
  let one = min(p.n, 1u); // as drivers do not know
//!let NEXT w += one
//!end
//!repeat y LONG
//!let NEXT w++
//!end
//!repeat y ALONE
//!let ONTO true
  let tile = whole;
//!put PRODUCT
//!end
//!repeat y SUMMED
//!let ONTO (ACCUMULATE == 1u || q > 0u)
  for (var q = 0u; q < p.stack; q += one) {
    let tile = of_sum(whole, p.stack - 1u - q);
    // What the last slice of the product before stored is not read, but stored.
    workgroupBarrier();
//!put PRODUCT
  }
//!end
}
