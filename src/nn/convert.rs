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

/// torchao's `_auto_filter_for_recipe`: shapes that its measurements found not to gain.
fn small(recipe: LinearRecipe, n: usize, k: usize) -> bool {
    match recipe {
        LinearRecipe::Tensorwise => k <= 4096 && n <= 1024,
        _ => n <= 2048 || k <= 1024 || (n <= 4096 && k <= 2048),
    }
}
