//! Values before and after they have a type: what a TOML file or the command line holds ([`Raw`]), and
//! the types a key may have ([`Setting`]).

use std::fmt;

/// A value as it was written, before the key's type is known.
#[derive(Clone, Debug, PartialEq)]
pub enum Raw {
    /// Text from the command line, where nothing says whether `1` is a number or a name.
    Word(String),
    /// A TOML string.
    Str(String),
    /// A TOML integer.
    Int(i64),
    /// A TOML float.
    Float(f64),
    /// A TOML boolean.
    Bool(bool),
    /// A TOML array.
    List(Vec<Raw>),
    /// A TOML value of a type that no key has; holds the type's name.
    Other(&'static str),
}

impl Raw {
    /// The text, for strings of either origin.
    pub fn text(&self) -> Option<&str> {
        match self {
            Raw::Word(s) | Raw::Str(s) => Some(s),
            _ => None,
        }
    }

    /// Whether it is an integer, of any size.
    pub fn is_integer(&self) -> bool {
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit() || b == b'_');
        match self {
            Raw::Int(_) | Raw::Other(BEYOND) => true,
            Raw::Word(s) => digits(s.trim_start_matches(['-', '+'])),
            _ => false,
        }
    }
}

/// The type of an integer that TOML cannot hold.
pub(super) const BEYOND: &str = "number beyond 64 bits";

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Raw::Word(s) | Raw::Str(s) => f.write_str(&quote(s)),
            Raw::Int(i) => write!(f, "{i}"),
            Raw::Float(x) => f.write_str(&x.to_toml()),
            Raw::Bool(b) => write!(f, "{b}"),
            Raw::List(items) => {
                let items: Vec<String> = items.iter().map(Raw::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Raw::Other(kind) => write!(f, "a {kind}"),
        }
    }
}

/// A type that a configuration key may have.
pub trait Setting: Sized {
    /// What may be written, in words: `"a whole number >= 0"`.
    fn kind() -> String;
    /// The typed value, or `None` where `raw` is not of this kind.
    fn from_raw(raw: &Raw) -> Option<Self>;
    /// The value as TOML, such that [`Setting::from_raw`] reads it back to an equal value.
    fn to_toml(&self) -> String;
    /// The values when they are a fixed set, for suggestions.
    fn choices() -> &'static [&'static str] {
        &[]
    }
}

/// `s` as a TOML basic string.
pub(super) fn quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

impl Setting for bool {
    fn kind() -> String {
        "true or false".into()
    }
    fn from_raw(raw: &Raw) -> Option<Self> {
        match raw {
            Raw::Bool(b) => Some(*b),
            Raw::Word(s) => match s.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" => Some(true),
                "false" | "0" | "no" => Some(false),
                _ => None,
            },
            _ => None,
        }
    }
    fn to_toml(&self) -> String {
        self.to_string()
    }
}

/// A number without a sign, in words.
pub(super) const COUNT: &str = "a whole number >= 0";

/// Integers share everything but their range.
macro_rules! integer_setting {
    ($($ty:ty, $kind:expr;)*) => { $(
        impl Setting for $ty {
            fn kind() -> String {
                $kind.into()
            }
            fn from_raw(raw: &Raw) -> Option<Self> {
                match raw {
                    Raw::Int(i) => <$ty>::try_from(*i).ok(),
                    // Through i64: what TOML cannot hold could not be printed.
                    Raw::Word(s) => <$ty>::try_from(s.replace('_', "").parse::<i64>().ok()?).ok(),
                    _ => None,
                }
            }
            fn to_toml(&self) -> String {
                self.to_string()
            }
        }
    )* };
}
integer_setting! {
    usize, COUNT;
    i64, "a whole number";
    u64, COUNT;
}

impl Setting for f64 {
    fn kind() -> String {
        "a number".into()
    }
    fn from_raw(raw: &Raw) -> Option<Self> {
        match raw {
            #[allow(
                clippy::cast_precision_loss,
                reason = "a number that is written out as an integer is small"
            )]
            Raw::Int(i) => Some(*i as f64),
            Raw::Float(x) => Some(*x),
            Raw::Word(s) => s.replace('_', "").parse().ok(),
            _ => None,
        }
    }
    fn to_toml(&self) -> String {
        if self.is_nan() { "nan".into() } else { format!("{self:?}") }
    }
}

impl Setting for String {
    fn kind() -> String {
        "text in quotes".into()
    }
    fn from_raw(raw: &Raw) -> Option<Self> {
        raw.text().map(str::to_string)
    }
    fn to_toml(&self) -> String {
        quote(self)
    }
}

