//! Which linears and experts compute in fp8.
//!
//! Definition: torchtitan `components/quantization/float8.py` (July 2025): the MoE swap wraps the parameters of every
//! module whose name contains one of `moe_fqns_prototype`; then every remaining linear becomes a Float8Linear unless its
//! name contains one of `filter_fqns`, or a dimension is no multiple of 16.

use crate::config::{Config, Recipe as LinearRecipe};
use crate::ops::fp8_linear::Recipe;

/// The float8 converter's settings.
#[derive(Clone, Debug)]
pub struct Converters {
    linear: Option<LinearRecipe>,
    filter: Vec<String>,
    moe: Vec<String>,
}

/// One module and what it was converted to, for the start-up log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// The module's fully qualified name.
    pub module: String,
    /// The recipe of its GEMMs.
    pub recipe: Recipe,
}

/// Value of `filter_fqns` that skips linears too small to gain.
const AUTO_FILTER: &str = "auto_filter_small_kn";

impl Converters {
    /// The settings of a validated configuration.
    pub fn new(config: &Config) -> Converters {
        Converters {
            linear: config.linear_recipe(),
            filter: config.float8.filter_fqns.clone(),
            moe: config.moe_fqns().to_vec(),
        }
    }

    /// No conversion at all.
    pub fn none() -> Converters {
        Converters { linear: None, filter: Vec::new(), moe: Vec::new() }
    }

    /// A sentence for each entry that fits none of these modules, with the nearest names.
    pub fn unmatched(&self, linears: &[String], experts: &[String]) -> Vec<String> {
        let moe = self
            .moe
            .iter()
            .filter_map(|entry| complaint("float8.moe_fqns_prototype", entry, "experts module", experts));
        let named = self.filter.iter().filter(|entry| self.linear.is_some() && *entry != AUTO_FILTER);
        let filter = named.filter_map(|entry| complaint("float8.filter_fqns", entry, "linear", linears));
        moe.chain(filter).collect()
    }

    /// Recipe of the grouped GEMMs of an experts module.
    pub fn experts(&self, module: &str) -> Recipe {
        let wrapped = self.moe.iter().any(|target| module.contains(target.as_str()));
        if wrapped { Recipe::Rowwise } else { Recipe::HighPrecision }
    }

    /// Recipe of the dense linear `module` with a weight of (N, K).
    pub fn linear(&self, module: &str, n: usize, k: usize) -> Recipe {
        let Some(recipe) = self.linear else { return Recipe::HighPrecision };
        let skipped = self.filter.iter().any(|f| f != AUTO_FILTER && module.contains(f.as_str()));
        let aligned = n.is_multiple_of(16) && k.is_multiple_of(16);
        if skipped || !aligned || (self.filter.iter().any(|f| f == AUTO_FILTER) && small(recipe, n, k)) {
            return Recipe::HighPrecision;
        }
        match recipe {
            LinearRecipe::Tensorwise => Recipe::Tensorwise,
            LinearRecipe::Rowwise => Recipe::Rowwise,
            LinearRecipe::RowwiseWithGwHp => Recipe::RowwiseGwHp,
        }
    }
}

/// How many modules a warning names.
const NEAREST: usize = 3;

/// The sentence for an `entry` of `key` that no name contains; `None` where one does.
fn complaint(key: &str, entry: &str, what: &str, names: &[String]) -> Option<String> {
    if names.iter().any(|name| name.contains(entry)) {
        return None;
    }
    // A name is as near as the nearest of its ends: `experts` of `layers.1.moe.experts`.
    let ends = |name: &str| {
        std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1)).collect::<Vec<_>>()
    };
    let near = |name: &String| {
        let scores =
            ends(name).into_iter().map(|at| strsim::normalized_damerau_levenshtein(entry, &name[at..]));
        scores.fold(0.0, f64::max)
    };
    let mut nearest: Vec<(f64, &String)> = names.iter().map(|name| (near(name), name)).collect();
    nearest.sort_by(|a, b| b.0.total_cmp(&a.0));
    let list: Vec<&str> = nearest.iter().take(NEAREST).map(|(_, name)| name.as_str()).collect();
    let nearest =
        if list.is_empty() { "there is none".into() } else { format!("the nearest: {}", list.join(", ")) };
    Some(format!("{key} has {entry:?}, which is in the name of no {what}; {nearest}"))
}

/// torchao's `_auto_filter_for_recipe`: shapes that its measurements found not to gain.
fn small(recipe: LinearRecipe, n: usize, k: usize) -> bool {
    match recipe {
        LinearRecipe::Tensorwise => k <= 4096 && n <= 1024,
        _ => n <= 2048 || k <= 1024 || (n <= 4096 && k <= 2048),
    }
}

#[cfg(test)]
mod tests {
    use super::{AUTO_FILTER, Converters, LinearRecipe};

    #[test]
    fn entries_that_fit_nothing_are_named_with_the_nearest() {
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_string()).collect::<Vec<_>>();
        let linears = names(&["layers.0.attention.wq", "layers.1.moe.router.gate", "output"]);
        let experts = names(&["layers.1.moe.shared_expert", "layers.1.moe.experts", "layers.3.moe.experts"]);
        let with = |linear, filter: &[&str], moe: &[&str]| {
            Converters { linear, filter: names(filter), moe: names(moe) }.unmatched(&linears, &experts)
        };
        let on = Some(LinearRecipe::Rowwise);
        assert_eq!(with(on, &["output", "router.gate", AUTO_FILTER], &["experts", "moe."]), names(&[]));
        assert_eq!(with(None, &["no.such"], &[]), names(&[]), "a filter of nothing");
        let got = with(on, &["router.gates"], &["expurts", "experts"]);
        assert_eq!(got.len(), 2, "{got:?}");
        assert!(got[0].starts_with("float8.moe_fqns_prototype has \"expurts\""), "{}", got[0]);
        assert!(got[0].contains("the nearest: layers.1.moe.experts, layers.3.moe.experts"), "{}", got[0]);
        assert!(got[1].starts_with("float8.filter_fqns has \"router.gates\""), "{}", got[1]);
        assert!(got[1].contains("the nearest: layers.1.moe.router.gate"), "{}", got[1]);
        let bare = Converters { linear: on, filter: Vec::new(), moe: names(&["experts"]) };
        assert!(bare.unmatched(&linears, &[])[0].ends_with("there is none"));
    }
}
