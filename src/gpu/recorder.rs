//! Recording: dispatches go into one open compute pass until [`Gpu::flush`] submits them.
//!
//! Each dispatch's parameters take one slot of a uniform buffer, written just before the submit. Pipelines and bind
//! groups are made once and kept: the pool hands out the same buffers every step, so from the second step on
//! nothing is created.

use super::kernel::{Reflection, reflect};
use super::{Buffer, Choice, Gpu, Kernel, Params, Variant, clock, transfer};
use crate::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of one parameter slot: the uniform offset alignment that every adapter accepts.
const SLOT: usize = 256;
/// Slots of one uniform buffer.
const SLOTS: usize = 1024;
/// Largest number of workgroups in one dimension that every adapter accepts.
const MAX_GRID: u32 = 65535;

crate::params! { struct Fill { words: u32, word: u32 } }

const FILL: Kernel =
    Kernel { name: "fill", text: include_str!("../../shaders/lib/fill.wgsl"), entry: "main" };

/// The layer's own kernels in every variant, for validation without a GPU.
pub fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = super::probe::kernels();
    all.push((FILL, Variant::new()));
    all
}

/// How many of each since the adapter was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernel launches recorded.
    pub dispatches: u64,
    /// Command buffers submitted.
    pub submits: u64,
    /// Host to device transfers.
    pub uploads: u64,
    /// Device to host transfers.
    pub downloads: u64,
    /// Pipelines compiled.
    pub pipelines: u64,
}

/// Whether a kernel reads or writes a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// A range of a buffer as a kernel sees it.
#[derive(Clone)]
pub struct Binding {
    /// The buffer; kept alive until the commands that use it are submitted.
    pub buffer: Arc<Buffer>,
    /// First byte, a multiple of [`super::Caps::align`].
    pub offset: u64,
    /// Bytes, not 0.
    pub size: u64,
    /// What the kernel does with it.
    pub access: Access,
}

pub(super) struct Pipeline {
    /// Number in the order of compilation, for the keys of bind groups.
    id: u64,
    raw: Option<(wgpu::ComputePipeline, wgpu::BindGroupLayout)>,
    writable: Vec<bool>,
    kernel: Kernel,
    variant: Variant,
    /// Bytes of the parameters.
    params: usize,
    launches: AtomicU64,
}

/// Which pipeline over which ranges of which buffers and uniform chunk.
type GroupKey = (u64, usize, Vec<(u64, u64, u64)>);

#[derive(Default)]
pub(super) struct State {
    pub counters: Counters,
    pipelines: HashMap<String, Arc<Pipeline>>,
    /// The same by [`fingerprint`], as they are asked for: to make a key of words for each launch takes longer than the rest.
    known: HashMap<u64, Vec<Arc<Pipeline>>>,
    groups: HashMap<GroupKey, wgpu::BindGroup>,
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    uniforms: Vec<wgpu::Buffer>,
    params: Vec<u8>,
    pub pending: Vec<transfer::Mapping>,
    /// Timestamps around each pass, while somebody wants them.
    pub stamps: Option<clock::Stamps>,
    pub profile: clock::Profile,
    /// What ops with several kernels chose, see [`Gpu::choices`].
    pub choices: BTreeSet<Choice>,
}

