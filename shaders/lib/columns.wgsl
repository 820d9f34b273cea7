// What the kernels that quantize columns share (quantize_wide.wgsl, quantize_strips.wgsl): de-scales of a unit of columns, and eight
// rows of its codes in panels. Needs the binding `codes`, `p.cols`, PANELS, lib/scales.wgsl, lib/panels.wgsl and lib/units.wgsl.

// De-scales of the eight columns of a unit.
struct Descales {
  a: vec4<u32>,
  b: vec4<u32>,
}

// Of columns with these tops, bf16 as they lie in x.
fn descales_of(top: vec4<u32>) -> Descales {
  let t = top << vec4<u32>(16u);
  let u = top & vec4<u32>(0xffff0000u);
  return Descales(descale4(vec4<u32>(t.x, u.x, t.y, u.y)), descale4(vec4<u32>(t.z, u.z, t.w, u.w)));
}

fn descale4(t: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(descale_bits(t.x), descale_bits(t.y), descale_bits(t.z), descale_bits(t.w));
}

//!repeat d LEAVES_DESCALES
fn store_descales(g: u32, unit: u32, r: Descales) {
  for (var i = 0u; i < min(p.cols - 8u * unit, 8u); i++) {
    descales[g * p.cols + 8u * unit + i] = select(r.a, r.b, i >= 4u)[i % 4u];
  }
}
//!end

//!repeat w IN_PANELS
// First panel of group `g`, which starts at row `start`.
fn first_panel(g: u32, start: u32) -> u32 {
  if GROUPED == 1u {
    return first_block(g, start) * PANELS;
  }
  return g * div_up(p.group_rows, 64u) * PANELS;
}

// Eight neighbouring rows of a unit, from row `row` of a group on whose first panel is `panel`: a unit of eight steps in each column.
fn store_panels(panel: u32, row: u32, unit: u32, q0: Unit, q1: Unit, q2: Unit, q3: Unit, q4: Unit, q5: Unit, q6: Unit, q7: Unit) {
  let step = row / 8u;
  let at = ((panel + step / PER_PANEL) * p.cols + 8u * unit) * PER_PANEL + step % PER_PANEL;
//!repeat f FP8
//!repeat h 2
  let t$h = transpose_bytes(vec4<u32>(q0[$h], q1[$h], q2[$h], q3[$h]));
  let u$h = transpose_bytes(vec4<u32>(q4[$h], q5[$h], q6[$h], q7[$h]));
//!repeat i 4
  if 8u * unit + 4u * $hu + $iu < p.cols {
    codes[at + (4u * $hu + $iu) * PER_PANEL] = Unit(t$h[$i], u$h[$i]);
  }
//!end
//!end
//!end
//!repeat f HALF
//!repeat h 4
  let t$h = vec4<u32>(q0[$h], q2[$h], q4[$h], q6[$h]);
  let u$h = vec4<u32>(q1[$h], q3[$h], q5[$h], q7[$h]);
  if 8u * unit + 2u * $hu < p.cols {
    codes[at + 2u * $hu * PER_PANEL] = (t$h & vec4<u32>(0xffffu)) | (u$h << vec4<u32>(16u));
  }
  if 8u * unit + 2u * $hu + 1u < p.cols {
    codes[at + (2u * $hu + 1u) * PER_PANEL] = (t$h >> vec4<u32>(16u)) | (u$h & vec4<u32>(0xffff0000u));
  }
//!end
//!end
}
//!end
