//! Reading a stored snapshot, lazily: nothing is fetched before it is asked for.
//!
//! ```text
//!   SnapshotReader ──image()──> ImageReader ──read_run(chunks)──> root (once) ──> index pages (kept) ──> chunks
//! ```
//!
//! Invariants:
//! - an index node is used only after its hash was verified, like any chunk;
//! - what is read has exactly the length of its place in the image;
//! - readers are cheap to clone; clones share the index pages that were read.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::catalog::{Catalog, CatalogError};
use crate::error::ReadError;
use crate::fetch::{Fetcher, Scope};
use crate::ids::{ChunkId, ChunkNo, DomainKey};
use crate::index::{self, FANOUT, Geometry, IndexError, Level};
use crate::manifest::{BLOB_PIECE_BYTES, BlobRef, ImageRef, MAX_BLOB_BYTES, Manifest};

/// Index pages that one image's readers keep: 32 MiB, enough for 4 GiB of chunks of 4 KiB. Beyond that all are dropped and
/// come back from the cache as they are needed.
const PAGES_KEPT: usize = 4096;

/// What a chunk of an image holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkData {
    /// Zeros, and nothing had to be fetched to know it.
    Zero,
    /// The plain bytes: the image's chunk size, or less for the last chunk.
    Bytes(Bytes),
}

/// A stored snapshot.
#[derive(Clone)]
pub struct SnapshotReader {
    fetcher: Arc<Fetcher>,
    scope: Arc<Scope>,
    manifest: Arc<Manifest>,
}

impl SnapshotReader {
    pub(crate) fn new(fetcher: Arc<Fetcher>, scope: Arc<Scope>, manifest: Arc<Manifest>) -> Self {
        Self { fetcher, scope, manifest }
    }

    /// The same, for as long as it is used: when its chunks are moved into other packs, `catalog` is asked for them.
    pub fn following(self, catalog: Arc<Catalog>) -> Self {
        let scope = self.scope.following(catalog, self.manifest.snapshot_id);
        Self { scope, ..self }
    }

    /// The manifest it was opened with.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    pub(crate) fn key(&self) -> DomainKey {
        self.scope.key
    }

    /// The manifest with the packs that the catalog names now: what a child inherits.
    pub async fn current(&self) -> Result<Manifest, CatalogError> {
        self.scope.refresh().await?;
        Ok(Manifest { packs: self.scope.packs().refs.clone(), ..(*self.manifest).clone() })
    }

    /// A reader of one of the snapshot's images. An impossible size or chunking shows at the first read.
    pub fn image(&self, image: &ImageRef) -> ImageReader {
        ImageReader(Arc::new(Image {
            fetcher: Arc::clone(&self.fetcher),
            scope: Arc::clone(&self.scope),
            image: *image,
            geometry: image.geometry(),
            root: OnceCell::new(),
            pages: Mutex::new(HashMap::new()),
        }))
    }

    /// A small blob, whole.
    pub async fn blob(&self, blob: &BlobRef) -> Result<Bytes, ReadError> {
        let mut rest = usize::try_from(blob.size_bytes.min(MAX_BLOB_BYTES)).expect("capped");
        let mut out = BytesMut::with_capacity(rest);
        for piece in &blob.pieces {
            let expected = rest.min(BLOB_PIECE_BYTES);
            if piece.is_zero() {
                out.resize(out.len() + expected, 0);
            } else {
                out.extend_from_slice(&exact(*piece, self.fetcher.fetch(&self.scope, *piece).await?, expected)?);
            }
            rest -= expected;
        }
        if out.len() as u64 == blob.size_bytes {
            Ok(out.freeze())
        } else {
            let chunk = blob.pieces.last().copied().unwrap_or(ChunkId::ZERO);
            Err(ReadError::Length { chunk, actual: out.len() as u64, expected: blob.size_bytes })
        }
    }
}

fn exact(chunk: ChunkId, plain: Bytes, expected: usize) -> Result<Bytes, ReadError> {
    if plain.len() == expected {
        Ok(plain)
    } else {
        Err(ReadError::Length { chunk, actual: plain.len() as u64, expected: expected as u64 })
    }
}

