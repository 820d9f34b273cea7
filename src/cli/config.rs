//! `moe8 config`: the resolved configuration and what follows from it.

use std::io::Write as _;

use super::RunOptions;
use crate::config::{Config, list_keys};
use crate::train::report::thousands;
use crate::{Error, Result};

/// Checks the configuration for `--ranks` ranks and prints it as TOML, then the derived numbers as comments.
pub fn run(config: &Config, opts: &RunOptions) -> Result<()> {
    let ranks = opts.ranks.unwrap_or(1);
    config.validate(ranks)?;
    print(&format!("{}\n{}", config.to_toml(), derived(config, ranks)?))
}

/// Prints every key that moe8 knows.
pub fn print_keys() -> Result<()> {
    print(&list_keys())
}

/// To standard output; a reader that closes its end early (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("standard output".as_ref(), e, "is the disk full?"))
        }
        _ => Ok(()),
    }
}

/// What follows from the configuration, as TOML comments.
fn derived(config: &Config, ranks: usize) -> Result<String> {
    let args = &config.args;
    let counts = args.counts();
    let accumulate = config.accumulation_steps(config.dp_shard(ranks)?)?;
    let t = &config.training;
    let sequences = t.local_batch_size * ranks * accumulate;
    Ok(format!(
        "# Derived\n\
         # head_dim {}, dense hidden {}, expert hidden {}, MoE layers {} of {}\n\
         # parameters: dense {}, sparse {}, active {}, total {}\n\
         # FLOPs per token (forward and backward): {}\n\
         # ranks {ranks}, passes per step {accumulate}, global batch {sequences} sequences = {} tokens\n",
        args.head_dim(),
        args.dense_hidden(),
        args.expert_hidden(),
        args.n_moe_layers(),
        args.n_layers,
        thousands(counts.dense),
        thousands(counts.sparse),
        thousands(counts.active()),
        thousands(counts.total()),
        thousands(args.flops_per_token(t.seq_len)),
        thousands(sequences.saturating_mul(t.seq_len) as u64),
    ))
}
