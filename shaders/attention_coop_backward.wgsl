// The gradients of attention on matrix units; see attention_coop.wgsl, whose words and numbered points hold here.
// The simple algorithm: as attention.wgsl's by_query and by_key, EDGE RF rows a subgroup.
// What this adds beside what forward adds:
// 1. Scores and d_p take the way through the same workgroup memory, one after the other; probabilities wait in registers.
// 2. By keys everything is transposed (rows are keys), so that no probability changes its place between products.
// 3. Probabilities are times 2^15, so that f16 keeps them to 11 bits down to 2^-29; d_s is divided by the power of two
//    that attention_halves.wgsl explains.
// 4. Rows past the end have the statistics (HUGE, 0): their probability is 0.

// By queries: rows are queries, tiles are keys and values.
@group(0) @binding(1) var<storage, read> q: array<H4>;
@group(0) @binding(2) var<storage, read> k_words: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v_words: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> d_out: array<H4>;
// By keys: rows are keys and values, tiles are queries and gradients.
@group(0) @binding(1) var<storage, read> q_words: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<H4>;
@group(0) @binding(3) var<storage, read> v: array<H4>;
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

//!let TILE_A k_words
//!let TILE_B v_words
//!let FROM from_k + start * H16
//!let NEXT from_k + next
//!let LSE lse$i
//!let LESS less$i
//!let CUT cut(first + $iu * EDGE, j0)
//!let SEES sees(base, i$i, doc$i, j0 + ($tu * PER + part) * 4u)
@compute @workgroup_size(THREADS)
fn by_query(
//!repeat y VARY
  @builtin(subgroup_size) lanes: u32,
//!end
  @builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = min(grid_index(wg, nwg), workgroups(p.heads) - 1u);
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
//!put LANE
  let rq = operand_row(at.batch, at.head, p.heads, first);
  let kv = at.head / (p.heads / p.kv_heads);
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y$AS_WIDE;
//!repeat i RF
  let i$i = first + $iu * EDGE + row;
  let doc$i = document(base, i$i);
  let stat$i = rq + $iu * EDGE + row;
  let lse$i = vec4<f32>(stats[stat$i / 4u][stat$i % 4u]);
  let less$i = vec4<f32>(stats[stat_quads() + stat$i / 4u][stat$i % 4u]);
//!repeat d DF
//!repeat h PIECES
  let x$i_$d_$h = coopLoadT<FragmentA>(&q[(rq + $iu * EDGE) * HQ + ($du * 4u + $hu * 2u)]$AT, HEAD_STRIDE);
  let y$i_$d_$h = coopLoadT<FragmentA>(&d_out[(rq + $iu * EDGE) * HQ + ($du * 4u + $hu * 2u)]$AT, HEAD_STRIDE);
  var acc$i_$d_$h = FragmentC();
//!end
//!end
//!repeat g PIECES
  var s$i_$g = FragmentC();
  var dp$i_$g = FragmentC();
  var ds$i_$g = FragmentA();
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
//!put PRODUCTS
//!repeat i RF
      {
//!put PROBABILITIES
        subgroupBarrier();
//!put GRADIENTS
      }
//!end
//!repeat d DF
//!repeat h PIECES
//!repeat g PIECES
      let kt$d_$h_$g = coopLoadT<FragmentB>(&ta[$FRAGMENT].x, TILE_STRIDE);
//!repeat i RF
      acc$i_$d_$h = coopMultiplyAdd(ds$i_$g, kt$d_$h_$g, acc$i_$d_$h);
//!end
//!end
//!end
//!end
    }
//!end
  }
//!repeat i RF
//!repeat d DF
//!let RESULT acc
//!put RESULT
//!repeat t STORES
  {
    let r4 = (lane + $tu * LANES) / 4u;
    let i = first + $iu * EDGE + r4;
    if i < p.seq {
      let o = $F4_GET(scores[own0 + r4 * SW + lane % 4u]) * (r.w * UNIT * r.z) * (p.scale * r.y);
      d_q[((base + i) * p.heads + at.head) * HQ + $du * 4u + lane % 4u] = bf16_put(o);
    }
  }
//!end
//!end
//!end
}

