//! A guest's disk: a base image that is only read, and layers of what the guest wrote on top of it.
//!
//! ```text
//!   write ──▶ active layer                  freeze: the active layer becomes the newest frozen one,
//!             frozen layers, newest first           an empty one takes its place; nothing is copied
//!   read ──▶  base (PageSource, by chunk)
//!                                           FrozenDisk = frozen layers of that instant (pinned) + base
//!   merge, in the background: a frozen layer that no FrozenDisk pins takes in the one above it
//! ```
//!
//! Invariants:
//! - A read finds the newest layer that knows the block; a block that none knows is the base's; past its end: zeros.
//! - A block becomes known after its bytes are in the file. Freezing waits for writes, so a layer never changes after it.
//! - The file of a layer that a [`FrozenDisk`] pins is never written. See [`layer::merge`] for why readers cannot tell.
//! - Bytes of the base that cannot be had are waited for until the deadline, then reported; never guessed.
//!
//! Crash: the files have no names, so nothing is left of a node that dies, and nothing of a disk is to be recovered:
//! what survives is what snapshots hold.

pub mod blocks;
pub mod layer;

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::{RwLock as AsyncRwLock, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};

use crate::image::FillPolicy;
use crate::source::{ChunkData, ChunkNo, Geometry, PageSource, SourceError};
use blocks::{BLOCK_SIZE, BlockMap, BlockState};
use layer::{FrozenLayer, LayerFile, Pinned, merge, merge_candidate};

/// With the active one: three layers.
const FROZEN_KEPT: usize = 2;
const RECENT_BYTES: usize = 1 << 20;

/// A disk operation that did not succeed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiskError {
    /// It reaches beyond the end of the disk.
    #[error("{len} bytes at {offset} are beyond the end of a disk of {size_bytes} bytes")]
    OutOfRange {
        /// Where it begins.
        offset: u64,
        /// Its length.
        len: u64,
        /// The disk's size.
        size_bytes: u64,
    },
    /// The file of a layer failed. What was being written may or may not be there.
    #[error("disk layer: {0}")]
    Layer(#[source] Arc<io::Error>),
    /// A chunk of the base was not to be had before the deadline, or never will be.
    #[error("disk base, chunk {chunk}: {cause}")]
    Base {
        /// The chunk.
        chunk: ChunkNo,
        /// The last failure.
        #[source]
        cause: SourceError,
    },
    /// The base's sizes do not fit the disk.
    #[error("a base of {base_bytes} bytes does not fit a disk of {size_bytes}, or was given twice")]
    Attach {
        /// The base's size.
        base_bytes: u64,
        /// The disk's size.
        size_bytes: u64,
    },
    /// The disk is being taken down.
    #[error("the disk is gone")]
    Gone,
}

impl From<io::Error> for DiskError {
    fn from(cause: io::Error) -> Self {
        Self::Layer(Arc::new(cause))
    }
}

/// Where the bytes of a run of blocks are.
#[derive(Debug)]
enum Place {
    File(Arc<LayerFile>),
    Zeros,
    Base,
}

#[derive(Debug)]
struct Layers {
    active: Arc<LayerFile>,
    map: BlockMap,
    /// Oldest first.
    frozen: Vec<Arc<FrozenLayer>>,
}

/// The writable disk of one guest. The base may arrive after the first request: requests that need it wait.
pub struct Overlay {
    directory: PathBuf,
    size_bytes: u64,
    policy: FillPolicy,
    runtime: Handle,
    base: watch::Sender<Option<Arc<Base>>>,
    layers: RwLock<Layers>,
    /// Shared: writes of whole blocks. Exclusive: whatever must see no other write — parts of blocks, discards, freezing.
    writing: AsyncRwLock<()>,
    merging: Mutex<Option<JoinHandle<()>>>,
    stop_merging: Arc<AtomicBool>,
    this: Weak<Self>,
}

impl fmt::Debug for Overlay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overlay").field("size_bytes", &self.size_bytes).finish_non_exhaustive()
    }
}

impl Overlay {
    /// An empty disk of `size_bytes` without a base; its layers are files in `directory`. `policy` says how long a chunk
    /// of the base is waited for. Background work runs on `runtime`.
    pub fn new(directory: PathBuf, size_bytes: u64, policy: FillPolicy, runtime: Handle) -> io::Result<Arc<Self>> {
        let active = LayerFile::create(&directory, size_bytes)?;
        let map = BlockMap::new(size_bytes.div_ceil(BLOCK_SIZE));
        Ok(Arc::new_cyclic(|this| Self {
            directory,
            size_bytes,
            policy,
            runtime,
            base: watch::Sender::new(None),
            layers: RwLock::new(Layers { active, map, frozen: Vec::new() }),
            writing: AsyncRwLock::new(()),
            merging: Mutex::new(None),
            stop_merging: Arc::new(AtomicBool::new(false)),
            this: this.clone(),
        }))
    }

