// Causal attention with grouped key/value heads, block mask and document mask; nothing of size S x S is stored.
// Rows are positions, batch after batch; a row holds its heads one after the other, HD quads each.
// The simple algorithm: one thread owns one query of one head (backward by keys: one key of one key/value head) and
// loops over the others that it may see.
// What this adds:
// 1. Softmax online (Milakov and Gimelshein 2018): running maximum and sum; TILE keys share one rescaling.
// 2. Backward from the logarithm of each query's sum of exponentials (FlashAttention, Dao et al. 2022): a probability
//    is recomputed where it is needed, and D = sum(d_out * out) stands for the row sum of p * d_p.
// 3. Neighbouring threads own neighbouring positions of the same head and walk the same range together, so that every
//    load in the inner loop is one address for the whole workgroup. The range leaves out what the causal and the block
//    mask exclude for all of them; the rest is masked one by one.
// 4. A thread has STEP quads of each result in registers, and the loops over them written out. STEP is HD, and then the
//    thread's own operand stands in registers too, except for large heads on software adapters, whose compiler would
//    take minutes: there HD / STEP threads share the position, each computes the scores anew from memory and has its
//    own chunk of the results.
// 5. A thread owns OWN positions, WG apart, and what it loads in the inner loop serves all of them: with one position a GPU's
//    load units are three times as busy as its arithmetic.
// The loops over keys or queries are written out TILE at a time.

// Forward.
@group(0) @binding(1) var<storage, read> q: array<X>;
@group(0) @binding(2) var<storage, read> k: array<X>;
@group(0) @binding(3) var<storage, read> v: array<X>;
@group(0) @binding(4) var<storage, read> docs: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<X>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

// Row statistics of backward.
@group(0) @binding(1) var<storage, read> given_out: array<X>;
@group(0) @binding(2) var<storage, read> given_d_out: array<X>;
@group(0) @binding(3) var<storage, read> given_lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> stats_out: array<vec2<f32>>;

// Backward by queries and by keys; q, k, v and docs stay where they were.
@group(0) @binding(5) var<storage, read> d_out: array<X>;
@group(0) @binding(6) var<storage, read> stats: array<vec2<f32>>; // lse and D of each row and head
@group(0) @binding(7) var<storage, read_write> d_q: array<X>;
@group(0) @binding(7) var<storage, read_write> d_k: array<X>;
@group(0) @binding(8) var<storage, read_write> d_v: array<X>;

// What a workgroup does: positions `first` to first + SPAN, of one head of one sequence, and of the results the quads
// from `chunk` on.
struct Place {
  batch: u32,
  head: u32,
  first: u32,
  chunk: u32,
}

const CHUNKS = HD / STEP;
const SPAN = WG * OWN;

fn place(n: u32, heads: u32) -> Place {
  let m = n / CHUNKS;
  return Place((m / heads) % p.batch, m % heads, m / (heads * p.batch) * SPAN, n % CHUNKS * STEP);
}

fn workgroups(heads: u32) -> u32 {
  return div_up(p.seq, SPAN) * p.batch * heads * CHUNKS;
}

fn head_quads() -> u32 {
  if STEP == HD {
    return HD;
  }
  return p.quads;
}

fn document(row: u32) -> u32 {
  if DOCS == 0u {
    return 0u;
  }
  return docs[row];
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  if n >= workgroups(p.heads) {
    return;
  }
  // The last positions have most to do: they start first.
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
  let base = at.batch * p.seq;
//!repeat o OWN
  let i$o = min(at.first + $ou * WG + li, p.seq - 1u);
  let from$o = block_start(i$o);
  let mine$o = ((base + i$o) * p.heads + at.head) * HD;
  let doc$o = document(base + i$o);
  var highest$o = LOWEST;
  var sum$o = 0.0;
//!repeat d STEP
  let query$o_$d = x_get(q[mine$o + $du]);
  var acc$o_$d = vec4<f32>();
//!end
//!end
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + SPAN, p.seq);
  for (var j = block_start(at.first); j < end; j += TILE) {
//!repeat t TILE
    let row$t = base + min(j + $tu, p.seq - 1u);
    let r$t = (row$t * p.kv_heads + kv) * HD;
    let doc_of$t = document(row$t);
//!repeat o OWN
    var s$o_$t = 0.0;
//!end
//!end
    for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
//!repeat o OWN
      var q$o_$d = query$o_$d;
      if STEP < HD {
        q$o_$d = x_get(q[mine$o + c + $du]);
      }
//!end
//!repeat t TILE
      let k$t_$d = x_get(k[r$t + c + $du]);
//!repeat o OWN
      s$o_$t += dot(q$o_$d, k$t_$d);
//!end
//!end
//!end
    }
