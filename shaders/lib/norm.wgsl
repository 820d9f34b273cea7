// What the norm's own kernels share with the quantizer of rows that are normed: both give the same bits. `p` has cols and eps.

fn sum4(v: vec4<f32>) -> f32 {
  return (v.x + v.y) + (v.z + v.w);
}

// rstd of a row with this sum of squares.
fn norm_factor(squares: f32) -> f32 {
  return inverseSqrt(squares / f32(p.cols) + p.eps);
}

// Zero past the width, whatever a NaN in the row made of the padding.
fn inside(v: vec4<f32>, quad: u32) -> vec4<f32> {
  return select(vec4<f32>(0.0), v, vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.cols));
}

// Quad `quad` of a row.
fn normed(v: vec4<f32>, rstd: f32, weight: vec4<f32>, quad: u32) -> vec4<f32> {
  return inside(v * rstd * weight, quad);
}
