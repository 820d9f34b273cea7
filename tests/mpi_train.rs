//! Training on MPI ranks: `cargo test --features mpi --test mpi_train`. Two and three ranks give the curve of threads bit
//! for bit, and that of one rank to the order of sums.

mod mpirun;
#[path = "common/tiny.rs"]
mod tiny;

use moe8::comm::{self, Communicator, run_threads};
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::nn::Converters;
use moe8::num::DType;
use moe8::train::trainer::Recipe;
use mpirun::{is_child, succeed};
use std::sync::Arc;

const GLOBAL: usize = 6;

/// Losses of three f32 steps as one of `comm`'s ranks sees them.
fn losses(comm: Arc<dyn Communicator>) -> moe8::Result<Vec<f64>> {
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    let recipe = Recipe { reshard: true, ..tiny::recipe(DType::F32, 3) };
    let mut trainer = tiny::trainer(&gpu, comm.clone(), &Converters::none(), recipe);
    (0..3)
        .map(|step| {
            let batch = tiny::batch(step, GLOBAL, comm.rank(), comm.size());
            let pending = trainer.step(&[batch])?;
            Ok(trainer.read(pending)?.loss)
        })
        .collect()
}

#[test]
fn mpi_ranks_train_like_threads() {
    if !is_child() {
        return [1, 2, 3].into_iter().for_each(|n| succeed("mpi_ranks_train_like_threads", n));
    }
    let (size, mine) = comm::run(None, |comm| {
        let size = comm.size();
        Ok((size, losses(Arc::from(comm))?))
    })
    .expect("a run under MPI")
    .remove(0);
    let threads = run_threads(size, |comm| losses(Arc::from(comm))).expect("a run on threads");
    assert_eq!(mine, threads[0], "{size} ranks");
    let alone = losses(Arc::new(comm::Solo::new())).expect("a run alone");
    for (got, want) in mine.iter().zip(&alone) {
        assert!((got / want - 1.0).abs() < 1e-5, "{size} ranks: {got}, alone {want}");
    }
}
