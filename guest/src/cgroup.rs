//! The cgroup that holds everything of the user's, and its freezer.
//!
//! ```text
//! thawed ──freeze()──► frozen ──(snapshot; restore; identity)──thaw()──► thawed
//! ```
//!
//! Invariant: no program is started between `freeze` and `thaw`: it would be frozen before its first instruction, and
//! its starter with it (`sys::spawn`). [`UserCgroup::thawed`] is the gate.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Longest wait for the last task to freeze. One that sleeps uninterruptibly in the kernel delays it.
const FREEZE_WAIT: Duration = Duration::from_secs(5);

/// The user cgroup; on a machine without one (tests), a freezer that only closes the gate.
pub struct UserCgroup {
    cgroup: Option<Cgroup>,
    frozen: watch::Sender<bool>,
}

/// Its files, held open: a restored guest is spared to look their paths up for the first time.
struct Cgroup {
    directory: File,
    freeze: File,
    events: File,
    /// Its neighbour, for rehearsals: not frozen with it.
    rehearsal: File,
    rehearsal_kill: File,
}

impl UserCgroup {
    /// Opens the cgroup at `path` and the one beside it for rehearsals, or none. It may be frozen: by the agent before this
    /// one.
    pub fn open(paths: Option<(&Path, &Path)>) -> io::Result<Self> {
        let Some((path, rehearsal)) = paths else {
            return Ok(Self { cgroup: None, frozen: watch::Sender::new(false) });
        };
        let cgroup = Cgroup {
            directory: File::open(path)?,
            freeze: File::options().read(true).write(true).open(path.join("cgroup.freeze"))?,
            events: File::open(path.join("cgroup.events"))?,
            rehearsal: File::open(rehearsal)?,
            rehearsal_kill: File::options().write(true).open(rehearsal.join("cgroup.kill"))?,
        };
        let frozen = text_of(&cgroup.freeze)?.trim() == "1";
        Ok(Self { cgroup: Some(cgroup), frozen: watch::Sender::new(frozen) })
    }

    /// What a new program is started in.
    pub fn target(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup.as_ref().map(|cgroup| cgroup.directory.as_fd())
    }

    /// What a program for practice is started in.
    pub fn rehearsal(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup.as_ref().map(|cgroup| cgroup.rehearsal.as_fd())
    }

    /// Kills whatever a rehearsal has left.
    pub fn end_rehearsal(&self) -> io::Result<()> {
        match &self.cgroup {
            Some(cgroup) => cgroup.rehearsal_kill.write_all_at(b"1", 0),
            None => Ok(()),
        }
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
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        cgroup.freeze.write_all_at(b"1", 0)?;
        let deadline = Instant::now() + FREEZE_WAIT;
        loop {
            if text_of(&cgroup.events)?.lines().any(|line| line == "frozen 1") {
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
        if let Some(cgroup) = &self.cgroup {
            cgroup.freeze.write_all_at(b"0", 0)?;
        }
        self.frozen.send_replace(false);
        Ok(())
    }
}

/// A file of the cgroup, as it reads now. They are shorter than this.
fn text_of(file: &File) -> io::Result<String> {
    let mut text = [0; 256];
    let read = file.read_at(&mut text, 0)?;
    Ok(String::from_utf8_lossy(&text[..read]).into_owned())
}
