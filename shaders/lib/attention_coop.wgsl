// What attention_coop.wgsl and attention_coop_backward.wgsl share: parameters, operands, places, masks.

struct Attention {
  batch: u32,
  seq: u32,
  heads: u32,
  kv_heads: u32,
  block: u32,  // positions of a block that see each other; seq if there are no blocks
  padded: u32, // positions of a head in the operands: seq and zeros
  scale: f32,  // of the scores
}

@group(0) @binding(0) var<uniform> p: Attention;

@group(0) @binding(1) var<storage, read> q: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<f16>>;
@group(0) @binding(4) var<storage, read> docs: array<u32>;

const LOG2E = 1.4426950408889634;

const ROWS = 16u * RF;            // of a subgroup
const STEP = 16u * KF;            // positions of a step
const SPAN = ROWS * SG;           // rows of a workgroup
const PER = LANES / 16u;          // lanes of a row
const WIDE = 4u * KF + 2u;        // quads of a row in workgroup memory
const OWN = ROWS * WIDE;          // quads of a subgroup
const HQ = 4u * DF;               // quads of a head

var<workgroup> scores: array<vec4<f32>, SG * OWN>;
var<workgroup> probs: array<vec4<f16>, SG * OWN>;
var<workgroup> rows: array<f32, SG * ROWS>;

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

// The first fragment's quad of the fragments of position `i`; those of 16 positions follow each other.
fn fragment(batch: u32, head: u32, heads: u32, i: u32) -> u32 {
  return ((batch * heads + head) * p.padded + i) / 16u * (64u * DF);
}

// Quads between an operand and itself transposed.
fn transposed(heads: u32) -> u32 {
  return p.batch * heads * p.padded * HQ;
}

fn block_start(i: u32) -> u32 {
  return i - i % p.block;
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

fn four(i: u32) -> vec4<u32> {
  return vec4<u32>(i, i + 1u, i + 2u, i + 3u);
}

// Whether query `i` sees keys j to j + 3.
fn sees(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let keys = four(j);
  return keys <= vec4<u32>(i) & keys >= vec4<u32>(block_start(i)) & documents(base, j) == vec4<u32>(doc);
}

// Whether a mask may cut ROWS queries from `i` and STEP keys from `j`.
fn cut(i: u32, j: u32) -> bool {
  return DOCS == 1u || j + STEP > i + 1u || j < block_start(i + ROWS - 1u);
}
