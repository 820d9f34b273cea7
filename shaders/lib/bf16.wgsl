// bfloat16: the upper half of an f32, rounded to nearest even. NaN keeps a mantissa bit.

// Bits of `v` rounded to bf16, in the low half.
fn bf16_bits(v: f32) -> u32 {
  let u = bitcast<u32>(v);
  let rounded = (u + 0x7fffu + ((u >> 16u) & 1u)) >> 16u;
  return select(rounded, (u >> 16u) | 0x40u, (u & 0x7fffffffu) > 0x7f800000u);
}

// `v` rounded to bf16, as f32.
fn bf16_round(v: f32) -> f32 {
  return bitcast<f32>(bf16_bits(v) << 16u);
}

fn bf16_round4(v: vec4<f32>) -> vec4<f32> {
  return bf16_get(bf16_put(v));
}

// One quad: two elements a word, the even one in the low half.
fn bf16_get(q: vec2<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(q.x << 16u, q.x & 0xffff0000u, q.y << 16u, q.y & 0xffff0000u));
}

fn bf16_put(v: vec4<f32>) -> vec2<u32> {
  let u = bitcast<vec4<u32>>(v);
  let rounded = (u + 0x7fffu + ((u >> vec4<u32>(16u)) & vec4<u32>(1u))) >> vec4<u32>(16u);
  let nan = (u & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
  let b = select(rounded, (u >> vec4<u32>(16u)) | vec4<u32>(0x40u), nan);
  return vec2<u32>(b.x | (b.y << 16u), b.z | (b.w << 16u));
}

// The same for quads without a NaN.
fn bf16_put_number(v: vec4<f32>) -> vec2<u32> {
  let u = bitcast<vec4<u32>>(v);
  let r = u + vec4<u32>(0x7fffu) + ((u >> vec4<u32>(16u)) & vec4<u32>(1u));
  return vec2<u32>((r.x >> 16u) | (r.y & 0xffff0000u), (r.z >> 16u) | (r.w & 0xffff0000u));
}
