//! The kernel's interface for creating a userfaultfd and registering memory with it.
//!
//! Source: `Documentation/admin-guide/mm/userfaultfd.rst` and `include/uapi/linux/userfaultfd.h` of Linux 6.18. The
//! numbers are checked at compile time. Every call gives the errno of the step that failed.

use core::ffi::c_int;

use crate::errno;

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xAA << 8 | number
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const USERFAULTFD_IOC_NEW: u64 = request(0, 0x00, 0);
const UFFDIO_API: u64 = request(3, 0x3F, size_of::<Api>());
const UFFDIO_REGISTER: u64 = request(3, 0x00, size_of::<Register>());
const _: () = assert!(USERFAULTFD_IOC_NEW == 0xAA00);
const _: () = assert!(UFFDIO_API == 0xC018_AA3F);
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00);

const UFFD_API: u64 = 0xAA;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const MODE_MISSING: u64 = 1 << 0;
const MODE_MINOR: u64 = 1 << 2;
const CAN_WAKE: u64 = 1 << 0x02;
const CAN_ZEROPAGE: u64 = 1 << 0x04;
const CAN_CONTINUE: u64 = 1 << 0x07;

/// Creates a userfaultfd of this process that also serves the kernel's own accesses: through the device if there is one
/// (`device` ≥ 0), which needs no privilege, else by the system call, which may.
pub(crate) fn create(device: c_int) -> Result<c_int, c_int> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let uffd = if device >= 0 {
        // SAFETY: the request takes its flags by value and makes a descriptor.
        unsafe { libc::ioctl(device, USERFAULTFD_IOC_NEW as libc::Ioctl, flags) }
    } else {
        // SAFETY: the call takes its flags by value and makes a descriptor.
        (unsafe { libc::syscall(libc::SYS_userfaultfd, flags) }) as c_int
    };
    if uffd < 0 {
        return Err(errno());
    }
    let mut api = Api { api: UFFD_API, features: FEATURE_MISSING_SHMEM | FEATURE_MINOR_SHMEM, ioctls: 0 };
    // SAFETY: the request reads and writes one Api (its size is part of the checked number), which outlives the call.
    if unsafe { libc::ioctl(uffd, UFFDIO_API as libc::Ioctl, &raw mut api) } != 0 {
        let errno = errno();
        close(uffd);
        return Err(errno);
    }
    Ok(uffd)
}

/// Registers a private mapping of a memfd for faults on pages that the file lacks (missing) and has (minor).
pub(crate) fn register(uffd: c_int, start: u64, len: u64) -> Result<(), c_int> {
    let mut register = Register { start, len, mode: MODE_MISSING | MODE_MINOR, ioctls: 0 };
    // SAFETY: the request reads and writes one Register (its size is part of the checked number), which outlives the
    // call; registering changes how faults are served, not what memory holds.
    if unsafe { libc::ioctl(uffd, UFFDIO_REGISTER as libc::Ioctl, &raw mut register) } != 0 {
        return Err(errno());
    }
    let needed = CAN_WAKE | CAN_ZEROPAGE | CAN_CONTINUE;
    if register.ioctls & needed == needed { Ok(()) } else { Err(libc::ENOTSUP) }
}

/// Closes a descriptor that this library owns.
pub(crate) fn close(fd: c_int) {
    // SAFETY: the caller owns the descriptor and does not use it again.
    unsafe { libc::close(fd) };
}
