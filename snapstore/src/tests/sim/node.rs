//! A node of a simulation, and what it does: the calls that the node service makes, in any order.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::super::noise;
use super::world::{AdverseBlobs, AdverseKv, Content, SkewedClock, World};
use crate::blob::BlobStore;
use crate::cache::ChunkCache;
use crate::catalog::{Catalog, CatalogError, RemoteStatus, SandboxRow, SandboxState, SnapshotCommit, SnapshotRow};
use crate::gc::policy::Policy;
use crate::gc::{Collector, GcError, Settings, owner};
use crate::ids::{ChunkNo, DomainKey, NodeId, SandboxId, SnapshotId, TeamId};
use crate::manifest::{HostFacts, MANIFEST_VERSION, Shape};
use crate::publish::{Attempt, Outcome, Writer, publish};
use crate::repack::repack;
use crate::rewrite::{RewriteError as Error, Rewriter};
use crate::staging::Staging;
use crate::{ChunkData, ImageSpec, Manifest, ReadError, SnapshotReader, Store, StoreConfig, StoreError};

/// Chunks of each image.
pub(super) const CHUNKS: u64 = 6;
const CHUNK: u32 = 4096;

/// Contents that chunks have: few, so that much is shared.
const CONTENTS: u64 = 10;

pub(super) const GRACE_MS: i64 = 4_000;
const LEASE_MS: i64 = 3_000;

/// A guest: what it was restored from, and what that holds.
struct Guest {
    sandbox: SandboxId,
    reader: SnapshotReader,
    content: Content,
}

pub(super) struct Node {
    world: Arc<World>,
    id: NodeId,
    team: TeamId,
    key: DomainKey,
    pub(super) store: Arc<Store>,
    catalog: Arc<Catalog>,
    blobs: Arc<dyn BlobStore>,
    writer: Writer,
    collector: tokio::sync::Mutex<Collector>,
    guests: Mutex<Vec<Guest>>,
}

pub(super) fn team() -> TeamId {
    TeamId::new("default").expect("an id")
}

fn settings() -> Settings {
    let policy = Policy { grace_ms: GRACE_MS, tombstone_ms: 200_000 };
    Settings { policy, lease_ms: LEASE_MS, dry_run: false }
}

impl Node {
    /// What a start of the node does; fails when it is struck.
    pub(super) async fn boot(
        world: &Arc<World>,
        number: usize,
        dir: &Path,
        cache: &Arc<ChunkCache>,
    ) -> Result<Self, String> {
        let id = NodeId::new(format!("node-{number}")).expect("an id");
        let skew_ms = i64::try_from(world.roll(2_000)).expect("small") - 1_000;
        let clock = Arc::new(SkewedClock { world: Arc::clone(world), skew_ms });
        let kv = Arc::new(AdverseKv(Arc::clone(world)));
        let say = |error: CatalogError| error.to_string();
        let catalog = Catalog::open(kv, clock.clone()).await.map_err(say)?;
        let team = team();
        let key = catalog.ensure_team(&team).await.map_err(say)?.dedup_key;
        let staging = Staging::open(&dir.join("staging")).expect("opens");
        let config = StoreConfig { pack_target_bytes: 8 * 1024, ingest_workers: 2, ..StoreConfig::new(dir) };
        let blobs: Arc<dyn BlobStore> = Arc::new(AdverseBlobs(Arc::clone(world)));
        let store = Store::of_parts(config, Arc::clone(cache), Arc::new(staging), Arc::clone(&blobs), clock).await;
        let writer = Writer::register(Arc::clone(&catalog), id.clone(), LEASE_MS).await.map_err(say)?;
        for row in catalog.sandboxes_of_node(&id).await.map_err(say)? {
            catalog.end_sandbox(&row.team, &row.id).await.map_err(say)?;
        }
        let keep = catalog.packs_kept(&store.staged_packs()).await.map_err(say)?;
        store.drop_unreferenced_staging(&keep).await.expect("drops");
        let collector = tokio::sync::Mutex::new(Collector::new(Arc::clone(&catalog), Arc::clone(&blobs), settings()));
        let world = Arc::clone(world);
        Ok(Self { world, id, team, key, store, catalog, blobs, writer, collector, guests: Mutex::default() })
    }

