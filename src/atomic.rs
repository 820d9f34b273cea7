//! Files that exist whole or not at all.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::{Error, Result};

/// Writes `path` through a temporary file in the same folder that is synced and then renamed.
///
/// `write` fills the file; when it or the operating system fails, the temporary file goes away and whatever
/// stood at `path` stays as it was. Missing parent folders are made.
///
/// # Errors
/// What `write` returns, [`Error::Io`] for the file system's refusals (disk full, no permission), and
/// [`Error::User`] when `path` exists and is no regular file.
pub fn write_atomically(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    refuse_others(path)?;
    let folder = folder_of(path);
    let io = |e| Error::io(path, e, WRITE_HINT);
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e, WRITE_HINT))?;
    let mut file = temporary_in(folder).map_err(io)?;
    let mut buffered = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    write(&mut buffered)?;
    buffered.flush().map_err(io)?;
    drop(buffered);
    file.as_file().sync_all().map_err(io)?;
    file.persist(path).map_err(|e| io(e.error))?;
    sync_folder(folder);
    Ok(())
}

/// Whether a file can be written at `path`, without writing it: for long work whose result goes there.
///
/// # Errors
/// A folder that does not exist or cannot be written to, or something at `path` that is no file.
pub fn check_target(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    if path.is_dir() || !folder.is_dir() {
        let what = match folder.is_dir() {
            true => format!("{} is a folder", path.display()),
            false => format!("{} is no folder, and {} is to be in it", folder.display(), path.display()),
        };
        return Err(Error::user(what, "name a file in a folder that exists"));
    }
    refuse_others(path)?;
    temporary_in(folder).map(drop).map_err(|e| Error::io(path, e, "name a file in a folder you may write to"))
}

/// Refuses a folder, device or pipe at `path`: renaming a file onto it would take it away.
fn refuse_others(path: &Path) -> Result<()> {
    if path.exists() && !path.is_file() {
        let what = format!("{} exists and is not a regular file", path.display());
        return Err(Error::user(what, "name a file that may be replaced"));
    }
    Ok(())
}

/// Where the file `path` lies.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What to do when a file cannot be written.
pub const WRITE_HINT: &str =
    "free some space or name a folder you may write to; nothing was left half-written";

fn temporary_in(folder: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moe8-").suffix(".tmp");
    // The library's default is private to the user; the umask decides here, as for any other file.
    #[cfg(unix)]
    builder.permissions(<std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Makes the rename itself durable, where the system lets a folder be synced.
fn sync_folder(folder: &Path) {
    if let Ok(f) = File::open(folder) {
        // The file's bytes are safe already; some file systems refuse this call.
        let _ = f.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_finished_write_replaces_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/x.bin");
        for text in ["one", "two"] {
            write_atomically(&path, |w| w.write_all(text.as_bytes()).map_err(|e| Error::io(&path, e, "")))
                .unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(path.parent().unwrap()), ["x.bin"]);
    }

    #[test]
    fn a_disk_that_fills_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.bin");
        std::fs::write(&path, "old").unwrap();
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let result = write_atomically(&path, |w| {
            w.write_all(&[7; 3 << 20]).map_err(|e| Error::io(&path, e, ""))?;
            Err(Error::io(&path, full(), WRITE_HINT))
        });
        assert!(result.unwrap_err().to_string().contains("free some space"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(dir.path()), ["x.bin"]);
    }

    #[test]
    fn a_target_is_checked_without_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        check_target(&dir.path().join("x.json")).unwrap();
        for bad in [dir.path().to_path_buf(), dir.path().join("none/x.json")] {
            let error = check_target(&bad).unwrap_err().to_string();
            assert!(error.contains("folder that exists"), "{error}");
        }
        assert_eq!(names(dir.path()), Vec::<String>::new());
        #[cfg(unix)]
        {
            let error = check_target(Path::new("/dev/null")).unwrap_err().to_string();
            assert!(error.contains("is not a regular file"), "{error}");
        }
    }

    #[test]
    fn a_folder_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = write_atomically(dir.path(), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("is not a regular file"), "{error}");
    }
}
