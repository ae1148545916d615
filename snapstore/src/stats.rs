//! What the store counts.

use std::sync::atomic::AtomicU64;

/// Totals since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) chunks_new: AtomicU64,
    pub(crate) chunks_deduplicated: AtomicU64,
    pub(crate) bytes_new: AtomicU64,
    pub(crate) cache_hits: AtomicU64,
    pub(crate) cache_misses: AtomicU64,
    pub(crate) bad_copies: AtomicU64,
}

/// What the blob store holds, as of the last time it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteUsage {
    /// Packs and manifests.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When it was asked, milliseconds since the Unix epoch; 0: never yet.
    pub as_of_unix_ms: i64,
}

/// The store's figures. Counts are since it was opened, unless they say what *is*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Chunks with a known place (an estimate; one in two packs counts twice).
    pub chunks: u64,
    /// Chunks of images and blobs that were stored.
    pub chunks_new: u64,
    /// Chunks of images and blobs that were put and found to be there already.
    pub chunks_deduplicated: u64,
    /// Compressed bytes stored, index pages included.
    pub bytes_new: u64,
    /// Bytes that the cache takes on disk.
    pub cache_bytes: u64,
    /// Fetches that the cache answered.
    pub cache_hits: u64,
    /// Fetches that it did not.
    pub cache_misses: u64,
    /// Reads from the blob store.
    pub blob_gets: u64,
    /// Writes to the blob store.
    pub blob_puts: u64,
    /// Bytes read from the blob store.
    pub blob_bytes_read: u64,
    /// Bytes written to the blob store.
    pub blob_bytes_written: u64,
    /// What the blob store holds.
    pub remote: RemoteUsage,
    /// Packs sealed here and not uploaded yet.
    pub packs_staged: u64,
    /// Copies that did not verify and were replaced, or could not be.
    pub bad_copies: u64,
}
