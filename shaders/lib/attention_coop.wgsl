// What attention_coop.wgsl and attention_coop_backward.wgsl share: parameters, tiles, places, masks.

struct Attention {
  batch: u32,
  seq: u32,
  heads: u32,
  kv_heads: u32,
  block: u32,  // positions of a block that see each other; seq if there are no blocks
  padded: u32, // positions of a head in the operands: seq and zeros
  scale: f32,  // of the scores
}

// 16 bytes: eight halves, stored at once.
struct H8 { x: vec4<f16>, y: vec4<f16> }

@group(0) @binding(0) var<uniform> p: Attention;
@group(0) @binding(4) var<storage, read> docs: array<u32>;

const LOG2E = 1.4426950408889634;

const ROWS = 16u * RF;            // rows (queries; by keys: keys) of a subgroup
const SPAN = ROWS * SG;           // of a workgroup
const THREADS = SG * LANES;
const ROUND = 16u;                // positions of a round
const STEP = ROUND * ROUNDS;      // of a step
const PER = LANES / 16u;          // lanes of a row
const HQ = 4u * DF;               // quads of a head
const H16 = 2u * DF;              // 16 bytes of a head
const TW = H16 + 1u;              // of a row of a tile: rows of an odd number meet in no bank
const CHUNKS = STEP * H16;        // of a tile
const SW = 4u + SCORE_PAD;        // quads of a row of scores
const PW = 4u + PROB_PAD;         // quads of a row of probabilities
const NOTE = 4u;                  // the quad of a row of scores for what belongs to the row

var<workgroup> ta: array<H8, STEP * TW>;
var<workgroup> tb: array<H8, STEP * TW>;
var<workgroup> scores: array<vec4<f32>, SG * 16u * SW>;
var<workgroup> probs: array<vec4<f16>, SG * 16u * PW>;

fn eight(v: vec4<u32>) -> H8 {
  return H8(
    vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
    vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
}

// What a workgroup does: positions `first` to first + SPAN, of one head of one sequence.
struct Place {
  batch: u32,
  head: u32,
  first: u32,
}

fn place(n: u32, heads: u32) -> Place {
  return Place((n / heads) % p.batch, n % heads, n / (heads * p.batch) * SPAN);
}

fn workgroups(heads: u32) -> u32 {
  return div_up(p.seq, SPAN) * p.batch * heads;
}

// The row of position `i` among those of an operand.
fn operand_row(batch: u32, head: u32, heads: u32, i: u32) -> u32 {
  return (batch * heads + head) * p.padded + i;
}

// Thread-chunk `x` of a tile: where it goes.
fn tile_place(x: u32) -> u32 {
  return x / H16 * TW + x % H16;
}

fn block_start(i: u32) -> u32 {
  return i - i % p.block;
}

fn four(i: u32) -> vec4<u32> {
  return vec4<u32>(i, i + 1u, i + 2u, i + 3u);
}

fn total(v: vec4<f32>) -> f32 {
  return dot(v, vec4<f32>(1.0));
}

fn document(base: u32, i: u32) -> u32 {
  if DOCS == 0u {
    return 0u;
  }
  return docs[base + min(i, p.seq - 1u)];
}

fn documents(base: u32, i: u32) -> vec4<u32> {
  return vec4<u32>(document(base, i), document(base, i + 1u), document(base, i + 2u), document(base, i + 3u));
}

// Whether query `i` sees keys j to j + 3.
fn sees(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let keys = four(j);
  return keys <= vec4<u32>(i) & keys >= vec4<u32>(block_start(i)) & documents(base, j) == vec4<u32>(doc);
}

// Whether queries i to i + 3 see key `j`.
fn seen(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let queries = four(i);
  let until = block_start(j) + p.block;
  return queries >= vec4<u32>(j) & queries < vec4<u32>(until) & documents(base, i) == vec4<u32>(doc);
}

// Whether a mask may cut 16 queries from `i` and ROUND keys from `j`.
fn cut(i: u32, j: u32) -> bool {
  return DOCS == 1u || j + ROUND > i + 1u || j < block_start(i + 15u);
}

// The same for 16 keys from `j` and ROUND queries from `i`.
fn cut_by_key(j: u32, i: u32) -> bool {
  return DOCS == 1u || i + 1u < j + 16u || i + ROUND > block_start(j) + p.block;
}
