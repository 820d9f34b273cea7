//! A group whose other ranks are only imagined, for planning a step without running it.

use super::call::Call;
use super::stats::{CommStats, Meter};
use super::{Communicator, Solo};
use crate::Result;

/// Rank 0 of a group of `size` in which every other rank sends the same as rank 0.
#[derive(Debug)]
pub struct Planned {
    size: usize,
    meter: Meter,
}

impl Planned {
    /// A group of `size`, at least 1.
    pub fn new(size: usize) -> Planned {
        assert!(size > 0, "a group has at least one rank");
        Planned { size, meter: Meter::default() }
    }
}

impl Communicator for Planned {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> &str {
        "planned"
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_gather(self.size, send.len(), recv.len());
        for row in recv.chunks_mut(send.len().max(1)) {
            row.copy_from_slice(send);
        }
        self.meter.count(&call, 0, self.size);
        Ok(())
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_to_all(self.size, send.len(), recv.len());
        let block = send.len() / self.size;
        for row in recv.chunks_mut(block.max(1)) {
            row.copy_from_slice(&send[..block]);
        }
        self.meter.count(&call, 0, self.size);
        Ok(())
    }

    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()> {
        self.meter.count(&Call::broadcast(self.size, root, buf.len()), 0, self.size);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.meter.count(&Call::BARRIER, 0, self.size);
        Ok(())
    }

    fn stats(&self) -> CommStats {
        self.meter.get()
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Box<dyn Communicator>> {
        Ok(Box::new(Solo::new()))
    }
}
