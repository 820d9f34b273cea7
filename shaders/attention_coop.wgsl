// Attention on matrix units (lib/fragments.wgsl): what attention.wgsl computes, for operands that
// attention_halves.wgsl has made: halves, head by head, zeros up to a whole number of tiles.
// The simple algorithm: a subgroup owns EDGE RF queries of one head and walks over the keys that they may see, ROUND at a time: products
// of fragments give scores, its lanes make probabilities of them, and products of those with the values add to its results.
// What this adds:
// 1. WGSL does not show a fragment's elements, so scores take the way through workgroup memory: PER lanes a row read them as
//    f32 and write what they make of them as f16, the next product's operand.
// 2. Lazy rescaling. A fragment cannot be multiplied by row either, but probabilities may be relative to anything near their row's
//    maximum: that of the first round serves (`stale`) until a score is 2^RISE times as probable. Then the results take
//    the way through memory once. What is kept of a row is at most 2^(RISE + LIFT); halves reach to 2^16.
// 3. The subgroups of a workgroup share tiles of STEP keys and values in workgroup memory; the next ones are on their way in registers.
// 4. Little workgroup memory, so that several workgroups share a core and one multiplies while another waits: a subgroup has that
//    of EDGE rows of one round. Rows are padded against bank conflicts, unless the room is worth more.
// 5. The walk starts and ends at the first and the last tile that the masks leave; they are applied only where they cut a round. With SKIP
//    a subgroup leaves out the rounds that are wholly after its rows: pays where a round is short.
// 6. Scores are logarithms to base 2, the factor in the scale.
// Rows past the end are zero in all operands, masked as keys, and not stored as queries.
// A loop with `once` is a branch that is the same for a whole subgroup, which is what fragments need and naga cannot see.

@group(0) @binding(1) var<storage, read> q: array<H4>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<vec4<f32>>; // r of q, k, v
@group(0) @binding(6) var<storage, read_write> out: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;

const RISE = 10.0;
const LIFT = 5.0;

fn largest(v: vec4<f32>) -> f32 {
  return max(max(v.x, v.y), max(v.z, v.w));
}

// Over the lanes of a row, in an order that all of them share.
fn row_max(v: f32) -> f32 {
  var all = max(v, subgroupShuffleXor(v, 1u));
  if PER == 4u {
    all = max(all, subgroupShuffleXor(all, 2u));
  }
  return all;
}

fn row_total(v: f32) -> f32 {
  var all = v + subgroupShuffleXor(v, 1u);
  if PER == 4u {
    all += subgroupShuffleXor(all, 2u);
  }
  return all;
}

