//! Writing a weight file, one tensor at a time.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, json};

use super::{LAYOUT_KEY, LAYOUT_OURS, ParamSpec};
use crate::atomic::{WRITE_HINT, write_atomically};
use crate::num::bf16;
use crate::{Error, Result};

/// The element type of a written file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileDtype {
    /// Every bit of the master weights.
    F32,
    /// Half the size; rounded to nearest even.
    BF16,
}

impl FileDtype {
    fn name(self) -> &'static str {
        match self {
            FileDtype::F32 => "F32",
            FileDtype::BF16 => "BF16",
        }
    }

    fn size(self) -> usize {
        match self {
            FileDtype::F32 => 4,
            FileDtype::BF16 => 2,
        }
    }
}

/// Writes the tensors `specs` to the safetensors file `path`, whole or not at all (see
/// [`write_atomically`]). `values` is asked for each tensor in turn, f32, row-major in the spec's shape, so only
/// one is in memory at a time.
///
/// `metadata` becomes the header's string map; `expert_layout` is added as what moe8 uses.
///
/// # Errors
/// What `values` returns; [`Error::Io`] when the file cannot be written, the disk full included.
pub fn save(
    path: &Path,
    specs: &[ParamSpec],
    dtype: FileDtype,
    metadata: &BTreeMap<String, String>,
    values: &mut dyn FnMut(&ParamSpec) -> Result<Vec<f32>>,
) -> Result<()> {
    write_atomically(path, |w| write(path, w, specs, dtype, metadata, values))
}

/// The file's bytes to `w`; `path` is only for messages.
fn write(
    path: &Path,
    w: &mut dyn Write,
    specs: &[ParamSpec],
    dtype: FileDtype,
    metadata: &BTreeMap<String, String>,
    values: &mut dyn FnMut(&ParamSpec) -> Result<Vec<f32>>,
) -> Result<()> {
    let io = |e| Error::io(path, e, WRITE_HINT);
    let header = header(specs, dtype, metadata);
    w.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
    w.write_all(&header).map_err(io)?;
    for spec in specs {
        let x = values(spec)?;
        assert_eq!(
            x.len(),
            spec.numel(),
            "{} has {} elements, its shape is {:?}",
            spec.name,
            x.len(),
            spec.shape
        );
        let mut bytes = Vec::with_capacity(BLOCK * dtype.size());
        for block in x.chunks(BLOCK) {
            bytes.clear();
            match dtype {
                FileDtype::F32 => bytes.extend(block.iter().flat_map(|v| v.to_le_bytes())),
                FileDtype::BF16 => bytes.extend(block.iter().flat_map(|&v| bf16::to_bits(v).to_le_bytes())),
            }
            w.write_all(&bytes).map_err(io)?;
        }
    }
    Ok(())
}

/// Elements converted at once.
const BLOCK: usize = 1 << 18;

/// The JSON header, padded with spaces so that the data starts at a multiple of eight.
fn header(specs: &[ParamSpec], dtype: FileDtype, metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut strings = metadata.clone();
    strings.insert(LAYOUT_KEY.into(), LAYOUT_OURS.into());
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!(strings));
    let mut start = 0;
    for spec in specs {
        let end = start + spec.numel() * dtype.size();
        let info = json!({"dtype": dtype.name(), "shape": spec.shape, "data_offsets": [start, end]});
        let twice = map.insert(spec.name.clone(), info);
        assert!(twice.is_none(), "{} is in the table twice", spec.name);
        start = end;
    }
    let mut bytes = serde_json::Value::Object(map).to_string().into_bytes();
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes and then reports a full disk.
    struct SmallDisk(usize);

    impl Write for SmallDisk {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            let n = bytes.len().min(self.0);
            self.0 -= n;
            Ok(n)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_an_error_wherever_it_fills() {
        let specs = [ParamSpec::new("a", [3]), ParamSpec::new("b", [2, 5])];
        let mut values = |s: &ParamSpec| Ok(vec![1.0; s.numel()]);
        let mut whole = Vec::new();
        write(Path::new("w"), &mut whole, &specs, FileDtype::F32, &BTreeMap::new(), &mut values).unwrap();
        assert_eq!(whole.len() % 4, 0);
        for room in 0..=whole.len() {
            let disk = &mut SmallDisk(room);
            let result = write(Path::new("w"), disk, &specs, FileDtype::F32, &BTreeMap::new(), &mut values);
            match result {
                Ok(()) => assert_eq!(room, whole.len()),
                Err(e) => assert!(e.to_string().contains("hint: free some space"), "{e}"),
            }
        }
    }
}
