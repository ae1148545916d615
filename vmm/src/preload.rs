//! The node's side of the library inside the VMM (`vmm/preload`): start a VMM with it, and give it memory images.
//!
//! ```text
//!   prepare ──▶ (VMM starts, maps its memory backend) ──▶ anonymous memory ──attach──▶ image ──attach──▶ image …
//!                                                             │  regions                  │  regions, uffd
//! ```
//!
//! The channel is a packet socket that the VMM inherits; each request is one message, each answer one:
//!
//! | request | attached | answer | attached |
//! | --- | --- | --- | --- |
//! | `attach` | read-only descriptor of the image | regions | the userfaultfd |
//! | `regions` | | regions | |
//! | `uffd` | | regions | the userfaultfd |
//!
//! Regions are a JSON array of [`Region`]; a refusal is `{"error": "…"}`.
//!
//! When it goes wrong: a VMM that refused `attach`, or died meanwhile, may have inaccessible memory, never memory with
//! wrong bytes; the owner kills it. The library keeps its userfaultfd open for as long as the VMM lives, so a page server
//! that dies leaves the guest waiting; [`PreloadChannel::uffd`] gives its successor the descriptor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair};
use nix::sys::time::{TimeVal, TimeValLike};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::descriptors::{inherit, receive, send};
use crate::image::{MemoryImage, new_memfd};
use crate::region::Region;

/// How long the VMM may take for an answer. It maps memory; nothing it does takes longer than milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_ANSWER: usize = 4096;

/// A VMM that could not be prepared, or did not do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum PreloadError {
    /// The operating system refused.
    #[error("{step}: {cause}")]
    Os {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
    /// The VMM is gone.
    #[error("{request}: the VMM is gone")]
    Gone {
        /// What it was asked.
        request: &'static str,
    },
    /// The VMM could not do it.
    #[error("{request}: the VMM refused: {reason}")]
    Refused {
        /// What it was asked.
        request: &'static str,
        /// What it says.
        reason: String,
    },
    /// The VMM's answer makes no sense.
    #[error("{request}: the VMM answered {answer:?}")]
    Nonsense {
        /// What it was asked.
        request: &'static str,
        /// What it answered.
        answer: String,
    },
    /// The library is not there.
    #[error("preload library {path}: {cause}")]
    NoLibrary {
        /// Where it was looked for.
        path: PathBuf,
        /// Why it cannot be had.
        #[source]
        cause: io::Error,
    },
}

/// A file to give a VMM as its memory backend. It stays empty: the library maps something else in its place.
pub fn placeholder(size_bytes: u64) -> io::Result<OwnedFd> {
    Ok(new_memfd("snapyard-placeholder", size_bytes)?.into())
}

/// Starts VMMs with the library loaded.
#[derive(Debug, Clone, Copy)]
pub struct Preload;

impl Preload {
    /// Makes the VMM that `command` will start load the library at `preload_so` and hand itself over on the returned
    /// channel. `placeholder` is the file that the VMM maps as its memory, however it gets at it.
    ///
    /// The command holds the VMM's end of the channel: drop it after the start, or a dead VMM is noticed late.
    pub fn prepare(
        command: &mut Command,
        preload_so: &Path,
        placeholder: &OwnedFd,
    ) -> Result<PreloadChannel, PreloadError> {
        let os = |step| move |cause: io::Error| PreloadError::Os { step, cause };
        let library =
            File::open(preload_so).map_err(|cause| PreloadError::NoLibrary { path: preload_so.to_owned(), cause })?;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|errno| os("make the channel")(errno.into()))?;
        let patience = TimeVal::seconds(PATIENCE.as_secs() as i64);
        setsockopt(&ours, ReceiveTimeout, &patience)
            .and_then(|()| setsockopt(&ours, SendTimeout, &patience))
            .map_err(|errno| os("set up the channel")(errno.into()))?;
        let backend =
            placeholder.try_clone().and_then(|fd| File::from(fd).metadata()).map_err(os("look at the placeholder"))?;
        let channel = inherit(command, theirs);
        // Without the device (or the right to open it) the library tries the system call.
        let device = match File::options().read(true).write(true).open("/dev/userfaultfd") {
            Ok(device) => inherit(command, device.into()),
            Err(_) => -1,
        };
        // By descriptor: an unprivileged VMM may not reach the directory that the library is in.
        let library = inherit(command, library.into());
        command.env("LD_PRELOAD", format!("/proc/self/fd/{library}"));
        let (device_no, inode) = (backend.dev(), backend.ino());
        command.env("SNAPYARD_PRELOAD", format!("1,{channel},{device},{library},{device_no},{inode}"));
        Ok(PreloadChannel { socket: Mutex::new(ours) })
    }
}

/// The channel to the library inside one VMM. Calls block for as long as the VMM takes, microseconds as a rule.
#[derive(Debug)]
pub struct PreloadChannel {
    socket: Mutex<OwnedFd>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Regions(Vec<Region>),
    Refusal { error: String },
}

impl PreloadChannel {
    /// Replaces the VMM's memory by the image, mapped privately: whatever the guest had written is gone. The guest must
    /// not run. Gives the userfaultfd that the new mapping is registered with, for a page server, and where it is.
    pub fn attach(&self, image: &MemoryImage) -> Result<(OwnedFd, Vec<Region>), PreloadError> {
        self.with_uffd("attach", Some(image.guest_fd()))
    }

    /// Where guest memory is in the VMM's address space.
    pub fn regions(&self) -> Result<Vec<Region>, PreloadError> {
        Ok(self.ask("regions", None)?.0)
    }

    /// The userfaultfd of the present mapping again, for the successor of a page server.
    pub fn uffd(&self) -> Result<(OwnedFd, Vec<Region>), PreloadError> {
        self.with_uffd("uffd", None)
    }

    fn with_uffd(
        &self,
        request: &'static str,
        fd: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<(OwnedFd, Vec<Region>), PreloadError> {
        let (regions, uffd) = self.ask(request, fd)?;
        let uffd = uffd.ok_or(PreloadError::Nonsense { request, answer: "no descriptor".into() })?;
        Ok((uffd, regions))
    }

    fn ask(
        &self,
        request: &'static str,
        fd: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<(Vec<Region>, Option<OwnedFd>), PreloadError> {
        let socket = self.socket.lock();
        let failed = |cause: io::Error| match cause.raw_os_error() {
            Some(libc::EPIPE | libc::ECONNRESET) => PreloadError::Gone { request },
            _ => PreloadError::Os { step: request, cause },
        };
        send(socket.as_fd(), request.as_bytes(), fd).map_err(failed)?;
        let (answer, fds) = receive(socket.as_fd(), MAX_ANSWER).map_err(failed)?;
        if answer.is_empty() {
            return Err(PreloadError::Gone { request });
        }
        match serde_json::from_slice(&answer) {
            Ok(Answer::Regions(regions)) => Ok((regions, fds.into_iter().next())),
            Ok(Answer::Refusal { error }) => Err(PreloadError::Refused { request, reason: error }),
            Err(_) => Err(PreloadError::Nonsense { request, answer: String::from_utf8_lossy(&answer).into_owned() }),
        }
    }
}
