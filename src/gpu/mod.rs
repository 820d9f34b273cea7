//! The only module that names wgpu: adapters, buffers, kernels, the recorder and the two transfers.
//!
//! Work is recorded by [`Gpu::dispatch`] and runs at [`Gpu::flush`]; nothing waits for the device but
//! [`Gpu::download`] and [`Download::wait`]. A *planner* ([`Gpu::planner`]) is a `Gpu` without a device: it
//! answers every call, allocates nothing and so tells what memory and how many dispatches a step will need.

mod adapter;
mod buffer;
mod cache;
mod choices;
mod clock;
mod decisions;
mod errors;
mod kernel;
mod names;
mod probe;
mod recorder;
mod repeat;
mod transfer;

pub(crate) use adapter::none_found;
pub use adapter::{
    AdapterLine, DeviceChoice, NEEDED_BINDINGS, NEEDED_INVOCATIONS, NEEDED_WORKGROUP_MEMORY, list_adapters,
};
pub use buffer::Buffer;
pub use cache::cache_folder;
pub(crate) use cache::{FOLDER_HINT, no_folder};
pub use choices::Choice;
pub use clock::{Clock, KernelTime, Timing};
pub use decisions::{Decisions, Fastest, Rejected};
pub use kernel::{Kernel, Params, Variant};
#[cfg(test)]
pub(crate) use names::kernels_of;
pub use names::{GemmKernel, QuantizeKernel};
pub use recorder::{Access, Binding, Counters, kernels};
pub use transfer::Download;

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Matrix units as WGSL can name them: f16 operands, f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixUnits {
    /// Products of 16x16x16 (NVIDIA, AMD).
    Coop16,
    /// Products of 8x8x8 (Apple).
    Coop8,
}

impl MatrixUnits {
    /// Both.
    pub const ALL: [MatrixUnits; 2] = [MatrixUnits::Coop16, MatrixUnits::Coop8];

    /// Edge of a fragment.
    pub fn edge(self) -> u32 {
        match self {
            MatrixUnits::Coop16 => 16,
            MatrixUnits::Coop8 => 8,
        }
    }
}

/// `16x16x16`.
impl std::fmt::Display for MatrixUnits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let edge = self.edge();
        write!(f, "{edge}x{edge}x{edge}")
    }
}

/// Matrix units, and the subgroups that share their fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragments {
    /// The products.
    pub units: MatrixUnits,
    /// Lanes of a subgroup.
    pub lanes: u32,
    /// A kernel's subgroups may have another number of lanes: it is to notice.
    pub vary: bool,
}

/// What kernels may rely on, read from the adapter once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// The adapter runs on the CPU (lavapipe, SwiftShader, WARP).
    pub software: bool,
    /// Largest storage binding in bytes.
    pub max_binding: u64,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
    /// Alignment of binding offsets in bytes.
    pub align: u64,
    /// Largest workgroup memory in bytes.
    pub workgroup_memory: u32,
    /// Largest number of invocations in a workgroup.
    pub workgroup_size: u32,
    /// Lanes of a subgroup: as many as kernels on matrix units were seen to have, else the most that the adapter says (0: unknown).
    pub subgroup_max: u32,
    /// The driver chooses the width of subgroups kernel by kernel.
    pub subgroups_vary: bool,
    /// Floats become halves by rounding to nearest even, down to the smallest subnormal.
    pub exact_halves: bool,
    /// Halves may at least be subnormal, whatever way they are rounded.
    pub subnormal_halves: bool,
    /// Matrix units that kernels may use.
    pub coop: Option<MatrixUnits>,
}

impl Caps {
    /// Fragments on the matrix units, if there are some.
    pub fn fragments(&self) -> Option<Fragments> {
        self.coop.map(|units| Fragments { units, lanes: self.subgroup_max, vary: self.subgroups_vary })
    }

    /// The matrix units in words: `16x16x16` (in subgroups of 32 lanes), `16x16x16 in subgroups of 64, which may vary`, or `none`.
    pub fn matrix_units(&self) -> String {
        let vary = if self.subgroups_vary { ", which may vary" } else { "" };
        match self.coop {
            None => "none".into(),
            Some(units) if self.subgroup_max == 32 && !self.subgroups_vary => units.to_string(),
            Some(units) => format!("{units} in subgroups of {}{vary}", self.subgroup_max),
        }
    }
}

