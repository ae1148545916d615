//! Writing a snapshot: images and small blobs into packs.
//!
//! ```text
//!   put ──(bounded)──> hash ──> zero?            nothing to store
//!                              known here?       nothing to store
//!                              new ──> compress ──> pack being written ──> cache
//!   ImageWriter::finish ──> changed index pages, root: chunks like any other
//!   Ingest::seal ──> packs synced, published, their locations registered: durable on this node
//! ```
//!
//! Invariants:
//! - inside one ingest a chunk is stored once, whoever puts it how often;
//! - a chunk counts as known only if a pack that holds it is staged here (and then borrowed), is known to be in the blob
//!   store, or is one of the parent's. What merely lies in the cache is not durable and does not count;
//! - nobody but this ingest knows of its packs before [`Ingest::seal`]: one that is dropped, or fails, leaves nothing;
//! - after any failure nothing of the ingest can be used: every later call says so. A panic in a worker is a failure, too;
//! - memory: the chunks in flight, bounded for all ingests of the store together, and 40 bytes per chunk put.
//!
//! Crash before seal: temporary files, removed at the next open. Crash in seal: published packs without a manifest, dropped
//! by [`crate::Store::drop_unreferenced_staging`]. Retry: a new ingest; it stores the same chunks under the same ids.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::blocking::blocking;
use crate::chunk;
use crate::error::StoreError;
use crate::fetch::Fetcher;
use crate::ids::{ChunkId, ChunkNo, DomainKey, PackId};
use crate::index::{self, FANOUT, Geometry, IndexError, Level};
use crate::manifest::{BLOB_PIECE_BYTES, BlobRef, ImageRef, MAX_BLOB_BYTES};
use crate::pack::PackRef;
use crate::reader::ImageReader;
use crate::staging::{FinishedPack, StagedPackWriter};

/// Size and chunking of an image to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpec {
    /// Size, bytes.
    pub size_bytes: u64,
    /// Bytes per chunk: a power of two from 4 KiB to 1 MiB.
    pub chunk_size: u32,
}

/// What [`Ingest::seal`] made durable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sealed {
    /// Every pack that the new snapshot may refer to: for the manifest. Those of the parent first, the new ones last.
    pub packs: Vec<PackRef>,
    /// The packs among them that this ingest wrote. All others must already be live in the catalog.
    pub new_packs: Vec<PackId>,
    /// Chunks of images and blobs that were stored.
    pub chunks_new: u64,
    /// Chunks of images and blobs that were put, not zero, and there already.
    pub chunks_deduplicated: u64,
    /// Compressed bytes stored, index pages included.
    pub bytes_new: u64,
}

/// How an ingest works.
#[derive(Clone)]
pub(crate) struct IngestOptions {
    pub(crate) pack_target_bytes: u64,
    pub(crate) compression_level: i32,
    pub(crate) slots: Arc<Semaphore>,
}

/// Whether a chunk counts in what the client is told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Index,
}

/// A writer for one snapshot. Dropped without [`Ingest::seal`], it leaves nothing.
pub struct Ingest(Arc<Inner>);

struct Inner {
    fetcher: Arc<Fetcher>,
    options: IngestOptions,
    key: DomainKey,
    /// Chunks that this ingest has stored or found.
    settled: Mutex<HashSet<ChunkId>>,
    used: Mutex<UsedPacks>,
    open: Mutex<Option<StagedPackWriter>>,
    finished: Mutex<Vec<FinishedPack>>,
    failure: Mutex<Option<String>>,
    workers: TaskTracker,
    chunks_new: AtomicU64,
    chunks_deduplicated: AtomicU64,
    bytes_new: AtomicU64,
}

/// Packs referred to, in the order in which they came up.
#[derive(Default)]
struct UsedPacks {
    order: Vec<PackRef>,
    ids: HashSet<PackId>,
}

impl UsedPacks {
    fn add(&mut self, pack: PackRef) {
        if self.ids.insert(pack.id) {
            self.order.push(pack);
        }
    }
}

