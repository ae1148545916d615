//! From a captured guest to a committed snapshot.
//!
//! ```text
//! freeze user processes ─► pause, device state, dirty pages, frozen disk ─► run on, thaw     (capture_guest)
//!   ─► child memory image: clones can start                                                  (keep_capture)
//!   ─► hash, dedup, compress, seal ─► commit                                                 (publish)
//! ```
//!
//! What is kept of a capture can be stored any number of times: a commit may be refused because packs that it would
//! share are being deleted, and then their chunks are written again.
//!
//! Crash points. Before the commit: the packs that were sealed are named by no manifest, and a restart drops them; the
//! snapshot was never listed. After it: everything that the manifest names is on this disk and synced; the upload is
//! taken up again. An error anywhere leaves the guest running and its processes thawed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use snapyard_snapstore as store;
use snapyard_snapstore::catalog::{CatalogError, SnapshotCommit, SnapshotRow};
use snapyard_snapstore::ids::{DomainKey, SnapshotId};
use snapyard_snapstore::manifest::MANIFEST_VERSION;
use snapyard_snapstore::publish::{Attempt, Outcome};
use snapyard_snapstore::{HostFacts, ImageSpec, ImageWriter, Ingest, Manifest, Sealed};
use snapyard_vmm::{
    Capture, ChunkData, ChunkNo, DirtyPages, FrozenDisk, Geometry, MemoryImage, PageSource, Shape, Vm, ZeroSource,
};

use crate::agent::Agent;
use crate::error::NodeError;
use crate::node::{State, fill_policy};
use crate::residency::Resident;
use crate::source::FILL_BYTES;

/// Bytes per chunk of both images as they are stored.
const CHUNK_BYTES: u32 = store::DEFAULT_CHUNK_BYTES;

/// What a unit of zeros is put as; the store keeps nothing of it.
static ZEROS: [u8; FILL_BYTES as usize] = [0; FILL_BYTES as usize];

/// Units in flight between the images and the ingest pipeline.
const IN_FLIGHT: usize = 16;

/// Captures the guest behind `vm`, with its user processes frozen around the instant.
///
/// Returns the capture and how long user processes stood still.
pub async fn capture_guest(vm: &Vm, agent: &Agent, sandbox: &str) -> Result<(Capture, Duration), NodeError> {
    agent.freeze().await?;
    let started = tokio::time::Instant::now();
    let captured = vm.capture().await;
    let thawed = agent.thaw().await;
    let pause = started.elapsed();
    let capture = captured.map_err(|cause| NodeError::Vm { sandbox: sandbox.to_owned(), cause })?;
    thawed?;
    Ok((capture, pause))
}

/// Captures the guest, which stays as it was at that instant: stopped, its user processes frozen. [`run_on`] undoes that.
pub async fn capture_and_stop(vm: &Vm, agent: &Agent, sandbox: &str) -> Result<Capture, NodeError> {
    agent.freeze().await?;
    match vm.capture_and_stay_stopped().await {
        Ok(capture) => Ok(capture),
        Err(cause) => {
            thaw(agent, sandbox).await;
            Err(NodeError::Vm { sandbox: sandbox.to_owned(), cause })
        }
    }
}

/// Lets a guest go on that [`capture_and_stop`] left stopped.
pub async fn run_on(vm: &Vm, agent: &Agent, sandbox: &str) {
    match vm.resume().await {
        Ok(()) => thaw(agent, sandbox).await,
        Err(error) => tracing::error!(sandbox, %error, "its guest stays stopped"),
    }
}

async fn thaw(agent: &Agent, sandbox: &str) {
    if let Err(error) = agent.thaw().await {
        tracing::error!(sandbox, %error, "its processes stay frozen");
    }
}

/// What a snapshot is stored as, beyond its bytes.
pub struct Identity {
    /// The new snapshot.
    pub id: SnapshotId,
    /// Its owner's dedup key.
    pub key: DomainKey,
    /// Its virtual hardware.
    pub shape: Shape,
    /// What the guest was restored from; `None` for a first boot.
    pub parent: Option<Arc<Resident>>,
    /// When it was taken.
    pub created_unix_ms: i64,
}

/// A capture, kept for as long as it takes to store it.
pub struct Kept {
    device_state: Bytes,
    /// The child memory image, complete in what the guest had changed.
    memory: Arc<MemoryImage>,
    disk: Arc<FrozenDisk>,
}

