// Rows of a table by token, and the table's gradient without atomics. The variant sets one entry's name to 1.
//   forward   out[t] = table[token[t]]
//   count     of each chunk of 256 keys: hits of every digit (eight bits of the key), and each key's rank among equals
//   place     order = positions sorted by the digit, stable, after those with lower digits; sorted = their tokens
//   starts    first[v] = where token v begins in it, by bisection
//   runs      the sum of each CHUNK positions of the order that are all one token
//   backward  out[v] = sum of d_out[order[i]], first[v] <= i < first[v + 1], by chunks where they are whole
// The simple algorithm is one thread per row of the table that looks for its token and adds what it finds, one after
// another. What this adds:
//   1. The positions are sorted, eight bits of the token at a time from the lowest (a radix sort), so that every row knows
//      its own. Counts are integers, so their order does not matter.
//   2. A frequent token's positions are added in two levels.
//   3. LANES threads share a row of the table and take HELD quads at a time, and the sums of AHEAD chunks at once.

struct Embedding {
  tokens: u32,
  vocab: u32,
  quads: u32, // of one row
  shift: u32, // lowest bit of the digit
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
//!repeat e COUNT
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read_write> ranks: array<u32>;
@group(0) @binding(3) var<storage, read_write> hits: array<u32>;

var<workgroup> digits: array<vec4<u32>, 64>;
var<workgroup> tally: array<atomic<u32>, 256>;

@compute @workgroup_size(256)
fn count(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let chunk = grid_index(wg, n);
  let at = chunk * 256u + li;
  let here = at < p.tokens;
  let digit = (keys[min(at, p.tokens - 1u)] >> p.shift) & 255u;
  digits[li / 4u][li % 4u] = digit;
  atomicStore(&tally[li], 0u);
  workgroupBarrier();
  // Every position that exists has only such before it.
  var equal = vec4<u32>();
  for (var q = 0u; q < li / 4u; q++) {
    equal += select(vec4<u32>(0u), vec4<u32>(1u), digits[q] == vec4<u32>(digit));
  }
  let before = vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(li % 4u);
  equal += select(vec4<u32>(0u), vec4<u32>(1u), (digits[li / 4u] == vec4<u32>(digit)) & before);
  if here {
    ranks[at] = equal.x + equal.y + equal.z + equal.w;
    atomicAdd(&tally[digit], 1u);
  }
  workgroupBarrier();
  if chunk < div_up(p.tokens, 256u) {
    hits[chunk * 256u + li] = atomicLoad(&tally[li]);
  }
}
//!end
//!repeat e PLACE
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> ranks: array<u32>;
@group(0) @binding(3) var<storage, read> hits: array<u32>;
@group(0) @binding(4) var<storage, read_write> order: array<u32>;
@group(0) @binding(5) var<storage, read_write> sorted: array<u32>;
//!repeat j AGAIN
@group(0) @binding(6) var<storage, read> positions: array<u32>;
//!end

var<workgroup> sums: array<u32, 256>;
var<workgroup> runs16: array<u32, 16>;

@compute @workgroup_size(256)
fn place(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let chunk = grid_index(wg, n);
  let chunks = div_up(p.tokens, 256u);
  // How often digit `li` stands in the chunks before this one, and in all.
  var before = 0u;
  var all = 0u;
  for (var c = 0u; c < chunks; c += 8u) {
//!repeat i 8
    let h$i = hits[min(c + $iu, chunks - 1u) * 256u + li];
//!end
//!repeat i 8
    all += select(0u, h$i, c + $iu < chunks);
    before += select(0u, h$i, c + $iu < min(chunk, chunks));
//!end
  }
  // Digits below it come first: sixteen at a time, then the rest.
  sums[li] = all;
  workgroupBarrier();
  if li < 16u {
    var run = 0u;
    for (var i = 0u; i < 16u; i++) {
      run += sums[16u * li + i];
    }
    runs16[li] = run;
  }
  workgroupBarrier();
  for (var i = 0u; i < li / 16u; i++) {
    before += runs16[i];
  }
  for (var i = li & ~15u; i < li; i++) {
    before += sums[i];
  }
  workgroupBarrier();
  sums[li] = before;
  workgroupBarrier();
  let at = chunk * 256u + li;
  if at >= p.tokens {
    return;
  }
  let key = keys[at];
  let to = sums[(key >> p.shift) & 255u] + ranks[at];
  var position = at;
//!repeat j AGAIN
  position = positions[at];
//!end
  order[to] = position;
  sorted[to] = key;
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
        // All chunks that are whole.
        let stop = end / CHUNK;
        for (var c = i / CHUNK; c < stop; c += AHEAD) {
//!repeat j AHEAD
//!repeat i HELD
          let c$j_$i = sums[min(c + $ju, stop - 1u) * p.quads + q$i];
//!end
//!end
//!repeat j AHEAD
//!repeat i HELD
          s$i += select(vec4<f32>(0.0), c$j_$i, c + $ju < stop);
//!end
//!end
        }
        i = stop * CHUNK;
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
