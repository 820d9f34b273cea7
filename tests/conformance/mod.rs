//! What every communicator must do, whatever its backend: run on each rank of a group.

use half::bf16;
use moe8::comm::reduce::{self, Op};
use moe8::comm::{CommStats, Communicator, Traffic};

/// Nothing, one, primes, and more than a cache line.
const LENGTHS: [usize; 7] = [0, 1, 2, 7, 13, 101, 1009];

/// Runs every collective and reduction on `comm`, asserts the results against closed forms, and
/// returns all received bytes, for comparison with another backend.
pub fn exercise(comm: &dyn Communicator) -> Vec<u8> {
    let before = comm.stats();
    let mut seen = Vec::new();
    for len in LENGTHS {
        all_gather(comm, len, &mut seen);
        all_to_all(comm, len, &mut seen);
        broadcast(comm, len, &mut seen);
    }
    comm.barrier().unwrap();
    count(comm, comm.stats().since(&before));
    for len in LENGTHS {
        floats(comm, len, &mut seen);
        counts(comm, len, &mut seen);
    }
    nan_and_overflow(comm);
    split(comm, &mut seen);
    seen
}

fn byte(from: usize, to: usize, i: usize) -> u8 {
    (from * 31 + to * 101 + i * 7 + 3) as u8
}

fn all_gather(comm: &dyn Communicator, len: usize, seen: &mut Vec<u8>) {
    let n = comm.size();
    let send: Vec<u8> = (0..len).map(|i| byte(comm.rank(), 0, i)).collect();
    let mut recv = vec![0xEE; n * len];
    comm.all_gather(&send, &mut recv).unwrap();
    let want: Vec<u8> = (0..n).flat_map(|r| (0..len).map(move |i| byte(r, 0, i))).collect();
    assert_eq!(recv, want, "all_gather of {len} bytes on rank {} of {n}", comm.rank());
    seen.extend(recv);
}

fn all_to_all(comm: &dyn Communicator, len: usize, seen: &mut Vec<u8>) {
    let (n, me) = (comm.size(), comm.rank());
    let send: Vec<u8> = (0..n).flat_map(|to| (0..len).map(move |i| byte(me, to, i))).collect();
    let mut recv = vec![0xEE; n * len];
    comm.all_to_all(&send, &mut recv).unwrap();
    let want: Vec<u8> = (0..n).flat_map(|from| (0..len).map(move |i| byte(from, me, i))).collect();
    assert_eq!(recv, want, "all_to_all of {len} bytes a block on rank {me} of {n}");
    seen.extend(recv);
}

fn broadcast(comm: &dyn Communicator, len: usize, seen: &mut Vec<u8>) {
    for root in 0..comm.size() {
        let mut buf: Vec<u8> = (0..len).map(|i| byte(comm.rank(), 1, i)).collect();
        comm.broadcast(root, &mut buf).unwrap();
        let want: Vec<u8> = (0..len).map(|i| byte(root, 1, i)).collect();
        assert_eq!(buf, want, "broadcast of {len} bytes from {root} on rank {}", comm.rank());
        seen.extend(buf);
    }
}

/// The statistics of one pass over [`LENGTHS`], exactly.
fn count(comm: &dyn Communicator, got: CommStats) {
    let [n, calls] = [comm.size() as u64, LENGTHS.len() as u64];
    let bytes = LENGTHS.iter().sum::<usize>() as u64;
    let want = CommStats {
        all_gather: Traffic { calls, sent: bytes, received: n * bytes, from_peers: (n - 1) * bytes },
        all_to_all: Traffic { calls, sent: n * bytes, received: n * bytes, from_peers: (n - 1) * bytes },
        broadcast: Traffic {
            calls: n * calls,
            sent: bytes,
            received: (n - 1) * bytes,
            from_peers: (n - 1) * bytes,
        },
        barrier: Traffic { calls: 1, ..Traffic::default() },
    };
    assert_eq!(got, want);
    assert_eq!(got.total().calls, want.total().calls);
    assert_eq!(got.total().from_peers, (n - 1) * 3 * bytes);
}

/// A value whose sum over ranks depends on the order of summation.
fn value(rank: usize, i: usize) -> f32 {
    let big = [1234.5, -1.7, 3.3e-2, -987.6, 0.37][(rank + i) % 5];
    big * (1.0 + ((i * 37 + rank * 11) % 101) as f32 / 101.0)
}

/// `xs` reduced first to last, written apart from the library's way.
fn reduced(xs: &[f32], op: Op) -> f32 {
    let sum = xs[1..].iter().fold(xs[0], |a, x| a + x);
    match op {
        Op::Sum => sum,
        Op::Mean => sum / xs.len() as f32,
        Op::Max => xs.iter().copied().fold(f32::NEG_INFINITY, f32::max),
    }
}