    /// Does things at random until the process is killed.
    pub(super) async fn live(&self) {
        let task = || async {
            loop {
                self.act().await;
            }
        };
        tokio::join!(task(), task());
    }

    async fn act(&self) {
        match self.world.roll(20) {
            0..=4 => self.snapshot().await,
            5..=6 => self.restore().await,
            7..=8 => self.read().await,
            9 => self.end_guest().await,
            10 => self.delete().await,
            11..=13 => self.upload().await,
            14..=15 => self.collect().await,
            16 => self.repack().await,
            17 => drop(self.catalog.expire(3).await),
            _ => drop(self.writer.renew().await),
        }
    }

    /// A snapshot from nothing, or of a guest.
    async fn snapshot(&self) {
        let parent = {
            let guests = self.guests.lock();
            let at = usize::try_from(self.world.roll(guests.len() as u64 + 1)).expect("small");
            guests.get(at).map(|guest| (guest.sandbox.clone(), guest.reader.clone(), guest.content.clone()))
        };
        let mut content = parent.as_ref().map_or_else(|| vec![0; CHUNKS as usize], |(_, _, content)| content.clone());
        let mut changes = Vec::new();
        for chunk in 0..CHUNKS {
            if self.world.roll(2) == 0 {
                let seed = self.world.roll(CONTENTS);
                content[chunk as usize] = seed;
                changes.push((chunk, seed));
            }
        }
        let id = SnapshotId::from_random(crate::random::bytes());
        self.world.told.lock().begun.insert(id, content.clone());
        let sandbox = parent.as_ref().map(|(sandbox, ..)| sandbox.clone());
        let reader = parent.map(|(_, reader, _)| reader);
        let expires_ms = (self.world.roll(4) == 0)
            .then(|| self.catalog.now_unix_ms() + i64::try_from(self.world.roll(20_000)).expect("small"));
        if expires_ms.is_some() {
            self.world.told.lock().given_up.insert(id);
        }
        let (changes, reader, sandbox) = (&changes, reader.as_ref(), &sandbox);
        let ingest = || async move {
            let inherited = match reader {
                Some(reader) => Some(reader.current().await?),
                None => None,
            };
            let ingest = self.store.begin(self.key, inherited.as_ref()).await?;
            let spec = ImageSpec { size_bytes: CHUNKS * u64::from(CHUNK), chunk_size: CHUNK };
            let parent = reader.map(|reader| reader.image(&reader.manifest().memory));
            let writer = ingest.image(spec, parent);
            for (chunk, seed) in changes {
                writer.put(ChunkNo(*chunk), noise(*seed, CHUNK as usize)).await?;
            }
            let memory = writer.finish().await?;
            let sealed = ingest.seal().await?;
            let manifest = Manifest {
                version: MANIFEST_VERSION,
                snapshot_id: id,
                memory,
                disk: memory,
                device_state: crate::BlobRef::default(),
                shape: Shape { vcpus: 1, memory_bytes: memory.size_bytes, disk_bytes: memory.size_bytes },
                facts: HostFacts::default(),
                parent: None,
                packs: sealed.packs.clone(),
                working_set: Vec::new(),
                created_unix_ms: 0,
            };
            let row = SnapshotRow {
                sandbox_id: sandbox.clone(),
                expires_unix_ms: expires_ms,
                ..SnapshotRow::new(id, self.team.clone(), self.id.clone(), manifest.shape, self.catalog.now_unix_ms())
            };
            let (encoded, packs) = (manifest.encode(), manifest.packs.clone());
            let commit = SnapshotCommit { row, manifest: encoded, packs, staged: HashSet::new(), writer: None };
            Ok::<_, Error>(Attempt { commit, sealed, stored: () })
        };
        let commit = |commit: SnapshotCommit| async move {
            self.catalog.commit_snapshot(&commit).await.map(|made| Outcome::Ours(made.into_inner()))
        };
        match publish(&self.store, &self.writer, ingest, commit).await {
            Ok(_) => drop(self.world.told.lock().acknowledged.insert(id, content)),
            Err(Error::Read(error)) => self.refused(&id, &error),
            Err(Error::Store(StoreError::Read(error))) => self.refused(&id, &error),
            Err(_) => {}
        }
    }