//!repeat o OWN
    var raised$o = highest$o;
//!repeat t TILE
    let seen$o_$t = j + $tu <= i$o && j + $tu >= from$o && doc_of$t == doc$o;
    s$o_$t = select(LOWEST, s$o_$t * p.scale, seen$o_$t);
    raised$o = max(raised$o, s$o_$t);
//!end
    let shrink$o = exp(highest$o - raised$o);
    highest$o = raised$o;
    sum$o *= shrink$o;
//!repeat t TILE
    let e$o_$t = select(0.0, exp(s$o_$t - raised$o), seen$o_$t);
    sum$o += e$o_$t;
//!end
//!repeat d STEP
    acc$o_$d *= shrink$o;
//!end
//!end
//!repeat t TILE
//!repeat d STEP
    let v$t_$d = x_get(v[r$t + at.chunk + $du]);
//!repeat o OWN
    acc$o_$d += e$o_$t * v$t_$d;
//!end
//!end
//!end
  }
//!repeat o OWN
  if at.first + $ou * WG + li < p.seq {
//!repeat d STEP
    out[mine$o + at.chunk + $du] = x_put(acc$o_$d / sum$o);
//!end
    if at.chunk == 0u {
      lse[(base + i$o) * p.heads + at.head] = highest$o + log(sum$o);
    }
  }
//!end
}

// One thread a row and head.
@compute @workgroup_size(WG)
fn statistics(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, nwg) * WG + li;
  if i >= p.batch * p.seq * p.heads {
    return;
  }
  var sum = 0.0;
  for (var c = 0u; c < p.quads; c++) {
    sum += dot(x_get(given_out[i * HD + c]), x_get(given_d_out[i * HD + c]));
  }
  stats_out[i] = vec2<f32>(given_lse[i], sum);
}

@compute @workgroup_size(WG)
fn by_query(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  if n >= workgroups(p.heads) {
    return;
  }
  let at = place(workgroups(p.heads) - 1u - n, p.heads);
  let base = at.batch * p.seq;
//!repeat o OWN
  let i$o = min(at.first + $ou * WG + li, p.seq - 1u);
  let from$o = block_start(i$o);
  let mine$o = ((base + i$o) * p.heads + at.head) * HD;
  let doc$o = document(base + i$o);
  let stat$o = stats[(base + i$o) * p.heads + at.head];
//!repeat d STEP
  let query$o_$d = x_get(q[mine$o + $du]);
  let given$o_$d = x_get(d_out[mine$o + $du]);
  var acc$o_$d = vec4<f32>();
//!end
//!end
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + SPAN, p.seq);
  for (var j = block_start(at.first); j < end; j += TILE) {
//!repeat t TILE
    let row$t = base + min(j + $tu, p.seq - 1u);
    let r$t = (row$t * p.kv_heads + kv) * HD;
    let doc_of$t = document(row$t);
//!repeat o OWN
    var s$o_$t = 0.0;
    var dp$o_$t = 0.0;
//!end
//!end
    for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
//!repeat o OWN
      var q$o_$d = query$o_$d;
      var g$o_$d = given$o_$d;
      if STEP < HD {
        q$o_$d = x_get(q[mine$o + c + $du]);
        g$o_$d = x_get(d_out[mine$o + c + $du]);
      }
//!end
//!repeat t TILE
      let k$t_$d = x_get(k[r$t + c + $du]);
      let v$t_$d = x_get(v[r$t + c + $du]);
//!repeat o OWN
      s$o_$t += dot(q$o_$d, k$t_$d);
      dp$o_$t += dot(g$o_$d, v$t_$d);
//!end
//!end
//!end
    }
