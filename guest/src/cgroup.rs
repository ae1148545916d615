//! The cgroup that holds everything of the user's, and its freezer.
//!
//! ```text
//! thawed ──freeze()──► frozen ──(snapshot; restore; identity)──thaw()──► thawed
//! ```
//!
//! Invariant: no program is started between `freeze` and `thaw`: it would be frozen before its first instruction, and
//! its starter with it (`sys::spawn`). [`UserCgroup::thawed`] is the gate.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Longest wait for the last task to freeze. One that sleeps uninterruptibly in the kernel delays it.
const FREEZE_WAIT: Duration = Duration::from_secs(5);

/// The user cgroup; on a machine without one (tests), a freezer that only closes the gate.
pub struct UserCgroup {
    directory: Option<(PathBuf, File)>,
    frozen: watch::Sender<bool>,
}

impl UserCgroup {
    /// Opens the cgroup at `path`, or none. It may be frozen: by the agent before this one.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        let Some(path) = path else { return Ok(Self { directory: None, frozen: watch::Sender::new(false) }) };
        let frozen = fs::read_to_string(path.join("cgroup.freeze"))?.trim() == "1";
        let directory = Some((path.to_owned(), File::open(path)?));
        Ok(Self { directory, frozen: watch::Sender::new(frozen) })
    }

    /// What a new program is started in.
    pub fn target(&self) -> Option<BorrowedFd<'_>> {
        self.directory.as_ref().map(|(_, file)| file.as_fd())
    }

    /// Waits until programs may be started.
    pub async fn thawed(&self) {
        if *self.frozen.borrow() {
            // It fails only when the sender is gone, which is `self`.
            let _ = self.frozen.subscribe().wait_for(|frozen| !frozen).await;
        }
    }

    /// Stops every task of the user's, and returns when all have stopped.
    pub async fn freeze(&self) -> io::Result<()> {
        self.frozen.send_replace(true);
        let Some((path, _)) = &self.directory else { return Ok(()) };
        fs::write(path.join("cgroup.freeze"), "1")?;
        let deadline = Instant::now() + FREEZE_WAIT;
        loop {
            let events = fs::read_to_string(path.join("cgroup.events"))?;
            if events.lines().any(|line| line == "frozen 1") {
                return Ok(());
            }
            if Instant::now() > deadline {
                self.thaw()?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the user's processes did not freeze"));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Lets them go on.
    pub fn thaw(&self) -> io::Result<()> {
        if let Some((path, _)) = &self.directory {
            fs::write(path.join("cgroup.freeze"), "0")?;
        }
        self.frozen.send_replace(false);
        Ok(())
    }
}
