//! The kernels' texts with fragments of 8 x 8 emulated, so that any adapter can run everything else in them: tiles, masks, places in
//! memory, rescaling. Minutes, so only when asked for: `cargo test --lib emulated -- --ignored`.
#![cfg(test)]

use super::{BACKWARD_TEXT, FORWARD_TEXT, Operands, backward, forward};
use crate::gpu::{DeviceChoice, Gpu, Kernel, MatrixUnits, Options};
use crate::num::rng::Stream;
use crate::num::{DType, bf16};
use crate::ops::attention::Shape;
use crate::reference::attention as reference;
use crate::reference::compare::{bf16_ulp, within};
use crate::tensor::Tensor;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::LazyLock;

thread_local! {
    static EMULATE: Cell<bool> = const { Cell::new(false) };
}

/// Of an operand A a lane has row `lane / 4`, of B columns `lane % 4 * 2` and the next, of C where they meet. What lanes of a subgroup
/// do together goes through memory of the whole workgroup, which waits more often than the kernel does.
const FRAGMENTS: &str = "
var<private> emu_li: u32;
var<workgroup> emu_lanes: array<f32, THREADS>;

fn emu_mad(a: FragmentA, b: FragmentB, c: FragmentC) -> FragmentC {
  return c + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7];
}
fn emu_shuffle(v: f32, other: u32) -> f32 {
  emu_lanes[emu_li] = v;
  workgroupBarrier();
  let theirs = emu_lanes[emu_li ^ other];
  workgroupBarrier();
  return theirs;
}
fn emu_any(mine: bool) -> bool {
  emu_lanes[emu_li] = f32(mine);
  workgroupBarrier();
  var all = 0.0;
  for (var i = 0u; i < THREADS; i++) {
    all += emu_lanes[i];
  }
  workgroupBarrier();
  return all > 0.0;
}
fn emu_store_scores(v: FragmentC, at: u32, stride: u32) {
  let n = emu_li % 32u / 4u * stride + emu_li % 4u * 2u;
  if n % 4u == 0u {
    scores[at + n / 4u].x = v.x;
    scores[at + n / 4u].y = v.y;
  } else {
    scores[at + n / 4u].z = v.x;
    scores[at + n / 4u].w = v.y;
  }
}
";

/// What a line says other than the kernel's; and a branch that subgroups take alone becomes one for the workgroup: masks make
/// up for rounds that need not be walked.
const WORDS: [(&str, &str); 12] = [
    ("alias FragmentA = coop_mat8x8<f16, A>;", "alias FragmentA = array<f32, 8>;"),
    ("alias FragmentB = coop_mat8x8<f16, B>;", "alias FragmentB = array<vec2<f32>, 8>;"),
    ("alias FragmentC = coop_mat8x8<f32, C>;", "alias FragmentC = vec2<f32>;"),
    ("<f16>", "<f32>"),
    (": f16", ": f32"),
    ("coopMultiplyAdd(", "emu_mad("),
    ("subgroupBarrier()", "workgroupBarrier()"),
    ("subgroupShuffleXor(", "emu_shuffle("),
    ("subgroupAny(", "emu_any("),
    ("once = j + $ou * ROUND < first + ROWS;", "once = true;"),
    ("once = i + ($ou + 1u) * ROUND > first;", "once = true;"),
    ("  let lane = li % LANES;", "  let lane = li % LANES;\n  emu_li = li;"),
];

/// The operands that lie in memory as halves, as a kernel's text binds them.
const OPERANDS: [&str; 4] = ["q", "k", "v", "d_out"];

/// `memory[at]...`, `stride`: what comes after the `&` of a load or a store.
fn place(text: &str) -> (&str, &str, &str) {
    let (memory, rest) = text.split_once('[').expect("a place in memory");
    let (inner, stride) = rest.rsplit_once(", ").expect("a stride");
    let (at, _) = inner.rsplit_once(']').expect("an index");
    (memory, at, stride.trim_end_matches(");"))
}

