//! Finding adapters, choosing one, opening it with the limits that it has.

use super::{Caps, MatrixUnits, Options, cache};
use crate::{Error, Result};

/// Which adapter to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best one: discrete before integrated before virtual before software.
    #[default]
    Auto,
    /// The one with this number in [`list_adapters`].
    Index(usize),
    /// The first whose name or backend contains this text, letters' case aside; `cpu` means any software adapter.
    Name(String),
}

impl DeviceChoice {
    /// Reads `auto`, a number, or part of a name.
    pub fn parse(text: &str) -> DeviceChoice {
        match text.trim() {
            "" | "auto" => DeviceChoice::Auto,
            t => t.parse().map_or_else(|_| DeviceChoice::Name(t.to_lowercase()), DeviceChoice::Index),
        }
    }

    /// Which of `all` (as [`list_adapters`] gives them) this chooses.
    pub fn pick(&self, all: &[AdapterLine]) -> Option<usize> {
        match self {
            DeviceChoice::Auto => (!all.is_empty()).then_some(0),
            DeviceChoice::Index(i) => (*i < all.len()).then_some(*i),
            DeviceChoice::Name(text) => all.iter().position(|a| {
                (text == "cpu" && a.caps.software)
                    || a.name.to_lowercase().contains(text)
                    || a.backend.to_lowercase() == *text
            }),
        }
    }

    /// What the environment variable `MOE8_DEVICE` says, else [`DeviceChoice::Auto`].
    pub fn from_env() -> DeviceChoice {
        DeviceChoice::parse(&std::env::var("MOE8_DEVICE").unwrap_or_default())
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("\"auto\""),
            DeviceChoice::Index(i) => write!(f, "number {i}"),
            DeviceChoice::Name(name) => write!(f, "{name:?}"),
        }
    }
}

/// One adapter, as `moe8 devices` prints it.
#[derive(Clone, Debug)]
pub struct AdapterLine {
    /// The adapter's name.
    pub name: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// Vulkan, Metal, Dx12 or Gl.
    pub backend: String,
    /// The driver's name and version.
    pub driver: String,
    /// The limits that matter here.
    pub caps: Caps,
    /// `Some(why)` when it cannot be used.
    pub rejected: Option<String>,
}

pub(super) struct Opened {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub name: String,
    pub driver: String,
    pub caps: Caps,
    pub pipelines: Option<cache::Pipelines>,
}

/// Storage bindings that a kernel may have; an adapter with fewer is rejected by name and number, as for the others.
pub const NEEDED_BINDINGS: u32 = 8;
/// Threads that a workgroup may have.
pub const NEEDED_INVOCATIONS: u32 = 256;
/// Bytes that a workgroup may share.
pub const NEEDED_WORKGROUP_MEMORY: u32 = 16 << 10;

fn adapters() -> Vec<wgpu::Adapter> {
    let find = |backends| {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
        descriptor.backends &= backends;
        let instance = wgpu::Instance::new(descriptor);
        pollster::block_on(instance.enumerate_adapters(backends))
    };
    let native = find(wgpu::Backends::PRIMARY);
    // OpenGL shows the same devices again with fewer abilities: only where there is nothing else.
    if native.is_empty() { find(wgpu::Backends::SECONDARY) } else { native }
}

fn caps(adapter: &wgpu::Adapter) -> Caps {
    let l = adapter.limits();
    let subgroups = subgroup_sizes(&adapter.get_info());
    Caps {
        software: adapter.get_info().device_type == wgpu::DeviceType::Cpu,
        max_binding: l.max_storage_buffer_binding_size,
        max_buffer: l.max_buffer_size,
        align: u64::from(l.min_storage_buffer_offset_alignment),
        workgroup_memory: l.max_compute_workgroup_storage_size,
        workgroup_size: l.max_compute_invocations_per_workgroup,
        subgroup_max: subgroups[1],
        subgroups_vary: subgroups[0] != subgroups[1],
        exact_halves: false,
        subnormal_halves: true,
        coop: matrix_units(subgroups, &l, &adapter.cooperative_matrix_properties())
            .filter(|_| adapter.features().contains(MATRIX_FEATURES)),
    }
}

