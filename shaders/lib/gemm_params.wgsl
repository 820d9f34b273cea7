// The parameters of every product: register tiles, matrix units, and the sum of parts.

struct Gemm {
  m: u32,        // rows of A and out (tn: columns of A, rows of out)
  n: u32,        // columns of out
  k: u32,        // contraction (tn: rows of A and B in all groups)
  groups: u32,
  row_step: u32, // scale of out row i: row_scale[g * row_group + i * row_step]
  row_group: u32,
  col_step: u32, // scale of out column j: col_scale[g * col_group + j * col_step]
  col_group: u32,
  run: u32,      // tn: rows of a part of a group, a multiple of 64; 0: groups are not cut
  stack: u32,    // results at once, on matrix units: of weights that follow each other (nt), or of gradients (tn)
}

@group(0) @binding(0) var<uniform> p: Gemm;
