//! The store as a whole, on memory blobs with a script in front. What is shared by the tests below is here.

mod damage;
mod durability;
mod images;
mod sim;
mod upkeep;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::MemoryBlobs;
use crate::blob::faulty::Faulty;
use crate::cache::CacheLimits;
use crate::clock::ManualClock;
use crate::ids::{ChunkNo, DomainKey, SnapshotId};
use crate::manifest::MANIFEST_VERSION;
use crate::{
    BlobRef, ChunkData, HostFacts, ImageReader, ImageRef, ImageSpec, Ingest, Manifest, Sealed, Shape, SnapshotReader,
    Store, StoreConfig,
};

pub(super) const KEY: DomainKey = DomainKey([42; 32]);
pub(super) const CHUNK: u32 = 4096;

/// A node with its blob store. The blob store outlives the node's process and its disk.
pub(super) struct World {
    pub(super) memory: Arc<MemoryBlobs>,
    pub(super) blobs: Arc<Faulty>,
}

impl World {
    pub(super) fn new() -> Self {
        let memory = Arc::new(MemoryBlobs::new());
        Self { blobs: Arc::new(Faulty::new(Arc::clone(&memory) as _)), memory }
    }

    pub(super) async fn node(&self, dir: &Path) -> Arc<Store> {
        let config = StoreConfig {
            pack_target_bytes: 64 * 1024,
            ingest_bytes_in_flight: 16 * 1024,
            cache: CacheLimits { disk_bytes: 1 << 30, block_cache_bytes: 1 << 20, write_buffer_bytes: 4 << 20 },
            ..StoreConfig::new(dir)
        };
        Store::open(config, Arc::clone(&self.blobs) as _, Arc::new(ManualClock::new(77))).await.expect("open")
    }
}

/// What an image holds, as the test knows it: everything else is zero.
#[derive(Debug, Clone, Default)]
pub(super) struct Model {
    pub(super) size_bytes: u64,
    pub(super) chunks: BTreeMap<u64, Bytes>,
}

impl Model {
    pub(super) fn new(chunks: u64) -> Self {
        Self { size_bytes: chunks * u64::from(CHUNK), chunks: BTreeMap::new() }
    }

    pub(super) fn spec(&self) -> ImageSpec {
        ImageSpec { size_bytes: self.size_bytes, chunk_size: CHUNK }
    }

    pub(super) fn count(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(CHUNK))
    }

    pub(super) fn len_of(&self, chunk: u64) -> usize {
        usize::try_from((self.size_bytes - chunk * u64::from(CHUNK)).min(u64::from(CHUNK))).expect("small")
    }

    /// Fills a chunk with noise that depends on `seed` alone; seed 0 is zeros.
    pub(super) fn fill(&mut self, chunk: u64, seed: u64) {
        let bytes = noise(seed, self.len_of(chunk));
        self.chunks.insert(chunk, bytes);
    }
}

pub(super) fn noise(seed: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    if seed != 0 {
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    }
    bytes.into()
}

pub(super) async fn write_image(ingest: &Ingest, changes: &Model, parent: Option<ImageReader>) -> ImageRef {
    let writer = ingest.image(changes.spec(), parent);
    for (chunk, bytes) in &changes.chunks {
        writer.put(ChunkNo(*chunk), bytes.clone()).await.expect("put");
    }
    writer.finish().await.expect("finish")
}

/// A snapshot of one image (as memory and as disk), and what sealing it said.
pub(super) async fn snapshot(
    store: &Arc<Store>,
    changes: &Model,
    parent: Option<&Arc<Manifest>>,
) -> (Arc<Manifest>, Sealed) {
    let ingest = store.begin(KEY, parent.map(|parent| &**parent)).await.expect("begin");
    let inherited = match parent {
        Some(parent) => Some(open(store, parent).await.image(&parent.memory)),
        None => None,
    };
    let image = write_image(&ingest, changes, inherited).await;
    let device_state = ingest.blob(Bytes::from_static(b"device state")).await.expect("blob");
    let sealed = ingest.seal().await.expect("seal");
    (Arc::new(manifest(image, device_state, parent.map(|p| p.snapshot_id), &sealed)), sealed)
}

pub(super) fn manifest(
    image: ImageRef,
    device_state: BlobRef,
    parent: Option<SnapshotId>,
    sealed: &Sealed,
) -> Manifest {
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        snapshot_id: SnapshotId::random(),
        memory: image,
        disk: image,
        device_state,
        shape: Shape { vcpus: 1, memory_bytes: image.size_bytes, disk_bytes: image.size_bytes },
        facts: HostFacts::default(),
        parent,
        packs: sealed.packs.clone(),
        working_set: Vec::new(),
        created_unix_ms: 0,
    };
    Manifest::decode(&manifest.encode()).expect("what is stored is what is tested")
}

pub(super) async fn open(store: &Arc<Store>, manifest: &Arc<Manifest>) -> SnapshotReader {
    store.open_snapshot(KEY, Arc::clone(manifest)).await.expect("open snapshot")
}

pub(super) async fn memory_of(store: &Arc<Store>, manifest: &Arc<Manifest>) -> ImageReader {
    open(store, manifest).await.image(&manifest.memory)
}

/// Reads the whole image and compares it with what it should be.
pub(super) async fn check_image(image: &ImageReader, model: &Model) {
    assert_eq!(image.size_bytes(), model.size_bytes);
    for chunk in 0..model.count() {
        let expected = model.chunks.get(&chunk).cloned().unwrap_or_else(|| noise(0, model.len_of(chunk)));
        match image.read(ChunkNo(chunk)).await.expect("read") {
            ChunkData::Zero => assert!(expected.iter().all(|b| *b == 0), "chunk {chunk} is not zero"),
            ChunkData::Bytes(bytes) => assert_eq!(bytes, expected, "chunk {chunk}"),
        }
    }
}

/// Removes a node's cache, as an operator or a bad disk may at any time. The store must be closed.
pub(super) fn wipe_cache(dir: &Path) {
    std::fs::remove_dir_all(dir.join("cache")).expect("remove the cache");
}
