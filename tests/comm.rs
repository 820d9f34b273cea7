//! Solo and Local ranks, the launcher's environment, and what happens when ranks fail.

mod conformance;

use conformance::exercise;
use moe8::comm::{
    CommStats, Communicator, Launcher, Solo, chunk, from_env, reduce, run, run_threads, run_threads_within,
};
use moe8::{Error, Result};
use std::collections::HashMap;
use std::time::{Duration, Instant};

#[test]
fn solo_returns_its_input() {
    let solo = Solo::new();
    assert_eq!((solo.rank(), solo.size(), solo.name()), (0, 1, "solo"));
    let seen = exercise(&solo);
    let threads = run_threads(1, |comm| Ok(exercise(&*comm))).unwrap();
    assert_eq!(seen, threads[0], "solo and one thread differ");
}

#[test]
fn threads_conform_and_repeat_bit_for_bit() {
    for n in [1, 2, 3, 4, 7] {
        let go = || {
            run_threads(n, |comm| {
                assert_eq!((comm.size(), comm.name(), comm.concurrent()), (n, "threads", true));
                Ok(exercise(&*comm))
            })
            .unwrap()
        };
        assert_eq!(go(), go(), "{n} ranks");
    }
}

/// A communicator that breaks one thing, to see that `exercise` notices.
struct Faulty {
    inner: Box<dyn Communicator>,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    GatherByte,
    GatherOrder,
    ExchangeByte,
    ExchangeOrder,
    BroadcastByte,
    BroadcastRoot,
    Uncounted,
    SplitKey,
}

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.inner.all_gather(send, recv)?;
        match self.fault {
            Fault::GatherByte if recv.len() > 200 => recv[200] ^= 1,
            Fault::GatherOrder => recv.rotate_left(send.len()),
            _ => {}
        }
        Ok(())
    }
    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.inner.all_to_all(send, recv)?;
        match self.fault {
            Fault::ExchangeByte if recv.len() > 200 => recv[200] ^= 1,
            Fault::ExchangeOrder => recv.rotate_left(send.len() / self.size()),
            _ => {}
        }
        Ok(())
    }
    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()> {
        let root = if self.fault == Fault::BroadcastRoot { (root + 1) % self.size() } else { root };
        self.inner.broadcast(root, buf)?;
        if self.fault == Fault::BroadcastByte && buf.len() > 5 {
            buf[5] ^= 1;
        }
        Ok(())
    }
    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }
    fn stats(&self) -> CommStats {
        let mut stats = self.inner.stats();
        if self.fault == Fault::Uncounted && stats.all_gather.received > 0 {
            stats.all_gather.received -= 1;
        }
        stats
    }
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        self.inner.split(color, if self.fault == Fault::SplitKey { 0 } else { key })
    }
}

#[test]
fn the_conformance_table_can_fail() {
    use Fault::*;
    let table = [
        GatherByte,
        GatherOrder,
        ExchangeByte,
        ExchangeOrder,
        BroadcastByte,
        BroadcastRoot,
        Uncounted,
        SplitKey,
        None,
    ];
    for fault in table {
        let seen = run_threads(3, |inner| Ok(exercise(&Faulty { inner, fault })));
        assert_eq!(seen.is_err(), fault != None, "{fault:?}");
    }
}

/// Each rank's error text; no rank may succeed.
fn errors(n: usize, body: impl Fn(&dyn Communicator) -> Result<()> + Sync) -> Vec<String> {
    run_threads(n, |comm| Ok(body(&*comm).unwrap_err().to_string())).unwrap()
}

