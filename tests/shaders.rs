//! Every kernel in every variant, without a GPU: valid WGSL that naga writes as SPIR-V (Vulkan), MSL (Metal) and
//! HLSL (DX12).
//!
//! Each text takes the way that wgpu takes: `process_overrides` keeps one entry point and what it reaches, then each
//! writer gets the bindings of that entry point alone and must not have to invent any. Entry points of one file may
//! give one number to different variables, so the registers of the HLSL are counted too.

use moe8::gpu::{self, Kernel, Variant};
use moe8::ops;
use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ModuleInfo, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ResourceBinding, ShaderStage, StorageAccess};
use std::collections::BTreeSet;

/// Slots that the bindings of kernels (0..=8) leave free, for what the backends add.
const SIZES_SLOT: u8 = 20;
const CONSTANTS_SLOT: u32 = 21;

/// Bytes of workgroup memory that kernels for matrix units may take: half of what a core of the adapters they are for has.
const MATRIX_WORKGROUP_MEMORY: u32 = 24 << 10;

/// Whether a text is for matrix units.
fn is_matrix(text: &str) -> bool {
    text.starts_with("enable ")
}

fn matrix_capabilities() -> Capabilities {
    Capabilities::SHADER_FLOAT16
        | Capabilities::SHADER_FLOAT16_IN_FLOAT32
        | Capabilities::COOPERATIVE_MATRIX
        | Capabilities::SUBGROUP
        | Capabilities::SUBGROUP_BARRIER
}

/// Whether such a text is for the matrix units that Metal has: fragments of 8 x 8.
fn is_for_metal(text: &str) -> bool {
    text.contains("coop_mat8x8")
}

/// What matrix kernels may ask of the lanes of a subgroup.
fn subgroup_operations() -> SubgroupOperationSet {
    SubgroupOperationSet::BASIC | SubgroupOperationSet::VOTE | SubgroupOperationSet::SHUFFLE
}

/// A valid module and what each backend is to write.
struct Shader {
    module: Module,
    info: ModuleInfo,
    entry: String,
}

/// A resource of the entry point, and whether it may be written.
type Resource = (ResourceBinding, bool);

impl Shader {
    /// Parses and validates for a device without any optional feature, or with those that matrix units come with.
    fn parse(text: &str, entry: &str) -> Result<Shader, String> {
        let module = naga::front::wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
        let capabilities = match text {
            _ if is_matrix(text) => matrix_capabilities(),
            // Quantization to halves, which only matrix units ask for.
            _ if text.contains("pack2x16float") => Capabilities::SHADER_FLOAT16_IN_FLOAT32,
            _ => Capabilities::empty(),
        };
        let info = Validator::new(ValidationFlags::all(), capabilities)
            .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
            .subgroup_operations(subgroup_operations())
            .validate(&module)
            .map_err(|e| e.emit_to_string(text))?;
        Ok(Shader { module, info, entry: entry.to_owned() })
    }

    /// The entry point alone, as wgpu cuts it out for every backend.
    fn alone(&self) -> Result<Shader, String> {
        let (stage, entry) = (ShaderStage::Compute, self.entry.clone());
        if !self.module.entry_points.iter().any(|e| e.stage == stage && e.name == entry) {
            return Err(format!("no entry point {entry}"));
        }
        let (module, info) = naga::back::pipeline_constants::process_overrides(
            &self.module,
            &self.info,
            Some((stage, &entry)),
            &naga::back::PipelineConstants::default(),
        )
        .map_err(|e| e.to_string())?;
        Ok(Shader { module: module.into_owned(), info: info.into_owned(), entry })
    }

    /// What the entry point uses: the bind group layout that moe8 makes for it.
    fn resources(&self) -> Vec<Resource> {
        let at = self.module.entry_points.iter().position(|e| e.name == self.entry).expect("an entry point");
        let uses = self.info.get_entry_point(at);
        let variables = self.module.global_variables.iter();
        let used = variables.filter(|(handle, _)| !uses[*handle].is_empty());
        used.filter_map(|(_, variable)| {
            let writable = matches!(variable.space, AddressSpace::Storage { access } if access.contains(StorageAccess::STORE));
            Some((variable.binding?, writable))
        })
        .collect()
    }