//!let TILE_A k
//!let TILE_B v
//!let FROM from_k + start * H16
//!let NEXT from_k + next
//!let RESULT acc
@compute @workgroup_size(THREADS)
fn forward(
//!repeat y VARY
  @builtin(subgroup_size) lanes: u32,
//!end
  @builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // Workgroups past the last one, of a folded grid, repeat its work: naga allows no return before fragments.
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
  // The last positions have most to do: they start first.
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
//!put LANE
  let rq = operand_row(at.batch, at.head, p.heads, first);
  let kv = at.head / (p.heads / p.kv_heads);
  let factor = scales[0].x * (p.scale * LOG2E) * scales[0].y$AS_WIDE;
//!repeat i RF
  let i$i = first + $iu * EDGE + row;
  let doc$i = document(base, i$i);
  var stale$i = LOWEST;
  var sum$i = 0.0;
//!repeat d DF
//!repeat h PIECES
  let q$i_$d_$h = coopLoadT<FragmentA>(&q[(rq + $iu * EDGE) * HQ + ($du * 4u + $hu * 2u)]$AT, HEAD_STRIDE);
  var acc$i_$d_$h = FragmentC();
//!end
//!end
//!repeat g PIECES
  var s$i_$g = FragmentC();
  var p$i_$g = FragmentA();
//!end
//!end
  let end = min(at.first + SPAN, p.seq);
  let start = block_start(at.first) / STEP * STEP;
  let from_k = operand_row(at.batch, kv, p.kv_heads, 0u) * H16;
//!put FIRST_TILE
  for (var j = start; j < end; j += STEP) {
//!put KEEP_TILE
    workgroupBarrier();
    let next = min(j + STEP, p.padded - STEP) * H16;
//!put NEXT_TILE
//!repeat o ROUNDS
//!repeat y SKIP
    for (var once = j + $ou * ROUND < first + ROWS; once; once = false) {
//!end
//!repeat y WHOLE
    {
//!end
      let j0 = j + $ou * ROUND;
//!repeat i RF
//!repeat g PIECES
      s$i_$g = FragmentC();
//!end
//!end
//!repeat d DF
//!repeat h PIECES
//!repeat g PIECES
      let kb$d_$h_$g = coopLoad<FragmentB>(&ta[$FRAGMENT].x, TILE_STRIDE);
//!repeat i RF
      s$i_$g = coopMultiplyAdd(q$i_$d_$h, kb$d_$h_$g, s$i_$g);
//!end
//!end
//!end
//!end
//!repeat i RF
      {
//!repeat g PIECES
        coopStoreT(s$i_$g, &scores[own$g]$AT, wide);
//!end
        subgroupBarrier();
        var top = LOWEST;
//!repeat t KQ
        var x$t = $F4_GET(scores[own0 + row * SW + part + $tu * PER]) * factor;
//!end
        if cut(first + $iu * EDGE, j0) {
//!repeat t KQ
          x$t = select(vec4<f32>(LOWEST), x$t, sees(base, i$i, doc$i, j0 + ($tu * PER + part) * 4u));
//!end
        }
//!repeat t KQ
        top = max(top, largest(x$t));
//!end
        for (var once = subgroupAny(top > stale$i + RISE); once; once = false) {
          let up = max(stale$i, row_max(top));
          let shrink = exp2(stale$i - up);
          stale$i = up;
          sum$i *= shrink;
          if part == 0u {
            scores[own0 + row * SW + NOTE].x = shrink;
          }
          for (var again = j0 > start; again; again = false) {
//!repeat d DF
            subgroupBarrier();
//!repeat h PIECES
            coopStoreT(acc$i_$d_$h, &scores[own$h]$AT, wide);
//!end
            subgroupBarrier();
//!repeat t STORES
//!repeat y EDGE16
            scores[own0 + (lane + $tu * LANES) / 4u * SW + lane % 4u] *= scores[own0 + (lane + $tu * LANES) / 4u * SW + NOTE].x;
//!end
//!repeat y EDGE8
            {
              let at = own0 + (lane + $tu * LANES) / 4u * SW;
              let scaled = f4_get(scores[at + lane % 4u]) * scores[at + NOTE].x;
              scores[at + lane % 4u] = F4(scaled.x, scaled.y, scaled.z, scaled.w);
            }
//!end
//!end
            subgroupBarrier();
//!repeat h PIECES
            acc$i_$d_$h = coopLoadT<FragmentC>(&scores[own$h]$AT, SCORE_STRIDE);
//!end
//!end
            subgroupBarrier();
          }
        }
        let less = vec4<f32>(max(stale$i, 0.1 * LOWEST) - LIFT);
//!repeat t KQ
        let e$t = exp2(x$t - less);
        sum$i += total(e$t);
        probs[own_p0 + row * PW + part + $tu * PER] = $H4_PUT(e$t);
//!end
        subgroupBarrier();
//!repeat g PIECES
        p$i_$g = coopLoadT<FragmentA>(&probs[own_p$g]$AT, PROB_STRIDE);
//!end
      }
//!end
//!repeat d DF
//!repeat h PIECES
//!repeat g PIECES
      let vb$d_$h_$g = coopLoadT<FragmentB>(&tb[$FRAGMENT].x, TILE_STRIDE);
//!repeat i RF
      acc$i_$d_$h = coopMultiplyAdd(p$i_$g, vb$d_$h_$g, acc$i_$d_$h);
//!end
//!end
//!end
//!end
    }
//!end
  }
//!repeat i RF
  {
    let all = row_total(sum$i);
    subgroupBarrier();
    if part == 0u {
      scores[own0 + row * SW + NOTE].x = scales[0].z / all;
      if i$i < p.seq {
        lse[(base + i$i) * p.heads + at.head] = (max(stale$i, 0.1 * LOWEST) - LIFT + log2(all)) / LOG2E;
      }
    }
  }
//!repeat d DF
//!put RESULT
//!repeat t STORES
  {
    let r = (lane + $tu * LANES) / 4u;
    let i = first + $iu * EDGE + r;
    if i < p.seq {
      let o = $F4_GET(scores[own0 + r * SW + lane % 4u]) * scores[own0 + r * SW + NOTE].x;
      out[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}
