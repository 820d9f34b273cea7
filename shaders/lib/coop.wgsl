// The parts of the GEMM on matrix units: decoding, loads, which tile a workgroup computes, and the way out. Needs the
// bindings, constants and workgroup memory of gemm_coop.wgsl, where the words are explained.

// Four codes of e4m3 as f16, each / 256, in the order 0 2 1 3. NaN codes give 480: the quantizer marks their scale.
fn dec(w: u32) -> vec4<f16> {
  let u = w << 8u;
  let lo = (u & 0x80008000u) | ((u >> 1u) & 0x3f803f80u);
  let hi = (w & 0x80008000u) | ((w >> 1u) & 0x3f803f80u);
  return vec4<f16>(vec2<f16>(unpack2x16float(lo)), vec2<f16>(unpack2x16float(hi)));
}

// Eight values: half `h` of 16 codes, or all of 8 halves.
fn eight(v: vec4<u32>, h: u32) -> H8 {
  if F16 == 1u {
    return H8(
      vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
      vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
  }
  if h == 0u {
    return H8(dec(v.x), dec(v.y));
  }
  return H8(dec(v.z), dec(v.w));
}

// Bits 0 and 1 exchanged: the decode's order.
fn swap(i: u32) -> u32 {
  return (i & ~3u) | ((i & 1u) << 1u) | ((i & 2u) >> 1u);
}

// A tile of the result: its group, first row and column, one past the last row of the group, first row of out.
struct Tile {
  group: u32,
  row0: u32,
  col0: u32,
  end: u32,
  base: u32,
  first: u32, // contraction: first step and one past the last
  last: u32,
  weight: u32, // rows of B before the group's
}

// 16 bytes of an operand that lies along: chunk `chunk + to` of row `row`, which is element `at + to` of the buffer.
// Past the row's end: zero in A, anything in B.
//!repeat w WIDE
fn a_window(at: u32, row: u32, chunk: u32, to: u32, quads: u32) -> vec4<u32> {
  if TAIL == 0u {
    return a[at + to];
  }
  let last = quads / QUADS - 1u;
  return select(vec4<u32>(0u), a[at - chunk + min(chunk + to, last)], chunk + to <= last);
}

fn b_window(at: u32, row: u32, chunk: u32, to: u32, quads: u32) -> vec4<u32> {
  if TAIL == 0u {
    return b[at + to];
  }
  return b[at - chunk + min(chunk + to, quads / QUADS - 1u)];
}

// 16 bytes of slice `s` of an operand that lies across, at row `pos` of the slice; `at` is their place in slice 0.
fn a_slice(tile: Tile, s: u32, at: u32, pos: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let to = step_of(s, 0u) * (quads / QUADS);
  let v = a[min(at + to, p.k * (quads / QUADS) - 1u)];
  return select(vec4<u32>(0u), v, tile.first + step_of(s, pos) < tile.last);
}

fn b_slice(tile: Tile, s: u32, at: u32, pos: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let to = step_of(s, 0u) * (quads / QUADS);
  return b[min(at + to, select(p.k, p.groups * p.k, A_ALONG == 1u) * (quads / QUADS) - 1u)];
}
//!end
//!repeat w NARROW
//!repeat y F8
fn a_load(row: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let q = vec4<u32>(4u * chunk) + vec4<u32>(0u, 1u, 2u, 3u);
  let at = vec4<u32>(row * quads) + min(q, vec4<u32>(quads - 1u));
  let v = vec4<u32>(a[at.x], a[at.y], a[at.z], a[at.w]);
  return select(vec4<u32>(0u), v, q < vec4<u32>(quads));
}

fn b_load(row: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let q = vec4<u32>(4u * chunk) + vec4<u32>(0u, 1u, 2u, 3u);
  let at = vec4<u32>(row * quads) + min(q, vec4<u32>(quads - 1u));
  return vec4<u32>(b[at.x], b[at.y], b[at.z], b[at.w]);
}
//!end
//!repeat y F16
fn a_load(row: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let q = vec2<u32>(2u * chunk) + vec2<u32>(0u, 1u);
  let at = vec2<u32>(row * quads) + min(q, vec2<u32>(quads - 1u));
  return select(vec4<u32>(0u), vec4<u32>(a[at.x], a[at.y]), (q < vec2<u32>(quads)).xxyy);
}

fn b_load(row: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let at = vec2<u32>(row * quads) + min(vec2<u32>(2u * chunk) + vec2<u32>(0u, 1u), vec2<u32>(quads - 1u));
  return vec4<u32>(b[at.x], b[at.y]);
}
//!end

fn a_window(at: u32, row: u32, chunk: u32, to: u32, quads: u32) -> vec4<u32> {
  return a_load(row, chunk + to, quads);
}

fn b_window(at: u32, row: u32, chunk: u32, to: u32, quads: u32) -> vec4<u32> {
  return b_load(row, chunk + to, quads);
}

fn a_slice(tile: Tile, s: u32, at: u32, pos: u32, chunk: u32, quads: u32) -> vec4<u32> {
  let k = tile.first + step_of(s, pos);
  return select(vec4<u32>(0u), a_load(min(k, tile.last - 1u), chunk, quads), k < tile.last);
}

fn b_slice(tile: Tile, s: u32, at: u32, pos: u32, chunk: u32, quads: u32) -> vec4<u32> {
  return b_load(tile.weight + min(tile.first + step_of(s, pos), tile.last - 1u), chunk, quads);
}
//!end

// Where window `w` (64 bytes a row) of an operand that lies along begins; the prefetch past the end reads the last one again.
fn window(w: u32) -> u32 {
  if TAIL == 0u {
    return min(w, p.k / (16u * QUADS) - 1u) * 4u;
  }
  return w * 4u;
}

// Which contraction step stands in row `pos` of slice `s` of an operand that lies across: that of a partner that lies
// along (window s / 2, half s % 2), else the plain order.
fn step_of(s: u32, pos: u32) -> u32 {
  if A_ALONG == 1u && F8 == 1u {
    return (s / 2u) * 64u + (pos / 8u) * 16u + (s % 2u) * 8u + swap(pos % 8u);
  }
  return s * 32u + pos;
}

// Where thread-chunk `x` goes, (row, chunk): along, 512 of 4 chunks a row; across, 256 of 8 chunks a row
// (halves: 512 of 16).
fn along_place(x: u32) -> vec2<u32> {
  let q = x / 4u;
  return vec2<u32>((q & ~7u) | ((q & 1u) << 2u) | ((q & 6u) >> 1u), x % 4u);
}

fn across_place(x: u32) -> vec2<u32> {
  if F16 == 1u {
    return vec2<u32>(x / 16u, x % 16u);
  }
  return vec2<u32>(((x >> 4u) << 1u) | ((x >> 2u) & 1u), (x & 3u) | ((x >> 1u) & 4u));
}

fn row_factor(g: u32, i: u32) -> f32 {
  return row_scale[g * p.row_group + i * p.row_step];
}

// What undoes the decode of both operands.
const FACTOR = select(1.0, 65536.0, F8 == 1u);

// Factors of columns j to j + 3, with the decode's.
fn col_factor(tile: Tile, j: u32) -> vec4<f32> {
  if SCALED == 0u {
    return vec4<f32>(FACTOR);
  }
  let at = tile.group * p.col_group;
  let last = p.n - 1u;
  return FACTOR * vec4<f32>(
    col_scale[at + min(j, last) * p.col_step],
    col_scale[at + min(j + 1u, last) * p.col_step],
    col_scale[at + min(j + 2u, last) * p.col_step],
    col_scale[at + min(j + 3u, last) * p.col_step],
  );
}

// Writes quad `t` (of 64) of the 16 x 16 fragment at (row, col) of the tile, which lies in te at `te0`. Without a
// contraction (rows of no group, a group without rows) there is no scale either: exact zeros.
fn emit(tile: Tile, te0: u32, t: u32, row: u32, col: u32, factor: vec4<f32>) {
  let r = t / 4u;
  let i = tile.row0 + row + r;
  let j = tile.col0 + col + (t % 4u) * 4u;
  if i >= tile.end || j >= p.n {
    return;
  }
  var source = r;
  if A_ACROSS == 1u && F8 == 1u {
    source = swap(r);
  }
  let e = te0 + source * 16u + (t % 4u) * 4u;
  var v = vec4<f32>(te[e], te[e + 1u], te[e + 2u], te[e + 3u]);
  if B_ACROSS == 1u && F8 == 1u {
    v = v.xzyw;
  }
  if SCALED == 1u {
    v *= row_factor(tile.group, i);
  }
  v = select(vec4<f32>(0.0), v * factor, tile.first < tile.last);
  v = select(vec4<f32>(0.0), v, vec4<u32>(j, j + 1u, j + 2u, j + 3u) < vec4<u32>(p.n));
  let at = (tile.base + i) * div_up(p.n, 4u) + j / 4u;
  if ACCUMULATE == 1u {
    v += out_get(out[at]);
  }
  out[at] = out_put(v);
}

// Tile number `x` of the grid: 16 tiles of rows, then the next columns. Past the last one nothing is computed or stored
// (end 0); rows of no group have no contraction. No early return for them in `main`: naga wants uniform control flow.
fn tile_of(x: u32) -> Tile {
  let strips = div_up(p.n, 128u);
//!repeat w A_ACROSS
  let heights = div_up(p.m, 128u);
  let part = x / (heights * strips * p.groups);
  let group = (x / (heights * strips)) % p.groups;
  let in_group = x % (heights * strips);
//!end
//!repeat w A_ALONG
  let heights = div_up(p.m, 128u) + GROUPED * p.groups;
  let in_group = x;
//!end
  let block = in_group / (16u * strips);
  let rest = in_group % (16u * strips);
  let depth = min(16u, max(heights, block * 16u + 1u) - block * 16u);
  let height = block * 16u + rest % depth;
  let col0 = (rest / depth) * 128u;
//!repeat w A_ACROSS
  var span = group_rows(group, p.k);
  if SPLIT == 1u {
    let run = div_up(span.y - span.x, p.splits);
    span = min(vec2<u32>(span.x + part * run, span.x + (part + 1u) * run), vec2<u32>(span.y));
  }
  if part >= p.splits || col0 >= p.n {
    return Tile(0u, 0u, 0u, 0u, 0u, 0u, 0u, 0u);
  }
  return Tile(group, height * 128u, col0, p.m, (part * p.groups + group) * p.m, span.x, span.y, 0u);
//!end
//!repeat w A_ALONG
  let rows = tile_rows(height, 128u, p.groups, p.m);
  if rows.first >= rows.end || col0 >= p.n {
    return Tile(0u, 0u, 0u, 0u, 0u, 0u, 0u, 0u);
  }
  if GROUPED == 1u && rows.group == p.groups {
    return Tile(0u, rows.first, col0, rows.end, 0u, 0u, 0u, 0u);
  }
  return Tile(rows.group, rows.first, col0, rows.end, 0u, 0u, p.k, rows.group * p.k);
//!end
}
