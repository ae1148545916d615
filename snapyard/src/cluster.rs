//! The data directory, and `cluster.json` in it: how a command finds the tiers of a running server behind REST.
//!
//! Written by `snapyard up` once everything listens, by rename, readable by its user only since it holds the cluster
//! token; removed when the server ends in an orderly way. After a crash it stays behind and points to nothing: a
//! command then fails to connect and says so, and the next start replaces it.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Kind};

/// Version of the file's format; a reader refuses any other.
const VERSION: u32 = 1;
/// Name within the data directory.
const FILE: &str = "cluster.json";

/// Contents of `cluster.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterFile {
    /// Format of the file.
    pub version: u32,
    /// Process id of the server.
    pub pid: u32,
    /// REST endpoint.
    pub api_url: String,
    /// gRPC endpoint of the node (services `Node` and `Catalog`).
    pub node_url: String,
    /// gRPC endpoint of the scheduler.
    pub scheduler_url: String,
    /// Secret that every gRPC call carries.
    pub token: String,
}

impl ClusterFile {
    /// A file of this program's format version and process.
    pub fn new(api_url: String, node_url: String, scheduler_url: String, token: String) -> Self {
        Self { version: VERSION, pid: std::process::id(), api_url, node_url, scheduler_url, token }
    }

    /// Where it is kept.
    pub fn path(data_dir: &Path) -> PathBuf {
        data_dir.join(FILE)
    }

    /// Replaces the file atomically; mode 0600 from the first byte on.
    pub fn write(&self, data_dir: &Path) -> io::Result<PathBuf> {
        let path = Self::path(data_dir);
        let temporary = data_dir.join(format!(".{FILE}.{}", self.pid));
        let _ = fs::remove_file(&temporary); // left by an earlier process with this id
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        file.write_all(&text)?;
        fs::rename(&temporary, &path)?;
        Ok(path)
    }

    /// Reads the file; `None` when there is none.
    pub fn read(data_dir: &Path) -> Result<Option<Self>, Failure> {
        let path = Self::path(data_dir);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::new(Kind::Refused, format!("{}: {error}", path.display()))),
        };
        let wrong = |why: String| {
            Failure::new(Kind::Refused, format!("{}: {why}", path.display())).hint("restart the server to rewrite it")
        };
        let file: Self = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if file.version != VERSION {
            return Err(wrong(format!("format version {}, and this program knows {VERSION} only", file.version)));
        }
        Ok(Some(file))
    }
}

/// The data directory: as given, else `$XDG_DATA_HOME/snapyard`, else `~/.local/share/snapyard`.
pub fn data_dir(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    xdg("XDG_DATA_HOME", ".local/share")
        .ok_or_else(|| Failure::new(Kind::Refused, "HOME is not set").hint("say where the data is with --data-dir"))
}

/// The directory for the guests' kernel and root file systems: as given, else below the user's cache directory.
pub fn assets_dir(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    match std::env::home_dir() {
        Some(home) => Ok(home.join(".cache/snapyard/assets")),
        None => Err(Failure::new(Kind::Refused, "HOME is not set").hint("say where the assets are with --assets")),
    }
}

/// `$VARIABLE/snapyard`, or `~/FALLBACK/snapyard`. A relative value is ignored, as the XDG specification says.
fn xdg(variable: &str, fallback: &str) -> Option<PathBuf> {
    let base = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    base.or_else(|| Some(std::env::home_dir()?.join(fallback))).map(|base| base.join("snapyard"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn sample() -> ClusterFile {
        ClusterFile::new("http://a".into(), "http://n".into(), "http://s".into(), "secret".into())
    }

    #[test]
    fn what_is_written_is_read_and_only_by_its_user() {
        let dir = tempfile::tempdir().expect("temporary directory");
        assert_eq!(ClusterFile::read(dir.path()).expect("absent is no error"), None);
        let path = sample().write(dir.path()).expect("write");
        sample().write(dir.path()).expect("replace");
        assert_eq!(ClusterFile::read(dir.path()).expect("read"), Some(sample()));
        assert_eq!(fs::metadata(path).expect("stat").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 1, "no temporary file stays");
    }

    #[test]
    fn another_format_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("temporary directory");
        ClusterFile { version: 99, ..sample() }.write(dir.path()).expect("write");
        let error = ClusterFile::read(dir.path()).expect_err("refused").to_string();
        assert!(error.contains("version 99"), "{error}");
        fs::write(ClusterFile::path(dir.path()), "{").expect("write");
        assert!(ClusterFile::read(dir.path()).is_err());
    }
}
