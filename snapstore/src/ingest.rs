//! Writing a snapshot: images and small blobs into packs.
//!
//! ```text
//!   put ──(bounded)──> hash, zero?, known here?      in parallel
//!                        └──> in the order of the puts: new chunks into the open frame
//!                               └──> full frames: compress      in parallel
//!                                      └──> in the order of the frames: pack being written
//!   ImageWriter::finish ──> changed index pages, root: chunks with frames of their own
//!   a full pack ──> synced, its places registered
//!   Ingest::seal ──> all packs published: durable on this node
//! ```
//!
//! Invariants:
//! - inside one ingest a chunk is stored once, whoever puts it how often;
//! - a chunk counts as known only if a pack that holds it is staged here (and then borrowed), is known to be in the blob
//!   store, or is one of the parent's. What merely lies in the cache is not durable and does not count;
//! - packs hold chunks in the order in which they were put, whatever the workers' speed: neighbours stay neighbours;
//! - nobody but this ingest uses its packs before [`Ingest::seal`]: one that is dropped, or fails, leaves nothing;
//! - after any failure nothing of the ingest can be used: every later call says so. A panic in a worker is a failure, too;
//! - memory: the bytes in flight, bounded for all ingests of the store together; some 100 bytes per new chunk of a pack or
//!   two; and the index pages that were put to in part.
//!
//! Crash before seal: temporary files, and places in packs that are nowhere, both removed at the next open. Crash in seal: published packs without a manifest, dropped
//! by [`crate::Store::drop_unreferenced_staging`]. Retry: a new ingest; it stores the same chunks under the same ids.

mod image;
mod pipeline;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use self::pipeline::{Framed, Group, Hashed, Pipeline, Run, TakenIn};
use crate::blocking::blocking;
use crate::chunk;
use crate::error::StoreError;
use crate::fetch::Fetcher;
use crate::ids::{ChunkId, DomainKey, PackId};
use crate::manifest::{BLOB_PIECE_BYTES, BlobRef, MAX_BLOB_BYTES};
use crate::pack::{Content, PackRef};
use crate::reader::ImageReader;
use crate::staging::{FinishedPack, StagedPackWriter};

pub use self::image::{ImageSpec, ImageWriter};

/// What [`Ingest::seal`] made durable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sealed {
    /// Every pack that the new snapshot may refer to: for the manifest. Those of the parent first, the new ones last.
    pub packs: Vec<PackRef>,
    /// The packs among them that this ingest wrote. All others are live in the catalog, or another ingest of this node is
    /// about to commit them; the commit tells.
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
    /// A permit for each KiB in flight.
    pub(crate) in_flight: Arc<Semaphore>,
    pub(crate) in_flight_kib: u32,
    /// A permit for each worker that computes.
    pub(crate) workers: Arc<Semaphore>,
    /// Packs that count as unknown: a commit was refused because of them.
    pub(crate) avoided: Arc<RwLock<HashSet<PackId>>>,
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
    used: Mutex<UsedPacks>,
    pipeline: Pipeline,
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
    /// Written by this ingest, and not published yet.
    own: HashSet<PackId>,
}

impl UsedPacks {
    fn has(&self, pack: &PackId) -> bool {
        self.ids.contains(pack) || self.own.contains(pack)
    }

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
            used: Mutex::default(),
            pipeline: Pipeline::default(),
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
        ImageWriter::new(Arc::clone(&self.0), spec, parent)
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

    /// Takes chunks over from other packs: each as it is, neighbours beside each other. Waits until they are in the pipeline.
    pub(crate) async fn copy(&self, chunks: Vec<Bytes>) -> Result<(), StoreError> {
        self.0.check()?;
        let number = self.0.pipeline.number();
        self.0
            .work(move |inner| {
                let ids = chunks.iter().map(|plain| chunk::chunk_id(&inner.key, plain)).collect();
                let lens: Vec<usize> = chunks.iter().map(Bytes::len).collect();
                let taken = inner.take(number, ids, &lens, chunks.concat().into());
                inner.count(Kind::Content, taken.new, taken.deduplicated);
                taken.full.into_iter().try_for_each(|group| inner.write_group(group))
            })
            .await
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

    /// Runs `work` on a worker. Its failure, or panic, is the ingest's; it is waited for by [`Ingest::seal`] even if the
    /// caller goes away.
    async fn work<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let token = self.workers.token();
        let worker = Arc::clone(&self.options.workers).acquire_owned().await.expect("never closed");
        let inner = Arc::clone(self);
        blocking(move || {
            let _held = (worker, token);
            let unfinished = Unfinished(&inner);
            let done = work(&inner);
            if let Err(error) = &done {
                inner.fail(error);
            }
            unfinished.finished();
            done
        })
        .await
    }

    /// Stores one chunk in a frame of its own and waits for it.
    async fn store(self: &Arc<Self>, kind: Kind, plain: Bytes) -> Result<ChunkId, StoreError> {
        self.check()?;
        self.work(move |inner| inner.store_now(kind, &plain)).await
    }

    /// Stores one chunk in a frame of its own. Blocks.
    fn store_now(&self, kind: Kind, plain: &[u8]) -> Result<ChunkId, StoreError> {
        let id = chunk::chunk_id(&self.key, plain);
        if id.is_zero() {
            return Ok(id);
        }
        let known = self.is_known(&id);
        if self.pipeline.settle(id, known) {
            let len = u32::try_from(plain.len()).expect("pieces and nodes are small");
            self.compress(self.pipeline.number_of_frame(), plain, Content::single(id.short(), len))?;
            self.count(kind, 1, 0);
        } else {
            self.count(kind, 0, 1);
        }
        Ok(id)
    }