#[test]
fn different_calls_are_named_on_every_rank() {
    let kinds = errors(3, |c| match c.rank() {
        2 => c.barrier(),
        _ => c.all_gather(&[1; 4], &mut [0; 12]),
    });
    let sizes = errors(2, |c| c.broadcast(0, &mut vec![0; 5 + c.rank()]));
    let roots = errors(2, |c| c.broadcast(c.rank(), &mut [0; 5]));
    let splits =
        errors(2, |c| if c.rank() == 0 { c.split(0, 0).map(|_| ()) } else { c.all_to_all(&[], &mut []) });
    for (texts, words) in [
        (kinds, ["rank 0 all_gather of 4 bytes", "rank 2 barrier"]),
        (sizes, ["rank 0 broadcast of 5 bytes", "rank 1 broadcast of 6 bytes"]),
        (roots, ["of 5 bytes from rank 0", "of 5 bytes from rank 1"]),
        (splits, ["rank 0 split", "rank 1 all_to_all of 0 bytes"]),
    ] {
        for text in texts {
            assert!(words.iter().all(|w| text.contains(w)) && text.contains("hint"), "{text}");
        }
    }
}

#[test]
fn wrong_lengths_are_broken_contracts() {
    let panics = |f: fn(&dyn Communicator)| {
        let broken = run_threads(2, |c| {
            f(&*c);
            Ok(())
        });
        let text = broken.unwrap_err().to_string();
        assert!(text.contains("panicked"), "{text}");
        text
    };
    let gather = panics(|c| c.all_gather(&[0; 3], &mut [0; 7]).unwrap());
    assert!(gather.contains("3 bytes among 2 ranks into 7 bytes"), "{gather}");
    let odd = panics(|c| c.all_to_all(&[0; 3], &mut [0; 3]).unwrap());
    assert!(odd.contains("2 equal blocks"), "{odd}");
    let root = panics(|c| c.broadcast(2, &mut []).unwrap());
    assert!(root.contains("from rank 2 among 2 ranks"), "{root}");
    let rows = panics(|c| reduce::reduce_scatter_f32(c, &[0.0; 5], &mut [0.0; 2], reduce::Op::Sum).unwrap());
    assert!(rows.contains("5 elements among 2 ranks into 2 each"), "{rows}");
}

/// Runs `last` on rank 1 of 3 while the others are in a collective; returns the error.
fn others_wait(
    last: impl Fn() -> Result<()> + Sync,
    collective: fn(&dyn Communicator) -> Result<()>,
) -> String {
    let start = Instant::now();
    let end = run_threads(3, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            return last();
        }
        let e = collective(&*comm).unwrap_err();
        assert!(collective(&*comm).is_err(), "a dead group came back to life");
        Err(e)
    });
    assert!(start.elapsed() < Duration::from_secs(5), "the others hung for {:?}", start.elapsed());
    end.unwrap_err().to_string()
}

#[test]
fn a_failing_rank_fails_the_others() {
    let gather = |c: &dyn Communicator| c.all_gather(&[1], &mut [0; 3]);
    let left = others_wait(|| Ok(()), gather);
    assert!(left.contains("rank 1 left, so rank 0 cannot complete its all_gather of 1 bytes"), "{left}");
    let own = others_wait(|| Err(Error::user("disk full", "free some")), |c| c.barrier());
    assert!(own.contains("disk full") && own.contains("free some"), "{own}");
    let panic = others_wait(|| panic!("boom {}", 7), |c| c.split(0, 0).map(|_| ()));
    assert!(panic.contains("rank 1 panicked: boom 7"), "{panic}");
}

#[test]
fn a_failing_rank_fails_its_part_too() {
    let end = run_threads(4, |comm| {
        let part = comm.split(comm.rank() / 2, 0)?;
        if comm.rank() == 3 {
            panic!("boom");
        }
        // Ranks 0 and 1 are a group of their own, which still works.
        let ended = part.barrier();
        assert_eq!(ended.is_ok(), comm.rank() < 2);
        Ok(())
    });
    assert!(end.unwrap_err().to_string().contains("rank 3 panicked: boom"));
}