fn floats(comm: &dyn Communicator, len: usize, seen: &mut Vec<u8>) {
    let (n, me) = (comm.size(), comm.rank());
    let over_ranks = |i: usize| (0..n).map(|r| value(r, i)).collect::<Vec<f32>>();
    let whole: Vec<f32> = (0..n * len).map(|i| value(me, i)).collect();
    for op in [Op::Sum, Op::Mean, Op::Max] {
        let mut mine = vec![f32::NAN; len];
        reduce::reduce_scatter_f32(comm, &whole, &mut mine, op).unwrap();
        let want: Vec<f32> = (0..len).map(|i| reduced(&over_ranks(me * len + i), op)).collect();
        same_bits(&mine, &want, &format!("reduce_scatter_f32 {op:?} len {len}"));
        seen.extend(bytemuck::cast_slice(&mine));

        let wire: Vec<bf16> = whole.iter().map(|x| bf16::from_f32(*x)).collect();
        reduce::reduce_scatter_bf16(comm, &wire, &mut mine, op).unwrap();
        let rounded = |i| over_ranks(i).iter().map(|x| bf16::from_f32(*x).to_f32()).collect::<Vec<_>>();
        let want: Vec<f32> = (0..len).map(|i| reduced(&rounded(me * len + i), op)).collect();
        same_bits(&mine, &want, &format!("reduce_scatter_bf16 {op:?} len {len}"));
        seen.extend(bytemuck::cast_slice(&mine));

        let mut all = whole[..len].to_vec();
        reduce::all_reduce_f32(comm, &mut all, op).unwrap();
        let want: Vec<f32> = (0..len).map(|i| reduced(&over_ranks(i), op)).collect();
        same_bits(&all, &want, &format!("all_reduce_f32 {op:?} len {len}"));
        seen.extend(bytemuck::cast_slice(&all));

        // The values are exact in f64, so only the mean can round, and only once.
        let mut all: Vec<f64> = (0..len).map(|i| f64::from(value(me, i).round())).collect();
        reduce::all_reduce_f64(comm, &mut all, op).unwrap();
        for (i, got) in all.iter().enumerate() {
            let xs = (0..n).map(|r| f64::from(value(r, i).round()));
            let want = match op {
                Op::Sum => xs.sum(),
                Op::Mean => xs.sum::<f64>() / n as f64,
                Op::Max => xs.fold(f64::NEG_INFINITY, f64::max),
            };
            assert_eq!(*got, want, "all_reduce_f64 {op:?} len {len} element {i}");
        }
        seen.extend(bytemuck::cast_slice(&all));
    }
    if n >= 3 && len >= 13 {
        let backwards = |i| reduced(&over_ranks(i).into_iter().rev().collect::<Vec<_>>(), Op::Sum);
        let differ = (0..len).any(|i| backwards(i).to_bits() != reduced(&over_ranks(i), Op::Sum).to_bits());
        assert!(differ, "the values cannot tell one order of summation from another");
    }
}

fn same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert_eq!(g.to_bits(), w.to_bits(), "{what}: element {i} is {g:e}, not {w:e}");
    }
}

fn counts(comm: &dyn Communicator, len: usize, seen: &mut Vec<u8>) {
    let n = comm.size() as u32;
    let term = |r: u32, i: usize| r * 5 + (i as u32 % 17);
    for op in [Op::Sum, Op::Mean, Op::Max] {
        let mut all: Vec<u32> = (0..len).map(|i| term(comm.rank() as u32, i)).collect();
        reduce::all_reduce_u32(comm, &mut all, op).unwrap();
        for (i, got) in all.iter().enumerate() {
            let sum: u32 = (0..n).map(|r| term(r, i)).sum();
            let want = match op {
                Op::Sum => sum,
                Op::Mean => sum / n,
                Op::Max => term(n - 1, i),
            };
            assert_eq!(*got, want, "all_reduce_u32 {op:?} len {len} element {i}");
        }
        seen.extend(bytemuck::cast_slice(&all));
    }
}

fn nan_and_overflow(comm: &dyn Communicator) {
    let (n, me) = (comm.size(), comm.rank());
    for bad in 0..n {
        let mut x = [if me == bad { f32::NAN } else { me as f32 }, me as f32];
        reduce::all_reduce_f32(comm, &mut x, Op::Max).unwrap();
        assert!(x[0].is_nan(), "a maximum hid rank {bad}'s NaN");
        assert_eq!(x[1], (n - 1) as f32);
    }
    // The largest sum that fits, and one more.
    let first = u32::MAX - (n as u32 - 1);
    let mut edge = [1, if me == 0 { first } else { 1 }];
    reduce::all_reduce_u32(comm, &mut edge, Op::Sum).unwrap();
    assert_eq!(edge, [n as u32, u32::MAX]);
    if n > 1 {
        let mut over = [1, if me == 0 { first + 1 } else { 1 }];
        let kept = over;
        let e = reduce::all_reduce_u32(comm, &mut over, Op::Sum).unwrap_err().to_string();
        assert!(e.contains("count 1 is 4294967296") && e.contains("at most 4294967295"), "{e}");
        assert_eq!(over, kept);
    }
}

/// Odd and even ranks apart, each numbered backwards; then each of those alone.
fn split(comm: &dyn Communicator, seen: &mut Vec<u8>) {
    let (n, me) = (comm.size(), comm.rank());
    let part = comm.split(me % 2, n - me).unwrap();
    let members: Vec<u8> = (0..n as u8).rev().filter(|r| *r as usize % 2 == me % 2).collect();
    assert_eq!(part.size(), members.len());
    assert_eq!(members[part.rank()] as usize, me);
    assert_eq!(part.stats(), CommStats::default());
    let mut got = vec![0; part.size()];
    part.all_gather(&[me as u8], &mut got).unwrap();
    assert_eq!(got, members);
    seen.extend(got);

    let alone = part.split(part.rank(), 0).unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    // Equal keys keep the order of ranks.
    let copy = comm.split(0, 0).unwrap();
    assert_eq!((copy.rank(), copy.size()), (me, n));
    copy.barrier().unwrap();
}
