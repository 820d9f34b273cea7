// Attention on matrix units (16x16x16, f16 operands, f32 sums): what attention.wgsl computes, for operands that
// attention_halves.wgsl has made. Legend: S positions, D elements of a head, r the factors that undo the scaling.
// The simple algorithm: a subgroup owns 16 RF queries of one head (backward by keys: keys) and walks 16 KF keys (queries)
// at a time over the others that they may see: products of fragments give scores, its lanes make probabilities of them, and
// products of those with the values add to its results.
// What this adds:
// 1. WGSL does not show a fragment's elements, so scores take the way through workgroup memory: PER lanes a row read them as
//    f32, and write what they make of them as f16, the next product's operand. Rows are padded by 8 elements against bank conflicts.
// 2. Lazy rescaling. A fragment cannot be multiplied by row either, but probabilities may be relative to any value near their row's
//    maximum: that of the first step serves (`stale`) until a score is 2^RISE times as probable. Then the results take
//    the way through memory once; what is kept of a row is at most 2^(RISE + LIFT), halves reach to 2^16.
// 3. Operands are fragments of 512 bytes in memory, loaded as they are, without workgroup memory; the subgroups of a workgroup, next to
//    each other, find them in the cache. A product that contracts positions reads the same fragments transposed (`*_t`).
// 4. Backward by keys computes everything transposed (keys are rows), so that no probability changes its place.
// 5. Steps that no mask excludes are all there is: the walk starts and ends at the last (first) one; masks are applied where they cut a step.
// 6. Scores are logarithms to base 2, the factor in the scale. Probabilities in backward are times 2^LIFT, so that f16 keeps
//    them exact to 11 bits down to 2^-29; d_s is times a power of two that attention_halves.wgsl explains.
// Rows past the end are zero in all operands and have the statistics (HUGE, 0): probability 0. They are not stored.
// A loop with `once` is a branch that is the same for a whole subgroup, which is what matrix units need and naga cannot see.
enable f16;
enable wgpu_cooperative_matrix;

// Forward.
@group(0) @binding(5) var<storage, read> scales: array<vec4<f32>>; // r of q, k, v
@group(0) @binding(6) var<storage, read_write> out: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;

// Below every score; not infinity, which shaders may treat as they like.
const LOWEST = -1e30;
const RISE = 10.0;
const LIFT = 5.0;

fn total(v: vec4<f32>) -> f32 {
  return dot(v, vec4<f32>(1.0));
}

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

@compute @workgroup_size(SG * LANES)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // Workgroups past the last one, of a folded grid, repeat its work: naga allows no return before fragments.
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
  // The last positions have most to do: they start first.
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
  let base = at.batch * p.seq;
  let lane = li % LANES;
  let sg = li / LANES;
  let part = lane % PER;
  let own = sg * OWN;
  let mine = own + lane / PER * WIDE + part;
  let wide = WIDE;
  let first = at.first + sg * ROWS;
  let mq = fragment(at.batch, at.head, p.heads, first);
  let kv = at.head / (p.heads / p.kv_heads);
  let factor = scales[0].x * (p.scale * LOG2E) * scales[0].y;
//!repeat i RF
  let i$i = first + $iu * 16u + lane / PER;
  let doc$i = document(base, i$i);
  var stale$i = LOWEST;
  var sum$i = 0.0;
//!repeat d DF
  let q$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&q[mq + ($iu * DF + $du) * 64u], 4u);
  var acc$i_$d = coop_mat16x16<f32, C>();
