//! A collection among a million chunks and ten thousand snapshots, with a node that goes on storing meanwhile.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde_json::json;
use snapyard_snapstore::blob::{BlobStore, MemoryBlobs};
use snapyard_snapstore::catalog::rocks::RocksKv;
use snapyard_snapstore::catalog::{Catalog, SnapshotCommit, SnapshotRow};
use snapyard_snapstore::census::Census;
use snapyard_snapstore::gc::{Collector, Settings};
use snapyard_snapstore::publish::Writer;
use snapyard_snapstore::{
    ChunkNo, Clock as _, DEFAULT_CHUNK_BYTES, ImageSpec, Manifest, NodeId, PackId, SnapshotId, Store, StoreConfig,
    SystemClock, TeamId,
};

use crate::ours::{Error, noise, of_image, pages};

const CHUNKS: u64 = 1_000_000;
const SNAPSHOTS: u64 = 10_000;
/// Commits at the same time: they share syncs of the log.
const AT_ONCE: u64 = 64;

/// Everything that has to do with it.
struct Deployment {
    catalog: Arc<Catalog>,
    store: Arc<Store>,
    writer: Writer,
    node: NodeId,
    team: TeamId,
}

impl Deployment {
    /// Stores an image of `chunks` chunks from nothing.
    async fn store(&self, chunks: u64, run_of: impl Fn(u64) -> Vec<u8>) -> Result<Manifest, Error> {
        let key = self.catalog.ensure_team(&self.team).await?.dedup_key;
        let ingest = self.store.begin(key, None).await?;
        let spec = ImageSpec { size_bytes: chunks * u64::from(DEFAULT_CHUNK_BYTES), chunk_size: DEFAULT_CHUNK_BYTES };
        let writer = ingest.image(spec, None);
        for first in (0..chunks).step_by(256) {
            let mut run = run_of(first);
            run.truncate(usize::try_from((chunks - first) * u64::from(DEFAULT_CHUNK_BYTES))?);
            writer.put(ChunkNo(first), run.into()).await?;
        }
        let image = writer.finish().await?;
        Ok(of_image(image, ingest.seal().await?.packs))
    }

    async fn commit(&self, manifest: &Manifest) -> Result<(), Error> {
        let row = SnapshotRow::new(
            manifest.snapshot_id,
            self.team.clone(),
            self.node.clone(),
            manifest.shape,
            SystemClock.now_unix_ms(),
        );
        let staged: HashSet<PackId> = self.store.staged_among(&manifest.packs).await;
        let (packs, writer) = (manifest.packs.clone(), Some(self.writer.lease()));
        let commit = SnapshotCommit { row, manifest: manifest.encode(), packs, staged, writer };
        self.catalog.commit_snapshot(&commit).await?;
        Ok(())
    }
}

/// Prints seconds of one collection and of one census.
pub async fn run(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir)?;
    let kv = Arc::new(RocksKv::open(&dir.join("catalog"))?);
    let catalog = Catalog::open(kv, Arc::new(SystemClock)).await?;
    let blobs: Arc<dyn BlobStore> = Arc::new(MemoryBlobs::new());
    let store = Store::open(StoreConfig::new(dir), Arc::clone(&blobs), Arc::new(SystemClock)).await?;
    let (node, team) = (NodeId::new("bench")?, TeamId::new("default")?);
    let writer = Writer::register(Arc::clone(&catalog), node.clone(), 3600 * 1000).await?;
    let deployment = Arc::new(Deployment { catalog, store, writer, node, team });

    let base = deployment.store(CHUNKS, |first| pages(first, 256, 0)).await?;
    deployment.commit(&base).await?;
    deployment.store.upload(&base.snapshot_id, &base).await?;
    // The same content under ten thousand names: each is read, decoded and gone through.
    for first in (1..SNAPSHOTS).step_by(usize::try_from(AT_ONCE)?) {
        let commits = (first..(first + AT_ONCE).min(SNAPSHOTS)).map(|_| {
            let (deployment, manifest) =
                (Arc::clone(&deployment), Manifest { snapshot_id: SnapshotId::random(), ..base.clone() });
            tokio::spawn(async move { deployment.commit(&manifest).await })
        });
        for commit in commits.collect::<Vec<_>>() {
            commit.await??;
        }
    }

    let (stop, stored) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let storing = {
        let (deployment, stop, stored) = (Arc::clone(&deployment), Arc::clone(&stop), Arc::clone(&stored));
        tokio::spawn(async move {
            let mut seed = 0;
            while !stop.load(Ordering::Relaxed) {
                seed += 1;
                let manifest = deployment.store(2048, |first| noise(seed << 20 | first, 1 << 20)).await?;
                deployment.commit(&manifest).await?;
                stored.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<(), Error>(())
        })
    };
    let began = Instant::now();
    let mut collector = Collector::new(Arc::clone(&deployment.catalog), blobs, Settings::default());
    let report = collector.collect().await?;
    let collect_s = began.elapsed().as_secs_f64();
    let stored_meanwhile = stored.load(Ordering::Relaxed);
    let began = Instant::now();
    let census = Census::take(&deployment.store, &deployment.catalog, |_, _| {}).await?;
    let census_s = began.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    storing.await??;
    let figures = json!({
        "collect_s": collect_s,
        "census_s": census_s,
        "chunks": census.reachable().len(),
        "snapshots": report.snapshots,
        "packs": report.used.count,
        "stored_meanwhile": stored_meanwhile,
    });
    println!("{figures}");
    Ok(())
}