impl Ingest {
    /// `parent_packs`: what the snapshot inherits from; it exists, so its packs do.
    pub(crate) fn new(fetcher: Arc<Fetcher>, options: IngestOptions, key: DomainKey, parent_packs: &[PackRef]) -> Self {
        let inner = Inner {
            fetcher,
            options,
            key,
            settled: Mutex::default(),
            used: Mutex::default(),
            open: Mutex::new(None),
            finished: Mutex::default(),
            failure: Mutex::new(None),
            workers: TaskTracker::new(),
            chunks_new: AtomicU64::new(0),
            chunks_deduplicated: AtomicU64::new(0),
            bytes_new: AtomicU64::new(0),
        };
        inner.inherit(parent_packs);
        Self(Arc::new(inner))
    }

    /// One image of the snapshot. `parent`: the image from which chunks that are not put are inherited, of the same size,
    /// chunking and dedup domain; without one they are zero. What is wrong with `spec` or `parent` shows at the first call.
    pub fn image(&self, spec: ImageSpec, parent: Option<ImageReader>) -> ImageWriter {
        let geometry = Geometry::new(spec.size_bytes, spec.chunk_size);
        let mut mismatch = None;
        if let Some(parent) = &parent {
            if parent.scope().key != self.0.key {
                mismatch = Some("it belongs to another dedup domain");
            } else if parent.geometry() != geometry {
                mismatch = Some("it has another size or chunk size");
            } else {
                self.0.inherit(&parent.scope().packs);
            }
        }
        ImageWriter {
            ingest: Arc::clone(&self.0),
            geometry,
            mismatch,
            parent,
            changes: Arc::default(),
            workers: TaskTracker::new(),
        }
    }

    /// Stores a small opaque blob (device state), and returns what refers to it.
    pub async fn blob(&self, bytes: Bytes) -> Result<BlobRef, StoreError> {
        let size_bytes = bytes.len() as u64;
        if size_bytes > MAX_BLOB_BYTES {
            return Err(StoreError::BlobTooLarge { bytes: size_bytes });
        }
        let mut pieces = Vec::new();
        for start in (0..bytes.len()).step_by(BLOB_PIECE_BYTES) {
            let piece = bytes.slice(start..bytes.len().min(start + BLOB_PIECE_BYTES));
            pieces.push(self.0.store(Kind::Content, piece).await?);
        }
        Ok(BlobRef { size_bytes, pieces })
    }

    /// Makes every chunk durable on this node. Images must be finished before; one that is not contributes nothing that
    /// anybody could refer to.
    pub async fn seal(self) -> Result<Sealed, StoreError> {
        let inner = self.0;
        inner.workers.close();
        inner.workers.wait().await;
        inner.check()?;
        blocking(move || inner.publish()).await
    }
}

impl Inner {
    fn inherit(&self, packs: &[PackRef]) {
        let mut used = self.used.lock();
        for pack in packs {
            self.fetcher.staging.borrow(&pack.id);
            used.add(*pack);
        }
    }

    fn check(&self) -> Result<(), StoreError> {
        match &*self.failure.lock() {
            Some(reason) => Err(StoreError::IngestFailed(reason.clone())),
            None => Ok(()),
        }
    }

    fn fail(&self, reason: impl ToString) {
        self.failure.lock().get_or_insert_with(|| reason.to_string());
    }

    /// Stores a chunk on a worker and waits for it.
    async fn store(self: &Arc<Self>, kind: Kind, plain: Bytes) -> Result<ChunkId, StoreError> {
        self.check()?;
        let slot = Arc::clone(&self.options.slots).acquire_owned().await.expect("never closed");
        let inner = Arc::clone(self);
        // The token keeps `seal` waiting even if the caller goes away.
        let token = self.workers.token();
        let stored = blocking(move || {
            let _held = (slot, token);
            let unfinished = Unfinished(&inner);
            let stored = inner.store_now(kind, &plain);
            if let Err(error) = &stored {
                inner.fail(error);
            }
            unfinished.finished();
            stored
        });
        stored.await
    }