//!let TILE_A q_words
//!let TILE_B d_out_words
//!let FROM source0 * H16
//!let NEXT source * H16
//!let LSE notes[$ou * 4u + part + $tu * PER]
//!let LESS notes[STEP / 4u + $ou * 4u + part + $tu * PER]
//!let CUT cut_by_key(first + $iu * EDGE, i0)
//!let SEES seen(base, i0 + ($tu * PER + part) * 4u, doc$i, j$i)
@compute @workgroup_size(THREADS)
fn by_key(
//!repeat y VARY
  @builtin(subgroup_size) lanes: u32,
//!end
  @builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = min(grid_index(wg, nwg), workgroups(p.kv_heads) - 1u);
  let at = place(n, p.kv_heads); // here the first positions have most to do
//!put LANE
  let rk = operand_row(at.batch, at.head, p.kv_heads, first);
  let r = stats[2u * stat_quads()];
  let factor = r.x * (p.scale * LOG2E) * r.y$AS_WIDE;
//!repeat i RF
  let j$i = first + $iu * EDGE + row;
  let doc$i = document(base, j$i);
//!repeat d DF
//!repeat h PIECES
  let x$i_$d_$h = coopLoadT<FragmentA>(&k[(rk + $iu * EDGE) * HQ + ($du * 4u + $hu * 2u)]$AT, HEAD_STRIDE);
  let y$i_$d_$h = coopLoadT<FragmentA>(&v[(rk + $iu * EDGE) * HQ + ($du * 4u + $hu * 2u)]$AT, HEAD_STRIDE);
  var dk$i_$d_$h = FragmentC();
  var dv$i_$d_$h = FragmentC();
//!end
//!end
//!repeat g PIECES
  var s$i_$g = FragmentC();
  var dp$i_$g = FragmentC();
  var p$i_$g = FragmentA();
  var ds$i_$g = FragmentA();
//!end
//!end
  let share = p.heads / p.kv_heads;
  let last = min(at.first + SPAN, p.seq) - 1u;
  let start = at.first / STEP * STEP;
  let steps = div_up(min(block_start(last) + p.block, p.seq) - start, STEP);
  let note = li % (STEP / 4u) + select(0u, stat_quads(), li >= STEP / 4u);
  let source0 = operand_row(at.batch, at.head * share, p.heads, start);
  var stat = stats[source0 / 4u + note];
//!put FIRST_TILE
  for (var step = 0u; step < steps * share; step++) {
    let i = start + step % steps * STEP;
//!put KEEP_TILE
    if li < STEP / 2u {
      notes[li] = stat;
    }
    workgroupBarrier();
    let after = min(step + 1u, steps * share - 1u);
    let source = operand_row(at.batch, at.head * share + after / steps, p.heads, start + after % steps * STEP);
//!put NEXT_TILE
    stat = stats[source / 4u + note];
//!repeat o ROUNDS
//!repeat y SKIP
    for (var once = i + ($ou + 1u) * ROUND > first; once; once = false) {
//!end
//!repeat y WHOLE
    {
//!end
      let i0 = i + $ou * ROUND;
//!put PRODUCTS
//!repeat i RF
      {
//!put PROBABILITIES
//!repeat t KQ
        probs[own_p0 + row * PW + part + $tu * PER] = $H4_PUT(e$t);
//!end
        subgroupBarrier();
//!repeat g PIECES
        p$i_$g = coopLoadT<FragmentA>(&probs[own_p$g]$AT, PROB_STRIDE);
//!end
//!put GRADIENTS
      }
//!end
//!repeat d DF
//!repeat h PIECES
//!repeat g PIECES
      let gt$d_$h_$g = coopLoadT<FragmentB>(&tb[$FRAGMENT].x, TILE_STRIDE);
      let qt$d_$h_$g = coopLoadT<FragmentB>(&ta[$FRAGMENT].x, TILE_STRIDE);
//!repeat i RF
      dv$i_$d_$h = coopMultiplyAdd(p$i_$g, gt$d_$h_$g, dv$i_$d_$h);
      dk$i_$d_$h = coopMultiplyAdd(ds$i_$g, qt$d_$h_$g, dk$i_$d_$h);
//!end
//!end
//!end
//!end
    }
//!end
  }
//!repeat i RF
//!repeat d DF
//!let RESULT dk
//!put RESULT
//!repeat t STORES
  let dk_quad$i_$d_$t = $F4_GET(scores[own0 + (lane + $tu * LANES) / 4u * SW + lane % 4u]) * (r.w * UNIT * r.z) * (p.scale * r.x);
//!end
//!let RESULT dv
//!put RESULT
//!repeat t STORES
  {
    let r4 = (lane + $tu * LANES) / 4u;
    let j = first + $iu * EDGE + r4;
    if j < p.seq {
      let to = ((base + j) * p.kv_heads + at.head) * HQ + $du * 4u + lane % 4u;
      d_k[to] = bf16_put(dk_quad$i_$d_$t);
      d_v[to] = bf16_put($F4_GET(scores[own0 + r4 * SW + lane % 4u]) * (r.w / MANY));
    }
  }
//!end
//!end
//!end
}