/// How kernels are compiled and adapters limited; [`Default`] is what training uses.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Keep every run-time check in the shaders (bounds, loop limits, zeroed workgroup memory).
    pub safe_shaders: bool,
    /// Pretend that the adapter's largest storage binding is this many bytes (tests of the limit's handling).
    pub max_binding: Option<u64>,
    /// Look at every op's result in the forward pass, and at the gradients' norm, and stop at the first NaN or Inf (slow: each is read
    /// back).
    pub check_nan: bool,
    /// Fill each new buffer with NaN, to show that no kernel reads what it did not write.
    pub poison: bool,
    /// Run the code meant for real GPUs on a software adapter too: [`Caps::software`] becomes false (tests).
    pub treat_as_hardware: bool,
    /// Time each launch by itself, for [`Gpu::profile`]; slow, and a flush waits for the device.
    pub profile: bool,
    /// Read every timestamp as zero, as some drivers do (tests of the fallback).
    pub zero_timestamps: bool,
    /// Do without matrix units.
    pub no_coop: bool,
    /// Use this matrix product and attention wherever it can run, instead of choosing by shape.
    pub kernel: Option<GemmKernel>,
    /// The same for quantizers.
    pub quantizer: Option<QuantizeKernel>,
    /// Do not warn of kernels that are not to be used: somebody else does, of the same adapter.
    pub quiet: bool,
    /// Folder for what is remembered between runs, such as [`cache_folder`]; none: nothing is.
    pub cache: Option<PathBuf>,
}

/// An open adapter, or a planner. Cloning is cheap; all clones share one queue and one memory pool.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    device: Option<(wgpu::Device, wgpu::Queue)>,
    name: String,
    driver: String,
    caps: Caps,
    options: Options,
    pipelines: Option<cache::Pipelines>,
    decisions: Arc<Decisions>,
    errors: Arc<errors::Sink>,
    pool: Arc<Mutex<buffer::Pool>>,
    state: Mutex<recorder::State>,
}

impl Gpu {
    /// Opens the adapter that `choice` names, with default options.
    ///
    /// # Errors
    /// No adapter, an unknown name, an adapter that lacks a needed limit, or matrix units demanded where there are none.
    pub fn open(choice: &DeviceChoice) -> Result<Gpu> {
        Gpu::open_with(choice, Options::default())
    }

