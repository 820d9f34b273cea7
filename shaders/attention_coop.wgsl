// Attention on matrix units (16x16x16, f16 operands, f32 sums): what attention.wgsl computes, for operands that
// attention_halves.wgsl has made: halves, head by head, zeros up to a whole number of tiles.
// The simple algorithm: a subgroup owns 16 RF queries of one head and walks over the keys that they may see, ROUND at a time: products
// of fragments give scores, its lanes make probabilities of them, and products of those with the values add to its results.
// What this adds:
// 1. WGSL does not show a fragment's elements, so scores take the way through workgroup memory: PER lanes a row read them as
//    f32 and write what they make of them as f16, the next product's operand.
// 2. Lazy rescaling. A fragment cannot be multiplied by row either, but probabilities may be relative to anything near their row's
//    maximum: that of the first round serves (`stale`) until a score is 2^RISE times as probable. Then the results take
//    the way through memory once. What is kept of a row is at most 2^(RISE + LIFT); halves reach to 2^16.
// 3. The subgroups of a workgroup share tiles of STEP keys and values in workgroup memory; the next ones are on their way in registers.
// 4. Little workgroup memory, so that several workgroups share a core and one multiplies while another waits: a subgroup has that
//    of 16 rows of one round. Rows are padded against bank conflicts, unless the room is worth more.
// 5. The walk starts and ends at the first and the last tile that the masks leave; they are applied only where they cut a round. With SKIP
//    a subgroup leaves out the rounds that are wholly after its rows: pays where a round is short.
// 6. Scores are logarithms to base 2, the factor in the scale.
// Rows past the end are zero in all operands, masked as keys, and not stored as queries.
// A loop with `once` is a branch that is the same for a whole subgroup, which is what fragments need and naga cannot see.
enable f16;
enable wgpu_cooperative_matrix;

@group(0) @binding(1) var<storage, read> q: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<vec4<f32>>; // r of q, k, v
@group(0) @binding(6) var<storage, read_write> out: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;

// Below every score; not infinity, which shaders may treat as they like.
const LOWEST = -1e30;
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

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // Workgroups past the last one, of a folded grid, repeat its work: naga allows no return before fragments.
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
  // The last positions have most to do: they start first.
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
  let base = at.batch * p.seq;
  let lane = li % LANES;
  let part = lane % PER;
  let row = lane / PER;
  let own = li / LANES * 16u * SW;
  let own_p = li / LANES * 16u * PW;
  let wide = SW;
  let first = at.first + li / LANES * ROWS;
  let rq = operand_row(at.batch, at.head, p.heads, first);
  let kv = at.head / (p.heads / p.kv_heads);
  let factor = scales[0].x * (p.scale * LOG2E) * scales[0].y;
//!repeat i RF
  let i$i = first + $iu * 16u + row;
  let doc$i = document(base, i$i);
  var stale$i = LOWEST;
  var sum$i = 0.0;
//!repeat d DF
  let q$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&q[(rq + $iu * 16u) * HQ + $du * 4u], HQ);
  var acc$i_$d = coop_mat16x16<f32, C>();
//!end
  var s$i = coop_mat16x16<f32, C>();
  var p$i = coop_mat16x16<f16, A>();
//!end
  let end = min(at.first + SPAN, p.seq);
  let start = block_start(at.first) / STEP * STEP;
  let from_k = operand_row(at.batch, kv, p.kv_heads, 0u) * H16;
//!repeat r LOADS
  let to$r = tile_place(li + $ru * THREADS);
  let from$r = min(li + $ru * THREADS, CHUNKS - 1u);
  var kw$r = k[from_k + start * H16 + from$r];
  var vw$r = v[from_k + start * H16 + from$r];
//!end
  for (var j = start; j < end; j += STEP) {
    workgroupBarrier();
//!repeat r LOADS
    if CHUNKS % THREADS == 0u || li + $ru * THREADS < CHUNKS {
      ta[to$r] = eight(kw$r);
      tb[to$r] = eight(vw$r);
    }
//!end
    workgroupBarrier();
    let next = min(j + STEP, p.padded - STEP) * H16;
//!repeat r LOADS
    kw$r = k[from_k + next + from$r];
    vw$r = v[from_k + next + from$r];
//!end
//!repeat o ROUNDS
//!repeat y SKIP
    for (var once = j + $ou * ROUND < first + ROWS; once; once = false) {
//!end
//!repeat y WHOLE
    {
//!end
      let j0 = j + $ou * ROUND;
//!repeat i RF
      s$i = coop_mat16x16<f32, C>();
//!end
//!repeat d DF
      let kb$d = coopLoad<coop_mat16x16<f16, B>>(&ta[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      s$i = coopMultiplyAdd(q$i_$d, kb$d, s$i);
//!end
//!end
//!repeat i RF
      {
        coopStoreT(s$i, &scores[own], wide);
        subgroupBarrier();
        var top = LOWEST;
//!repeat t KQ
        var x$t = scores[own + row * SW + part + $tu * PER] * factor;
//!end
        if cut(first + $iu * 16u, j0) {
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
            scores[own + row * SW + NOTE].x = shrink;
          }
          for (var again = j0 > start; again; again = false) {
//!repeat d DF
            subgroupBarrier();
            coopStoreT(acc$i_$d, &scores[own], wide);
            subgroupBarrier();
//!repeat t STORES
            scores[own + (lane + $tu * LANES) / 4u * SW + lane % 4u] *= scores[own + (lane + $tu * LANES) / 4u * SW + NOTE].x;
//!end
            subgroupBarrier();
            acc$i_$d = coopLoadT<coop_mat16x16<f32, C>>(&scores[own], SW);
//!end
            subgroupBarrier();
          }
        }
        let less = vec4<f32>(max(stale$i, 0.1 * LOWEST) - LIFT);
//!repeat t KQ
        let e$t = exp2(x$t - less);
        sum$i += total(e$t);
        probs[own_p + row * PW + part + $tu * PER] = vec4<f16>(e$t);
//!end
        subgroupBarrier();
        p$i = coopLoadT<coop_mat16x16<f16, A>>(&probs[own_p], PW);
      }
//!end
//!repeat d DF
      let vb$d = coopLoadT<coop_mat16x16<f16, B>>(&tb[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      acc$i_$d = coopMultiplyAdd(p$i, vb$d, acc$i_$d);
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
      scores[own + row * SW + NOTE].x = scales[0].z / all;
      if i$i < p.seq {
        lse[(base + i$i) * p.heads + at.head] = (max(stale$i, 0.1 * LOWEST) - LIFT + log2(all)) / LOG2E;
      }
    }
  }
//!repeat d DF
  subgroupBarrier();
  coopStoreT(acc$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  {
    let r = (lane + $tu * LANES) / 4u;
    let i = first + $iu * 16u + r;
    if i < p.seq {
      let o = scores[own + r * SW + lane % 4u] * scores[own + r * SW + NOTE].x;
      out[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}
