//! `moe8 export`: write a model's weights to `opts.output`.

use super::RunOptions;
use crate::atomic::check_target;
use crate::comm::{Communicator, Solo};
use crate::config::{Config, ExportDtype};
use crate::gpu::Gpu;
use crate::train::run::{build, open_data};
use crate::train::state;
use crate::train::weights::FileDtype;
use crate::{Error, Result};
use std::sync::Arc;

/// Writes the weights that a run of `config` would start from (`checkpoint.initial_load_path`, or initial values) with
/// upstream's names, expert biases included.
///
/// # Errors
/// As for training; a dtype that the file cannot have; a folder that does not exist, said at once; a disk that is full.
pub fn run(config: &Config, opts: &RunOptions) -> Result<()> {
    config.validate(1)?;
    let dtype = match config.checkpoint.export_dtype {
        ExportDtype::Float32 => FileDtype::F32,
        ExportDtype::Bfloat16 => FileDtype::BF16,
        ExportDtype::Float16 => {
            return Err(Error::user(
                "checkpoint.export_dtype = \"float16\" is not supported",
                "use \"bfloat16\" or \"float32\"",
            ));
        }
    };
    let path = opts.output.clone().unwrap_or_else(|| "model.safetensors".into());
    check_target(&path)?;
    let options = opts.run_options();
    let gpu = Gpu::open_with(&options.device, options.gpu)?;
    let (_, args) = open_data(config)?;
    args.validate()?;
    let solo: Arc<dyn Communicator> = Arc::new(Solo::new());
    let trainer = build(config, &gpu, &solo, &args)?;
    let tensors = state::save(&trainer, &path, dtype)?;
    log::info!("wrote {tensors} tensors to {}", path.display());
    Ok(())
}
