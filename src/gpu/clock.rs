//! Time on the device: timestamps around compute passes where the adapter has them and they make sense, else the host's clock.
//!
//! A timestamp is written when everything recorded before it has finished (`BOTTOM_OF_PIPE` on Vulkan), so the difference between
//! a pass's two is the time of its dispatches. Drivers exist whose timestamps are zero or run backwards: such a reading is never
//! used, and a [`Clock`] with each result says which clock it came from.

use super::{Gpu, recorder::State};
use crate::Result;
use std::collections::BTreeMap;
use std::time::Instant;

/// Passes of one query set: half of WebGPU's largest set (4096).
const PASSES: usize = 2048;
/// Bytes of one timestamp.
const TICK: u64 = 8;

/// What a time was read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The device's timestamps.
    Gpu,
    /// The host's clock, from the first recorded call to the device being idle again.
    #[default]
    Wall,
}

impl Clock {
    /// `gpu` or `wall`.
    pub fn name(self) -> &'static str {
        match self {
            Clock::Gpu => "gpu",
            Clock::Wall => "wall",
        }
    }
}

/// How long recorded work took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Seconds.
    pub seconds: f64,
    /// Which clock measured them.
    pub clock: Clock,
    /// Seconds by the host's clock, whatever `clock` is.
    pub wall: f64,
}

/// All launches of one kernel variant with one number of workgroups, under [`super::Options::profile`].
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Name and variant, as in [`Gpu::kernels`].
    pub kernel: String,
    /// Workgroups of each launch.
    pub groups: u32,
    /// Launches.
    pub dispatches: u64,
    /// Seconds of all launches together.
    pub seconds: f64,
}

/// Pairs of timestamps, one pair for each pass opened since.
#[derive(Default)]
pub(super) struct Stamps {
    sets: Vec<wgpu::QuerySet>,
    used: usize,
}

impl Stamps {
    /// The query set and the first of the two numbers in it for the next pass.
    pub fn next(&mut self, device: &wgpu::Device) -> (wgpu::QuerySet, u32) {
        let (set, at) = (self.used / PASSES, self.used % PASSES * 2);
        if set == self.sets.len() {
            self.sets.push(device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("timestamps"),
                ty: wgpu::QueryType::Timestamp,
                count: 2 * PASSES as u32,
            }));
        }
        self.used += 1;
        (self.sets[set].clone(), u32::try_from(at).expect("a query set is small"))
    }

    /// All timestamps so far, in order, after their passes were submitted; waits for the device. Starts again at none.
    fn read(&mut self, device: &wgpu::Device, queue: &wgpu::Queue) -> Vec<u64> {
        let passes = std::mem::take(&mut self.used);
        if passes == 0 {
            return Vec::new();
        }
        let size = (self.sets.len() * 2 * PASSES) as u64 * TICK;
        let buffer = |usage| {
            let label = Some("timestamps");
            device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
        };
        let resolved = buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC);
        let staging = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for (i, set) in self.sets.iter().enumerate().take(passes.div_ceil(PASSES)) {
            let count = (passes - i * PASSES).min(PASSES) * 2;
            encoder.resolve_query_set(set, 0..count as u32, &resolved, (i * 2 * PASSES) as u64 * TICK);
        }
        encoder.copy_buffer_to_buffer(&resolved, 0, &staging, 0, size);
        queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |_| {});
        let _ = device.poll(wgpu::PollType::wait_indefinitely());
        // A lost device is reported by the sink; its timestamps are none.
        let Ok(view) = staging.get_mapped_range(..) else { return Vec::new() };
        let mut ticks = bytemuck::pod_collect_to_vec::<u8, u64>(&view);
        ticks.truncate(2 * passes);
        ticks
    }
}

/// What [`super::Options::profile`] gathers.
#[derive(Default)]
pub(super) struct Profile {
    /// Kernels of the passes since the last reading.
    pub pending: Vec<(String, u32)>,
    totals: BTreeMap<(String, u32), (u64, f64)>,
    clock: Clock,
    /// The timestamps were found wanting.
    no_stamps: bool,
}

impl Profile {
    fn add(&mut self, kernel: (String, u32), seconds: f64) {
        let total = self.totals.entry(kernel).or_default();
        total.0 += 1;
        total.1 += seconds;
    }
}

/// The seconds between the first and the last of `ticks` (a begin and an end per pass), `period` nanoseconds each; none where
/// they cannot be true: none at all, zeros, running backwards, or longer than the `wall` seconds that the host waited.
fn elapsed(ticks: &[u64], period: f64, wall: f64) -> Option<f64> {
    let seconds = span(ticks)? as f64 * period * 1e-9;
    (seconds > 0.0 && seconds <= wall * 1.05 + 1e-4).then_some(seconds)
}

/// The ticks between the first and the last of `ticks`, which are neither zero nor run backwards.
fn span(ticks: &[u64]) -> Option<u64> {
    let (first, last) = (*ticks.first()?, *ticks.last()?);
    (first > 0 && ticks.windows(2).all(|w| w[0] <= w[1])).then(|| last - first)
}

