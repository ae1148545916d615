//! Content-addressed store for the images of guests: chunks, packs, manifests, the node's cache, the blob store behind it,
//! and the catalog of what exists.
//!
//! ```text
//!                store ── opens the parts, hands out writers and readers
//!              /   |    \
//!        ingest  reader  upload            a snapshot in, a snapshot out, a snapshot away
//!              \   |    /              publish: sees a snapshot through to its commit
//!                fetch                     one chunk, from wherever a good copy is; single flight
//!              /   |    \
//!         cache staging  blob              RocksDB | files | S3
//!
//!         chunk  index  pack  manifest     the stored formats; no I/O
//!         ids  clock                       used by all, and by the catalog
//!
//!         catalog                          names and rows; knows nothing of chunks
//!         gc  census  check  publish       above both: what is needed, what is not, what is whole
//!         repack  rewrite                  and what lies where it should not
//!         gc ── catalog and blob           what no snapshot needs leaves the blob store
//!         s3d                              an S3 endpoint for a node that has none
//! ```
//!
//! Absent on purpose: virtual machines (another crate), and any way to read a byte that was not verified.

pub mod blob;
mod blocking;
pub mod cache;
pub mod catalog;
pub mod census;
pub mod check;
pub mod chunk;
pub mod clock;
pub mod error;
mod fetch;
mod flight;
pub mod gc;
pub mod ids;
pub mod index;
mod ingest;
pub mod manifest;
#[cfg(test)]
pub(crate) mod mutant;
pub mod pack;
pub mod publish;
mod random;
mod reader;
pub mod repack;
pub mod rewrite;
pub mod s3d;
pub mod staging;
mod stats;
mod store;
#[cfg(test)]
mod tests;
mod upload;

pub use chunk::DEFAULT_CHUNK_BYTES;
pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{ReadError, Source, StoreError, Tried};
pub use ids::{ChunkId, ChunkNo, DomainKey, InvalidId, NodeId, PackId, SandboxId, SnapshotId, TeamId, TemplateId};
pub use ingest::{ImageSpec, ImageWriter, Ingest, Sealed};
pub use manifest::{BlobRef, HostFacts, ImageRef, Manifest, Shape};
pub use pack::PackRef;
pub use reader::{ChunkData, ImageReader, SnapshotReader};
pub use stats::{RemoteUsage, StoreStats, TierStats};
pub use store::{Store, StoreConfig};
pub use upload::UploadReport;