/// A capture that is durable on this node, but not committed yet.
pub struct Stored {
    /// The manifest to commit.
    pub manifest: Arc<Manifest>,
    /// The child memory image, complete in what the guest had changed.
    pub memory: Arc<MemoryImage>,
    /// The packs that it was written into; discarded if the commit is refused.
    pub sealed: Sealed,
}

/// Makes the captured memory an image.
pub fn keep_capture(node: &State, identity: &Identity, capture: Capture) -> Result<Kept, NodeError> {
    let Capture { device_state, dirty, disk, .. } = capture;
    Ok(Kept { device_state, memory: child_image(node, identity, dirty)?, disk: Arc::new(disk) })
}

/// Stores a capture and commits it: `row` makes its catalog row, `commit` sends it. Both may be called more than once.
pub async fn publish<T, C>(
    node: &State,
    identity: &Identity,
    kept: &Kept,
    row: impl Fn(&Stored) -> SnapshotRow,
    commit: impl Fn(SnapshotCommit) -> C,
) -> Result<(Stored, Outcome<T>), NodeError>
where
    C: Future<Output = Result<Outcome<T>, CatalogError>>,
{
    let row = &row;
    let ingest = || async move {
        let stored = store_capture(node, identity, kept).await?;
        let commit = SnapshotCommit {
            row: row(&stored),
            manifest: stored.manifest.encode(),
            packs: stored.manifest.packs.clone(),
            staged: HashSet::new(),
            writer: None,
        };
        Ok::<_, NodeError>(Attempt { commit, sealed: stored.sealed.clone(), stored })
    };
    store::publish::publish(&node.store, &node.writer, ingest, commit).await
}

/// Writes a capture into the store. After this every byte is synced on this node.
async fn store_capture(node: &State, identity: &Identity, kept: &Kept) -> Result<Stored, NodeError> {
    let parent = identity.parent.as_deref();
    // Its chunks may have been moved into other packs since it was opened.
    let inherited = match parent {
        Some(parent) => Some(parent.reader.current().await?),
        None => None,
    };
    // What restores of the parent touched first, restores of the child will.
    let working_set = parent.map(|parent| parent.working_set.memory.clone()).unwrap_or_default();
    let ingest = node.store.begin(identity.key, inherited.as_ref()).await?;

    let memory = Arc::clone(&kept.memory);
    let memory_ref = {
        let size_bytes = memory.geometry().size_bytes();
        let writer = writer(&ingest, size_bytes, parent.map(|parent| &parent.manifest.memory), parent);
        put_all(node, &writer, restore_order(memory.dirty_chunks(), &working_set), |chunk| {
            let memory = Arc::clone(&memory);
            async move { memory.chunk_bytes(chunk).await }
        })
        .await?;
        writer.finish().await?
    };
    let disk_ref = store_disk(node, &ingest, parent, &kept.disk).await?;
    let device_state = ingest.blob(kept.device_state.clone()).await?;
    let sealed = ingest.seal().await?;

    let shape = identity.shape;
    let facts = node.hypervisor.facts();
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        snapshot_id: identity.id,
        memory: memory_ref,
        disk: disk_ref,
        device_state,
        shape: store::Shape { vcpus: shape.vcpus, memory_bytes: shape.memory_bytes, disk_bytes: shape.disk_bytes },
        facts: HostFacts {
            vmm_version: facts.vmm_version.clone(),
            machine: facts.machine.clone(),
            accelerator: facts.accelerator.name().to_owned(),
            cpu_model: facts.cpu_model.clone(),
            kernel: facts.kernel.clone(),
        },
        parent: parent.map(|parent| parent.id),
        packs: sealed.packs.clone(),
        working_set,
        created_unix_ms: identity.created_unix_ms,
    };
    Ok(Stored { manifest: Arc::new(manifest), memory, sealed })
}

/// The catalog row of a stored capture; the caller adds what only it knows.
pub fn row(node: &State, identity: &Identity, stored: &Stored, team: &store::ids::TeamId) -> SnapshotRow {
    let (shape, created_unix_ms) = (stored.manifest.shape, identity.created_unix_ms);
    SnapshotRow {
        logical_bytes: identity.shape.memory_bytes + identity.shape.disk_bytes,
        new_bytes: stored.sealed.bytes_new,
        chunks_new: stored.sealed.chunks_new,
        chunks_deduplicated: stored.sealed.chunks_deduplicated,
        parent: identity.parent.as_ref().map(|parent| parent.id),
        ..SnapshotRow::new(identity.id, team.clone(), node.id.clone(), shape, created_unix_ms)
    }
}

