//! The adapter from a stored image to what a VMM reads: [`snapyard_vmm::PageSource`] over
//! [`snapyard_snapstore::ImageReader`], and over a plain file for a template's first boot.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use memmap2::Mmap;
use snapyard_snapstore as store;
use snapyard_vmm::{ChunkData, ChunkNo, PageSource, SourceError};

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
        self.0.chunk_size()
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        match self.0.read(store::ids::ChunkNo(chunk.0)).await {
            Ok(store::ChunkData::Zero) => Ok(ChunkData::Zero),
            Ok(store::ChunkData::Bytes(bytes)) => Ok(ChunkData::Bytes(bytes)),
            Err(error) => Err(SourceError::new(error)),
        }
    }
}

/// A raw image file as a page source: the root file system that a template boots from. Mapped, since the boot and the
/// capture after it read nearly all of it, and the page cache has it from its making.
pub struct FileImage {
    map: Arc<Mmap>,
    chunk_size: u32,
}

impl FileImage {
    /// Opens `path`, whose size must be a multiple of `chunk_size`. The file must be the node's own and stay as it is: a
    /// root file system is finished before it gets its name, and never written again.
    pub fn open(path: &Path, chunk_size: u32) -> std::io::Result<Arc<Self>> {
        let file = File::open(path)?;
        // SAFETY: nobody shortens or changes the file while it is mapped, see above.
        let map = Arc::new(unsafe { Mmap::map(&file) }?);
        Ok(Arc::new(Self { map, chunk_size }))
    }
}

#[async_trait]
impl PageSource for FileImage {
    fn size_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let map = Arc::clone(&self.map);
        let start = (chunk.0 as usize).saturating_mul(self.chunk_size as usize).min(map.len());
        let end = (start + self.chunk_size as usize).min(map.len());
        // Touching the pages may wait for the disk.
        let read = tokio::task::spawn_blocking(move || {
            let bytes = &map[start..end];
            bytes.iter().any(|byte| *byte != 0).then(|| Bytes::copy_from_slice(bytes))
        });
        Ok(read.await.map_err(SourceError::new)?.map_or(ChunkData::Zero, ChunkData::Bytes))
    }
}
