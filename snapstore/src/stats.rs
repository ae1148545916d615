//! What the store counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets of a latency histogram: bucket `n` counts what took less than 2^n microseconds, the last one all the rest.
const BUCKETS: usize = 25;

/// What one tier of the read path answered.
#[derive(Debug, Default)]
pub(crate) struct TierMeter {
    hits: AtomicU64,
    bytes: AtomicU64,
    took: [AtomicU64; BUCKETS],
}

impl TierMeter {
    /// Counts a read that was answered with so many bytes.
    pub(crate) fn record(&self, bytes: u64, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - micros.leading_zeros()) as usize;
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.took[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> TierStats {
        let took: Vec<u64> = self.took.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        TierStats {
            hits: self.hits.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            p50_us: percentile_us(&took, 50),
            p99_us: percentile_us(&took, 99),
        }
    }
}

/// The upper end of the bucket below which `percent` of the counts lie; 0 when there are none.
fn percentile_us(buckets: &[u64], percent: u64) -> u64 {
    let total: u64 = buckets.iter().sum();
    let wanted = (total * percent).div_ceil(100);
    let mut below = 0;
    for (bucket, count) in buckets.iter().enumerate() {
        below += count;
        if below >= wanted && total > 0 {
            return 1 << bucket;
        }
    }
    0
}

/// Reads that one tier answered, since the store was opened. Latencies are upper ends of buckets that double.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierStats {
    /// How many: chunks in memory; frames elsewhere, a read of several neighbours in the blob store counting once.
    pub hits: u64,
    /// Bytes, as they are stored there.
    pub bytes: u64,
    /// Half of them took less than this, microseconds.
    pub p50_us: u64,
    /// All but one in a hundred took less than this, microseconds.
    pub p99_us: u64,
}

/// Totals since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) memory: TierMeter,
    pub(crate) disk: TierMeter,
    pub(crate) staged: TierMeter,
    pub(crate) blob: TierMeter,
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
    /// Chunks with a known place (an estimate).
    pub chunks: u64,
    /// Chunks of images and blobs that were stored.
    pub chunks_new: u64,
    /// Chunks of images and blobs that were put and found to be there already.
    pub chunks_deduplicated: u64,
    /// Compressed bytes stored, index pages included.
    pub bytes_new: u64,
    /// Bytes that the cache takes on disk.
    pub cache_bytes: u64,
    /// Bytes that it dropped to keep to its budget.
    pub cache_evicted_bytes: u64,
    /// Frames that were read again, and therefore moved where scans do not push them out.
    pub cache_promoted: u64,
    /// Chunks that this node had.
    pub cache_hits: u64,
    /// Chunks that it had not.
    pub cache_misses: u64,
    /// Reads answered by frames in memory.
    pub tier_memory: TierStats,
    /// Reads answered by the cache on disk.
    pub tier_disk: TierStats,
    /// Reads answered by packs that are not uploaded yet.
    pub tier_staged: TierStats,
    /// Reads answered by the blob store.
    pub tier_blob: TierStats,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_upper_ends_of_buckets() {
        let meter = TierMeter::default();
        assert_eq!(meter.stats(), TierStats::default());
        for micros in [0, 3, 3, 3, 1000] {
            meter.record(10, Duration::from_micros(micros));
        }
        assert_eq!(meter.stats(), TierStats { hits: 5, bytes: 50, p50_us: 4, p99_us: 1024 });
        meter.record(1, Duration::MAX);
        assert_eq!(meter.stats().p99_us, 1 << (BUCKETS - 1));
    }
}
