//! Virtual machines: drivers, memory images, lazy restore, dirty capture.
//!
//! ```text
//!   PageSource (storage below)            one per image
//!       │ chunks, when needed
//!   MemoryImage                           one per snapshot and node, shared by its guests
//!       │ read-only descriptor            │ faults                       ▲ dirty pages become a child image
//!   preload library in each VMM ──────▶ PageServer, one per guest    capture_dirty
//! ```
//!
//! What is deliberately absent: any knowledge of chunks' identities, packs, manifests or S3. This crate reads images
//! through [`PageSource`] and knows nothing of how they are stored.

pub mod capture;
pub mod cgroup;
pub mod descriptors;
pub mod driver;
pub mod facts;
pub mod hypervisor;
pub mod image;
pub mod nbd;
pub mod overlay;
mod pagemap;
pub mod pages;
pub mod pageserver;
mod pool;
pub mod preload;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod region;
pub mod shape;
pub mod source;
mod tail;
mod uffd;
pub mod vm;

pub use capture::{CaptureError, DirtyPages, capture_dirty, private_bytes};
pub use cgroup::CgroupMode;
pub use driver::{DriverError, RestoreTimings, VmControl, VmDriver};
pub use facts::{Accelerator, HostFacts};
pub use hypervisor::{Hypervisor, RestoreFrom, VmmConfig};
pub use image::{Backing, FillError, FillPolicy, ImageError, MemoryImage, PageState};
pub use overlay::{DiskError, FrozenDisk};
pub use pages::{PageRange, PageSet};
pub use pageserver::{FaultStats, GuestFault, PageServer, ServeConfig, ServeError, ServedGuest};
pub use preload::{Preload, PreloadChannel, PreloadError, placeholder};
pub use qemu::accel::AcceleratorChoice;
pub use region::Region;
pub use shape::{GuestPort, Shape};
pub use source::{ChunkData, ChunkNo, Geometry, GeometryError, PAGE_SIZE, PageSource, SourceError, ZeroSource};
pub use vm::{Capture, MemoryStats, Touches, Vm, VmError, VmFailure, process_private_bytes};
