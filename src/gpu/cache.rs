//! Compiled pipelines between runs, where the backend hands them out (Vulkan).
//!
//! One file per adapter, driver and version of this crate, in a folder that may be deleted at any time. A file that is
//! damaged, foreign or not writable is no error: the pipelines are compiled as if there were none.

use crate::atomic::{WRITE_HINT, write_atomically};
use crate::{Error, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The folder for what may be remembered between runs: `MOE8_CACHE`, else `moe8` in the user's cache folder; none where
/// `MOE8_CACHE` is empty or `off`, or where there is no such folder.
pub fn cache_folder() -> Option<PathBuf> {
    folder(|name| std::env::var_os(name))
}

fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(wish) = variable("MOE8_CACHE") {
        return (!wish.is_empty() && wish != "off").then(|| wish.into());
    }
    let set = |name| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base =
        set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).or_else(|| set("LOCALAPPDATA"));
    base.filter(|b| b.is_absolute()).map(|b| b.join("moe8"))
}

/// Why `folder`, as [`cache_folder`] gives it, can hold nothing: it, or one that it is in, is there and no folder.
pub(crate) fn no_folder(folder: &Path) -> Option<String> {
    let there = folder.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir())?;
    let set = std::env::var_os("MOE8_CACHE").is_some_and(|wish| wish == folder.as_os_str());
    let name = if set { "MOE8_CACHE = " } else { "" };
    let whose = if there == folder { String::new() } else { format!(": {}", there.display()) };
    Some(format!("{name}{}{whose} is no folder", folder.display()))
}

/// What to do about it.
pub(crate) const FOLDER_HINT: &str = "set MOE8_CACHE to a folder, which need not exist yet, or to `off`";

/// What tells apart the files of adapters, drivers and versions: letters, digits and dashes.
pub(super) fn file_stem(adapter: &str, driver: &str) -> String {
    let all = format!("{adapter}-{driver}-{}", env!("CARGO_PKG_VERSION"));
    let plain =
        all.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect::<String>();
    plain.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// First bytes of a file, before the checksum of what follows it.
const MAGIC: &[u8; 8] = b"moe8ppl1";
/// Drivers with a cache of their own (Mesa) hand out little more than headers.
const EMPTY: usize = 256;
/// A larger file has gathered too much of what nobody compiles any more: it is begun anew.
const LARGEST: u64 = 256 << 20;

/// A device's pipelines, and the file that they come from and go to.
pub(super) struct Pipelines {
    raw: wgpu::PipelineCache,
    path: PathBuf,
    /// Checksum of what the file held last.
    saved: Mutex<Option<u64>>,
}

impl Pipelines {
    /// What `folder` holds for this device, if it was opened with pipeline caches.
    pub fn open(
        device: &wgpu::Device,
        info: &wgpu::AdapterInfo,
        driver: &str,
        folder: &Path,
    ) -> Option<Pipelines> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let key = wgpu::util::pipeline_cache_key(info)?;
        let path = folder.join(file_stem(&key, driver) + ".pipelines");
        let data = read(&path);
        // SAFETY: the data is what `get_data` returned, as its checksum says, for this adapter, driver and version.
        let raw = unsafe {
            device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
                label: Some("moe8"),
                data: data.as_deref(),
                fallback: true,
            })
        };
        Some(Pipelines { raw, path, saved: Mutex::new(data.as_deref().map(checksum)) })
    }

    pub fn raw(&self) -> &wgpu::PipelineCache {
        &self.raw
    }

    /// Writes what was compiled, unless the file has it already.
    pub fn save(&self) {
        let Some(data) = self.raw.get_data().filter(|data| data.len() > EMPTY) else { return };
        let sum = checksum(&data);
        let mut saved = self.saved.lock().expect("pipeline cache lock");
        if *saved == Some(sum) {
            return;
        }
        // Once is enough where it cannot be written.
        *saved = Some(sum);
        match write(&self.path, &data) {
            Ok(()) => {
                log::debug!("{} bytes of compiled kernels saved to {}", data.len(), self.path.display())
            }
            Err(e) => log::debug!("compiled kernels are not saved: {e}"),
        }
    }
}

fn write(path: &Path, data: &[u8]) -> Result<()> {
    write_atomically(path, |out| {
        let parts = [MAGIC.as_slice(), &checksum(data).to_le_bytes(), data];
        parts.iter().try_for_each(|part| out.write_all(part)).map_err(|e| Error::io(path, e, WRITE_HINT))
    })
}

/// The pipelines of a file, if it is whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let size = std::fs::metadata(path).ok()?.len();
    let bytes = if size > LARGEST { Vec::new() } else { std::fs::read(path).ok()? };
    let whole = bytes.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk::<8>());
    let data = whole
        .filter(|(sum, data)| u64::from_le_bytes(**sum) == checksum(data))
        .map(|(_, data)| data.to_vec());
    if data.is_none() {
        log::debug!("{} is damaged or too large: kernels are compiled anew", path.display());
    }
    data
}

/// FNV-1a over 64 bits, eight bytes at a time.
fn checksum(data: &[u8]) -> u64 {
    data.chunks(8).fold(0xcbf2_9ce4_8422_2325 ^ data.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mixed = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        mixed ^ (mixed >> 29)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_follows_the_environment() {
        let of = |set: &[(&str, &str)]| {
            let set: Vec<(String, OsString)> = set.iter().map(|(n, v)| ((*n).into(), (*v).into())).collect();
            folder(|name| set.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()))
        };
        assert_eq!(of(&[("MOE8_CACHE", "there"), ("XDG_CACHE_HOME", "/x")]), Some("there".into()));
        assert_eq!(of(&[("MOE8_CACHE", "off"), ("XDG_CACHE_HOME", "/x")]), None);
        assert_eq!(of(&[("MOE8_CACHE", ""), ("HOME", "/h")]), None);
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/moe8".into()));
        assert_eq!(of(&[("XDG_CACHE_HOME", ""), ("HOME", "/h")]), Some("/h/.cache/moe8".into()));
        assert_eq!(of(&[("XDG_CACHE_HOME", "relative")]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn names_are_plain() {
        assert_eq!(
            file_stem("A (x/y)", "Mesa 25.0~1"),
            format!("A-x-y-Mesa-25.0-1-{}", env!("CARGO_PKG_VERSION"))
        );
    }

    #[test]
    fn only_whole_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/on/the/way");
        let data: Vec<u8> = (0..1000).map(|i| (i % 251) as u8).collect();
        assert_eq!(read(&path), None);
        write(&path, &data).unwrap();
        assert_eq!(read(&path).as_deref(), Some(&data[..]));
        let whole = std::fs::read(&path).unwrap();
        for at in [0, 9, 16, 500, whole.len() - 1] {
            let mut bad = whole.clone();
            bad[at] ^= 4;
            std::fs::write(&path, bad).unwrap();
            assert_eq!(read(&path), None, "byte {at}");
        }
        for len in [0, 8, 15, 16, 700, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(read(&path), None, "{len} bytes");
        }
    }
}