    fn count(&self, kind: Kind, new: u64, deduplicated: u64) {
        if kind == Kind::Content {
            let counters = &self.fetcher.counters;
            self.chunks_new.fetch_add(new, Ordering::Relaxed);
            counters.chunks_new.fetch_add(new, Ordering::Relaxed);
            self.chunks_deduplicated.fetch_add(deduplicated, Ordering::Relaxed);
            counters.chunks_deduplicated.fetch_add(deduplicated, Ordering::Relaxed);
        }
    }

    /// Whether a pack that is sure to last holds the chunk; if so, the pack is now used.
    fn is_known(&self, id: &ChunkId) -> bool {
        let Fetcher { cache, staging, .. } = &*self.fetcher;
        cache.places(&id.short()).iter().any(|place| {
            let pack = &place.frame.pack;
            if self.used.lock().has(pack) {
                return true;
            }
            if self.options.avoided.read().contains(pack) {
                return false;
            }
            let lasting = staging.borrow(pack) || cache.is_remote(pack);
            let pack = if lasting { cache.pack(pack) } else { None };
            if let Some(pack) = pack {
                self.used.lock().add(pack);
            }
            pack.is_some()
        })
    }

    /// Takes the chunks of a put, hashed, into the order of the puts. Blocks.
    fn take(&self, number: u64, ids: Vec<ChunkId>, lens: &[usize], plain: Bytes) -> TakenIn {
        let settled = self.pipeline.settled(&ids);
        let chunks = ids.into_iter().zip(lens).zip(settled).map(|((id, len), settled)| Hashed {
            id,
            len: *len,
            stored: id.is_zero() || (!settled && self.is_known(&id)),
        });
        self.pipeline.take_in(number, Run { chunks: chunks.collect(), plain })
    }

    /// Compresses a frame and writes it. Blocks.
    fn write_group(&self, group: Group) -> Result<(), StoreError> {
        self.compress(group.number, &group.plain, group.content)
    }

    fn compress(&self, number: u64, plain: &[u8], content: Content) -> Result<(), StoreError> {
        let frame = chunk::encode(plain, self.options.compression_level)?;
        let mut full = Vec::new();
        self.pipeline.hand_in(number, Framed { frame, content }, |framed| self.write(framed, &mut full))?;
        // The sync happens outside the lock: others go on with the next pack.
        for writer in full {
            self.finish_pack(writer)?;
        }
        Ok(())
    }

    fn write(&self, framed: Framed, full: &mut Vec<StagedPackWriter>) -> Result<(), StoreError> {
        let Framed { frame, content } = framed;
        let mut open = self.open.lock();
        full.extend(open.take_if(|writer| !writer.has_room(frame.len(), content.chunks.len())));
        let writer = match &mut *open {
            Some(writer) => writer,
            empty => empty.insert(self.fetcher.staging.create(crate::random::bytes())?),
        };
        writer.append(&frame, content)?;
        full.extend(open.take_if(|writer| writer.len() >= self.options.pack_target_bytes));
        self.bytes_new.fetch_add(frame.len() as u64, Ordering::Relaxed);
        self.fetcher.counters.bytes_new.fetch_add(frame.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Completes a pack. Its places are registered at once: nobody else takes them for lasting before it is published, and
    /// this ingest need not remember its chunks any longer.
    fn finish_pack(&self, writer: StagedPackWriter) -> Result<(), StoreError> {
        let finished = writer.finish()?;
        self.fetcher.cache.register_pack(&finished.pack, &finished.frames);
        self.used.lock().own.insert(finished.pack.id);
        self.pipeline.retire(finished.frames.iter().flat_map(|frame| &frame.content.chunks).copied().collect());
        self.finished.lock().push(finished);
        Ok(())
    }

    /// Publishes all packs. Blocks.
    fn publish(&self) -> Result<Sealed, StoreError> {
        // Chunks that were copied last; an image has seen to its own.
        if let Some(group) = self.pipeline.flush() {
            self.write_group(group)?;
        }
        if let Some(writer) = self.open.lock().take() {
            self.finish_pack(writer)?;
        }
        let mut finished = std::mem::take(&mut *self.finished.lock());
        let new: Vec<PackRef> = finished.iter().map(|pack| pack.pack).collect();
        if let Err(error) = self.fetcher.staging.publish(&mut finished) {
            // Those that did not get their names: nobody will find them.
            *self.finished.lock() = finished;
            return Err(error.into());
        }
        let mut used = std::mem::take(&mut *self.used.lock());
        for pack in &new {
            used.add(*pack);
        }
        // Whoever puts into an image after this finds the ingest closed.
        self.fail("it is sealed");
        Ok(Sealed {
            packs: used.order,
            new_packs: new.iter().map(|pack| pack.id).collect(),
            chunks_new: self.chunks_new.load(Ordering::Relaxed),
            chunks_deduplicated: self.chunks_deduplicated.load(Ordering::Relaxed),
            bytes_new: self.bytes_new.load(Ordering::Relaxed),
        })
    }
}

impl Drop for Inner {
    /// Packs that were registered and not published never will be.
    fn drop(&mut self) {
        for pack in self.finished.get_mut() {
            self.fetcher.cache.forget_pack(&pack.pack.id);
        }
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
