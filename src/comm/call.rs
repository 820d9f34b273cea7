//! What a rank asks for, and the check that all ranks ask for the same.

use crate::{Error, Result};
use std::fmt;

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllGather,
    AllToAll,
    Broadcast,
    Barrier,
    Split,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::AllGather, "all_gather"),
    (Kind::AllToAll, "all_to_all"),
    (Kind::Broadcast, "broadcast"),
    (Kind::Barrier, "barrier"),
    (Kind::Split, "split"),
];

/// One collective call: all ranks must make an equal one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// Which collective.
    pub(super) kind: Kind,
    /// Length of `send` (of `buf` for a broadcast) in bytes.
    pub(super) bytes: usize,
    /// The broadcast's root; 0 elsewhere.
    pub(super) root: usize,
}

impl Call {
    /// A barrier.
    pub(super) const BARRIER: Call = Call { kind: Kind::Barrier, bytes: 0, root: 0 };
    /// A split; its color and key may differ between ranks and are no part of the call.
    pub(super) const SPLIT: Call = Call { kind: Kind::Split, bytes: 0, root: 0 };

    /// An all-gather among `size` ranks.
    #[track_caller]
    pub(super) fn all_gather(size: usize, send: usize, recv: usize) -> Call {
        assert!(
            send.checked_mul(size) == Some(recv),
            "all_gather of {send} bytes among {size} ranks into {recv} bytes"
        );
        Call { kind: Kind::AllGather, bytes: send, root: 0 }
    }

    /// An all-to-all with equal blocks among `size` ranks.
    #[track_caller]
    pub(super) fn all_to_all(size: usize, send: usize, recv: usize) -> Call {
        assert!(
            send == recv && send.is_multiple_of(size),
            "all_to_all of {send} bytes into {recv} bytes: both must be {size} equal blocks"
        );
        Call { kind: Kind::AllToAll, bytes: send, root: 0 }
    }

    /// A broadcast from `root` among `size` ranks.
    #[track_caller]
    pub(super) fn broadcast(size: usize, root: usize, bytes: usize) -> Call {
        assert!(root < size, "broadcast from rank {root} among {size} ranks");
        Call { kind: Kind::Broadcast, bytes, root }
    }

    /// Fails unless all ranks (`calls` is in rank order) made the same call.
    pub(super) fn agree(calls: impl IntoIterator<Item = Call>) -> Result<()> {
        let mut calls = calls.into_iter().enumerate();
        let Some((_, first)) = calls.next() else { return Ok(()) };
        let Some((rank, other)) = calls.find(|(_, c)| *c != first) else { return Ok(()) };
        Err(Error::comm(
            format!("the ranks made different calls: rank 0 {first}, rank {rank} {other}"),
            "all ranks must run the same program with the same configuration and data shapes",
        ))
    }

    /// The call as numbers, to be compared across processes.
    #[cfg(feature = "mpi")]
    pub(super) fn to_wire(self) -> [u64; 3] {
        let kind = KINDS.iter().position(|(k, _)| *k == self.kind).expect("KINDS is complete");
        [kind as u64, self.bytes as u64, self.root as u64]
    }

    /// The inverse of [`Call::to_wire`].
    #[cfg(feature = "mpi")]
    pub(super) fn from_wire(wire: &[u64]) -> Call {
        Call { kind: KINDS[wire[0] as usize].0, bytes: wire[1] as usize, root: wire[2] as usize }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(k, _)| *k == self.kind).map_or("", |(_, name)| name);
        match self.kind {
            Kind::Barrier | Kind::Split => f.write_str(name),
            Kind::Broadcast => write!(f, "{name} of {} bytes from rank {}", self.bytes, self.root),
            Kind::AllGather | Kind::AllToAll => write!(f, "{name} of {} bytes", self.bytes),
        }
    }
}
