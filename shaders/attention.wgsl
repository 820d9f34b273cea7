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
// The loops over keys or queries are written out TILE at a time.

struct Attention {
  batch: u32,
  seq: u32,
  heads: u32,
  kv_heads: u32,
  block: u32,  // positions of a block that see each other; seq if there are no blocks
  quads: u32,  // of a head (HD), for loops that a compiler that knew their length would write out
  scale: f32,  // of the scores
}

// Below every score; not infinity, which shaders may treat as they like.
const LOWEST = -1e30;

@group(0) @binding(0) var<uniform> p: Attention;

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

// What a workgroup does: position `first` and the WG - 1 after it, of one head of one sequence, and of the results the
// quads from `chunk` on.
struct Place {
  batch: u32,
  head: u32,
  first: u32,
  chunk: u32,
}

const CHUNKS = HD / STEP;

fn place(n: u32, heads: u32) -> Place {
  let m = n / CHUNKS;
  return Place((m / heads) % p.batch, m % heads, m / (heads * p.batch) * WG, n % CHUNKS * STEP);
}

fn workgroups(heads: u32) -> u32 {
  return div_up(p.seq, WG) * p.batch * heads * CHUNKS;
}

fn head_quads() -> u32 {
  if STEP == HD {
    return HD;
  }
  return p.quads;
}

fn block_start(i: u32) -> u32 {
  return i - i % p.block;
}

fn document(row: u32) -> u32 {
  if DOCS == 0u {
    return 0u;
  }
  return docs[row];
}

// Whether query `i` sees key `j`, documents aside.
fn sees(i: u32, j: u32) -> bool {
  return j <= i && i - i % p.block <= j;
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
  let i = min(at.first + li, p.seq - 1u);
  let mine = ((base + i) * p.heads + at.head) * HD;
//!repeat d STEP
  let query$d = x_get(q[mine + $du]);
  var acc$d = vec4<f32>();
//!end
  let doc = document(base + i);
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + WG, p.seq);
  var highest = LOWEST;
  var sum = 0.0;
  for (var j = block_start(at.first); j < end; j += TILE) {
//!repeat t TILE
    let row$t = base + min(j + $tu, p.seq - 1u);
    let r$t = (row$t * p.kv_heads + kv) * HD;
    var s$t = 0.0;
//!end
    for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
      var q$d = query$d;
      if STEP < HD {
        q$d = x_get(q[mine + c + $du]);
      }
//!repeat t TILE
      s$t += dot(q$d, x_get(k[r$t + c + $du]));
//!end
//!end
    }
    var raised = highest;
//!repeat t TILE
    let seen$t = sees(i, j + $tu) && document(row$t) == doc;
    s$t = select(LOWEST, s$t * p.scale, seen$t);
    raised = max(raised, s$t);
//!end
    let shrink = exp(highest - raised);
    highest = raised;
    sum *= shrink;
//!repeat t TILE
    let e$t = select(0.0, exp(s$t - raised), seen$t);
    sum += e$t;
//!end
//!repeat d STEP
    acc$d *= shrink;
//!repeat t TILE
    acc$d += e$t * x_get(v[r$t + at.chunk + $du]);
//!end
//!end
  }
  if at.first + li < p.seq {
//!repeat d STEP
    out[mine + at.chunk + $du] = x_put(acc$d / sum);
//!end
    if at.chunk == 0u {
      lse[(base + i) * p.heads + at.head] = highest + log(sum);
    }
  }
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
  let i = min(at.first + li, p.seq - 1u);
  let mine = ((base + i) * p.heads + at.head) * HD;
//!repeat d STEP
  let query$d = x_get(q[mine + $du]);
  let given$d = x_get(d_out[mine + $du]);
  var acc$d = vec4<f32>();
//!end
  let doc = document(base + i);
  let stat = stats[(base + i) * p.heads + at.head];
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + WG, p.seq);
  for (var j = block_start(at.first); j < end; j += TILE) {
//!repeat t TILE
    let row$t = base + min(j + $tu, p.seq - 1u);
    let r$t = (row$t * p.kv_heads + kv) * HD;
    var s$t = 0.0;
    var dp$t = 0.0;
//!end
    for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
      var q$d = query$d;
      var g$d = given$d;
      if STEP < HD {
        q$d = x_get(q[mine + c + $du]);
        g$d = x_get(d_out[mine + c + $du]);
      }
//!repeat t TILE
      s$t += dot(q$d, x_get(k[r$t + c + $du]));
      dp$t += dot(g$d, x_get(v[r$t + c + $du]));
//!end
//!end
    }
//!repeat t TILE
    let seen$t = sees(i, j + $tu) && document(row$t) == doc;
    let ds$t = select(0.0, exp(s$t * p.scale - stat.x) * (dp$t - stat.y), seen$t);
//!repeat d STEP
    acc$d += ds$t * x_get(k[r$t + at.chunk + $du]);
//!end
//!end
  }
  if at.first + li < p.seq {
//!repeat d STEP
    d_q[mine + at.chunk + $du] = x_put(acc$d * p.scale);
//!end
  }
}

@compute @workgroup_size(WG)
fn by_key(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  if n >= workgroups(p.kv_heads) {
    return;
  }
  let at = place(n, p.kv_heads); // here the first positions have most to do
  let base = at.batch * p.seq;
  let j = min(at.first + li, p.seq - 1u);
  let mine = ((base + j) * p.kv_heads + at.head) * HD;
//!repeat d STEP
  let key$d = x_get(k[mine + $du]);
  let value$d = x_get(v[mine + $du]);
  var acc_k$d = vec4<f32>();
  var acc_v$d = vec4<f32>();
//!end
  let doc = document(base + j);
  let share = p.heads / p.kv_heads;
  let end = min(block_start(min(at.first + WG, p.seq) - 1u) + p.block, p.seq);
  for (var head = at.head * share; head < (at.head + 1u) * share; head++) {
    for (var i = at.first; i < end; i += TILE) {
//!repeat t TILE
      let row$t = base + min(i + $tu, p.seq - 1u);
      let stat$t = stats[row$t * p.heads + head];
      let r$t = (row$t * p.heads + head) * HD;
      var s$t = 0.0;
      var dp$t = 0.0;
//!end
      for (var c = 0u; c < head_quads(); c += STEP) {
//!repeat d STEP
        var k$d = key$d;
        var v$d = value$d;
        if STEP < HD {
          k$d = x_get(k[mine + c + $du]);
          v$d = x_get(v[mine + c + $du]);
        }
//!repeat t TILE
        s$t += dot(k$d, x_get(q[r$t + c + $du]));
        dp$t += dot(v$d, x_get(d_out[r$t + c + $du]));
//!end
//!end
      }
//!repeat t TILE
      let seen$t = i + $tu < p.seq && sees(i + $tu, j) && document(row$t) == doc;
      let e$t = select(0.0, exp(s$t * p.scale - stat$t.x), seen$t);
      let ds$t = e$t * (dp$t - stat$t.y);
//!repeat d STEP
      acc_k$d += ds$t * x_get(q[r$t + at.chunk + $du]);
      acc_v$d += e$t * x_get(d_out[r$t + at.chunk + $du]);
//!end
//!end
    }
  }
  if at.first + li < p.seq {
//!repeat d STEP
    d_k[mine + at.chunk + $du] = x_put(acc_k$d * p.scale);
    d_v[mine + at.chunk + $du] = x_put(acc_v$d);
//!end
  }
}