    /// Hashes, deduplicates, compresses, writes. Blocks.
    fn store_now(&self, kind: Kind, plain: &[u8]) -> Result<ChunkId, StoreError> {
        let id = chunk::chunk_id(&self.key, plain);
        if id.is_zero() {
            return Ok(id);
        }
        // Two steps, so that the lock is not held while RocksDB is asked.
        let first = self.settled.lock().insert(id);
        if !first || self.is_known(&id) {
            if kind == Kind::Content {
                self.chunks_deduplicated.fetch_add(1, Ordering::Relaxed);
                self.fetcher.counters.chunks_deduplicated.fetch_add(1, Ordering::Relaxed);
            }
            return Ok(id);
        }
        let frame = chunk::encode(plain, self.options.compression_level)?;
        self.append(id, &frame)?;
        self.fetcher.cache.put(&id, &frame);
        self.bytes_new.fetch_add(frame.len() as u64, Ordering::Relaxed);
        self.fetcher.counters.bytes_new.fetch_add(frame.len() as u64, Ordering::Relaxed);
        if kind == Kind::Content {
            self.chunks_new.fetch_add(1, Ordering::Relaxed);
            self.fetcher.counters.chunks_new.fetch_add(1, Ordering::Relaxed);
        }
        Ok(id)
    }

    /// Whether a pack that is sure to last holds the chunk; if so, the pack is now used.
    fn is_known(&self, id: &ChunkId) -> bool {
        let Fetcher { cache, staging, .. } = &*self.fetcher;
        cache.locations(id).iter().any(|place| {
            if self.used.lock().ids.contains(&place.pack) {
                return true;
            }
            let lasting = staging.borrow(&place.pack) || cache.is_remote(&place.pack);
            let pack = if lasting { cache.pack(&place.pack) } else { None };
            if let Some(pack) = pack {
                self.used.lock().add(pack);
            }
            pack.is_some()
        })
    }

    fn append(&self, id: ChunkId, frame: &[u8]) -> Result<(), StoreError> {
        let full = {
            let mut open = self.open.lock();
            let writer = match &mut *open {
                Some(writer) => writer,
                empty => empty.insert(self.fetcher.staging.create()?),
            };
            writer.append(id, frame)?;
            let full = writer.len() >= self.options.pack_target_bytes || !writer.has_room();
            if full { open.take() } else { None }
        };
        // The sync happens outside the lock: others go on with the next pack.
        if let Some(writer) = full {
            let finished = writer.finish()?;
            self.finished.lock().push(finished);
        }
        Ok(())
    }

    /// Publishes all packs and registers their locations. Blocks.
    fn publish(&self) -> Result<Sealed, StoreError> {
        let Fetcher { cache, staging, .. } = &*self.fetcher;
        let mut finished = std::mem::take(&mut *self.finished.lock());
        if let Some(writer) = self.open.lock().take() {
            finished.push(writer.finish()?);
        }
        let new: Vec<_> = finished.iter().map(|pack| (pack.pack, pack.entries.clone())).collect();
        staging.publish(&mut finished)?;
        let mut used = std::mem::take(&mut *self.used.lock());
        for (pack, entries) in &new {
            cache.register_pack(pack, entries);
            used.add(*pack);
        }
        // Whoever puts into an image after this finds the ingest closed.
        self.fail("it is sealed");
        Ok(Sealed {
            packs: used.order,
            new_packs: new.iter().map(|(pack, _)| pack.id).collect(),
            chunks_new: self.chunks_new.load(Ordering::Relaxed),
            chunks_deduplicated: self.chunks_deduplicated.load(Ordering::Relaxed),
            bytes_new: self.bytes_new.load(Ordering::Relaxed),
        })
    }
}

/// Fails the ingest when a worker ends without saying that it finished: it panicked.
struct Unfinished<'a>(&'a Inner);

impl Unfinished<'_> {
    fn finished(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fail("a worker panicked");
    }
}