//!end
//!end
  let end = min(at.first + SPAN, p.seq);
  let start = block_start(at.first) / STEP * STEP;
  for (var j = start; j < end; j += STEP) {
    let mk = fragment(at.batch, kv, p.kv_heads, j);
//!repeat c KF
//!repeat i RF
    var s$i_$c = coop_mat16x16<f32, C>();
//!end
//!repeat d DF
    let k$c_$d = coopLoad<coop_mat16x16<f16, B>>(&k[mk + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
    s$i_$c = coopMultiplyAdd(q$i_$d, k$c_$d, s$i_$c);
//!end
//!end
//!repeat i RF
    let to$i_$c = own + $iu * 16u * WIDE + $cu * 4u;
    coopStoreT(s$i_$c, &scores[to$i_$c], wide);
//!end
//!end
    subgroupBarrier();
    var rises = false;
//!repeat i RF
    var top$i = LOWEST;
//!repeat t KQ
    var x$i_$t = scores[mine + $iu * 16u * WIDE + $tu * PER] * factor;
//!end
    if cut(first, j) {
//!repeat t KQ
      x$i_$t = select(vec4<f32>(LOWEST), x$i_$t, sees(base, i$i, doc$i, j + ($tu * PER + part) * 4u));
//!end
    }
//!repeat t KQ
    top$i = max(top$i, largest(x$i_$t));
//!end
    rises |= top$i > stale$i + RISE;
//!end
    for (var once = subgroupAny(rises); once; once = false) {
      subgroupBarrier();
//!repeat i RF
      let up$i = max(stale$i, row_max(top$i));
      let shrink$i = exp2(stale$i - up$i);
      stale$i = up$i;
      sum$i *= shrink$i;
      if part == 0u {
        rows[sg * ROWS + $iu * 16u + lane / PER] = shrink$i;
      }
//!end
      for (var again = j > start; again; again = false) {
//!repeat i RF
//!repeat d DF
        coopStoreT(acc$i_$d, &scores[own], wide);
        subgroupBarrier();
//!repeat t STORES
        scores[own + (lane + $tu * LANES) / 4u * WIDE + lane % 4u] *= rows[sg * ROWS + $iu * 16u + (lane + $tu * LANES) / 4u];
//!end
        subgroupBarrier();
        acc$i_$d = coopLoadT<coop_mat16x16<f32, C>>(&scores[own], wide);
        subgroupBarrier();
//!end
//!end
      }
    }
//!repeat i RF
    let base$i = vec4<f32>(max(stale$i, 0.1 * LOWEST) - LIFT);
//!repeat t KQ
    let e$i_$t = exp2(x$i_$t - base$i);
    sum$i += total(e$i_$t);
    probs[mine + $iu * 16u * WIDE + $tu * PER] = vec4<f16>(e$i_$t);
//!end
//!end
    subgroupBarrier();
    let mv = fragment(at.batch, kv, p.kv_heads, j);
//!repeat c KF
//!repeat i RF
    let p$i_$c = coopLoadT<coop_mat16x16<f16, A>>(&probs[own + $iu * 16u * WIDE + $cu * 4u], WIDE);
//!end
//!repeat d DF
    let v$c_$d = coopLoad<coop_mat16x16<f16, B>>(&v[mv + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
    acc$i_$d = coopMultiplyAdd(p$i_$c, v$c_$d, acc$i_$d);
//!end
//!end
//!end
//!repeat y LOCKSTEP
    workgroupBarrier();
//!end
  }
//!repeat i RF
  let sum_all$i = row_total(sum$i);
  if part == 0u {
    rows[sg * ROWS + $iu * 16u + lane / PER] = scales[0].z / sum_all$i;
    if i$i < p.seq {
      lse[(base + i$i) * p.heads + at.head] = (max(stale$i, 0.1 * LOWEST) - LIFT + log2(sum_all$i)) / LOG2E;
    }
  }
//!end
//!repeat i RF
//!repeat d DF
  subgroupBarrier();
  coopStoreT(acc$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  {
    let row = (lane + $tu * LANES) / 4u;
    let i = first + $iu * 16u + row;
    if i < p.seq {
      let o = scores[own + row * WIDE + lane % 4u] * rows[sg * ROWS + $iu * 16u + row];
      out[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}
