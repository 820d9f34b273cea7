// The parts of the GEMM on matrix units: decoding, which tile a workgroup computes, and the way out. Needs the bindings,
// constants and workgroup memory of gemm_coop.wgsl, where the words are explained.

// Four codes of e4m3 as f16, each / 256, in the order 0 2 1 3. NaN codes give 480: the quantizer marks their scale.
fn e4m3_halves(w: u32) -> vec4<f16> {
  let u = w << 8u;
  let lo = (u & 0x80008000u) | ((u >> 1u) & 0x3f803f80u);
  let hi = (w & 0x80008000u) | ((w >> 1u) & 0x3f803f80u);
  return vec4<f16>(vec2<f16>(unpack2x16float(lo)), vec2<f16>(unpack2x16float(hi)));
}

// Four codes of e5m2 as f16, in the same order: the upper bytes of halves.
fn e5m2_halves(w: u32) -> vec4<f16> {
  return vec4<f16>(
    vec2<f16>(unpack2x16float((w << 8u) & 0xff00ff00u)), vec2<f16>(unpack2x16float(w & 0xff00ff00u)));
}

// Eight values of each operand: codes of half `h` of 16 bytes, or all 8 halves.
fn b_eight(v: vec4<u32>, h: u32) -> H8 {
  if F16 == 1u {
    return $H8_PUT(
      vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
      vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
  }
  if h == 0u {
    return $H8_PUT(e4m3_halves(v.x), e4m3_halves(v.y));
  }
  return $H8_PUT(e4m3_halves(v.z), e4m3_halves(v.w));
}

fn a_eight(v: vec4<u32>, h: u32) -> H8 {
  if A_E5M2 == 0u {
    return b_eight(v, h);
  }
  if h == 0u {
    return $H8_PUT(e5m2_halves(v.x), e5m2_halves(v.y));
  }
  return $H8_PUT(e5m2_halves(v.z), e5m2_halves(v.w));
}

// Row of the tile and 16-byte half of it that thread-chunk `x` (of 2 TILE) loads. Rows 0 2 4 6 1 3 5 7 of eight: the stores of
// eight neighbours fall into different banks.
fn place(x: u32) -> vec2<u32> {
  let q = x / 2u;
  return vec2<u32>((q & ~7u) | ((q & 3u) << 1u) | ((q & 4u) >> 2u), x % 2u);
}

// A tile of the result: its group, first row and column, one past the last row of the group, first row of out. Of a stack the groups
// follow each other, result after result.
struct Tile {
  group: u32,
  row0: u32,
  col0: u32,
  end: u32,
  base: u32,
  a_panel: u32, // contraction: first panel of each operand, and blocks of 64 steps
  b_panel: u32,
  blocks: u32,
  scales: u32,  // of the rows
}

// What undoes the decode of both operands: 256 for each that is e4m3.
const FACTOR = select(1.0, select(65536.0, 256.0, A_E5M2 == 1u), F8 == 1u);

// Factor of row i of the result. Without a contraction (rows of no group, a group without rows) there is no scale: exact zeros.
fn row_factor(tile: Tile, i: u32) -> f32 {
  if SCALED == 0u {
    return FACTOR;
  }
  let scale = row_scale[tile.scales + min(i, p.m - 1u) * p.row_step];
  return select(0.0, FACTOR * scale, tile.blocks > 0u);
}

// Factors of columns j to j + 3.
fn col_factor(tile: Tile, j: u32) -> vec4<f32> {
  if SCALED == 0u {
    return vec4<f32>(1.0);
  }
  let at = tile.group * p.col_group;
  let last = p.n - 1u;
  let scale = vec4<f32>(
    col_scale[at + min(j, last) * p.col_step],
    col_scale[at + min(j + 1u, last) * p.col_step],
    col_scale[at + min(j + 2u, last) * p.col_step],
    col_scale[at + min(j + 3u, last) * p.col_step]);
  return select(vec4<f32>(0.0), scale, tile.blocks > 0u);
}

// Which of the columns j to j + 3 there are.
fn inside(j: u32) -> vec4<bool> {
  return vec4<u32>(j, j + 1u, j + 2u, j + 3u) < vec4<u32>(p.n);
}

// Whether a sum of results is NaN: none of them is where it is not.
fn is_nan(sum: f32) -> bool {
  return (bitcast<u32>(sum) & 0x7fffffffu) > 0x7f800000u;
}

// NaN as the one that rounding to bf16 leaves as bf16_put would.
fn quiet(v: vec4<f32>) -> vec4<f32> {
//!repeat w BF16_OUT
  let u = bitcast<vec4<u32>>(v);
  let nan = (u & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
  return bitcast<vec4<f32>>(select(u, (u | vec4<u32>(0x400000u)) & vec4<u32>(0xffff0000u), nan));
//!end
//!repeat w F32_OUT
  return v;
//!end
}

// A quad of results in their dtype; a NaN has been made quiet.
fn rounded(v: vec4<f32>) -> OUT {
//!repeat w BF16_OUT
  return bf16_put_number(v);
//!end
//!repeat w F32_OUT
  return v;
//!end
}

// Tile number `x` of the grid: 16 tiles of rows, then the next columns. Past the last one nothing is computed or stored
// (end 0); rows of no group have no contraction. No early return for them in `main`: naga wants uniform control flow.
// The results of a stack lie in the grid side by side where they share A (nt), and one below the other where they share B (tn).
fn tile_of(x: u32) -> Tile {
  let across = div_up(p.n, TILE);
//!repeat w BY_STEPS
  let down = div_up(p.m, TILE);
  let strips = across;
  let heights = p.stack * down;
  let part = x / (heights * strips);
  let in_group = x % (heights * strips);
//!end
//!repeat w BY_ROWS
  let results = select(p.stack, 1u, SUMMED == 1u);
  let strips = results * across;
  let heights = div_up(p.m, TILE) + GROUPED * p.groups;
  let in_group = x;
//!end
  let block = in_group / (16u * strips);
  let rest = in_group % (16u * strips);
  let depth = min(16u, max(heights, block * 16u + 1u) - block * 16u);
  let height = block * 16u + rest % depth;
  let strip = rest / depth;
//!repeat w BY_STEPS
  let result = height / down;
  let rows = part_rows(part, p.run, p.groups, p.k);
  if rows.group >= p.groups || strip >= strips {
    return Tile();
  }
  let start = group_rows(rows.group, p.k).x;
  let panel = (first_block(rows.group, start) + (rows.first - start) / 64u) * PANELS;
  // A stack has no groups: all rows of each gradient are contracted.
  let a_panel = panel + result * div_up(p.k, 64u) * PANELS;
  return Tile(
    rows.group + result, (height % down) * TILE, strip * TILE, p.m, (part * p.stack + result) * p.m, a_panel, panel,
    div_up(rows.end - rows.first, 64u), (rows.group + result) * p.row_group);
//!end
//!repeat w BY_ROWS
  let result = strip / across;
  let col0 = (strip % across) * TILE;
  let rows = tile_rows(height, TILE, p.groups, p.m);
  if rows.first >= rows.end || result >= results {
    return Tile();
  }
  let base = result * p.m;
  if GROUPED == 1u && rows.group == p.groups {
    return Tile(0u, rows.first, col0, rows.end, base, 0u, 0u, 0u, 0u);
  }
  let group = result * p.groups + rows.group;
  let blocks = div_up(p.k, 64u);
  return Tile(group, rows.first, col0, rows.end, base, 0u, group * blocks * PANELS, blocks, group * p.row_group);
//!end
}

//!repeat w SUMMED
// The tile of product `q` of a sum, whose operands are both stacks, from that of the first.
fn of_sum(tile: Tile, q: u32) -> Tile {
  var t = tile;
  if t.blocks > 0u {
    t.group += q * p.groups;
    t.a_panel += q * t.blocks * PANELS;
    t.b_panel += q * p.groups * t.blocks * PANELS;
    t.scales = q * p.row_group;
  }
  return t;
}
//!end
