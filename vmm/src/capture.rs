//! Copies what a guest wrote since it was restored.
//!
//! Guest memory is a private mapping of the shared image, so what the guest wrote are exactly the anonymous pages of the
//! mapping: the page map says which, and nothing has to be tracked while the guest runs. Pages that were written with
//! the bytes they had before, zeros included, are captured like all others.
//!
//! The guest must be stopped: a page written meanwhile may be copied torn. A page that vanishes meanwhile (the mapping
//! was replaced, the process died) is an error, never a hole.

use std::fs::File;
use std::io;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::thread;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::image::new_memfd;
use crate::pagemap;
use crate::pages::{PageRange, PageSet};
use crate::region::Region;
use crate::source::PAGE_SIZE;

/// Bytes copied by one call: the buffer stays in the CPU's cache between reading and writing.
const COPY_BYTES: u64 = 256 * 1024;
/// The kernel's limit on the pieces of one `process_vm_readv` (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// Below this much a second thread costs more than it saves.
const BYTES_PER_THREAD: u64 = 8 * 1024 * 1024;
/// No more threads than this, however much there is to copy.
const MAX_THREADS: u64 = 4;

/// A capture that failed. The guest is as it was.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The page map of the process could not be read.
    #[error("VMM {pid}: {step}: {cause}")]
    PageMap {
        /// The process.
        pid: i32,
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
    /// Guest memory could not be copied.
    #[error("VMM {pid}: {wanted} bytes from {address:#x}: {cause}")]
    Read {
        /// The process.
        pid: i32,
        /// The first address of the failed read.
        address: u64,
        /// How many bytes were wanted.
        wanted: u64,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
    /// The copy could not be stored.
    #[error("VMM {pid}: store the dirty pages: {cause}")]
    Store {
        /// The process.
        pid: i32,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
    /// The regions lie outside the address space or the image, or are not page-aligned.
    #[error("VMM {pid}: impossible region {region:?}")]
    Region {
        /// The process.
        pid: i32,
        /// The region.
        region: Region,
    },
}

/// The pages that a guest wrote, with their bytes, each at its place in a memfd as large as the guest's memory.
#[derive(Debug)]
pub struct DirtyPages {
    file: File,
    size_bytes: u64,
    pages: PageSet,
}

impl DirtyPages {
    /// No pages, of a memory of `size_bytes`.
    pub fn none(size_bytes: u64) -> io::Result<Self> {
        let file = new_memfd("snapyard-dirty", size_bytes)?;
        Ok(Self { file, size_bytes, pages: PageSet::new(size_bytes / PAGE_SIZE) })
    }

    /// These pages, by number, of a memory of `size_bytes`; each with [`PAGE_SIZE`] bytes.
    pub fn of<'a>(size_bytes: u64, pages: impl IntoIterator<Item = (u64, &'a [u8])>) -> io::Result<Self> {
        let mut dirty = Self::none(size_bytes)?;
        for (page, bytes) in pages {
            assert!(bytes.len() as u64 == PAGE_SIZE, "a page has {PAGE_SIZE} bytes");
            dirty.pages.insert(PageRange { first: page, count: 1 });
            dirty.file.write_all_at(bytes, page * PAGE_SIZE)?;
        }
        Ok(dirty)
    }

    /// Size of the guest's memory in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Which pages were written.
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// Bytes in the pages that were written.
    pub fn dirty_bytes(&self) -> u64 {
        self.pages.len() * PAGE_SIZE
    }

    /// The written pages as runs, in order.
    pub fn ranges(&self) -> Vec<PageRange> {
        self.pages.runs(PageRange { first: 0, count: self.size_bytes / PAGE_SIZE }, true)
    }

    /// The memfd with the bytes. What was not written is a hole.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn into_parts(self) -> (File, PageSet) {
        (self.file, self.pages)
    }
}

/// A run of dirty bytes: where they are, and where they belong.
#[derive(Debug, Clone, Copy)]
struct Piece {
    address: u64,
    offset: u64,
    len: u64,
}

