//! The kernel's `PAGEMAP_SCAN`: which pages of a process are its own.
//!
//! Source: `Documentation/admin-guide/mm/pagemap.rst` and `include/uapi/linux/fs.h` of Linux 6.7 and later. The number
//! is checked at compile time.
//!
//! In a private mapping of a file a page is the process's own (anonymous: it was written) when it is present or swapped
//! out, and neither the file's page nor the shared zero page. A page that is merely not present was not written; one that
//! is swapped out was.

use std::fs::File;
use std::os::fd::AsRawFd;

use nix::errno::Errno;

#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScannedRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGEMAP_SCAN: u64 = 3 << 30 | (size_of::<ScanArgument>() as u64) << 16 | (b'f' as u64) << 8 | 16;
const _: () = assert!(PAGEMAP_SCAN == 0xC060_6610);
const _: () = assert!(size_of::<ScannedRegion>() == 24);

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// How many runs one call may give.
const BATCH: usize = 2048;

/// Calls `found(start, end)` for every run of anonymous pages between the addresses, in order. `pagemap` is the open
/// `/proc/PID/pagemap`. Adjacent runs may be reported apart.
pub(crate) fn anonymous(pagemap: &File, start: u64, end: u64, mut found: impl FnMut(u64, u64)) -> Result<(), Errno> {
    let mut regions = vec![ScannedRegion { start: 0, end: 0, categories: 0 }; BATCH];
    let mut at = start;
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: BATCH as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        };
        // SAFETY: the request reads and writes one ScanArgument (its size is part of the checked number) and writes at
        // most `vec_len` regions to `vec`; both outlive the call.
        let result = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as libc::Ioctl, &raw mut argument) };
        let count = Errno::result(result)? as usize;
        regions[..count].iter().for_each(|region| found(region.start, region.end));
        if argument.walk_end <= at {
            return Err(Errno::EIO);
        }
        at = argument.walk_end;
    }
    Ok(())
}