impl State {
    /// The encoder with no pass open on it, for copies.
    pub fn encoder(&mut self, device: &wgpu::Device) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        self.encoder
            .get_or_insert_with(|| device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default()))
    }

    fn pass(&mut self, device: &wgpu::Device) -> &mut wgpu::ComputePass<'static> {
        if self.pass.is_none() {
            let stamps = self.stamps.as_mut().map(|s| s.next(device));
            let timestamp_writes = stamps.as_ref().map(|(set, at)| wgpu::ComputePassTimestampWrites {
                query_set: set,
                beginning_of_pass_write_index: Some(*at),
                end_of_pass_write_index: Some(at + 1),
            });
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            let pass = self.encoder(device).begin_compute_pass(&descriptor);
            self.pass = Some(pass.forget_lifetime());
        }
        self.pass.as_mut().expect("a pass was just opened")
    }

    /// Ends the open pass, so that the next dispatch opens one of its own.
    pub fn close_pass(&mut self) {
        self.pass = None;
    }

    /// Keys of all pipelines, sorted.
    pub fn kernels(&self) -> Vec<String> {
        let mut all: Vec<String> = self.pipelines.keys().cloned().collect();
        all.sort_unstable();
        all
    }

    /// Launches of each kernel, by name.
    pub fn launches(&self) -> BTreeMap<&'static str, u64> {
        let mut all = BTreeMap::new();
        for pipeline in self.pipelines.values() {
            *all.entry(pipeline.kernel.name).or_default() += pipeline.launches.load(Ordering::Relaxed);
        }
        all
    }

    pub fn is_recording(&self) -> bool {
        self.encoder.is_some()
    }

    /// Takes a parameter slot: the number of its uniform buffer and the offset in it.
    fn slot(&mut self, device: &wgpu::Device, params: &[u8]) -> (usize, u32) {
        let index = self.params.len() / SLOT;
        self.params.extend_from_slice(params);
        self.params.resize((index + 1) * SLOT, 0);
        let chunk = index / SLOTS;
        if chunk == self.uniforms.len() {
            self.uniforms.push(device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("kernel parameters"),
                size: (SLOT * SLOTS) as u64,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }));
        }
        (chunk, u32::try_from(index % SLOTS * SLOT).expect("a chunk is small"))
    }
}

impl Gpu {
    /// Records `groups` workgroups of a kernel. `bindings` are its storage bindings 1, 2, ... in order.
    ///
    /// # Errors
    /// What the device reported so far.
    ///
    /// # Panics
    /// When the bindings' number or access, or the fields of `params`, are not those of the shader.
    #[track_caller]
    pub fn dispatch<P: Params>(
        &self,
        kernel: &Kernel,
        variant: &Variant,
        params: &P,
        bindings: &[Binding],
        groups: u32,
    ) -> Result<()> {
        let pipeline = self.pipeline::<P>(kernel, variant)?;
        let access = || bindings.iter().map(|b| b.access == Access::Write);
        if !access().eq(pipeline.writable.iter().copied()) {
            let access: Vec<bool> = access().collect();
            assert_eq!(
                access, pipeline.writable,
                "kernel {}: bindings given, bindings declared",
                kernel.name
            );
        }
        if groups == 0 {
            return Ok(());
        }
        let began = self.profile_begin()?;
        let mut state = self.state();
        state.counters.dispatches += 1;
        pipeline.launches.fetch_add(1, Ordering::Relaxed);
        let Some((device, _)) = &self.0.device else { return Ok(()) };
        let raw = &pipeline.raw.as_ref().expect("a device's pipelines are compiled").0;
        let (chunk, offset) = state.slot(device, bytemuck::bytes_of(params));
        let group = bind_group(&mut state, device, &pipeline, chunk, bindings);
        let (x, y) = fold(groups);
        let pass = state.pass(device);
        pass.set_pipeline(raw);
        pass.set_bind_group(0, &group, &[offset]);
        pass.dispatch_workgroups(x, y, 1);
        drop(state);
        self.profile_end(began, || kernel.key(variant), groups)
    }

    /// The pipeline of a variant, compiled if it is new.
    fn pipeline<P: Params>(&self, kernel: &Kernel, variant: &Variant) -> Result<Arc<Pipeline>> {
        let print = fingerprint(kernel, variant);
        let same = |p: &&Arc<Pipeline>| {
            p.kernel.name == kernel.name && p.kernel.entry == kernel.entry && p.variant == *variant
        };
        if let Some(known) = self.state().known.get(&print).and_then(|all| all.iter().find(same)) {
            return Ok(known.clone());
        }
        let key = kernel.key(variant);
        let compiled = self.state().pipelines.get(&key).cloned();
        let pipeline = match compiled {
            Some(p) => p,
            None => self.compile::<P>(kernel, variant, &key)?,
        };
        self.state().known.entry(print).or_default().push(pipeline.clone());
        Ok(pipeline)
    }

