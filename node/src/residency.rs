//! Snapshots that this node has open: manifest, device state, and the memory and disk images that all guests of a
//! snapshot share.
//!
//! An entry is in use while a guest, or an operation, holds its `Arc`. What nobody uses stays as a cache, the least
//! recently used going first when the filled bytes of idle entries exceed the budget. Opening is single-flight: a
//! burst of creates from one snapshot opens it once. Nothing here is durable; a restart begins empty.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use bytes::Bytes;
use parking_lot::Mutex;
use snapyard_snapstore::catalog::{Catalog, Recording};
use snapyard_snapstore::ids::{DomainKey, SnapshotId, TeamId};
use snapyard_snapstore::{Manifest, SnapshotReader, Store};
use snapyard_vmm::{Backing, FillPolicy, ImageError, MemoryImage, Shape};
use tokio::sync::OnceCell;

use crate::error::NodeError;
use crate::source::StoredImage;
use crate::working_set;

/// One open snapshot.
pub struct Resident {
    /// Which.
    pub id: SnapshotId,
    /// Its manifest.
    pub manifest: Arc<Manifest>,
    /// Readers of its stored images.
    pub reader: SnapshotReader,
    /// Device state as the VMM saved it.
    pub device_state: Bytes,
    /// Guest memory, filled as guests touch it.
    pub memory: Arc<MemoryImage>,
    /// The disk's base, filled as guests read it.
    pub disk: Arc<MemoryImage>,
    /// What earlier restores touched first, and those of what it is a child of.
    pub working_set: Recording,
    /// Recordings that exist of it, or are being made.
    pub recordings: AtomicUsize,
    /// Whether its working set is in its images, or on the way there.
    pub read_ahead: AtomicBool,
}

impl Resident {
    /// The virtual hardware it was taken on.
    pub fn shape(&self) -> Shape {
        let shape = &self.manifest.shape;
        Shape { vcpus: shape.vcpus, memory_bytes: shape.memory_bytes, disk_bytes: shape.disk_bytes }
    }
}

type Slot = Arc<OnceCell<Arc<Resident>>>;

struct Entry {
    slot: Slot,
    /// Logical time of the last use.
    used: u64,
}

/// The open snapshots of a node.
pub struct Residency {
    store: Arc<Store>,
    catalog: Arc<Catalog>,
    run_dir: PathBuf,
    idle_budget_bytes: u64,
    fill: FillPolicy,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: HashMap<SnapshotId, Entry>,
    now: u64,
}

/// What an open snapshot holds, for people.
pub struct ResidentStats {
    /// Which.
    pub id: SnapshotId,
    /// Guest memory.
    pub size_bytes: u64,
    /// Of which this much is in the image.
    pub filled_bytes: u64,
    /// Holders of the entry: guests and operations.
    pub users: usize,
}

impl Residency {
    /// An empty residency. `run_dir`: where disk caches live (unlinked files); `fill`: how long bytes are waited for.
    pub fn new(
        store: Arc<Store>,
        catalog: Arc<Catalog>,
        run_dir: PathBuf,
        idle_budget_bytes: u64,
        fill: FillPolicy,
    ) -> Self {
        Self { store, catalog, run_dir, idle_budget_bytes, fill, state: Mutex::default() }
    }

    /// The open snapshot `id`, opened now if need be. `team` owns the dedup domain.
    pub async fn open(&self, team: &TeamId, id: &SnapshotId) -> Result<Arc<Resident>, NodeError> {
        let slot = self.slot(id);
        let opened = slot.get_or_try_init(|| self.load(team, id)).await;
        if opened.is_err() {
            self.forget_failed(id, &slot);
        }
        let resident = Arc::clone(opened?);
        self.trim();
        Ok(resident)
    }

    /// Adds a snapshot that was just captured here, with the memory that the capture copied.
    pub fn adopt(&self, resident: Arc<Resident>) {
        let id = resident.id;
        let slot = Arc::new(OnceCell::new_with(Some(resident)));
        {
            let mut state = self.state.lock();
            state.now += 1;
            let used = state.now;
            state.entries.insert(id, Entry { slot, used });
        }
        self.trim();
    }

    /// Forgets a deleted snapshot; guests that use it keep it.
    pub fn evict(&self, id: &SnapshotId) {
        self.state.lock().entries.remove(id);
    }

    /// What is open.
    pub fn stats(&self) -> Vec<ResidentStats> {
        let state = self.state.lock();
        let residents = state.entries.values().filter_map(|entry| entry.slot.get());
        residents
            .map(|resident| ResidentStats {
                id: resident.id,
                size_bytes: resident.memory.geometry().size_bytes(),
                filled_bytes: resident.memory.filled_bytes(),
                users: Arc::strong_count(resident) - 1,
            })
            .collect()
    }

