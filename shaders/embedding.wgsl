// Rows of a table by token, and the table's gradient without atomics. The variant sets one of FORWARD, BUCKET, BACKWARD.
//   forward   out[t] = table[token[t]]
//   bucket    order = tokens' positions sorted by token, stable; first[v] = where token v begins in it
//   backward  out[v] = sum of d_out[order[i]], first[v] <= i < first[v + 1]: in token order, in f32
// The simple algorithm, except that in bucket a thread (one per vocabulary row) finds its row's place by counting the
// smaller tokens: T reads, and no scan over the vocabulary.

struct Embedding {
  tokens: u32,
  vocab: u32,
  quads: u32, // of one row
}

@group(0) @binding(0) var<uniform> p: Embedding;
//!repeat i FORWARD
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<X>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;

@compute @workgroup_size(256)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  if at < p.tokens * p.quads {
    out[at] = table[tokens[at / p.quads] * p.quads + at % p.quads];
  }
}
//!end
//!repeat i BUCKET
@group(0) @binding(1) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> first: array<u32>;

// Four tokens; past the end a number above every token and row.
fn four(q: u32) -> vec4<u32> {
  let at = vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u);
  return select(vec4<u32>(0xffffffffu), tokens[q], at < vec4<u32>(p.tokens));
}

@compute @workgroup_size(64)
fn bucket(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, n) * 64u + li;
  if row > p.vocab {
    return;
  }
  let count = div_up(p.tokens, 4u);
  var less = vec4<u32>();
  var same = vec4<u32>();
  for (var q = 0u; q < count; q++) {
    let t = four(q);
    less += select(vec4<u32>(0u), vec4<u32>(1u), t < vec4<u32>(row));
    same += select(vec4<u32>(0u), vec4<u32>(1u), t == vec4<u32>(row));
  }
  var at = less.x + less.y + less.z + less.w;
  first[row] = at;
  let end = at + same.x + same.y + same.z + same.w;
  for (var q = 0u; q < count && at < end; q++) {
    let hit = four(q) == vec4<u32>(row);
    if any(hit) {
//!repeat c 4
      if hit[$c] {
        order[at] = 4u * q + $cu;
        at++;
      }
//!end
    }
  }
}
//!end
//!repeat i BACKWARD
@group(0) @binding(1) var<storage, read> order: array<u32>;
@group(0) @binding(2) var<storage, read> first: array<u32>;
@group(0) @binding(3) var<storage, read> d_out: array<X>;
@group(0) @binding(4) var<storage, read_write> out: array<OUT>;

@compute @workgroup_size(256)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  if at >= p.vocab * p.quads {
    return;
  }
  let row = at / p.quads;
  let q = at % p.quads;
  var sum = vec4<f32>();
  for (var i = first[row]; i < first[row + 1u]; i++) {
    sum += x_get(d_out[order[i] * p.quads + q]);
  }
  out[at] = out_put(sum);
}
//!end