//!repeat t TILE
//!repeat o OWN
    let seen$o_$t = j + $tu <= i$o && j + $tu >= from$o && doc_of$t == doc$o;
    let ds$o_$t = select(0.0, exp(s$o_$t * p.scale - stat$o.x) * (dp$o_$t - stat$o.y), seen$o_$t);
//!end
//!repeat d STEP
    let again$t_$d = x_get(k[r$t + at.chunk + $du]);
//!repeat o OWN
    acc$o_$d += ds$o_$t * again$t_$d;
//!end
//!end
//!end
  }
//!repeat o OWN
  if at.first + $ou * WG + li < p.seq {
//!repeat d STEP
    d_q[mine$o + at.chunk + $du] = x_put(acc$o_$d * p.scale);
//!end
  }
//!end
}

@compute @workgroup_size(WG)
fn by_key(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  if n >= workgroups(p.kv_heads) {
    return;
  }
  let at = place(n, p.kv_heads); // here the first positions have most to do
  let base = at.batch * p.seq;
//!repeat o OWN
  let j$o = min(at.first + $ou * WG + li, p.seq - 1u);
  let until$o = min(block_start(j$o) + p.block, p.seq); // the first query that no longer sees this key
  let mine$o = ((base + j$o) * p.kv_heads + at.head) * HD;
  let doc$o = document(base + j$o);
//!repeat d STEP
  let key$o_$d = x_get(k[mine$o + $du]);
  let value$o_$d = x_get(v[mine$o + $du]);
  var acc_k$o_$d = vec4<f32>();
  var acc_v$o_$d = vec4<f32>();
//!end
//!end
  let share = p.heads / p.kv_heads;
  let end = min(block_start(min(at.first + SPAN, p.seq) - 1u) + p.block, p.seq);
  for (var head = at.head * share; head < (at.head + 1u) * share; head++) {
    for (var i = at.first; i < end; i += TILE) {
//!repeat t TILE
      let row$t = base + min(i + $tu, p.seq - 1u);
      let stat$t = stats[row$t * p.heads + head];
      let r$t = (row$t * p.heads + head) * HD;
      let doc_of$t = document(row$t);
//!repeat o OWN
      var s$o_$t = 0.0;
      var dp$o_$t = 0.0;
//!end
//!end
      for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
//!repeat o OWN
        var k$o_$d = key$o_$d;
        var v$o_$d = value$o_$d;
        if STEP < HD {
          k$o_$d = x_get(k[mine$o + c + $du]);
          v$o_$d = x_get(v[mine$o + c + $du]);
        }
//!end
//!repeat t TILE
        let q$t_$d = x_get(q[r$t + c + $du]);
        let g$t_$d = x_get(d_out[r$t + c + $du]);
//!repeat o OWN
        s$o_$t += dot(k$o_$d, q$t_$d);
        dp$o_$t += dot(v$o_$d, g$t_$d);
//!end
//!end
//!end
      }
//!repeat t TILE
//!repeat o OWN
      let seen$o_$t = i + $tu >= j$o && i + $tu < until$o && doc_of$t == doc$o;
      let e$o_$t = select(0.0, exp(s$o_$t * p.scale - stat$t.x), seen$o_$t);
      let ds$o_$t = e$o_$t * (dp$o_$t - stat$t.y);
//!end
//!repeat d STEP
      let query$t_$d = x_get(q[r$t + at.chunk + $du]);
      let given$t_$d = x_get(d_out[r$t + at.chunk + $du]);
//!repeat o OWN
      acc_k$o_$d += ds$o_$t * query$t_$d;
      acc_v$o_$d += e$o_$t * given$t_$d;
//!end
//!end
//!end
    }
  }
//!repeat o OWN
  if at.first + $ou * WG + li < p.seq {
//!repeat d STEP
    d_k[mine$o + at.chunk + $du] = x_put(acc_k$o_$d * p.scale);
    d_v[mine$o + at.chunk + $du] = x_put(acc_v$o_$d);
//!end
  }
//!end
}