    /// The disk's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Gives the disk its base, once.
    pub fn attach(&self, base: Arc<dyn PageSource>) -> Result<(), DiskError> {
        let base_bytes = base.size_bytes();
        let refused = DiskError::Attach { base_bytes, size_bytes: self.size_bytes };
        let Ok(geometry) = Geometry::of(&*base) else { return Err(refused) };
        if base_bytes > self.size_bytes {
            return Err(refused);
        }
        let attached = self.base.send_if_modified(|slot| {
            let free = slot.is_none();
            if free {
                *slot = Some(Arc::new(Base::new(base, geometry, self.policy)));
            }
            free
        });
        if attached { Ok(()) } else { Err(refused) }
    }

    /// The chunks of the base that were read, each once, in the order of the first read.
    pub fn touched(&self) -> Vec<ChunkNo> {
        self.base.borrow().as_ref().map(|base| base.touched.lock().order.clone()).unwrap_or_default()
    }

    /// How many layers a read may have to look through.
    pub fn layer_count(&self) -> usize {
        self.layers.read().frozen.len() + 1
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => Err(DiskError::OutOfRange { offset, len, size_bytes: self.size_bytes }),
        }
    }

    async fn base(&self) -> Result<Arc<Base>, DiskError> {
        let mut attached = self.base.subscribe();
        let base = attached.wait_for(Option::is_some).await.map_err(|_| DiskError::Gone)?;
        Ok(Arc::clone(base.as_ref().expect("waited for it")))
    }

    /// Reads `len` bytes at `offset`.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, DiskError> {
        self.check(offset, len)?;
        let places = {
            let layers = self.layers.read();
            places(offset..offset + len, |block| match layers.map.get(block) {
                BlockState::Data => Place::File(Arc::clone(&layers.active)),
                BlockState::Zero => Place::Zeros,
                BlockState::Absent => frozen_place(layers.frozen.iter().rev(), block),
            })
        };
        let (buffer, holes) = gather(offset, len, places).await?;
        if holes.is_empty() { Ok(buffer) } else { self.base().await?.complete(buffer, offset, holes).await }
    }

    /// Writes bytes at `offset`. On an error any part of it may have been written.
    pub async fn write(&self, offset: u64, bytes: Bytes) -> Result<(), DiskError> {
        let len = bytes.len() as u64;
        self.check(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        if offset.is_multiple_of(BLOCK_SIZE) && len.is_multiple_of(BLOCK_SIZE) {
            let _shared = self.writing.read().await;
            return self.write_blocks(offset, bytes).await;
        }
        let _alone = self.writing.write().await;
        let start = offset / BLOCK_SIZE * BLOCK_SIZE;
        let end = (offset + len).next_multiple_of(BLOCK_SIZE);
        let mut whole = vec![0; (end - start) as usize];
        if start < offset {
            whole[..BLOCK_SIZE as usize].copy_from_slice(&self.read(start, BLOCK_SIZE).await?);
        }
        if offset + len < end {
            let last = whole.len() - BLOCK_SIZE as usize;
            whole[last..].copy_from_slice(&self.read(end - BLOCK_SIZE, BLOCK_SIZE).await?);
        }
        let at = (offset - start) as usize;
        whole[at..at + bytes.len()].copy_from_slice(&bytes);
        self.write_blocks(start, whole.into()).await
    }

    /// The caller holds `writing`, so the active layer stays the active one.
    async fn write_blocks(&self, offset: u64, bytes: Bytes) -> Result<(), DiskError> {
        let file = Arc::clone(&self.layers.read().active);
        let blocks = offset / BLOCK_SIZE..(offset + bytes.len() as u64) / BLOCK_SIZE;
        blocking(move || file.write(&bytes, offset)).await?;
        self.layers.write().map.set(blocks, BlockState::Data);
        Ok(())
    }

    /// Makes bytes zeros.
    pub async fn write_zeros(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.check(offset, len)?;
        let whole = whole_blocks(offset, len);
        if whole.is_empty() {
            return self.write(offset, vec![0; len as usize].into()).await;
        }
        let (start, end) = (whole.start * BLOCK_SIZE, whole.end * BLOCK_SIZE);
        self.write(offset, vec![0; (start - offset) as usize].into()).await?;
        self.write(end, vec![0; (offset + len - end) as usize].into()).await?;
        self.zero_blocks(whole).await
    }

    /// Forgets bytes that the guest no longer needs: whole blocks become zeros, parts of blocks stay.
    pub async fn trim(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.check(offset, len)?;
        self.zero_blocks(whole_blocks(offset, len)).await
    }

    async fn zero_blocks(&self, blocks: Range<u64>) -> Result<(), DiskError> {
        if blocks.is_empty() {
            return Ok(());
        }
        let _alone = self.writing.write().await;
        let file = {
            let mut layers = self.layers.write();
            layers.map.set(blocks.clone(), BlockState::Zero);
            Arc::clone(&layers.active)
        };
        blocking(move || {
            file.discard(&blocks);
            Ok(())
        })
        .await
    }

    /// The disk as it is at this instant, for ever. Waits for writes that are under way; copies nothing.
    pub async fn freeze(&self) -> Result<FrozenDisk, DiskError> {
        let base = self.base().await?;
        let _alone = self.writing.write().await;
        let mut layers = self.layers.write();
        if !layers.map.is_empty() {
            let file = LayerFile::create(&self.directory, self.size_bytes)?;
            let file = std::mem::replace(&mut layers.active, file);
            let map = std::mem::replace(&mut layers.map, BlockMap::new(self.size_bytes.div_ceil(BLOCK_SIZE)));
            layers.frozen.push(Arc::new(FrozenLayer { file, map }));
        }
        let pinned = layers.frozen.iter().map(Pinned::new).collect();
        let geometry = Geometry::new(self.size_bytes, base.geometry.chunk_size()).map_err(|_| DiskError::Gone)?;
        // Reading the frozen disk must not count as the guest's reading.
        let base = Arc::new(Base::new(Arc::clone(&base.source), base.geometry, self.policy));
        Ok(FrozenDisk(Arc::new(Frozen { geometry, layers: pinned, base, overlay: self.this.clone() })))
    }

    /// Starts merging what no frozen disk pins, if there is too much of it and no merge runs.
    fn merge_in_background(&self) {
        let mut merging = self.merging.lock();
        let busy = merging.as_ref().is_some_and(|task| !task.is_finished());
        if busy || merge_candidate(&self.layers.read().frozen, FROZEN_KEPT).is_none() {
            return;
        }
        let (this, stop) = (self.this.clone(), Arc::clone(&self.stop_merging));
        *merging = Some(self.runtime.spawn_blocking(move || {
            while let Some(overlay) = this.upgrade() {
                match overlay.merge_once(&stop) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(cause) => {
                        tracing::warn!(%cause, "disk layers could not be merged; they stay as they are");
                        break;
                    }
                }
            }
        }));
    }

    fn merge_once(&self, stop: &AtomicBool) -> io::Result<bool> {
        let (lower, upper) = {
            let layers = self.layers.read();
            let Some(lower) = merge_candidate(&layers.frozen, FROZEN_KEPT) else { return Ok(false) };
            (Arc::clone(&layers.frozen[lower]), Arc::clone(&layers.frozen[lower + 1]))
        };
        let Some(merged) = merge(&lower, &upper, stop)? else { return Ok(false) };
        let mut layers = self.layers.write();
        // Freezing only ever adds newer layers, and one merge runs at a time.
        let at = layers.frozen.iter().position(|layer| Arc::ptr_eq(layer, &lower)).expect("only merges remove layers");
        layers.frozen.splice(at..at + 2, [Arc::new(merged)]);
        Ok(true)
    }

    /// Waits for the merge that runs, if any.
    pub async fn merged(&self) {
        let task = self.merging.lock().take();
        if let Some(task) = task {
            // A merge that panicked has been reported; layers are as good as before it.
            let _ = task.await;
        }
    }

    /// Stops background work and waits for it. Requests still work; nothing is merged any more.
    pub async fn close(&self) {
        self.stop_merging.store(true, Ordering::Relaxed);
        self.merged().await;
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        self.stop_merging.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Touched {
    order: Vec<ChunkNo>,
    seen: HashSet<ChunkNo>,
}

/// The base image, with patience and a memory of the last few chunks: guests read on where they just read.
struct Base {
    source: Arc<dyn PageSource>,
    geometry: Geometry,
    policy: FillPolicy,
    recent: Mutex<VecDeque<(ChunkNo, ChunkData)>>,
    touched: Mutex<Touched>,
}

impl Base {
    fn new(source: Arc<dyn PageSource>, geometry: Geometry, policy: FillPolicy) -> Self {
        Self { source, geometry, policy, recent: Mutex::default(), touched: Mutex::default() }
    }

    /// Fills the holes in `buffer`, which holds the disk from `offset` on. Past the end of the base there are zeros.
    async fn complete(&self, mut buffer: Vec<u8>, offset: u64, holes: Vec<Range<u64>>) -> Result<Vec<u8>, DiskError> {
        for hole in holes {
            let mut at = hole.start;
            let end = hole.end.min(self.geometry.size_bytes());
            while at < end {
                let chunk = self.geometry.chunk_at(at);
                let begin = self.geometry.chunk_offset(chunk);
                let upto = end.min(begin + self.geometry.chunk_len(chunk));
                if let ChunkData::Bytes(bytes) = self.chunk(chunk).await? {
                    let from = &bytes[(at - begin) as usize..(upto - begin) as usize];
                    buffer[(at - offset) as usize..(upto - offset) as usize].copy_from_slice(from);
                }
                at = upto;
            }
        }
        Ok(buffer)
    }

    async fn chunk(&self, chunk: ChunkNo) -> Result<ChunkData, DiskError> {
        if let Some((_, data)) = self.recent.lock().iter().find(|(number, _)| *number == chunk) {
            return Ok(data.clone());
        }
        {
            let mut touched = self.touched.lock();
            if touched.seen.insert(chunk) {
                touched.order.push(chunk);
            }
        }
        let data = self.fetch(chunk).await?;
        let kept = (RECENT_BYTES / self.geometry.chunk_size() as usize).clamp(1, 8);
        let mut recent = self.recent.lock();
        recent.push_front((chunk, data.clone()));
        recent.truncate(kept);
        Ok(data)
    }

    async fn fetch(&self, chunk: ChunkNo) -> Result<ChunkData, DiskError> {
        let started = Instant::now();
        let mut backoff = self.policy.first_backoff;
        let expected = self.geometry.chunk_len(chunk);
        loop {
            let left = self.policy.deadline.saturating_sub(started.elapsed());
            let cause = match timeout(left, self.source.read(chunk)).await {
                Ok(Ok(ChunkData::Bytes(bytes))) if bytes.len() as u64 != expected => {
                    SourceError::new(format!("{} bytes instead of {expected}", bytes.len()))
                }
                Ok(Ok(data)) => return Ok(data),
                Ok(Err(cause)) => cause,
                Err(_) => SourceError::new("no answer before the deadline"),
            };
            if cause.is_lost() || started.elapsed() + backoff >= self.policy.deadline {
                return Err(DiskError::Base { chunk, cause });
            }
            tracing::debug!(%chunk, %cause, "disk chunk not to be had yet");
            sleep(backoff).await;
            backoff = (backoff * 2).min(self.policy.max_backoff);
        }
    }
}

/// A disk at one instant: what a snapshot stores, and what a guest restored from it may use as its base at once.
#[derive(Clone)]
pub struct FrozenDisk(Arc<Frozen>);

struct Frozen {
    geometry: Geometry,
    /// Oldest first.
    layers: Vec<Pinned>,
    base: Arc<Base>,
    overlay: Weak<Overlay>,
}

impl fmt::Debug for FrozenDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrozenDisk").field("geometry", &self.0.geometry).field("layers", &self.0.layers.len()).finish()
    }
}

