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

// Backward: for each head and position lse, then for each D (see attention_halves.wgsl), then r of q, k, v, d_out.
@group(0) @binding(5) var<storage, read> d_out: array<vec4<f16>>;
@group(0) @binding(6) var<storage, read> stats: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> d_q: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> d_k: array<vec2<u32>>;
@group(0) @binding(8) var<storage, read_write> d_v: array<vec2<u32>>;

// What probabilities in backward are multiplied by, what d_s / (r of d_out times that of v) is divided by, and both for d_p.
const MANY = 32768.0;
const UNIT = f32(1u << FALL);
const GRADIENT = 1.0 / (UNIT * MANY);

// Whether queries i to i + 3 see key `j`.
fn seen(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let queries = four(i);
  let until = block_start(j) + p.block;
  return queries >= vec4<u32>(j) & queries < vec4<u32>(until) & documents(base, i) == vec4<u32>(doc);
}

// The same for ROWS keys from `j` and STEP queries from `i`.
fn cut_by_key(j: u32, i: u32) -> bool {
  return DOCS == 1u || i + 1u < j + ROWS || i + STEP > block_start(j) + p.block;
}

// Quads of the statistics of each kind.
fn stat_quads() -> u32 {
  return p.batch * p.heads * p.padded / 4u;
}

@compute @workgroup_size(SG * LANES)
fn by_query(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // Workgroups past the last one, of a folded grid, repeat its work: naga allows no return before fragments.
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
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
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y;
//!repeat i RF
  let i$i = first + $iu * 16u + lane / PER;
  let doc$i = document(base, i$i);
  let stat$i = (at.batch * p.heads + at.head) * p.padded + i$i;
  let lse$i = vec4<f32>(stats[stat$i / 4u][stat$i % 4u]);
  let less$i = vec4<f32>(stats[stat_quads() + stat$i / 4u][stat$i % 4u]);
//!repeat d DF
  let q$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&q[mq + ($iu * DF + $du) * 64u], 4u);
  let g$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&d_out[mq + ($iu * DF + $du) * 64u], 4u);
  var acc$i_$d = coop_mat16x16<f32, C>();
