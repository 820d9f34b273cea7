//! One sink for what the device reports on its own time.

use std::sync::{Arc, Mutex};

/// Collects the messages of uncaptured errors and of a lost device.
#[derive(Default)]
pub(super) struct Sink(Mutex<Vec<String>>);

impl Sink {
    pub(super) fn attach(device: &wgpu::Device) -> Arc<Sink> {
        let sink = Arc::new(Sink::default());
        let errors = sink.clone();
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| errors.push(e.to_string())));
        let lost = sink.clone();
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                lost.push(format!("device lost: {message}"));
            }
        });
        sink
    }

    pub(super) fn push(&self, message: String) {
        self.0.lock().expect("error sink lock").push(message);
    }

    /// All messages so far as one, and forgets them.
    pub(super) fn take(&self) -> Option<String> {
        let mut all = self.0.lock().expect("error sink lock");
        if all.is_empty() { None } else { Some(std::mem::take(&mut *all).join("; ")) }
    }
}