    fn compile<P: Params>(&self, kernel: &Kernel, variant: &Variant, key: &str) -> Result<Arc<Pipeline>> {
        let source = kernel.source(variant);
        let Reflection { fields, writable } = reflect(kernel.name, &source, kernel.entry);
        let ours: Vec<(String, usize)> = P::FIELDS.iter().map(|(n, o)| ((*n).to_string(), *o)).collect();
        assert_eq!(ours, fields, "kernel {}: parameters in Rust, parameters in WGSL", kernel.name);
        let params = size_of::<P>();
        let raw =
            self.0.device.as_ref().map(|(device, _)| self.build(device, kernel, source, &writable, params));
        self.check()?;
        let variant = variant.clone();
        let pipeline =
            Pipeline { raw, writable, kernel: *kernel, variant, params, id: 0, launches: AtomicU64::new(0) };
        Ok(self.keep(key, pipeline))
    }

    fn keep(&self, key: &str, pipeline: Pipeline) -> Arc<Pipeline> {
        let mut state = self.state();
        state.counters.pipelines += 1;
        let pipeline = Arc::new(Pipeline { id: state.counters.pipelines, ..pipeline });
        state.pipelines.insert(key.to_string(), pipeline.clone());
        pipeline
    }

    /// Compiles every kernel that `planner` was asked for, on all cores, so that no step waits for one.
    ///
    /// # Errors
    /// What the device reported.
    pub fn prepare(&self, planner: &Gpu) -> Result<()> {
        let Some((device, _)) = &self.0.device else { return Ok(()) };
        let planned: Vec<_> = planner.state().pipelines.clone().into_iter().collect();
        let known: Vec<String> = self.state().pipelines.keys().cloned().collect();
        let missing: Vec<_> = planned.into_iter().filter(|(key, _)| !known.contains(key)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((key, plan)) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Pipeline { writable, kernel, variant, params, .. } = &**plan;
                let source = kernel.source(variant);
                let raw = Some(self.build(device, kernel, source, writable, *params));
                let (writable, variant) = (writable.clone(), variant.clone());
                let launches = AtomicU64::new(0);
                self.keep(
                    key,
                    Pipeline { raw, writable, kernel: *kernel, variant, params: *params, id: 0, launches },
                );
            }
        };
        let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        std::thread::scope(|scope| {
            for _ in 0..workers.min(missing.len()) {
                scope.spawn(work);
            }
        });
        self.check()
    }

    fn build(
        &self,
        device: &wgpu::Device,
        kernel: &Kernel,
        source: String,
        writable: &[bool],
        params: usize,
    ) -> (wgpu::ComputePipeline, wgpu::BindGroupLayout) {
        let layout = bind_group_layout(device, writable, params);
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(kernel.name),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        };
        let safe = self.0.options.safe_shaders;
        let module = if safe {
            device.create_shader_module(descriptor)
        } else {
            // SAFETY: the shaders are ours; the tests run each of them with all checks on and compare the bits.
            unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
        };
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(kernel.entry),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: safe,
                ..Default::default()
            },
            cache: self.0.pipelines.as_ref().map(super::cache::Pipelines::raw),
        });
        (pipeline, layout)
    }

    /// Submits what was recorded; returns at once.
    ///
    /// # Errors
    /// What the device reported since the last flush, with the kernel's label.
    pub fn flush(&self) -> Result<()> {
        let mut state = self.state();
        if let Some((device, queue)) = &self.0.device {
            state.pass = None;
            if let Some(encoder) = state.encoder.take() {
                for (chunk, bytes) in state.params.chunks(SLOT * SLOTS).enumerate() {
                    queue.write_buffer(&state.uniforms[chunk], 0, bytes);
                }
                state.params.clear();
                let submit = queue.submit([encoder.finish()]);
                state.counters.submits += 1;
                for mapping in state.pending.drain(..) {
                    mapping.start(&submit);
                }
                let _ = device.poll(wgpu::PollType::Poll);
                self.profile_collect(&mut state);
            }
        }
        drop(state);
        self.check()
    }

    /// Submits and waits until the device has finished.
    ///
    /// # Errors
    /// As [`Gpu::flush`].
    pub fn finish(&self) -> Result<()> {
        self.flush()?;
        if let Some((device, _)) = &self.0.device {
            let _ = device.poll(wgpu::PollType::wait_indefinitely());
        }
        self.check()
    }

    /// Sets every 32-bit word of `buffer` to `word`.
    pub(super) fn fill_words(&self, buffer: &Arc<Buffer>, word: u32) -> Result<()> {
        let words = u32::try_from(buffer.size() / 4).expect("buffers are below 16 GiB");
        let size = buffer.size();
        let binding = Binding { buffer: buffer.clone(), offset: 0, size, access: Access::Write };
        self.dispatch(&FILL, &Variant::new(), &Fill { words, word }, &[binding], words.div_ceil(1024))
    }
}

