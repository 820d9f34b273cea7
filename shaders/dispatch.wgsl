// From tokens to experts and back. Slot i = t * K + k is the k-th expert of token t; sorted by expert, stable, the R
// slots are the routed rows: order[row] = slot, slot_row[slot] = row. The variant sets the name of one entry to 1.
//   count     histogram of each chunk of slots
//   scan      counts and offsets of the experts; each chunk's histogram becomes its exclusive sum over the chunks
//   place     order and its inverse
//   gather    rows from tokens, times the slot's weight
//   scatter   the same by token, which is read once for all of its slots
//   combine   base + sum over k of weight * row, in k order: the transpose of gather, without atomics
//   products  dot product of each slot's token and row: the weights' gradient; combine has it too with DOTS
// count and place are one thread per chunk and expert, which looks at all ids of its chunk. In gather, scatter and combine LANES
// threads share a row and take HELD quads at a time, so that several loads are on their way; DOTS wants the whole row at once.

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

//!repeat e COUNT
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
//!repeat e SCAN
@group(0) @binding(1) var<storage, read_write> histogram: array<u32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;
@group(0) @binding(3) var<storage, read_write> offs: array<u32>;

// One workgroup.
var<workgroup> run_sums: array<u32, WG>;

// One workgroup, LANES threads an expert: each sums a run of chunks, then knows the runs before its own.
@compute @workgroup_size(WG)
fn scan(@builtin(local_invocation_index) li: u32) {
  let chunks = div_up(p.slots, p.chunk);
  let run = div_up(chunks, LANES);
  let lane = li % LANES;
  for (var block = 0u; block < p.experts; block += WG / LANES) {
    let e = block + li / LANES;
    let first = min(lane * run, chunks);
    let end = select(first, min(first + run, chunks), e < p.experts);
    var own = 0u;
    for (var c = first; c < end; c++) {
      own += histogram[c * p.experts + e];
    }
    workgroupBarrier();
    run_sums[li] = own;
    workgroupBarrier();
    var sum = 0u;
    for (var before = li - lane; before < li; before++) {
      sum += run_sums[before];
    }
    for (var c = first; c < end; c++) {
      let here = histogram[c * p.experts + e];
      histogram[c * p.experts + e] = sum;
      sum += here;
    }
    if lane == LANES - 1u && e < p.experts {
      counts[e] = sum;
    }
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
//!repeat e PLACE
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
//!repeat e GATHER
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;
//!repeat j WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//!end

@compute @workgroup_size(ROWS * LANES)
fn gather(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, n) * ROWS + li / LANES;
  if row >= p.slots {
    return;
  }
  let quads = div_up(p.cols, 4u);
  let slot = order[row];
  let token = slot / p.top_k * quads;
  for (var first = li % LANES; first < quads; first += HELD * LANES) {
//!repeat i HELD
    let x$i = x[token + min(first + $iu * LANES, quads - 1u)];
//!end
//!repeat i HELD
    let q$i = first + $iu * LANES;
    if q$i < quads {
      var v = x_get(x$i);
//!repeat j WEIGHTED
      v = padded(v * weights[slot], q$i);
//!end
      out[row * quads + q$i] = x_put(v);
    }
//!end
  }
}
//!end
//!repeat e SCATTER
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> slot_row: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;
//!repeat j WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//!end

@compute @workgroup_size(ROWS * LANES)
fn scatter(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let token = grid_index(wg, n) * ROWS + li / LANES;
  if token >= p.slots / p.top_k {
    return;
  }
  let quads = div_up(p.cols, 4u);
  for (var first = li % LANES; first < quads; first += HELD * LANES) {
//!repeat i HELD
    let x$i = x[token * quads + min(first + $iu * LANES, quads - 1u)];
//!end
    for (var slot = token * p.top_k; slot < (token + 1u) * p.top_k; slot++) {
      let row = slot_row[slot] * quads;
//!repeat i HELD
      let q$i = first + $iu * LANES;
      if q$i < quads {
        var v = x_get(x$i);
//!repeat j WEIGHTED
        v = padded(v * weights[slot], q$i);
//!end
        out[row + q$i] = x_put(v);
      }
//!end
    }
  }
}
//!end
//!repeat e COMBINE
@group(0) @binding(1) var<storage, read> rows: array<X>;
@group(0) @binding(2) var<storage, read> slot_row: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<X>;
//!repeat j WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//!end
//!repeat j BASED
@group(0) @binding(4 + WEIGHTED) var<storage, read> base: array<X>;
//!end
//!repeat j DOTS
@group(0) @binding(4 + WEIGHTED + BASED) var<storage, read> tokens: array<Y>;
@group(0) @binding(5 + WEIGHTED + BASED) var<storage, read_write> dots: array<f32>;
//!end

@compute @workgroup_size(WG)
fn combine(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.cols, 4u);
  let tokens_all = p.slots / p.top_k;
  let own = grid_index(wg, n) * ROWS + li / LANES;
  let here = own < tokens_all;
  let token = min(own, tokens_all - 1u); // tokens past the end only take part in the barriers
  let lane = li % LANES;
  for (var block = 0u; block < quads; block += HELD * LANES) {
    let first = block + lane;
//!repeat i HELD
    let q$i = min(first + $iu * LANES, quads - 1u);
    var s$i = vec4<f32>();
//!repeat j BASED
    s$i = x_get(base[token * quads + q$i]);
//!end
//!repeat j DOTS
    let t$i = y_get(tokens[token * quads + q$i]);
//!end
//!end
    for (var k = 0u; k < p.top_k; k++) {
      let slot = token * p.top_k + k;
      let row = slot_row[slot] * quads;
      var products = vec4<f32>();
//!repeat i HELD
      let r$i = rows[row + q$i];
//!end
//!repeat i HELD
      let v$i = x_get(r$i);
//!repeat j DOTS
      products += select(vec4<f32>(0.0), v$i * t$i, first + $iu * LANES < quads);
//!end
//!repeat j WEIGHTED
      s$i += v$i * weights[slot];
//!end
//!repeat j PLAIN
      s$i += v$i;
//!end
//!end
//!repeat j DOTS
      let all = lanes_sum(li, (products.x + products.y) + (products.z + products.w));
      if here && lane == 0u {
        dots[slot] = all;
      }
//!end
    }
//!repeat i HELD
    if here && first + $iu * LANES < quads {
      out[token * quads + q$i] = x_put(padded(s$i, q$i));
    }
//!end
  }
}
//!end
//!repeat e PRODUCTS
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
