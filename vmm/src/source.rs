//! Where the bytes of an image come from: the seam between this crate and the storage below it.
//!
//! An *image* is a byte space of fixed size (guest RAM or a disk), read by fixed-size chunks. A [`PageSource`] is the
//! read side of one image: a stored snapshot, a raw file, or another [`MemoryImage`](crate::MemoryImage).
//!
//! Invariants that an implementation keeps:
//! - an image never changes: two successful reads of one chunk give the same bytes, for ever;
//! - an answer is complete and verified: what cannot be had is an error, never zeros and never fewer bytes;
//! - [`ChunkData::Zero`] says that the chunk *is* all zeros, not that it is unknown;
//! - reads are safe to repeat, to run side by side and to abandon half-way.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

/// Bytes in a page of guest memory: the unit of faults and of dirtying.
pub const PAGE_SIZE: u64 = 4096;

/// The number of a chunk in an image: chunk `n` covers the bytes from `n * chunk_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkNo(pub u64);

impl fmt::Display for ChunkNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a chunk holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkData {
    /// All zeros.
    Zero,
    /// The bytes of the chunk: [`Geometry::chunk_len`] of them.
    Bytes(Bytes),
}

/// A chunk that could not be read. Nothing is known about its bytes.
///
/// Readers try again until their deadline, unless the source says that this is futile ([`SourceError::lost`]).
#[derive(Debug, Clone, thiserror::Error)]
#[error("{cause}")]
pub struct SourceError {
    #[source]
    cause: Arc<dyn Error + Send + Sync>,
    lost: bool,
}

impl SourceError {
    /// A failure that may pass: the reader tries again.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: Arc::from(cause.into()), lost: false }
    }

    /// A failure for good: trying again is futile.
    pub fn lost(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: Arc::from(cause.into()), lost: true }
    }

    /// Whether trying again is futile.
    pub fn is_lost(&self) -> bool {
        self.lost
    }
}

/// The read side of one image.
#[async_trait]
pub trait PageSource: Send + Sync + 'static {
    /// Size of the image in bytes, a multiple of [`PAGE_SIZE`].
    fn size_bytes(&self) -> u64;

    /// Bytes per chunk: a power of two, a multiple of [`PAGE_SIZE`]. The last chunk may be shorter.
    fn chunk_size(&self) -> u32;

    /// Reads one chunk.
    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError>;

    /// Reads several chunks, in the order asked. Worth overriding where one read of many costs less than many of one.
    async fn read_many(&self, chunks: &[ChunkNo]) -> Result<Vec<ChunkData>, SourceError> {
        let mut read = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            read.push(self.read(*chunk).await?);
        }
        Ok(read)
    }
}

/// An image of zeros: what lies below the memory of a guest that was booted, not restored.
#[derive(Debug, Clone, Copy)]
pub struct ZeroSource(Geometry);

impl ZeroSource {
    /// An image of zeros of this geometry.
    pub fn new(geometry: Geometry) -> Arc<Self> {
        Arc::new(Self(geometry))
    }
}

#[async_trait]
impl PageSource for ZeroSource {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        self.0.chunk_size()
    }

    async fn read(&self, _chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        Ok(ChunkData::Zero)
    }
}

/// A size that no image can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "an image of {size_bytes} bytes in chunks of {chunk_size}: sizes are positive multiples of the page size, chunks a power of two"
)]
pub struct GeometryError {
    /// The size of the image.
    pub size_bytes: u64,
    /// The size of its chunks.
    pub chunk_size: u32,
}

/// The size of an image and how it is cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    size_bytes: u64,
    chunk_size: u32,
}

impl Geometry {
    /// Checks the sizes, both in bytes.
    pub fn new(size_bytes: u64, chunk_size: u32) -> Result<Self, GeometryError> {
        let sound = size_bytes > 0
            && size_bytes.is_multiple_of(PAGE_SIZE)
            && i64::try_from(size_bytes).is_ok()
            && chunk_size.is_power_of_two()
            && u64::from(chunk_size) >= PAGE_SIZE;
        if sound { Ok(Self { size_bytes, chunk_size }) } else { Err(GeometryError { size_bytes, chunk_size }) }
    }

    /// The geometry of a source.
    pub fn of(source: &dyn PageSource) -> Result<Self, GeometryError> {
        Self::new(source.size_bytes(), source.chunk_size())
    }

    /// Size of the image in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes per chunk.
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.chunk_size))
    }

    /// The chunk that holds the byte at `offset`.
    pub fn chunk_at(&self, offset: u64) -> ChunkNo {
        ChunkNo(offset / u64::from(self.chunk_size))
    }

    /// Where a chunk of this image begins, in bytes.
    pub fn chunk_offset(&self, chunk: ChunkNo) -> u64 {
        chunk.0 * u64::from(self.chunk_size)
    }

    /// How many bytes a chunk has: the chunk size, or less for the last one; 0 beyond the end.
    pub fn chunk_len(&self, chunk: ChunkNo) -> u64 {
        if chunk.0 >= self.chunks() {
            return 0;
        }
        u64::from(self.chunk_size).min(self.size_bytes - self.chunk_offset(chunk))
    }
}
