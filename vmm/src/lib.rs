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
pub mod descriptors;
pub mod image;
mod pagemap;
pub mod pages;
pub mod pageserver;
pub mod preload;
pub mod region;
pub mod source;
mod uffd;

pub use capture::{CaptureError, DirtyPages, capture_dirty, private_bytes};
pub use image::{Backing, FillError, FillPolicy, ImageError, MemoryImage, PageState};
pub use pages::{PageRange, PageSet};
pub use pageserver::{FaultStats, GuestFault, PageServer, ServeConfig, ServeError, ServedGuest};
pub use preload::{Preload, PreloadChannel, PreloadError, placeholder};
pub use region::Region;
pub use source::{ChunkData, ChunkNo, Geometry, GeometryError, PAGE_SIZE, PageSource, SourceError, ZeroSource};
