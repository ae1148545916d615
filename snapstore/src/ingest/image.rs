//! Writing one image of a snapshot: runs of chunks in, its index out.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use super::pipeline::Group;
use super::{Inner, Kind};
use crate::chunk;
use crate::error::StoreError;
use crate::ids::{ChunkId, ChunkNo};
use crate::index::{self, FANOUT, Geometry, IndexError, Level};
use crate::manifest::ImageRef;
use crate::reader::ImageReader;

/// Size and chunking of an image to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpec {
    /// Size, bytes.
    pub size_bytes: u64,
    /// Bytes per chunk: a power of two from 4 KiB to 1 MiB.
    pub chunk_size: u32,
}

/// An index page that was put to in part.
struct OpenPage {
    /// `None` where nothing was put.
    ids: Box<[Option<ChunkId>; FANOUT]>,
    filled: usize,
}

/// Which page, and all its ids.
type CompletePage = (usize, Vec<ChunkId>);

/// What was put so far. A page that is complete is stored at once, so a whole image's index is never in memory.
#[derive(Default)]
struct Changes {
    open: BTreeMap<usize, OpenPage>,
    /// Pages that were put to completely, and what they are stored as (`ZERO` until they are).
    complete: BTreeMap<usize, ChunkId>,
}

impl Changes {
    /// Notes where the ids belong, and answers the pages that are complete now. An id in a place that has one is the
    /// caller's mistake.
    fn note(&mut self, first: ChunkNo, ids: &[ChunkId]) -> Result<Vec<CompletePage>, StoreError> {
        let mut complete = Vec::new();
        for (number, id) in (first.0..).zip(ids) {
            let chunk = ChunkNo(number);
            let (page, slot) = index::slot(chunk);
            if self.complete.contains_key(&page) {
                return Err(StoreError::ChunkTwice { chunk });
            }
            let open = self.open.entry(page).or_insert_with(|| OpenPage { ids: Box::new([None; FANOUT]), filled: 0 });
            if open.ids[slot].replace(*id).is_some() {
                return Err(StoreError::ChunkTwice { chunk });
            }
            open.filled += 1;
            if open.filled == FANOUT {
                complete.push((page, open.ids.iter().flatten().copied().collect()));
                self.open.remove(&page);
                self.complete.insert(page, ChunkId::ZERO);
            }
        }
        Ok(complete)
    }
}

/// Writes one image. May be shared by reference among tasks; [`ImageWriter::finish`] ends it.
pub struct ImageWriter {
    ingest: Arc<Inner>,
    geometry: Result<Geometry, IndexError>,
    mismatch: Option<&'static str>,
    parent: Option<ImageReader>,
    changes: Arc<Mutex<Changes>>,
    workers: TaskTracker,
}

impl ImageWriter {
    pub(super) fn new(ingest: Arc<Inner>, spec: ImageSpec, parent: Option<ImageReader>) -> Self {
        let geometry = Geometry::new(spec.size_bytes, spec.chunk_size);
        let mut mismatch = None;
        if let Some(parent) = &parent {
            if parent.scope().key != ingest.key {
                mismatch = Some("it belongs to another dedup domain");
            } else if parent.geometry() != geometry {
                mismatch = Some("it has another size or chunk size");
            } else {
                ingest.inherit(&parent.scope().packs().refs);
            }
        }
        Self { ingest, geometry, mismatch, parent, changes: Arc::default(), workers: TaskTracker::new() }
    }

    fn check(&self) -> Result<Geometry, StoreError> {
        self.ingest.check()?;
        if let Some(reason) = self.mismatch {
            return Err(StoreError::ParentMismatch(reason));
        }
        Ok(self.geometry.clone()?)
    }

