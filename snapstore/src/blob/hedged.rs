//! Hedged reads: a second request when the first takes longer than nearly all others did. A decorator.
//!
//! ```text
//!   get_range ──> first request ──────────────────────────────> whoever answers first, the other is dropped
//!                   └── after the p95 of late ──> second request ──┘
//! ```
//!
//! A guest waits for each of these reads, and one slow answer in twenty is what it would feel. Only small reads are hedged:
//! a large one is slow because it is large. A store that is slow as a whole must not get twice the load: each read that is
//! not hedged earns a tenth of a second request, so at most a tenth more are sent.
//!
//! The answer is an error only if both are. Latencies are of answers, errors included in neither direction.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::{BlobEntry, BlobError, BlobStore, PutMode, PutOutcome};

/// Longer reads are not hedged.
const MAX_HEDGED_BYTES: u64 = 1 << 20;

/// Latencies looked at, and how many there must be before anything is hedged.
const WINDOW: usize = 256;
const MIN_SAMPLES: usize = 20;

/// No second request sooner than this, however quick the store.
const MIN_DELAY: Duration = Duration::from_millis(2);

/// What a read earns, and the most that is saved up, in hundredths of a request.
const EARNED: u64 = 10;
const MAX_SAVED: u64 = 1000;
const PRICE: u64 = 100;

#[derive(Default)]
struct Seen {
    latencies: VecDeque<Duration>,
    saved: u64,
}

impl Seen {
    fn record(&mut self, latency: Duration) {
        if self.latencies.len() == WINDOW {
            self.latencies.pop_front();
        }
        self.latencies.push_back(latency);
    }

    /// How long a read may take before it is hedged; `None` while too little is known.
    fn delay(&self) -> Option<Duration> {
        if self.latencies.len() < MIN_SAMPLES {
            return None;
        }
        let mut sorted: Vec<Duration> = self.latencies.iter().copied().collect();
        let at = sorted.len() * 95 / 100;
        let (_, p95, _) = sorted.select_nth_unstable(at);
        Some((*p95).max(MIN_DELAY))
    }

    fn pay(&mut self) -> bool {
        let enough = self.saved >= PRICE;
        if enough {
            self.saved -= PRICE;
        }
        enough
    }
}

/// A blob store whose small reads are hedged.
pub struct Hedged {
    inner: Arc<dyn BlobStore>,
    seen: Mutex<Seen>,
    sent: AtomicU64,
    won: AtomicU64,
}

impl Hedged {
    /// Hedges the reads of `inner`.
    pub fn new(inner: Arc<dyn BlobStore>) -> Self {
        Self { inner, seen: Mutex::default(), sent: AtomicU64::new(0), won: AtomicU64::new(0) }
    }

    /// Second requests sent, and those that answered first.
    pub fn hedges(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.won.load(Ordering::Relaxed))
    }

    async fn timed(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        let began = Instant::now();
        let read = self.inner.get_range(key, range).await;
        if read.is_ok() {
            self.seen.lock().record(began.elapsed());
        }
        read
    }
}

#[async_trait]
impl BlobStore for Hedged {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        self.inner.put(key, bytes, mode).await
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        self.inner.get(key, max_len).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.end.saturating_sub(range.start) > MAX_HEDGED_BYTES {
            return self.inner.get_range(key, range).await;
        }
        let delay = {
            let mut seen = self.seen.lock();
            seen.saved = (seen.saved + EARNED).min(MAX_SAVED);
            seen.delay()
        };
        let Some(delay) = delay else { return self.timed(key, range).await };
        let first = Box::pin(self.timed(key, range.clone()));
        let first = match select(first, Box::pin(sleep(delay))).await {
            Either::Left((answer, _)) => return answer,
            Either::Right((_, first)) => first,
        };
        if !self.seen.lock().pay() {
            return first.await;
        }
        self.sent.fetch_add(1, Ordering::Relaxed);
        let second = Box::pin(self.timed(key, range));
        let answer = match select(first, second).await {
            Either::Left((Ok(bytes), _)) => return Ok(bytes),
            Either::Right((Err(_), first)) => return first.await,
            Either::Left((Err(_), second)) => second.await,
            Either::Right((Ok(bytes), _)) => Ok(bytes),
        };
        if answer.is_ok() {
            self.won.fetch_add(1, Ordering::Relaxed);
        }
        answer
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
    use super::super::{BlobOp, MemoryBlobs};
    use super::*;

    /// Answers each read after the next of the given milliseconds; an odd number of them is an error.
    struct Slow {
        inner: MemoryBlobs,
        next: Mutex<VecDeque<u64>>,
    }

    #[async_trait]
    impl BlobStore for Slow {
        async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
            self.inner.put(key, bytes, mode).await
        }
        async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
            self.inner.get(key, max_len).await
        }
        async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
            let ms = self.next.lock().pop_front().unwrap_or(10);
            sleep(Duration::from_millis(ms)).await;
            if ms % 2 == 1 {
                return Err(BlobError::Unavailable { op: BlobOp::Get, key: key.into(), reason: "busy".into() });
            }
            self.inner.get_range(key, range).await
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

    async fn scene() -> (Arc<Slow>, Hedged) {
        let slow = Arc::new(Slow { inner: MemoryBlobs::new(), next: Mutex::default() });
        slow.put("k", Bytes::from_static(b"0123456789"), PutMode::Overwrite).await.expect("put");
        let hedged = Hedged::new(Arc::clone(&slow) as _);
        for _ in 0..MIN_SAMPLES {
            hedged.get_range("k", 0..1).await.expect("read");
        }
        assert_eq!(hedged.hedges(), (0, 0));
        (slow, hedged)
    }

    async fn read(hedged: &Hedged) -> (Result<Bytes, BlobError>, u128) {
        let began = Instant::now();
        (hedged.get_range("k", 2..5).await, began.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_read_is_answered_by_the_second_request() {
        let (slow, hedged) = scene().await;
        slow.next.lock().extend([5000, 10]);
        let (answer, ms) = read(&hedged).await;
        assert_eq!(answer.as_deref(), Ok(b"234".as_slice()));
        assert!((20..30).contains(&ms), "{ms} ms");
        assert_eq!(hedged.hedges(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_of_one_request_is_not_the_answer() {
        let (slow, hedged) = scene().await;
        slow.next.lock().extend([50, 5]);
        assert!(read(&hedged).await.0.is_ok(), "the second one failed");
        slow.next.lock().extend([15, 40]);
        assert!(read(&hedged).await.0.is_ok(), "the first one failed");
        assert_eq!(hedged.hedges(), (2, 1));
        slow.next.lock().extend([15, 31]);
        assert!(read(&hedged).await.0.is_err(), "both failed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_slow_as_a_whole_gets_a_tenth_more_load() {
        let (slow, hedged) = scene().await;
        slow.next.lock().extend(std::iter::repeat_n(500, 5000));
        for _ in 0..MIN_SAMPLES * 10 {
            read(&hedged).await.0.expect("read");
        }
        let (sent, _) = hedged.hedges();
        assert!(sent <= MIN_SAMPLES as u64 + 2, "{sent} second requests for {} reads", MIN_SAMPLES * 10);
    }

    #[tokio::test]
    async fn everything_else_is_passed_through() {
        super::super::conformance::run(&Hedged::new(Arc::new(MemoryBlobs::new()))).await;
    }
}
