//! What a node does unasked: says that it is alive, lets snapshots expire, collects garbage.
//!
//! ```text
//! every 20 s      the writer's lease is renewed: a node that does not is counted as dead, and its commits are refused
//! every minute    retention: expired snapshots go, or are condemned while guests of them run
//! --gc-interval   packs that are mostly dead are rewritten, then one collection (any node's; one at a time works); then
//!                 what is gone is dropped here, too
//! ```
//!
//! Crash and retry: each of them is one conditional transaction after another (see [`snapyard_snapstore::gc`] and the
//! catalog), so it may end anywhere and is simply begun again. Nothing here is remembered across a restart.

use std::sync::Arc;
use std::time::Duration;

use snapyard_snapstore::blob::BlobStore;
use snapyard_snapstore::catalog::Catalog;
use snapyard_snapstore::gc::{self, Collector, GcError, Report, Settings};
use snapyard_snapstore::ids::SnapshotId;
use snapyard_snapstore::repack::{self, Repacked};
use snapyard_snapstore::rewrite::Rewriter;
use tokio::sync::{Mutex, OnceCell};

use crate::error::NodeError;
use crate::node::State;

/// How long a writer that says nothing is taken for alive, and how often it says something.
pub const WRITER_TTL: Duration = Duration::from_secs(120);
const RENEW_EVERY: Duration = Duration::from_secs(20);

/// How often expired snapshots are looked for, and how many are dealt with at a time.
const EXPIRE_EVERY: Duration = Duration::from_secs(60);
const EXPIRE_AT_ONCE: usize = 100;

/// The node's collector, and the bucket it collects in.
pub struct Upkeep {
    catalog: Arc<Catalog>,
    blobs: Arc<dyn BlobStore>,
    settings: Settings,
    collector: Mutex<Collector>,
    claimed: OnceCell<()>,
}

impl Upkeep {
    /// Collects what has been unused for `grace`.
    pub fn new(catalog: Arc<Catalog>, blobs: Arc<dyn BlobStore>, grace: Duration) -> Self {
        let mut settings = Settings::default();
        settings.policy.grace_ms = i64::try_from(grace.as_millis()).unwrap_or(i64::MAX);
        let collector = Collector::new(Arc::clone(&catalog), Arc::clone(&blobs), settings);
        Self { catalog, blobs, settings, collector: Mutex::new(collector), claimed: OnceCell::new() }
    }

    /// Makes sure that the bucket is this deployment's, before anything is put into it.
    pub async fn claim_bucket(&self) -> Result<(), GcError> {
        self.claimed.get_or_try_init(|| gc::owner::claim(&self.catalog, self.blobs.as_ref())).await.copied()
    }
}

/// Whoever rewrites packs on this node.
pub fn rewriter(node: &State) -> Rewriter<'_> {
    Rewriter { store: &node.store, catalog: &node.catalog, writer: &node.writer, node: &node.id }
}

/// Rewrites packs that are mostly dead, unless another node is at it.
async fn repack(node: &State) -> Result<Repacked, NodeError> {
    let done = repack::repack(rewriter(node)).await?.unwrap_or_default();
    if done.snapshots_amended > 0 {
        tracing::info!(?done, "rewrote packs that were mostly dead");
        node.uploads.notify_one();
    }
    Ok(done)
}

/// What one collection would do now.
pub async fn rehearse(node: &State) -> Result<Report, NodeError> {
    let Upkeep { catalog, blobs, settings, .. } = &node.upkeep;
    let settings = Settings { dry_run: true, ..*settings };
    Ok(Collector::new(Arc::clone(catalog), Arc::clone(blobs), settings).collect().await?)
}

/// Rewrites what is mostly dead and collects, now. What is damaged or cannot be had is no reason not to collect: that
/// nothing was rewritten is answered beside the report.
pub async fn collect(node: &State) -> Result<(Result<Repacked, NodeError>, Report), NodeError> {
    let repacked = repack(node).await;
    if let Err(error) = &repacked {
        tracing::warn!(%error, "tried again later");
    }
    let report = node.upkeep.collector.lock().await.collect().await?;
    drop_what_is_gone(node).await?;
    upload_what_is_left(node).await?;
    Ok((repacked, report))
}

/// Packs that no snapshot can use any more leave this node, and those that were avoided by mistake are used again.
async fn drop_what_is_gone(node: &State) -> Result<(), NodeError> {
    let gone = node.catalog.gone_since(0).await?;
    let dropped = node.store.drop_gone(&gone).await?;
    if dropped > 0 {
        tracing::info!(packs = dropped, "dropped here what the collector has deleted");
    }
    node.store.allow_packs(&node.catalog.packs_live(&node.store.avoided_packs()).await?);
    Ok(())
}

/// Packs that a snapshot of another node needs, and this node alone has: their own snapshot was deleted before its upload.
async fn upload_what_is_left(node: &State) -> Result<(), NodeError> {
    let live = node.catalog.packs_live(&node.store.staged_packs()).await?;
    node.upkeep.claim_bucket().await?;
    node.store.upload_staged(&live).await?;
    Ok(())
}

/// Lets snapshots expire until none is left whose time is over.
pub async fn expire(node: &State) -> Result<(), NodeError> {
    loop {
        let expired = node.catalog.expire(EXPIRE_AT_ONCE).await?;
        for id in &expired.removed {
            forget(node, id);
            tracing::info!(snapshot = %id, "expired");
        }
        // Its guests go on, but none is started from it any more.
        expired.condemned.iter().for_each(|id| node.standbys.forget(id));
        if !expired.more {
            return Ok(());
        }
    }
}

/// A snapshot is gone: what this node kept ready of it goes, too.
pub fn forget(node: &State, id: &SnapshotId) {
    node.residency.evict(id);
    node.standbys.forget(id);
}

/// Runs all of it until shutdown.
pub async fn run(node: Arc<State>) {
    let collecting = async {
        match node.config.gc_interval {
            Some(interval) => {
                repeat(&node, interval, "collecting garbage", || async {
                    match collect(&node).await {
                        Err(NodeError::Gc(GcError::Busy | GcError::LeaseLost)) => Ok(()),
                        other => other.map(drop),
                    }
                })
                .await
            }
            None => node.shutdown.cancelled().await,
        }
    };
    let renewing =
        repeat(&node, RENEW_EVERY, "saying that this node is alive", || async { Ok(node.writer.renew().await?) });
    let expiring = repeat(&node, EXPIRE_EVERY, "letting snapshots expire", || expire(&node));
    tokio::join!(collecting, renewing, expiring);
}

/// Does something every `interval`, a tenth earlier or later so that nodes do not march in step. A failure is told, and
/// does not end it.
async fn repeat<F>(node: &State, interval: Duration, what: &str, mut work: impl FnMut() -> F)
where
    F: Future<Output = Result<(), NodeError>>,
{
    loop {
        let jitter = f64::from(node.clock.now_unix_ms().rem_euclid(200) as u32) / 1000.0;
        tokio::select! {
            () = node.shutdown.cancelled() => return,
            () = tokio::time::sleep(interval.mul_f64(0.9 + jitter)) => {}
        }
        if let Err(error) = work().await {
            tracing::warn!(%error, "{what} failed; tried again later");
        }
    }
}
