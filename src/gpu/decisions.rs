//! What `moe8 tune` found out about the kernels on an adapter: a JSON file in the cache folder, one per adapter, driver and
//! version of this crate, that may be deleted at any time.
//!
//! Names of ops and classes are the choosers' own; see `ops::gemm_choice`.

use super::GemmKernel;
use crate::atomic::{WRITE_HINT, write_atomically};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Why a kernel is rejected whose mark was left behind: once, and after its second try.
const ENDED: &str = "the program ended while it was tried";
const ENDED_TWICE: &str = "the program ended twice while it was tried";

/// The fastest kernel of a class of calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fastest {
    /// Its name.
    pub kernel: String,
    /// The next best, if another one can run.
    pub than: Option<String>,
    /// How many times faster it is than that.
    pub times: f64,
}

/// A kernel that is not to be used for an op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rejected {
    /// The op.
    pub op: String,
    /// The kernel.
    pub kernel: String,
    /// What it did.
    pub why: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct File {
    adapter: String,
    driver: String,
    version: String,
    fastest: BTreeMap<String, Fastest>,
    rejected: Vec<Rejected>,
    /// Op and kernel that are being tried: what is left here did not survive it.
    trying: Option<(String, String)>,
}

/// The findings for one adapter.
#[derive(Clone, Debug, Default)]
pub struct Decisions {
    file: File,
    path: PathBuf,
}

impl Decisions {
    /// What `folder` holds for this adapter and driver; nothing where there is no file, or none that fits. A kernel that the
    /// file says is being tried ended the program that tried it, and is rejected.
    pub fn load(folder: &Path, adapter: &str, driver: &str) -> Decisions {
        let path = folder.join(super::cache::file_stem(adapter, driver) + ".tuned.json");
        let own = File {
            adapter: adapter.into(),
            driver: driver.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            ..File::default()
        };
        let mut file = read(&path).filter(|f| f.is_of(&own)).unwrap_or(own);
        if let Some((op, kernel)) = file.trying.take() {
            match file.rejected.iter_mut().find(|r| r.op == op && r.kernel == kernel) {
                Some(again) => again.why = ENDED_TWICE.into(),
                None => file.rejected.push(Rejected { op, kernel, why: ENDED.into() }),
            }
        }
        Decisions { file, path }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The fastest kernel of a class, if it was tuned.
    pub fn fastest(&self, class: &str) -> Option<&Fastest> {
        self.file.fastest.get(class)
    }

    /// All that are not to be used.
    pub fn rejected(&self) -> &[Rejected] {
        &self.file.rejected
    }

    /// Why a kernel is not to be used for an op, if so.
    pub fn rejection(&self, op: &str, kernel: GemmKernel) -> Option<&str> {
        let all = &self.file.rejected;
        all.iter().find(|r| r.op == op && r.kernel == kernel.name()).map(|r| r.why.as_str())
    }

    /// Whether tuning may try a kernel: it is not rejected, or the program ended once while it was tried, which a user
    /// may have done.
    pub fn may_try(&self, op: &str, kernel: GemmKernel) -> bool {
        self.rejection(op, kernel).is_none_or(|why| why == ENDED)
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.file.fastest.is_empty() && self.file.rejected.is_empty()
    }

    /// Writes down that a kernel is about to be tried.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(&mut self, op: &str, kernel: GemmKernel) -> Result<()> {
        self.file.trying = Some((op.into(), kernel.name().into()));
        self.save()
    }

    /// The kernel that was tried survived; if it is not to be used, `wrong` says why.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn end(&mut self, wrong: Option<String>) -> Result<()> {
        if let Some((op, kernel)) = self.file.trying.take() {
            self.file.rejected.retain(|r| r.op != op || r.kernel != kernel);
            self.file.rejected.extend(wrong.map(|why| Rejected { op, kernel, why }));
        }
        self.save()
    }

    /// Sets the fastest kernel of a class.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set(&mut self, class: &str, fastest: Fastest) -> Result<()> {
        self.file.fastest.insert(class.into(), fastest);
        self.save()
    }

    fn save(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.file).expect("names and numbers") + "\n";
        write_atomically(&self.path, |out| {
            out.write_all(text.as_bytes()).map_err(|e| Error::io(&self.path, e, WRITE_HINT))
        })
    }

    /// Warns of every kernel that is left out, by name.
    pub(super) fn warn(&self) {
        for Rejected { op, kernel, why } in &self.file.rejected {
            let path = self.path.display();
            let what = match kernel.as_str() {
                "scalar" => "is the last resort",
                _ => "is not used, unless --kernel names it,",
            };
            log::warn!(
                "{kernel} {what} for {op} here: {why} (delete {path} and run `moe8 tune` to try again)"
            );
        }
    }
}

impl File {
    fn is_of(&self, other: &File) -> bool {
        let key = |f: &File| [f.adapter.clone(), f.driver.clone(), f.version.clone()];
        key(self) == key(other)
    }
}

/// The file's contents, if it is one.
fn read(path: &Path) -> Option<File> {
    let text = std::fs::read_to_string(path).ok()?;
    serde_json::from_str(&text).map_err(|e| log::debug!("{} is not used: {e}", path.display())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(folder: &Path) -> Decisions {
        Decisions::load(folder, "card", "driver 1")
    }

    #[test]
    fn a_kernel_that_ended_the_program_is_not_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = load(dir.path());
        assert!(first.is_empty());
        first.begin("gemm nt f32", GemmKernel::Scalar).unwrap();
        first.end(None).unwrap();
        first.begin("gemm nt f32", GemmKernel::Tiled).unwrap();
        // The program ends here. The next one finds the mark, and so does every later one.
        let mut next = load(dir.path());
        assert!(next.rejection("gemm nt f32", GemmKernel::Tiled).unwrap().contains("ended"));
        assert_eq!(next.rejection("gemm nt f32", GemmKernel::Scalar), None);
        next.begin("gemm nn f32", GemmKernel::Tiled).unwrap();
        next.end(Some("out[0, 0] is wrong".into())).unwrap();
        let last = load(dir.path());
        assert_eq!(last.rejected().len(), 2);
        assert!(last.rejection("gemm nn f32", GemmKernel::Tiled).unwrap().contains("is wrong"));
    }

    #[test]
    fn other_drivers_versions_and_damaged_files_count_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut known = load(dir.path());
        let fastest = Fastest { kernel: "tiled".into(), than: Some("scalar".into()), times: 1.5 };
        known.set("gemm nt f32 large", fastest.clone()).unwrap();
        assert_eq!(load(dir.path()).fastest("gemm nt f32 large"), Some(&fastest));
        assert!(Decisions::load(dir.path(), "card", "driver 2").is_empty());
        let path = known.path().to_path_buf();
        let text = std::fs::read_to_string(&path).unwrap();
        let version = format!("\"version\": \"{}\"", env!("CARGO_PKG_VERSION"));
        for wrong in [
            text.replace(&version, "\"version\": \"0.0.0\""),
            text.replace("driver 1", "driver 3"),
            text[..text.len() / 2].to_string(),
            String::new(),
            "[1, 2]".into(),
        ] {
            assert_ne!(wrong, text);
            std::fs::write(&path, wrong).unwrap();
            assert!(load(dir.path()).is_empty());
        }
        std::fs::remove_file(&path).unwrap();
        assert!(load(dir.path()).is_empty());
    }
}
