//! What `moe8 tune` found out about the kernels on an adapter: a JSON file in the cache folder, one per adapter, driver and
//! version of this crate, that may be deleted at any time.
//!
//! Names of kernels, ops and classes are the choosers' own; see `ops::choice`.

use super::cache::{FOLDER_HINT, no_folder};
use super::names::kernels_of;
use crate::atomic::{WRITE_HINT, write_atomically};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Why a kernel is rejected whose mark was left behind: once, and after its second try.
const ENDED: &str = "the program ended while it was tried";
const ENDED_TWICE: &str = "the program ended twice while it was tried";
/// Most ops that a warning of one kernel names.
const OPS_NAMED: usize = 3;

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
    /// Milliseconds of each class by kernel, of a tuning that has not come to its end.
    #[serde(default)]
    timings: Timings,
}

/// Milliseconds by class of calls and kernel.
pub type Timings = BTreeMap<String, BTreeMap<String, f64>>;

/// The findings for one adapter.
#[derive(Clone, Debug, Default)]
pub struct Decisions {
    file: File,
    path: PathBuf,
    /// Why the file is not used, in a sentence, if it is damaged or there can be none.
    damage: Option<String>,
    /// Kernels that the file names and their ops have not, with these ops and classes: their entries are left out.
    unknown: BTreeMap<String, Vec<String>>,
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
        let no_folder =
            no_folder(folder).map(|why| format!("{why}, and nothing is remembered: {FOLDER_HINT}"));
        let (found, damage) = match (no_folder, read(&path)) {
            (None, Ok(found)) => (found, None),
            (None, Err(why)) => (None, Some(damaged(&path, &why))),
            (no_folder, _) => (None, no_folder),
        };
        let mut file = found.filter(|f| f.is_of(&own)).unwrap_or(own);
        let unknown = file.drop_unknown();
        if let Some((op, kernel)) = file.trying.take() {
            match file.rejected.iter_mut().find(|r| r.op == op && r.kernel == kernel) {
                Some(again) => again.why = ENDED_TWICE.into(),
                None => file.rejected.push(Rejected { op, kernel, why: ENDED.into() }),
            }
        }
        Decisions { file, path, damage, unknown }
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
    pub fn rejection(&self, op: &str, kernel: &str) -> Option<&str> {
        let all = &self.file.rejected;
        all.iter().find(|r| r.op == op && r.kernel == kernel).map(|r| r.why.as_str())
    }

    /// Whether tuning may try a kernel: it is not rejected, or the program ended once while it was tried, which a user
    /// may have done.
    pub fn may_try(&self, op: &str, kernel: &str) -> bool {
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
    pub fn begin(&mut self, op: &str, kernel: &str) -> Result<()> {
        self.file.trying = Some((op.into(), kernel.into()));
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

    /// The kernel could not be tried after all: what is known of it stays.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn give_up(&mut self) -> Result<()> {
        self.file.trying = None;
        self.save()
    }

    /// Times of a tuning that has not come to its end.
    pub fn timings(&self) -> &Timings {
        &self.file.timings
    }

    /// Keeps the milliseconds of a kernel; written with the next [`Decisions::end`].
    pub fn time(&mut self, class: &str, kernel: &str, ms: f64) {
        self.file.timings.entry(class.into()).or_default().insert(kernel.into(), ms);
    }

    /// Sets the fastest kernel of a class.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set(&mut self, class: &str, fastest: Fastest) -> Result<()> {
        self.file.fastest.insert(class.into(), fastest);
        self.save()
    }

