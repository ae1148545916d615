//! Between the wire's messages and the domain's types, with the checks that the wire cannot express.

use std::collections::HashMap;

use snapyard_proto::v1;
use snapyard_snapstore::catalog::{
    Idempotency, RemoteStatus, Resolved, SandboxFilter, SandboxRow, SandboxState, SnapshotFilter, SnapshotRow,
    TemplateRow,
};
use snapyard_snapstore::ids::{SandboxId, SnapshotId, TeamId};
use snapyard_snapstore::{Shape, TierStats};
use tonic::Status;

use crate::node::State;
use crate::ops::Timings;
use crate::ops::create::Create;
use crate::ops::snapshot::Snapshot;
use crate::sandbox::Phase;

/// A team's id.
pub fn team(text: &str) -> Result<TeamId, Status> {
    TeamId::new(text).map_err(invalid)
}

/// A sandbox's id. Text that cannot be one names nothing.
pub fn sandbox_id(text: &str) -> Result<SandboxId, Status> {
    SandboxId::new(text).map_err(|_| Status::not_found(format!("sandbox {text:.80} was not found")))
}

/// A snapshot's id. Text that cannot be one names nothing.
pub fn snapshot_id(text: &str) -> Result<SnapshotId, Status> {
    text.parse().map_err(|_| Status::not_found(format!("snapshot {text:.80} was not found")))
}