/// A line with calls in place of loads and stores; `loads` hears of operand and memory of each load.
fn rewrite(line: &str, loads: &mut BTreeSet<(String, String)>) -> String {
    if let Some((before, rest)) = line.split_once("coopStoreT(") {
        let (value, rest) = rest.split_once(", &").expect("a place to store in");
        let (memory, at, stride) = place(rest);
        return format!("{before}emu_store_{memory}({value}, {at}, {stride});");
    }
    let Some((before, rest)) = line.split_once("coopLoad") else { return line.to_owned() };
    let (kind, rest) = rest.split_once(">(&").expect("a fragment to load");
    let (memory, at, stride) = place(rest);
    let kind = kind.replace("<Fragment", "");
    loads.insert((kind.clone(), memory.to_owned()));
    format!("{before}emu_{kind}_{memory}({at}, {stride});")
}

/// The function that loads an operand, `A`, `B` or `C`, after a `T` if rows lie one after the other, from a memory.
fn loader(kind: &str, memory: &str) -> String {
    let number = match memory {
        "ta" | "tb" => format!(
            "let h = {memory}[at + n / 8u];
  return select(vec4<f32>(h.x, h.x1, h.x2, h.x3), vec4<f32>(h.y, h.y1, h.y2, h.y3), n % 8u >= 4u)[n % 4u];"
        ),
        _ if OPERANDS.contains(&memory) => format!(
            "let w = {memory}[at + n / 4u];
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y))[n % 4u];"
        ),
        _ => format!("let h = {memory}[at + n / 4u];\n  return vec4<f32>(h.x, h.y, h.z, h.w)[n % 4u];"),
    };
    let of = format!("emu_{memory}_{kind}");
    let (row, col) = ("emu_li % 32u / 4u", "emu_li % 4u * 2u");
    let all = |one: &dyn Fn(usize) -> String| (0..8).map(one).collect::<Vec<_>>().join(", ");
    let (ty, value) = match kind {
        "TA" => ("FragmentA", format!("FragmentA({})", all(&|k| format!("{of}(at, {row} * stride + {k}u)")))),
        "B" | "TB" => {
            let n = |k: usize, c: u32| match kind {
                "B" => format!("{of}(at, ({col} + {c}u) * stride + {k}u)"),
                _ => format!("{of}(at, {k}u * stride + {col} + {c}u)"),
            };
            let column = |k| format!("vec2<f32>({}, {})", n(k, 0), n(k, 1));
            ("FragmentB", format!("FragmentB({})", all(&column)))
        }
        _ => {
            let n = |c: u32| format!("{of}(at, {row} * stride + {col} + {c}u)");
            ("FragmentC", format!("FragmentC({}, {})", n(0), n(1)))
        }
    };
    format!(
        "fn {of}(at: u32, n: u32) -> f32 {{\n  {number}\n}}
fn emu_{kind}_{memory}(at: u32, stride: u32) -> {ty} {{\n  return {value};\n}}\n"
    )
}

fn emulate(text: &str) -> String {
    let mut loads = BTreeSet::new();
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.starts_with("enable ")) {
        let mut line = WORDS.iter().fold(line.to_owned(), |line, (from, to)| line.replace(from, to));
        for name in OPERANDS {
            line = line.replace(&format!(" {name}: array<H4>;"), &format!(" {name}: array<vec2<u32>>;"));
        }
        let _ = writeln!(out, "{}", rewrite(&line, &mut loads));
    }
    assert!(loads.len() > 3, "{loads:?}: were the loads respelt?");
    out.push_str(FRAGMENTS);
    loads.iter().for_each(|(kind, memory)| out.push_str(&loader(kind, memory)));
    out
}

static FORWARD: LazyLock<String> = LazyLock::new(|| emulate(FORWARD_TEXT));
static BACKWARD: LazyLock<String> = LazyLock::new(|| emulate(BACKWARD_TEXT));

/// What stands in for `kernel` where this thread asked for it.
pub(super) fn kernel(kernel: Kernel) -> Kernel {
    match units() {
        None => kernel,
        Some(_) if kernel.entry == "forward" => Kernel { text: FORWARD.as_str(), ..kernel },
        Some(_) => Kernel { text: BACKWARD.as_str(), ..kernel },
    }
}

/// The matrix units that this thread emulates.
pub(super) fn units() -> Option<MatrixUnits> {
    EMULATE.get().then_some(MatrixUnits::Coop8)
}

