//! What modules are made of: linears, SwiGLU blocks, and the builder that collects their parameters.

use super::{Conversion, Converters};
use crate::Result;
use crate::autograd::{Readers, Tape, Var};
use crate::ops::dispatch;
use crate::ops::fp8_linear::Recipe;
use crate::params::{Init, ParamId, Spec, Table};

/// A linear and how it computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub weight: ParamId,
    pub recipe: Recipe,
}

impl Linear {
    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        tape.linear(x, self.weight, None, self.recipe)
    }

    /// What [`Tape::linears`] takes.
    pub fn pair(&self) -> (ParamId, Recipe) {
        (self.weight, self.recipe)
    }
}

/// Three linears: `w2(silu(w1 x) * w3 x)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ffn {
    pub w1: Linear,
    pub w2: Linear,
    pub w3: Linear,
}

impl Ffn {
    /// SwiGLU; over expert groups if `plan`.
    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var, plan: Option<&dispatch::Plan>) -> Result<Var> {
        let offs = plan.map(|p| &p.offs);
        let [gate, up] = tape.linears(x, self.first(), offs)?;
        let hidden = tape.swiglu(&gate, &up, Readers { linears: &[self.w2.pair()], offs })?;
        tape.linear(&hidden, self.w2.weight, offs, self.w2.recipe)
    }

    /// Those that read its input.
    pub fn first(&self) -> [(ParamId, Recipe); 2] {
        [self.w1.pair(), self.w3.pair()]
    }

    pub fn linears(&self) -> [Linear; 3] {
        [self.w1, self.w2, self.w3]
    }
}

/// torch's `trunc_normal_` cuts at an absolute 2 unless told otherwise.
pub(super) const DEFAULT_CUT: f32 = 2.0;

/// Collects the table's rows, the conversions and the modules' names while a model is built.
pub(super) struct Builder<'a> {
    pub table: Table,
    pub converters: &'a Converters,
    pub conversions: Vec<Conversion>,
    /// The FSDP group of the parameters that come next.
    pub block: usize,
    linears: Vec<String>,
    experts: Vec<String>,
}

impl<'a> Builder<'a> {
    pub fn new(converters: &'a Converters) -> Self {
        let (linears, experts) = (Vec::new(), Vec::new());
        Builder { table: Table::default(), converters, conversions: Vec::new(), block: 0, linears, experts }
    }

    /// Names in the converters' settings that fit no module built so far, as sentences.
    pub fn unmatched(&self) -> Vec<String> {
        self.converters.unmatched(&self.linears, &self.experts)
    }

    pub fn param(&mut self, name: String, shape: &[usize], init: Init) -> ParamId {
        self.table.add(Spec { name, shape: shape.to_vec(), block: self.block, init })
    }

    pub fn norm(&mut self, module: &str, dim: usize) -> ParamId {
        self.param(format!("{module}.weight"), &[dim], Init::Ones)
    }

    /// A dense linear with a weight of (n, k).
    pub fn linear(&mut self, module: &str, n: usize, k: usize, init: Init) -> Linear {
        let recipe = self.converters.linear(module, n, k);
        self.linears.push(module.into());
        self.note(module, recipe);
        Linear { weight: self.param(format!("{module}.weight"), &[n, k], init), recipe }
    }

    fn note(&mut self, module: &str, recipe: Recipe) {
        if recipe != Recipe::HighPrecision {
            self.conversions.push(Conversion { module: module.into(), recipe });
        }
    }

    /// Dense FFN: w1 starts at std 0.02, w2 and w3 at `std`.
    pub fn ffn(&mut self, module: &str, dim: usize, hidden: usize, std: f32) -> Ffn {
        // w1 and w3 read one input: side by side they may be one product.
        let w1 = self.linear(&format!("{module}.w1"), hidden, dim, normal(0.02));
        let w3 = self.linear(&format!("{module}.w3"), hidden, dim, normal(std));
        let w2 = self.linear(&format!("{module}.w2"), dim, hidden, normal(std));
        Ffn { w1, w2, w3 }
    }

    /// `GroupedExperts`: w1, w3 (E, hidden, dim), w2 (E, dim, hidden); starts like [`Builder::ffn`].
    pub fn experts(&mut self, module: &str, experts: usize, (dim, hidden): (usize, usize), std: f32) -> Ffn {
        let recipe = self.converters.experts(module);
        self.experts.push(module.into());
        self.note(module, recipe);
        let mut one = |name: &str, n: usize, k: usize, std: f32| Linear {
            weight: self.param(format!("{module}.{name}"), &[experts, n, k], normal(std)),
            recipe,
        };
        let w1 = one("w1", hidden, dim, 0.02);
        let w3 = one("w3", hidden, dim, std);
        let w2 = one("w2", dim, hidden, std);
        Ffn { w1, w2, w3 }
    }
}

/// Normal with torch's default cut.
pub(super) fn normal(std: f32) -> Init {
    Init::Normal { std, cut: DEFAULT_CUT }
}