    /// Fails where the entry point takes more than what an adapter must have to be accepted.
    fn fits_needed_limits(&self, memory: u32) -> Result<(), String> {
        let entry = self.module.entry_points.iter().find(|e| e.name == self.entry).expect("an entry point");
        let shared = self.module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
        let shared = shared.map(|(_, v)| self.module.types[v.ty].inner.size(self.module.to_ctx())).sum();
        let storage = self.resources().len() as u32 - 1;
        for (what, has, most) in [
            ("storage bindings", storage, gpu::NEEDED_BINDINGS),
            ("threads", entry.workgroup_size.iter().product(), gpu::NEEDED_INVOCATIONS),
            ("bytes of workgroup memory", shared, memory),
        ] {
            if has > most {
                return Err(format!("{has} {what}, at most {most} may be counted on"));
            }
        }
        Ok(())
    }

    fn write_spirv(&self, matrix: bool) -> Result<(), String> {
        let target = |(r, _): &Resource| {
            (*r, spv::BindingInfo { descriptor_set: r.group, binding: r.binding, binding_array_size: None })
        };
        let mut capabilities = vec![spv::Capability::Shader, spv::Capability::Matrix];
        if matrix {
            capabilities.extend([
                spv::Capability::Float16,
                spv::Capability::StorageBuffer16BitAccess,
                spv::Capability::UniformAndStorageBuffer16BitAccess,
                spv::Capability::StorageInputOutput16,
                spv::Capability::GroupNonUniform,
                spv::Capability::GroupNonUniformVote,
                spv::Capability::GroupNonUniformShuffle,
                spv::Capability::CooperativeMatrixKHR,
                spv::Capability::VulkanMemoryModel,
                spv::Capability::VulkanMemoryModelDeviceScope,
            ]);
        }
        let options = spv::Options {
            fake_missing_bindings: false,
            binding_map: self.resources().iter().map(target).collect(),
            capabilities: Some(capabilities.into_iter().collect()),
            ..spv::Options::default()
        };
        let pipeline =
            spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: self.entry.clone() };
        spv::write_vec(&self.module, &self.info, &options, Some(&pipeline)).map_err(|e| e.to_string())?;
        Ok(())
    }

    /// Fails where a fragment is loaded or stored through a pointer to something else than a scalar: naga writes that as MSL too, but
    /// Metal has no such function.
    fn points_to_scalars(&self) -> Result<(), String> {
        let entry = self.module.entry_points.iter().enumerate().find(|(_, e)| e.name == self.entry);
        let (at, entry) = entry.expect("an entry point");
        let known = self.info.get_entry_point(at);
        let mut pointers = Vec::new();
        for (_, expression) in entry.function.expressions.iter() {
            if let naga::Expression::CooperativeLoad { data, .. } = expression {
                pointers.push(data.pointer);
            }
        }
        stores(&entry.function.body, &mut pointers);
        for pointer in &pointers {
            let inner = known[*pointer].ty.inner_with(&self.module.types);
            let scalar = match inner {
                naga::TypeInner::Pointer { base, .. } => {
                    matches!(self.module.types[*base].inner, naga::TypeInner::Scalar(_))
                }
                other => matches!(other, naga::TypeInner::ValuePointer { size: None, .. }),
            };
            if !scalar {
                return Err(format!("a fragment through a pointer to no scalar: {inner:?}"));
            }
        }
        if pointers.is_empty() { Err("no fragment is loaded".into()) } else { Ok(()) }
    }

    fn write_msl(&self, lang_version: (u8, u8)) -> Result<(), String> {
        let target = |(r, mutable): &Resource| {
            (*r, msl::BindTarget { buffer: Some(r.binding as u8), mutable: *mutable, ..Default::default() })
        };
        let resources = msl::EntryPointResources {
            resources: self.resources().iter().map(target).collect(),
            immediates_buffer: None,
            sizes_buffer: Some(SIZES_SLOT),
        };
        let options = msl::Options {
            lang_version,
            per_entry_point_map: [(self.entry.clone(), resources)].into_iter().collect(),
            fake_missing_bindings: false,
            ..msl::Options::default()
        };
        let pipeline = msl::PipelineOptions {
            entry_point: Some((ShaderStage::Compute, self.entry.clone())),
            ..Default::default()
        };
        let (_, written) =
            msl::write_string(&self.module, &self.info, &options, &pipeline).map_err(|e| e.to_string())?;
        written.entry_point_names.into_iter().try_for_each(|name| name.map(drop).map_err(|e| e.to_string()))
    }

    fn write_hlsl(&self) -> Result<String, String> {
        let bind = |register| hlsl::BindTarget { register, ..Default::default() };
        let options = hlsl::Options {
            binding_map: self.resources().iter().map(|(r, _)| (*r, bind(r.binding))).collect(),
            fake_missing_bindings: false,
            special_constants_binding: Some(bind(CONSTANTS_SLOT)),
            ..hlsl::Options::default()
        };
        let pipeline =
            hlsl::PipelineOptions { entry_point: Some((ShaderStage::Compute, self.entry.clone())) };
        let mut text = String::new();
        let written = hlsl::Writer::new(&mut text, &options, &pipeline)
            .write(&self.module, &self.info, None)
            .map_err(|e| e.to_string())?;
        for name in written.entry_point_names {
            name.map_err(|e| e.to_string())?;
        }
        registers_are_apart(&text)?;
        Ok(text)
    }
}

