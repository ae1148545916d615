//! A userfaultfd that a VMM created, as a page server uses it: the [`userfaultfd`] crate, with errors as plain `errno` values.
//!
//! Creating and registering is the business of the library inside the VMM (`vmm/preload`). Source of what the errors mean:
//! `Documentation/admin-guide/mm/userfaultfd.rst` of Linux 6.18.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use nix::errno::Errno;
use userfaultfd::{Error, Event, EventBuffer, Uffd};

/// What to map at a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// The pages of the mapped file, which must be in its page cache.
    FilePages,
    /// The zero page.
    Zeros,
}

/// Takes over a descriptor that a VMM sent.
pub(crate) fn adopt(descriptor: OwnedFd) -> Uffd {
    // SAFETY: the descriptor is owned, and given up here.
    unsafe { Uffd::from_raw_fd(descriptor.into_raw_fd()) }
}

/// Maps `len` bytes from `start` (both page-aligned, in the VMM's address space) and wakes who waits there.
///
/// Gives the bytes done from the start, which may be fewer than asked for; or the errno that the first page met: `EEXIST`
/// (mapped already, its waiters may still sleep), `EAGAIN` (the mapping is changing, or zeros were mapped in part),
/// `EFAULT` (the file lacks the page), `ENOENT` (not a registered range), `ESRCH` (the process is gone).
pub(crate) fn map(uffd: &Uffd, mapping: Mapping, start: u64, len: u64) -> Result<u64, Errno> {
    let (at, bytes) = (start as *mut libc::c_void, len as usize);
    let done = match mapping {
        Mapping::FilePages => uffd.r#continue(at, bytes, true),
        // SAFETY: the range is in another process, and what is mapped there is the answer to a fault on a missing page.
        Mapping::Zeros => unsafe { uffd.zeropage(at, bytes, true) }.map(|done| done as u64),
    };
    done.map_err(errno)
}

/// Wakes everybody who waits in the range. Those whose page is still missing fault anew.
pub(crate) fn wake(uffd: &Uffd, start: u64, len: u64) -> Result<(), Errno> {
    uffd.wake(start as *mut libc::c_void, len as usize).map_err(errno)
}

/// Reads the addresses of the faults that wait, as many as the buffer holds; none if there are none. The descriptor must
/// be non-blocking.
pub(crate) fn read_faults(uffd: &Uffd, buffer: &mut EventBuffer) -> Result<Vec<u64>, Errno> {
    let events = match uffd.read_events(buffer) {
        Ok(events) => events,
        Err(error) => {
            let errno = errno(error);
            return if errno == Errno::EINTR { Ok(Vec::new()) } else { Err(errno) };
        }
    };
    let fault = |event| match event {
        Ok(Event::Pagefault { addr, .. }) => Some(addr as u64),
        other => {
            tracing::warn!(?other, "userfaultfd event that nobody asked for");
            None
        }
    };
    Ok(events.filter_map(fault).collect())
}

fn errno(error: Error) -> Errno {
    match error {
        Error::SystemError(errno) | Error::ZeropageFailed(errno) => Errno::from_raw(errno as i32),
        // An end of file, half a message: not what a userfaultfd does.
        _ => Errno::EIO,
    }
}