//!end
//!end
  let end = min(at.first + SPAN, p.seq);
  for (var j = block_start(at.first) / STEP * STEP; j < end; j += STEP) {
    let mk = fragment(at.batch, kv, p.kv_heads, j);
//!repeat c KF
//!repeat i RF
    var s$i_$c = coop_mat16x16<f32, C>();
    var dp$i_$c = coop_mat16x16<f32, C>();
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
//!repeat c KF
//!repeat d DF
    let v$c_$d = coopLoad<coop_mat16x16<f16, B>>(&v[mk + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
    dp$i_$c = coopMultiplyAdd(g$i_$d, v$c_$d, dp$i_$c);
//!end
//!end
//!end
    subgroupBarrier();
//!repeat i RF
//!repeat t KQ
    var e$i_$t = exp2(scores[mine + $iu * 16u * WIDE + $tu * PER] * factor - lse$i);
//!end
    if cut(first, j) {
//!repeat t KQ
      e$i_$t = select(vec4<f32>(0.0), e$i_$t, sees(base, i$i, doc$i, j + ($tu * PER + part) * 4u));
//!end
    }
//!end
    subgroupBarrier();
//!repeat c KF
//!repeat i RF
    coopStoreT(dp$i_$c, &scores[to$i_$c], wide);
//!end
//!end
    subgroupBarrier();
//!repeat i RF
//!repeat t KQ
    {
      let d = scores[mine + $iu * 16u * WIDE + $tu * PER] * GRADIENT - less$i;
      probs[mine + $iu * 16u * WIDE + $tu * PER] = vec4<f16>(e$i_$t * d);
    }
//!end
//!end
    subgroupBarrier();
    let mt = transposed(p.kv_heads) + mk;
//!repeat c KF
//!repeat i RF
    let ds$i_$c = coopLoadT<coop_mat16x16<f16, A>>(&probs[own + $iu * 16u * WIDE + $cu * 4u], WIDE);
//!end
//!repeat d DF
    let kt$c_$d = coopLoad<coop_mat16x16<f16, B>>(&k[mt + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
    acc$i_$d = coopMultiplyAdd(ds$i_$c, kt$c_$d, acc$i_$d);
//!end
//!end
//!end
//!repeat y LOCKSTEP
    workgroupBarrier();
//!end
  }
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
      let o = scores[own + row * WIDE + lane % 4u] * (r.w * UNIT * r.z) * (p.scale * r.y);
      d_q[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}

@compute @workgroup_size(SG * LANES)
fn by_key(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // Workgroups past the last one, of a folded grid, repeat its work: naga allows no return before fragments.
  let n = min(grid_index(wg, nwg), workgroups(p.kv_heads) - 1u);
  let at = place(n, p.kv_heads); // here the first positions have most to do
  let base = at.batch * p.seq;
  let lane = li % LANES;
  let sg = li / LANES;
  let part = lane % PER;
  let own = sg * OWN;
  let mine = own + lane / PER * WIDE + part;
  let wide = WIDE;
  let first = at.first + sg * ROWS;
  let mk = fragment(at.batch, at.head, p.kv_heads, first);
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y;
//!repeat i RF
  let j$i = first + $iu * 16u + lane / PER;
  let doc$i = document(base, j$i);
//!repeat d DF
  let k$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&k[mk + ($iu * DF + $du) * 64u], 4u);
  let v$i_$d = coopLoadT<coop_mat16x16<f16, A>>(&v[mk + ($iu * DF + $du) * 64u], 4u);
  var dk$i_$d = coop_mat16x16<f32, C>();
  var dv$i_$d = coop_mat16x16<f32, C>();
//!end
//!end
  let share = p.heads / p.kv_heads;
  let last = min(at.first + SPAN, p.seq) - 1u;
  let end = min(block_start(last) + p.block, p.seq);
  for (var head = at.head * share; head < (at.head + 1u) * share; head++) {
    for (var i = at.first / STEP * STEP; i < end; i += STEP) {
      let mq = fragment(at.batch, head, p.heads, i);
      let stat = ((at.batch * p.heads + head) * p.padded + i) / 4u + part;
//!repeat c KF
//!repeat i RF
      var s$i_$c = coop_mat16x16<f32, C>();
      var dp$i_$c = coop_mat16x16<f32, C>();
//!end
//!repeat d DF
      let q$c_$d = coopLoad<coop_mat16x16<f16, B>>(&q[mq + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
      s$i_$c = coopMultiplyAdd(k$i_$d, q$c_$d, s$i_$c);
//!end
//!end
//!repeat i RF
      let to$i_$c = own + $iu * 16u * WIDE + $cu * 4u;
      coopStoreT(s$i_$c, &scores[to$i_$c], wide);
//!end
//!end
//!repeat c KF
//!repeat d DF
      let g$c_$d = coopLoad<coop_mat16x16<f16, B>>(&d_out[mq + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
      dp$i_$c = coopMultiplyAdd(v$i_$d, g$c_$d, dp$i_$c);
//!end
//!end
//!end
      subgroupBarrier();
//!repeat t KQ
      let lse$t = stats[stat + $tu * PER];
      let less$t = stats[stat_quads() + stat + $tu * PER];
//!end
//!repeat i RF
//!repeat t KQ
      var e$i_$t = exp2(scores[mine + $iu * 16u * WIDE + $tu * PER] * factor - lse$t);
//!end
      if cut_by_key(first, i) {
//!repeat t KQ
        e$i_$t = select(vec4<f32>(0.0), e$i_$t, seen(base, i + ($tu * PER + part) * 4u, doc$i, j$i));
//!end
      }
//!repeat t KQ
      probs[mine + $iu * 16u * WIDE + $tu * PER] = vec4<f16>(e$i_$t);
//!end
//!end
      subgroupBarrier();
      let mt = transposed(p.heads) + mq;
//!repeat c KF
//!repeat i RF
      coopStoreT(dp$i_$c, &scores[to$i_$c], wide);
      let p$i_$c = coopLoadT<coop_mat16x16<f16, A>>(&probs[own + $iu * 16u * WIDE + $cu * 4u], WIDE);
//!end
//!end
//!repeat c KF
//!repeat d DF
      let gt$c_$d = coopLoad<coop_mat16x16<f16, B>>(&d_out[mt + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
      dv$i_$d = coopMultiplyAdd(p$i_$c, gt$c_$d, dv$i_$d);
//!end
//!end
//!end
      subgroupBarrier();
//!repeat i RF
//!repeat t KQ
      {
        let d = scores[mine + $iu * 16u * WIDE + $tu * PER] * GRADIENT - less$t;
        probs[mine + $iu * 16u * WIDE + $tu * PER] = vec4<f16>(e$i_$t * d);
      }
//!end
//!end
      subgroupBarrier();
//!repeat c KF
//!repeat i RF
      let ds$i_$c = coopLoadT<coop_mat16x16<f16, A>>(&probs[own + $iu * 16u * WIDE + $cu * 4u], WIDE);
//!end
//!repeat d DF
      let qt$c_$d = coopLoad<coop_mat16x16<f16, B>>(&q[mt + ($cu * DF + $du) * 64u], 4u);
//!repeat i RF
      dk$i_$d = coopMultiplyAdd(ds$i_$c, qt$c_$d, dk$i_$d);
//!end
//!end
//!end
//!repeat y LOCKSTEP
      workgroupBarrier();
//!end
    }
  }
//!repeat i RF
//!repeat d DF
  subgroupBarrier();
  coopStoreT(dk$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  let k_quad$i_$d_$t = scores[own + (lane + $tu * LANES) / 4u * WIDE + lane % 4u] * (r.w * UNIT * r.z) * (p.scale * r.x);
//!end
  subgroupBarrier();
  coopStoreT(dv$i_$d, &scores[own], wide);
  subgroupBarrier();
//!repeat t STORES
  {
    let row = (lane + $tu * LANES) / 4u;
    let j = first + $iu * 16u + row;
    if j < p.seq {
      let to = ((base + j) * p.kv_heads + at.head) * HQ + $du * 4u + lane % 4u;
      d_k[to] = bf16_put(k_quad$i_$d_$t);
      d_v[to] = bf16_put(scores[own + row * WIDE + lane % 4u] * (r.w / MANY));
    }
  }
//!end
//!end
//!end
}
