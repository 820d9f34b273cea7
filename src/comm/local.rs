//! Ranks as threads of one process.
//!
//! A collective is one meeting: each rank puts its offer on the table, the last to come hands
//! everybody the whole table and opens the next round. Payloads are copied once into the offer and
//! once out of it, outside the lock, so no rank reads memory that another one owns; large ones go
//! in pieces, so that the second copy reads what the first left in the cache.

use super::Communicator;
use super::call::Call;
use super::chunk::pieces;
use super::stats::{CommStats, Meter};
use crate::{Error, Result};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a rank waits for the others before it gives up: ten minutes, as `torch.distributed`'s
/// NCCL default. Long enough for a software adapter to compile its kernels.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// The most bytes in one offer.
const PIECE_BYTES: usize = 1 << 20;

const HINT: &str = "the first error above is the cause; all ranks must make the same collective calls";

/// One rank of a group whose ranks are threads of this process.
///
/// Dropping it tells the others that this rank has left: their next collective fails.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    table: Arc<Table>,
    /// Held during a collective, so that two threads of this rank take turns.
    turn: Mutex<()>,
    meter: Meter,
}

/// Where the ranks of one group meet.
#[derive(Debug)]
struct Table {
    size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How many collectives have completed.
    round: u64,
    /// This round's offers, by rank.
    offers: Vec<Option<Offer>>,
    /// The last round's offers, until every rank has taken them.
    done: Option<Arc<Vec<Offer>>>,
    unread: usize,
    /// Why no further round can complete.
    dead: Option<String>,
}

#[derive(Debug)]
struct Offer {
    call: Call,
    payload: Payload,
}

#[derive(Debug)]
enum Payload {
    Nothing,
    Bytes(Vec<u8>),
    /// `room` of a group's first rank becomes the table of the new group.
    Split {
        color: usize,
        key: usize,
        room: OnceLock<Arc<Table>>,
    },
}

impl Offer {
    fn bytes(&self) -> &[u8] {
        match &self.payload {
            Payload::Bytes(b) => b,
            Payload::Nothing | Payload::Split { .. } => &[],
        }
    }

    /// Color, key and room of a split. All offers of an agreed split have them.
    fn split(&self) -> (usize, usize, &OnceLock<Arc<Table>>) {
        match &self.payload {
            Payload::Split { color, key, room } => (*color, *key, room),
            Payload::Nothing | Payload::Bytes(_) => unreachable!("{} in place of a split", self.call),
        }
    }
}

