//! `//!repeat i N` ... `//!end`: writes a block of shader text out N times with `$i` replaced by 0, 1, ... N-1.
//!
//! For the inner loops of matrix kernels, which drivers do not always unroll. Blocks may nest. `N` is a number or
//! the name of a constant of the kernel's variant.
//!
//! `//!let WORD text`: from here on `$WORD` is `text` (the rest of the line, perhaps nothing). For what two variants of a text
//! spell differently, in blocks that stand 0 or 1 times.

/// What `//!let` has named so far.
type Words = Vec<(String, String)>;

/// Expands every repeat block and word of `text`; `constant` gives the values of named counts.
///
/// # Panics
/// On a malformed directive: shader texts are ours, and a test expands each of them.
pub(super) fn expand(file: &str, text: &str, constant: &dyn Fn(&str) -> Option<u32>) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::with_capacity(text.len());
    block(file, &lines, constant, &mut Words::new(), &mut out);
    out
}

fn block(
    file: &str,
    lines: &[&str],
    constant: &dyn Fn(&str) -> Option<u32>,
    words: &mut Words,
    out: &mut String,
) {
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at].trim();
        assert!(line != "//!end", "{file}: `//!end` without `//!repeat`");
        if let Some(rest) = line.strip_prefix("//!let ") {
            let (word, text) = rest.split_once(' ').unwrap_or((rest, ""));
            words.retain(|(known, _)| *known != format!("${word}"));
            words.push((format!("${word}"), text.to_owned()));
            at += 1;
            continue;
        }
        let Some(rest) = line.strip_prefix("//!repeat ") else {
            out.push_str(
                &words.iter().fold(lines[at].to_owned(), |line, (word, text)| line.replace(word, text)),
            );
            out.push('\n');
            at += 1;
            continue;
        };
        let (name, count) =
            rest.split_once(' ').unwrap_or_else(|| panic!("{file}: `{line}` needs a name and a count"));
        let times = count.trim().parse().ok().or_else(|| constant(count.trim()));
        let times = times.unwrap_or_else(|| panic!("{file}: `{line}`: no constant {count}"));
        let end = at + 1 + matching_end(file, &lines[at + 1..]);
        for i in 0..times {
            let body: Vec<String> =
                lines[at + 1..end].iter().map(|l| l.replace(&format!("${name}"), &i.to_string())).collect();
            block(file, &body.iter().map(String::as_str).collect::<Vec<_>>(), constant, words, out);
        }
        at = end + 1;
    }
}

/// Index of the `//!end` that closes a block whose first line is `lines[0]`.
fn matching_end(file: &str, lines: &[&str]) -> usize {
    let mut depth = 0;
    for (i, line) in lines.iter().enumerate() {
        match line.trim() {
            "//!end" if depth == 0 => return i,
            "//!end" => depth -= 1,
            l if l.starts_with("//!repeat ") => depth += 1,
            _ => {}
        }
    }
    panic!("{file}: `//!repeat` without `//!end`");
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn nested_blocks_are_written_out() {
        let text = "a\n//!repeat i 2\n//!repeat j N\nc$i_$j\n//!end\n//!end\nb";
        let got = expand("t", text, &|n| (n == "N").then_some(2));
        assert_eq!(got, "a\nc0_0\nc0_1\nc1_0\nc1_1\nb\n");
    }

    #[test]
    fn words_stand_for_what_was_said_last() {
        let text =
            "//!repeat y N\n//!let AT .x\n//!let GET f\n//!end\n//!repeat y M\n//!let AT\n//!end\n$GET(p$AT)";
        let of = |n: u32| expand("t", text, &|name| Some(if name == "N" { n } else { 2 - n }));
        assert_eq!(of(2), "f(p.x)\n");
        assert_eq!(of(1), "f(p)\n");
        assert_eq!(of(0), "$GET(p)\n");
    }

    #[test]
    #[should_panic(expected = "without `//!end`")]
    fn an_open_block_is_refused() {
        expand("t", "//!repeat i 2\na", &|_| None);
    }
}