/// Runs a case; where scores grow along the keys, every row's maximum moves on and on.
fn run(gpu: &Gpu, shape: Shape, documents: bool, growing: bool) {
    let Shape { batch, seq, heads, kv_heads, head_dim, block } = shape;
    let values = |name: &str, heads: usize, grow: f32| -> Vec<f32> {
        let stream = Stream::new(3, name);
        let per = heads * head_dim;
        let at = |i: usize| {
            let along = 1.0 + grow * (i / per % seq) as f32;
            // Keys that grow point where queries do, so that scores grow too.
            let lean = if growing && i.is_multiple_of(head_dim) { 2.0 } else { 0.0 };
            bf16::round((stream.normal(i as u64) + lean) * along)
        };
        (0..batch * seq * per).map(at).collect()
    };
    let grow = if growing { 0.25 } else { 0.0 };
    let all = [
        values("q", heads, 0.0),
        values("k", kv_heads, grow),
        values("v", kv_heads, 0.0),
        values("d_out", heads, 0.0),
    ];
    let docs: Option<Vec<u32>> =
        documents.then(|| (0..batch * seq).map(|i| ((i % seq + i / seq) / 23) as u32).collect());
    let rows = |v: &[f32]| {
        Tensor::from_f32(gpu, "operand", &[batch * seq, v.len() / (batch * seq)], DType::BF16, v).unwrap()
    };
    let [q, k, v, d_out] = all.each_ref().map(|v| rows(v));
    let on_device = docs.as_ref().map(|d| Tensor::from_u32(gpu, "documents", d).unwrap());
    let operands = Operands::new(gpu, [&q, &k, &v], shape).unwrap();
    let (out, lse) = forward(gpu, &operands, shape, on_device.as_ref()).unwrap();
    let [d_q, d_k, d_v] = [&q, &k, &v].map(|x| Tensor::empty(gpu, "gradient", x.shape(), x.dtype()).unwrap());
    backward(gpu, &d_out, &operands, (&out, &lse), [&d_q, &d_k, &d_v], shape, on_device.as_ref()).unwrap();

    let of = reference::Shape { batch, seq, heads, kv_heads, head_dim };
    let mask = reference::Mask { block, documents: docs.as_deref() };
    let [q, k, v, d] = all.map(|v| v.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
    let want = reference::forward(of, mask, &q, &k, &v);
    let (want_q, want_k, want_v) = reference::backward(of, mask, (&q, &k, &v), &d);
    let want_lse: Vec<f64> = (0..batch * seq * heads)
        .map(|i| want.lse[(i / (seq * heads) * heads + i % heads) * seq + i / heads % seq])
        .collect();
    for (name, got, want, share) in [
        ("out", out, want.out, 2f64.powi(-10)),
        ("lse", lse, want_lse, 2f64.powi(-15)),
        ("d_q", d_q, want_q, 1e-2),
        ("d_k", d_k, want_k, 1e-2),
        ("d_v", d_v, want_v, 2f64.powi(-10)),
    ] {
        let largest = want.iter().fold(1.0, |a: f64, v| a.max(v.abs()));
        let unit = |w: f64| if name == "lse" { 0.0 } else { bf16_ulp(w) / 2.0 };
        let bound: Vec<f64> = want.iter().map(|w| unit(*w) + share * largest).collect();
        let got: Vec<f64> = got.to_f32(gpu).unwrap().iter().map(|v| f64::from(*v)).collect();
        within(&got, &want, &bound, &[want.len()]).unwrap_or_else(|e| panic!("{shape:?} {name}: {e}"));
    }
}

/// Batch, positions, heads, key heads, elements, block, documents, growing scores.
type Case = (usize, usize, usize, usize, usize, Option<usize>, bool, bool);

fn run_all(cases: &[Case]) {
    EMULATE.set(true);
    let options = Options { poison: true, ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
    for &(batch, seq, heads, kv_heads, head_dim, block, documents, growing) in cases {
        run(&gpu, Shape { batch, seq, heads, kv_heads, head_dim, block }, documents, growing);
    }
}

/// Two fragments of rows a subgroup, rounds left out, both masks, rows past a tile's end.
#[test]
#[ignore = "a software adapter takes minutes to compile the kernels: their barriers are many"]
fn emulated_fragments_of_8_equal_the_reference() {
    run_all(&[(2, 70, 2, 1, 16, Some(40), true, false), (1, 1, 1, 1, 16, None, true, false)]);
}

/// One fragment of rows, results that are rescaled, groups of heads.
#[test]
#[ignore = "as above"]
fn emulated_fragments_of_8_serve_larger_heads() {
    run_all(&[(1, 75, 2, 2, 48, None, false, true), (1, 67, 4, 2, 48, Some(33), false, false)]);
}
