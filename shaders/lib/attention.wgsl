// What every kernel of attention has: parameters, and what stands for no score.

struct Attention {
  batch: u32,
  seq: u32,
  heads: u32,
  kv_heads: u32,
  block: u32,  // positions of a block that see each other; seq if there are no blocks
  quads: u32,  // of a head, for loops that a compiler that knew their length would write out
  scale: f32,  // of the scores
  padded: u32, // positions of a head in the operands of matrix units: seq and zeros
}

@group(0) @binding(0) var<uniform> p: Attention;

// Below every score; not infinity, which shaders may treat as they like.
const LOWEST = -1e30;

fn block_start(i: u32) -> u32 {
  return i - i % p.block;
}
