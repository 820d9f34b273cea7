// The gradients of attention on matrix units; see attention_coop.wgsl, whose words and numbered points hold here.
// The simple algorithm: as attention.wgsl's by_query and by_key, 16 RF rows a subgroup.
// What this adds beside what forward adds:
// 1. Scores and d_p take the way through the same workgroup memory, one after the other; probabilities wait in registers.
// 2. By keys everything is transposed (rows are keys), so that no probability changes its place between products.
// 3. Probabilities are times 2^15, so that f16 keeps them to 11 bits down to 2^-29; d_s is divided by the power of two
//    that attention_halves.wgsl explains.
// 4. Rows past the end have the statistics (HUGE, 0): their probability is 0.
enable f16;
enable wgpu_cooperative_matrix;

// By queries: rows are queries, tiles are keys and values.
@group(0) @binding(1) var<storage, read> q: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> k_words: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v_words: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> d_out: array<vec4<f16>>;
// By keys: rows are keys and values, tiles are queries and gradients.
@group(0) @binding(1) var<storage, read> q_words: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<f16>>;
@group(0) @binding(5) var<storage, read> d_out_words: array<vec4<u32>>;
// For each head and position lse, then for each D (see attention_halves.wgsl), then r of q, k, v, d_out.
@group(0) @binding(6) var<storage, read> stats: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> d_q: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> d_k: array<vec2<u32>>;
@group(0) @binding(8) var<storage, read_write> d_v: array<vec2<u32>>;

// What probabilities are multiplied by, what d_s / (r of d_out times that of v) is divided by, and both for d_p.
const MANY = 32768.0;
const UNIT = f32(1u << FALL);
const GRADIENT = 1.0 / (UNIT * MANY);

// Statistics of the queries of a tile: lse, then D.
var<workgroup> notes: array<vec4<f32>, STEP / 2u>;

// Quads of the statistics of each kind.
fn stat_quads() -> u32 {
  return p.batch * p.heads * p.padded / 4u;
}

@compute @workgroup_size(THREADS)
fn by_query(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
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
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y;
//!repeat i RF
  let i$i = first + $iu * 16u + row;
  let doc$i = document(base, i$i);
  let stat$i = rq + $iu * 16u + row;
  let lse$i = vec4<f32>(stats[stat$i / 4u][stat$i % 4u]);
  let less$i = vec4<f32>(stats[stat_quads() + stat$i / 4u][stat$i % 4u]);
//!repeat d DF
  let q$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&q[(rq + $iu * 16u) * HQ + $du * 4u], HQ);
  let g$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&d_out[(rq + $iu * 16u) * HQ + $du * 4u], HQ);
  var acc$i_$d = coop_mat16x16<f32, C>();
//!end
  var s$i = coop_mat16x16<f32, C>();
  var dp$i = coop_mat16x16<f32, C>();
  var ds$i = coop_mat16x16<f16, A>();
//!end
  let end = min(at.first + SPAN, p.seq);
  let start = block_start(at.first) / STEP * STEP;
  let from_k = operand_row(at.batch, kv, p.kv_heads, 0u) * H16;
//!repeat r LOADS
  let to$r = tile_place(li + $ru * THREADS);
  let from$r = min(li + $ru * THREADS, CHUNKS - 1u);
  var kw$r = k_words[from_k + start * H16 + from$r];
  var vw$r = v_words[from_k + start * H16 + from$r];
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
    kw$r = k_words[from_k + next + from$r];
    vw$r = v_words[from_k + next + from$r];
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
      dp$i = coop_mat16x16<f32, C>();
