//! The adapter from a stored image to what a VMM reads: [`snapyard_vmm::PageSource`] over
//! [`snapyard_snapstore::ImageReader`], and over a plain file for a template's first boot.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use snapyard_snapstore as store;
use snapyard_vmm::{ChunkData, ChunkNo, PageSource, SourceError};

/// Bytes that a VMM's images are filled by: what one fault brings in. Many of the store's chunks, which are guest pages.
pub const FILL_BYTES: u32 = 64 * 1024;

/// A stored image as a page source.
pub struct StoredImage(store::ImageReader);

impl StoredImage {
    /// Wraps the reader of one image.
    pub fn new(reader: store::ImageReader) -> Arc<Self> {
        Arc::new(Self(reader))
    }
}

#[async_trait]
impl PageSource for StoredImage {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        FILL_BYTES
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let (start, len) = self.range(chunk);
        self.0.read_range(start, len).await.map(from_store).map_err(SourceError::new)
    }

    async fn read_many(&self, chunks: &[ChunkNo]) -> Result<Vec<ChunkData>, SourceError> {
        let ranges: Vec<(u64, usize)> = chunks.iter().map(|chunk| self.range(*chunk)).collect();
        let read = self.0.read_ranges(&ranges).await.map_err(SourceError::new)?;
        Ok(read.into_iter().map(from_store).collect())
    }
}

impl StoredImage {
    /// Where a unit begins in the image, and its bytes.
    fn range(&self, unit: ChunkNo) -> (u64, usize) {
        let start = unit.0 * u64::from(FILL_BYTES);
        (start, u64::from(FILL_BYTES).min(self.0.size_bytes().saturating_sub(start)) as usize)
    }
}

fn from_store(data: store::ChunkData) -> ChunkData {
    match data {
        store::ChunkData::Zero => ChunkData::Zero,
        store::ChunkData::Bytes(bytes) => ChunkData::Bytes(bytes),
    }
}

/// A raw image file as a page source: the root file system that a template boots from.
pub struct FileImage {
    file: Arc<File>,
    size_bytes: u64,
    chunk_size: u32,
}

impl FileImage {
    /// Opens `path`, whose size must be a multiple of `chunk_size`.
    pub fn open(path: &Path, chunk_size: u32) -> std::io::Result<Arc<Self>> {
        let file = File::open(path)?;
        let size_bytes = file.metadata()?.len();
        Ok(Arc::new(Self { file: Arc::new(file), size_bytes, chunk_size }))
    }
}

#[async_trait]
impl PageSource for FileImage {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let file = Arc::clone(&self.file);
        let chunk_size = u64::from(self.chunk_size);
        let offset = chunk.0 * chunk_size;
        let len = chunk_size.min(self.size_bytes.saturating_sub(offset)) as usize;
        let read = tokio::task::spawn_blocking(move || {
            let mut buffer = vec![0; len];
            file.read_exact_at(&mut buffer, offset).map(|()| buffer)
        });
        let buffer = read.await.map_err(SourceError::new)?.map_err(SourceError::new)?;
        if buffer.iter().all(|byte| *byte == 0) {
            Ok(ChunkData::Zero)
        } else {
            Ok(ChunkData::Bytes(Bytes::from(buffer)))
        }
    }
}