/// Copies the pages that the guest in process `pid`, stopped, wrote in its `regions`.
pub fn capture_dirty(pid: u32, regions: &[Region]) -> Result<DirtyPages, CaptureError> {
    let size_bytes = regions.iter().map(|region| region.offset + region.size).max().unwrap_or(0);
    let pieces = find_dirty(pid, regions)?;
    let pid = pid as i32;
    let mut dirty = DirtyPages::none(size_bytes).map_err(|cause| CaptureError::Store { pid, cause })?;
    for piece in &pieces {
        dirty.pages.insert(PageRange { first: piece.offset / PAGE_SIZE, count: piece.len / PAGE_SIZE });
    }
    let threads = (dirty.dirty_bytes() / BYTES_PER_THREAD).clamp(1, MAX_THREADS) as usize;
    let share = pieces.len().div_ceil(threads).max(1);
    let file = &dirty.file;
    thread::scope(|scope| {
        let workers: Vec<_> =
            pieces.chunks(share).skip(1).map(|pieces| scope.spawn(move || copy(pid, pieces, file))).collect();
        let first = copy(pid, pieces.get(..share.min(pieces.len())).unwrap_or_default(), file);
        workers.into_iter().fold(first, |result, worker| result.and(worker.join().expect("copying does not panic")))
    })?;
    Ok(dirty)
}

/// How many bytes of its `regions` are the process's own: what the guest's writes cost.
pub fn private_bytes(pid: u32, regions: &[Region]) -> Result<u64, CaptureError> {
    Ok(find_dirty(pid, regions)?.iter().map(|piece| piece.len).sum())
}

fn find_dirty(pid: u32, regions: &[Region]) -> Result<Vec<Piece>, CaptureError> {
    let pid = pid as i32;
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(|cause| CaptureError::PageMap {
        pid,
        step: "open the page map",
        cause,
    })?;
    let mut pieces = Vec::new();
    for region in regions {
        let aligned =
            [region.base_host_virt_addr, region.size, region.offset].iter().all(|n| n.is_multiple_of(PAGE_SIZE));
        if !aligned || region.base_host_virt_addr.checked_add(region.size).is_none() {
            return Err(CaptureError::Region { pid, region: *region });
        }
        pagemap::anonymous(&pagemap, region.base_host_virt_addr, region.end(), |start, end| {
            let mut address = start;
            while address < end {
                let len = COPY_BYTES.min(end - address);
                let offset = region.offset + (address - region.base_host_virt_addr);
                pieces.push(Piece { address, offset, len });
                address += len;
            }
        })
        .map_err(|errno| CaptureError::PageMap { pid, step: "scan the page map", cause: errno.into() })?;
    }
    Ok(pieces)
}

/// Copies pieces, each no longer than the buffer, as many per call as fit.
fn copy(pid: i32, pieces: &[Piece], file: &File) -> Result<(), CaptureError> {
    let mut buffer = vec![0; COPY_BYTES as usize];
    let mut rest = pieces;
    while !rest.is_empty() {
        let mut wanted = 0;
        let fits = rest
            .iter()
            .take(MAX_PIECES)
            .take_while(|piece| {
                wanted += piece.len;
                wanted <= COPY_BYTES
            })
            .count();
        let (batch, later) = rest.split_at(fits);
        rest = later;
        let wanted: u64 = batch.iter().map(|piece| piece.len).sum();
        let remote: Vec<_> =
            batch.iter().map(|piece| RemoteIoVec { base: piece.address as usize, len: piece.len as usize }).collect();
        let mut local = [IoSliceMut::new(&mut buffer[..wanted as usize])];
        let failed = |cause| CaptureError::Read { pid, address: batch[0].address, wanted, cause };
        let got = process_vm_readv(Pid::from_raw(pid), &mut local, &remote).map_err(|errno| failed(errno.into()))?;
        if got as u64 != wanted {
            return Err(failed(Errno::EFAULT.into()));
        }
        let mut at = 0;
        for piece in batch {
            let bytes = &buffer[at..at + piece.len as usize];
            file.write_all_at(bytes, piece.offset).map_err(|cause| CaptureError::Store { pid, cause })?;
            at += bytes.len();
        }
    }
    Ok(())
}
