//! The store of one node: opens the parts, and hands out writers and readers.
//!
//! ```text
//!   <data dir>/cache/     RocksDB: frames, locations          may be lost
//!   <data dir>/staging/   packs not uploaded yet              must not be lost
//!   blob store            packs/<id>, manifests/<uuid>        where everything ends up
//! ```
//!
//! Whoever opens the store holds a lock on the data directory: one process at a time.
//!
//! A snapshot's life: [`Store::begin`], images and blobs, [`Ingest::seal`] (durable on this node), the manifest committed in
//! the catalog (the snapshot exists), [`Store::upload`] (it outlives the node). A crash before the commit leaves orphans in
//! staging, for [`Store::drop_unreferenced_staging`].

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;

use crate::blob::{BlobCounters, BlobStore, Counted, Hedged, MANIFESTS_PREFIX, PACKS_PREFIX, manifest_key};
use crate::blocking::blocking;
use crate::cache::{CacheLimits, ChunkCache};
use crate::clock::Clock;
use crate::error::StoreError;
use crate::fetch::{FetchLimits, Fetcher, Scope};
use crate::ids::{DomainKey, PackId, SnapshotId};
use crate::ingest::{Ingest, IngestOptions, Sealed};
use crate::manifest::{MAX_MANIFEST_BYTES, Manifest};
use crate::pack;
use crate::reader::SnapshotReader;
use crate::staging::Staging;
use crate::stats::{Counters, RemoteUsage, StoreStats};
use crate::upload::{self, UploadReport};

mod leaving;

/// How a store works. [`StoreConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Where cache and staging live.
    pub data_dir: PathBuf,
    /// A pack is sealed when it has reached this many bytes.
    pub pack_target_bytes: u64,
    /// zstd level of chunks.
    pub compression_level: i32,
    /// Plain bytes that all ingests together have in flight.
    pub ingest_bytes_in_flight: u64,
    /// Threads that hash and compress, for all ingests together.
    pub ingest_workers: usize,
    /// Looks at this node, for a run of chunks each, at the same time.
    pub local_reads_at_once: usize,
    /// Reads of the blob store at the same time.
    pub remote_reads_at_once: usize,
    /// Plain bytes of frames kept in memory, for those who read their neighbours next.
    pub memory_bytes: u64,
    /// Limits of the cache.
    pub cache: CacheLimits,
}

impl StoreConfig {
    /// The defaults.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            pack_target_bytes: 16 << 20,
            compression_level: 1,
            ingest_bytes_in_flight: 32 << 20,
            ingest_workers: std::thread::available_parallelism().map_or(2, std::num::NonZero::get),
            local_reads_at_once: 16,
            remote_reads_at_once: 64,
            memory_bytes: 32 << 20,
            cache: CacheLimits { disk_bytes: 20 << 30, block_cache_bytes: 32 << 20, write_buffer_bytes: 32 << 20 },
        }
    }
}

/// The store of one node.
pub struct Store {
    fetcher: Arc<Fetcher>,
    ingest: IngestOptions,
    blob_counters: Arc<BlobCounters>,
    remote: Mutex<RemoteUsage>,
    /// One upload at a time: snapshots share packs, and each upload is parallel in itself.
    uploading: tokio::sync::Mutex<()>,
    clock: Arc<dyn Clock>,
}