/// The fewest and the most lanes of a subgroup. On Metal wgpu says 4 and 64 whatever the GPU is; Apple's have 32.
fn subgroup_sizes(info: &wgpu::AdapterInfo) -> [u32; 2] {
    if info.backend == wgpu::Backend::Metal && info.name.starts_with("Apple") {
        return [32; 2];
    }
    [info.subgroup_min_size, info.subgroup_max_size]
}

/// What the kernels for matrix units are written with.
const MATRIX_FEATURES: wgpu::Features = wgpu::Features::SHADER_F16
    .union(wgpu::Features::SUBGROUP)
    .union(wgpu::Features::SUBGROUP_BARRIER)
    .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
/// What is used where it is there, and nothing needs: timestamps for benchmarks, compiled kernels kept between runs.
const WELCOME_FEATURES: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::PIPELINE_CACHE);
/// Bytes of workgroup memory that those kernels take.
const MATRIX_WORKGROUP_MEMORY: u32 = 24 << 10;

/// The matrix units among `products`, if there is what their kernels need: four whole subgroups in a workgroup, all of one size (of
/// 32 or 64 lanes on AMD's, which `gpu::probe` finds out).
/// (On Metal wgpu lists products of 8x8x8 alone: of f32, of halves, and of halves with f32 sums, on Apple's GPUs since the M1 and
/// A14; for the others of a Mac, which have none, it does so too, but their subgroups are of no one size.)
fn matrix_units(
    subgroups: [u32; 2],
    limits: &wgpu::Limits,
    products: &[wgpu::CooperativeMatrixProperties],
) -> Option<MatrixUnits> {
    let fits = |units: MatrixUnits| match units {
        MatrixUnits::Coop16 => matches!(subgroups, [32, 32] | [64, 64] | [32, 64]),
        MatrixUnits::Coop8 => subgroups == [32, 32],
    };
    let has = |units: MatrixUnits| {
        products.iter().any(|p| {
            [p.m_size, p.n_size, p.k_size] == [units.edge(); 3]
                && p.ab_type == wgpu::CooperativeScalarType::F16
                && p.cr_type == wgpu::CooperativeScalarType::F32
        })
    };
    let memory = limits.max_compute_workgroup_storage_size >= MATRIX_WORKGROUP_MEMORY;
    MatrixUnits::ALL.into_iter().find(|units| memory && fits(*units) && has(*units))
}

/// Why `adapter` cannot run the kernels, if so.
fn rejection(adapter: &wgpu::Adapter) -> Option<String> {
    let flags = adapter.get_downlevel_capabilities().flags;
    shortcoming(flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS), &adapter.limits())
}

/// What an adapter with these limits lacks: which limit, how much it is and how much is needed.
fn shortcoming(compute: bool, l: &wgpu::Limits) -> Option<String> {
    if !compute {
        return Some("it has no compute shaders".into());
    }
    let needs = [
        ("max_storage_buffers_per_shader_stage", l.max_storage_buffers_per_shader_stage, NEEDED_BINDINGS),
        (
            "max_compute_invocations_per_workgroup",
            l.max_compute_invocations_per_workgroup,
            NEEDED_INVOCATIONS,
        ),
        ("max_compute_workgroup_size_x", l.max_compute_workgroup_size_x, NEEDED_INVOCATIONS),
        ("max_compute_workgroup_storage_size", l.max_compute_workgroup_storage_size, NEEDED_WORKGROUP_MEMORY),
    ];
    let (what, have, need) = needs.into_iter().find(|(_, have, need)| have < need)?;
    Some(format!("{what} is {have}, moe8 needs {need}"))
}

fn line(adapter: &wgpu::Adapter) -> AdapterLine {
    let info = adapter.get_info();
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    };
    AdapterLine {
        name: info.name,
        kind,
        backend: format!("{:?}", info.backend),
        driver: format!("{} {}", info.driver, info.driver_info),
        caps: caps(adapter),
        rejected: rejection(adapter),
    }
}

