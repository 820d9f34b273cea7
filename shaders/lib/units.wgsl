// Units of eight neighbouring columns: their magnitudes, their codes, and where codes go, row by row or in panels. For
// quantize_rows.wgsl, quantize_wide.wgsl and quantize_strips.wgsl, where the words are explained.

// De-scales above 2^100 (those that say "not finite" among them) take the encoder that looks at every bit.
const CAREFUL = 227u << 23u;

//!repeat w FP8
alias Unit = vec2<u32>;
//!end
//!repeat w HALF
alias Unit = vec4<u32>;
//!end

// Units of a row in one panel.
const PER_PANEL = 8u / PANELS;

// Where the codes of a unit are stored when rows are quantized. A weight's groups have panels of their own.
fn place(row: u32, unit: u32) -> u32 {
  if IN_PANELS == 0u {
    return row * div_up(p.cols, 8u) + unit;
  }
  let height = select(p.group_rows, p.rows, GROUPED == 1u);
  let panel = row / height * div_up(p.cols, 64u) * PANELS + unit / PER_PANEL;
  return (panel * height + row % height) * PER_PANEL + unit % PER_PANEL;
}

//!repeat w HALVES
// As halves, values times 2^-8 have the exponents of e4m3, below its normal range too, and seven bits more than a code: only rounding
// at bit 7 is left. One value would be rounded twice, 2^-9 (1/2 + 2^-8); a factor 1 + 2^-12 moves it off the first tie, and
// every other value back to where it was.
fn quick(q: X, factor: vec4<f32>) -> Q {
  let v = x_get(q) * factor;
  let h = vec2<u32>(pack2x16float(v.xz), pack2x16float(v.yw));
  let t = h + vec2<u32>(0x3f003fu) + ((h >> vec2<u32>(7u)) & vec2<u32>(0x10001u));
  // The high byte of each half: its sign and, one bit up, the code.
  let w = (t & vec2<u32>(0x80808080u)) | ((t << vec2<u32>(1u)) & vec2<u32>(0x7f7f7f7fu));
  return ((w.x >> 8u) & 0xff00ffu) | (w.y & 0xff00ff00u);
}

fn factors(r: vec4<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>((scale_bits(min(r, vec4<u32>(CAREFUL))) - vec4<u32>(8u << 23u)) | vec4<u32>(1u << 11u));
}
//!end
//!repeat w EXACT
fn quick(q: X, factor: vec4<f32>) -> Q {
  return encode(q, bitcast<vec4<u32>>(factor), vec4<u32>());
}

fn factors(r: vec4<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(scale_bits(min(r, vec4<u32>(CAREFUL))));
}
//!end

fn quick_unit(v: vec4<u32>, a: vec4<f32>, b: vec4<f32>) -> Unit {
  return Unit(quick(v.xy, a), quick(v.zw, b));
}

// For any de-scale; `unit` says which elements exist.
fn careful_unit(v: vec4<u32>, unit: u32, a: vec4<u32>, b: vec4<u32>) -> Unit {
  let column = vec4<u32>(8u * unit) + vec4<u32>(0u, 1u, 2u, 3u);
  let ra = select(vec4<u32>(FLOOR), a, column < vec4<u32>(p.cols));
  let rb = select(vec4<u32>(FLOOR), b, column + vec4<u32>(4u) < vec4<u32>(p.cols));
  return Unit(encode(v.xy, scale_bits(ra), ra), encode(v.zw, scale_bits(rb), rb));
}

// Magnitudes of the even elements of a unit, and of the odd ones, above bit 17; what is below does not matter.
fn evens(v: vec4<u32>) -> vec4<u32> {
  return v << vec4<u32>(17u);
}

fn odds(v: vec4<u32>) -> vec4<u32> {
  return v << vec4<u32>(1u);
}

// Both as they lie in x.
fn together(even: vec4<u32>, odd: vec4<u32>) -> vec4<u32> {
  return (even >> vec4<u32>(17u)) | ((odd >> vec4<u32>(1u)) & vec4<u32>(0x7fff0000u));
}

fn largest(v: vec4<u32>) -> u32 {
  return max(max(v.x, v.y), max(v.z, v.w));
}

var<workgroup> merged: array<vec4<u32>, LANES>;

// Tops over lanes that are `step` apart: for lane li < step those of its unit.
fn merge(li: u32, step: u32, even: vec4<u32>, odd: vec4<u32>) -> vec4<u32> {
  workgroupBarrier();
  merged[li] = together(even, odd);
  workgroupBarrier();
  var a = vec4<u32>();
  var b = vec4<u32>();
  for (var i = li % step; i < LANES; i += step) {
    a = max(a, evens(merged[i]));
    b = max(b, odds(merged[i]));
  }
  return together(a, b);
}