/// The pointers through which a block stores fragments.
fn stores(block: &naga::Block, pointers: &mut Vec<naga::Handle<naga::Expression>>) {
    for statement in block.iter() {
        match statement {
            naga::Statement::CooperativeStore { data, .. } => pointers.push(data.pointer),
            naga::Statement::Block(inner) => stores(inner, pointers),
            naga::Statement::If { accept, reject, .. } => {
                [accept, reject].into_iter().for_each(|b| stores(b, pointers));
            }
            naga::Statement::Loop { body, continuing, .. } => {
                [body, continuing].into_iter().for_each(|b| stores(b, pointers));
            }
            naga::Statement::Switch { cases, .. } => cases.iter().for_each(|c| stores(&c.body, pointers)),
            _ => {}
        }
    }
}

/// Fails where two variables of an HLSL text lie in one register.
fn registers_are_apart(text: &str) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for declaration in text.lines().filter(|line| line.contains(": register(")) {
        let register = declaration.split(": register(").nth(1).and_then(|rest| rest.split(')').next());
        if !seen.insert(register) {
            return Err(format!("register {} is taken twice", register.unwrap_or("?")));
        }
    }
    if seen.is_empty() { Err("no register at all: was the pattern renamed?".into()) } else { Ok(()) }
}

/// All that is asked of a kernel's text.
fn check(text: &str, entry: &str) -> Result<(), String> {
    let alone = Shader::parse(text, entry)?.alone()?;
    let matrix = is_matrix(text);
    alone.fits_needed_limits(if matrix { MATRIX_WORKGROUP_MEMORY } else { gpu::NEEDED_WORKGROUP_MEMORY })?;
    alone.write_spirv(matrix).map_err(|e| format!("SPIR-V: {e}"))?;
    if matrix {
        // HLSL has no fragments, and Metal those of 8 x 8 alone.
        return match is_for_metal(text) {
            true => alone
                .points_to_scalars()
                .and_then(|()| alone.write_msl((2, 3)))
                .map_err(|e| format!("MSL: {e}")),
            false => Ok(()),
        };
    }
    alone.write_msl((2, 0)).map_err(|e| format!("MSL: {e}"))?;
    alone.write_hlsl().map_err(|e| format!("HLSL: {e}"))?;
    Ok(())
}

