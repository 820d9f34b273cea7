//! The kernels' texts with their fragments emulated, so that any adapter can run everything else in them: tiles, masks, places in
//! memory, rescaling. The self-test's table judges them, see the tests of `check::attention`.
//!
//! A software adapter's compiler decides how: with fragments in memory and blocks of text as loops it takes seconds for a kernel, with
//! both written out it did not finish one.
#![cfg(test)]

use super::{BACKWARD_TEXT, FORWARD_TEXT};
use crate::gpu::Kernel;
use crate::ops::emulation;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::LazyLock;

/// Of an operand A a lane has row `EDGE - 1 - lane / PER`, of B the COLS columns from `lane % PER * COLS` on, of C where they meet. They
/// lie in arrays of its own, a fragment's name being its number there. To the kernels a lane is one of row `lane / PER`: were it the same
/// row, a barrier that is missing would not show. What lanes of a subgroup do together goes through memory of the whole workgroup, which waits more
/// often than the kernels do. Loops have a bound that compilers do not see, so that they stay loops.
const FRAGMENTS: &str = "
const COLS = EDGE / PER;
const UNIT_OF_STRIDE = 4u / QUAD; // in scalars
var<private> emu_li: u32;
var<workgroup> emu_lanes: array<f32, THREADS>;
// Whether the subgroup takes part in the round, and whether its results are to be rescaled.
var<private> emu_takes: bool = true;
var<private> emu_rises: bool;

