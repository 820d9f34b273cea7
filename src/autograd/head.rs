//! The end of a model: output projection and loss, whose gradients come with it.

use super::rules::Rule;
use super::{Tape, Var};
use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::fp8_linear::{self, Recipe};
use crate::ops::gemm::{self, GemmOptions};
use crate::ops::{cross_entropy, elementwise};
use crate::params::ParamId;
use crate::tensor::Tensor;

/// Bytes of logits that exist at once, at most.
const LOGITS_BYTES: usize = 64 << 20;

impl Tape<'_> {
    /// Output projection and mean cross entropy in chunks of tokens, so that neither logits nor their gradient exist
    /// whole. `share` scales the gradient (1, or 1 / accumulation steps). The loss is the mean over tokens.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn cross_entropy_head(
        &mut self,
        h: &Var,
        weight: ParamId,
        labels: &Tensor,
        share: f32,
        recipe: Recipe,
    ) -> Result<Var> {
        let (gpu, x) = (self.gpu, &h.value);
        let w = self.weights.weight(weight)?;
        let (tokens, vocab, dtype) = (x.rows(), w.shape()[0], x.dtype());
        let losses = Tensor::flat(gpu, "token losses", tokens, DType::F32)?;
        let gradients = match self.recording {
            true => Some(Gradients::new(gpu, x, vocab, self.weights.gradient_home(&[weight])?)?),
            false => None,
        };
        let chunk = chunk_rows(tokens, vocab.div_ceil(4) * dtype.quad_bytes());
        for from in (0..tokens).step_by(chunk) {
            let to = (from + chunk).min(tokens);
            let rows = x.slice_rows(from, to);
            let logits = fp8_linear::forward(gpu, &rows, &w, None, recipe)?;
            let (labels, losses) = (labels.slice_flat(from, to), losses.slice_flat(from, to));
            match &gradients {
                None => cross_entropy::forward(gpu, &logits, &labels, &losses)?,
                Some(gradients) => {
                    let scale = share / tokens as f32;
                    cross_entropy::forward_backward(gpu, &logits, &labels, &losses, scale)?;
                    gradients.add(gpu, (&logits, &rows, &w), from..to, recipe)?;
                }
            }
        }
        let loss = cross_entropy::mean(gpu, &losses)?;
        match gradients {
            None => Ok(self.results("cross entropy", vec![loss])?.remove(0)),
            Some(gradients) => {
                let [d_h, d_w] = gradients.finish(gpu)?;
                self.push(Rule::Head { d_h, d_w, weight }, &[h], loss)
            }
        }
    }
}

/// The gradients of a head's input and weight, as its chunks of tokens make them.
struct Gradients {
    d_h: Tensor,
    /// The sum over chunks, in f32.
    d_w: Tensor,
    /// Where the weight's gradient goes at last, if that has a place: the same memory, or that of another dtype, which takes the sum.
    home: Option<Tensor>,
}

impl Gradients {
    /// Those for the input `x` (T, D) of a weight (V, D), nothing computed yet.
    fn new(gpu: &Gpu, x: &Tensor, vocab: usize, home: Option<Tensor>) -> Result<Gradients> {
        let d_h = Tensor::empty(gpu, "d_hidden", &[x.rows(), x.cols()], x.dtype())?;
        let d_w = match &home {
            Some(home) if home.dtype() == DType::F32 => home.clone(),
            _ => Tensor::empty(gpu, "d_output", &[vocab, x.cols()], DType::F32)?,
        };
        Ok(Gradients { d_h, d_w, home })
    }

    /// Those of the chunk of `tokens`: of its rows, and of the weight, added to what came before.
    fn add(
        &self,
        gpu: &Gpu,
        (d_logits, rows, w): (&Tensor, &Tensor, &Tensor),
        tokens: std::ops::Range<usize>,
        recipe: Recipe,
    ) -> Result<()> {
        let (d_rows, d_w, accumulate) =
            (self.d_h.slice_rows(tokens.start, tokens.end), &self.d_w, tokens.start > 0);
        if recipe == Recipe::HighPrecision {
            gemm::nn_into(gpu, d_logits, w, &d_rows, GemmOptions::default())?;
            return gemm::tn_into(gpu, d_logits, rows, d_w, accumulate, GemmOptions::default());
        }
        // Scales along the tokens are this chunk's own.
        let (flow, part) = fp8_linear::backward(gpu, d_logits, rows, w, None, recipe, true)?;
        elementwise::cast_into(gpu, &flow.expect("the rows' gradient was asked for"), &d_rows)?;
        if accumulate {
            elementwise::add_into(gpu, d_w, &part)
        } else {
            elementwise::cast_into(gpu, &part, d_w)
        }
    }

    /// Both, in the dtypes that they are handed on in.
    fn finish(self, gpu: &Gpu) -> Result<[Tensor; 2]> {
        let Gradients { d_h, d_w, home } = self;
        let d_w = match home {
            Some(home) if home.dtype() != DType::F32 => {
                elementwise::cast_into(gpu, &d_w, &home)?;
                home
            }
            None if d_h.dtype() != DType::F32 => elementwise::cast(gpu, &d_w, d_h.dtype())?,
            _ => d_w,
        };
        Ok([d_h, d_w])
    }
}

/// Tokens per chunk: equal chunks of at most [`LOGITS_BYTES`], multiples of 64 so that every slice can be bound.
fn chunk_rows(tokens: usize, row_bytes: usize) -> usize {
    let most = (LOGITS_BYTES / row_bytes.max(1)).max(64);
    let chunks = tokens.div_ceil(most);
    tokens.div_ceil(chunks.max(1)).next_multiple_of(64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceChoice;
    use crate::params::Weights;

    #[test]
    fn chunks_cover_and_stay_bindable() {
        for (tokens, bytes) in [(1, 16), (512, 9024), (16384, 9024), (16384, 1 << 20), (7, 1 << 30)] {
            let rows = chunk_rows(tokens, bytes);
            assert!(rows > 0 && rows.is_multiple_of(64), "{tokens} x {bytes}: {rows}");
        }
    }

    /// One weight of this shape.
    struct Output<'a>(&'a Gpu, [usize; 2]);

    impl Weights for Output<'_> {
        fn weight(&self, _: ParamId) -> Result<Tensor> {
            Tensor::empty(self.0, "weight", &self.1, DType::BF16)
        }

        fn gradient(&self, _: ParamId, _: Tensor) -> Result<()> {
            Ok(())
        }

        fn leave(&self, _: usize) -> Result<()> {
            Ok(())
        }
    }

    /// A loss alone needs the logits, and nothing in the size of a gradient.
    #[test]
    fn a_head_that_only_evaluates_holds_no_gradients() {
        let (tokens, width, vocab) = (64, 64, 4096);
        let opened = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let [evaluated, recorded] = [false, true].map(|recording| {
            let gpu = opened.planner();
            let weights = Output(&gpu, [vocab, width]);
            let mut tape = Tape { recording, ..Tape::new(&gpu, &weights) };
            let h = tape.leaf(Tensor::empty(&gpu, "h", &[tokens, width], DType::BF16).unwrap());
            let labels = Tensor::from_u32(&gpu, "labels", &[1; 64]).unwrap();
            tape.cross_entropy_head(&h, ParamId(0), &labels, 1.0, Recipe::HighPrecision).unwrap();
            gpu.memory()
        });
        // The sum of the weight's gradient in f32, and the input's gradient in bf16.
        let gradients = (4 * vocab * width + 2 * tokens * width) as u64;
        assert!(evaluated + gradients <= recorded, "{evaluated} bytes, with gradients {recorded}");
    }
}