/// A number for a variant, made of where its names lie and of its values: fast, and equal for equal uses of one kernel.
fn fingerprint(kernel: &Kernel, variant: &Variant) -> u64 {
    let mix = |h: u64, x: u64| (h ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let name = |s: &str| s.as_ptr() as u64;
    let start = mix(name(kernel.name), name(kernel.entry));
    let h = variant.constants.iter().fold(start, |h, (n, v)| mix(mix(h, name(n)), u64::from(*v)));
    variant.quads.iter().fold(h, |h, (n, dtype)| mix(mix(h, name(n)), *dtype as u64))
}

/// A grid of `n` workgroups as x * y >= n, each at most [`MAX_GRID`].
fn fold(n: u32) -> (u32, u32) {
    let y = n.div_ceil(MAX_GRID);
    (n.div_ceil(y), y)
}

fn bind_group_layout(device: &wgpu::Device, writable: &[bool], params: usize) -> wgpu::BindGroupLayout {
    let entry = |binding: usize, ty, dynamic, min: usize| wgpu::BindGroupLayoutEntry {
        binding: u32::try_from(binding).expect("few bindings"),
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset: dynamic,
            min_binding_size: std::num::NonZeroU64::new(min as u64),
        },
        count: None,
    };
    let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform, true, params)];
    for (i, write) in writable.iter().enumerate() {
        entries.push(entry(i + 1, wgpu::BufferBindingType::Storage { read_only: !write }, false, 0));
    }
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries })
}

fn bind_group(
    state: &mut State,
    device: &wgpu::Device,
    pipeline: &Pipeline,
    chunk: usize,
    bindings: &[Binding],
) -> wgpu::BindGroup {
    let ranges = bindings.iter().map(|b| (b.buffer.id(), b.offset, b.size)).collect();
    let key = (pipeline.id, chunk, ranges);
    if let Some(group) = state.groups.get(&key) {
        return group.clone();
    }
    let range = |buffer, offset, size| {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer,
            offset,
            size: std::num::NonZeroU64::new(size),
        })
    };
    let mut entries =
        vec![wgpu::BindGroupEntry { binding: 0, resource: range(&state.uniforms[chunk], 0, SLOT as u64) }];
    for (i, b) in bindings.iter().enumerate() {
        let raw = b.buffer.raw().expect("a device's buffers exist");
        entries.push(wgpu::BindGroupEntry {
            binding: u32::try_from(i + 1).expect("few bindings"),
            resource: range(raw, b.offset, b.size),
        });
    }
    let layout = &pipeline.raw.as_ref().expect("a device's pipelines are compiled").1;
    let label = Some(pipeline.kernel.name);
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor { label, layout, entries: &entries });
    state.groups.insert(key, group.clone());
    group
}

#[cfg(test)]
mod tests {
    use super::{MAX_GRID, fold};

    #[test]
    fn folded_grids_cover_and_fit() {
        for n in [1, 2, 65535, 65536, 65537, 131_071, 1 << 24, u32::MAX / 2] {
            let (x, y) = fold(n);
            assert!(u64::from(x) * u64::from(y) >= u64::from(n), "{n}");
            assert!(x <= MAX_GRID && y <= MAX_GRID, "{n}: {x} x {y}");
        }
    }
}
