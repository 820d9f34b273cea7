// e4m3fn and e5m2 in integers only, so that no driver's fast-math or denormal flushing can change a bit.
// Formats: OCP 8-bit floating point specification 1.0. Encoders clamp to the largest finite value first.

// Code of `v` (round to nearest even, saturating at 448; NaN -> 0x7f), in the low byte.
fn e4m3_encode(v: f32) -> u32 {
  let u = bitcast<u32>(v);
  let a = u & 0x7fffffffu;
  let sign = (u >> 24u) & 0x80u;
  let normal = min(((a + 0x7ffffu + ((a >> 20u) & 1u)) >> 20u) - 960u, 0x7eu);
  // Below 2^-6 a code counts steps of 2^-9: shift the 24-bit mantissa right, rounding half to even.
  let shift = min(141u - min(a >> 23u, 120u), 26u);
  let m = (a & 0x7fffffu) | 0x800000u;
  let tiny = (m + (1u << (shift - 1u)) - 1u + ((m >> shift) & 1u)) >> shift;
  let code = select(select(tiny, 0u, shift >= 26u), normal, a >= 0x3c800000u);
  return select(sign | code, 0x7fu, a > 0x7f800000u);
}

// Value of the code in the low byte; 0x7f and 0xff are NaN.
fn e4m3_decode(c: u32) -> f32 {
  let e = (c >> 3u) & 15u;
  let m = c & 7u;
  let sign = (c & 0x80u) << 24u;
  let normal = bitcast<f32>(sign | ((e + 120u) << 23u) | (m << 20u));
  let tiny = select(f32(m), -f32(m), sign != 0u) * 0.001953125;
  let nan = bitcast<f32>(0x7fc00000u | (c & 0u));
  return select(select(normal, tiny, e == 0u), nan, (c & 0x7fu) == 0x7fu);
}

// Code of `v` (round to nearest even, saturating at 57344; NaN -> 0x7f), in the low byte.
fn e5m2_encode(v: f32) -> u32 {
  let u = bitcast<u32>(v);
  let a = u & 0x7fffffffu;
  let sign = (u >> 24u) & 0x80u;
  let normal = min(((a + 0xfffffu + ((a >> 21u) & 1u)) >> 21u) - 448u, 0x7bu);
  // Below 2^-14 a code counts steps of 2^-16.
  let shift = min(134u - min(a >> 23u, 112u), 26u);
  let m = (a & 0x7fffffu) | 0x800000u;
  let tiny = (m + (1u << (shift - 1u)) - 1u + ((m >> shift) & 1u)) >> shift;
  let code = select(select(tiny, 0u, shift >= 26u), normal, a >= 0x38800000u);
  return select(sign | code, 0x7fu, a > 0x7f800000u);
}

// Value of the code in the low byte; 0x7c is infinity, above it NaN.
fn e5m2_decode(c: u32) -> f32 {
  let e = (c >> 2u) & 31u;
  let m = c & 3u;
  let sign = (c & 0x80u) << 24u;
  let normal = bitcast<f32>(sign | ((e + 112u) << 23u) | (m << 21u));
  let tiny = select(f32(m), -f32(m), sign != 0u) * 0.0000152587890625;
  let special = bitcast<f32>(sign | select(0x7f800000u, 0x7fc00000u, m != 0u));
  return select(select(normal, tiny, e == 0u), special, e == 31u);
}

// One quad, element 0 in the low byte: the decoders above on four codes at once.
fn e4m3_get(q: u32) -> vec4<f32> {
  let c = (vec4<u32>(q) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
  let a = c & vec4<u32>(0x7fu);
  let normal = bitcast<vec4<f32>>((a << vec4<u32>(20u)) + vec4<u32>(0x3c000000u));
  // Exponent 0: the line above gives 2^-7 + m * 2^-10 where m * 2^-9 is meant.
  let value = select(normal, 2.0 * normal - 0.015625, a < vec4<u32>(8u));
  let bits = bitcast<vec4<u32>>(value) | ((c & vec4<u32>(0x80u)) << vec4<u32>(24u));
  return bitcast<vec4<f32>>(select(bits, vec4<u32>(0x7fc00000u), a == vec4<u32>(0x7fu)));
}

fn e4m3_put(v: vec4<f32>) -> u32 {
  return e4m3_encode(v.x) | (e4m3_encode(v.y) << 8u) | (e4m3_encode(v.z) << 16u) | (e4m3_encode(v.w) << 24u);
}

fn e5m2_get(q: u32) -> vec4<f32> {
  return vec4<f32>(e5m2_decode(q), e5m2_decode(q >> 8u), e5m2_decode(q >> 16u), e5m2_decode(q >> 24u));
}

fn e5m2_put(v: vec4<f32>) -> u32 {
  return e5m2_encode(v.x) | (e5m2_encode(v.y) << 8u) | (e5m2_encode(v.z) << 16u) | (e5m2_encode(v.w) << 24u);
}