impl FrozenDisk {
    /// The chunks in which the guest wrote: all others are the base's, bit for bit.
    pub fn dirty_chunks(&self) -> Vec<ChunkNo> {
        let geometry = self.0.geometry;
        let blocks_per_chunk = u64::from(geometry.chunk_size()) / BLOCK_SIZE;
        let mut chunks: Vec<ChunkNo> = self
            .known_runs()
            .flat_map(|(run, _)| run.start / blocks_per_chunk..=(run.end - 1) / blocks_per_chunk)
            .map(ChunkNo)
            .collect();
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }

    /// Bytes that the layers hold. Blocks that were written again after an earlier freeze count twice.
    pub fn layer_bytes(&self) -> u64 {
        self.0.layers.iter().map(|pinned| pinned.layer().map.data_blocks() * BLOCK_SIZE).sum()
    }

    fn known_runs(&self) -> impl Iterator<Item = (Range<u64>, BlockState)> {
        self.0.layers.iter().flat_map(|pinned| pinned.layer().map.known_runs())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.layers.clear();
        if let Some(overlay) = self.overlay.upgrade() {
            overlay.merge_in_background();
        }
    }
}

#[async_trait]
impl PageSource for FrozenDisk {
    fn size_bytes(&self) -> u64 {
        self.0.geometry.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        self.0.geometry.chunk_size()
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let frozen = &self.0;
        let (offset, len) = (frozen.geometry.chunk_offset(chunk), frozen.geometry.chunk_len(chunk));
        if len == 0 {
            return Err(SourceError::lost(format!("the disk has no chunk {chunk}")));
        }
        let newest_first = || frozen.layers.iter().rev().map(Pinned::layer);
        let places = places(offset..offset + len, |block| frozen_place(newest_first(), block));
        if places.iter().all(|(_, place)| matches!(place, Place::Zeros)) {
            return Ok(ChunkData::Zero);
        }
        if places.iter().all(|(_, place)| matches!(place, Place::Base)) && frozen.base.geometry.chunk_len(chunk) == len
        {
            return frozen.base.fetch(chunk).await.map_err(lost_or_late);
        }
        let gathered = gather(offset, len, places).await.map_err(SourceError::new)?;
        let bytes = frozen.base.complete(gathered.0, offset, gathered.1).await.map_err(lost_or_late)?;
        let zeros = bytes.iter().all(|byte| *byte == 0);
        Ok(if zeros { ChunkData::Zero } else { ChunkData::Bytes(bytes.into()) })
    }
}

