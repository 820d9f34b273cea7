//! Weight files: safetensors with upstream's parameter names.
//!
//! moe8 keeps expert tensors as torchtitan has kept them since mid July 2025: `w1`, `w3` (E, hidden, dim) and
//! `w2` (E, dim, hidden), shared experts likewise with E = 1. Before, `w1`, `w3` were (E, dim, hidden) and `w2`
//! (E, hidden, dim); a file may hold that layout too. Per tensor, in this order:
//! 1. the file's metadata key `expert_layout` decides if it is there: `july2025`, or `e_hidden_dim`;
//! 2. else the shape does; where dim = hidden, it is taken as `e_hidden_dim`.

use crate::{Error, Result};

mod load;
mod save;

pub use load::{load, load_all};
pub use save::{FileDtype, save};

/// The metadata key that names the layout of expert tensors.
pub const LAYOUT_KEY: &str = "expert_layout";
/// Its value for files with `w1` (E, dim, hidden).
pub const LAYOUT_JULY: &str = "july2025";
/// Its value for files with `w1` (E, hidden, dim), which is how moe8 writes them.
pub const LAYOUT_OURS: &str = "e_hidden_dim";

/// A tensor that the model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Upstream's name, such as `layers.1.moe.experts.w1`.
    pub name: String,
    /// Its shape here: expert tensors as [`LAYOUT_OURS`].
    pub shape: Vec<usize>,
    /// Whether a file may lack it (`expert_bias`, which upstream keeps as a buffer).
    pub optional: bool,
}

impl ParamSpec {
    /// A tensor that every file must have.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        ParamSpec { name: name.into(), shape: shape.into(), optional: false }
    }

    /// The same tensor, but a file may lack it.
    pub fn or_absent(self) -> Self {
        ParamSpec { optional: true, ..self }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the two layouts differ for this tensor: `w1`, `w2`, `w3` of experts and shared experts.
    fn is_expert(&self) -> bool {
        let mut parts = self.name.rsplit('.');
        let last = parts.next();
        self.shape.len() == 3
            && matches!(last, Some("w1" | "w2" | "w3"))
            && matches!(parts.next(), Some("experts" | "shared_expert"))
    }

    /// The shape with the last two dimensions exchanged.
    fn exchanged(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        let n = shape.len();
        shape.swap(n - 2, n - 1);
        shape
    }
}

impl From<&crate::params::Spec> for ParamSpec {
    fn from(spec: &crate::params::Spec) -> Self {
        ParamSpec::new(spec.name.clone(), spec.shape.clone())
    }
}

/// `x` of shape (E, A, B) as (E, B, A): from one expert layout to the other.
pub fn exchange_last_two(x: &[f32], [e, a, b]: [usize; 3]) -> Vec<f32> {
    assert_eq!(x.len(), e * a * b, "{} elements are no ({e}, {a}, {b})", x.len());
    let mut y = Vec::with_capacity(x.len());
    for matrix in 0..e {
        for j in 0..b {
            y.extend((0..a).map(|i| x[(matrix * a + i) * b + j]));
        }
    }
    y
}

/// What `expert_layout` says: `Some(true)` for July's.
fn layout_of(value: Option<&str>) -> Result<Option<bool>> {
    match value {
        None => Ok(None),
        Some(LAYOUT_JULY) => Ok(Some(true)),
        Some(LAYOUT_OURS) => Ok(Some(false)),
        Some(other) => {
            let what = format!("metadata {LAYOUT_KEY} is {other:?}");
            Err(Error::user(what, format!("it may be {LAYOUT_JULY:?} or {LAYOUT_OURS:?}, or absent")))
        }
    }
}
