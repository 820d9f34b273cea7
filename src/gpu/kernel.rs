//! A kernel is a Rust constant; a variant binds its names to numbers and dtypes; naga tells its bindings.

use super::{Fragments, MatrixUnits, repeat};
use crate::num::DType;
use std::fmt::Write;
use wgpu::naga;

/// A compute shader: where its text is and where it starts.
///
/// The text of a variant is a prelude (the text's own `enable` lines, one `const NAME = n;` per constant, one alias `X`
/// with `x_get` and `x_put` per dtype), the library files, and `text` with its repeat blocks written out.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The file's stem and, after a dot, the entry point, for messages.
    pub name: &'static str,
    /// The shader's text.
    pub text: &'static str,
    /// The entry point.
    pub entry: &'static str,
}

/// The constants and dtypes of one use of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    pub(super) constants: Vec<(&'static str, u32)>,
    pub(super) quads: Vec<(&'static str, DType)>,
}

impl Variant {
    /// A variant without constants or dtypes.
    // Inlined, an empty variant is a constant, and rustc before 1.97 may pass one such constant to two calls of a closure
    // without a copy: the second call then writes into what the first has freed (rust-lang/rust#155241).
    #[inline(never)]
    pub fn new() -> Variant {
        Variant { constants: Vec::new(), quads: Vec::new() }
    }

    /// Adds `const name = value;`.
    #[must_use]
    pub fn constant(mut self, name: &'static str, value: u32) -> Variant {
        self.constants.push((name, value));
        self
    }

    /// Adds the alias `name` for a quad of `dtype`, and `<lower-case name>_get` and `_put`.
    #[must_use]
    pub fn quad(mut self, name: &'static str, dtype: DType) -> Variant {
        self.quads.push((name, dtype));
        self
    }

    /// Adds the constants of `lib/fragments.wgsl`: the edge of a fragment, how many are 16 wide, which edge it is; the lanes of a
    /// subgroup, and whether some may have another number.
    #[must_use]
    pub fn fragments(self, Fragments { units, lanes, vary }: Fragments) -> Variant {
        self.constant("EDGE", units.edge())
            .constant("LANES", lanes)
            .constant("VARY", vary.into())
            .constant("STEADY", (!vary).into())
            .constant("PIECES", 16 / units.edge())
            .constant("EDGE16", (units == MatrixUnits::Coop16).into())
            .constant("EDGE8", (units == MatrixUnits::Coop8).into())
    }

    fn prelude(&self) -> String {
        let mut out = String::new();
        for (name, value) in &self.constants {
            let _ = writeln!(out, "const {name} = {value}u;");
        }
        for (name, dtype) in &self.quads {
            let (ty, get, put) = match dtype {
                DType::F32 => ("vec4<f32>", "q", "v"),
                DType::BF16 => ("vec2<u32>", "bf16_get(q)", "bf16_put(v)"),
                DType::F16 => (
                    "vec2<u32>",
                    "vec4<f32>(unpack2x16float(q.x), unpack2x16float(q.y))",
                    "vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw))",
                ),
                DType::E4M3 => ("u32", "e4m3_get(q)", "e4m3_put(v)"),
                DType::E5M2 => ("u32", "e5m2_get(q)", "e5m2_put(v)"),
                DType::U32 => panic!("quad {name}: u32 tensors are flat, bind array<u32>"),
            };
            let low = name.to_lowercase();
            let _ = writeln!(out, "alias {name} = {ty};");
            let _ = writeln!(out, "fn {low}_get(q: {name}) -> vec4<f32> {{ return {get}; }}");
            let _ = writeln!(out, "fn {low}_put(v: vec4<f32>) -> {name} {{ return {put}; }}");
        }
        out
    }
}

impl Default for Variant {
    fn default() -> Variant {
        Variant::new()
    }
}

/// `WX=8 A=e4m3`: the constants, then the dtypes.
impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let constants = self.constants.iter().map(|(name, value)| format!("{name}={value}"));
        let quads = self.quads.iter().map(|(name, dtype)| format!("{name}={dtype}"));
        f.write_str(&constants.chain(quads).collect::<Vec<_>>().join(" "))
    }
}

/// The files that every kernel may call.
const LIBRARY: [(&str, &str); 3] = [
    ("lib/grid.wgsl", include_str!("../../shaders/lib/grid.wgsl")),
    ("lib/bf16.wgsl", include_str!("../../shaders/lib/bf16.wgsl")),
    ("lib/fp8.wgsl", include_str!("../../shaders/lib/fp8.wgsl")),
];

impl Kernel {
    /// The complete WGSL of a variant.
    pub fn source(&self, variant: &Variant) -> String {
        let lookup = |n: &str| variant.constants.iter().find(|(k, _)| *k == n).map(|(_, v)| *v);
        let (enables, body): (Vec<&str>, Vec<&str>) =
            self.text.lines().partition(|l| l.starts_with("enable "));
        let mut out = enables.iter().map(|line| format!("{line}\n")).collect::<String>();
        out.push_str(&variant.prelude());
        for (_, text) in LIBRARY {
            out.push_str(text);
        }
        out.push_str(&repeat::expand(self.name, &body.join("\n"), &lookup));
        out
    }

