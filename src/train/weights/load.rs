//! Reading a weight file, one tensor at a time.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use half::f16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{LAYOUT_KEY, ParamSpec, exchange_last_two, layout_of};
use crate::num::{bf16, e4m3, e5m2};
use crate::{Error, Result};

const PATH_HINT: &str =
    "checkpoint.initial_load_path must name a .safetensors file that exists and may be read";
const WHOLE_HINT: &str = "copy or export the file again";

/// The limit of the safetensors format itself.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes converted at once, a multiple of every dtype's size.
const BLOCK_BYTES: u64 = 1 << 20;
/// Differences listed before the rest is only counted.
const MAX_LISTED: usize = 12;

/// Reads the tensors `specs` from the safetensors file `path` and hands each to `each` as f32, row-major in
/// the shape of its spec, in the order of the file. Only one tensor is in memory at a time.
///
/// Any float dtype is taken: F64, F32, F16, BF16, F8_E4M3, F8_E5M2. Buffers that upstream's files may hold
/// but which are not state (`freqs_cis`, `tokens_per_expert`) are passed over.
///
/// # Errors
/// Before anything is handed out: a file that is missing, cut short or no safetensors; every missing, extra
/// or misshapen tensor by name with both shapes; a dtype that is no float. After: what `each` returns.
pub fn load(
    path: &Path,
    specs: &[ParamSpec],
    each: &mut dyn FnMut(&str, &[f32]) -> Result<()>,
) -> Result<()> {
    let io = |e| Error::io(path, e, PATH_HINT);
    let mut file = File::open(path).map_err(io)?;
    let (header, data_start) = read_header(path, &mut file)?;
    let july = layout_of(header.metadata().as_ref().and_then(|m| m.get(LAYOUT_KEY)).map(String::as_str))
        .map_err(|e| name_file(path, e))?;
    let plan = plan(path, &header, specs, july)?;
    let (mut values, mut block) = (Vec::new(), Vec::new());
    for Step { spec, info, exchange } in plan {
        values.clear();
        file.seek(SeekFrom::Start(data_start + info.data_offsets.0 as u64)).map_err(io)?;
        let mut left = (info.data_offsets.1 - info.data_offsets.0) as u64;
        while left > 0 {
            block.resize(left.min(BLOCK_BYTES) as usize, 0);
            file.read_exact(&mut block).map_err(io)?;
            widen(info.dtype, &block, &mut values);
            left -= block.len() as u64;
        }
        if exchange {
            let shape = [info.shape[0], info.shape[1], info.shape[2]];
            each(&spec.name, &exchange_last_two(&values, shape))?;
        } else {
            each(&spec.name, &values)?;
        }
    }
    Ok(())
}

/// [`load`] into one vector, in the order of `specs`; optional tensors that the file lacks are left out.
///
/// # Errors
/// As [`load`].
pub fn load_all(path: &Path, specs: &[ParamSpec]) -> Result<Vec<(String, Vec<f32>)>> {
    let mut found = std::collections::HashMap::new();
    load(path, specs, &mut |name, values| {
        found.insert(name.to_string(), values.to_vec());
        Ok(())
    })?;
    Ok(specs.iter().filter_map(|s| found.remove(&s.name).map(|v| (s.name.clone(), v))).collect())
}

/// One tensor to read.
struct Step<'a> {
    spec: &'a ParamSpec,
    info: &'a TensorInfo,
    exchange: bool,
}

/// The header, and where the data begins; checks that the file has the length the header promises.
fn read_header(path: &Path, file: &mut File) -> Result<(Metadata, u64)> {
    let io = |e| Error::io(path, e, PATH_HINT);
    let bad = |why: String, hint: &str| Error::user(format!("{}: {why}", path.display()), hint);
    let length = file.metadata().map_err(io)?;
    if !length.is_file() {
        return Err(bad("this is no file".into(), PATH_HINT));
    }
    let length = length.len();
    if length < 8 {
        return Err(bad(format!("{length} bytes are no safetensors file"), WHOLE_HINT));
    }
    let mut start = [0; 8];
    file.read_exact(&mut start).map_err(io)?;
    if start.starts_with(b"PK\x03\x04") {
        return Err(bad(
            "this is a PyTorch archive, not safetensors".into(),
            "save the state dict with safetensors.torch.save_file and name that file",
        ));
    }
    let header_bytes = u64::from_le_bytes(start);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(bad("this is no safetensors file".into(), PATH_HINT));
    }
    let data_start = 8 + header_bytes;
    if length < data_start {
        return Err(bad(
            format!("cut short: {length} bytes, of which the header alone takes {data_start}"),
            WHOLE_HINT,
        ));
    }
    let mut text = vec![0; header_bytes as usize];
    file.read_exact(&mut text).map_err(io)?;
    let header: Metadata = serde_json::from_slice(&text)
        .map_err(|e| bad(format!("the header is no safetensors header: {e}"), WHOLE_HINT))?;
    let promised = data_start + header.data_len() as u64;
    if length != promised {
        let words = if length < promised { "cut short" } else { "too long" };
        return Err(bad(format!("{words}: {length} bytes, but the header promises {promised}"), WHOLE_HINT));
    }
    Ok((header, data_start))
}