struct Image {
    fetcher: Arc<Fetcher>,
    scope: Arc<Scope>,
    image: ImageRef,
    geometry: Result<Geometry, IndexError>,
    root: OnceCell<Arc<[ChunkId]>>,
    pages: Mutex<HashMap<usize, Arc<[ChunkId]>>>,
}

/// One image of a stored snapshot.
#[derive(Clone)]
pub struct ImageReader(Arc<Image>);

impl ImageReader {
    /// Size of the image, bytes.
    pub fn size_bytes(&self) -> u64 {
        self.0.image.size_bytes
    }

    /// Bytes per chunk; the last chunk may be shorter.
    pub fn chunk_size(&self) -> u32 {
        self.0.image.chunk_size
    }

    /// What this reads.
    pub fn image_ref(&self) -> &ImageRef {
        &self.0.image
    }

    pub(crate) fn scope(&self) -> &Arc<Scope> {
        &self.0.scope
    }

    pub(crate) fn geometry(&self) -> Result<Geometry, IndexError> {
        self.0.geometry.clone()
    }

    /// One chunk, verified. Many readers of the same chunk at once share one fetch.
    pub async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, ReadError> {
        let mut run = self.read_run(chunk, 1).await?;
        Ok(run.pop().expect("one was asked for"))
    }

    /// `count` chunks beginning with `first`, verified: much cheaper than one by one.
    pub async fn read_run(&self, first: ChunkNo, count: usize) -> Result<Vec<ChunkData>, ReadError> {
        self.read_many((first.0..).take(count).map(ChunkNo)).await
    }

    /// Chunks from anywhere in the image, verified, in the order asked. What lies together in the store is fetched together.
    pub async fn read_many(&self, chunks: impl IntoIterator<Item = ChunkNo>) -> Result<Vec<ChunkData>, ReadError> {
        let geometry = self.geometry()?;
        let chunks: Vec<ChunkNo> = chunks.into_iter().collect();
        self.load_pages(&chunks).await?;
        let (mut ids, mut lens) = (Vec::with_capacity(chunks.len()), Vec::with_capacity(chunks.len()));
        for chunk in chunks {
            let id = self.chunk_id(chunk).await?;
            // What a restore touches, in order: benchmarks record working sets from it.
            tracing::trace!(image = %self.0.image.root, chunk = chunk.0, zero = id.is_zero(), "read");
            ids.push(id);
            lens.push(geometry.chunk_len(chunk).expect("chunk_id checked the number"));
        }
        let wanted: Vec<ChunkId> = ids.iter().filter(|id| !id.is_zero()).copied().collect();
        let mut fetched = match wanted.is_empty() {
            true => Vec::new(),
            false => self.0.fetcher.fetch_run(&self.0.scope, wanted).await?,
        }
        .into_iter();
        let data = ids.into_iter().zip(lens).map(|(id, len)| match id.is_zero() {
            true => Ok(ChunkData::Zero),
            false => exact(id, fetched.next().expect("as many as were asked for"), len).map(ChunkData::Bytes),
        });
        data.collect()
    }

    /// A range of the image that begins and ends at chunks (or ends where the image does); `Zero` when all of it is zero.
    pub async fn read_range(&self, start: u64, len: usize) -> Result<ChunkData, ReadError> {
        let mut read = self.read_ranges(&[(start, len)]).await?;
        Ok(read.pop().expect("one was asked for"))
    }

    /// Such ranges from anywhere in the image, in the order asked. What lies together in the store is fetched together.
    pub async fn read_ranges(&self, ranges: &[(u64, usize)]) -> Result<Vec<ChunkData>, ReadError> {
        let size = u64::from(self.chunk_size()).max(1);
        let chunks_of = |(start, len): (u64, usize)| (start / size..).take((len as u64).div_ceil(size) as usize);
        let mut chunks =
            self.read_many(ranges.iter().flat_map(|range| chunks_of(*range)).map(ChunkNo)).await?.into_iter();
        let joined = ranges.iter().map(|range| {
            let run: Vec<ChunkData> = chunks.by_ref().take(chunks_of(*range).count()).collect();
            join(run, size as usize, range.1)
        });
        Ok(joined.collect())
    }