    /// The tuning has come to its end: the next one begins anew.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(&mut self) -> Result<()> {
        self.file.timings.clear();
        // What was wrong with the file is overwritten.
        self.damage = None;
        self.unknown.clear();
        self.save()
    }

    fn save(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.file).expect("names and numbers") + "\n";
        write_atomically(&self.path, |out| {
            out.write_all(text.as_bytes()).map_err(|e| Error::io(&self.path, e, WRITE_HINT))
        })
    }

    /// Warns of a damaged file, and of every kernel that is left out, once each.
    pub fn warn(&self) {
        self.warnings().iter().for_each(|line| log::warn!("{line}"));
    }

    /// What [`Decisions::warn`] says.
    pub fn warnings(&self) -> Vec<String> {
        let path = self.path.display();
        let mut kernels = BTreeMap::<&str, Vec<&Rejected>>::new();
        for rejected in &self.file.rejected {
            kernels.entry(&rejected.kernel).or_default().push(rejected);
        }
        let lines = kernels.into_iter().map(|(kernel, all)| {
            let what = match kernel {
                "scalar" | "simple" => "is the last resort",
                _ => "is not used, unless --kernel names it,",
            };
            let ops = some_of(&all.iter().map(|r| r.op.as_str()).collect::<Vec<_>>());
            let why = &all[0].why;
            // An interrupted tuning looks like a crash, and its next run goes on there.
            let again = match all.iter().all(|r| r.why == ENDED) {
                true => "`moe8 tune` goes on there".to_string(),
                false => format!("delete {path} and run `moe8 tune` to try again"),
            };
            format!("{kernel} {what} for {ops} here: {why} ({again})")
        });
        let unknown = self.unknown.iter().map(|(kernel, ops)| {
            let known = kernels_of(&ops[0]).join(", ");
            let ops = some_of(&ops.iter().map(String::as_str).collect::<Vec<_>>());
            format!(
                "{path} names {kernel:?} for {ops}, where the kernels are {known}: what it says there is not used (`moe8 tune` \
                 writes it anew, or delete the file)"
            )
        });
        self.damage.iter().cloned().chain(unknown).chain(lines).collect()
    }
}

fn damaged(path: &Path, why: &str) -> String {
    format!("{} is damaged and not used: {why} (`moe8 tune` writes it anew, or delete it)", path.display())
}

/// The first of `ops`, and how many more there are.
fn some_of(ops: &[&str]) -> String {
    let named = ops[..ops.len().min(OPS_NAMED)].join(", ");
    match ops.len().saturating_sub(OPS_NAMED) {
        0 => named,
        more => format!("{named} and {more} more ops"),
    }
}

impl File {
    fn is_of(&self, other: &File) -> bool {
        let key = |f: &File| [f.adapter.clone(), f.driver.clone(), f.version.clone()];
        key(self) == key(other)
    }

    /// Takes out the entries of kernels that their ops have not; the ops and classes of each such name.
    fn drop_unknown(&mut self) -> BTreeMap<String, Vec<String>> {
        let mut unknown = BTreeMap::<String, Vec<String>>::new();
        let mut knows = |op: &str, kernel: &str| {
            let known = kernels_of(op).contains(&kernel);
            if !known {
                unknown.entry(kernel.into()).or_default().push(op.into());
            }
            known
        };
        let of = |f: &Fastest| [Some(f.kernel.clone()), f.than.clone()];
        self.fastest.retain(|class, f| of(f).into_iter().flatten().all(|kernel| knows(class, &kernel)));
        self.rejected.retain(|r| knows(&r.op, &r.kernel));
        self.trying = self.trying.take().filter(|(op, kernel)| knows(op, kernel));
        for (class, times) in &mut self.timings {
            times.retain(|kernel, _| knows(class, kernel));
        }
        unknown
    }
}

