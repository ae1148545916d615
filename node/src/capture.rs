//! From a captured guest to a committed snapshot.
//!
//! ```text
//! freeze user processes ─► pause, device state, dirty pages, frozen disk ─► run on, thaw     (capture_guest)
//!   ─► child memory image: clones can start ─► hash, dedup, compress, seal ─► commit         (store_capture)
//! ```
//!
//! Crash points. Before the commit: the packs that were sealed are named by no manifest, and a restart drops them; the
//! snapshot was never listed. After it: everything that the manifest names is on this disk and synced; the upload is
//! taken up again. An error anywhere leaves the guest running and its processes thawed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use snapyard_snapstore as store;
use snapyard_snapstore::catalog::{RemoteStatus, SnapshotRow};
use snapyard_snapstore::ids::{DomainKey, SnapshotId};
use snapyard_snapstore::manifest::MANIFEST_VERSION;
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

/// A capture that is durable on this node, but not committed yet.
pub struct Stored {
    /// The manifest to commit.
    pub manifest: Arc<Manifest>,
    /// The child memory image, complete in what the guest had changed.
    pub memory: Arc<MemoryImage>,
    /// The packs that it was written into; discarded if the commit is refused.
    pub sealed: Sealed,
}

/// Writes a capture into the store. After this every byte is synced on this node.
pub async fn store_capture(node: &State, identity: &Identity, capture: Capture) -> Result<Stored, NodeError> {
    let Capture { device_state, dirty, disk, .. } = capture;
    let parent = identity.parent.as_deref();
    let ingest = node.store.begin(identity.key, parent.map(|parent| &*parent.manifest)).await?;

    let memory = child_image(node, identity, dirty)?;
    let memory_ref = {
        let size_bytes = memory.geometry().size_bytes();
        let writer = writer(&ingest, size_bytes, parent.map(|parent| &parent.manifest.memory), parent);
        put_all(node, &writer, memory.dirty_chunks(), |chunk| {
            let memory = Arc::clone(&memory);
            async move { memory.chunk_bytes(chunk).await }
        })
        .await?;
        writer.finish().await?
    };
    let disk_ref = store_disk(node, &ingest, parent, disk).await?;
    let device_state = ingest.blob(device_state).await?;
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
        working_set: Vec::new(),
        created_unix_ms: identity.created_unix_ms,
    };
    Ok(Stored { manifest: Arc::new(manifest), memory, sealed })
}

/// Drops what was sealed for a snapshot whose commit was refused.
pub async fn discard(node: &State, sealed: Sealed) {
    if let Err(error) = node.store.discard(sealed).await {
        tracing::warn!(%error, "packs of a refused snapshot stay until the next start");
    }
}

/// The catalog row of a stored capture; the caller adds what only it knows.
pub fn row(node: &State, identity: &Identity, stored: &Stored, team: &store::ids::TeamId) -> SnapshotRow {
    SnapshotRow {
        id: identity.id,
        team: team.clone(),
        name: None,
        sandbox_id: None,
        created_unix_ms: identity.created_unix_ms,
        expires_unix_ms: None,
        shape: stored.manifest.shape,
        remote_status: RemoteStatus::Pending,
        origin_node: node.id.clone(),
        logical_bytes: identity.shape.memory_bytes + identity.shape.disk_bytes,
        new_bytes: stored.sealed.bytes_new,
        chunks_new: stored.sealed.chunks_new,
        chunks_deduplicated: stored.sealed.chunks_deduplicated,
        pause_us: 0,
        parent: identity.parent.as_ref().map(|parent| parent.id),
        internal: false,
        condemned: false,
        idempotency: None,
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
    disk: FrozenDisk,
) -> Result<store::ImageRef, NodeError> {
    let disk = Arc::new(disk);
    // With a parent the overlay is the whole difference; a first boot stores its root file system too.
    let changed = match parent {
        Some(_) => disk.dirty_chunks(),
        None => (0..disk.size_bytes().div_ceil(u64::from(FILL_BYTES))).map(ChunkNo).collect(),
    };
    let writer = writer(ingest, disk.size_bytes(), parent.map(|parent| &parent.manifest.disk), parent);
    put_all(node, &writer, changed, |chunk| {
        let disk = Arc::clone(&disk);
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

fn geometry(size_bytes: u64) -> Result<Geometry, NodeError> {
    Geometry::new(size_bytes, FILL_BYTES).map_err(|error| NodeError::Internal(error.to_string()))
}
