//! Counts what goes through a blob store: a decorator, for statistics.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;

use super::{BlobEntry, BlobError, BlobStore, PutMode, PutOutcome};

/// Totals since the store was opened. Failed operations count as operations, not as bytes.
#[derive(Debug, Default)]
pub struct BlobCounters {
    /// `get` and `get_range`.
    pub gets: AtomicU64,
    /// `put`.
    pub puts: AtomicU64,
    /// Bytes that came back from reads.
    pub bytes_read: AtomicU64,
    /// Bytes that were written.
    pub bytes_written: AtomicU64,
}

/// A blob store that counts.
pub struct Counted {
    inner: Arc<dyn BlobStore>,
    counters: Arc<BlobCounters>,
}

impl Counted {
    /// Counts into `counters` what goes to `inner`.
    pub fn new(inner: Arc<dyn BlobStore>, counters: Arc<BlobCounters>) -> Self {
        Self { inner, counters }
    }

    fn read(&self, result: Result<Bytes, BlobError>) -> Result<Bytes, BlobError> {
        self.counters.gets.fetch_add(1, Ordering::Relaxed);
        if let Ok(bytes) = &result {
            self.counters.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        result
    }
}

#[async_trait]
impl BlobStore for Counted {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        let len = bytes.len() as u64;
        self.counters.puts.fetch_add(1, Ordering::Relaxed);
        let outcome = self.inner.put(key, bytes, mode).await?;
        if outcome == PutOutcome::Written {
            self.counters.bytes_written.fetch_add(len, Ordering::Relaxed);
        }
        Ok(outcome)
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        self.read(self.inner.get(key, max_len).await)
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        self.read(self.inner.get_range(key, range).await)
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        self.inner.head(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError> {
        self.inner.list(prefix, after, limit).await
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.inner.delete(key).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryBlobs;
    use super::*;

    #[tokio::test]
    async fn counting_changes_nothing_and_counts_right() {
        let counters = Arc::new(BlobCounters::default());
        let blobs = Counted::new(Arc::new(MemoryBlobs::new()), Arc::clone(&counters));
        super::super::conformance::run(&blobs).await;
        let read_before = counters.bytes_read.load(Ordering::Relaxed);
        let gets_before = counters.gets.load(Ordering::Relaxed);
        blobs.put("k", Bytes::from_static(b"12345"), PutMode::Overwrite).await.expect("put");
        blobs.get_range("k", 1..3).await.expect("get");
        blobs.get("missing", 10).await.expect_err("missing");
        assert_eq!(counters.bytes_read.load(Ordering::Relaxed) - read_before, 2);
        assert_eq!(counters.gets.load(Ordering::Relaxed) - gets_before, 2);
    }
}
