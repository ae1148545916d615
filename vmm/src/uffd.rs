//! The kernel's userfaultfd interface: the few calls that a page server needs, on a descriptor that a VMM created.
//!
//! Source: `Documentation/admin-guide/mm/userfaultfd.rst` and `include/uapi/linux/userfaultfd.h` of Linux 6.18. The
//! numbers are checked at compile time. Creating and registering is the business of the library inside the VMM
//! (`vmm/preload`).
//!
//! The values that a half-done `UFFDIO_CONTINUE` or `UFFDIO_ZEROPAGE` leaves behind are read raw: bytes done when
//! positive, a negated errno otherwise. Wrappers have reported the latter as a length.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::unistd::read;

const READ: u64 = 2;
const READ_WRITE: u64 = 3;

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xAA << 8 | number
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_continue` and `struct uffdio_zeropage`, which have the same fields.
#[repr(C)]
struct MapArgument {
    range: Range,
    mode: u64,
    mapped: i64,
}

const UFFDIO_WAKE: u64 = request(READ, 0x02, size_of::<Range>());
const UFFDIO_ZEROPAGE: u64 = request(READ_WRITE, 0x04, size_of::<MapArgument>());
const UFFDIO_CONTINUE: u64 = request(READ_WRITE, 0x07, size_of::<MapArgument>());
const _: () = assert!(UFFDIO_WAKE == 0x8010_AA02);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xC020_AA04);
const _: () = assert!(UFFDIO_CONTINUE == 0xC020_AA07);

/// `struct uffd_msg` is packed: event at 0, page fault flags at 8, address at 16.
const MESSAGE_LEN: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;
/// How many messages are read at once.
const BATCH: usize = 64;

/// What to map at a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// The pages of the mapped file, which must be in its page cache.
    FilePages,
    /// The zero page.
    Zeros,
}

/// What the kernel tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Somebody waits for the page at this address.
    Fault {
        /// The address that was touched.
        address: u64,
    },
    /// An event that was not asked for; its number.
    Other(u8),
}

/// Maps `len` bytes from `start` (both page-aligned, in the VMM's address space) and wakes who waits there.
///
/// Gives the bytes done from the start, at least one page, which may be fewer than asked for; or the errno that the
/// first page met: `EEXIST` (mapped already, its waiters may still sleep), `EAGAIN` (the mapping is changing), `EFAULT`
/// (the file lacks the page), `ENOENT` (not a registered range), `ESRCH` (the process is gone).
pub(crate) fn map(uffd: BorrowedFd<'_>, mapping: Mapping, start: u64, len: u64) -> Result<u64, Errno> {
    let request = match mapping {
        Mapping::FilePages => UFFDIO_CONTINUE,
        Mapping::Zeros => UFFDIO_ZEROPAGE,
    };
    let mut argument = MapArgument { range: Range { start, len }, mode: 0, mapped: 0 };
    // SAFETY: the request reads and writes one MapArgument (its size is part of the checked number), which outlives the
    // call; it changes only the address space that the descriptor belongs to.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), request as libc::Ioctl, &raw mut argument) };
    match result {
        0 => Ok(len),
        _ => {
            let errno = Errno::last();
            u64::try_from(argument.mapped).ok().filter(|done| *done > 0).ok_or(errno)
        }
    }
}

/// Wakes everybody who waits in the range. Those whose page is still missing fault anew.
pub(crate) fn wake(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<(), Errno> {
    let mut range = Range { start, len };
    // SAFETY: the request reads one Range (its size is part of the checked number), which outlives the call.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE as libc::Ioctl, &raw mut range) };
    Errno::result(result).map(drop)
}

/// Reads the events that wait, a batch at most; none if there are none. The descriptor must be non-blocking.
pub(crate) fn read_events(uffd: BorrowedFd<'_>) -> Result<Vec<Event>, Errno> {
    let mut buffer = [0u8; MESSAGE_LEN * BATCH];
    let len = match read(uffd, &mut buffer) {
        Ok(len) => len,
        Err(Errno::EAGAIN | Errno::EINTR) => 0,
        Err(errno) => return Err(errno),
    };
    Ok(buffer[..len].chunks_exact(MESSAGE_LEN).map(parse).collect())
}

fn parse(message: &[u8]) -> Event {
    if message[0] != EVENT_PAGEFAULT {
        return Event::Other(message[0]);
    }
    let address = message[16..24].try_into().expect("eight bytes");
    Event::Fault { address: u64::from_ne_bytes(address) }
}
