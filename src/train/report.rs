//! What a run says at its start.

use super::metrics::group_digits;
use crate::comm::Communicator;
use crate::config::{Config, ModelArgs};
use crate::gpu::Gpu;
use crate::nn::Conversion;
use crate::num::DType;
use crate::ops::fp8_linear::Recipe;

/// `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    group_digits(&n.to_string())
}

/// Bytes in GiB, MiB or KiB.
pub fn size(bytes: u64) -> String {
    let kib = bytes as f64 / 1024.0;
    match kib {
        k if k >= 1024.0 * 1024.0 => format!("{:.2} GiB", k / 1024.0 / 1024.0),
        k if k >= 1024.0 => format!("{:.1} MiB", k / 1024.0),
        k => format!("{k:.1} KiB"),
    }
}

/// The adapter, and what limits a tensor on it.
pub fn adapter(gpu: &Gpu) -> String {
    let caps = gpu.caps();
    let kind = if caps.software { ", software" } else { "" };
    format!(
        "adapter: {} ({}{kind}); largest binding {}, largest buffer {}",
        gpu.name(),
        gpu.driver(),
        size(caps.max_binding),
        size(caps.max_buffer)
    )
}

/// How many kernels are compiled, and what lists them: a profile, where each has its time.
pub fn kernels(variants: &[String]) -> String {
    let mut names: Vec<&str> = variants.iter().map(|v| v.split(' ').next().unwrap_or_default()).collect();
    names.dedup();
    format!(
        "kernels: {} in {} variants; `moe8 bench step --profile` lists a step's with their times",
        names.len(),
        variants.len()
    )
}

/// Which dtype is used where.
pub fn dtypes(param: DType, reduce: DType) -> String {
    format!(
        "dtypes: master {}, compute {param}, all-gather {param}, reduce {reduce}, optimizer {}",
        DType::F32,
        DType::F32
    )
}

/// What the float8 converter changed, by recipe and name; where it changed nothing, why.
pub fn conversions(config: &Config, all: &[Conversion]) -> Vec<String> {
    if all.is_empty() {
        return vec![unconverted(config)];
    }
    let mut lines = Vec::new();
    for (recipe, name) in [
        (Recipe::Rowwise, "rowwise"),
        (Recipe::Tensorwise, "tensorwise"),
        (Recipe::RowwiseGwHp, "rowwise_with_gw_hp"),
    ] {
        let modules: Vec<&str> =
            all.iter().filter(|c| c.recipe == recipe).map(|c| c.module.as_str()).collect();
        if !modules.is_empty() {
            lines.push(format!("float8 {name}: {} modules: {}", modules.len(), modules.join(", ")));
        }
    }
    lines
}

/// Why no module computes in fp8.
fn unconverted(config: &Config) -> String {
    if config.linear_recipe().is_none() {
        return "float8: off: model.converters = [] (\"float8\" in it turns it on)".into();
    }
    let f = &config.float8;
    format!(
        "float8: nothing converted: float8.moe_fqns_prototype = {:?} names no experts, and each linear is in \
         float8.filter_fqns = {:?} or has a size that is no multiple of 16",
        f.moe_fqns_prototype, f.filter_fqns
    )
}

/// Parameter counts and FLOPs per token.
pub fn model(config: &Config, args: &ModelArgs) -> Vec<String> {
    let counts = args.counts();
    let seq = config.training.seq_len;
    vec![
        format!(
            "Total parameter count: dense {}, sparse {}, active {}",
            thousands(counts.dense),
            thousands(counts.sparse),
            thousands(counts.active())
        ),
        format!("Model {} size: {} total parameters", config.model.name.word(), thousands(counts.total())),
        format!("FLOPs per token: {} at sequence length {seq}", thousands(args.flops_per_token(seq))),
    ]
}

/// The seed, and where it is from.
pub fn seed(given: Option<u64>, used: u64) -> String {
    let source = if given.is_some() { "training.seed" } else { "the default; training.seed sets another" };
    format!("seed: {used} ({source})")
}

/// Ranks, batches and steps, in torchtitan's words.
pub fn plan(config: &Config, comm: &dyn Communicator, accumulation: usize) -> String {
    let t = &config.training;
    format!(
        "Trainer is initialized with local batch size {}, global batch size {}, gradient accumulation steps \
         {accumulation}, sequence length {}, total steps {} (warmup {}); {} rank(s), {}",
        t.local_batch_size,
        t.local_batch_size * comm.size() * accumulation,
        t.seq_len,
        t.steps,
        config.lr_scheduler.warmup_steps,
        comm.size(),
        comm.name()
    )
}

#[cfg(test)]
mod tests {
    use super::{size, thousands};

    #[test]
    fn numbers_read_well() {
        assert_eq!(thousands(15_123_712), "15,123,712");
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(size(3 << 29), "1.50 GiB");
        assert_eq!(size(128 << 20), "128.0 MiB");
        assert_eq!(size(32 << 10), "32.0 KiB");
    }
}
