//! Memory images: the bytes of a snapshot that all its guests on this node share.
//!
//! A [`MemoryImage`] is a memfd (or an unlinked file) as large as the guest's memory, empty at first, filled chunk by
//! chunk from its [`PageSource`] when somebody needs a chunk, once for everybody. Guests map a *read-only* descriptor of
//! it privately: what they read is the image's page, what they write is their own.
//!
//! ```text
//!             fill: read from the source, write the pages that are not kept
//!   Empty ───────────────────────────────────────────────────────────────▶ Filled      (bytes in the file)
//!     │  ▲ │ fill failed: every waiter gets the error, the next one tries anew
//!     │  └─┘
//!     └──────────────────── the source says "zeros", nothing kept ───────▶ Zero        (a hole in the file)
//!   Partial = Empty with kept pages (a child image's dirty pages, in the file from the start)
//! ```
//!
//! Invariants:
//! - The state here decides what may be mapped, never the presence of a page in the file: a hostile VMM can map its
//!   read-only descriptor and touch holes, which puts zero pages there. A fill overwrites those before the state changes.
//! - Filled and Zero are final. No byte of a Filled chunk and no kept page is ever written again.
//! - One fill per chunk runs at a time; it is a task of its own, so a caller that goes away stops nothing.
//! - The size of the file is sealed, and its mode allows nobody to open it for writing.
//! - The source may be replaced at any time by another one with the same bytes; reads under way end with the old one.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use memmap2::Mmap;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::capture::DirtyPages;
use crate::pages::{PageRange, PageSet};
use crate::source::{ChunkData, ChunkNo, Geometry, GeometryError, PAGE_SIZE, PageSource, SourceError};

#[cfg(test)]
mod tests;

const EMPTY: u8 = 0;
const FILLED: u8 = 1;
const ZERO: u8 = 2;

/// What holds the bytes of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// Memory: what guests map.
    Memory,
    /// An unlinked sparse file in this directory: a disk image shared by all its guests, never mapped.
    File(PathBuf),
}

/// How long a fill tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FillPolicy {
    /// After this long a chunk that could not be had is given up.
    pub deadline: Duration,
    /// The wait after the first failure; it doubles with each one.
    pub first_backoff: Duration,
    /// The longest wait between two tries.
    pub max_backoff: Duration,
}

impl Default for FillPolicy {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            first_backoff: Duration::from_millis(20),
            max_backoff: Duration::from_secs(1),
        }
    }
}

/// An image that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Its sizes make no sense.
    #[error("image {image}: {cause}")]
    Geometry {
        /// The name of the image.
        image: String,
        /// What is wrong with them.
        #[source]
        cause: GeometryError,
    },
    /// Two things that must have the same sizes have not.
    #[error("image {image}: sizes differ: {expected:?} expected, {found:?} found")]
    Mismatch {
        /// The name of the image.
        image: String,
        /// The geometry of the image.
        expected: Geometry,
        /// The geometry of the other.
        found: Geometry,
    },
    /// The operating system refused.
    #[error("image {image}: {step}: {cause}")]
    Os {
        /// The name of the image.
        image: String,
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
}

/// A chunk that could not be filled. Its state is as before.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FillError {
    /// The source did not give it in time, or never will.
    #[error("image {image}, chunk {chunk}: not to be had ({tries} tries in {waited:?}): {cause}")]
    Source {
        /// The name of the image.
        image: String,
        /// The chunk.
        chunk: ChunkNo,
        /// How often it was tried.
        tries: u32,
        /// How long it was tried.
        waited: Duration,
        /// The last failure.
        #[source]
        cause: SourceError,
    },
    /// The image could not be written or read.
    #[error("image {image}, chunk {chunk}: {cause}")]
    Backing {
        /// The name of the image.
        image: String,
        /// The chunk.
        chunk: ChunkNo,
        /// Why.
        #[source]
        cause: Arc<io::Error>,
    },
    /// The image has no such chunk.
    #[error("image {image} has no chunk {chunk}")]
    OutOfRange {
        /// The name of the image.
        image: String,
        /// The chunk.
        chunk: ChunkNo,
    },
    /// The runtime that filled it was shut down.
    #[error("image {image}, chunk {chunk}: the fill was abandoned")]
    Abandoned {
        /// The name of the image.
        image: String,
        /// The chunk.
        chunk: ChunkNo,
    },
}

/// How the bytes of one page can be had right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// They are in the image's file.
    Present,
    /// They are zeros; the file has a hole.
    Zero,
    /// Not yet: its chunk has to be filled first.
    Missing,
}

