//! Collections on engines in memory, with a clock that the test turns. This file: what the tests share.

mod crashes;
mod cycles;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use super::policy::Policy;
use super::*;
use crate::blob::faulty::Faulty;
use crate::blob::{BlobStore as _, MemoryBlobs, PutMode, manifest_key, pack_key};
use crate::catalog::kv::{Key, KeyRange, KeyValue};
use crate::catalog::memory::MemoryKv;
use crate::catalog::{Catalog, PackState, RemoteStatus, SnapshotCommit, SnapshotRow};
use crate::clock::ManualClock;
use crate::ids::{ChunkId, NodeId, PackId, TeamId};
use crate::manifest::{HostFacts, ImageRef, MANIFEST_VERSION, Manifest, Shape};
use crate::pack::PackRef;

const GRACE_MS: i64 = 1000;
const TOMBSTONE_MS: i64 = 10_000;
const LEASE_MS: i64 = 600;

struct World {
    kv: Arc<MemoryKv>,
    memory: Arc<MemoryBlobs>,
    blobs: Arc<Faulty>,
    clock: Arc<ManualClock>,
    catalog: Arc<Catalog>,
    next: AtomicU64,
}

fn team() -> TeamId {
    TeamId::new("default").expect("an id")
}

fn pack(number: u64) -> PackRef {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&number.to_be_bytes());
    PackRef { id: PackId(id), size_bytes: 1000, frames: 2, chunks: 10 }
}

fn settings() -> Settings {
    let policy = Policy { grace_ms: GRACE_MS, tombstone_ms: TOMBSTONE_MS };
    Settings { policy, lease_ms: LEASE_MS, dry_run: false }
}

impl World {
    async fn new() -> Self {
        let (kv, memory) = (Arc::new(MemoryKv::new()), Arc::new(MemoryBlobs::new()));
        let clock = Arc::new(ManualClock::new(1_000_000));
        let catalog = Catalog::open(Arc::clone(&kv) as _, clock.clone()).await.expect("opens");
        let blobs = Arc::new(Faulty::new(Arc::clone(&memory) as _));
        Self { kv, memory, blobs, clock, catalog, next: AtomicU64::new(1) }
    }

    fn collector(&self) -> Collector {
        Collector::new(Arc::clone(&self.catalog), Arc::clone(&self.blobs) as _, settings())
    }

    async fn collect(&self) -> Report {
        self.collector().collect().await.expect("collects")
    }

    /// A manifest that names these packs and nothing else.
    fn commit(&self, packs: &[PackRef]) -> SnapshotCommit {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.next.fetch_add(1, Ordering::SeqCst).to_be_bytes());
        let id = SnapshotId::from_random(id);
        let image = ImageRef { size_bytes: 4096, chunk_size: 4096, root: ChunkId::ZERO };
        let manifest = Manifest {
            version: MANIFEST_VERSION,
            snapshot_id: id,
            memory: image,
            disk: image,
            device_state: crate::BlobRef::default(),
            shape: Shape { vcpus: 1, memory_bytes: 4096, disk_bytes: 4096 },
            facts: HostFacts::default(),
            parent: None,
            packs: packs.to_vec(),
            working_set: Vec::new(),
            created_unix_ms: 0,
        };
        let row = SnapshotRow {
            remote_status: RemoteStatus::Ready,
            ..SnapshotRow::new(id, team(), NodeId::new("node-1").expect("an id"), manifest.shape, 0)
        };
        let staged = packs.iter().map(|pack| pack.id).collect();
        SnapshotCommit { row, manifest: manifest.encode(), packs: packs.to_vec(), staged, writer: None }
    }

    async fn put(&self, key: &str) {
        self.memory.put(key, Bytes::from_static(b"object"), PutMode::Overwrite).await.expect("put");
    }

    /// A snapshot with its objects.
    async fn snapshot(&self, packs: &[PackRef]) -> SnapshotId {
        let commit = self.commit(packs);
        self.catalog.commit_snapshot(&commit).await.expect("commits");
        for pack in packs {
            self.put(&pack_key(&pack.id)).await;
        }
        self.put(&manifest_key(&commit.row.id)).await;
        commit.row.id
    }

    async fn delete(&self, id: &SnapshotId) {
        self.catalog.delete_snapshot(&team(), &id.to_string()).await.expect("deletes");
    }

    async fn state(&self, pack: &PackRef) -> Option<PackState> {
        self.catalog.pack(&pack.id).await.expect("reads").map(|row| row.state)
    }

    fn has(&self, pack: &PackRef) -> bool {
        self.memory.keys().contains(&pack_key(&pack.id))
    }

    /// Everything in the bucket but the owner.
    fn objects(&self) -> HashSet<String> {
        self.memory.keys().into_iter().filter(|key| key != owner::OWNER_KEY).collect()
    }

    fn rows(&self, prefix: &str) -> Vec<Key> {
        self.kv.entries(&KeyRange::prefix(prefix.as_bytes())).into_iter().map(|entry| entry.key).collect()
    }
}