impl Table {
    fn new(size: usize, timeout: Duration) -> Arc<Table> {
        let state = State { offers: (0..size).map(|_| None).collect(), ..State::default() };
        Arc::new(Table { size, timeout, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `offer` down, waits for the other ranks, and returns all offers in rank order.
    fn meet(&self, rank: usize, offer: Offer) -> Result<Arc<Vec<Offer>>> {
        let (call, start) = (offer.call, Instant::now());
        let mut state = self.lock();
        let round = state.round;
        state.offers[rank] = Some(offer);
        if state.dead.is_none() && state.offers.iter().all(Option::is_some) {
            state.done = Some(Arc::new(state.offers.iter_mut().filter_map(Option::take).collect()));
            state.unread = self.size;
            state.round += 1;
            self.changed.notify_all();
        }
        while state.round == round {
            if let Some(why) = &state.dead {
                return Err(Error::comm(format!("{why}, so rank {rank} cannot complete its {call}"), HINT));
            }
            let Some(left) = self.timeout.checked_sub(start.elapsed()) else {
                let missing = (0..self.size).filter(|r| state.offers[*r].is_none()).collect();
                return Err(self.give_up(state, rank, call, missing));
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let all = state.done.clone().expect("kept until every rank has read it");
        state.unread -= 1;
        if state.unread == 0 {
            state.done = None;
        }
        Ok(all)
    }

    /// The error of a rank that waited too long; ends the group.
    fn give_up(
        &self,
        mut state: MutexGuard<'_, State>,
        rank: usize,
        call: Call,
        missing: Vec<usize>,
    ) -> Error {
        state.dead = Some(format!("rank {rank} gave up waiting for ranks {missing:?}"));
        self.changed.notify_all();
        Error::comm(
            format!(
                "rank {rank} waited {:.1} s in its {call} and ranks {missing:?} of {} did not come",
                self.timeout.as_secs_f64(),
                self.size
            ),
            "one of them is stuck, or needs longer than the time limit between two collectives",
        )
    }

    fn leave(&self, rank: usize, panicking: bool) {
        let how = if panicking { "panicked" } else { "left" };
        self.lock().dead.get_or_insert_with(|| format!("rank {rank} {how}"));
        self.changed.notify_all();
    }
}

impl Local {
    /// The `n` ranks of a new group, in rank order, to be moved into `n` threads (see
    /// [`super::run_threads`]).
    pub fn world(n: usize) -> Vec<Local> {
        Local::world_within(n, DEFAULT_TIMEOUT)
    }

    /// As [`Local::world`]; a rank that waits longer than `timeout` for the others fails.
    pub fn world_within(n: usize, timeout: Duration) -> Vec<Local> {
        let table = Table::new(n, timeout);
        (0..n).map(|rank| Local::at(rank, table.clone())).collect()
    }

    fn at(rank: usize, table: Arc<Table>) -> Local {
        Local { rank, table, turn: Mutex::new(()), meter: Meter::default() }
    }

    /// One collective: offers `payload` piece by piece, checks that all ranks make the same `call`,
    /// and hands each piece's offers, in rank order, to `take`.
    fn collective(
        &self,
        call: Call,
        pieces: impl Iterator<Item = Range<usize>>,
        payload: impl Fn(&Range<usize>) -> Payload,
        mut take: impl FnMut(&Range<usize>, &[Offer]),
    ) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        for part in pieces {
            let all = self.table.meet(self.rank, Offer { call, payload: payload(&part) })?;
            Call::agree(all.iter().map(|o| o.call))?;
            take(&part, &all);
        }
        self.meter.count(&call, self.rank, self.table.size);
        Ok(())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.table.leave(self.rank, std::thread::panicking());
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.table.size
    }

    fn name(&self) -> &str {
        "threads"
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let len = send.len();
        let call = Call::all_gather(self.size(), len, recv.len());
        let payload = |part: &Range<usize>| Payload::Bytes(send[part.clone()].to_vec());
        self.collective(call, pieces(PIECE_BYTES, len), payload, |part, all| {
            for (r, offer) in all.iter().enumerate() {
                recv[r * len + part.start..][..part.len()].copy_from_slice(offer.bytes());
            }
        })
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, me) = (self.size(), self.rank);
        let call = Call::all_to_all(n, send.len(), recv.len());
        let len = send.len() / n;
        let payload = |part: &Range<usize>| {
            let blocks = (0..n).map(|to| &send[to * len + part.start..][..part.len()]);
            Payload::Bytes(blocks.collect::<Vec<_>>().concat())
        };
        self.collective(call, pieces(PIECE_BYTES / n, len), payload, |part, all| {
            for (r, offer) in all.iter().enumerate() {
                let mine = &offer.bytes()[me * part.len()..][..part.len()];
                recv[r * len + part.start..][..part.len()].copy_from_slice(mine);
            }
        })
    }

    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()> {
        let call = Call::broadcast(self.size(), root, buf.len());
        // A call of `payload` and one of `take` never overlap.
        let buf = RefCell::new(buf);
        let payload = |part: &Range<usize>| match root == self.rank {
            true => Payload::Bytes(buf.borrow()[part.clone()].to_vec()),
            false => Payload::Nothing,
        };
        let parts = pieces(PIECE_BYTES, buf.borrow().len());
        self.collective(call, parts, payload, |part, all| {
            if root != self.rank {
                buf.borrow_mut()[part.clone()].copy_from_slice(all[root].bytes());
            }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.collective(Call::BARRIER, pieces(1, 0), |_| Payload::Nothing, |_, _| {})
    }

    fn stats(&self) -> CommStats {
        self.meter.get()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let mut part = None;
        let payload = |_: &Range<usize>| Payload::Split { color, key, room: OnceLock::new() };
        self.collective(Call::SPLIT, pieces(1, 0), payload, |_, all| {
            let with_color = |r: &usize| all[*r].split().0 == color;
            let mut members: Vec<usize> = (0..all.len()).filter(with_color).collect();
            members.sort_by_key(|r| (all[*r].split().1, *r));
            let room = all[members[0]].split().2;
            let table = room.get_or_init(|| Table::new(members.len(), self.table.timeout)).clone();
            let rank = members.iter().position(|r| *r == self.rank);
            part = rank.map(|rank| Local::at(rank, table));
        })?;
        Ok(Box::new(part.expect("this rank has its own color")))
    }
}