fn emu_walk(takes: bool) -> bool {
  emu_takes = takes;
  return true;
}
fn emu_one() -> u32 {
  return 1u + (p.batch >> 31u);
}
fn emu_row() -> u32 {
  return EDGE - 1u - emu_li % LANES / PER;
}
fn emu_col() -> u32 {
  return emu_li % PER * COLS;
}
fn emu_zero(c: u32) {
  for (var n = 0u; n < COLS * emu_one(); n++) {
    emu_c[c * COLS + n] = 0.0;
  }
}
fn emu_mad(a: u32, b: u32, c: u32) {
  for (var n = 0u; n < COLS * emu_one(); n++) {
    var sum = emu_c[c * COLS + n];
    for (var k = 0u; k < EDGE * emu_one(); k++) {
      sum += emu_a[a * EDGE + k] * emu_b[(b * EDGE + k) * COLS + n];
    }
    emu_c[c * COLS + n] = sum;
  }
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
  emu_rises = false;
  var any = false;
  for (var i = 0u; i < THREADS * emu_one(); i++) {
    any = any || emu_lanes[i] > 0.0;
    emu_rises = emu_rises || (i / LANES == emu_li / LANES && emu_lanes[i] > 0.0);
  }
  workgroupBarrier();
  return any;
}
fn emu_store_scores(c: u32, at: u32, stride: u32) {
  for (var n = 0u; n < COLS * emu_one(); n++) {
    let to = emu_row() * stride * UNIT_OF_STRIDE + emu_col() + n;
    scores[at + to / 4u][to % 4u] = emu_c[c * COLS + n];
  }
}
fn emu_halves(v: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(pack2x16float(v.xy)), unpack2x16float(pack2x16float(v.zw)));
}
fn emu_h8(a: vec4<f32>, b: vec4<f32>) -> H8 {
  return H8(a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
}
";

/// Places of which there are two with fragments of 8 x 8, by the loops' counters.
const PLACES: &str = "
//!repeat y EDGE16
//!let OWN_G own0
//!let OWN_H own0
//!let OWN_P own_p0
//!end
//!repeat y EDGE8
//!let OWN_G select(own0, own1, g_ == 1u)
//!let OWN_H select(own0, own1, h_ == 1u)
//!let OWN_P select(own_p0, own_p1, g_ == 1u)
//!end
";

/// What a line says other than the kernel's. Halves are floats, rounded where the kernel rounds. Where a subgroup would go on while
/// others do not, it waits: rounds that it leaves out are masked, results that it does not rescale are multiplied by 1.
const WORDS: [(&str, &str); 32] = [
    ("alias FragmentA = coop_mat8x8<f16, A>;", ""),
    ("alias FragmentB = coop_mat8x8<f16, B>;", ""),
    ("alias FragmentC = coop_mat8x8<f32, C>;", ""),
    ("alias FragmentA = coop_mat16x16<f16, A>;", ""),
    ("alias FragmentB = coop_mat16x16<f16, B>;", ""),
    ("alias FragmentC = coop_mat16x16<f32, C>;", ""),
    ("struct H8 { x: vec4<f16>, y: vec4<f16> }", "alias H8 = array<f32, 8>;"),
    ("//!let H8_PUT H8", "//!let H8_PUT emu_h8"),
    ("//!let H4_PUT vec4<f16>", "//!let H4_PUT emu_halves"),
    ("struct F4 { x: f32, y: f32, z: f32, w: f32 }", "alias F4 = array<f32, 4>;"),
    ("struct H4 { x: f16, y: f16, z: f16, w: f16 }", "alias H4 = array<f32, 4>;"),
    (
        "struct H8 { x: f16, x1: f16, x2: f16, x3: f16, y: f16, y1: f16, y2: f16, y3: f16 }",
        "alias H8 = array<f32, 8>;",
    ),
    ("vec4<f32>(q.x, q.y, q.z, q.w)", "vec4<f32>(q[0], q[1], q[2], q[3])"),
    (" + NOTE].x", " + NOTE][0]"),
    ("let h = vec4<f16>(v);", "let h = emu_halves(v);"),
    ("<f16>", "<f32>"),
    ("24u << 20u", "1u << 14u"), // a cache of a sequence or two
    ("subgroupBarrier()", "workgroupBarrier()"),
    ("@builtin(subgroup_size) lanes: u32,", ""),
    ("as_wide(lanes)", "as_wide(WIDTH)"),
    ("subgroupShuffleXor(", "emu_shuffle("),
    ("subgroupAny(", "emu_any("),
    (
        "let up = max(stale$i, row_max(top));",
        "let up = select(stale$i, max(stale$i, row_max(top)), emu_rises);",
    ),
    ("once = j + $ou * ROUND < first + ROWS;", "once = emu_walk(j + $ou * ROUND < first + ROWS);"),
    ("once = i + ($ou + 1u) * ROUND > first;", "once = emu_walk(i + ($ou + 1u) * ROUND > first);"),
    ("return DOCS == 1u || ", "return !emu_takes || DOCS == 1u || "),
    ("return keys <=", "return vec4<bool>(emu_takes) & keys <="),
    ("return queries >=", "return vec4<bool>(emu_takes) & queries >="),
    ("own$g", "$OWN_G"),
    ("own$h", "$OWN_H"),
    ("own_p$g", "$OWN_P"),
    ("  let lane = li % LANES;", "  let lane = li % LANES;\n  emu_li = li;"),
];

/// The names of the blocks that become loops: elements of a head, both kinds of pieces, rounds.
const LOOPS: [&str; 4] = ["d", "h", "g", "o"];

/// The operands that lie in memory as halves, as a kernel's text binds them.
const OPERANDS: [&str; 4] = ["q", "k", "v", "d_out"];

/// What a text's lines have named.
#[derive(Default)]
struct Names {
    /// Fragments, by what stands before their indices: what they are.
    fragments: BTreeMap<String, char>,
    /// How (`A`, `B` or `C`, after a `T` if rows lie one after the other) and from which memory fragments come.
    loads: BTreeSet<(String, String)>,
}

/// `memory[at]...`, `stride`: what comes after the `&` of a load or a store.
fn place(text: &str) -> (&str, &str, &str) {
    let (memory, rest) = text.split_once('[').expect("a place in memory");
    let (inner, stride) = rest.rsplit_once(", ").expect("a stride");
    let (at, _) = inner.rsplit_once(']').expect("an index");
    (memory, at, stride.trim_end_matches(");"))
}

/// The number of a fragment, `name$i_$d_$h` or the like. Those of B serve at once: a name has one place.
fn number(fragment: &str, kind: char) -> String {
    let (name, indices) = match fragment.strip_prefix("$RESULT") {
        Some(indices) => ("$RESULT", indices),
        None => fragment.split_at(fragment.find('$').expect("a fragment of many")),
    };
    match (kind, indices) {
        ('B', _) => format!("emu_at_{name}"),
        (_, "$i_$d_$h") => format!("emu_at_{name} + ($iu * DF + d_) * PIECES + h_"),
        (_, "$i_$g") => format!("emu_at_{name} + $iu * PIECES + g_"),
        _ => panic!("{fragment}: what number?"),
    }
}

/// A line with calls in place of what is done to fragments.
fn rewrite(line: &str, names: &mut Names) -> String {
    let indent = &line[..line.len() - line.trim_start().len()];
    let statement = line.trim_start().trim_start_matches("let ").trim_start_matches("var ");
    if let Some(rest) = statement.strip_prefix("coopStoreT(") {
        let (fragment, rest) = rest.split_once(", &").expect("a place to store in");
        let (memory, at, stride) = place(rest);
        return format!("{indent}emu_store_{memory}({}, {at}, {stride});", number(fragment, 'C'));
    }
    let Some((fragment, value)) = statement.split_once(" = ") else { return line.to_owned() };
    if let Some(kind) = value.strip_prefix("Fragment") {
        let kind = kind.chars().next().expect("a kind");
        names.fragments.insert(name_of(fragment), kind);
        return if kind == 'C' {
            format!("{indent}emu_zero({});", number(fragment, kind))
        } else {
            String::new()
        };
    }
    if let Some(operands) = value.strip_prefix("coopMultiplyAdd(") {
        let operands: Vec<&str> = operands.trim_end_matches(");").split(", ").collect();
        let [a, b, c] = operands[..] else { panic!("{line}: three operands") };
        assert_eq!(c, fragment, "{line}: sums stay where they are");
        return format!("{indent}emu_mad({}, {}, {});", number(a, 'A'), number(b, 'B'), number(c, 'C'));
    }
    let Some(rest) = value.strip_prefix("coopLoad") else { return line.to_owned() };
    let (how, rest) = rest.split_once(">(&").expect("a fragment to load");
    let (memory, at, stride) = place(rest);
    let how = how.replace("<Fragment", "");
    let kind = how.chars().last().expect("a kind");
    names.fragments.insert(name_of(fragment), kind);
    names.loads.insert((how.clone(), memory.to_owned()));
    format!("{indent}emu_{how}_{memory}({}, {at}, {stride});", number(fragment, kind))
}

/// What stands before a fragment's indices.
fn name_of(fragment: &str) -> String {
    fragment.split('$').next().expect("a name").to_owned()
}

/// The function that loads fragments in one way from one memory.
fn loader(how: &str, memory: &str) -> String {
    let value = match memory {
        "ta" | "tb" => format!("{memory}[at + n / 8u][n % 8u]"),
        _ if OPERANDS.contains(&memory) => {
            format!("unpack2x16float({memory}[at + n / 4u][n / 2u % 2u])[n % 2u]")
        }
        _ => format!("{memory}[at + n / 4u][n % 4u]"),
    };
    let (array, each, row, col) = match how {
        "TA" => ("emu_a", "EDGE", "emu_row()", "e"),
        "B" => ("emu_b", "(EDGE * COLS)", "(emu_col() + e % COLS)", "e / COLS"),
        "TB" => ("emu_b", "(EDGE * COLS)", "(e / COLS)", "emu_col() + e % COLS"),
        "TC" => ("emu_c", "COLS", "emu_row()", "emu_col() + e"),
        _ => panic!("{how}: a way to load that the kernels did not use"),
    };
    format!(
        "fn emu_{how}_{memory}(fragment: u32, at: u32, stride: u32) {{
  for (var e = 0u; e < {each} * emu_one(); e++) {{
    let n = {row} * stride * UNIT_OF_STRIDE + {col};
    {array}[fragment * {each} + e] = {value};
  }}
}}\n"
    )
}

