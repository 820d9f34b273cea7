// The end of a GEMM: scales, padding, accumulation. Needs `p` (Gemm), `row_scale`, `col_scale`, `out`, SCALED, ACCUMULATE.

fn row_factor(g: u32, i: u32) -> f32 {
  return row_scale[g * p.row_group + i * p.row_step];
}

fn col_factor(g: u32, j: u32) -> vec4<f32> {
  let at = g * p.col_group;
  let last = p.n - 1u;
  return vec4<f32>(
    col_scale[at + min(j, last) * p.col_step],
    col_scale[at + min(j + 1u, last) * p.col_step],
    col_scale[at + min(j + 2u, last) * p.col_step],
    col_scale[at + min(j + 3u, last) * p.col_step],
  );
}

// Writes one quad of the result at column j: scaled, zero past the width, added to what is there if ACCUMULATE.
fn store(g: u32, i: u32, j: u32, at: u32, v: vec4<f32>) {
  var r = v;
  if SCALED == 1u {
    r = (v * row_factor(g, i)) * col_factor(g, j);
  }
  r = select(vec4<f32>(0.0), r, vec4<u32>(j, j + 1u, j + 2u, j + 3u) < vec4<u32>(p.n));
  if ACCUMULATE == 1u {
    r += out_get(out[at]);
  }
  out[at] = out_put(r);
}
