//! The words that some keys take, as enums.

use super::value::choices;

choices! {
    /// Llama4 model sizes of torchtitan, July 2025.
    Flavor {
        /// Six layers of width 256: for tests.
        Debugmodel = "debugmodel",
        /// The same with NoPE layers and attention in blocks of 256.
        DebugmodelIrope = "debugmodel_irope",
        /// Llama 4 Scout.
        Scout = "17bx16e",
        /// Llama 4 Scout with NoPE layers and attention in blocks of 8192.
        ScoutIrope = "17bx16e_irope",
        /// Llama 4 Maverick.
        Maverick = "17bx128e",
        /// Llama 4 Maverick with NoPE layers and attention in blocks of 8192.
        MaverickIrope = "17bx128e_irope",
    }
    /// Model families.
    ModelName {
        /// Llama 4 of torchtitan, July 2025.
        Llama4 = "llama4",
    }
    /// Router scores (torchtitan: `MoEArgs.score_func`).
    ScoreFunc {
        /// Softmax over all experts, in f32.
        Softmax = "softmax",
        /// Each expert's own sigmoid, in f32.
        Sigmoid = "sigmoid",
    }
    /// Which earlier tokens a query may see.
    AttnMask {
        /// All earlier tokens of the sequence.
        Causal = "causal",
        /// Earlier tokens of the same document; an end-of-text token ends one.
        BlockCausal = "block_causal",
    }
    /// Where the tokens come from.
    Dataset {
        /// A seeded generator of text-like tokens with a known entropy; needs no file.
        Synthetic = "synthetic",
        /// One plain text file, one document.
        Text = "text",
        /// One JSON object a line, its `text` a document.
        Jsonl = "jsonl",
        /// Token numbers, little-endian u16 or u32.
        Tokens = "tokens",
    }
    /// Floating-point types of computation.
    Precision {
        /// bf16: f32 with 8 significant bits.
        Bfloat16 = "bfloat16",
        /// f32.
        Float32 = "float32",
    }
    /// Types that weights may be written in.
    ExportDtype {
        /// IEEE half precision.
        Float16 = "float16",
        /// bf16.
        Bfloat16 = "bfloat16",
        /// f32.
        Float32 = "float32",
    }
    /// fp8 recipes for dense linears (torchao `Float8LinearConfig.from_recipe_name`).
    Recipe {
        /// One scale per tensor; e4m3 inputs and weights, e5m2 output gradients; scales not rounded.
        Tensorwise = "tensorwise",
        /// One power-of-two scale per row or column of each operand; e4m3.
        Rowwise = "rowwise",
        /// As rowwise, but the weight gradient in high precision and the weight of the input gradient tensorwise.
        RowwiseWithGwHp = "rowwise_with_gw_hp",
    }
    /// How the learning rate falls from 1 to `lr_min` in the decay phase.
    DecayType {
        /// In a straight line.
        Linear = "linear",
        /// As 1 - sqrt(progress).
        Sqrt = "sqrt",
        /// As half a cosine.
        Cosine = "cosine",
    }
    /// Optimizers.
    OptimizerName {
        /// Adam with decoupled weight decay, on all parameters.
        AdamW = "AdamW",
    }
    /// Optimizer implementations of PyTorch; all compute the same.
    OptimizerImplementation {
        /// A loop over tensors.
        ForLoop = "for-loop",
        /// Horizontally fused.
        Foreach = "foreach",
        /// One CUDA kernel.
        Fused = "fused",
    }
    /// Whether gathered weights are freed between forward and backward.
    Reshard {
        /// As the sharding layer sees fit.
        Default = "default",
        /// Always.
        Always = "always",
        /// Never.
        Never = "never",
    }
    /// Collectives that exchange keys and values under context parallelism.
    RotateMethod {
        /// All-gather.
        Allgather = "allgather",
        /// All-to-all.
        Alltoall = "alltoall",
    }
    /// Asynchronous checkpoints.
    AsyncMode {
        /// The step waits for the file.
        Disabled = "disabled",
        /// Written beside the next steps.
        Async = "async",
        /// The same, through pinned memory.
        AsyncWithPinnedMem = "async_with_pinned_mem",
    }
    /// Activation checkpointing.
    AcMode {
        /// Some layers or operations recompute.
        Selective = "selective",
        /// Every layer recomputes.
        Full = "full",
        /// All activations are kept.
        None = "none",
    }
}
