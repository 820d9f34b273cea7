//! The kernel's text with its matrices emulated, so that any adapter can run everything else in it: tiles, panels, decoding, the
//! order of slices, the way out. The self-test's tables judge it, see the tests of `check::gemm`.
#![cfg(test)]

use super::MAIN;
use crate::gpu::Kernel;
use crate::ops::emulation;
use std::sync::LazyLock;

/// Of EDGE x EDGE numbers a lane has those of column `lane % EDGE` and every LANES / EDGE th row, OWN of them: of each of 16 results,
/// and what it takes of the operands for them, in use and loaded ahead. Blocks of text become calls, and loops have a bound
/// that compilers do not see, so that they stay loops: `emu_one` is 1.
const MATRICES: &str = "
const OWN = EDGE * EDGE / LANES;
const APART = LANES / EDGE;
var<private> emu_lane: u32;
var<private> emu_turn: u32;
var<private> emu_one: u32;
var<private> emu_a: array<f32, 128u * OWN>;
var<private> emu_b: array<f32, 128>;
var<private> emu_c: array<f32, 16u * OWN>;

fn emu_half(h: H8, i: u32) -> f32 {
//!repeat y EDGE16
  return select(h.x, h.y, i >= 4u)[i % 4u];
//!end
//!repeat y EDGE8
  return select(vec4<f32>(h.x, h.x1, h.x2, h.x3), vec4<f32>(h.y, h.y1, h.y2, h.y3), i >= 4u)[i % 4u];
//!end
}
fn emu_load(fa: u32, fb: u32) {
  for (var i = 0u; i < emu_one * 64u * OWN; i++) {
    let row = i / (16u * OWN) * EDGE + i / 16u % OWN * APART + emu_lane / EDGE;
    let h = row * 24u + i % 16u;
    emu_a[(1u - emu_turn) * 64u * OWN + i] = emu_half(ta[fa + h / 8u], h % 8u);
  }
  for (var i = 0u; i < emu_one * 64u; i++) {
    let h = (i / 16u * EDGE + emu_lane % EDGE) * 24u + i % 16u;
    emu_b[(1u - emu_turn) * 64u + i] = emu_half(tb[fb + h / 8u], h % 8u);
  }
}
fn emu_next() {
  emu_turn = 1u - emu_turn;
}
fn emu_products(first: u32, end: u32) {
  for (var n = 0u; n < emu_one * 16u * OWN; n++) {
    let j = n / OWN % 4u;
    if j >= first && j < end {
      var sum = emu_c[n];
      for (var k = 0u; k < emu_one * 16u; k++) {
        let a = emu_turn * 64u * OWN + (n / (4u * OWN) * OWN + n % OWN) * 16u + k;
        sum += emu_a[a] * emu_b[emu_turn * 64u + j * 16u + k];
      }
      emu_c[n] = sum;
    }
  }
}
fn emu_store(fragment: u32, at: u32, stride: u32) {
  for (var s = 0u; s < emu_one * OWN; s++) {
    let n = emu_lane % EDGE;
    let x = emu_c[fragment * OWN + s];
    let to = at + (s * APART + emu_lane / EDGE) * (stride / QUAD) + n / 4u;
//!repeat y EDGE16
    te[to][n % 4u] = x;
//!end
//!repeat y EDGE8
    switch n % 4u {
      case 0u: { te[to].x = x; }
      case 1u: { te[to].y = x; }
      case 2u: { te[to].z = x; }
      default: { te[to].w = x; }
    }
//!end
  }
}
";

const REPLACEMENTS: [(&str, &str); 18] = [
    ("enable f16;\nenable wgpu_cooperative_matrix;\n", ""),
    (
        "alias FragmentA = coop_mat16x16<f16, A>;
alias FragmentB = coop_mat16x16<f16, B>;
alias FragmentC = coop_mat16x16<f32, C>;
",
        "",
    ),
    (
        "alias FragmentA = coop_mat8x8<f16, A>;
alias FragmentB = coop_mat8x8<f16, B>;
alias FragmentC = coop_mat8x8<f32, C>;
",
        "",
    ),
    (
        "//!repeat i 4\n//!repeat j 4\n  var c$i_$j = FragmentC();\n//!end\n//!end\n",
        "  for (var i = 0u; i < 16u * OWN; i++) {\n    emu_c[i] = 0.0;\n  }\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
  var fa$i_$k = FragmentA();
  var fb$i_$k = FragmentB();
//!end
//!end
",
        "",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
  fa$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
  fb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
",
        "emu_load(fa, fb);\nemu_next();\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
      let na$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
      let nb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
",
        "emu_load(fa, fb);\n",
    ),
    (
        "//!repeat j 3
//!repeat k PIECES
//!repeat i 4
      c$i_$j = coopMultiplyAdd(fa$i_$k, fb$j_$k, c$i_$j);
//!end
//!end
//!end
",
        "emu_products(0u, 3u);\n",
    ),
    (
        "//!repeat k PIECES
//!repeat i 4
      c$i_3 = coopMultiplyAdd(fa$i_$k, fb3_$k, c$i_3);
//!end
//!end
",
        "emu_products(3u, 4u);\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
      fa$i_$k = na$i_$k;
      fb$i_$k = nb$i_$k;
//!end
//!end
",
        "emu_next();\n",
    ),
    ("coopStoreT(c$i_$j, &te[te0], stride)", "emu_store($iu * 4u + $ju, te0, stride)"),
    ("coopStoreT(c$i_$h, &te[turn$h].x, stride)", "emu_store($iu * 4u + $hu, turn$h, stride)"),
    ("subgroupBarrier()", "workgroupBarrier()"),
    ("  @builtin(subgroup_size) lanes: u32,\n", ""),
    ("as_wide(lanes)", "as_wide(WIDTH)"),
    ("<f16>", "<f32>"),
    (": f16", ": f32"),
    (
        "  let lane = li % LANES;\n",
        "  let lane = li % LANES;\n  emu_lane = lane;\n  emu_one = 1u + (p.n >> 31u);\n",
    ),
];

static TEXT: LazyLock<String> = LazyLock::new(|| {
    let text = REPLACEMENTS.iter().fold(MAIN.text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "the kernel has no `{from}` to emulate");
        text.replace(from, to)
    });
    text + MATRICES
});

/// What stands in for the kernel where this thread asked for it.
pub(super) fn kernel() -> Option<Kernel> {
    emulation::fragments().map(|_| Kernel { name: "gemm_coop.emulated", text: TEXT.as_str(), entry: "main" })
}