/// Chunks put so far: `None` while one is being stored.
type Changes = Mutex<BTreeMap<ChunkNo, Option<ChunkId>>>;

/// Writes one image. May be shared by reference among tasks; [`ImageWriter::finish`] ends it.
pub struct ImageWriter {
    ingest: Arc<Inner>,
    geometry: Result<Geometry, IndexError>,
    mismatch: Option<&'static str>,
    parent: Option<ImageReader>,
    changes: Arc<Changes>,
    workers: TaskTracker,
}

impl ImageWriter {
    fn check(&self) -> Result<Geometry, StoreError> {
        self.ingest.check()?;
        if let Some(reason) = self.mismatch {
            return Err(StoreError::ParentMismatch(reason));
        }
        Ok(self.geometry.clone()?)
    }

    /// Puts one chunk, in any order, from as many tasks as you like, but each chunk once. `plain` has the image's chunk
    /// size, the last chunk maybe less. Returns when the chunk is in the pipeline, and waits while that is full; what goes
    /// wrong later shows at a later call, [`ImageWriter::finish`] at the latest.
    pub async fn put(&self, chunk: ChunkNo, plain: Bytes) -> Result<(), StoreError> {
        let geometry = self.check()?;
        let expected = geometry.chunk_len(chunk);
        if expected != Some(plain.len()) {
            let expected = expected.map(|len| len as u64);
            return Err(StoreError::ChunkLength { chunk, actual: plain.len() as u64, expected });
        }
        let slot = Arc::clone(&self.ingest.options.slots).acquire_owned().await.expect("never closed");
        if self.changes.lock().insert(chunk, None).is_some() {
            let error = StoreError::ChunkTwice { chunk };
            self.ingest.fail(&error);
            return Err(error);
        }
        let (ingest, changes) = (Arc::clone(&self.ingest), Arc::clone(&self.changes));
        let token = self.ingest.workers.token();
        self.workers.spawn_blocking(move || {
            let _held = (slot, token);
            let unfinished = Unfinished(&ingest);
            match ingest.store_now(Kind::Content, &plain) {
                Ok(id) => {
                    changes.lock().insert(chunk, Some(id));
                }
                Err(error) => ingest.fail(error),
            }
            unfinished.finished();
        });
        Ok(())
    }

    /// Waits for all chunks and writes the index: changed pages only, all others are shared with the parent.
    pub async fn finish(self) -> Result<ImageRef, StoreError> {
        let geometry = self.check()?;
        self.workers.close();
        self.workers.wait().await;
        self.ingest.check()?;

        let changes = std::mem::take(&mut *self.changes.lock());
        let mut pages = HashMap::<usize, Vec<(usize, ChunkId)>>::new();
        for (chunk, id) in changes {
            let id = id.expect("a worker that stored nothing has failed the ingest");
            let (page, slot) = index::slot(chunk);
            pages.entry(page).or_default().push((slot, id));
        }
        let mut root = match &self.parent {
            Some(parent) => parent.root().await?.to_vec(),
            None => vec![ChunkId::ZERO; geometry.root_ids()],
        };
        let mut order: Vec<usize> = pages.keys().copied().collect();
        order.sort_unstable();
        for page in order {
            let inherited = match &self.parent {
                Some(parent) => parent.page(page).await?,
                None => None,
            };
            let mut ids = inherited.map_or_else(|| vec![ChunkId::ZERO; FANOUT], |ids| ids.to_vec());
            for (slot, id) in &pages[&page] {
                ids[*slot] = *id;
            }
            root[page] = self.node(Level::Page, &ids).await?;
        }
        let root = self.node(Level::Root, &root).await?;
        Ok(ImageRef { size_bytes: geometry.size_bytes(), chunk_size: geometry.chunk_size(), root })
    }

    async fn node(&self, level: Level, ids: &[ChunkId]) -> Result<ChunkId, StoreError> {
        match index::encode_node(level, ids) {
            Some(node) => self.ingest.store(Kind::Index, node).await,
            None => Ok(ChunkId::ZERO),
        }
    }
}