    /// Puts a run of whole chunks that begins with `first`; runs may come in any order, from as many tasks as you like, but
    /// each chunk once. Runs that are put one after the other are stored beside each other; 64 KiB to 1 MiB suit best.
    ///
    /// Returns when the run is in the pipeline, and waits while that is full; what goes wrong later shows at a later call,
    /// [`ImageWriter::finish`] at the latest.
    pub async fn put(&self, first: ChunkNo, plain: Bytes) -> Result<(), StoreError> {
        let geometry = self.check()?;
        let lens = run_lens(&geometry, first, plain.len())?;
        let kib =
            u32::try_from(plain.len().div_ceil(1024)).unwrap_or(u32::MAX).clamp(1, self.ingest.options.in_flight_kib);
        let held = Arc::clone(&self.ingest.options.in_flight).acquire_many_owned(kib).await.expect("never closed");
        let number = self.ingest.pipeline.number();
        let (ingest, changes) = (Arc::clone(&self.ingest), Arc::clone(&self.changes));
        // Counted from here on, so that `seal` waits for what was put, even if it has not begun.
        let token = self.ingest.workers.token();
        self.workers.spawn(async move {
            let _token = token;
            // A failure is the ingest's, and shows at its next call.
            let _ = ingest
                .work(move |ingest| {
                    let (groups, pages) = ingest.take_run(number, first, plain, &lens, &changes)?;
                    drop(held);
                    for group in groups {
                        ingest.write_group(group)?;
                    }
                    for (page, ids) in pages {
                        if let Some(node) = index::encode_node(Level::Page, &ids) {
                            let id = ingest.store_now(Kind::Index, &node)?;
                            changes.lock().complete.insert(page, id);
                        }
                    }
                    Ok(())
                })
                .await;
        });
        Ok(())
    }

    /// Waits for all chunks and writes the index: changed pages only, all others are shared with the parent.
    pub async fn finish(self) -> Result<ImageRef, StoreError> {
        let geometry = self.check()?;
        self.workers.close();
        self.workers.wait().await;
        self.ingest.check()?;
        self.ingest
            .work(|ingest| match ingest.pipeline.flush() {
                Some(group) => ingest.write_group(group),
                None => Ok(()),
            })
            .await?;

        let changes = std::mem::take(&mut *self.changes.lock());
        let mut root = match &self.parent {
            Some(parent) => parent.root().await?.to_vec(),
            None => vec![ChunkId::ZERO; geometry.root_ids()],
        };
        for (page, id) in changes.complete {
            root[page] = id;
        }
        for (page, changed) in changes.open {
            let inherited = match &self.parent {
                Some(parent) => parent.page(page).await?,
                None => None,
            };
            let mut ids = inherited.map_or_else(|| vec![ChunkId::ZERO; FANOUT], |ids| ids.to_vec());
            for (slot, id) in changed.ids.iter().enumerate() {
                if let Some(id) = id {
                    ids[slot] = *id;
                }
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

/// The lengths of the chunks of a run of `bytes` bytes.
fn run_lens(geometry: &Geometry, first: ChunkNo, bytes: usize) -> Result<Vec<usize>, StoreError> {
    let mut lens = Vec::with_capacity(bytes / geometry.chunk_size() as usize + 1);
    let (mut rest, mut chunk) = (bytes, first);
    while rest > 0 || lens.is_empty() {
        match geometry.chunk_len(chunk) {
            Some(len) if len <= rest => {
                lens.push(len);
                rest -= len;
            }
            expected => {
                let expected = expected.map(|len| len as u64);
                return Err(StoreError::ChunkLength { chunk, actual: rest as u64, expected });
            }
        }
        chunk = ChunkNo(chunk.0 + 1);
    }
    Ok(lens)
}

impl Inner {
    /// Hashes a run, notes its ids and takes it into the order of the puts. Blocks.
    fn take_run(
        &self,
        number: u64,
        first: ChunkNo,
        plain: Bytes,
        lens: &[usize],
        changes: &Mutex<Changes>,
    ) -> Result<(Vec<Group>, Vec<CompletePage>), StoreError> {
        let mut start = 0;
        let ids: Vec<ChunkId> = lens
            .iter()
            .map(|len| {
                let id = chunk::chunk_id(&self.key, &plain[start..start + len]);
                start += len;
                id
            })
            .collect();
        let pages = changes.lock().note(first, &ids)?;
        let taken = self.take(number, ids, lens, plain);
        self.count(Kind::Content, taken.new, taken.deduplicated);
        Ok((taken.full, pages))
    }
}