/// Every adapter that wgpu finds, best first; the numbers are those of [`DeviceChoice::Index`].
pub fn list_adapters() -> Vec<AdapterLine> {
    sorted().iter().map(line).collect()
}

/// Adapters by preference: type first, then native backends before OpenGL.
fn sorted() -> Vec<wgpu::Adapter> {
    let mut all = adapters();
    all.sort_by_key(|a| {
        let info = a.get_info();
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other => 3,
            wgpu::DeviceType::Cpu => 4,
        };
        (rejection(a).is_some(), kind, info.backend == wgpu::Backend::Gl)
    });
    all
}

/// What to say where there is no adapter: `WGPU_BACKEND`, if it is set, may be what hides them.
pub(crate) fn none_found() -> Error {
    let setup = "run scripts/setup.sh to install a Vulkan driver (a software one will do)";
    // Empty counts as set: wgpu then takes no backend at all.
    match std::env::var_os("WGPU_BACKEND") {
        None => Error::user("no GPU adapter found", setup),
        Some(wish) => Error::user(
            format!("no GPU adapter found with WGPU_BACKEND = {:?}", wish.to_string_lossy()),
            format!(
                "unset WGPU_BACKEND, or set it to what this machine has of vulkan, metal, dx12 and gl; if that finds none, {setup}"
            ),
        ),
    }
}

pub(super) fn open(choice: &DeviceChoice, options: &Options) -> Result<Opened> {
    let all = sorted();
    let lines: Vec<AdapterLine> = all.iter().map(line).collect();
    let names: Vec<&str> = lines.iter().map(|l| l.name.as_str()).collect();
    let Some(at) = choice.pick(&lines) else {
        return Err(if all.is_empty() {
            none_found()
        } else {
            Error::user(
                format!("no adapter fits {choice}; found: {}", names.join(", ")),
                "see `moe8 devices`; --device takes a number or part of a name",
            )
        });
    };
    if let Some(why) = &lines[at].rejected {
        return Err(Error::user(
            format!("adapter {} cannot run moe8: {why}", names[at]),
            "choose another with --device (see `moe8 devices`), or install a newer driver",
        ));
    }
    request(&all[at], options)
}

fn request(adapter: &wgpu::Adapter, options: &Options) -> Result<Opened> {
    let info = adapter.get_info();
    let mut caps = caps(adapter);
    if options.no_coop {
        caps.coop = None;
    }
    let mut opened = device(adapter, caps.coop.is_some());
    if let (Err(e), Some(_)) = (&opened, caps.coop) {
        log::warn!("{} does not open with its matrix units, going on without: {e}", info.name);
        caps.coop = None;
        opened = device(adapter, false);
    }
    let (device, queue) = opened.map_err(|e| {
        Error::gpu(format!("cannot open {}: {e}", info.name), "try another adapter with --device")
    })?;
    let driver = format!("{} {}", info.driver, info.driver_info).trim().to_string();
    let folder = options.cache.as_deref();
    let pipelines = folder.and_then(|folder| cache::Pipelines::open(&device, &info, &driver, folder));
    Ok(Opened { device, queue, name: info.name, driver, caps, pipelines })
}