    /// Opens the readers of a manifest and wraps them into empty images.
    pub async fn wrap(
        &self,
        key: DomainKey,
        id: &SnapshotId,
        manifest: Arc<Manifest>,
        recordings: &[Recording],
    ) -> Result<Resident, NodeError> {
        let reader = self.store.open_snapshot(key, Arc::clone(&manifest)).await?.following(Arc::clone(&self.catalog));
        let device_state = reader
            .blob(&manifest.device_state)
            .await
            .map_err(|cause| NodeError::Read { snapshot: id.to_string(), cause })?;
        let memory = StoredImage::new(reader.image(&manifest.memory));
        let disk = StoredImage::new(reader.image(&manifest.disk));
        let memory = MemoryImage::with_policy("snapyard-memory", memory, Backing::Memory, self.fill);
        let memory = memory.map_err(image_error)?;
        let disk = MemoryImage::with_policy("snapyard-disk", disk, Backing::File(self.run_dir.clone()), self.fill);
        let disk = disk.map_err(image_error)?;
        let working_set = match recordings {
            [] => Recording { memory: manifest.working_set.clone(), disk: Vec::new() },
            recordings => working_set::merge(recordings),
        };
        Ok(Resident {
            id: *id,
            manifest,
            reader,
            device_state,
            memory,
            disk,
            working_set,
            recordings: AtomicUsize::new(recordings.len()),
            read_ahead: AtomicBool::new(false),
        })
    }

    async fn load(&self, team: &TeamId, id: &SnapshotId) -> Result<Arc<Resident>, NodeError> {
        let key = self.catalog.ensure_team(team).await?.dedup_key;
        let manifest = committed_manifest(&self.catalog, id).await?;
        let recordings = self.catalog.recordings(id).await.unwrap_or_else(|error| {
            tracing::warn!(snapshot = %id, %error, "its working set cannot be read; its guests start without it");
            Vec::new()
        });
        self.wrap(key, id, Arc::new(manifest), &recordings).await.map(Arc::new)
    }

    fn slot(&self, id: &SnapshotId) -> Slot {
        let mut state = self.state.lock();
        state.now += 1;
        let used = state.now;
        let entry = state.entries.entry(*id).or_insert_with(|| Entry { slot: Slot::default(), used });
        entry.used = used;
        Arc::clone(&entry.slot)
    }

    /// An open that failed leaves nothing behind, unless another caller's attempt has succeeded since.
    fn forget_failed(&self, id: &SnapshotId, slot: &Slot) {
        let mut state = self.state.lock();
        if state.entries.get(id).is_some_and(|entry| Arc::ptr_eq(&entry.slot, slot) && entry.slot.get().is_none()) {
            state.entries.remove(id);
        }
    }

    /// Drops idle entries, least recently used first, until their filled bytes fit the budget.
    fn trim(&self) {
        let mut state = self.state.lock();
        let idle = state.entries.iter().filter_map(|(id, entry)| {
            let resident = entry.slot.get()?;
            (Arc::strong_count(resident) == 1).then(|| Idle {
                id: *id,
                used: entry.used,
                filled_bytes: resident.memory.filled_bytes() + resident.disk.filled_bytes(),
            })
        });
        for id in over_budget(idle.collect(), self.idle_budget_bytes) {
            state.entries.remove(&id);
        }
    }
}

/// The manifest that a snapshot was committed with.
pub async fn committed_manifest(catalog: &Catalog, id: &SnapshotId) -> Result<Manifest, NodeError> {
    decoded_manifest(id, &catalog.manifest(id).await?)
}

/// The same from its bytes.
pub fn decoded_manifest(id: &SnapshotId, bytes: &[u8]) -> Result<Manifest, NodeError> {
    Manifest::decode(bytes)
        .map_err(|cause| NodeError::Internal(format!("the manifest of snapshot {id} is damaged: {cause}")))
}

fn image_error(error: ImageError) -> NodeError {
    NodeError::Internal(format!("a memory image could not be made: {error}"))
}

/// An open snapshot that nobody uses.
struct Idle {
    id: SnapshotId,
    used: u64,
    filled_bytes: u64,
}

/// Which idle snapshots go so that the rest fits `budget` bytes: the least recently used ones.
fn over_budget(mut idle: Vec<Idle>, budget: u64) -> Vec<SnapshotId> {
    idle.sort_by_key(|entry| std::cmp::Reverse(entry.used));
    let mut kept = 0_u64;
    let goes = idle.into_iter().filter(|entry| {
        kept = kept.saturating_add(entry.filled_bytes);
        kept > budget
    });
    goes.map(|entry| entry.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_go_first_and_the_rest_fits() {
        let entry = |n: u8, used, filled_bytes| Idle { id: SnapshotId::from_random([n; 16]), used, filled_bytes };
        let gone = over_budget(vec![entry(1, 10, 60), entry(2, 30, 30), entry(3, 20, 30)], 70);
        assert_eq!(gone, [SnapshotId::from_random([1; 16])]);
        assert!(over_budget(vec![entry(1, 1, 70)], 70).is_empty());
    }
}