    /// A read that fails is struck, or the snapshot is broken.
    fn refused(&self, snapshot: &SnapshotId, error: &ReadError) {
        if !error.is_transient() {
            self.world.fail(format!("{snapshot}: {error}"));
        }
    }

    /// A snapshot that some client was told of.
    fn any_snapshot(&self) -> Option<(SnapshotId, Content)> {
        let told = self.world.told.lock();
        let at = usize::try_from(self.world.roll(told.acknowledged.len() as u64)).expect("small");
        told.acknowledged.iter().nth(at).map(|(id, content)| (*id, content.clone()))
    }

    async fn reader(&self, id: &SnapshotId) -> Result<SnapshotReader, Error> {
        let manifest = Manifest::decode(&self.catalog.manifest(id).await?).expect("what was committed decodes");
        let reader = self.store.open_snapshot(self.key, Arc::new(manifest)).await?;
        Ok(reader.following(Arc::clone(&self.catalog)))
    }

    async fn restore(&self) {
        let Some((id, content)) = self.any_snapshot() else { return };
        // One that is not uploaded is for its own node only; placement sees to that.
        match self.catalog.snapshot_row(&id).await {
            Ok(Some(row)) if row.remote_status == RemoteStatus::Ready || row.origin_node == self.id => {}
            _ => return,
        }
        let sandbox = SandboxId::new(format!("guest{}", self.world.roll(u64::MAX))).expect("an id");
        let row = SandboxRow {
            id: sandbox.clone(),
            team: self.team.clone(),
            template_id: String::new(),
            env: std::collections::BTreeMap::new(),
            alias: String::new(),
            snapshot_id: id,
            moving_to: None,
            state: SandboxState::Running,
            started_unix_ms: self.catalog.now_unix_ms(),
            ends_unix_ms: None,
            shape: Shape::default(),
            metadata: Default::default(),
            node_id: self.id.clone(),
            node_url: String::new(),
            gateway: String::new(),
            access_token: String::new(),
            agent_version: String::new(),
            auto_pause: false,
            auto_resume: false,
            lost_reason: String::new(),
            idempotency: None,
        };
        if self.catalog.create_sandbox(&row).await.is_err() {
            return;
        }
        match self.reader(&id).await {
            Ok(reader) => self.guests.lock().push(Guest { sandbox, reader, content }),
            Err(_) => drop(self.catalog.end_sandbox(&self.team, &sandbox).await),
        }
    }

    /// A guest touches some of its memory: it gets what it had, or waits.
    async fn read(&self) {
        let guest = {
            let guests = self.guests.lock();
            let at = usize::try_from(self.world.roll(guests.len() as u64)).expect("small");
            guests.get(at).map(|guest| (guest.sandbox.clone(), guest.reader.clone(), guest.content.clone()))
        };
        let Some((sandbox, reader, content)) = guest else { return };
        let image = reader.image(&reader.manifest().memory);
        let chunk = self.world.roll(CHUNKS);
        match image.read(ChunkNo(chunk)).await {
            Ok(data) => self.compare(&reader.manifest().snapshot_id, chunk, content[chunk as usize], data),
            // It may have ended while it waited; then nobody kept its bytes.
            Err(error) if self.guests.lock().iter().any(|guest| guest.sandbox == sandbox) => {
                self.refused(&reader.manifest().snapshot_id, &error);
            }
            Err(_) => {}
        }
    }

    fn compare(&self, id: &SnapshotId, chunk: u64, seed: u64, data: ChunkData) {
        let expected = noise(seed, CHUNK as usize);
        let right = match data {
            ChunkData::Zero => seed == 0,
            ChunkData::Bytes(bytes) => bytes == expected,
        };
        if !right {
            self.world.fail(format!("{id}: chunk {chunk} is not what it was"));
        }
    }

