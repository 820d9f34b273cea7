//! What ops with several kernels chose on a planner, and how `--explain` says it.

use std::collections::BTreeMap;

/// The kernel that an op chose for a class of its calls.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Choice {
    /// The class, whose first word is the op; see `ops::choice::Call::class`.
    pub class: String,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Why it was chosen, in words.
    pub why: String,
}

impl Choice {
    /// One line for each kernel of an op and reason: how many classes of calls it is for, and which.
    /// In the order of ops, kernels and reasons.
    pub fn lines(choices: impl IntoIterator<Item = Choice>) -> Vec<String> {
        let mut classes: BTreeMap<(String, &'static str, String), Vec<String>> = BTreeMap::new();
        for Choice { class, kernel, why } in choices {
            let (op, call) = class.split_once(' ').unwrap_or((&class, ""));
            classes.entry((op.into(), kernel, why)).or_default().push(call.into());
        }
        let line = |((op, kernel, why), calls): (_, Vec<String>)| match calls.as_slice() {
            [call] => format!("{op} {call}: {kernel} ({why})"),
            calls => {
                let names = calls.join(", ");
                format!("{op}: {kernel} ({why}) for {} classes of calls: {names}", calls.len())
            }
        };
        classes.into_iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_one_kernel_and_reason_share_a_line() {
        let choice = |class: &str, kernel, why: &str| Choice { class: class.into(), kernel, why: why.into() };
        let all = [
            choice("gemm nn fp8 small", "scalar", "by capability"),
            choice("gemm nt fp8 small", "scalar", "by capability"),
            choice("gemm nt fp8 large", "scalar", "tuned: 2.0x faster than tiled"),
            choice("quantize rows narrow", "scalar", "by capability"),
        ];
        assert_eq!(
            Choice::lines(all),
            [
                "gemm: scalar (by capability) for 2 classes of calls: nn fp8 small, nt fp8 small",
                "gemm nt fp8 large: scalar (tuned: 2.0x faster than tiled)",
                "quantize rows narrow: scalar (by capability)",
            ]
        );
        assert_eq!(Choice::lines([]), [""; 0]);
    }
}