impl Setting for Vec<String> {
    fn kind() -> String {
        "a list of names, or one text with commas".into()
    }
    fn from_raw(raw: &Raw) -> Option<Self> {
        match raw {
            Raw::List(items) => items
                .iter()
                .map(|item| match item {
                    Raw::Str(s) => Some(s.trim().to_string()),
                    _ => None,
                })
                .collect(),
            _ => {
                // Both `a,b` and, pasted from a TOML file, `["a", "b"]`.
                let text = raw.text()?.trim();
                if text.eq_ignore_ascii_case(NONE) {
                    return Some(Vec::new());
                }
                let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
                let names = inner.split(',').map(|n| n.trim().trim_matches(['"', '\'']).to_string());
                Some(names.filter(|n| !n.is_empty()).collect())
            }
        }
    }
    fn to_toml(&self) -> String {
        let items: Vec<String> = self.iter().map(|s| quote(s)).collect();
        format!("[{}]", items.join(", "))
    }
}

/// How "not set" is written, since TOML has no null.
const NONE: &str = "none";

impl<T: Setting> Setting for Option<T> {
    fn kind() -> String {
        format!("{}, or {NONE:?}", T::kind())
    }
    fn from_raw(raw: &Raw) -> Option<Self> {
        match raw.text() {
            Some(s) if s.eq_ignore_ascii_case(NONE) || s.eq_ignore_ascii_case("null") => Some(None),
            _ => T::from_raw(raw).map(Some),
        }
    }
    fn to_toml(&self) -> String {
        self.as_ref().map_or_else(|| quote(NONE), T::to_toml)
    }
    fn choices() -> &'static [&'static str] {
        T::choices()
    }
}

/// Enums that are written as one of a few words. The word stands once, next to its variant.
macro_rules! choices {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident { $( $(#[doc = $vdoc:literal])* $variant:ident = $word:literal, )* }
    )*) => { $(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $( $(#[doc = $vdoc])* $variant, )* }

        impl $name {
            /// The word for this value in a configuration.
            pub fn word(self) -> &'static str {
                match self { $( $name::$variant => $word, )* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }

        impl $crate::config::value::Setting for $name {
            fn kind() -> String {
                format!("one of {}", Self::choices().join(" | "))
            }
            fn from_raw(raw: &$crate::config::value::Raw) -> Option<Self> {
                match raw.text()? { $( $word => Some($name::$variant), )* _ => None }
            }
            fn to_toml(&self) -> String {
                $crate::config::value::quote(self.word())
            }
            fn choices() -> &'static [&'static str] {
                &[ $( $word, )* ]
            }
        }
    )* };
}
pub(super) use choices;

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<T: Setting + PartialEq + fmt::Debug>(values: &[T]) {
        for v in values {
            let text = format!("x = {}", v.to_toml());
            let raw = crate::config::read::read_toml(&text).unwrap().remove(0).raw;
            assert_eq!(T::from_raw(&raw).as_ref(), Some(v), "{text}");
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
        round_trip(&[true, false]);
        round_trip(&[0_usize, 1, 7_919]);
        round_trip(&[-1_i64, i64::MAX, i64::MIN]);
        round_trip(&[1e-15, 4e-3, 1.0, 500_000.0, 1e300, f64::INFINITY, -0.5]);
        round_trip(&["".to_string(), "a \"b\" \\ \n\t\u{1}é".to_string()]);
        round_trip(&[vec![], vec!["output".to_string(), "router.gate".to_string()]]);
        round_trip(&[None, Some(1.2)]);
    }

    #[test]
    fn words_of_the_command_line() {
        let word = |s: &str| Raw::Word(s.into());
        assert_eq!(bool::from_raw(&word("True")), Some(true));
        assert_eq!(bool::from_raw(&word("maybe")), None);
        assert_eq!(usize::from_raw(&word("10_000")), Some(10_000));
        assert_eq!(usize::from_raw(&word("-1")), None);
        assert_eq!(f64::from_raw(&word("4e-3")), Some(4e-3));
        assert_eq!(Option::<usize>::from_raw(&word("none")), Some(None));
        let list = Some(vec!["a".to_string(), "b".to_string()]);
        for text in ["a,b", "a, b,", "[\"a\", \"b\"]", "['a','b']"] {
            assert_eq!(Vec::<String>::from_raw(&word(text)), list, "{text}");
        }
        assert_eq!(Vec::<String>::from_raw(&word("")), Some(vec![]));
    }

    #[test]
    fn types_are_not_mixed_up() {
        assert_eq!(usize::from_raw(&Raw::Str("3".into())), None);
        assert_eq!(usize::from_raw(&Raw::Float(3.0)), None);
        assert_eq!(bool::from_raw(&Raw::Int(1)), None);
        assert_eq!(f64::from_raw(&Raw::Bool(true)), None);
        assert_eq!(String::from_raw(&Raw::Int(1)), None);
        assert_eq!(Vec::<String>::from_raw(&Raw::List(vec![Raw::Int(1)])), None);
    }
}