fn child_image(node: &State, identity: &Identity, dirty: DirtyPages) -> Result<Arc<MemoryImage>, NodeError> {
    let source: Arc<dyn PageSource> = match &identity.parent {
        // The parent's own image, so that what its guests have fetched already is not fetched again.
        Some(parent) => Arc::clone(&parent.memory) as Arc<dyn PageSource>,
        None => ZeroSource::new(geometry(identity.shape.memory_bytes)?),
    };
    MemoryImage::child_with_policy("snapyard-memory", source, dirty, fill_policy(node.config.fault_deadline))
        .map_err(|error| NodeError::Internal(format!("the captured memory cannot become an image: {error}")))
}

async fn store_disk(
    node: &State,
    ingest: &Ingest,
    parent: Option<&Resident>,
    disk: &Arc<FrozenDisk>,
) -> Result<store::ImageRef, NodeError> {
    // With a parent the overlay is the whole difference; a first boot stores its root file system too.
    let changed = match parent {
        Some(_) => disk.dirty_chunks(),
        None => (0..disk.size_bytes().div_ceil(u64::from(FILL_BYTES))).map(ChunkNo).collect(),
    };
    let writer = writer(ingest, disk.size_bytes(), parent.map(|parent| &parent.manifest.disk), parent);
    put_all(node, &writer, changed, |chunk| {
        let disk = Arc::clone(disk);
        async move { disk.read(chunk).await }
    })
    .await?;
    Ok(writer.finish().await?)
}

fn writer(ingest: &Ingest, size_bytes: u64, image: Option<&store::ImageRef>, parent: Option<&Resident>) -> ImageWriter {
    let inherited = parent.zip(image).map(|(parent, image)| parent.reader.image(image));
    ingest.image(ImageSpec { size_bytes, chunk_size: CHUNK_BYTES }, inherited)
}

/// Reads `units` of an image and puts their chunks, several at a time.
async fn put_all<F, R, E>(node: &State, writer: &ImageWriter, units: Vec<ChunkNo>, read: F) -> Result<(), NodeError>
where
    F: Fn(ChunkNo) -> R,
    R: Future<Output = Result<ChunkData, E>>,
    E: std::fmt::Display,
{
    let reads = futures::stream::iter(units).map(|unit| {
        let read = read(unit);
        async move {
            match read.await {
                Ok(ChunkData::Bytes(bytes)) => Ok((unit, bytes)),
                Ok(ChunkData::Zero) => Ok((unit, Bytes::from_static(&ZEROS))),
                Err(cause) => Err(NodeError::Internal(format!("unit {} of the capture: {cause}", unit.0))),
            }
        }
    });
    // Read several at once, put in order: neighbours in the image are neighbours in the store.
    let mut reads = std::pin::pin!(reads.buffered(IN_FLIGHT));
    while let Some((unit, bytes)) = reads.try_next().await? {
        if node.shutdown.is_cancelled() {
            return Err(NodeError::Internal("the node is shutting down".to_owned()));
        }
        let first = unit.0 * u64::from(FILL_BYTES / CHUNK_BYTES);
        writer.put(store::ids::ChunkNo(first), bytes).await?;
    }
    Ok(())
}

/// Units in the order in which they are to lie in packs: what a restore touches first, as `working_set` (chunks of memory)
/// has it, then the others by their place.
fn restore_order(mut units: Vec<ChunkNo>, working_set: &[u64]) -> Vec<ChunkNo> {
    let mut rank = HashMap::new();
    for (at, chunk) in working_set.iter().enumerate() {
        rank.entry(chunk * u64::from(CHUNK_BYTES) / u64::from(FILL_BYTES)).or_insert(at);
    }
    units.sort_by_key(|unit| (rank.get(&unit.0).copied().unwrap_or(usize::MAX), unit.0));
    units
}

fn geometry(size_bytes: u64) -> Result<Geometry, NodeError> {
    Geometry::new(size_bytes, FILL_BYTES).map_err(|error| NodeError::Internal(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_restore_touches_first_lies_first_and_the_rest_by_place() {
        let units = |numbers: &[u64]| numbers.iter().copied().map(ChunkNo).collect::<Vec<_>>();
        let per_unit = u64::from(FILL_BYTES / CHUNK_BYTES);
        let working_set = [7 * per_unit + 3, 7 * per_unit, 2 * per_unit, 100 * per_unit];
        assert_eq!(restore_order(units(&[1, 2, 3, 7, 9]), &working_set), units(&[7, 2, 1, 3, 9]));
        assert_eq!(restore_order(units(&[3, 1, 2]), &[]), units(&[1, 2, 3]));
    }
}