#[test]
fn every_kernel_is_written_for_every_backend() {
    let all: Vec<(Kernel, Variant)> = gpu::kernels().into_iter().chain(ops::kernels()).collect();
    let mut known = BTreeSet::new();
    let texts: Vec<(String, &Kernel, &Variant)> = all
        .iter()
        .map(|(kernel, variant)| (kernel.source(variant), kernel, variant))
        .filter(|(text, kernel, _)| known.insert((text.clone(), kernel.entry)))
        .collect();
    assert!(texts.len() > 300, "{} kernels: were the lists cut?", texts.len());
    let workers = std::thread::available_parallelism().map_or(2, std::num::NonZero::get).min(8);
    let wrong = std::thread::scope(|scope| {
        let part = |part: usize| {
            let mine = texts.iter().skip(part).step_by(workers);
            mine.filter_map(|(text, kernel, variant)| {
                let error = check(text, kernel.entry).err()?;
                Some(format!("{} {variant:?}\n{error}", kernel.name))
            })
            .collect::<Vec<_>>()
        };
        let running: Vec<_> = (0..workers).map(|i| scope.spawn(move || part(i))).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("a checking thread")).collect::<Vec<_>>()
    });
    assert!(wrong.is_empty(), "{} of {} fail:\n{}", wrong.len(), texts.len(), wrong.join("\n\n"));
}

const TWO: &str = "
var<workgroup> w: array<u32, 4160>;
@group(0) @binding(0) var<uniform> p: vec4<u32>;
@group(0) @binding(1) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read> b: array<u32>;
@group(0) @binding(2) var<storage, read_write> c: array<u32>;
@compute @workgroup_size(1) fn one() { c[0] = a[p.x]; }
@compute @workgroup_size(1) fn two() { c[0] = b[p.x]; }
";

#[test]
fn entry_points_may_share_a_number_but_not_a_register() {
    check(TWO, "one").unwrap();
    check(TWO, "two").unwrap();
    // Not cut to one entry point, the same file overlaps: this is what the check is for.
    let whole = Shader::parse(TWO, "one").unwrap();
    assert!(whole.write_hlsl().unwrap_err().contains("taken twice"));
}

const FRAGMENTS: &str = "enable f16;
enable wgpu_cooperative_matrix;
struct Four { x: f16, y: f16, z: f16, w: f16 }
@group(0) @binding(0) var<uniform> p: vec4<u32>;
@group(0) @binding(1) var<storage, read> a: array<Four>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@compute @workgroup_size(32) fn main() {
  let x = coopLoadT<coop_mat8x8<f16, A>>(&a[p.x].x, 8u);
  let y = coopLoad<coop_mat8x8<f16, B>>(&a[p.y].x, 8u);
  for (var i = 0u; i < 2u; i++) {
    coopStoreT(coopMultiplyAdd(x, y, coop_mat8x8<f32, C>()), &c[0], 8u);
  }
}
";

#[test]
fn fragments_on_metal_are_loaded_through_scalars() {
    check(FRAGMENTS, "main").unwrap();
    for (from, to) in
        [("a: array<Four>", "a: array<array<vec4<f16>, 2>>"), ("c: array<f32>", "c: array<vec4<f32>>")]
    {
        let planted = FRAGMENTS
            .replace(from, to)
            .replace("].x, 8u", if to.starts_with('a') { "][0], 8u" } else { "].x, 8u" });
        let error = check(&planted, "main").expect_err(to);
        assert!(error.contains("pointer to no scalar"), "{error}");
        // The writer of MSL does not mind, and those of 16 x 16 are not for Metal.
        check(&planted.replace("8x8", "16x16"), "main").unwrap();
    }
}

#[test]
fn planted_faults_are_found() {
    for (from, to, found) in [
        ("c[0] = a[p.x]", "c[0] = d[p.x]", "no definition in scope"),
        ("c[0] = a[p.x]", "c[0] = 1.5", "c[0]"),
        ("c[0] = a[p.x]", "a[0] = c[0]", "a[0]"),
        ("c[0] = a[p.x]", "c[0] = a[p.x] + b[0]", "onflict"),
        ("fn one() {", "fn one() { let wide = 1.0lf;", "f64"),
        ("fn one()", "fn other()", "no entry point one"),
        ("(1) fn one", "(16, 17) fn one", "272 threads"),
        ("fn one() {", "fn one() { w[p.x] = p.y;", "16640 bytes"),
    ] {
        assert!(TWO.contains(from));
        let error = check(&TWO.replace(from, to), "one").expect_err(to);
        assert!(error.contains(found), "{to}: {error}");
    }
}
