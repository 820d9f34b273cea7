//! Device memory: a pool that keeps freed buffers for the next request of about the same size.
//!
//! All work goes to one queue in the order it was recorded, so a freed buffer may be handed out again at once:
//! whatever still uses it was recorded before whatever will overwrite it.

use super::Gpu;
use crate::{Error, Result};
use std::sync::{Arc, Mutex};

/// Every buffer's size is a multiple of this, so that small requests share few sizes.
const GRAIN: u64 = 256;

#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Slot>,
    held: u64,
    next_id: u64,
}

/// A device buffer (none in a planner), with an identity for the bind-group cache.
struct Slot {
    raw: Option<wgpu::Buffer>,
    id: u64,
    size: u64,
}

impl Pool {
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// The smallest free buffer that fits without wasting more than a quarter.
    fn take(&mut self, size: u64) -> Option<Slot> {
        let fits = |s: &Slot| s.size >= size && s.size <= size + size / 4;
        let best = self.free.iter().enumerate().filter(|(_, s)| fits(s)).min_by_key(|(_, s)| s.size)?.0;
        Some(self.free.remove(best))
    }
}

/// A piece of device memory. Dropping the last clone gives it back to the pool.
pub struct Buffer {
    slot: Option<Slot>,
    pool: Arc<Mutex<Pool>>,
}

impl Buffer {
    pub(super) fn raw(&self) -> Option<&wgpu::Buffer> {
        self.slot().raw.as_ref()
    }

    pub(super) fn id(&self) -> u64 {
        self.slot().id
    }

    /// Bytes, at least as many as were asked for.
    pub fn size(&self) -> u64 {
        self.slot().size
    }

    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("a live buffer has its slot")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(slot), Ok(mut pool)) = (self.slot.take(), self.pool.lock()) {
            pool.free.push(slot);
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer(#{}, {} bytes)", self.id(), self.size())
    }
}

impl Gpu {
    /// Memory for `bytes` bytes, contents undefined; `name` is for messages.
    ///
    /// # Errors
    /// More than the adapter's binding or buffer limit, or the device is out of memory.
    pub fn alloc(&self, name: &str, bytes: u64) -> Result<Arc<Buffer>> {
        let caps = self.caps();
        self.check_limit(name, bytes, caps.max_binding.min(caps.max_buffer))?;
        self.take(name, bytes)
    }

    /// Memory that several tensors share: only each one's own range has to fit a binding.
    ///
    /// # Errors
    /// More than the adapter's buffer limit, or the device is out of memory.
    pub fn alloc_shared(&self, name: &str, bytes: u64) -> Result<Arc<Buffer>> {
        self.check_limit(name, bytes, self.caps().max_buffer)?;
        self.take(name, bytes)
    }

    fn take(&self, name: &str, bytes: u64) -> Result<Arc<Buffer>> {
        let size = bytes.max(1).next_multiple_of(GRAIN);
        let mut pool = self.0.pool.lock().expect("pool lock");
        let slot = match pool.take(size) {
            Some(slot) => slot,
            None => {
                let raw = self.create(name, size)?;
                pool.held += size;
                pool.next_id += 1;
                Slot { raw, id: pool.next_id, size }
            }
        };
        drop(pool);
        let buffer = Arc::new(Buffer { slot: Some(slot), pool: self.0.pool.clone() });
        if self.0.options.poison {
            self.fill_words(&buffer, 0x7fff_ffff)?;
        }
        Ok(buffer)
    }

    fn check_limit(&self, name: &str, bytes: u64, limit: u64) -> Result<()> {
        if bytes <= limit {
            return Ok(());
        }
        Err(Error::user(
            format!(
                "tensor {name} needs {bytes} bytes, over this adapter's limit of {limit} bytes for one binding ({})",
                self.name()
            ),
            "lower training.local_batch_size or training.seq_len for activations, model.args.dim or num_experts for \
             weights, or choose an adapter with a larger limit (`moe8 devices`)",
        ))
    }

    fn create(&self, name: &str, size: u64) -> Result<Option<wgpu::Buffer>> {
        let Some((device, _)) = &self.0.device else { return Ok(None) };
        let scope = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let raw = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(name),
            size,
            usage,
            mapped_at_creation: false,
        });
        match pollster::block_on(scope.pop()) {
            None => Ok(Some(raw)),
            // Not the adapter's fault, and nothing is wrong with it: no [`Error::Gpu`].
            Some(e) => Err(Error::user(
                format!("out of memory for tensor {name} ({size} bytes): {e}"),
                "lower training.local_batch_size or training.seq_len, or use a device with more memory",
            )),
        }
    }
}
