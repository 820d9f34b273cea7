// What the quantizers share: de-scales r = 1/s from the bits of the largest magnitude ("top"), and codes of single quads. X is
// what is quantized, Q its codes; TOP, LOWEST and whether codes are FP8 or HALF come with the dtype of Q.

const INF = 0x7f800000u;
// r of a row with an infinity; one more for a NaN.
const POISON = 0x7fc00000u;
// Bits of the smallest r, also that of a row of zeros: log2 s <= TOP + 127 - LOWEST, LOWEST is 87 for fp8.
const FLOOR = (LOWEST - TOP) << 23u;

// Bits of r = 1/s for s the largest power of two with top * s <= F. With top = m * 2^e: log2 s = TOP - e, one less if
// m > 1.75, at most that of FLOOR.
fn descale_bits(top: u32) -> u32 {
  if top >= INF {
    return select(POISON, POISON + 1u, top > INF);
  }
  let past = select(0u, 1u, (top & 0x7fffffu) > 0x600000u);
  return (max((top >> 23u) + past, LOWEST) - TOP) << 23u;
}

// Bits of s = 1/r, r a power of two.
fn scale_bits(r: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(0x7f000000u) - r;
}

//!repeat w FP8
fn pack(c: vec4<u32>) -> u32 {
  return c.x | (c.y << 8u) | (c.z << 16u) | (c.w << 24u);
}

// Codes of one quad under the scales with bits s. Where r says that something is not finite, numbers become zero (any
// number times s = 0) and the rest NaN; a NaN makes all of them NaN.
fn encode(q: X, s: vec4<u32>, r: vec4<u32>) -> Q {
  let u = bitcast<vec4<u32>>(x_get(q));
  let a = u & vec4<u32>(0x7fffffffu);
  let sign = (u >> vec4<u32>(24u)) & vec4<u32>(0x80u);
  let poisoned = r >= vec4<u32>(POISON);
  var word = q_put(bitcast<vec4<f32>>(a) * bitcast<vec4<f32>>(s)) | pack(sign);
  if any(poisoned) {
    let nan = (a >= vec4<u32>(INF)) | (r > vec4<u32>(POISON));
    let bad = select(sign, vec4<u32>(0x7fu), nan);
    let keep = pack(select(vec4<u32>(0xffu), vec4<u32>(0u), poisoned));
    word = (word & keep) | (pack(bad) & ~keep);
  }
  return word;
}
//!end
//!repeat w HALF
// Halves of one quad: exact down to 2^-29 of the row's largest magnitude. What is poisoned is zero, its r is NaN.
fn encode(q: X, s: vec4<u32>, r: vec4<u32>) -> Q {
  return q_put(select(x_get(q) * bitcast<vec4<f32>>(s), vec4<f32>(0.0), r >= vec4<u32>(POISON)));
}
//!end

// Up to `height` rows of one group: chunk `chunk` of ragged groups when GROUPED, else of groups of `group_rows` rows each. Past the
// last group for rows of none.
fn chunk_rows(chunk: u32, height: u32, groups: u32, group_rows: u32, m: u32) -> Rows {
  var rows: Rows;
  if GROUPED == 1u {
    rows = tile_rows(chunk, height, groups, m);
  } else {
    let chunks = max(div_up(group_rows, height), 1u);
    let g = chunk / chunks;
    rows = Rows(g, g * group_rows + chunk % chunks * height, (g + 1u) * group_rows);
  }
  rows.end = min(rows.end, rows.first + height);
  return rows;
}