/// Matches file and model; every difference is an error.
fn plan<'a>(
    path: &Path,
    header: &'a Metadata,
    specs: &'a [ParamSpec],
    july: Option<bool>,
) -> Result<Vec<Step<'a>>> {
    let mut steps = Vec::with_capacity(specs.len());
    let mut differences = Vec::new();
    for spec in specs {
        let Some(info) = header.info(&spec.name) else {
            if !spec.optional {
                differences.push(format!("missing {}: model {:?}, file none", spec.name, spec.shape));
            }
            continue;
        };
        if !is_float(info.dtype) {
            differences
                .push(format!("{} is {:?}, which is no float dtype that can be read", spec.name, info.dtype));
            continue;
        }
        match exchanges(spec, &info.shape, july) {
            Some(exchange) => steps.push(Step { spec, info, exchange }),
            None => differences.push(misshapen(spec, &info.shape, july)),
        }
    }
    let known: std::collections::HashSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    for name in header.offset_keys() {
        if !known.contains(name.as_str()) && !is_passed_over(&name) {
            let shape = header.info(&name).map(|i| i.shape.clone()).unwrap_or_default();
            differences.push(format!("extra {name}: model none, file {shape:?}"));
        }
    }
    if differences.is_empty() {
        steps.sort_by_key(|s| s.info.data_offsets.0);
        return Ok(steps);
    }
    let mut what = format!("{} does not fit the model, differences: {}", path.display(), differences.len());
    for line in differences.iter().take(MAX_LISTED) {
        what.push_str("\n    ");
        what.push_str(line);
    }
    if differences.len() > MAX_LISTED {
        what.push_str(&format!("\n    and {} more", differences.len() - MAX_LISTED));
    }
    Err(Error::user(what, "choose the model.flavor and model.args that the file was made with"))
}

/// Whether a tensor of this shape must be turned to the model's layout; `None` when it does not fit.
fn exchanges(spec: &ParamSpec, shape: &[usize], july: Option<bool>) -> Option<bool> {
    let straight = shape == spec.shape;
    if !spec.is_expert() {
        return straight.then_some(false);
    }
    let turned = shape == spec.exchanged();
    match july {
        Some(true) => turned.then_some(true),
        Some(false) => straight.then_some(false),
        None if straight => Some(false),
        None => turned.then_some(true),
    }
}

fn misshapen(spec: &ParamSpec, shape: &[usize], july: Option<bool>) -> String {
    let want = if spec.is_expert() && july == Some(true) {
        format!("{:?}, in July's layout {:?}", spec.shape, spec.exchanged())
    } else {
        format!("{:?}", spec.shape)
    };
    format!("misshapen {}: model {want}, file {shape:?}", spec.name)
}

/// Buffers in upstream's files that moe8 computes itself.
fn is_passed_over(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("freqs_cis" | "tokens_per_expert"))
}

fn name_file(path: &Path, error: Error) -> Error {
    match error {
        Error::User { what, hint } => Error::user(format!("{}: {what}", path.display()), hint),
        other => other,
    }
}

fn is_float(dtype: Dtype) -> bool {
    use Dtype::{BF16, F8_E4M3, F8_E5M2, F16, F32, F64};
    matches!(dtype, F64 | F32 | F16 | BF16 | F8_E4M3 | F8_E5M2)
}

/// Appends the little-endian numbers in `bytes` as f32.
fn widen(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) {
    fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32, out: &mut Vec<f32>) {
        let (numbers, rest) = bytes.as_chunks::<N>();
        assert!(rest.is_empty(), "{} bytes are no multiple of {N}", bytes.len());
        out.extend(numbers.iter().map(|&b| f(b)));
    }
    match dtype {
        Dtype::F64 => each(bytes, |b| f64::from_le_bytes(b) as f32, out),
        Dtype::F32 => each(bytes, f32::from_le_bytes, out),
        Dtype::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f32(), out),
        Dtype::BF16 => each(bytes, |b| bf16::from_bits(u16::from_le_bytes(b)), out),
        Dtype::F8_E4M3 => each(bytes, |[b]| e4m3::decode(b), out),
        Dtype::F8_E5M2 => each(bytes, |[b]| e5m2::decode(b), out),
        other => unreachable!("{other:?} was refused before"),
    }
}