type FillResult = Result<(), FillError>;

/// The shared bytes of one snapshot's memory or disk.
pub struct MemoryImage {
    name: String,
    geometry: Geometry,
    file: Arc<File>,
    guest_file: File,
    /// The bytes of an image in memory; `None` on disk, where reading may wait, and an error is not a signal.
    map: Option<Mmap>,
    on_disk: bool,
    states: Box<[AtomicU8]>,
    kept: PageSet,
    source: RwLock<Arc<dyn PageSource>>,
    flights: Mutex<HashMap<ChunkNo, watch::Receiver<Option<FillResult>>>>,
    policy: FillPolicy,
    filled_bytes: AtomicU64,
    source_reads: AtomicU64,
    this: Weak<Self>,
}

impl std::fmt::Debug for MemoryImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryImage")
            .field("name", &self.name)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl MemoryImage {
    /// An empty image over `source`, with the usual patience.
    pub fn new(
        name: impl Into<String>,
        source: Arc<dyn PageSource>,
        backing: Backing,
    ) -> Result<Arc<Self>, ImageError> {
        Self::with_policy(name, source, backing, FillPolicy::default())
    }

    /// An empty image over `source`. The name is for people (it shows in `/proc/PID/maps` and in errors).
    pub fn with_policy(
        name: impl Into<String>,
        source: Arc<dyn PageSource>,
        backing: Backing,
        policy: FillPolicy,
    ) -> Result<Arc<Self>, ImageError> {
        let name = name.into();
        let geometry = Geometry::of(&*source).map_err(|cause| ImageError::Geometry { image: name.clone(), cause })?;
        let os = |step| {
            let image = name.clone();
            move |cause| ImageError::Os { image, step, cause }
        };
        let (file, on_disk) = match backing {
            Backing::Memory => (new_memfd(&name, geometry.size_bytes()).map_err(os("create the memory"))?, false),
            Backing::File(directory) => {
                let file = tempfile::tempfile_in(directory).map_err(os("create the file"))?;
                file.set_len(geometry.size_bytes()).map_err(os("size the file"))?;
                (file, true)
            }
        };
        let kept = PageSet::new(geometry.size_bytes() / PAGE_SIZE);
        Self::over(name, geometry, file, on_disk, kept, source, policy)
    }

    /// The image of a guest that ran on `parent` and wrote the `dirty` pages: those are in it from the start (they *are*
    /// its file), everything else comes from the parent when it is needed.
    ///
    /// The parent is any source of the bytes below: the parent's own [`MemoryImage`], or a stored snapshot.
    pub fn child(
        name: impl Into<String>,
        parent: Arc<dyn PageSource>,
        dirty: DirtyPages,
    ) -> Result<Arc<Self>, ImageError> {
        Self::child_with_policy(name, parent, dirty, FillPolicy::default())
    }

    /// [`MemoryImage::child`] with a patience of its own.
    pub fn child_with_policy(
        name: impl Into<String>,
        parent: Arc<dyn PageSource>,
        dirty: DirtyPages,
        policy: FillPolicy,
    ) -> Result<Arc<Self>, ImageError> {
        let name = name.into();
        let geometry = Geometry::of(&*parent).map_err(|cause| ImageError::Geometry { image: name.clone(), cause })?;
        if dirty.size_bytes() != geometry.size_bytes() {
            let found = Geometry::new(dirty.size_bytes(), geometry.chunk_size())
                .map_err(|cause| ImageError::Geometry { image: name.clone(), cause })?;
            return Err(ImageError::Mismatch { image: name, expected: geometry, found });
        }
        let (file, pages) = dirty.into_parts();
        Self::over(name, geometry, file, false, pages, parent, policy)
    }

    fn over(
        name: String,
        geometry: Geometry,
        file: File,
        on_disk: bool,
        kept: PageSet,
        source: Arc<dyn PageSource>,
        policy: FillPolicy,
    ) -> Result<Arc<Self>, ImageError> {
        // A memfd is born with mode 0777: whoever holds a descriptor could open it again for writing.
        let reopened = file
            .set_permissions(PermissionsExt::from_mode(0o400))
            .and_then(|()| File::open(format!("/proc/self/fd/{}", file.as_raw_fd())));
        let guest_file = match reopened {
            Ok(file) => file,
            Err(cause) => return Err(ImageError::Os { image: name, step: "open it read-only", cause }),
        };
        // SAFETY: the size of a memfd of ours is sealed, so the map never reaches beyond the file; and of the map only filled
        // chunks are read, which nobody writes any more.
        let map = (!on_disk).then(|| unsafe { Mmap::map(&file) }).transpose();
        let map = map.map_err(|cause| ImageError::Os { image: name.clone(), step: "map it", cause })?;
        let states = (0..geometry.chunks())
            .map(|chunk| {
                let range = pages_of(geometry, ChunkNo(chunk));
                AtomicU8::new(if kept.count_in(range) == range.count { FILLED } else { EMPTY })
            })
            .collect();
        Ok(Arc::new_cyclic(|this| Self {
            name,
            geometry,
            file: Arc::new(file),
            guest_file,
            map,
            on_disk,
            states,
            kept,
            source: RwLock::new(source),
            flights: Mutex::new(HashMap::new()),
            policy,
            filled_bytes: AtomicU64::new(0),
            source_reads: AtomicU64::new(0),
            this: this.clone(),
        }))
    }

    /// The name of the image.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its sizes.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The read-only descriptor: the only one that may be given to a VMM.
    pub fn guest_fd(&self) -> BorrowedFd<'_> {
        self.guest_file.as_fd()
    }

    /// Bytes that were read from the source into the image. Zero chunks and a child's dirty pages do not count.
    pub fn filled_bytes(&self) -> u64 {
        self.filled_bytes.load(Ordering::Relaxed)
    }

    /// How many reads the source has answered.
    pub fn source_reads(&self) -> u64 {
        self.source_reads.load(Ordering::Relaxed)
    }

    /// Bytes that the image occupies now.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// The pages of a child image that its guest wrote; empty for an image that is not a child.
    pub fn dirty_pages(&self) -> &PageSet {
        &self.kept
    }

    /// The chunks of a child image that hold a page its guest wrote: all others are the parent's, bit for bit.
    pub fn dirty_chunks(&self) -> Vec<ChunkNo> {
        (0..self.geometry.chunks())
            .map(ChunkNo)
            .filter(|chunk| self.kept.count_in(pages_of(self.geometry, *chunk)) > 0)
            .collect()
    }

    /// Replaces the source by another one with the same bytes: the parent of a child image, say, by the stored child.
    /// Reads that are under way end with the old source.
    pub fn set_source(&self, source: Arc<dyn PageSource>) -> Result<(), ImageError> {
        let found = Geometry::of(&*source).map_err(|cause| ImageError::Geometry { image: self.name.clone(), cause })?;
        if found != self.geometry {
            return Err(ImageError::Mismatch { image: self.name.clone(), expected: self.geometry, found });
        }
        *self.source.write() = source;
        Ok(())
    }

    /// How the bytes of a page (counted from the start of the image) can be had right now.
    pub fn page_state(&self, page: u64) -> PageState {
        if page >= self.geometry.size_bytes() / PAGE_SIZE {
            return PageState::Missing;
        }
        match self.state(self.geometry.chunk_at(page * PAGE_SIZE)) {
            FILLED => PageState::Present,
            ZERO => PageState::Zero,
            _ if self.kept.contains(page) => PageState::Present,
            _ => PageState::Missing,
        }
    }

    /// Whether the chunk is filled, or known to be zeros.
    pub fn is_ready(&self, chunk: ChunkNo) -> bool {
        self.state(chunk) != EMPTY
    }

    fn state(&self, chunk: ChunkNo) -> u8 {
        // Acquire: who sees "filled" sees the bytes that were written before.
        self.states.get(chunk.0 as usize).map_or(EMPTY, |state| state.load(Ordering::Acquire))
    }

    /// Waits until the chunk is ready, filling it if nobody else does. Must be called on a tokio runtime.
    pub async fn ensure(&self, chunk: ChunkNo) -> Result<(), FillError> {
        if self.is_ready(chunk) {
            return Ok(());
        }
        let Some(mut outcome) = self.join_flight(chunk)? else { return Ok(()) };
        match outcome.wait_for(Option::is_some).await {
            Ok(result) => result.clone().expect("waited for it"),
            Err(_) => Err(FillError::Abandoned { image: self.name.clone(), chunk }),
        }
    }

    /// The outcome of the fill of this chunk, which is started if need be; `None` if the chunk is ready.
    fn join_flight(&self, chunk: ChunkNo) -> Result<Option<watch::Receiver<Option<FillResult>>>, FillError> {
        if chunk.0 >= self.geometry.chunks() {
            return Err(FillError::OutOfRange { image: self.name.clone(), chunk });
        }
        Ok(match self.board(chunk) {
            Boarding::Ready => None,
            Boarding::Joined(outcome) => Some(outcome),
            Boarding::First(flight) => {
                let outcome = flight.outcome.subscribe();
                tokio::spawn(flight.run());
                Some(outcome)
            }
        })
    }

    /// Joins the fill of an existing chunk, or enters a new one into the table, which the caller must see to.
    fn board(&self, chunk: ChunkNo) -> Boarding {
        let image = self.this.upgrade().expect("an image is only reached through its Arc");
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&chunk) {
            return Boarding::Joined(flight.clone());
        }
        // A fill sets the state, then leaves the table: with no flight in the table the state is the last word.
        if self.is_ready(chunk) {
            return Boarding::Ready;
        }
        let (outcome, receiver) = watch::channel(None);
        flights.insert(chunk, receiver);
        Boarding::First(Flight { image, chunk, outcome })
    }

    /// Fills those of these chunks that are not ready, with one read of the source; ends when all are, or cannot be had.
    /// Those that others are filling are left to them. Whoever needs one of them meanwhile waits for the same read.
    pub async fn prefetch(&self, chunks: Vec<ChunkNo>) {
        let first = |chunk: ChunkNo| match self.board(chunk) {
            Boarding::First(flight) => Some(flight),
            _ => None,
        };
        let within = chunks.into_iter().filter(|chunk| chunk.0 < self.geometry.chunks() && !self.is_ready(*chunk));
        let flights: Vec<Flight> = within.filter_map(first).collect();
        if !flights.is_empty() {
            // A task of its own, like every fill: a caller that goes away stops nothing.
            let _ = tokio::spawn(Flight::run_together(flights)).await;
        }
    }

    /// The bytes of a chunk, filled first if need be.
    pub async fn chunk_bytes(&self, chunk: ChunkNo) -> Result<ChunkData, FillError> {
        self.ensure(chunk).await?;
        if self.state(chunk) == ZERO {
            return Ok(ChunkData::Zero);
        }
        let (offset, len) = (self.geometry.chunk_offset(chunk), self.geometry.chunk_len(chunk) as usize);
        if let Some(map) = &self.map {
            return Ok(ChunkData::Bytes(Bytes::copy_from_slice(&map[offset as usize..offset as usize + len])));
        }
        let file = Arc::clone(&self.file);
        let read = move || {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, offset).map(|()| ChunkData::Bytes(Bytes::from(bytes)))
        };
        self.blocking(chunk, read).await
    }

    /// Runs file access: in place for memory, on a blocking thread for a file on disk.
    async fn blocking<T: Send + 'static>(
        &self,
        chunk: ChunkNo,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, FillError> {
        let result = if self.on_disk {
            match tokio::task::spawn_blocking(work).await {
                Ok(result) => result,
                Err(_) => return Err(FillError::Abandoned { image: self.name.clone(), chunk }),
            }
        } else {
            work()
        };
        result.map_err(|cause| FillError::Backing { image: self.name.clone(), chunk, cause: Arc::new(cause) })
    }

    /// Reads the chunk from the source, again and again until the deadline, and stores it.
    async fn fill(&self, chunk: ChunkNo) -> FillResult {
        let started = Instant::now();
        let mut backoff = self.policy.first_backoff;
        let mut tries = 0;
        loop {
            let source = Arc::clone(&*self.source.read());
            let left = self.policy.deadline.saturating_sub(started.elapsed());
            tries += 1;
            let cause = match timeout(left, source.read(chunk)).await {
                Ok(Ok(data)) => match self.checked(chunk, data) {
                    Ok(data) => return self.store(chunk, data).await,
                    Err(cause) => cause,
                },
                Ok(Err(cause)) => cause,
                Err(_) => SourceError::new("no answer before the deadline"),
            };
            let waited = started.elapsed();
            if cause.is_lost() || waited + backoff >= self.policy.deadline {
                return Err(FillError::Source { image: self.name.clone(), chunk, tries, waited, cause });
            }
            tracing::debug!(image = %self.name, %chunk, %cause, tries, "chunk not to be had yet");
            sleep(backoff).await;
            backoff = (backoff * 2).min(self.policy.max_backoff);
        }
    }

    /// A source that gives too few or too many bytes has not answered.
    fn checked(&self, chunk: ChunkNo, data: ChunkData) -> Result<ChunkData, SourceError> {
        let expected = self.geometry.chunk_len(chunk);
        match &data {
            ChunkData::Bytes(bytes) if bytes.len() as u64 != expected => {
                Err(SourceError::new(format!("{} bytes instead of {expected}", bytes.len())))
            }
            _ => Ok(data),
        }
    }

    /// Writes what the source gave and is not kept, then lets everybody see the chunk.
    async fn store(&self, chunk: ChunkNo, data: ChunkData) -> FillResult {
        self.source_reads.fetch_add(1, Ordering::Relaxed);
        let pages = pages_of(self.geometry, chunk);
        if data == ChunkData::Zero && self.kept.count_in(pages) == 0 {
            self.states[chunk.0 as usize].store(ZERO, Ordering::Release);
            return Ok(());
        }
        let bytes = match data {
            ChunkData::Bytes(bytes) => bytes,
            // Among kept pages the zeros have to be real: a page of a filled chunk is served from the file.
            ChunkData::Zero => Bytes::from(vec![0; self.geometry.chunk_len(chunk) as usize]),
        };
        let runs = self.kept.runs(pages, false);
        let written: u64 = runs.iter().map(PageRange::len_bytes).sum();
        let (file, begin) = (Arc::clone(&self.file), self.geometry.chunk_offset(chunk));
        let write = move || {
            runs.iter().try_for_each(|run| {
                let at = (run.offset() - begin) as usize;
                file.write_all_at(&bytes[at..at + run.len_bytes() as usize], run.offset())
            })
        };
        self.blocking(chunk, write).await?;
        self.states[chunk.0 as usize].store(FILLED, Ordering::Release);
        self.filled_bytes.fetch_add(written, Ordering::Relaxed);
        Ok(())
    }
}

