//! Where guest memory lies in a VMM's address space.
//!
//! The message in which a VMM announces its memory is a JSON array of [`Region`]s with the userfaultfd attached: the
//! shape that Firecracker's UFFD backend uses (its `docs/snapshotting/handling-page-faults-on-snapshot-resume.md`), so
//! that one page server serves both.

use serde::{Deserialize, Serialize};

/// One mapping of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Where it begins in the VMM's address space: page-aligned, and not more than that.
    pub base_host_virt_addr: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Where it begins in the memory image, in bytes.
    pub offset: u64,
    /// Bytes per page of the mapping.
    pub page_size: u64,
}

impl Region {
    /// The first address behind the region.
    pub fn end(&self) -> u64 {
        self.base_host_virt_addr + self.size
    }

    /// Whether the address lies in the region.
    pub fn contains(&self, address: u64) -> bool {
        (self.base_host_virt_addr..self.end()).contains(&address)
    }
}
