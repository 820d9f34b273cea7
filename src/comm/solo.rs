//! The group of one rank.

use super::Communicator;
use super::call::Call;
use super::stats::{CommStats, Meter};
use crate::Result;

/// One rank alone: every collective returns its input.
#[derive(Debug, Default)]
pub struct Solo {
    meter: Meter,
}

impl Solo {
    /// A group of one.
    pub fn new() -> Solo {
        Solo::default()
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn name(&self) -> &str {
        "solo"
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_gather(1, send.len(), recv.len());
        recv.copy_from_slice(send);
        self.meter.count(&call, 0, 1);
        Ok(())
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_to_all(1, send.len(), recv.len());
        recv.copy_from_slice(send);
        self.meter.count(&call, 0, 1);
        Ok(())
    }

    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()> {
        self.meter.count(&Call::broadcast(1, root, buf.len()), 0, 1);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.meter.count(&Call::BARRIER, 0, 1);
        Ok(())
    }

    fn stats(&self) -> CommStats {
        self.meter.get()
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Box<dyn Communicator>> {
        Ok(Box::new(Solo::new()))
    }
}