#[async_trait]
impl PageSource for MemoryImage {
    fn size_bytes(&self) -> u64 {
        self.geometry.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        self.geometry.chunk_size()
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        self.chunk_bytes(chunk).await.map_err(|error| match &error {
            FillError::Source { cause, .. } if cause.is_lost() => SourceError::lost(error),
            FillError::OutOfRange { .. } => SourceError::lost(error),
            _ => SourceError::new(error),
        })
    }
}

/// The one fill of a chunk. Dropped unfinished (runtime gone), it still leaves the table, and its waiters learn of it.
struct Flight {
    image: Arc<MemoryImage>,
    chunk: ChunkNo,
    outcome: watch::Sender<Option<FillResult>>,
}

/// How one comes to a chunk that may not be ready.
enum Boarding {
    Ready,
    /// Somebody fills it.
    Joined(watch::Receiver<Option<FillResult>>),
    /// Nobody did.
    First(Flight),
}

impl Flight {
    async fn run(self) {
        let result = self.image.fill(self.chunk).await;
        self.land(result);
    }

    /// Several of one image, by one read. If that fails, each on its own: a demand may be waiting for it.
    async fn run_together(flights: Vec<Self>) {
        let Some(image) = flights.first().map(|flight| Arc::clone(&flight.image)) else { return };
        let chunks: Vec<ChunkNo> = flights.iter().map(|flight| flight.chunk).collect();
        let source = Arc::clone(&*image.source.read());
        let read = timeout(image.policy.deadline, source.read_many(&chunks)).await;
        let Ok(Ok(read)) = read else {
            flights.into_iter().map(Self::run).collect::<JoinSet<()>>().join_all().await;
            return;
        };
        let mut read = read.into_iter();
        for flight in flights {
            match read.next().map(|data| image.checked(flight.chunk, data)) {
                Some(Ok(data)) => {
                    let result = image.store(flight.chunk, data).await;
                    flight.land(result);
                }
                _ => flight.run().await,
            }
        }
    }

    fn land(self, result: FillResult) {
        if let Err(error) = &result {
            tracing::warn!(image = %self.image.name, chunk = %self.chunk, %error, "fill failed");
        }
        self.image.flights.lock().remove(&self.chunk);
        self.outcome.send_replace(Some(result));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.outcome.borrow().is_none() {
            self.image.flights.lock().remove(&self.chunk);
        }
    }
}

fn pages_of(geometry: Geometry, chunk: ChunkNo) -> PageRange {
    PageRange { first: geometry.chunk_offset(chunk) / PAGE_SIZE, count: geometry.chunk_len(chunk) / PAGE_SIZE }
}

/// A memfd of this size that can neither grow nor shrink.
pub(crate) fn new_memfd(name: &str, size_bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len(size_bytes)?;
    let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}