/// Where fragments lie: of every name of A and C those of all rows and all elements of a head.
fn homes(names: &Names) -> String {
    let mut out = String::new();
    let many = "PIECES * RF * DF";
    for (kind, array, each, size) in
        [('A', "emu_a", many, "EDGE"), ('B', "emu_b", "1u", "EDGE * COLS"), ('C', "emu_c", many, "COLS")]
    {
        let of_kind: Vec<_> = names.fragments.iter().filter(|(_, k)| **k == kind).collect();
        for (i, (name, _)) in of_kind.iter().enumerate() {
            let _ = writeln!(out, "const emu_at_{name} = {i}u * {each};");
        }
        let _ = writeln!(out, "var<private> {array}: array<f32, {}u * {each} * {size}>;", of_kind.len());
    }
    out
}

/// The line, or where its block becomes a loop that loop's; `blocks` says of those around it whether they did.
fn looped(line: String, blocks: &mut Vec<bool>) -> String {
    if let Some(block) = line.strip_prefix("//!repeat ") {
        let (name, count) = block.split_once(' ').expect("a name and a count");
        blocks.push(LOOPS.contains(&name));
        if LOOPS.contains(&name) {
            return format!("for (var {name}_ = 0u; {name}_ < {count} * emu_one(); {name}_++) {{");
        }
    } else if line.starts_with("//!text ") {
        blocks.push(false);
    } else if line == "//!end" && blocks.pop() == Some(true) {
        return "}".to_owned();
    }
    line
}

fn emulate(text: &str) -> String {
    let (mut names, mut out, mut blocks) = (Names::default(), PLACES.to_owned(), Vec::new());
    for line in text.lines().filter(|line| !line.starts_with("enable ")) {
        let mut line = WORDS.iter().fold(line.to_owned(), |line, (from, to)| line.replace(from, to));
        for name in OPERANDS {
            line = line.replace(&format!(" {name}: array<H4>;"), &format!(" {name}: array<vec2<u32>>;"));
        }
        line = looped(rewrite(&line, &mut names), &mut blocks);
        for name in LOOPS {
            line = line.replace(&format!("${name}u"), &format!("{name}_")).replace(&format!("${name}"), name);
        }
        let _ = writeln!(out, "{line}");
    }
    out.push_str(FRAGMENTS);
    out.push_str(&homes(&names));
    names.loads.iter().for_each(|(how, memory)| out.push_str(&loader(how, memory)));
    out
}

static FORWARD: LazyLock<String> = LazyLock::new(|| emulate(FORWARD_TEXT));
static BACKWARD: LazyLock<String> = LazyLock::new(|| emulate(BACKWARD_TEXT));

/// What stands in for `kernel` where this thread asked for it.
pub(super) fn kernel(kernel: Kernel) -> Kernel {
    match emulation::fragments() {
        None => kernel,
        Some(_) if kernel.entry == "forward" => Kernel { text: FORWARD.as_str(), ..kernel },
        Some(_) => Kernel { text: BACKWARD.as_str(), ..kernel },
    }
}

#[test]
fn every_word_that_is_respelt_is_one_of_the_kernels() {
    for (from, _) in WORDS {
        assert!(FORWARD_TEXT.contains(from) || BACKWARD_TEXT.contains(from), "{from}");
    }
}
