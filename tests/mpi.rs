//! Ranks as MPI processes: `cargo test --features mpi --test mpi`.

mod conformance;
mod mpirun;

use conformance::exercise;
use moe8::comm::{self, Communicator, Mpi, run_threads};
use moe8::{Error, Result};
use mpirun::{Job, is_child, launch, succeed};
use std::time::Duration;

#[test]
fn mpi_equals_threads_bit_for_bit() {
    if !is_child() {
        return [1, 2, 3].into_iter().for_each(|n| succeed("mpi_equals_threads_bit_for_bit", n));
    }
    let world = Mpi::open().unwrap();
    let (rank, size) = (world.rank(), world.size());
    let threads = run_threads(size, |comm| Ok(exercise(&*comm))).unwrap();
    assert!(exercise(&world) == threads[rank], "mpi and threads differ");

    assert!(world.name().starts_with("mpi (") && world.name().contains('.'), "{}", world.name());
    let again = Mpi::open().err().unwrap().to_string();
    assert!(again.contains("opened once"), "{again}");
    different_calls(&world);
    helper_thread(&world);

    // Pieces of some bytes that divide no length of the table.
    let world = world.with_chunk_limit(211);
    assert!(exercise(&world) == threads[rank], "mpi in small pieces and threads differ");
    comm::finalize();
    let late = world.barrier().unwrap_err().to_string();
    assert!(late.contains("barrier after MPI was closed"), "{late}");
}

fn different_calls(world: &Mpi) {
    if world.size() < 2 {
        return;
    }
    let last = world.size() - 1;
    let kinds = match world.rank() {
        r if r == last => world.barrier(),
        _ => world.all_to_all(&vec![0; 4 * world.size()], &mut vec![0; 4 * world.size()]),
    };
    let text = kinds.unwrap_err().to_string();
    assert!(
        text.contains("rank 0 all_to_all of") && text.contains(&format!("rank {last} barrier")),
        "{text}"
    );
    let text = world.broadcast(0, &mut vec![0; 5 + world.rank()]).unwrap_err().to_string();
    assert!(text.contains("rank 0 broadcast of 5 bytes") && text.contains("rank 1 broadcast of 6 bytes"));
}

/// A prefetch thread with its own communicator, while this one is busy too.
fn helper_thread(world: &Mpi) {
    assert!(world.concurrent(), "the tests' MPI libraries have MPI_THREAD_MULTIPLE");
    let helper = world.split(0, 0).unwrap();
    std::thread::scope(|s| {
        let prefetch = s.spawn(|| {
            let mut got = vec![0; 1000 * helper.size()];
            (0..50).try_for_each(|_| helper.all_gather(&[7; 1000], &mut got))?;
            assert!(got.iter().all(|b| *b == 7));
            Result::<()>::Ok(())
        });
        (0..50).try_for_each(|_| world.barrier()).unwrap();
        prefetch.join().unwrap().unwrap();
    });
}

#[test]
fn run_takes_the_launchers_ranks() {
    if !is_child() {
        return succeed("run_takes_the_launchers_ranks", 2);
    }
    let wrong = comm::run(Some(3), |_| Ok(())).unwrap_err().to_string();
    assert!(wrong.contains("3 ranks asked for, but the MPI launcher started 2"), "{wrong}");
    let mine = comm::run(None, |c| Ok((c.rank(), c.size(), c.name().starts_with("mpi")))).unwrap();
    let rank = std::env::var("OMPI_COMM_WORLD_RANK").or(std::env::var("PMI_RANK")).unwrap();
    assert_eq!(mine, [(rank.parse().unwrap(), 2, true)]);
}

/// Runs a job that must fail before `limit`, with `words` in its output.
fn fails(name: &str, ranks: usize, limit: u64, words: &str) -> Job {
    let job = launch(name, ranks, Duration::from_secs(limit));
    assert_ne!(job.code, Some(0), "{}", job.text);
    assert!(job.text.contains(words), "{}", job.text);
    assert!(job.took < Duration::from_secs(limit), "only the time limit ended it:\n{}", job.text);
    job
}

#[test]
fn a_panicking_rank_ends_the_job() {
    if !is_child() {
        fails("a_panicking_rank_ends_the_job", 3, 20, "boom on 1");
        return;
    }
    let world = Mpi::open().unwrap();
    assert!(world.rank() != 1, "boom on 1");
    world.barrier().unwrap();
}

#[test]
fn a_panic_on_a_helper_thread_ends_the_job() {
    if !is_child() {
        fails("a_panic_on_a_helper_thread_ends_the_job", 2, 20, "boom beside 0");
        return;
    }
    let world = Mpi::open().unwrap();
    std::thread::scope(|s| {
        let rank = world.rank();
        s.spawn(move || assert!(rank != 0, "boom beside 0"));
        // Rank 1 never comes: without the panic hook both would wait for ever.
        if rank == 1 {
            std::thread::sleep(Duration::from_secs(60));
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_failing_rank_ends_the_job_with_its_code() {
    if !is_child() {
        let job = fails("a_failing_rank_ends_the_job_with_its_code", 3, 20, "disk full");
        assert_eq!(job.code, Some(2), "{}", job.text);
        return;
    }
    let end = comm::run(None, |world| {
        if world.rank() == 2 {
            return Err(Error::user("disk full", "free some"));
        }
        world.barrier()
    });
    if let Err(e) = end {
        eprintln!("{e}");
        comm::abort(2);
    }
}

#[test]
fn a_stuck_rank_times_out() {
    if !is_child() {
        let job = launch("a_stuck_rank_times_out", 2, Duration::from_secs(2));
        assert_ne!(job.code, Some(0), "{}", job.text);
        return assert!(job.took < Duration::from_secs(7), "the launcher's limit had no effect");
    }
    let world = Mpi::open().unwrap();
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_secs(60));
    }
    world.barrier().unwrap();
}
