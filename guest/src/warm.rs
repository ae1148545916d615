//! Warming a template before it is captured: everything that a first request touches is touched once, so that it is in
//! memory, resolved and translated in every sandbox that starts from the template.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics;
use crate::process::{Config, Request, start};
use crate::service::find_user;
use crate::state::Agent;

/// The shell of every command.
const SHELL: &str = "/bin/bash";
/// What a login shell without a home runs and loads. Directories stand for what is in them.
const SHELL_FILES: [&str; 8] = [
    SHELL,
    "/etc/profile",
    "/etc/profile.d",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/x86_64-linux-gnu/libtinfo.so.6",
];

/// The login shell as it was.
#[derive(Debug, PartialEq, Eq)]
pub struct Shell(Vec<Option<Stamp>>);

/// A file as it was: device, inode, and the time of its last change in nanoseconds.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    changed_ns: i128,
}

impl Shell {
    /// As it is now.
    pub fn now() -> io::Result<Self> {
        let mut stamps = Vec::new();
        for path in SHELL_FILES {
            stamps.push(Stamp::of(Path::new(path))?);
            let Ok(entries) = fs::read_dir(path) else { continue };
            let mut entries = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
            entries.sort();
            for entry in &entries {
                stamps.push(Stamp::of(entry)?);
            }
        }
        Ok(Self(stamps))
    }

    /// Whether starting it runs nothing but what the template's own did.
    pub fn is_unchanged(&self) -> bool {
        Self::now().is_ok_and(|now| now == *self)
    }
}

impl Stamp {
    /// Of the file that `path` leads to; `None` if there is none.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        match fs::metadata(path) {
            Ok(found) => {
                let changed_ns = i128::from(found.ctime()) * 1_000_000_000 + i128::from(found.ctime_nsec());
                Ok(Some(Self { device: found.dev(), inode: found.ino(), changed_ns }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Longest time for one command.
const LIMIT: Duration = Duration::from_secs(120);

/// Warms interpreter, shells and files.
pub async fn warm(agent: &Arc<Agent>) -> io::Result<()> {
    agent.interpreter.warm(agent).await?;
    for name in [agent.default_user.as_str(), "root"] {
        let user = find_user(agent, Some(name)).map_err(io::Error::other)?;
        for stdin in [false, true] {
            let config = Config {
                cmd: SHELL.to_owned(),
                args: ["-l", "-c", "echo warm; ls / >/dev/null; true"].map(str::to_owned).to_vec(),
                ..Config::default()
            };
            let request = Request { config, tag: None, stdin, deadline: Some(LIMIT) };
            let mut messages = start(agent, &user, request).await.map_err(io::Error::other)?;
            while messages.recv().await.is_some() {}
        }
    }
    metrics::read().await?;
    // What was written on the way is in the disk's image, not only in memory.
    tokio::task::spawn_blocking(nix::unistd::sync).await.map_err(io::Error::other)
}