    /// Opens the adapter that `choice` names.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn open_with(choice: &DeviceChoice, options: Options) -> Result<Gpu> {
        let opened = adapter::open(choice, &options)?;
        let mut caps = opened.caps;
        if let Some(limit) = options.max_binding {
            caps.max_binding = caps.max_binding.min(limit);
        }
        let software = caps.software;
        caps.software &= !options.treat_as_hardware;
        let errors = errors::Sink::attach(&opened.device);
        let folder = options.cache.as_deref();
        let decisions = folder.map(|f| Decisions::load(f, &opened.name, &opened.driver)).unwrap_or_default();
        if !options.quiet {
            decisions.warn();
        }
        let mut gpu = Gpu(Arc::new(Inner {
            device: Some((opened.device, opened.queue)),
            name: opened.name,
            driver: opened.driver,
            caps,
            options,
            pipelines: opened.pipelines,
            decisions: Arc::new(decisions),
            errors,
            pool: Arc::default(),
            state: Mutex::default(),
        }));
        gpu.probe(software);
        let (options, caps) = (gpu.options(), gpu.caps());
        if options.kernel == Some(GemmKernel::Coop) && caps.coop.is_none() {
            return Err(Error::user(
                format!(
                    "{} has no matrix units that moe8 can use, and --kernel coop asks for them",
                    gpu.name()
                ),
                "leave --kernel (and --no-coop) out, or choose another adapter with --device",
            ));
        }
        Ok(gpu)
    }

    /// Finds out what the adapter does not say: the width of subgroups that come in two, whether matrix units compute what they should
    /// (without them from here on if not), how floats become halves. Software adapters are known.
    fn probe(&mut self, software: bool) {
        let mut caps = self.caps();
        if let Some(units) = probe::unproven(&caps) {
            match self.lanes(units) {
                Ok(lanes) => caps.subgroup_max = lanes,
                Err(why) => {
                    log::warn!(
                        "{} has matrix units that moe8 cannot use, going on without: {why}",
                        self.name()
                    );
                    caps.coop = None;
                }
            }
        }
        if software {
            caps.exact_halves = self.options().treat_as_hardware;
        } else {
            [caps.exact_halves, caps.subnormal_halves] = self.halves();
        }
        Arc::get_mut(&mut self.0).expect("no clone of it yet").caps = caps;
    }

    /// [`Caps::exact_halves`] and [`Caps::subnormal_halves`] of this adapter.
    fn halves(&self) -> [bool; 2] {
        probe::halves(self).unwrap_or_else(|why| {
            log::warn!(
                "{} rounds to halves in ways unknown, nothing is made by way of them: {why}",
                self.name()
            );
            [false; 2]
        })
    }

    /// This adapter, said to round to halves otherwise than to nearest even.
    ///
    /// # Panics
    /// When it has been cloned.
    #[cfg(test)]
    pub(crate) fn with_inexact_halves(mut self) -> Gpu {
        Arc::get_mut(&mut self.0).expect("no clone of it yet").caps.exact_halves = false;
        self
    }

    /// How many lanes a subgroup has that multiplies on these units. The most first: kernels for fewer are not safe to try there.
    fn lanes(&self, units: MatrixUnits) -> Result<u32> {
        let caps = self.caps();
        let first = if caps.subgroups_vary { 64 } else { caps.subgroup_max };
        match probe::multiply(self, units, first) {
            Err(_) if caps.subgroups_vary => probe::multiply(self, units, 32).map(|()| 32),
            tried => tried.map(|()| first),
        }
    }

    /// A `Gpu` with this one's limits and no device: calls are counted, nothing runs, downloads give zeros.
    pub fn planner(&self) -> Gpu {
        self.planner_with(self.0.caps)
    }

    /// A planner of an adapter that differs from this one.
    pub(crate) fn planner_with(&self, caps: Caps) -> Gpu {
        self.planner_of(caps, self.0.decisions.clone())
    }

    /// [`Gpu::planner_with`], where tuning has found other kernels.
    #[cfg(test)]
    pub(crate) fn planner_with_decisions(&self, caps: Caps, decisions: Decisions) -> Gpu {
        self.planner_of(caps, Arc::new(decisions))
    }

    fn planner_of(&self, caps: Caps, decisions: Arc<Decisions>) -> Gpu {
        Gpu(Arc::new(Inner {
            device: None,
            name: self.0.name.clone(),
            driver: self.0.driver.clone(),
            caps,
            options: self.0.options.clone(),
            pipelines: None,
            decisions,
            errors: Arc::default(),
            pool: Arc::default(),
            state: Mutex::default(),
        }))
    }

    /// Whether this is a planner.
    pub fn is_planner(&self) -> bool {
        self.0.device.is_none()
    }

    /// The adapter's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The driver's name and version.
    pub fn driver(&self) -> &str {
        &self.0.driver
    }

    /// How the adapter was opened.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// What `moe8 tune` found out here, from [`Options::cache`].
    pub fn decisions(&self) -> &Decisions {
        &self.0.decisions
    }

    /// What kernels may rely on.
    pub fn caps(&self) -> Caps {
        self.0.caps
    }

    /// The number of dispatches, submits and transfers so far.
    pub fn counters(&self) -> Counters {
        self.state().counters
    }

    /// The kernels compiled so far, by name and variant.
    pub fn kernels(&self) -> Vec<String> {
        self.state().kernels()
    }

    /// Launches so far of each kernel, by name.
    pub fn launches(&self) -> BTreeMap<&'static str, u64> {
        self.state().launches()
    }

    /// Of a planner: the kernels that ops with several have chosen so far, by class of calls.
    pub fn choices(&self) -> Vec<Choice> {
        self.state().choices.iter().cloned().collect()
    }

    /// Remembers what an op chose.
    pub(crate) fn note_choice(&self, choice: Choice) {
        self.state().choices.insert(choice);
    }

    /// Device memory held now, in bytes: live buffers and those kept for reuse.
    pub fn memory(&self) -> u64 {
        self.0.pool.lock().expect("pool lock").held()
    }

    /// Writes what was compiled so far into [`Options::cache`]; also done when the last clone goes.
    pub fn save_pipelines(&self) {
        self.0.save_pipelines();
    }

    fn state(&self) -> MutexGuard<'_, recorder::State> {
        self.0.state.lock().expect("recorder lock")
    }

    /// Raises what the device reported since the last call.
    fn check(&self) -> Result<()> {
        match self.0.errors.take() {
            None => Ok(()),
            Some(what) => {
                Err(Error::gpu(what, "run with --safe-shaders, or choose another adapter with --device"))
            }
        }
    }
}

impl Inner {
    fn save_pipelines(&self) {
        if let Some(pipelines) = &self.pipelines {
            pipelines.save();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.save_pipelines();
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.0.name, self.0.driver)
    }
}
