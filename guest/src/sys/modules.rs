//! Loading kernel modules.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Inserts the module in `file`, without parameters. A module that is there already is no error.
pub fn insert(file: &File) -> io::Result<()> {
    // SAFETY: a valid descriptor, a NUL-terminated parameter string and no flags; the kernel keeps neither.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    if result == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        error => Err(error),
    }
}
