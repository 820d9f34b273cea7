//! The two crossings between host and device, counted.

use super::{Buffer, Gpu};
use crate::{Error, Result};
use std::sync::{Arc, OnceLock, mpsc};

/// A copy on its way to the host, to be mapped once its submit is out.
pub(super) struct Mapping {
    staging: wgpu::Buffer,
    done: mpsc::Sender<std::result::Result<(), wgpu::BufferAsyncError>>,
    submit: Arc<OnceLock<wgpu::SubmissionIndex>>,
}

impl Mapping {
    pub(super) fn start(self, submit: &wgpu::SubmissionIndex) {
        let done = self.done;
        self.staging.map_async(wgpu::MapMode::Read, .., move |r| {
            let _ = done.send(r);
        });
        let _ = self.submit.set(submit.clone());
    }
}

/// The device's side of a [`Download`].
struct Source {
    staging: wgpu::Buffer,
    ready: mpsc::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>,
    submit: Arc<OnceLock<wgpu::SubmissionIndex>>,
}

/// A download that was recorded; [`Download::wait`] gives its bytes.
pub struct Download {
    gpu: Gpu,
    source: Option<Source>,
    bytes: usize,
}

impl Gpu {
    /// Copies `bytes` to `buffer` from byte `offset` on; both are multiples of 4. Takes effect before whatever is recorded later
    /// and after whatever was recorded earlier.
    ///
    /// # Errors
    /// What the device reported so far.
    pub fn upload(&self, buffer: &Arc<Buffer>, offset: u64, bytes: &[u8]) -> Result<()> {
        assert!(
            offset + bytes.len() as u64 <= buffer.size(),
            "upload of {} bytes at {offset} to {buffer:?}",
            bytes.len()
        );
        if self.state().is_recording() {
            self.flush()?;
        }
        self.state().counters.uploads += 1;
        if let (Some((_, queue)), Some(raw)) = (&self.0.device, buffer.raw()) {
            queue.write_buffer(raw, offset, bytes);
        }
        self.check()
    }

    /// Records the copy of `bytes` bytes of `buffer` from `offset` on to the host, without waiting: the value is the one at this
    /// point of the recording.
    pub fn download_later(&self, buffer: &Arc<Buffer>, offset: u64, bytes: u64) -> Download {
        let mut state = self.state();
        state.counters.downloads += 1;
        let source = self.0.device.as_ref().map(|(device, _)| {
            let staging = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("download"),
                size: bytes.next_multiple_of(4),
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let raw = buffer.raw().expect("a device's buffers exist");
            state.encoder(device).copy_buffer_to_buffer(raw, offset, &staging, 0, bytes.next_multiple_of(4));
            let (done, ready) = mpsc::channel();
            let submit = Arc::new(OnceLock::new());
            state.pending.push(Mapping { staging: staging.clone(), done, submit: submit.clone() });
            Source { staging, ready, submit }
        });
        let bytes = usize::try_from(bytes).expect("fits the host's memory");
        Download { gpu: self.clone(), source, bytes }
    }

    /// The bytes of `buffer` after everything recorded so far has run; submits and waits.
    ///
    /// # Errors
    /// What the device reported.
    pub fn download(&self, buffer: &Arc<Buffer>, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        self.download_later(buffer, offset, bytes).wait()
    }

    /// Records that all of `buffer` becomes zero.
    pub fn clear(&self, buffer: &Arc<Buffer>) {
        if let Some((device, _)) = &self.0.device {
            let raw = buffer.raw().expect("a device's buffers exist").clone();
            self.state().encoder(device).clear_buffer(&raw, 0, None);
        }
    }

    /// Records the copy of `bytes` bytes between two buffers.
    pub fn copy(&self, from: (&Arc<Buffer>, u64), to: (&Arc<Buffer>, u64), bytes: u64) {
        if let Some((device, _)) = &self.0.device {
            let raw = |b: &Arc<Buffer>| b.raw().expect("a device's buffers exist").clone();
            let (source, target) = (raw(from.0), raw(to.0));
            self.state().encoder(device).copy_buffer_to_buffer(&source, from.1, &target, to.1, bytes);
        }
    }
}

impl Download {
    /// Waits for the copy and returns its bytes (zeros from a planner).
    ///
    /// # Errors
    /// What the device reported, a lost device included.
    pub fn wait(self) -> Result<Vec<u8>> {
        if self.source.as_ref().is_some_and(|s| s.submit.get().is_none()) {
            self.gpu.flush()?;
        }
        let (Some(Source { staging, ready, submit }), Some((device, _))) = (self.source, &self.gpu.0.device)
        else {
            return Ok(vec![0; self.bytes]);
        };
        // Only as far as this copy: what was submitted after it goes on meanwhile.
        let until = wgpu::PollType::Wait { submission_index: submit.get().cloned(), timeout: None };
        let _ = device.poll(until);
        let mapped = ready.recv().map_err(|e| e.to_string()).and_then(|r| r.map_err(|e| e.to_string()));
        self.gpu.check()?;
        mapped.map_err(|e| {
            Error::gpu(format!("download failed: {e}"), "the device was probably lost; see earlier messages")
        })?;
        let view = staging
            .get_mapped_range(..)
            .map_err(|e| Error::gpu(format!("download failed: {e}"), "report this with the log"))?;
        Ok(view[..self.bytes].to_vec())
    }
}