impl Store {
    /// Opens cache and staging. `blobs` is where packs and manifests end up; it is not asked anything yet.
    pub async fn open(
        config: StoreConfig,
        blobs: Arc<dyn BlobStore>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, StoreError> {
        let (dir, limits) = (config.data_dir.clone(), config.cache);
        let (cache, staging) = blocking(move || -> Result<_, StoreError> {
            let staging = Staging::open(&dir.join("staging"))?;
            let cache = ChunkCache::open(&dir.join("cache"), limits)?;
            Ok((Arc::new(cache), Arc::new(staging)))
        })
        .await?;
        Ok(Self::of_parts(config, cache, staging, blobs, clock).await)
    }

    /// A store of parts that are open already.
    pub(crate) async fn of_parts(
        config: StoreConfig,
        cache: Arc<ChunkCache>,
        staging: Arc<Staging>,
        blobs: Arc<dyn BlobStore>,
        clock: Arc<dyn Clock>,
    ) -> Arc<Self> {
        let (known, staged) = (Arc::clone(&cache), Arc::clone(&staging));
        blocking(move || register_staged(&known, &staged)).await;
        let blob_counters = Arc::new(BlobCounters::default());
        let blobs = Arc::new(Hedged::new(Arc::new(Counted::new(blobs, Arc::clone(&blob_counters)))));
        let limits = FetchLimits {
            local_at_once: config.local_reads_at_once,
            remote_at_once: config.remote_reads_at_once,
            memory_bytes: config.memory_bytes,
        };
        Arc::new(Self {
            fetcher: Fetcher::new(cache, staging, blobs, Arc::new(Counters::default()), limits),
            ingest: ingest_options(&config),
            blob_counters,
            remote: Mutex::default(),
            uploading: tokio::sync::Mutex::new(()),
            clock,
        })
    }

    /// A writer for one snapshot. `key`: the dedup domain's. `parent`: chunks are deduplicated against its packs too, whose
    /// footers are read if they were not yet; a footer that cannot be had only costs space.
    pub async fn begin(self: &Arc<Self>, key: DomainKey, parent: Option<&Manifest>) -> Result<Ingest, StoreError> {
        let packs = parent.map(|parent| parent.packs.clone()).unwrap_or_default();
        if !packs.is_empty() {
            for (pack, error) in self.fetcher.load_footers(&Scope::new(key, packs.clone())).await {
                tracing::warn!(%pack, %error, "no deduplication against a pack of the parent");
            }
        }
        Ok(Ingest::new(Arc::clone(&self.fetcher), self.ingest.clone(), key, &packs))
    }

    /// A writer for chunks that are copied out of packs: those packs count as unknown.
    pub(crate) fn begin_copy(&self, key: DomainKey, out_of: &HashSet<PackId>) -> Ingest {
        let avoided = self.ingest.avoided.read().union(out_of).copied().collect();
        let options = IngestOptions { avoided: Arc::new(RwLock::new(avoided)), ..self.ingest.clone() };
        Ingest::new(Arc::clone(&self.fetcher), options, key, &[])
    }

    /// A reader of a stored snapshot. Fetches nothing yet; footers of packs are read when a chunk's place is not known.
    pub async fn open_snapshot(
        self: &Arc<Self>,
        key: DomainKey,
        manifest: Arc<Manifest>,
    ) -> Result<SnapshotReader, StoreError> {
        let scope = Scope::new(key, manifest.packs.clone());
        Ok(SnapshotReader::new(Arc::clone(&self.fetcher), scope, manifest))
    }

    /// A snapshot's manifest from the blob store, checked.
    pub async fn manifest_from_blobs(&self, id: &SnapshotId) -> Result<Manifest, StoreError> {
        let bytes = self.fetcher.blobs.get(&manifest_key(id), MAX_MANIFEST_BYTES as u64).await?;
        let manifest = Manifest::decode(&bytes).map_err(|source| StoreError::Manifest { snapshot: *id, source })?;
        if manifest.snapshot_id == *id {
            Ok(manifest)
        } else {
            Err(StoreError::WrongManifest { wanted: *id, found: manifest.snapshot_id })
        }
    }

    /// Uploads what the snapshot needs and the blob store does not have: packs first, then the manifest. May be repeated
    /// and resumed at will; uploads of one store run one after the other.
    pub async fn upload(&self, id: &SnapshotId, manifest: &Manifest) -> Result<UploadReport, StoreError> {
        if manifest.snapshot_id != *id {
            return Err(StoreError::WrongManifest { wanted: *id, found: manifest.snapshot_id });
        }
        let _one = self.uploading.lock().await;
        let report = upload::upload(&self.fetcher, id, manifest).await?;
        tracing::info!(snapshot = %id, ?report, "uploaded");
        Ok(report)
    }

    /// Uploads those of these packs that are staged here, whatever snapshot they are for: one that was deleted before its
    /// upload may have left packs to a snapshot of another node, which sees to its own only. Returns how many there were.
    pub async fn upload_staged(&self, packs: &HashSet<PackId>) -> Result<u64, StoreError> {
        let _one = self.uploading.lock().await;
        let mut sorted: Vec<PackId> = packs.iter().copied().collect();
        sorted.sort_unstable();
        let mut uploaded = 0;
        for pack in sorted {
            let fetcher = Arc::clone(&self.fetcher);
            if let Some((named, _)) = blocking(move || fetcher.staging.footer(&pack)).await? {
                upload::upload_pack(Arc::clone(&self.fetcher), named).await?;
                uploaded += 1;
            }
        }
        Ok(uploaded)
    }

    /// Drops staged packs of earlier processes that no committed manifest names: `keep` has those that one does. Packs that
    /// this process wrote or referred to are spared. Call it once, after opening. Returns how many packs went.
    pub async fn drop_unreferenced_staging(&self, keep: &HashSet<PackId>) -> Result<u64, StoreError> {
        let (fetcher, keep) = (Arc::clone(&self.fetcher), keep.clone());
        Ok(blocking(move || fetcher.staging.drop_unreferenced(&keep, |pack| fetcher.cache.forget_pack(pack))).await?)
    }

    /// Drops the packs of a sealed ingest whose manifest was not committed, and never will be, unless another ingest has
    /// come to refer to them.
    pub async fn discard(&self, sealed: Sealed) -> Result<(), StoreError> {
        let fetcher = Arc::clone(&self.fetcher);
        let forget = move || {
            let Fetcher { cache, staging, .. } = &*fetcher;
            staging.discard(&sealed.new_packs, |pack| cache.forget_pack(pack))
        };
        blocking(forget).await?;
        Ok(())
    }

    /// Asks the blob store what it holds, by listing it. [`Store::stats`] repeats the answer until the next time.
    pub async fn refresh_remote_usage(&self) -> Result<RemoteUsage, StoreError> {
        const PAGE: u16 = 1000;
        let mut usage = RemoteUsage { as_of_unix_ms: self.clock.now_unix_ms(), ..RemoteUsage::default() };
        for prefix in [PACKS_PREFIX, MANIFESTS_PREFIX] {
            let mut after = None;
            loop {
                let page = self.fetcher.blobs.list(prefix, after.as_deref(), PAGE).await?;
                usage.objects += page.len() as u64;
                usage.bytes += page.iter().map(|entry| entry.len).sum::<u64>();
                match page.last() {
                    Some(last) if page.len() == usize::from(PAGE) => after = Some(last.key.clone()),
                    _ => break,
                }
            }
        }
        *self.remote.lock() = usage;
        Ok(usage)
    }

    /// The store's figures.
    pub fn stats(&self) -> StoreStats {
        let Fetcher { cache, staging, counters, .. } = &*self.fetcher;
        let blobs = &self.blob_counters;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        StoreStats {
            chunks: cache.known_chunks(),
            chunks_new: count(&counters.chunks_new),
            chunks_deduplicated: count(&counters.chunks_deduplicated),
            bytes_new: count(&counters.bytes_new),
            cache_bytes: cache.disk_bytes(),
            cache_evicted_bytes: count(&cache.evictions().bytes),
            cache_promoted: count(&cache.evictions().promoted),
            cache_hits: count(&counters.cache_hits),
            cache_misses: count(&counters.cache_misses),
            tier_memory: counters.memory.stats(),
            tier_disk: counters.disk.stats(),
            tier_staged: counters.staged.stats(),
            tier_blob: counters.blob.stats(),
            blob_gets: count(&blobs.gets),
            blob_puts: count(&blobs.puts),
            blob_bytes_read: count(&blobs.bytes_read),
            blob_bytes_written: count(&blobs.bytes_written),
            remote: *self.remote.lock(),
            packs_staged: staging.len(),
            bad_copies: count(&counters.bad_copies) + count(&cache.counters().corrupt_values),
        }
    }

    /// Writes out the cache, so that the next start is quick. The files close when the last reader and writer is dropped.
    pub async fn close(&self) {
        let fetcher = Arc::clone(&self.fetcher);
        blocking(move || fetcher.cache.flush()).await;
    }

    pub(crate) fn fetcher(&self) -> &Arc<Fetcher> {
        &self.fetcher
    }
}

fn ingest_options(config: &StoreConfig) -> IngestOptions {
    let in_flight_kib = u32::try_from(config.ingest_bytes_in_flight / 1024).unwrap_or(u32::MAX).clamp(1, 1 << 24);
    IngestOptions {
        pack_target_bytes: config.pack_target_bytes.clamp(1, pack::MAX_PACK_BYTES),
        compression_level: config.compression_level,
        in_flight: Arc::new(Semaphore::new(in_flight_kib as usize)),
        in_flight_kib,
        workers: Arc::new(Semaphore::new(config.ingest_workers.max(1))),
        avoided: Arc::default(),
    }
}

/// Staged packs are still there when the cache was lost: their chunks must be found again. And what the cache knows of packs
/// that are neither staged nor away is of ingests that a crash ended.
fn register_staged(cache: &ChunkCache, staging: &Staging) {
    for pack in cache.registered() {
        if !staging.contains(&pack) && !cache.is_remote(&pack) {
            cache.forget_pack(&pack);
        }
    }
    for pack in staging.packs() {
        if cache.is_registered(&pack) {
            continue;
        }
        match staging.footer(&pack) {
            Ok(Some((named, frames))) => cache.register_pack(&named, &frames),
            Ok(None) => {}
            Err(error) => tracing::error!(%pack, %error, "a staged pack cannot be read"),
        }
    }
}