    /// The id of one chunk, from the index; the chunk itself is not fetched.
    pub async fn chunk_id(&self, chunk: ChunkNo) -> Result<ChunkId, ReadError> {
        let geometry = self.geometry()?;
        if geometry.chunk_len(chunk).is_none() {
            return Err(ReadError::OutOfRange { chunk, chunks: geometry.chunks() });
        }
        let (page, slot) = index::slot(chunk);
        Ok(self.page(page).await?.map_or(ChunkId::ZERO, |ids| ids[slot]))
    }

    /// The ids of all index pages.
    pub(crate) async fn root(&self) -> Result<Arc<[ChunkId]>, ReadError> {
        self.0.root.get_or_try_init(|| self.load_root()).await.cloned()
    }

    async fn load_root(&self) -> Result<Arc<[ChunkId]>, ReadError> {
        let ids = self.geometry()?.root_ids();
        match self.0.image.root {
            root if root.is_zero() => Ok(vec![ChunkId::ZERO; ids].into()),
            root => self.node(Level::Root, ids, root).await,
        }
    }

    /// The ids of one index page; `None` when all are zero. The page must exist.
    pub(crate) async fn page(&self, page: usize) -> Result<Option<Arc<[ChunkId]>>, ReadError> {
        if let Some(ids) = self.0.pages.lock().get(&page) {
            return Ok(Some(Arc::clone(ids)));
        }
        let id = self.root().await?[page];
        if id.is_zero() {
            return Ok(None);
        }
        let ids = self.node(Level::Page, FANOUT, id).await?;
        self.keep_page(page, Arc::clone(&ids));
        Ok(Some(ids))
    }

    /// Brings in the index pages of these chunks that are not here yet, all at once. Chunks beyond the end are passed over.
    async fn load_pages(&self, chunks: &[ChunkNo]) -> Result<(), ReadError> {
        let mut pages: Vec<usize> = chunks.iter().map(|chunk| index::slot(*chunk).0).collect();
        pages.dedup();
        pages.sort_unstable();
        pages.dedup();
        {
            let known = self.0.pages.lock();
            pages.retain(|page| !known.contains_key(page));
        }
        if pages.len() < 2 {
            return Ok(()); // one is read where it is needed
        }
        let root = self.root().await?;
        let wanted: Vec<(usize, ChunkId)> =
            pages.iter().filter_map(|page| Some((*page, *root.get(*page)?))).filter(|(_, id)| !id.is_zero()).collect();
        let nodes = self.0.fetcher.fetch_run(&self.0.scope, wanted.iter().map(|(_, id)| *id).collect()).await?;
        for ((page, _), node) in wanted.into_iter().zip(nodes) {
            self.keep_page(page, index::decode_node(Level::Page, FANOUT, &node)?.into());
        }
        Ok(())
    }

    fn keep_page(&self, page: usize, ids: Arc<[ChunkId]>) {
        let mut pages = self.0.pages.lock();
        if pages.len() >= PAGES_KEPT {
            pages.clear();
        }
        pages.insert(page, ids);
    }

    async fn node(&self, level: Level, ids: usize, id: ChunkId) -> Result<Arc<[ChunkId]>, ReadError> {
        let node = self.0.fetcher.fetch(&self.0.scope, id).await?;
        Ok(index::decode_node(level, ids, &node)?.into())
    }
}

/// Neighbouring chunks of `size` bytes as `len` bytes; `Zero` when all of them are zero.
fn join(run: Vec<ChunkData>, size: usize, len: usize) -> ChunkData {
    if run.iter().all(|chunk| *chunk == ChunkData::Zero) {
        return ChunkData::Zero;
    }
    let mut out = BytesMut::zeroed(len);
    for (place, chunk) in out.chunks_mut(size).zip(run) {
        if let ChunkData::Bytes(bytes) = chunk {
            place.copy_from_slice(&bytes[..place.len()]);
        }
    }
    ChunkData::Bytes(out.freeze())
}
