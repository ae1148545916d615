//! A collection that is stopped at each of its operations in turn, by an error or by the end of its process: whatever
//! it had done by then, nothing that is used goes, and those that come after finish.

use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;

use super::*;
use crate::blob::{BlobError, BlobOp};
use crate::catalog::kv::{Compare, Entry, KvError, Op, Order, TxnOutcome};

/// How the operation that the count ends at fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It did not happen.
    Refused,
    /// It happened, and the answer is lost.
    Unknown,
    /// The process dies before it.
    DeadBefore,
    /// The process dies after it.
    DeadAfter,
}

/// Lets so many operations through.
struct Cut {
    left: Arc<AtomicUsize>,
    end: End,
}

impl Cut {
    fn last(&self) -> bool {
        let count = |left: usize| left.checked_sub(1);
        matches!(self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count), Ok(1))
    }

    fn over(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }
}

struct CutKv(Arc<MemoryKv>, Cut);

fn kv_error(end: End) -> KvError {
    let (action, reason) = ("write", "cut".to_owned());
    match end {
        End::Unknown => KvError::Unknown { action, reason },
        _ => KvError::Unavailable { action, reason },
    }
}

macro_rules! cut {
    ($cut:expr, $does:expr, $error:expr) => {{
        let cut = $cut;
        if cut.over() && matches!(cut.end, End::DeadBefore | End::DeadAfter) {
            return std::future::pending().await;
        }
        if !cut.last() {
            return $does;
        }
        match cut.end {
            End::Refused => Err($error),
            End::Unknown => {
                let _ = $does;
                Err($error)
            }
            End::DeadBefore => std::future::pending().await,
            End::DeadAfter => {
                let _ = $does;
                std::future::pending().await
            }
        }
    }};
}

#[async_trait]
impl KeyValue for CutKv {
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError> {
        cut!(&self.1, self.0.get_many(keys.clone()).await, kv_error(End::Refused))
    }

    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError> {
        cut!(&self.1, self.0.range(range.clone(), limit, order).await, kv_error(End::Refused))
    }

    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError> {
        cut!(&self.1, self.0.txn(compares.clone(), ops.clone()).await, kv_error(self.1.end))
    }
}

struct CutBlobs(Arc<MemoryBlobs>, Cut);

impl CutBlobs {
    fn error(&self, op: BlobOp, key: &str) -> BlobError {
        let (key, reason) = (key.to_owned(), "cut".to_owned());
        match self.1.end {
            End::Unknown if op.writes() => BlobError::Unknown { op, key, reason },
            _ => BlobError::Unavailable { op, key, reason },
        }
    }
}

#[async_trait]
impl crate::blob::BlobStore for CutBlobs {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<crate::blob::PutOutcome, BlobError> {
        cut!(&self.1, self.0.put(key, bytes.clone(), mode).await, self.error(BlobOp::Put, key))
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        cut!(&self.1, self.0.get(key, max_len).await, self.error(BlobOp::Get, key))
    }

    async fn get_range(&self, key: &str, range: std::ops::Range<u64>) -> Result<Bytes, BlobError> {
        cut!(&self.1, self.0.get_range(key, range.clone()).await, self.error(BlobOp::Get, key))
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        cut!(&self.1, self.0.head(key).await, self.error(BlobOp::Head, key))
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u16,
    ) -> Result<Vec<crate::blob::BlobEntry>, BlobError> {
        cut!(&self.1, self.0.list(prefix, after, limit).await, self.error(BlobOp::List, prefix))
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        cut!(&self.1, self.0.delete(key).await, self.error(BlobOp::Delete, key))
    }
}

/// A world in which one cycle has something to do in each of its steps.
async fn busy_world() -> (World, SnapshotId) {
    let world = World::new().await;
    let node = NodeId::new("node-1").expect("an id");
    let kept = world.snapshot(&[pack(1), pack(2)]).await;
    let purged = world.snapshot(&[pack(3)]).await;
    world.delete(&purged).await;
    world.collect().await;
    world.clock.advance_ms(GRACE_MS);
    world.collect().await;
    world.clock.advance_ms(TOMBSTONE_MS - GRACE_MS);
    let doomed = world.snapshot(&[pack(4)]).await;
    world.delete(&doomed).await;
    world.collect().await;
    world.clock.advance_ms(GRACE_MS);
    // Now: a tombstone to purge, a pack and a manifest to delete, and …
    let condemned = world.snapshot(&[pack(5)]).await;
    world.delete(&condemned).await; // to condemn, to mark
    world.put(&pack_key(&pack(6).id)).await; // to adopt
    world.put(&pack_key(&pack(3).id)).await; // to delete again
    world.catalog.register_writer(&node, crate::catalog::LeaseHolder([1; 16]), 0).await.expect("registers"); // to end
    (world, kept)
}

#[tokio::test(start_paused = true)]
async fn wherever_it_is_stopped_the_next_ones_finish() {
    for end in [End::Refused, End::Unknown, End::DeadBefore, End::DeadAfter] {
        let mut stopped_at = 0;
        loop {
            stopped_at += 1;
            let (world, kept) = busy_world().await;
            let left = Arc::new(AtomicUsize::new(stopped_at));
            let cut = || Cut { left: Arc::clone(&left), end };
            let catalog = Catalog::over_for_tests(Arc::new(CutKv(Arc::clone(&world.kv), cut())), world.clock.clone());
            let blobs = Arc::new(CutBlobs(Arc::clone(&world.memory), cut()));
            let mut collector = Collector::new(catalog, blobs, settings());
            // Virtual time: a process that is dead is given up at once.
            let ran = tokio::time::timeout(std::time::Duration::from_secs(1), collector.collect()).await;
            let whole = left.load(Ordering::SeqCst) > 0;
            assert!(world.has(&pack(1)) && world.has(&pack(2)), "{end:?} at {stopped_at}");
            drop(collector);

            world.clock.advance_ms(LEASE_MS);
            for _ in 0..4 {
                let report = world.collect().await;
                assert_eq!((report.snapshots, report.named_while_leaving), (1, 0), "{end:?} at {stopped_at}");
                world.clock.advance_ms(GRACE_MS);
            }
            world.clock.advance_ms(TOMBSTONE_MS);
            world.collect().await;
            let objects = [pack_key(&pack(1).id), pack_key(&pack(2).id), manifest_key(&kept)].into();
            assert_eq!(world.objects(), objects, "{end:?} at {stopped_at}");
            assert_eq!(world.rows("pack/").len(), 2, "{end:?} at {stopped_at}");
            let rest = ["tombstone/", "orphan/", "writer/", "lease/"].map(|prefix| world.rows(prefix).len());
            assert_eq!(rest, [0; 4], "{end:?} at {stopped_at}");
            if whole {
                assert!(ran.expect("not dead").is_ok());
                assert!(stopped_at > 25, "there is more to stop than {stopped_at} operations");
                break;
            }
        }
    }
}
