// Codes or halves row by row into panels (lib/panels.wgsl), for products on matrix units.
//   along    the contraction runs along the rows: 32 bytes of a row move together
//   across   it runs along the columns of each group of rows: the matrix is transposed on the way
// Steps past the contraction's end are zero. Blocks that belong to no group are left alone: nobody reads them.

struct Panels {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
}

@group(0) @binding(0) var<uniform> p: Panels;
@group(0) @binding(1) var<storage, read> x: array<Q>;
@group(0) @binding(2) var<storage, read_write> panels: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> offs: array<u32>;

// 16 bytes of `row` from quad `quad` on, zero past its end.
fn sixteen(row: u32, quad: u32) -> vec4<u32> {
  let quads = div_up(p.cols, 4u);
  let at = row * quads + quad;
  var v = vec4<u32>();
//!repeat w F8
//!repeat i 4
  if quad + $iu < quads {
    v[$i] = x[at + $iu];
  }
//!end
//!end
//!repeat w F16
  if quad < quads {
    v = vec4<u32>(x[at], 0u, 0u);
  }
  if quad + 1u < quads {
    v = vec4<u32>(v.xy, x[at + 1u]);
  }
//!end
  return v;
}

// A workgroup: 16 bytes times 8 of LANES / 8 rows.
@compute @workgroup_size(LANES)
fn along(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let count = div_up(p.cols, 64u) * PANELS;
  let strips = div_up(count, 4u);
  let tile = grid_index(wg, n);
  let row = (tile / strips) * (LANES / 8u) + li / 8u;
  let chunk = (tile % strips) * 8u + li % 8u;
  let panel = chunk / 2u;
  if row >= p.rows || panel >= count {
    return;
  }
  let group = row / p.group_rows;
  let at = ((group * count + panel) * p.group_rows + row % p.group_rows) * 2u + chunk % 2u;
  panels[at] = sixteen(row, chunk * QUADS);
}

// Row range of block `block` of the panels, empty if it is no group's.
fn block_rows(block: u32) -> vec2<u32> {
  if GROUPED == 0u {
    let each = div_up(p.group_rows, 64u);
    let group = block / each;
    let first = group * p.group_rows + (block % each) * 64u;
    return vec2<u32>(first, min((group + 1u) * p.group_rows, p.rows));
  }
  for (var g = 0u; g < p.groups; g++) {
    let rows = group_rows(g, p.rows);
    let start = first_block(g, rows.x);
    if block >= start && block - start < div_up(rows.y - rows.x, 64u) {
      return vec2<u32>(rows.x + (block - start) * 64u, rows.y);
    }
  }
  return vec2<u32>(0u);
}

// The quad of codes `quad` in row `row`, zero past the group's end.
fn quad_at(row: u32, end: u32, quad: u32) -> Q {
  if row < end {
    return x[row * div_up(p.cols, 4u) + quad];
  }
  return Q();
}

// A workgroup: one panel of LANES / 2 column quads, a thread for each of its two halves.
@compute @workgroup_size(LANES)
fn across(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let quads = div_up(p.cols, 4u);
  let strips = div_up(quads, LANES / 2u);
  let tile = grid_index(wg, n);
  let quad = (tile % strips) * (LANES / 2u) + li / 2u;
  let panel = tile / strips;
  let rows = block_rows(panel / PANELS);
  if rows.x >= rows.y || quad >= quads {
    return;
  }
  let first = rows.x + (panel % PANELS) * (64u / PANELS) + (li % 2u) * (32u / PANELS);
//!repeat w F8
  // Four rows at a time: a word of each of four columns.
//!repeat i 4
  let t$i = transpose_bytes(vec4<u32>(
    quad_at(first + 4u * $iu, rows.y, quad), quad_at(first + 4u * $iu + 1u, rows.y, quad),
    quad_at(first + 4u * $iu + 2u, rows.y, quad), quad_at(first + 4u * $iu + 3u, rows.y, quad)));
//!end
//!repeat i 4
  if quad * 4u + $iu < p.cols {
    panels[(panel * p.cols + quad * 4u + $iu) * 2u + li % 2u] = vec4<u32>(t0[$i], t1[$i], t2[$i], t3[$i]);
  }
//!end
//!end
//!repeat w F16
  // Two rows at a time.
//!repeat i 4
  let e$i = quad_at(first + 2u * $iu, rows.y, quad);
  let o$i = quad_at(first + 2u * $iu + 1u, rows.y, quad);
  let t$i = vec4<u32>(
    (e$i.x & 0xffffu) | (o$i.x << 16u), (e$i.x >> 16u) | (o$i.x & 0xffff0000u),
    (e$i.y & 0xffffu) | (o$i.y << 16u), (e$i.y >> 16u) | (o$i.y & 0xffff0000u));
//!end
//!repeat i 4
  if quad * 4u + $iu < p.cols {
    panels[(panel * p.cols + quad * 4u + $iu) * 2u + li % 2u] = vec4<u32>(t0[$i], t1[$i], t2[$i], t3[$i]);
  }
//!end
//!end
}
