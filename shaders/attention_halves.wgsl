// What attention_coop.wgsl reads: q, k, v and d_out as f16, each scaled by one power of two, head by head; and the rows'
// statistics for backward.
//   tops        largest finite magnitude of each tensor, PARTS workgroups each
//   halves      all tensors in one launch, EACH quads a thread; every workgroup makes r = 1/s of its tensor from the tops, while its
//               quads are under way, and the first leaves it
//   statistics  a thread a position and head
// Scaling: the largest magnitude becomes 2^15 to 1.75 * 2^15. So bf16 values, whose 8 bits fit into 11, stay exact down to 2^-29 of
// their tensor's largest and are off by 2^-40 of it below: a product of two such is off by less than the roundings of its f32 sum.
// A NaN or an infinity is no magnitude and stays what it is, so that it spoils what it takes part in.
// The halves lie sequence by sequence, head by head, position by position; positions from `seq` to `padded` are zero.
// d_s = p (d_p - D) has magnitude at most 2 HD (largest d_out) (largest v), that is less than 2 HD 2^31.7 in scaled units: divided by
// 2^FALL >= HD 2^17 it fits into f16. What is lost to f16's last bit, 2^-25 of 2^16, is HD 2^-40 of the product of the largest
// d_out and v, while bf16 results may be off by 2^-9: a d_s would have to be 2^-30 of its bound, everywhere, to matter.

struct Tops {
  q: u32, // quads of each
  k: u32,
  v: u32,
}

struct Halves {
  batch: u32,
  seq: u32,
  heads: u32, // of q and d_out
  kv_heads: u32,
  padded: u32,
  first: u32, // 0: q, k and v; 3: d_out, bound as q
}

@group(0) @binding(0) var<uniform> quads: Tops;
@group(0) @binding(0) var<uniform> p: Halves;

@group(0) @binding(1) var<storage, read> q: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> parts: array<u32>;

@group(0) @binding(4) var<storage, read> given_parts: array<u32>;
@group(0) @binding(5) var<storage, read_write> codes: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> scales_out: array<f32>;

@group(0) @binding(1) var<storage, read> d_out: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<f32>;
@group(0) @binding(3) var<storage, read> out: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read> lse: array<f32>;
@group(0) @binding(5) var<storage, read_write> stats: array<f32>;

const PARTS = 256u;
// Quads of a workgroup of `halves`.
const CHUNK = EACH * 256u;
// Statistics of rows that are padding: less than any score by so much that its probability is 0.
const HUGE = 1e30;
const LOG2E = 1.4426950408889634;

var<workgroup> top: array<u32, 256>;

// The largest finite magnitude in both words, as the upper half of an f32.
fn magnitude(a: vec2<u32>) -> u32 {
  let m = vec4<u32>(a, a >> vec2<u32>(16u)) & vec4<u32>(0x7fffu);
  let finite = select(vec4<u32>(0u), m, m < vec4<u32>(0x7f80u));
  return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

// The largest value of all threads, for all of them.
fn reduce(mine: u32, li: u32) -> u32 {
  workgroupBarrier();
  top[li] = mine;
  workgroupBarrier();
  for (var width = 128u; width > 0u; width /= 2u) {
    if li < width {
      top[li] = max(top[li], top[li + width]);
    }
    workgroupBarrier();
  }
  return top[0];
}

@compute @workgroup_size(256)
fn tops(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg);
  let first = n % PARTS * 256u + li;
  var most = 0u;
  if n / PARTS == 0u {
    for (var i = first; i < quads.q; i += PARTS * 256u) {
      most = max(most, magnitude(q[i]));
    }
  } else if n / PARTS == 1u {
    for (var i = first; i < quads.k; i += PARTS * 256u) {
      most = max(most, magnitude(k[i]));
    }
  } else {
    for (var i = first; i < quads.v; i += PARTS * 256u) {
      most = max(most, magnitude(v[i]));
    }
  }
  let all = reduce(most, li);
  if li == 0u {
    parts[n] = all;
  }
}