    async fn end_guest(&self) {
        let guest = {
            let mut guests = self.guests.lock();
            let at = usize::try_from(self.world.roll(guests.len() as u64 + 2)).expect("small");
            (at < guests.len()).then(|| guests.remove(at))
        };
        let Some(guest) = guest else { return };
        // A snapshot of it may be under way: the product lets that end first.
        if self.catalog.end_sandbox(&self.team, &guest.sandbox).await.is_err() {
            self.guests.lock().push(guest);
        }
    }

    async fn delete(&self) {
        let Some((id, _)) = self.any_snapshot() else { return };
        self.world.told.lock().given_up.insert(id);
        let _ = self.catalog.delete_snapshot(&self.team, &id.to_string()).await;
    }

    pub(super) async fn upload(&self) {
        if owner::claim(&self.catalog, self.blobs.as_ref()).await.is_err() {
            return;
        }
        for pending in self.catalog.pending_uploads().await.unwrap_or_default() {
            if pending.node != self.id {
                continue;
            }
            let Ok(encoded) = self.catalog.manifest(&pending.row.id).await else { continue };
            let manifest = Manifest::decode(&encoded).expect("what was committed decodes");
            match self.store.upload(&pending.row.id, &manifest).await {
                Ok(_) => drop(self.catalog.uploaded(&pending.row.id, &encoded).await),
                Err(StoreError::Blob(_)) => {}
                // The other node has not uploaded it yet.
                Err(StoreError::PackMissing { pack }) if self.world.is_staged(&pack) => {}
                // Deleted meanwhile, and its packs collected.
                Err(_) if self.catalog.snapshot_row(&pending.row.id).await.is_ok_and(|row| row.is_none()) => {}
                Err(error) => {
                    if self.world.kv.entry(format!("manifest/{}", pending.row.id).as_bytes()).is_some() {
                        self.world.fail(format!("{} cannot be uploaded: {error}", pending.row.id));
                    }
                }
            }
        }
    }

    pub(super) async fn collect(&self) {
        match self.collector.lock().await.collect().await {
            Ok(report) if report.named_while_leaving > 0 => {
                self.world.fail("a snapshot names what is deleted".into());
            }
            Ok(_) | Err(GcError::Busy | GcError::LeaseLost | GcError::Catalog(_) | GcError::Blob(_)) => {}
            Err(GcError::OwnerUnreadable { .. }) if !self.world.calm.load(Ordering::Relaxed) => {}
            Err(error) => self.world.fail(format!("no collection: {error}")),
        }
        let Ok(gone) = self.catalog.gone_since(0).await else { return };
        self.store.drop_gone(&gone).await.expect("drops");
        if let Ok(live) = self.catalog.packs_live(&self.store.avoided_packs()).await {
            self.store.allow_packs(&live);
        }
        if let Ok(live) = self.catalog.packs_live(&self.store.staged_packs()).await {
            let _ = self.store.upload_staged(&live).await;
        }
    }

    pub(super) async fn repack(&self) {
        let rewriter = Rewriter { store: &self.store, catalog: &self.catalog, writer: &self.writer, node: &self.id };
        let _ = repack(rewriter).await;
    }

    pub(super) async fn tidy_up(&self) {
        self.catalog.expire(1000).await.expect("calm");
        self.writer.renew().await.expect("calm");
    }

    /// Reads everything there is, from where it is kept in the end.
    pub(super) async fn read_all(&self) {
        let all = {
            let told = self.world.told.lock();
            told.begun.iter().map(|(id, content)| (*id, content.clone())).collect::<Vec<_>>()
        };
        for (id, content) in all {
            match self.reader(&id).await {
                Ok(reader) => {
                    let image = reader.image(&reader.manifest().memory);
                    for (chunk, seed) in (0..).zip(&content) {
                        match image.read(ChunkNo(chunk)).await {
                            Ok(data) => self.compare(&id, chunk, *seed, data),
                            Err(error) => self.world.fail(format!("in the end: {id}: {error}")),
                        }
                    }
                }
                Err(Error::Catalog(CatalogError::NotFound { .. })) => {}
                Err(error) => self.world.fail(format!("in the end: {id}: {error}")),
            }
        }
    }
}
