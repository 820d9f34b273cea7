//! What parameters a model has.

/// A parameter's row number in the [`Table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Ones (norm weights).
    Ones,
    /// Normal with this standard deviation, cut at `cut` (absolute) on both sides.
    Normal {
        /// Standard deviation.
        std: f32,
        /// Largest absolute value.
        cut: f32,
    },
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The fully qualified name, as torchtitan has it.
    pub name: String,
    /// The shape; expert tensors are (E, out, in).
    pub shape: Vec<usize>,
    /// The FSDP group that is gathered and reduced as one.
    pub block: usize,
    /// How it starts.
    pub init: Init,
}

impl Spec {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Every parameter of a model, in the order of its blocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    specs: Vec<Spec>,
}

impl Table {
    /// Adds a row.
    pub fn add(&mut self, spec: Spec) -> ParamId {
        self.specs.push(spec);
        ParamId(self.specs.len() - 1)
    }

    /// The row of `id`.
    pub fn spec(&self, id: ParamId) -> &Spec {
        &self.specs[id.0]
    }

    /// All rows.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Spec)> {
        self.specs.iter().enumerate().map(|(i, s)| (ParamId(i), s))
    }

    /// The parameters of one block.
    pub fn block(&self, block: usize) -> Vec<ParamId> {
        self.iter().filter(|(_, s)| s.block == block).map(|(id, _)| id).collect()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.specs.iter().map(|s| s.block + 1).max().unwrap_or(0)
    }

    /// The row with this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.specs.iter().position(|s| s.name == name).map(ParamId)
    }
}
