// Fragments of matrix units, EDGE x EDGE: f16 operands, f32 sums. 16 x 16 (NVIDIA, AMD) or 8 x 8 (Apple); a kernel counts 16
// columns or steps of a contraction as PIECES fragments and is otherwise one text for both.
// What lies in memory for them differs: Metal loads and stores fragments through pointers to scalars and counts strides
// in scalars, where others may take vectors, which their drivers move at once. So for 8 x 8 four values are a struct of
// scalars. `$AT` is where the first of them lies, QUAD what a stride counts per four, and the other words read and write them.
enable f16;
enable wgpu_cooperative_matrix;

//!repeat y EDGE16
alias FragmentA = coop_mat16x16<f16, A>;
alias FragmentB = coop_mat16x16<f16, B>;
alias FragmentC = coop_mat16x16<f32, C>;
const QUAD = 1u;
// Four floats, four halves, and 16 bytes of eight halves, stored at once.
alias F4 = vec4<f32>;
alias H4 = vec4<f16>;
struct H8 { x: vec4<f16>, y: vec4<f16> }
//!let AT
//!let F4_GET
//!let H4_PUT vec4<f16>
//!let H8_PUT H8
//!end
//!repeat y EDGE8
alias FragmentA = coop_mat8x8<f16, A>;
alias FragmentB = coop_mat8x8<f16, B>;
alias FragmentC = coop_mat8x8<f32, C>;
const QUAD = 4u;
struct F4 { x: f32, y: f32, z: f32, w: f32 }
struct H4 { x: f16, y: f16, z: f16, w: f16 }
struct H8 { x: f16, x1: f16, x2: f16, x3: f16, y: f16, y1: f16, y2: f16, y3: f16 }
//!let AT .x
//!let F4_GET f4_get
//!let H4_PUT h4_put
//!let H8_PUT h8_put

fn f4_get(q: F4) -> vec4<f32> {
  return vec4<f32>(q.x, q.y, q.z, q.w);
}

fn h4_put(v: vec4<f32>) -> H4 {
  let h = vec4<f16>(v);
  return H4(h.x, h.y, h.z, h.w);
}

fn h8_put(a: vec4<f16>, b: vec4<f16>) -> H8 {
  return H8(a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
}
//!end
// Where a driver chooses the width of subgroups kernel by kernel (VARY): results of one that is not as wide as this text takes it
// to be are NaN, not numbers that are wrong. `$AS_WIDE` is a factor for them, `lanes` what the kernel's entry point is told.
//!repeat y VARY
//!let AS_WIDE * as_wide(lanes)

fn as_wide(lanes: u32) -> f32 {
  return bitcast<f32>(select(0x7fc00000u, 0x3f800000u, lanes == LANES));
}
//!end
//!repeat y STEADY
//!let AS_WIDE
//!end