#[test]
fn a_stuck_rank_times_out() {
    let limit = Duration::from_millis(200);
    let start = Instant::now();
    let texts = run_threads_within(3, limit, |comm| {
        if comm.rank() == 2 {
            std::thread::sleep(3 * limit);
        }
        Ok(comm.barrier().unwrap_err().to_string())
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    let waited = "waited 0.2 s in its barrier and ranks [2] of 3 did not come";
    assert!(texts[..2].iter().any(|t| t.contains(waited)), "{texts:?}");
    assert!(texts[2].contains("gave up waiting for ranks [2]"), "{texts:?}");
}

#[test]
fn no_ranks_is_no_work() {
    assert!(run_threads(0, |_| Ok(())).unwrap().is_empty());
}

#[test]
fn pieces_of_any_size_give_the_same() {
    let byte = |from: usize, to: usize, i: usize| (from * 83 + to * 29 + i * 5 + 1) as u8;
    for (n, len, limit) in [
        (1, 13, 5),
        (2, 13, 1),
        (3, 0, 4),
        (3, 1, 1),
        (3, 13, 1),
        (3, 13, 7),
        (3, 13, 38),
        (3, 13, 39),
        (3, 13, 40),
        (4, 101, 100),
        (3, 13, usize::MAX),
    ] {
        run_threads(n, |comm| {
            let (me, case) = (comm.rank(), format!("{n} ranks, {len} bytes, limit {limit}"));
            let most = limit.max(n);
            let send: Vec<u8> = (0..n * len).map(|i| byte(me, i / len, i % len)).collect();
            let mut got = vec![0; n * len];
            chunk::all_to_all(limit, n, &send, &mut got, |s, r| {
                assert!(r.len() <= most, "{case}");
                comm.all_to_all(s, r)
            })?;
            let want: Vec<u8> = (0..n).flat_map(|r| (0..len).map(move |i| byte(r, me, i))).collect();
            assert_eq!(got, want, "all_to_all, {case}");

            chunk::all_gather(limit, n, &send[..len], &mut got, |s, r| {
                assert!(r.len() <= most, "{case}");
                comm.all_gather(s, r)
            })?;
            let want: Vec<u8> = (0..n).flat_map(|r| (0..len).map(move |i| byte(r, 0, i))).collect();
            assert_eq!(got, want, "all_gather, {case}");

            let mut buf = send[..len].to_vec();
            chunk::broadcast(limit, &mut buf, |part| {
                assert!(part.len() <= limit);
                comm.broadcast(n - 1, part)
            })?;
            assert_eq!(buf, want[(n - 1) * len..], "broadcast, {case}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn payloads_of_several_megabytes_arrive_whole() {
    let byte = |from: usize, to: usize, i: usize| (i % 251 * (from + 2) + to) as u8;
    run_threads(3, |comm| {
        let (n, me, len) = (comm.size(), comm.rank(), (2 << 20) + 17);
        let send: Vec<u8> = (0..n).flat_map(|to| (0..len).map(move |i| byte(me, to, i))).collect();
        let mut got = vec![0; n * len];
        comm.all_to_all(&send, &mut got)?;
        let whole = |r: usize| got[r * len..][..len].iter().enumerate().all(|(i, b)| *b == byte(r, me, i));
        assert!((0..n).all(whole), "all_to_all");

        comm.all_gather(&send[..len], &mut got)?;
        let whole = |r: usize| got[r * len..][..len].iter().enumerate().all(|(i, b)| *b == byte(r, 0, i));
        assert!((0..n).all(whole), "all_gather");

        let mut buf = send[..len].to_vec();
        comm.broadcast(1, &mut buf)?;
        assert!(buf == got[len..2 * len], "broadcast");
        assert_eq!(comm.stats().total().calls, 3, "pieces are no calls");
        Ok(())
    })
    .unwrap();
}

#[test]
fn many_rounds_of_uneven_ranks_stay_in_step() {
    run_threads(3, |comm| {
        for round in 0..3000u32 {
            if round as usize % 7 == comm.rank() {
                std::thread::yield_now();
            }
            let mut got = [0; 12];
            comm.all_gather(&(round + comm.rank() as u32).to_le_bytes(), &mut got)?;
            let want: Vec<u8> = (0..3).flat_map(|r| (round + r).to_le_bytes()).collect();
            assert_eq!(got[..], want, "round {round}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_helper_thread_gets_its_own_communicator() {
    run_threads(2, |comm| {
        let helper = comm.split(0, 0)?;
        std::thread::scope(|s| {
            let prefetch = s.spawn(|| (0..200).try_for_each(|_| helper.all_gather(&[1], &mut [0; 2])));
            (0..200).try_for_each(|_| comm.barrier())?;
            prefetch.join().unwrap()
        })
    })
    .unwrap();
}

#[test]
fn threads_of_a_rank_take_turns() {
    run_threads(2, |comm| {
        std::thread::scope(|s| {
            let other = s.spawn(|| (0..200).try_for_each(|_| comm.barrier()));
            (0..200).try_for_each(|_| comm.barrier())?;
            other.join().unwrap()
        })
    })
    .unwrap();
}

fn detect(vars: &[(&str, &str)]) -> Option<Launcher> {
    let vars: HashMap<_, _> = vars.iter().copied().collect();
    Launcher::detect(|key| vars.get(key).map(|v| v.to_string()))
}

#[test]
fn launchers_are_recognised() {
    type Row<'a> = (&'a [(&'a str, &'a str)], Option<(&'a str, Option<usize>, usize)>);
    let table: [Row; 7] = [
        (&[], None),
        (&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")], Some(("Open MPI", Some(4), 3))),
        (&[("PMI_SIZE", "2"), ("PMI_RANK", "0")], Some(("MPICH", Some(2), 0))),
        (&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "8")], Some(("PMIx", Some(8), 1))),
        (&[("PMIX_RANK", "1")], Some(("PMIx", None, 1))),
        // A batch script of Slurm is not a rank.
        (&[("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "0")], None),
        (&[("PMI_SIZE", "two"), ("PMI_RANK", "zero")], None),
    ];
    for (vars, want) in table {
        let want = want.map(|(name, size, rank)| Launcher { name, size, rank });
        assert_eq!(detect(vars), want, "{vars:?}");
    }
}

#[test]
fn the_launcher_and_the_build_decide() {
    let under = |size: Option<usize>| Launcher { name: "Open MPI", size, rank: 0 };
    let ok = |size, ranks, built| under(size).wants_mpi(ranks, built).unwrap();
    assert!(ok(Some(4), None, true) && ok(Some(4), Some(4), true) && ok(None, Some(4), true));
    assert!(ok(Some(1), None, true) && !ok(Some(1), None, false) && !ok(Some(1), Some(1), false));
    let text = |size, ranks, built| under(size).wants_mpi(ranks, built).unwrap_err().to_string();
    let not_built = text(Some(4), None, false);
    assert!(not_built.contains("MPI asked for but not built") && not_built.contains("started 4 processes"));
    assert!(not_built.contains("--features mpi"), "{not_built}");
    assert!(text(None, None, false).contains("several processes"));
    assert!(text(Some(4), Some(2), true).contains("2 ranks asked for, but the MPI launcher started 4"));
    assert!(matches!(under(Some(4)).wants_mpi(None, false), Err(Error::User { .. })));
}

#[test]
fn without_a_launcher_ranks_are_threads() {
    assert!(from_env(None).unwrap().is_none() && from_env(Some(3)).unwrap().is_none());
    assert!(matches!(from_env(Some(0)), Err(Error::User { .. })));
    let names = |ranks| run(ranks, |c| Ok((c.rank(), c.name().to_string()))).unwrap();
    assert_eq!(names(None), [(0, "solo".to_string())]);
    assert_eq!(names(Some(2)), [(0, "threads".to_string()), (1, "threads".to_string())]);
}