/// The file's contents, if there is one; if it is none of ours, why.
fn read(path: &Path) -> std::result::Result<Option<File>, String> {
    match std::fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|e| e.to_string()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.to_string()),
    }
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
        first.begin("gemm nt f32", "scalar").unwrap();
        first.end(None).unwrap();
        first.begin("gemm nt f32", "tiled").unwrap();
        // The program ends here. The next one finds the mark, and so does every later one.
        let mut next = load(dir.path());
        assert!(next.rejection("gemm nt f32", "tiled").unwrap().contains("ended"));
        assert_eq!(next.rejection("gemm nt f32", "scalar"), None);
        next.begin("gemm nn f32", "tiled").unwrap();
        next.end(Some("out[0, 0] is wrong".into())).unwrap();
        let last = load(dir.path());
        assert_eq!(last.rejected().len(), 2);
        assert!(last.rejection("gemm nn f32", "tiled").unwrap().contains("is wrong"));
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
        for (wrong, damaged) in [
            (text.replace(&version, "\"version\": \"0.0.0\""), false),
            (text.replace("driver 1", "driver 3"), false),
            (text[..text.len() / 2].to_string(), true),
            (String::new(), true),
            ("[1, 2]".into(), true),
        ] {
            assert_ne!(wrong, text);
            std::fs::write(&path, wrong).unwrap();
            let found = load(dir.path());
            assert!(found.is_empty());
            let warnings = found.warnings();
            assert_eq!(warnings.len(), usize::from(damaged), "{warnings:?}");
            assert!(warnings.iter().all(|line| line.contains("damaged") && line.contains("tuned.json")));
        }
        std::fs::remove_file(&path).unwrap();
        let none = load(dir.path());
        assert!(none.is_empty() && none.warnings().is_empty());
    }

    #[test]
    fn entries_of_unknown_kernels_are_named_and_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let mut known = load(dir.path());
        let fastest =
            |kernel: &str, than: &str| Fastest { kernel: kernel.into(), than: Some(than.into()), times: 1.5 };
        known.set("gemm nt f32 large", fastest("tiled", "scalar")).unwrap();
        known.set("gemm nn f32 large", fastest("tilde", "scalar")).unwrap();
        known.set("gemm tn f32 large", fastest("tiled", "tilde")).unwrap();
        known.set("quantize rows narrow", fastest("coop", "simple")).unwrap();
        // A kernel of products alone.
        known.set("attention forward bf16 d64", fastest("tiled", "scalar")).unwrap();
        known.set("attention backward bf16 d64", fastest("coop", "scalar")).unwrap();
        known.time("gemm nt f32 small", "tilde", 1.0);
        known.time("gemm nt f32 small", "coop", 2.0);
        for (op, kernel) in [("gemm nt bf16", "tilde"), ("quantize rows", "wide")] {
            known.begin(op, kernel).unwrap();
            known.end(Some("wrong".into())).unwrap();
        }
        known.begin("gemm nt fp8", "fats").unwrap();
        let mut found = load(dir.path());
        assert_eq!(found.fastest("gemm nt f32 large"), Some(&fastest("tiled", "scalar")));
        assert_eq!(found.fastest("attention backward bf16 d64"), Some(&fastest("coop", "scalar")));
        for class in
            ["gemm nn f32 large", "gemm tn f32 large", "quantize rows narrow", "attention forward bf16 d64"]
        {
            assert_eq!(found.fastest(class), None, "{class}");
        }
        assert_eq!((found.rejected().len(), found.rejection("quantize rows", "wide")), (1, Some("wrong")));
        assert_eq!(found.timings()["gemm nt f32 small"].keys().collect::<Vec<_>>(), ["coop"]);
        let warnings = found.warnings();
        assert_eq!(warnings.len(), 5, "{warnings:?}");
        for (warning, parts) in warnings.iter().zip([
            ["names \"coop\" for quantize rows narrow, where the kernels are simple, wide: ", "tuned.json"],
            ["names \"fats\" for gemm nt fp8, ", "the kernels are scalar, tiled, narrow, coop: "],
            [
                "names \"tilde\" for gemm nn f32 large, gemm tn f32 large, gemm nt bf16 and 1 more ops",
                "moe8 tune",
            ],
            [
                "names \"tiled\" for attention forward bf16 d64, where the kernels are scalar, coop: ",
                "moe8 tune",
            ],
            ["wide is not used", "quantize rows"],
        ]) {
            assert!(parts.iter().all(|part| warning.contains(part)), "{warnings:?}");
        }
        found.finish().unwrap();
        assert_eq!(found.warnings().len(), 1, "the file is written anew");
        assert_eq!(load(dir.path()).warnings().len(), 1);
    }

    #[test]
    fn a_kernel_is_warned_of_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut found = load(dir.path());
        for form in ["nt", "nn", "tn"] {
            for operands in ["f32", "bf16", "fp8"] {
                found.begin(&format!("gemm {form} {operands}"), "coop").unwrap();
                found.end(Some(format!("{form} is wrong"))).unwrap();
            }
        }
        found.begin("quantize rows", "wide").unwrap();
        found.end(Some("lost".into())).unwrap();
        let warnings = found.warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        for part in
            ["coop is not used", "gemm nt f32, gemm nt bf16, gemm nt fp8 and 6 more ops", "nt is wrong"]
        {
            assert!(warnings[0].contains(part), "{warnings:?}");
        }
        assert!(warnings[1].starts_with("wide is not used"), "{warnings:?}");
    }
}