impl Gpu {
    /// How long the device takes for what `record` records. Waits for the device before and after; uploads and downloads inside
    /// count only from the first dispatch to the last.
    ///
    /// # Errors
    /// Those of `record`, and what the device reported.
    pub fn timed(&self, record: impl FnOnce() -> Result<()>) -> Result<Timing> {
        self.finish()?;
        if self.has_timestamps() && !self.0.options.profile {
            self.state().stamps = Some(Stamps::default());
        }
        let start = Instant::now();
        let done = record().and_then(|()| self.finish());
        let wall = start.elapsed().as_secs_f64();
        let stamps = if self.0.options.profile { None } else { self.state().stamps.take() };
        done?;
        let ticks = stamps.map_or_else(Vec::new, |mut s| self.ticks(&mut s));
        Ok(match elapsed(&ticks, self.period(), wall) {
            Some(seconds) => Timing { seconds, clock: Clock::Gpu, wall },
            None => Timing { seconds: wall, clock: Clock::Wall, wall },
        })
    }

    /// Time by kernel since [`Gpu::reset_profile`], the longest first, of an adapter opened with [`super::Options::profile`].
    ///
    /// # Errors
    /// What the device reported.
    pub fn profile(&self) -> Result<(Clock, Vec<KernelTime>)> {
        self.finish()?;
        let state = self.state();
        let mut all: Vec<KernelTime> = state
            .profile
            .totals
            .iter()
            .map(|((kernel, groups), (dispatches, seconds))| KernelTime {
                kernel: kernel.clone(),
                groups: *groups,
                dispatches: *dispatches,
                seconds: *seconds,
            })
            .collect();
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok((state.profile.clock, all))
    }

    /// Forgets the times so far.
    ///
    /// # Errors
    /// What the device reported.
    pub fn reset_profile(&self) -> Result<()> {
        self.finish()?;
        self.state().profile.totals.clear();
        Ok(())
    }

    fn has_timestamps(&self) -> bool {
        let device = self.0.device.as_ref().map(|(device, _)| device);
        device.is_some_and(|d| d.features().contains(wgpu::Features::TIMESTAMP_QUERY))
    }

    /// Nanoseconds of a tick.
    fn period(&self) -> f64 {
        self.0.device.as_ref().map_or(0.0, |(_, queue)| f64::from(queue.get_timestamp_period()))
    }

    fn ticks(&self, stamps: &mut Stamps) -> Vec<u64> {
        let Some((device, queue)) = &self.0.device else { return Vec::new() };
        let mut ticks = stamps.read(device, queue);
        if self.0.options.zero_timestamps {
            ticks.fill(0);
        }
        ticks
    }

    /// Gets ready to time one launch by itself: with timestamps the pass it is in, else the host's wait for it.
    pub(super) fn profile_begin(&self) -> Result<Option<Instant>> {
        if !self.0.options.profile || self.is_planner() {
            return Ok(None);
        }
        if self.has_timestamps() && self.state().profile_by_stamps() {
            return Ok(None);
        }
        self.finish()?;
        Ok(Some(Instant::now()))
    }

    /// Ends what [`Gpu::profile_begin`] began, after the launch was recorded.
    pub(super) fn profile_end(
        &self,
        began: Option<Instant>,
        kernel: impl FnOnce() -> String,
        groups: u32,
    ) -> Result<()> {
        if !self.0.options.profile || self.is_planner() {
            return Ok(());
        }
        if began.is_some() {
            self.finish()?;
        }
        let kernel = kernel();
        let mut state = self.state();
        match began {
            Some(began) => state.profile.add((kernel, groups), began.elapsed().as_secs_f64()),
            None => {
                state.close_pass();
                state.profile.pending.push((kernel, groups));
            }
        }
        Ok(())
    }

    /// Adds the passes of the submit that just went out to the profile; waits for them.
    pub(super) fn profile_collect(&self, state: &mut State) {
        let pending = std::mem::take(&mut state.profile.pending);
        let Some(stamps) = state.stamps.as_mut().filter(|_| !pending.is_empty()) else { return };
        let ticks = self.ticks(stamps);
        let period = self.period();
        // A short launch may take no tick at all.
        let times: Vec<Option<f64>> =
            ticks.chunks(2).map(|t| span(t).map(|n| n as f64 * period * 1e-9)).collect();
        if times.len() == pending.len() && times.iter().all(Option::is_some) {
            for (kernel, time) in pending.into_iter().zip(times) {
                state.profile.add(kernel, time.unwrap_or_default());
            }
        } else {
            log::warn!(
                "{}: its timestamps are zero or run backwards; timing by the host's clock",
                self.name()
            );
            state.stamps = None;
            state.profile = Profile { no_stamps: true, ..Profile::default() };
        }
    }
}

impl State {
    /// Whether passes are timed by timestamps; starts doing so.
    fn profile_by_stamps(&mut self) -> bool {
        if self.profile.no_stamps {
            return false;
        }
        self.profile.clock = Clock::Gpu;
        if self.stamps.is_none() {
            self.close_pass();
            self.stamps = Some(Stamps::default());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::elapsed;

    #[test]
    fn only_sane_ticks_are_times() {
        assert_eq!(elapsed(&[5, 15, 15, 1_000_005], 1.0, 1.0), Some(1e-3));
        assert_eq!(elapsed(&[5, 1_000_005], 2.0, 1.0), Some(2e-3));
        for (ticks, why) in [
            (&[][..], "none"),
            (&[0, 0], "zeros"),
            (&[0, 1_000_000], "a zero"),
            (&[7, 7], "no time"),
            (&[9, 5], "backwards"),
            (&[5, 20, 10, 30], "backwards between passes"),
            (&[5, 3_000_000_000], "longer than the host waited"),
        ] {
            assert_eq!(elapsed(ticks, 1.0, 1.0), None, "{why}");
        }
    }
}
