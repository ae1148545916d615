//! What can go wrong above the formats: [`ReadError`] for readers, [`StoreError`] for writers and the store itself.
//!
//! A reader's error is one of three kinds, and the caller acts on the kind: ask again later ([`ReadError::is_transient`]),
//! give up because the bytes are lost everywhere ([`ReadError::NoGoodCopy`]), or a mistake in what was asked or in the
//! index. There is no kind under which wrong bytes are returned.

use std::fmt;

use crate::blob::BlobError;
use crate::cache::CacheError;
use crate::chunk::FrameError;
use crate::ids::{ChunkId, ChunkNo, PackId, SnapshotId};
use crate::index::IndexError;
use crate::manifest::ManifestError;
use crate::staging::StagingError;

/// A place where a copy of a chunk was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The node's cache.
    Cache,
    /// A pack staged on this node.
    Staged(PackId),
    /// A pack in the blob store.
    Blob(PackId),
    /// The footer of a pack, which may say where a chunk lies.
    Footer(PackId),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache => f.write_str("cache"),
            Self::Staged(pack) => write!(f, "staged pack {pack}"),
            Self::Blob(pack) => write!(f, "pack {pack} in the blob store"),
            Self::Footer(pack) => write!(f, "footer of pack {pack}"),
        }
    }
}

/// A copy that was no good, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// Where.
    pub source: Source,
    /// What was wrong.
    pub outcome: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.outcome)
    }
}

fn list(tried: &[Tried]) -> String {
    match tried {
        [] => "no place is known".into(),
        some => some.iter().map(Tried::to_string).collect::<Vec<_>>().join("; "),
    }
}

/// Why a chunk could not be read. Cheap to clone: one fetch answers many callers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Every copy is missing or wrong. Asking again does not help unless a copy comes back.
    #[error("chunk {chunk} has no good copy: {}", list(tried))]
    NoGoodCopy {
        /// The chunk.
        chunk: ChunkId,
        /// Where it was looked for.
        tried: Vec<Tried>,
    },
    /// The blob store, or the catalog, could not be asked just now. Ask again.
    #[error("chunk {chunk} cannot be fetched now: {cause}")]
    Unavailable {
        /// The chunk.
        chunk: ChunkId,
        /// The last answer of whoever could not be asked.
        cause: String,
    },
    /// The image has no such chunk.
    #[error("chunk number {chunk} is beyond the image's {chunks} chunks")]
    OutOfRange {
        /// What was asked for.
        chunk: ChunkNo,
        /// How many there are.
        chunks: u64,
    },
    /// The image's size or chunking is impossible, or a verified chunk is not the index node it should be.
    #[error("image index is wrong: {0}")]
    Index(#[from] IndexError),
    /// A verified chunk has another length than its place in the image or blob.
    #[error("chunk {chunk} holds {actual} bytes where {expected} belong")]
    Length {
        /// The chunk.
        chunk: ChunkId,
        /// Its length, bytes.
        actual: u64,
        /// The length its place has, bytes.
        expected: u64,
    },
}

impl ReadError {
    /// Whether the same read may succeed a little later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

/// Why the store could not do something other than read a chunk.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The chunk cache cannot be opened.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The staging directory failed: disk full, for one.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The blob store failed.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// Something that was needed could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A chunk could not be framed.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An image's size or chunking is impossible.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A stored manifest is no good.
    #[error("manifest of snapshot {snapshot}: {source}")]
    Manifest {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The cause.
        source: ManifestError,
    },
    /// The object under a snapshot's key is another snapshot's manifest.
    #[error("the manifest stored for snapshot {wanted} is that of {found}")]
    WrongManifest {
        /// Whose was asked for.
        wanted: SnapshotId,
        /// Whose it is.
        found: SnapshotId,
    },
    /// Device state and the like may not be this large.
    #[error("a blob of {bytes} bytes is over the cap")]
    BlobTooLarge {
        /// Its length.
        bytes: u64,
    },
    /// A chunk was put with the wrong length, or beyond the end of the image.
    #[error("chunk number {chunk}: {actual} bytes put, {expected:?} expected")]
    ChunkLength {
        /// Which chunk.
        chunk: ChunkNo,
        /// How long it was, bytes.
        actual: u64,
        /// How long it has to be, bytes; `None` beyond the end of the image.
        expected: Option<u64>,
    },
    /// A chunk was put a second time: which of the two would count is undefined.
    #[error("chunk number {chunk} was put twice")]
    ChunkTwice {
        /// Which chunk.
        chunk: ChunkNo,
    },
    /// The parent image has another size or chunking, or belongs to another dedup domain.
    #[error("the parent image cannot be inherited from: {0}")]
    ParentMismatch(&'static str),
    /// An earlier step of this ingest failed; nothing of it can be used.
    #[error("the ingest failed before: {0}")]
    IngestFailed(String),
    /// A pack that the snapshot needs is neither staged here nor in the blob store.
    #[error("pack {pack} is neither staged here nor in the blob store")]
    PackMissing {
        /// The pack.
        pack: PackId,
    },
    /// A staged pack has lost its content, and the cache cannot make up for it.
    #[error("staged pack {pack} is damaged and cannot be repaired from the cache")]
    PackDamaged {
        /// The pack.
        pack: PackId,
    },
}

impl StoreError {
    /// Whether the same operation may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Blob(error) => error.is_transient(),
            Self::Read(error) => error.is_transient(),
            _ => false,
        }
    }
}
