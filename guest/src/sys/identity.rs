//! Wall clock, kernel randomness and queued signals: what a restored guest must be given before its programs run.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `_IOW('R', 0x03, int[2])` of `linux/random.h`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `_IO('R', 0x07)` of `linux/random.h`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Most bytes that [`add_entropy`] takes at once.
pub const ENTROPY_MAX: usize = 64;

/// `struct rand_pool_info` with its flexible array given a size.
#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    size_bytes: libc::c_int,
    bytes: [u8; ENTROPY_MAX],
}

/// Sets the wall clock. The monotonic clock is not touched.
pub fn set_wall_clock(unix_ns: u64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: i64::try_from(unix_ns / 1_000_000_000).map_err(io::Error::other)?,
        tv_nsec: i64::try_from(unix_ns % 1_000_000_000).map_err(io::Error::other)?,
    };
    // SAFETY: `time` is a valid timespec that lives through the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) })
}

/// Mixes `seed` into the kernel's pool, credits it fully, and makes the generator take a new key from it at once: two
/// guests of one snapshot draw the same bytes until then.
pub fn add_entropy(seed: &[u8]) -> io::Result<()> {
    let size = seed.len().min(ENTROPY_MAX);
    let mut info = PoolInfo { entropy_bits: 0, size_bytes: 0, bytes: [0; ENTROPY_MAX] };
    info.bytes[..size].copy_from_slice(&seed[..size]);
    info.size_bytes = i32::try_from(size).map_err(io::Error::other)?;
    info.entropy_bits = info.size_bytes * 8;
    let random = File::options().write(true).open("/dev/urandom")?;
    // SAFETY: `info` has the layout that this request reads, and `size_bytes` does not exceed its array.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &info) })?;
    // SAFETY: this request takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })
}

/// Number of the signal that tells an interpreter to seed its generators anew.
pub fn reseed_signal() -> libc::c_int {
    libc::SIGRTMIN() + 5
}

/// Sends `signal` to process `pid`. A process that is gone is no error.
pub fn send_signal(pid: i32, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: plain numbers.
    let result = check(unsafe { libc::kill(pid, signal) });
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