fn lost_or_late(error: DiskError) -> SourceError {
    match &error {
        DiskError::Base { cause, .. } if cause.is_lost() => SourceError::lost(error),
        _ => SourceError::new(error),
    }
}

fn frozen_place<'a>(newest_first: impl Iterator<Item = &'a Arc<FrozenLayer>>, block: u64) -> Place {
    for layer in newest_first {
        match layer.map.get(block) {
            BlockState::Data => return Place::File(Arc::clone(&layer.file)),
            BlockState::Zero => return Place::Zeros,
            BlockState::Absent => {}
        }
    }
    Place::Base
}

/// Cuts a byte range into runs that come from one place each.
fn places(bytes: Range<u64>, place_of: impl Fn(u64) -> Place) -> Vec<(Range<u64>, Place)> {
    let mut runs: Vec<(Range<u64>, Place)> = Vec::new();
    let mut at = bytes.start;
    while at < bytes.end {
        let block = at / BLOCK_SIZE;
        let end = bytes.end.min((block + 1) * BLOCK_SIZE);
        let place = place_of(block);
        match runs.last_mut() {
            Some((run, before)) if same_place(before, &place) => run.end = end,
            _ => runs.push((at..end, place)),
        }
        at = end;
    }
    runs
}

fn same_place(a: &Place, b: &Place) -> bool {
    match (a, b) {
        (Place::File(a), Place::File(b)) => Arc::ptr_eq(a, b),
        (Place::Zeros, Place::Zeros) | (Place::Base, Place::Base) => true,
        _ => false,
    }
}

/// Reads what the layers hold of the bytes from `offset` on, and says which ranges the base has to fill.
async fn gather(
    offset: u64,
    len: u64,
    places: Vec<(Range<u64>, Place)>,
) -> Result<(Vec<u8>, Vec<Range<u64>>), DiskError> {
    let mut files = Vec::new();
    let mut holes = Vec::new();
    for (run, place) in places {
        match place {
            Place::File(file) => files.push((run, file)),
            Place::Base => holes.push(run),
            Place::Zeros => {}
        }
    }
    let mut buffer = vec![0; len as usize];
    if files.is_empty() {
        return Ok((buffer, holes));
    }
    let buffer = blocking(move || {
        for (run, file) in files {
            file.read(&mut buffer[(run.start - offset) as usize..(run.end - offset) as usize], run.start)?;
        }
        Ok(buffer)
    })
    .await?;
    Ok((buffer, holes))
}

fn whole_blocks(offset: u64, len: u64) -> Range<u64> {
    let (first, end) = (offset.div_ceil(BLOCK_SIZE), (offset + len) / BLOCK_SIZE);
    first..end.max(first)
}

/// Runs file access where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, DiskError> {
    match spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(DiskError::Gone),
    }
}

#[cfg(test)]
mod tests;