// r = 2^(e - 15) for a largest magnitude of m * 2^e, one more if m > 1.75; of zeros and the like 2^-110.
fn scale_of(most: u32) -> u32 {
  let past = select(0u, 1u, (most & 0x7fu) > 0x60u);
  return (max((most >> 7u) + past, 32u) - 15u) << 23u;
}

// Which tensor a workgroup has, from `first` on, and where in it.
struct Part {
  which: u32,
  heads: u32,
  chunk: u32,
  to: u32, // where its halves begin
}

fn part_of(n: u32) -> Part {
  let rows = p.batch * p.padded * HQ;
  let of_q = div_up(rows * p.heads, CHUNK);
  if p.first > 0u || n < of_q {
    return Part(0u, p.heads, n, 0u);
  }
  let of_k = div_up(rows * p.kv_heads, CHUNK);
  let which = 1u + (n - of_q) / of_k;
  return Part(which, p.kv_heads, (n - of_q) % of_k, rows * (p.heads + (which - 1u) * p.kv_heads));
}

@compute @workgroup_size(256)
fn halves(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let part = part_of(grid_index(wg, nwg));
  let width = part.heads * HQ;
  // None where the grid is past the last tensor.
  let end = select(0u, p.batch * p.padded * width, part.which < 3u);
//!repeat e EACH
  let n$e = part.chunk * CHUNK + $eu * 256u + li;
  let c$e = n$e % width;
  let i$e = n$e / width % p.padded;
  let batch$e = n$e / width / p.padded;
  var a$e = vec2<u32>();
  if n$e < end && i$e < p.seq {
    let at = (batch$e * p.seq + i$e) * width + c$e;
    if part.which == 0u {
      a$e = q[at];
    } else if part.which == 1u {
      a$e = k[at];
    } else {
      a$e = v[at];
    }
  }
//!end
  let r = scale_of(reduce(given_parts[min(part.which, 2u) * PARTS + li], li));
  if part.chunk == 0u && li == 0u && end > 0u {
    scales_out[p.first + part.which] = bitcast<f32>(r);
  }
  let s = bitcast<f32>(0x7f000000u - r);
//!repeat e EACH
  if n$e < end {
    let h = bf16_get(a$e) * s;
    let to = ((batch$e * part.heads + c$e / HQ) * p.padded + i$e) * HQ + c$e % HQ;
    codes[part.to + to] = vec2<u32>(pack2x16float(h.xy), pack2x16float(h.zw));
  }
//!end
}

// lse as a logarithm to base 2, less 15 (so that probabilities come out times 2^15), then D = sum(d_out * out) in the units of
// attention_coop's d_p, then r of q, k, v, d_out.
@compute @workgroup_size(256)
fn statistics(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let n = grid_index(wg, nwg) * 256u + li;
  let pairs = p.batch * p.padded * p.heads;
  if n < 4u {
    stats[2u * pairs + n] = scales[n];
  }
  if n >= pairs {
    return;
  }
  let head = n % p.heads;
  let i = n / p.heads % p.padded;
  let batch = n / p.heads / p.padded;
  let to = (batch * p.heads + head) * p.padded + i;
  if i >= p.seq {
    stats[to] = HUGE;
    stats[pairs + to] = 0.0;
    return;
  }
  let pair = (batch * p.seq + i) * p.heads + head;
  var sum = 0.0;
  for (var c = 0u; c < HQ; c++) {
    sum += dot(bf16_get(d_out[pair * HQ + c]), bf16_get(out[pair * HQ + c]));
  }
  stats[to] = lse[pair] * LOG2E - 15.0;
  // By one power of two after the other: of zeros both are large.
  stats[pairs + to] = sum / scales[3] / (scales[2] * f32(1u << FALL) * 32768.0);
}
