//! `//!repeat i N` ... `//!end`: writes a block of shader text out N times with `$i` replaced by 0, 1, ... N-1.
//!
//! For the inner loops of matrix kernels, which drivers do not always unroll. Blocks may nest. `N` is a number or
//! the name of a constant of the kernel's variant.
//!
//! `//!let WORD text`: from here on `$WORD` is `text` (the rest of the line, perhaps nothing), whose own `$i` are those of the blocks
//! around the place where it is used. For what two variants of a text, or two kernels that share one, spell differently.
//!
//! `//!text NAME` ... `//!end`, outside of blocks: lines that `//!put NAME` writes, wherever it stands below.

use std::collections::HashMap;

/// What `//!let` has named so far.
type Words = Vec<(String, String)>;

/// Expands every repeat block, word and named text of `text`; `constant` gives the values of named counts.
///
/// # Panics
/// On a malformed directive: shader texts are ours, and a test expands each of them.
pub(super) fn expand(file: &str, text: &str, constant: &dyn Fn(&str) -> Option<u32>) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let lines = with_texts(file, &lines);
    let mut out = String::with_capacity(text.len());
    block(file, &lines, constant, &mut Words::new(), &mut out);
    out
}

/// The lines without named texts, which stand where they are put, also in texts below them.
fn with_texts<'a>(file: &str, lines: &[&'a str]) -> Vec<&'a str> {
    fn expand<'a>(file: &str, lines: &[&'a str], texts: &mut HashMap<&'a str, Vec<&'a str>>) -> Vec<&'a str> {
        let mut out = Vec::with_capacity(lines.len());
        let mut at = 0;
        while at < lines.len() {
            let line = lines[at].trim();
            if let Some(name) = line.strip_prefix("//!text ") {
                let end = at + 1 + matching_end(file, &lines[at + 1..]);
                let text = expand(file, &lines[at + 1..end], texts);
                texts.insert(name, text);
                at = end;
            } else if let Some(name) = line.strip_prefix("//!put ") {
                out.extend(texts.get(name).unwrap_or_else(|| panic!("{file}: `{line}`: no such text above")));
            } else {
                out.push(lines[at]);
            }
            at += 1;
        }
        out
    }
    expand(file, lines, &mut HashMap::new())
}

/// A line with the words known so far, but for those that `body` names anew.
fn spelt(line: &str, words: &Words, body: &[&str]) -> String {
    let anew = |word: &str| body.iter().any(|l| named(l.trim()).is_some_and(|(name, _)| name == word));
    let known = words.iter().filter(|(word, _)| !anew(word));
    known.fold(line.to_owned(), |line, (word, text)| line.replace(word, text))
}

/// The word, with its `$`, and the text of a line that names one.
fn named(line: &str) -> Option<(String, &str)> {
    let rest = line.strip_prefix("//!let ")?;
    let (word, text) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((format!("${word}"), text))
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
        if let Some((word, text)) = named(line) {
            words.retain(|(known, _)| *known != word);
            let apart = words.iter().all(|(known, _)| !known.starts_with(&word) && !word.starts_with(known));
            assert!(apart, "{file}: `{line}`: a word that begins as another");
            words.push((word, text.to_owned()));
            at += 1;
            continue;
        }
        let Some(rest) = line.strip_prefix("//!repeat ") else {
            out.push_str(&spelt(lines[at], words, &[]));
            out.push('\n');
            at += 1;
            continue;
        };
        let (name, count) =
            rest.split_once(' ').unwrap_or_else(|| panic!("{file}: `{line}` needs a name and a count"));
        let times = count.trim().parse().ok().or_else(|| constant(count.trim()));
        let times = times.unwrap_or_else(|| panic!("{file}: `{line}`: no constant {count}"));
        let end = at + 1 + matching_end(file, &lines[at + 1..]);
        let body = &lines[at + 1..end];
        let body: Vec<String> = body.iter().map(|line| spelt(line, words, body)).collect();
        for i in 0..times {
            let body: Vec<String> =
                body.iter().map(|l| l.replace(&format!("${name}"), &i.to_string())).collect();
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
            l if l.starts_with("//!repeat ") || l.starts_with("//!text ") => depth += 1,
            _ => {}
        }
    }
    panic!("{file}: `//!repeat` or `//!text` without `//!end`");
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
    fn a_text_is_put_with_the_words_of_its_place() {
        let text = "//!text BODY\n$OF\n//!repeat j 2\n$OF$j\n//!end\n//!end\n//!let OF a$i\n//!repeat i 2\n//!put BODY\n//!end\n\
                    //!repeat i 1\n//!let OF b\n//!put BODY\n//!end";
        assert_eq!(expand("t", text, &|_| None), "a0\na00\na01\na1\na10\na11\nb\nb0\nb1\n");
    }

    #[test]
    fn a_text_may_be_put_in_another() {
        let text =
            "//!text IN\na$i\n//!end\n//!text OUT\n//!put IN\nb\n//!end\n//!repeat i 2\n//!put OUT\n//!end";
        assert_eq!(expand("t", text, &|_| None), "a0\nb\na1\nb\n");
    }

    #[test]
    #[should_panic(expected = "begins as another")]
    fn words_that_could_be_mistaken_are_refused() {
        expand("t", "//!let AT .x\n//!let ATTENTION y", &|_| None);
    }

    #[test]
    #[should_panic(expected = "no such text")]
    fn a_text_that_is_not_there_is_refused() {
        expand("t", "//!put BODY", &|_| None);
    }

    #[test]
    #[should_panic(expected = "without `//!end`")]
    fn an_open_block_is_refused() {
        expand("t", "//!repeat i 2\na", &|_| None);
    }
}
