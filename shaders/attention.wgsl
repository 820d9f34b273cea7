// Causal attention with grouped key/value heads, block mask and document mask; nothing of size S x S is stored.
// Rows are positions, batch after batch; a row holds its heads one after the other, HD quads each.
// The simple algorithm: one thread owns one query of one head (backward by keys: one key of one key/value head) and
// loops over the others that it may see.
// What this adds:
// 1. Softmax online (Milakov and Gimelshein 2018): running maximum and sum; FOUR keys at a time share one rescaling.
// 2. Backward from the logarithm of each query's sum of exponentials (FlashAttention, Dao et al. 2022): a probability
//    is recomputed where it is needed, and D = sum(d_out * out) stands for the row sum of p * d_p.
// 3. Neighbouring threads own neighbouring positions of the same head and walk the same range together, so that every
//    load in the inner loop is one address for the whole workgroup. The range leaves out what the causal and the block
//    mask exclude for all of them; the rest is masked one by one.
// The inner loops over a head are written out STEP quads at a time (STEP = HD for small heads).

struct Attention {
  batch: u32,
  seq: u32,
  heads: u32,
  kv_heads: u32,
  block: u32,  // positions of a block that see each other; seq if there are no blocks
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

// The positions of a workgroup: `first` and the WG - 1 after it, of one head of one sequence.
struct Place {
  batch: u32,
  head: u32,
  first: u32,
}

fn place(n: u32, heads: u32) -> Place {
  return Place((n / heads) % p.batch, n % heads, n / (heads * p.batch) * WG);
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

fn documents(rows: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(document(rows.x), document(rows.y), document(rows.z), document(rows.w));
}

fn four(j: u32) -> vec4<u32> {
  return vec4<u32>(j, j + 1u, j + 2u, j + 3u);
}

// Whether query `i` sees the keys `j`, elementwise.
fn sees(i: vec4<u32>, j: vec4<u32>) -> vec4<bool> {
  return (j <= i) & (i - i % p.block <= j);
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // The last positions have most to do: they start first.
  let n = grid_index(wg, nwg);
  let groups = div_up(p.seq, WG) * p.batch * p.heads;
  if n >= groups {
    return;
  }
  let at = place(groups - 1u - n, p.heads);
  let base = at.batch * p.seq;
  let i = min(at.first + li, p.seq - 1u);
  let mine = ((base + i) * p.heads + at.head) * HD;
  var query: array<vec4<f32>, HD>;
  var acc: array<vec4<f32>, HD>;
  for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
    query[c + $du] = x_get(q[mine + c + $du]) * p.scale;
    acc[c + $du] = vec4<f32>();
//!end
  }
  let doc = document(base + i);
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + WG, p.seq);
  var highest = LOWEST;
  var sum = 0.0;
  for (var j = block_start(at.first); j < end; j += 4u) {
    let keys = four(j);
    let rows = base + min(keys, vec4<u32>(p.seq - 1u));
    let r = (rows * p.kv_heads + kv) * HD;
    var s = vec4<f32>();
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      let q$d = query[c + $du];
      s.x += dot(q$d, x_get(k[r.x + c + $du]));
      s.y += dot(q$d, x_get(k[r.y + c + $du]));
      s.z += dot(q$d, x_get(k[r.z + c + $du]));
      s.w += dot(q$d, x_get(k[r.w + c + $du]));
//!end
    }
    let seen = sees(vec4<u32>(i), keys) & (documents(rows) == vec4<u32>(doc));
    s = select(vec4<f32>(LOWEST), s, seen);
    let raised = max(highest, max(max(s.x, s.y), max(s.z, s.w)));
    let e = select(vec4<f32>(0.0), exp(s - raised), seen);
    let shrink = exp(highest - raised);
    highest = raised;
    sum = sum * shrink + ((e.x + e.y) + (e.z + e.w));
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      acc[c + $du] = acc[c + $du] * shrink + e.x * x_get(v[r.x + c + $du]) + e.y * x_get(v[r.y + c + $du])
        + e.z * x_get(v[r.z + c + $du]) + e.w * x_get(v[r.w + c + $du]);
//!end
    }
  }
  if at.first + li < p.seq {
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      out[mine + c + $du] = x_put(acc[c + $du] / sum);
//!end
    }
    lse[(base + i) * p.heads + at.head] = highest + log(sum);
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
  for (var c = 0u; c < HD; c++) {
    sum += dot(x_get(given_out[i * HD + c]), x_get(given_d_out[i * HD + c]));
  }
  stats_out[i] = vec2<f32>(given_lse[i], sum);
}

