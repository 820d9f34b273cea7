//! Counters of calls and payload bytes.

use super::call::{Call, Kind};
use std::sync::{Mutex, PoisonError};

/// Calls and payload bytes of one kind of collective, as one rank sees them.
///
/// Payload is what the caller handed over and got, whatever the backend adds or copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Completed calls.
    pub calls: u64,
    /// Bytes this rank handed over: the length of `send`, or of `buf` at a broadcast's root.
    pub sent: u64,
    /// Bytes this rank got: the length of `recv`, its own part included, or of `buf` at a
    /// broadcast's other ranks.
    pub received: u64,
    /// Those of `received` that came from another rank: what had to cross a wire.
    pub from_peers: u64,
}

impl Traffic {
    fn zip(self, o: Traffic, f: impl Fn(u64, u64) -> u64) -> Traffic {
        Traffic {
            calls: f(self.calls, o.calls),
            sent: f(self.sent, o.sent),
            received: f(self.received, o.received),
            from_peers: f(self.from_peers, o.from_peers),
        }
    }
}

/// [`Traffic`] per kind of collective. A reduction counts as the collective it is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommStats {
    /// [`super::Communicator::all_gather`].
    pub all_gather: Traffic,
    /// [`super::Communicator::all_to_all`].
    pub all_to_all: Traffic,
    /// [`super::Communicator::broadcast`].
    pub broadcast: Traffic,
    /// [`super::Communicator::barrier`].
    pub barrier: Traffic,
}

impl CommStats {
    /// All kinds together.
    pub fn total(&self) -> Traffic {
        let add = |a: Traffic, b| a.zip(b, |x, y| x + y);
        add(add(self.all_gather, self.all_to_all), add(self.broadcast, self.barrier))
    }

    /// What was added after `earlier`, an older value of the same communicator's statistics.
    pub fn since(&self, earlier: &CommStats) -> CommStats {
        let sub = |a: Traffic, b| a.zip(b, u64::saturating_sub);
        CommStats {
            all_gather: sub(self.all_gather, earlier.all_gather),
            all_to_all: sub(self.all_to_all, earlier.all_to_all),
            broadcast: sub(self.broadcast, earlier.broadcast),
            barrier: sub(self.barrier, earlier.barrier),
        }
    }
}

/// The counters inside a communicator.
#[derive(Debug, Default)]
pub(super) struct Meter(Mutex<CommStats>);

impl Meter {
    /// Counts a completed `call` of rank `rank` of `size`.
    pub(super) fn count(&self, call: &Call, rank: usize, size: usize) {
        let mut stats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [bytes, n] = [call.bytes as u64, size as u64];
        let (slot, sent, received, from_peers) = match call.kind {
            Kind::AllGather => (&mut stats.all_gather, bytes, bytes * n, bytes * (n - 1)),
            Kind::AllToAll => (&mut stats.all_to_all, bytes, bytes, bytes / n * (n - 1)),
            Kind::Broadcast if call.root == rank => (&mut stats.broadcast, bytes, 0, 0),
            Kind::Broadcast => (&mut stats.broadcast, 0, bytes, bytes),
            Kind::Barrier => (&mut stats.barrier, 0, 0, 0),
            Kind::Split => return,
        };
        *slot = slot.zip(Traffic { calls: 1, sent, received, from_peers }, |x, y| x + y);
    }

    /// A copy of the counters.
    pub(super) fn get(&self) -> CommStats {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