    /// Whether the text has `enable` lines: it needs an adapter with [`super::Caps::coop`].
    pub fn needs_matrix_units(&self) -> bool {
        self.text.lines().any(|line| line.starts_with("enable "))
    }

    pub(super) fn key(&self, variant: &Variant) -> String {
        format!("{} {variant}", self.name).trim_end().to_string()
    }
}

/// A kernel's uniform parameters: plain 32-bit numbers whose names and places are those of the WGSL struct.
///
/// Made by [`params!`](crate::params!); the recorder compares the fields with the shader's once per pipeline.
pub trait Params: bytemuck::Pod {
    /// Name and byte offset of each field.
    const FIELDS: &'static [(&'static str, usize)];
}

/// Declares the Rust twin of a kernel's uniform struct: `params! { struct P { rows: u32, eps: f32 } }`.
#[macro_export]
macro_rules! params {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        $vis struct $name { $($field: $ty),* }
        impl $crate::gpu::Params for $name {
            const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($field), std::mem::offset_of!($name, $field))),*];
        }
    };
}

/// What naga read back from a kernel's text.
pub(super) struct Reflection {
    /// Names and offsets of the uniform's fields.
    pub fields: Vec<(String, usize)>,
    /// For storage bindings 1, 2, ...: whether the kernel may write.
    pub writable: Vec<bool>,
}

/// Parses `source` and reads the bindings that `entry` uses; the entry points of a file may give one number to
/// different variables.
///
/// # Panics
/// When the text is not valid WGSL or its bindings are not 0 = uniform, 1.. = storage: shaders are ours.
pub(super) fn reflect(name: &str, source: &str, entry: &str) -> Reflection {
    let module = naga::front::wgsl::parse_str(source)
        .unwrap_or_else(|e| panic!("kernel {name}:\n{}", e.emit_to_string(source)));
    let info =
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all())
            .validate(&module)
            .unwrap_or_else(|e| panic!("kernel {name}:\n{}", e.emit_to_string(source)));
    let start = module.entry_points.iter().position(|e| e.name == entry);
    let uses = info.get_entry_point(start.unwrap_or_else(|| panic!("kernel {name}: no entry point {entry}")));
    let mut fields = Vec::new();
    let mut storage = Vec::new();
    for (handle, var) in module.global_variables.iter() {
        let Some(binding) = var.binding.as_ref().filter(|_| !uses[handle].is_empty()) else { continue };
        match var.space {
            naga::AddressSpace::Uniform => {
                assert_eq!(binding.binding, 0, "kernel {name}: the uniform is binding 0");
                if let naga::TypeInner::Struct { members, .. } = &module.types[var.ty].inner {
                    let read =
                        |m: &naga::StructMember| (m.name.clone().unwrap_or_default(), m.offset as usize);
                    fields = members.iter().map(read).collect();
                }
            }
            naga::AddressSpace::Storage { access } => {
                storage.push((binding.binding, access.contains(naga::StorageAccess::STORE)));
            }
            other => panic!("kernel {name}: binding in {other:?}"),
        }
    }
    storage.sort_unstable();
    for (i, (binding, _)) in storage.iter().enumerate() {
        assert_eq!(*binding as usize, i + 1, "kernel {name}: {entry} uses bindings 1, 2, ... without gaps");
    }
    Reflection { fields, writable: storage.into_iter().map(|(_, w)| w).collect() }
}

#[cfg(test)]
mod tests {
    use super::{DType, Variant, reflect};

    /// `cargo test --release --lib closure`: a dev build has it right whatever [`Variant::new`] looks like.
    #[test]
    fn a_closure_gets_a_fresh_variant_at_each_call() {
        let wide = std::env::args().next().is_some();
        let format = |variant: Variant| {
            let (top, low) = if wide { (15, 32) } else { (8, 87) };
            let variant = variant.constant("TOP", top).constant("LOW", low).constant("WIDE", wide.into());
            variant
                .constant("ONE", 1)
                .constant("TWO", 2)
                .quad("X", if wide { DType::F16 } else { DType::E4M3 })
        };
        let text = "TOP=15 LOW=32 WIDE=1 ONE=1 TWO=2 X=float16";
        assert_eq!(format(Variant::new()).to_string(), text);
        assert_eq!(format(Variant::new()).to_string(), text);
        assert_eq!(format(Variant::default()).to_string(), text);
        assert_eq!(format(Variant::default()).to_string(), text);
    }

    #[test]
    fn each_entry_point_has_its_own_bindings() {
        let text = "struct P { n: u32 }
            @group(0) @binding(0) var<uniform> p: P;
            @group(0) @binding(1) var<storage, read> a: array<u32>;
            @group(0) @binding(1) var<storage, read_write> b: array<u32>;
            @group(0) @binding(2) var<storage, read_write> c: array<u32>;
            fn first() -> u32 { return a[p.n]; }
            @compute @workgroup_size(1) fn one() { c[0] = first(); }
            @compute @workgroup_size(1) fn two() { b[0] = 1u; }";
        let one = reflect("t", text, "one");
        assert_eq!(one.writable, [false, true]);
        assert_eq!(one.fields, [("n".to_string(), 0)]);
        assert_eq!(reflect("t", text, "two").writable, [true]);
    }
}