@compute @workgroup_size(WG)
fn by_query(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  let groups = div_up(p.seq, WG) * p.batch * p.heads;
  if n >= groups {
    return;
  }
  let at = place(groups - 1u - n, p.heads);
  let base = at.batch * p.seq;
  let i = min(at.first + li, p.seq - 1u);
  let mine = ((base + i) * p.heads + at.head) * HD;
  var query: array<vec4<f32>, HD>;
  var d: array<vec4<f32>, HD>;
  var acc: array<vec4<f32>, HD>;
  for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
    query[c + $du] = x_get(q[mine + c + $du]) * p.scale;
    d[c + $du] = x_get(d_out[mine + c + $du]);
    acc[c + $du] = vec4<f32>();
//!end
  }
  let doc = document(base + i);
  let stat = stats[(base + i) * p.heads + at.head];
  let kv = at.head / (p.heads / p.kv_heads);
  let end = min(at.first + WG, p.seq);
  for (var j = block_start(at.first); j < end; j += 4u) {
    let keys = four(j);
    let rows = base + min(keys, vec4<u32>(p.seq - 1u));
    let r = (rows * p.kv_heads + kv) * HD;
    var s = vec4<f32>();
    var dp = vec4<f32>();
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      let q$d = query[c + $du];
      let d$d = d[c + $du];
      s.x += dot(q$d, x_get(k[r.x + c + $du]));
      s.y += dot(q$d, x_get(k[r.y + c + $du]));
      s.z += dot(q$d, x_get(k[r.z + c + $du]));
      s.w += dot(q$d, x_get(k[r.w + c + $du]));
      dp.x += dot(d$d, x_get(v[r.x + c + $du]));
      dp.y += dot(d$d, x_get(v[r.y + c + $du]));
      dp.z += dot(d$d, x_get(v[r.z + c + $du]));
      dp.w += dot(d$d, x_get(v[r.w + c + $du]));
//!end
    }
    let seen = sees(vec4<u32>(i), keys) & (documents(rows) == vec4<u32>(doc));
    let ds = select(vec4<f32>(0.0), exp(s - stat.x) * (dp - stat.y), seen);
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      acc[c + $du] += ds.x * x_get(k[r.x + c + $du]) + ds.y * x_get(k[r.y + c + $du])
        + ds.z * x_get(k[r.z + c + $du]) + ds.w * x_get(k[r.w + c + $du]);
//!end
    }
  }
  if at.first + li < p.seq {
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      d_q[mine + c + $du] = x_put(acc[c + $du] * p.scale);
//!end
    }
  }
}

@compute @workgroup_size(WG)
fn by_key(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  // The first positions have most to do.
  let n = grid_index(wg, nwg);
  if n >= div_up(p.seq, WG) * p.batch * p.kv_heads {
    return;
  }
  let at = place(n, p.kv_heads);
  let base = at.batch * p.seq;
  let j = min(at.first + li, p.seq - 1u);
  let mine = ((base + j) * p.kv_heads + at.head) * HD;
  var key: array<vec4<f32>, HD>;
  var value: array<vec4<f32>, HD>;
  var acc_k: array<vec4<f32>, HD>;
  var acc_v: array<vec4<f32>, HD>;
  for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
    key[c + $du] = x_get(k[mine + c + $du]) * p.scale;
    value[c + $du] = x_get(v[mine + c + $du]);
    acc_k[c + $du] = vec4<f32>();
    acc_v[c + $du] = vec4<f32>();
//!end
  }
  let doc = document(base + j);
  let share = p.heads / p.kv_heads;
  let end = min(block_start(min(at.first + WG, p.seq) - 1u) + p.block, p.seq);
  for (var head = at.head * share; head < (at.head + 1u) * share; head++) {
    for (var i = at.first; i < end; i += 4u) {
      let queries = four(i);
      let rows = base + min(queries, vec4<u32>(p.seq - 1u));
      let at_stats = rows * p.heads + head;
      let r = at_stats * HD;
      var s = vec4<f32>();
      var dp = vec4<f32>();
      for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
        let k$d = key[c + $du];
        let v$d = value[c + $du];
        s.x += dot(k$d, x_get(q[r.x + c + $du]));
        s.y += dot(k$d, x_get(q[r.y + c + $du]));
        s.z += dot(k$d, x_get(q[r.z + c + $du]));
        s.w += dot(k$d, x_get(q[r.w + c + $du]));
        dp.x += dot(v$d, x_get(d_out[r.x + c + $du]));
        dp.y += dot(v$d, x_get(d_out[r.y + c + $du]));
        dp.z += dot(v$d, x_get(d_out[r.z + c + $du]));
        dp.w += dot(v$d, x_get(d_out[r.w + c + $du]));
//!end
      }
      let s0 = stats[at_stats.x];
      let s1 = stats[at_stats.y];
      let s2 = stats[at_stats.z];
      let s3 = stats[at_stats.w];
      let seen = sees(queries, vec4<u32>(j)) & (queries < vec4<u32>(p.seq)) & (documents(rows) == vec4<u32>(doc));
      let e = select(vec4<f32>(0.0), exp(s - vec4<f32>(s0.x, s1.x, s2.x, s3.x)), seen);
      let ds = select(vec4<f32>(0.0), e * (dp - vec4<f32>(s0.y, s1.y, s2.y, s3.y)), seen);
      for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
        acc_k[c + $du] += ds.x * x_get(q[r.x + c + $du]) + ds.y * x_get(q[r.y + c + $du])
          + ds.z * x_get(q[r.z + c + $du]) + ds.w * x_get(q[r.w + c + $du]);
        acc_v[c + $du] += e.x * x_get(d_out[r.x + c + $du]) + e.y * x_get(d_out[r.y + c + $du])
          + e.z * x_get(d_out[r.z + c + $du]) + e.w * x_get(d_out[r.w + c + $du]);
//!end
      }
    }
  }
  if at.first + li < p.seq {
    for (var c = 0u; c < HD; c += STEP) {
//!repeat d STEP
      d_k[mine + c + $du] = x_put(acc_k[c + $du] * p.scale);
      d_v[mine + c + $du] = x_put(acc_v[c + $du]);
//!end
    }
  }
}
