//! What must be there before anything starts: a data directory that is ours alone, an identity, and the files that
//! guests are made of. Everything here fails with what to do about it.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use snapyard_proto::auth::ClusterToken;

use crate::failure::{Failure, Kind};

/// The script that the node makes root file systems with; carried along, so that the program needs no source tree.
const ROOTFS_SCRIPT: &str = include_str!("../../../guest/rootfs/build-rootfs.sh");

/// The data directory, locked: two servers on one directory would destroy it. The lock goes with the process.
#[derive(Debug)]
pub struct DataDir {
    /// Where it is.
    pub path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Makes the directory if need be (for its user only) and takes its lock.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let at = |error: io::Error| {
            Failure::new(Kind::Refused, format!("data directory {}: {error}", path.display()))
                .hint("say another one with --data-dir or SNAPYARD_DATA_DIR")
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at)?;
        let path = path.canonicalize().map_err(at)?;
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let lock = options.open(path.join("lock")).map_err(at)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path, _lock: lock }),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Kind::Conflict, format!("another server runs on {}", path.display()))
                    .hint("use that one, or give this one its own --data-dir (and --listen)"))
            }
            Err(TryLockError::Error(error)) => Err(at(error)),
        }
    }

    /// The node's name, made once: it is in the catalog as where snapshots were taken.
    pub fn node_id(&self) -> Result<String, Failure> {
        let file = self.path.join("node-id");
        match fs::read_to_string(&file) {
            Ok(id) if !id.trim().is_empty() => Ok(id.trim().to_owned()),
            Ok(_) | Err(_) => {
                let id = format!("node-{}", &random_hex()?[..12]);
                write_durably(&file, id.as_bytes(), 0o644)?;
                Ok(id)
            }
        }
    }

    /// Puts the script of the root file systems beside the data and gives back its path.
    pub fn rootfs_script(&self) -> Result<PathBuf, Failure> {
        let file = self.path.join("build-rootfs.sh");
        write_durably(&file, ROOTFS_SCRIPT.as_bytes(), 0o755)?;
        Ok(file)
    }
}

/// Replaces `file` by rename, synced.
fn write_durably(file: &Path, bytes: &[u8], mode: u32) -> Result<(), Failure> {
    let temporary = file.with_extension("new");
    let write = || -> io::Result<()> {
        let mut options = File::options();
        let mut out = options.write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
        out.set_permissions(fs::Permissions::from_mode(mode))?;
        out.write_all(bytes)?;
        out.sync_all()?;
        fs::rename(&temporary, file)
    };
    write().map_err(|error| Failure::new(Kind::Refused, format!("{}: {error}", file.display())))
}

/// 32 random bytes in hexadecimal.
pub fn random_hex() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| Failure::new(Kind::Refused, format!("the system gives no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A fresh cluster token: the tiers of one process need no older one.
pub fn cluster_token() -> Result<ClusterToken, Failure> {
    Ok(ClusterToken::new(&random_hex()?).expect("hexadecimal digits can be sent in a header"))
}

/// The library that VMMs load: as given, else beside the program.
pub fn preload(given: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let path = match given {
        Some(path) => path,
        None => std::env::current_exe()?.with_file_name("libsnapyard_vmm_preload.so"),
    };
    require(&path, "the library that VMMs load", "`make build` makes it; --preload says where it is")
}

/// Checks that kernel and initial RAM disk are in the assets directory.
pub fn assets(dir: PathBuf) -> Result<PathBuf, Failure> {
    for name in ["vmlinuz", "initrd.img"] {
        let hint = "`deploy/build-assets.sh DIR` (or `make build`) makes it; --assets says where it is";
        require(&dir.join(name), "what guests boot from", hint)?;
    }
    Ok(dir)
}

/// An absolute path to a file that can be read.
fn require(path: &Path, what: &str, hint: &str) -> Result<PathBuf, Failure> {
    let readable = || -> io::Result<PathBuf> {
        let mut byte = [0];
        File::open(path)?.read_exact(&mut byte)?;
        path.canonicalize()
    };
    readable().map_err(|error| Failure::new(Kind::Refused, format!("{what}, {}: {error}", path.display())).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_serves_one_server() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("deep/data");
        let first = DataDir::open(&path).expect("free");
        assert_eq!(DataDir::open(&path).expect_err("taken").kind, Kind::Conflict);
        let id = first.node_id().expect("made");
        assert_eq!(first.node_id().expect("kept"), id);
        drop(first);
        assert_eq!(DataDir::open(&path).expect("free again").node_id().expect("kept"), id);
        assert_eq!(fs::metadata(&path).expect("stat").permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn the_script_can_be_run() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let data = DataDir::open(dir.path()).expect("free");
        let script = data.rootfs_script().expect("written");
        assert_eq!(fs::metadata(&script).expect("stat").permissions().mode() & 0o111, 0o111);
        assert!(data.rootfs_script().is_ok(), "written again at the next start");
    }

    #[test]
    fn missing_files_are_told_with_what_makes_them() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let failure = assets(dir.path().to_owned()).expect_err("nothing there").to_string();
        assert!(failure.contains("vmlinuz") && failure.contains("build-assets.sh"), "{failure}");
        let failure = preload(Some(dir.path().join("x.so"))).expect_err("nothing there").to_string();
        assert!(failure.contains("--preload"), "{failure}");
    }

    #[test]
    fn random_text_is_long_and_never_the_same() {
        let (one, other) = (random_hex().expect("random"), random_hex().expect("random"));
        assert_eq!(one.len(), 64);
        assert_ne!(one, other);
    }
}