fn invalid(error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Milliseconds from now; negative is never.
pub fn timeout(timeout_ms: i64) -> Option<i64> {
    (timeout_ms >= 0).then_some(timeout_ms)
}

fn idempotency(key: String, digest: Vec<u8>) -> Option<Idempotency> {
    (!key.is_empty()).then_some(Idempotency { key, digest })
}

/// A create.
pub fn create(request: v1::CreateSandboxRequest) -> Result<Create, Status> {
    Ok(Create {
        team: team(&request.team)?,
        id: SandboxId::new(request.sandbox_id).map_err(invalid)?,
        snapshot: request.snapshot_id.parse::<SnapshotId>().map_err(invalid)?,
        template_id: request.template_id,
        alias: request.alias,
        timeout_ms: timeout(request.timeout_ms),
        metadata: request.metadata,
        env: request.env.into_iter().collect(),
        access_token: request.access_token,
        auto_pause: request.auto_pause,
        auto_resume: request.auto_resume,
        idempotency: idempotency(request.idempotency_key, request.request_digest),
    })
}

/// A snapshot call.
pub fn snapshot_call(request: v1::SnapshotSandboxRequest) -> Result<Snapshot, Status> {
    Ok(Snapshot {
        team: team(&request.team)?,
        sandbox: sandbox_id(&request.sandbox_id)?,
        name: request.name,
        retention_ms: (request.retention_ms > 0).then_some(request.retention_ms),
        hidden: request.hidden,
        idempotency: idempotency(request.idempotency_key, request.request_digest),
    })
}

/// What a listing of snapshots asks for.
pub fn snapshot_filter(request: &v1::ListSnapshotsRequest) -> SnapshotFilter {
    let said = |text: &String| (!text.is_empty()).then(|| text.clone());
    SnapshotFilter { sandbox_id: said(&request.sandbox_id), name: said(&request.name) }
}

/// What a listing of sandboxes asks for.
pub fn sandbox_filter(request: &v1::ListSandboxesRequest) -> SandboxFilter {
    let states = request.states().filter_map(|state| match state {
        v1::SandboxState::Unspecified => None,
        v1::SandboxState::Creating => Some(SandboxState::Creating),
        v1::SandboxState::Running => Some(SandboxState::Running),
        v1::SandboxState::Snapshotting => Some(SandboxState::Snapshotting),
        v1::SandboxState::Pausing => Some(SandboxState::Pausing),
        v1::SandboxState::Paused => Some(SandboxState::Paused),
        v1::SandboxState::Resuming => Some(SandboxState::Resuming),
        v1::SandboxState::Killed => Some(SandboxState::Killed),
        v1::SandboxState::Lost => Some(SandboxState::Lost),
    });
    SandboxFilter { states: states.collect(), metadata: request.metadata.clone().into_iter().collect() }
}

fn shape(shape: &Shape) -> v1::Shape {
    v1::Shape { vcpus: shape.vcpus, memory_bytes: shape.memory_bytes, disk_bytes: shape.disk_bytes }
}

/// What a reference was resolved to.
pub fn resolved(resolved: &Resolved) -> v1::ResolveResponse {
    v1::ResolveResponse {
        snapshot_id: resolved.snapshot_id.to_string(),
        template_id: resolved.template_id.clone(),
        alias: resolved.alias.clone(),
        is_snapshot: resolved.is_snapshot,
        shape: Some(shape(&resolved.shape)),
    }
}

/// A snapshot with the names that its team's name makes.
pub async fn snapshot(state: &State, row: &SnapshotRow) -> Result<v1::Snapshot, Status> {
    let team = state.catalog.ensure_team(&row.team).await.map_err(crate::NodeError::from)?;
    let remote = match row.remote_status {
        RemoteStatus::Pending => v1::RemoteStatus::Pending,
        RemoteStatus::InProgress => v1::RemoteStatus::Inprogress,
        RemoteStatus::Ready => v1::RemoteStatus::Ready,
        RemoteStatus::Failed => v1::RemoteStatus::Failed,
    };
    Ok(v1::Snapshot {
        id: row.id.to_string(),
        team: row.team.to_string(),
        names: team.names_of(row),
        sandbox_id: row.sandbox_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        created_unix_ms: row.created_unix_ms,
        expires_unix_ms: row.expires_unix_ms.unwrap_or(0),
        shape: Some(shape(&row.shape)),
        remote_status: remote.into(),
        origin_node: row.origin_node.to_string(),
        logical_bytes: row.logical_bytes,
        new_bytes: row.new_bytes,
        chunks_new: row.chunks_new,
        chunks_deduplicated: row.chunks_deduplicated,
        pause_us: row.pause_us,
        parent_snapshot_id: row.parent.as_ref().map(ToString::to_string).unwrap_or_default(),
    })
}

/// A template.
pub fn template(row: &TemplateRow) -> v1::Template {
    v1::Template {
        id: row.id.to_string(),
        alias: row.alias.clone().unwrap_or_default(),
        team: row.team.to_string(),
        snapshot_id: row.snapshot_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        shape: Some(shape(&row.shape)),
        created_unix_ms: row.created_unix_ms,
        build_status: row.build_status.to_string(),
        build_message: row.build_message.clone(),
    }
}

/// A sandbox, with its true state if it runs here.
pub fn sandbox(state: &State, row: &SandboxRow) -> v1::Sandbox {
    let here = state.sandboxes.find(row.id.as_str());
    let true_state = match (row.state, here.map(|sandbox| sandbox.phase())) {
        (SandboxState::Paused, _) => v1::SandboxState::Paused,
        (SandboxState::Resuming, _) => v1::SandboxState::Resuming,
        (_, Some(Phase::Creating)) => v1::SandboxState::Creating,
        (_, Some(Phase::Snapshotting)) => v1::SandboxState::Snapshotting,
        (_, Some(Phase::Pausing)) => v1::SandboxState::Pausing,
        (_, Some(Phase::Killing)) => v1::SandboxState::Killed,
        (_, Some(Phase::Running | Phase::RollingBack) | None) => v1::SandboxState::Running,
    };
    v1::Sandbox {
        id: row.id.to_string(),
        team: row.team.to_string(),
        template_id: row.template_id.clone(),
        alias: row.alias.clone(),
        snapshot_id: row.snapshot_id.to_string(),
        state: true_state.into(),
        started_unix_ms: row.started_unix_ms,
        ends_unix_ms: row.ends_unix_ms.unwrap_or(0),
        shape: Some(shape(&row.shape)),
        metadata: row.metadata.clone().into_iter().collect::<HashMap<_, _>>(),
        node_id: row.node_id.to_string(),
        node_url: row.node_url.clone(),
        gateway: row.gateway.clone(),
        access_token: row.access_token.clone(),
        agent_version: row.agent_version.clone(),
        lifecycle_auto_pause: row.auto_pause,
        lifecycle_auto_resume: row.auto_resume,
        lost_reason: row.lost_reason.clone(),
        env: row.env.clone().into_iter().collect(),
    }
}

/// When the phases of a restore were over.
pub fn timings(timings: &Timings) -> v1::RestoreTimings {
    let us = |duration: std::time::Duration| u32::try_from(duration.as_micros()).unwrap_or(u32::MAX);
    v1::RestoreTimings {
        snapshot_open_us: us(timings.opened),
        vmm_ready_us: us(timings.vmm_ready),
        memory_attached_us: us(timings.attached),
        device_state_loaded_us: us(timings.loaded),
        running_us: us(timings.running),
        agent_ready_us: us(timings.ready),
        filled_bytes_at_running: timings.filled_at_running,
        filled_bytes_at_ready: timings.filled_at_ready,
    }
}

/// What the node holds and has done.
pub async fn stats(state: &State) -> Result<v1::NodeStats, Status> {
    let totals = state.catalog.snapshot_totals().await.map_err(crate::NodeError::from)?;
    let occupancies = state.catalog.occupancy_rows().await.map_err(crate::NodeError::from)?.len() as u64;
    // A store that cannot be listed just now leaves the last known figures.
    let usage = match state.store.refresh_remote_usage().await {
        Ok(usage) => usage,
        Err(_) => state.store.stats().remote,
    };
    let store = state.store.stats();
    let facts = state.hypervisor.facts();
    let images = state.residency.stats().into_iter().map(|image| v1::MemoryImageStats {
        snapshot_id: image.id.to_string(),
        size_bytes: image.size_bytes,
        filled_bytes: image.filled_bytes,
        guests: u32::try_from(image.users).unwrap_or(u32::MAX),
    });
    let mut vms = Vec::new();
    for sandbox in state.sandboxes.all() {
        if let Some(guest) = &*sandbox.guest.lock().await {
            vms.push(vm_stats(sandbox.facts.id.as_str(), guest.vm.pid(), guest.vm.memory_stats().await, false));
        }
    }
    let pooled = state.hypervisor.pooled();
    let pooled_vmms = u32::try_from(pooled.len()).unwrap_or(u32::MAX);
    vms.extend(costs(pooled).await.into_iter().map(|(pid, memory)| vm_stats("", pid, memory, false)));
    let standbys = state.standbys.pids();
    let standby_count = u32::try_from(standbys.len()).unwrap_or(u32::MAX);
    vms.extend(costs(standbys).await.into_iter().map(|(pid, memory)| vm_stats("", pid, memory, true)));
    Ok(v1::NodeStats {
        node_id: state.config.node_id.clone(),
        sandboxes: u32::try_from(state.sandboxes.all().len()).unwrap_or(u32::MAX),
        pooled_vmms,
        standbys: standby_count,
        images: images.collect(),
        vms,
        accelerator: facts.accelerator.name().to_owned(),
        vmm_version: facts.vmm_version.clone(),
        occupancies,
        store: Some(v1::StoreStats {
            snapshots: totals.snapshots,
            logical_bytes: totals.logical_bytes,
            chunks: store.chunks,
            chunks_new: store.chunks_new,
            chunks_deduplicated: store.chunks_deduplicated,
            bytes_new: store.bytes_new,
            cache_bytes: store.cache_bytes,
            cache_hits: store.cache_hits,
            cache_misses: store.cache_misses,
            s3_gets: store.blob_gets,
            s3_puts: store.blob_puts,
            s3_bytes_read: store.blob_bytes_read,
            s3_bytes_written: store.blob_bytes_written,
            s3_objects: usage.objects,
            s3_bytes: usage.bytes,
            packs_staged: store.packs_staged,
            bad_copies: store.bad_copies,
            cache_evicted_bytes: store.cache_evicted_bytes,
            cache_promoted: store.cache_promoted,
            tiers: vec![
                tier("memory", store.tier_memory),
                tier("disk", store.tier_disk),
                tier("staged", store.tier_staged),
                tier("s3", store.tier_blob),
            ],
        }),
    })
}

fn tier(name: &str, stats: TierStats) -> v1::TierStats {
    v1::TierStats {
        name: name.to_owned(),
        hits: stats.hits,
        bytes: stats.bytes,
        p50_us: stats.p50_us,
        p99_us: stats.p99_us,
    }
}

/// What VMMs cost that are nobody's yet. One that has just ended costs nothing.
async fn costs(pids: Vec<u32>) -> Vec<(u32, snapyard_vmm::MemoryStats)> {
    let measured = tokio::task::spawn_blocking(move || {
        let cost = |pid| {
            let private_bytes = snapyard_vmm::process_private_bytes(pid).unwrap_or(0);
            snapyard_vmm::MemoryStats { private_bytes, ..Default::default() }
        };
        pids.into_iter().map(|pid| (pid, cost(pid))).collect()
    });
    measured.await.unwrap_or_default()
}

fn vm_stats(sandbox: &str, pid: u32, memory: snapyard_vmm::MemoryStats, standby: bool) -> v1::VmStats {
    v1::VmStats {
        sandbox_id: sandbox.to_owned(),
        pid,
        private_bytes: memory.private_bytes,
        guest_private_bytes: memory.guest_private_bytes,
        faults: memory.faults.faults,
        standby,
    }
}
