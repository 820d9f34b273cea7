//! Splits a command line into flags, for clap, and overrides, for the table of keys.

use crate::config::{Raw, Setting, is_switch};

/// The flag that torchtitan's scripts pass the file in; it looks like an override but is clap's.
const CONFIG_FILE: &str = "--job.config_file";

/// Divides `args` (without the program's name) into what clap reads and overrides `section.key[=value]`.
///
/// An override is `--NAME` with a dot in NAME. Its value follows `=`, or is the next argument unless that
/// begins with `--`; a switch takes only a boolean.
pub fn split(args: impl IntoIterator<Item = String>) -> (Vec<String>, Vec<String>) {
    let (mut flags, mut overrides) = (Vec::new(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let name = arg.split('=').next().unwrap_or_default();
        if !(name.starts_with("--") && name.contains('.')) || name == CONFIG_FILE {
            flags.push(arg);
            continue;
        }
        let (has_value, switch) = (arg.contains('='), is_switch(&name[2..]));
        let fits = |next: &String| !switch || bool::from_raw(&Raw::Word(next.clone())).is_some();
        match args.next_if(|next| !has_value && !next.starts_with("--") && fits(next)) {
            Some(value) => overrides.push(format!("{}={value}", &arg[2..])),
            None => overrides.push(arg[2..].to_string()),
        }
    }
    (flags, overrides)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_are_told_from_flags() {
        let cases: &[(&str, &str, &str)] = &[
            ("train --config f.toml", "train --config f.toml", ""),
            ("train --job.config_file f --training.steps=1", "train --job.config_file f", "training.steps=1"),
            ("train --job.config_file=a/b.toml", "train --job.config_file=a/b.toml", ""),
            ("train --training.steps 3 --ranks 2", "train --ranks 2", "training.steps=3"),
            ("train --training.compile --ranks 2", "train --ranks 2", "training.compile"),
            ("--training.compile train", "train", "training.compile"),
            ("train --training.compile False", "train", "training.compile=False"),
            ("train --training.global_batch_size -1", "train", "training.global_batch_size=-1"),
            ("--optimizer.lr=1e-3 train --explain", "train --explain", "optimizer.lr=1e-3"),
            ("train --config=a.b/c.toml", "train --config=a.b/c.toml", ""),
            ("train --a.b=c=d", "train", "a.b=c=d"),
        ];
        for (line, flags, overrides) in cases {
            let words = |s: &str| s.split_whitespace().map(str::to_string).collect::<Vec<_>>();
            assert_eq!(split(words(line)), (words(flags), words(overrides)), "{line}");
        }
    }
}
