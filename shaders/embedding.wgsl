// Rows of a table by token, and the table's gradient without atomics. The variant sets one entry's name to 1.
//   forward   out[t] = table[token[t]]
//   rank      how many positions stand before each in the order by token, stable: counted over one slice of the tokens
//   place     order = positions sorted by token, from the ranks; sorted = their tokens
//   starts    first[v] = where token v begins in it, by bisection
//   runs      the sum of each CHUNK positions of the order that are all one token
//   backward  out[v] = sum of d_out[order[i]], first[v] <= i < first[v + 1], by chunks where they are whole
// The simple algorithm is one thread per row of the table that looks for its token and adds what it finds, one after
// another. What this adds: every position finds its own place, so the vocabulary's size does not matter there; a frequent
// token's positions are added in two levels; LANES threads share a row of the table and take HELD quads at a time.

struct Embedding {
  tokens: u32,
  vocab: u32,
  quads: u32,  // of one row
  slices: u32, // of the tokens, in rank and place
}

@group(0) @binding(0) var<uniform> p: Embedding;
//!repeat e FORWARD
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
//!repeat e RANK
@group(0) @binding(1) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> ranks: array<u32>;

@compute @workgroup_size(64)
fn rank(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 64u + li;
  if at >= p.tokens * p.slices {
    return;
  }
  let own = at % p.tokens;
  let quad = own / 4u;
  let token = tokens[quad][own % 4u];
  let quads = div_up(p.tokens, 4u);
  let slice = div_up(quads, p.slices);
  let begin = at / p.tokens * slice;
  let end = min(begin + slice, quads);
  // Equal tokens count before the own quad and not after it; the own one and a broken last one are looked at below.
  var less = vec4<u32>();
  for (var q = begin; q < min(end, p.tokens / 4u); q++) {
    let bound = token + select(0u, 1u, q < quad);
    less += select(vec4<u32>(0u), vec4<u32>(1u), tokens[q] < vec4<u32>(bound));
  }
  let parts = vec4<u32>(0u, 1u, 2u, 3u);
  if begin <= quad && quad < end {
    let same = (tokens[quad] == vec4<u32>(token)) & (parts < vec4<u32>(own % 4u));
    less += select(vec4<u32>(0u), vec4<u32>(1u), same);
  }
  let last = p.tokens / 4u;
  if last < quads && begin <= last && last < end {
    let below = (tokens[last] < vec4<u32>(token)) & (parts < vec4<u32>(p.tokens % 4u));
    less += select(vec4<u32>(0u), vec4<u32>(1u), below);
  }
  ranks[at] = less.x + less.y + less.z + less.w;
}
//!end
//!repeat e PLACE
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read> ranks: array<u32>;
@group(0) @binding(3) var<storage, read_write> order: array<u32>;
@group(0) @binding(4) var<storage, read_write> sorted: array<u32>;

@compute @workgroup_size(64)
fn place(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let own = grid_index(wg, n) * 64u + li;
  if own >= p.tokens {
    return;
  }
  var at = 0u;
  for (var slice = 0u; slice < p.slices; slice++) {
    at += ranks[slice * p.tokens + own];
  }
  order[at] = own;
  sorted[at] = tokens[own];
}
//!end
//!repeat e STARTS
@group(0) @binding(1) var<storage, read> sorted: array<u32>;
@group(0) @binding(2) var<storage, read_write> first: array<u32>;

@compute @workgroup_size(64)
fn starts(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, n) * 64u + li;
  if row > p.vocab {
    return;
  }
  // The first position whose token is not below row stands in low..=high.
  var low = 0u;
  var high = p.tokens;
  while low < high {
    let middle = (low + high) / 2u;
    if sorted[middle] < row {
      low = middle + 1u;
    } else {
      high = middle;
    }
  }
  first[row] = low;
}
//!end
//!repeat e RUNS
@group(0) @binding(1) var<storage, read> order: array<u32>;
@group(0) @binding(2) var<storage, read> sorted: array<u32>;
@group(0) @binding(3) var<storage, read> d_out: array<X>;
@group(0) @binding(4) var<storage, read_write> sums: array<vec4<f32>>;

@compute @workgroup_size(64)
fn runs(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 64u + li;
  let begin = at / p.quads * CHUNK;
  // Only whole chunks; the host counts no others.
  if begin + CHUNK > p.tokens || sorted[begin] != sorted[begin + CHUNK - 1u] {
    return;
  }
  let q = at % p.quads;
  var sum = vec4<f32>();
  for (var i = begin; i < begin + CHUNK; i += 4u) {
//!repeat j 4
    let d$j = x_get(d_out[order[i + $ju] * p.quads + q]);
//!end
    sum = (((sum + d0) + d1) + d2) + d3;
  }
  sums[at] = sum;
}
//!end
//!repeat e BACKWARD
@group(0) @binding(1) var<storage, read> order: array<u32>;
@group(0) @binding(2) var<storage, read> first: array<u32>;
@group(0) @binding(3) var<storage, read> d_out: array<X>;
@group(0) @binding(4) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> out: array<OUT>;

@compute @workgroup_size(ROWS * LANES)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, n) * ROWS + li / LANES;
  if row >= p.vocab {
    return;
  }
  let begin = first[row];
  let end = first[row + 1u];
  for (var block = li % LANES; block < p.quads; block += HELD * LANES) {
//!repeat i HELD
    let q$i = min(block + $iu * LANES, p.quads - 1u);
    var s$i = vec4<f32>();
//!end
    var i = begin;
    while i < end {
      if i % CHUNK == 0u && i + CHUNK <= end {
        let at = i / CHUNK * p.quads;
//!repeat i HELD
        s$i += sums[at + q$i];
//!end
        i += CHUNK;
      } else {
        let at = order[i] * p.quads;
//!repeat i HELD
        s$i += x_get(d_out[at + q$i]);
//!end
        i++;
      }
    }
//!repeat i HELD
    if block + $iu * LANES < p.quads {
      out[row * p.quads + q$i] = out_put(s$i);
    }
//!end
  }
}
//!end