//!end
//!repeat d DF
      let kb$d = coopLoad<coop_mat16x16<f16, B>>(&ta[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
      let vb$d = coopLoad<coop_mat16x16<f16, B>>(&tb[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      s$i = coopMultiplyAdd(q$i_$d, kb$d, s$i);
      dp$i = coopMultiplyAdd(g$i_$d, vb$d, dp$i);
//!end
//!end
//!repeat i RF
      {
        coopStoreT(s$i, &scores[own], wide);
        subgroupBarrier();
//!repeat t KQ
        var e$t = exp2(scores[own + row * SW + part + $tu * PER] * factor - lse$i);
//!end
        if cut(first + $iu * 16u, j0) {
//!repeat t KQ
          e$t = select(vec4<f32>(0.0), e$t, sees(base, i$i, doc$i, j0 + ($tu * PER + part) * 4u));
//!end
        }
        subgroupBarrier();
        coopStoreT(dp$i, &scores[own], wide);
        subgroupBarrier();
//!repeat t KQ
        let d$t = scores[own + row * SW + part + $tu * PER] * GRADIENT - less$i;
        probs[own_p + row * PW + part + $tu * PER] = vec4<f16>(e$t * d$t);
//!end
        subgroupBarrier();
        ds$i = coopLoadT<coop_mat16x16<f16, A>>(&probs[own_p], PW);
      }
//!end
//!repeat d DF
      let kt$d = coopLoadT<coop_mat16x16<f16, B>>(&ta[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      acc$i_$d = coopMultiplyAdd(ds$i, kt$d, acc$i_$d);
//!end
//!end
    }
//!end
  }
//!repeat i RF
//!repeat d DF
  subgroupBarrier();
  coopStoreT(acc$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  {
    let r4 = (lane + $tu * LANES) / 4u;
    let i = first + $iu * 16u + r4;
    if i < p.seq {
      let o = scores[own + r4 * SW + lane % 4u] * (r.w * UNIT * r.z) * (p.scale * r.y);
      d_q[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}

@compute @workgroup_size(THREADS)
fn by_key(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = min(grid_index(wg, nwg), workgroups(p.kv_heads) - 1u);
  let at = place(n, p.kv_heads); // here the first positions have most to do
  let base = at.batch * p.seq;
  let lane = li % LANES;
  let part = lane % PER;
  let row = lane / PER;
  let own = li / LANES * 16u * SW;
  let own_p = li / LANES * 16u * PW;
  let wide = SW;
  let first = at.first + li / LANES * ROWS;
  let rk = operand_row(at.batch, at.head, p.kv_heads, first);
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y;
//!repeat i RF
  let j$i = first + $iu * 16u + row;
  let doc$i = document(base, j$i);
//!repeat d DF
  let k$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&k[(rk + $iu * 16u) * HQ + $du * 4u], HQ);
  let v$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&v[(rk + $iu * 16u) * HQ + $du * 4u], HQ);
  var dk$i_$d = coop_mat16x16<f32, C>();
  var dv$i_$d = coop_mat16x16<f32, C>();
//!end
  var s$i = coop_mat16x16<f32, C>();
  var dp$i = coop_mat16x16<f32, C>();
  var p$i = coop_mat16x16<f16, A>();
  var ds$i = coop_mat16x16<f16, A>();
//!end
  let share = p.heads / p.kv_heads;
  let last = min(at.first + SPAN, p.seq) - 1u;
  let start = at.first / STEP * STEP;
  let steps = div_up(min(block_start(last) + p.block, p.seq) - start, STEP);
  let note = li % (STEP / 4u) + select(0u, stat_quads(), li >= STEP / 4u);
  let source0 = operand_row(at.batch, at.head * share, p.heads, start);
  var stat = stats[source0 / 4u + note];
//!repeat r LOADS
  let to$r = tile_place(li + $ru * THREADS);
  let from$r = min(li + $ru * THREADS, CHUNKS - 1u);
  var qw$r = q_words[source0 * H16 + from$r];
  var gw$r = d_out_words[source0 * H16 + from$r];
//!end
  for (var step = 0u; step < steps * share; step++) {
    let i = start + step % steps * STEP;
    workgroupBarrier();
//!repeat r LOADS
    if CHUNKS % THREADS == 0u || li + $ru * THREADS < CHUNKS {
      ta[to$r] = eight(qw$r);
      tb[to$r] = eight(gw$r);
    }
//!end
    if li < STEP / 2u {
      notes[li] = stat;
    }
    workgroupBarrier();
    let after = min(step + 1u, steps * share - 1u);
    let source = operand_row(at.batch, at.head * share + after / steps, p.heads, start + after % steps * STEP);
//!repeat r LOADS
    qw$r = q_words[source * H16 + from$r];
    gw$r = d_out_words[source * H16 + from$r];
//!end
    stat = stats[source / 4u + note];
//!repeat o ROUNDS
//!repeat y SKIP
    for (var once = i + ($ou + 1u) * ROUND > first; once; once = false) {
//!end
//!repeat y WHOLE
    {
//!end
      let i0 = i + $ou * ROUND;
//!repeat i RF
      s$i = coop_mat16x16<f32, C>();
      dp$i = coop_mat16x16<f32, C>();
//!end
//!repeat d DF
      let qb$d = coopLoad<coop_mat16x16<f16, B>>(&ta[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
      let gb$d = coopLoad<coop_mat16x16<f16, B>>(&tb[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      s$i = coopMultiplyAdd(k$i_$d, qb$d, s$i);
      dp$i = coopMultiplyAdd(v$i_$d, gb$d, dp$i);
//!end
//!end
//!repeat i RF
      {
        coopStoreT(s$i, &scores[own], wide);
        subgroupBarrier();
//!repeat t KQ
        var e$t = exp2(scores[own + row * SW + part + $tu * PER] * factor - notes[$ou * 4u + part + $tu * PER]);
//!end
        if cut_by_key(first + $iu * 16u, i0) {
//!repeat t KQ
          e$t = select(vec4<f32>(0.0), e$t, seen(base, i0 + ($tu * PER + part) * 4u, doc$i, j$i));
//!end
        }
//!repeat t KQ
        probs[own_p + row * PW + part + $tu * PER] = vec4<f16>(e$t);
//!end
        subgroupBarrier();
        p$i = coopLoadT<coop_mat16x16<f16, A>>(&probs[own_p], PW);
        coopStoreT(dp$i, &scores[own], wide);
        subgroupBarrier();
//!repeat t KQ
        let d$t = scores[own + row * SW + part + $tu * PER] * GRADIENT - notes[STEP / 4u + $ou * 4u + part + $tu * PER];
        probs[own_p + row * PW + part + $tu * PER] = vec4<f16>(e$t * d$t);
//!end
        subgroupBarrier();
        ds$i = coopLoadT<coop_mat16x16<f16, A>>(&probs[own_p], PW);
      }
//!end
//!repeat d DF
      let gt$d = coopLoadT<coop_mat16x16<f16, B>>(&tb[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
      let qt$d = coopLoadT<coop_mat16x16<f16, B>>(&ta[$ou * ROUND * TW + $du * 2u].x, 2u * TW);
//!repeat i RF
      dv$i_$d = coopMultiplyAdd(p$i, gt$d, dv$i_$d);
      dk$i_$d = coopMultiplyAdd(ds$i, qt$d, dk$i_$d);
//!end
//!end
    }
//!end
  }
//!repeat i RF
//!repeat d DF
  subgroupBarrier();
  coopStoreT(dk$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  let dk_quad$i_$d_$t = scores[own + (lane + $tu * LANES) / 4u * SW + lane % 4u] * (r.w * UNIT * r.z) * (p.scale * r.x);
//!end
  subgroupBarrier();
  coopStoreT(dv$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  {
    let r4 = (lane + $tu * LANES) / 4u;
    let j = first + $iu * 16u + r4;
    if j < p.seq {
      let to = ((base + j) * p.kv_heads + at.head) * HQ + $du * 4u + lane % 4u;
      d_k[to] = bf16_put(dk_quad$i_$d_$t);
      d_v[to] = bf16_put(scores[own + r4 * SW + lane % 4u] * (r.w / MANY));
    }
  }
//!end
//!end
//!end
}
