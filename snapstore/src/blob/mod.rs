//! The blob store: where packs and manifests end up. One narrow seam, several implementations.
//!
//! ```text
//!   Hedged (second requests)          a decorator
//!     └─ Counted (statistics)         another
//!          └─ S3Blobs | MemoryBlobs   one store each
//! ```
//!
//! What every implementation promises (`conformance` checks it):
//! - a `put` that returned is durable and whole: no reader ever sees a part of an object;
//! - `get` and `get_range` return exactly the bytes asked for, or an error: never fewer, never more;
//! - an error says whether the operation may have happened ([`BlobError::may_have_happened`]), and whether asking again can
//!   help ([`BlobError::is_transient`]);
//! - `delete` of what is not there succeeds.
//!
//! What it does not promise: that the bytes are the ones that were put. Callers verify content by hash.

#[cfg(test)]
pub(crate) mod conformance;
mod counted;
#[cfg(test)]
pub(crate) mod faulty;
mod hedged;
mod memory;
mod s3;

use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

pub use counted::{BlobCounters, Counted};
pub use hedged::Hedged;
pub use memory::MemoryBlobs;
pub use s3::{S3Blobs, S3Config};

use crate::ids::{PackId, SnapshotId};

/// Prefix of all packs.
pub const PACKS_PREFIX: &str = "packs/";

/// Prefix of all manifests.
pub const MANIFESTS_PREFIX: &str = "manifests/";

/// The key of a pack.
pub fn pack_key(pack: &PackId) -> String {
    format!("{PACKS_PREFIX}{pack}")
}

/// The key of a snapshot's manifest.
pub fn manifest_key(snapshot: &SnapshotId) -> String {
    format!("{MANIFESTS_PREFIX}{snapshot}")
}

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobOp {
    /// Writing an object.
    Put,
    /// Reading an object or a part of one.
    Get,
    /// Asking for an object's length.
    Head,
    /// Listing keys.
    List,
    /// Removing an object.
    Delete,
    /// Creating the bucket.
    CreateBucket,
}

impl BlobOp {
    /// Whether the operation changes anything.
    pub fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Delete | Self::CreateBucket)
    }
}

impl fmt::Display for BlobOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Head => "head",
            Self::List => "list",
            Self::Delete => "delete",
            Self::CreateBucket => "create bucket",
        })
    }
}

/// Why a blob operation failed, and what is known about its effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// There is no such object.
    #[error("{key}: no such object")]
    NotFound {
        /// The key.
        key: String,
    },
    /// Did not happen, and asking again will not help: credentials, a bad request, no bucket.
    #[error("{op} {key}: refused: {reason}")]
    Refused {
        /// The operation.
        op: BlobOp,
        /// The key.
        key: String,
        /// What the store said.
        reason: String,
    },
    /// Did not happen; asking again may help: the store is busy or cannot be reached.
    #[error("{op} {key}: unavailable: {reason}")]
    Unavailable {
        /// The operation.
        op: BlobOp,
        /// The key.
        key: String,
        /// What went wrong.
        reason: String,
    },
    /// A write that may or may not have happened: the answer was lost. Treat the object as there and as not there.
    #[error("{op} {key}: outcome unknown: {reason}")]
    Unknown {
        /// The operation.
        op: BlobOp,
        /// The key.
        key: String,
        /// What went wrong.
        reason: String,
    },
    /// The store answered, but not with what was asked for: another length, a range beyond the end, over a cap.
    #[error("{key}: bad answer: {reason}")]
    BadAnswer {
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl BlobError {
    /// Whether the same request may succeed a little later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Unknown { .. })
    }

    /// Whether a write may have taken effect nevertheless.
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Unknown { .. })
    }
}

/// What a conditional put found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is now the one given.
    Written,
    /// An object of that key was there already, and is unchanged.
    AlreadyThere,
}

/// Whether a put may replace an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Replace what is there.
    Overwrite,
    /// Leave what is there and say so. After a lost answer the object found may be one's own.
    IfAbsent,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobEntry {
    /// Its key.
    pub key: String,
    /// Its length, bytes.
    pub len: u64,
}

/// Objects by key. Keys are ASCII, `/` has no meaning to the store.
#[async_trait]
pub trait BlobStore: Send + Sync {
    /// Writes a whole object.
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError>;

    /// Reads a whole object; longer than `max_len` bytes is [`BlobError::BadAnswer`].
    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError>;

    /// Reads exactly these bytes of an object; a range that is not wholly inside is [`BlobError::BadAnswer`].
    /// An empty range is the caller's mistake and answers likewise.
    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError>;

    /// The length of an object, bytes.
    async fn head(&self, key: &str) -> Result<u64, BlobError>;

    /// Up to `limit` objects (1 to 1000) whose key starts with `prefix` and is greater than `after`, in order of the keys.
    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError>;

    /// Removes an object, or finds it gone.
    async fn delete(&self, key: &str) -> Result<(), BlobError>;
}