fn device(
    adapter: &wgpu::Adapter,
    matrix: bool,
) -> std::result::Result<(wgpu::Device, wgpu::Queue), wgpu::RequestDeviceError> {
    let (features, experimental) = if matrix {
        // SAFETY: what is experimental is used by shaders alone, and those are ours and tested.
        (MATRIX_FEATURES, unsafe { wgpu::ExperimentalFeatures::enabled() })
    } else {
        (wgpu::Features::empty(), wgpu::ExperimentalFeatures::disabled())
    };
    pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("moe8"),
        required_features: features | (adapter.features() & WELCOME_FEATURES),
        required_limits: adapter.limits(),
        experimental_features: experimental,
        ..Default::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::{NEEDED_BINDINGS, matrix_units, shortcoming, subgroup_sizes};
    use crate::gpu::MatrixUnits::{Coop8, Coop16};
    use wgpu::CooperativeScalarType::{F16, F32};

    fn products(
        edge: u32,
        kinds: &[[wgpu::CooperativeScalarType; 2]],
    ) -> Vec<wgpu::CooperativeMatrixProperties> {
        let one = |[ab_type, cr_type]: &[_; 2]| wgpu::CooperativeMatrixProperties {
            m_size: edge,
            n_size: edge,
            k_size: edge,
            ab_type: *ab_type,
            cr_type: *cr_type,
            saturating_accumulation: false,
        };
        kinds.iter().map(one).collect()
    }

    #[test]
    fn matrix_units_are_chosen_by_products_and_subgroups() {
        let limits = wgpu::Limits { max_compute_workgroup_storage_size: 32 << 10, ..wgpu::Limits::default() };
        let small = wgpu::Limits::default();
        let metal = products(8, &[[F32, F32], [F16, F16], [F16, F32]]);
        let vulkan = products(16, &[[F16, F16], [F16, F32]]);
        let both: Vec<_> = metal.iter().chain(&vulkan).cloned().collect();
        for (subgroups, limits, products, want) in [
            ([32, 32], &limits, &metal, Some(Coop8)),
            ([32, 32], &limits, &vulkan, Some(Coop16)),
            ([64, 64], &limits, &both, Some(Coop16)),
            ([32, 32], &limits, &both, Some(Coop16)),
            ([32, 64], &limits, &both, Some(Coop16)),
            ([32, 64], &limits, &metal, None),
            ([64, 64], &limits, &metal, None),
            ([4, 64], &limits, &both, None),
            ([8, 8], &limits, &both, None),
            ([32, 32], &small, &both, None),
            ([32, 32], &limits, &metal[..2].to_vec(), None),
            ([32, 32], &limits, &vulkan[..1].to_vec(), None),
        ] {
            assert_eq!(matrix_units(subgroups, limits, products), want, "{subgroups:?} {products:?}");
        }
    }

    #[test]
    fn apples_subgroups_have_32_lanes() {
        let info = |name: &str, backend| wgpu::AdapterInfo {
            name: name.into(),
            subgroup_min_size: 4,
            subgroup_max_size: 64,
            ..wgpu::AdapterInfo::new(wgpu::DeviceType::IntegratedGpu, backend)
        };
        assert_eq!(subgroup_sizes(&info("Apple M2 Pro", wgpu::Backend::Metal)), [32, 32]);
        assert_eq!(subgroup_sizes(&info("AMD Radeon Pro 5500M", wgpu::Backend::Metal)), [4, 64]);
        assert_eq!(subgroup_sizes(&info("Apple M2 Pro", wgpu::Backend::Vulkan)), [4, 64]);
    }

    #[test]
    fn a_missing_limit_is_named_with_both_numbers() {
        let enough = wgpu::Limits::default();
        assert_eq!(shortcoming(true, &enough), None, "WebGPU's defaults are enough");
        assert!(shortcoming(false, &enough).unwrap().contains("no compute shaders"));
        let least = wgpu::Limits { max_storage_buffers_per_shader_stage: NEEDED_BINDINGS, ..enough.clone() };
        assert_eq!(shortcoming(true, &least), None);
        for (limits, words) in [
            (
                wgpu::Limits { max_storage_buffers_per_shader_stage: 7, ..enough.clone() },
                "max_storage_buffers_per_shader_stage is 7, moe8 needs 8",
            ),
            (
                wgpu::Limits { max_compute_invocations_per_workgroup: 128, ..enough.clone() },
                "max_compute_invocations_per_workgroup is 128, moe8 needs 256",
            ),
            (
                wgpu::Limits { max_compute_workgroup_size_x: 64, ..enough.clone() },
                "max_compute_workgroup_size_x is 64, moe8 needs 256",
            ),
            (
                wgpu::Limits { max_compute_workgroup_storage_size: 0, ..enough.clone() },
                "max_compute_workgroup_storage_size is 0, moe8 needs 16384",
            ),
        ] {
            assert_eq!(shortcoming(true, &limits).as_deref(), Some(words));
        }
    }
}
