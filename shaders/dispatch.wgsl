// From tokens to experts and back. Slot i = t * K + k is the k-th expert of token t; sorted by expert, stable, the R
// slots are the routed rows: order[row] = slot, slot_row[slot] = row. The variant sets the name of one entry to 1.
//   count     histogram of each chunk of slots
//   scan      counts and offsets of the experts; each chunk's histogram becomes its exclusive sum over the chunks
//   place     order and its inverse
//   gather    rows from tokens, times the slot's weight
//   combine   base + sum over k of weight * row, in k order: the transpose of gather, without atomics
//   products  dot product of each slot's token and row: the weights' gradient
// count and place are one thread per chunk and expert, which looks at all ids of its chunk.

struct Dispatch {
  slots: u32,
  experts: u32,
  top_k: u32,
  cols: u32,  // of one row
  chunk: u32, // slots of one chunk, a multiple of 4
}

@group(0) @binding(0) var<uniform> p: Dispatch;

// Zero past the width, whatever a NaN weight made of the padding.
fn padded(v: vec4<f32>, q: u32) -> vec4<f32> {
  return select(vec4<f32>(0.0), v, vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.cols));
}

//!repeat i COUNT
@group(0) @binding(1) var<storage, read> ids: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> histogram: array<u32>;

@compute @workgroup_size(64)
fn count(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 64u + li;
  let first = at / p.experts * p.chunk;
  if first >= p.slots {
    return;
  }
  let expert = at % p.experts;
  let end = min(first + p.chunk, p.slots);
  var hits = vec4<u32>();
  for (var i = first; i < end; i += 4u) {
    let inside = vec4<u32>(i) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(end);
    let hit = (ids[i / 4u] == vec4<u32>(expert)) & inside;
    hits += select(vec4<u32>(0u), vec4<u32>(1u), hit);
  }
  histogram[at] = hits.x + hits.y + hits.z + hits.w;
}
//!end
//!repeat i SCAN
@group(0) @binding(1) var<storage, read_write> histogram: array<u32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;
@group(0) @binding(3) var<storage, read_write> offs: array<u32>;

// One workgroup.
@compute @workgroup_size(WG)
fn scan(@builtin(local_invocation_index) li: u32) {
  let end = div_up(p.slots, p.chunk) * p.experts;
  for (var e = li; e < p.experts; e += WG) {
    var sum = 0u;
    for (var c = e; c < end; c += p.experts) {
      let here = histogram[c];
      histogram[c] = sum;
      sum += here;
    }
    counts[e] = sum;
  }
  storageBarrier();
  for (var e = li; e < p.experts; e += WG) {
    var rows = 0u;
    for (var before = 0u; before <= e; before++) {
      rows += counts[before];
    }
    offs[e] = rows;
  }
}
//!end
//!repeat i PLACE
@group(0) @binding(1) var<storage, read> ids: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> histogram: array<u32>;
@group(0) @binding(3) var<storage, read> offs: array<u32>;
@group(0) @binding(4) var<storage, read_write> order: array<u32>;
@group(0) @binding(5) var<storage, read_write> slot_row: array<u32>;

@compute @workgroup_size(64)
fn place(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 64u + li;
  let first = at / p.experts * p.chunk;
  if first >= p.slots {
    return;
  }
  let expert = at % p.experts;
  let end = min(first + p.chunk, p.slots);
  var row = histogram[at];
  if expert > 0u {
    row += offs[expert - 1u];
  }
  for (var i = first; i < end; i += 4u) {
    let hit = ids[i / 4u] == vec4<u32>(expert);
//!repeat c 4
    if hit[$c] && i + $cu < end {
      order[row] = i + $cu;
      slot_row[i + $cu] = row;
      row++;
    }
//!end
  }
}
//!end
//!repeat i GATHER
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;
//!repeat j WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//!end

@compute @workgroup_size(256)
fn gather(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  let quads = div_up(p.cols, 4u);
  if at >= p.slots * quads {
    return;
  }
  let slot = order[at / quads];
  let q = at % quads;
  var v = x_get(x[slot / p.top_k * quads + q]);
//!repeat j WEIGHTED
  v = padded(v * weights[slot], q);
//!end
  out[at] = x_put(v);
}
//!end
//!repeat i COMBINE
@group(0) @binding(1) var<storage, read> rows: array<X>;
@group(0) @binding(2) var<storage, read> slot_row: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;
//!repeat j WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//!end
//!repeat j BASED
@group(0) @binding(4 + WEIGHTED) var<storage, read> base: array<X>;
//!end

@compute @workgroup_size(256)
fn combine(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let at = grid_index(wg, n) * 256u + li;
  let quads = div_up(p.cols, 4u);
  if at >= p.slots / p.top_k * quads {
    return;
  }
  let q = at % quads;
  var sum = vec4<f32>();
//!repeat j BASED
  sum = x_get(base[at]);
//!end
  let first = at / quads * p.top_k;
  for (var slot = first; slot < first + p.top_k; slot++) {
    var v = x_get(rows[slot_row[slot] * quads + q]);
//!repeat j WEIGHTED
    v *= weights[slot];
//!end
    sum += v;
  }
  out[at] = x_put(padded(sum, q));
}
//!end
//!repeat i PRODUCTS
@group(0) @binding(1) var<storage, read> tokens: array<X>;
@group(0) @binding(2) var<storage, read> rows: array<Y>;
@group(0) @binding(3) var<storage, read> slot_row: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(WG)
fn products(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.cols, 4u);
  let own = grid_index(wg, n) * (WG / LANES) + li / LANES;
  let slot = min(own, p.slots - 1u);
  let token = slot / p.top_k * quads;
  let row = slot_row[slot] * quads;
  var sum = vec4<f32>();
  for (var q = li % LANES; q < quads; q += LANES) {
    sum += x_get(tokens[token + q]) * y_get(rows[row + q]);
  }
  let all = lanes_sum(li, (sum.x + sum.y) + (sum.z + sum.w));
  if own < p.slots && li % LANES == 0u {
    out[slot] = all;
  }
}
//!end
