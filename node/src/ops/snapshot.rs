//! Snapshot: the whole state of a running sandbox becomes a named, durable object; the sandbox goes on.
//!
//! See [`crate::capture`] for the crash points. Retry: the same idempotency key with the same body answers the same
//! snapshot; a name that is taken is refused before the guest is touched and again at the commit, where it counts.

use std::sync::Arc;

use snapyard_snapstore::catalog::names::SnapshotName;
use snapyard_snapstore::catalog::{CatalogError, Idempotency, Made, SnapshotCommit, SnapshotRow};
use snapyard_snapstore::ids::{SandboxId, SnapshotId, TeamId};
use snapyard_snapstore::publish::Outcome;
use snapyard_vmm::Capture;

use crate::agent::Agent;
use crate::capture::{self, Identity};
use crate::error::NodeError;
use crate::node::State;
use crate::ops::create::other_kind;
use crate::residency::Resident;
use crate::sandbox::{Link, Phase, Sandbox};

/// A snapshot call, validated.
pub struct Snapshot {
    /// Who.
    pub team: TeamId,
    /// The source.
    pub sandbox: SandboxId,
    /// `short[:tag]` as the client sent it, or empty.
    pub name: String,
    /// How long it is kept; `None`: the node's default.
    pub retention_ms: Option<i64>,
    /// Nobody's to see: the server needs it for a moment.
    pub hidden: bool,
    /// What makes a retry of the client's request recognisable.
    pub idempotency: Option<Idempotency>,
}

/// Takes the snapshot; answers when it is durable on this node and listed.
pub async fn snapshot(node: &Arc<State>, call: Snapshot) -> Result<SnapshotRow, NodeError> {
    if let Some(request) = &call.idempotency
        && let Some(made) = node.catalog.made_by(&call.team, request).await?
    {
        let Made::Snapshot(id) = made else { return Err(other_kind(request)) };
        return Ok(node.catalog.get_snapshot(&call.team, &id.to_string()).await?);
    }
    let sandbox = node.sandboxes.get(&call.team, &call.sandbox)?;
    let guard = sandbox.enter(Phase::Snapshotting)?;
    let _busy = node.standbys.busy();
    let name = match call.name.trim() {
        "" => None,
        name => Some(node.catalog.check_name(&call.team, name).await?),
    };
    if sandbox.facts.template_id.starts_with("tpl-") {
        node.catalog.get_template(&call.team, &sandbox.facts.template_id).await?;
    }
    let taken = take(node, &sandbox, &call, name).await;
    drop(guard);
    taken
}

async fn take(
    node: &Arc<State>,
    sandbox: &Arc<Sandbox>,
    call: &Snapshot,
    name: Option<SnapshotName>,
) -> Result<SnapshotRow, NodeError> {
    let id = sandbox.facts.id.as_str();
    let Link::Open(endpoints) = sandbox.link.borrow().clone() else {
        return Err(NodeError::NoSandbox(id.to_owned()));
    };
    let agent = Agent::new(endpoints.control, id);
    let (captured, parent) = {
        let guest = sandbox.guest.lock().await;
        let guest = guest.as_ref().ok_or_else(|| NodeError::NoSandbox(id.to_owned()))?;
        (capture::capture_guest(&guest.vm, &agent, id).await?, Arc::clone(&guest.resident))
    };
    let (captured, pause) = captured;
    let retention_ms = call.retention_ms.unwrap_or(node.config.retention.as_millis() as i64);
    let row = |row: SnapshotRow| SnapshotRow {
        name: name.clone(),
        sandbox_id: Some(sandbox.facts.id.clone()),
        expires_unix_ms: Some(row.created_unix_ms.saturating_add(retention_ms)),
        internal: call.hidden,
        idempotency: call.idempotency.clone(),
        pause_us: u32::try_from(pause.as_micros()).unwrap_or(u32::MAX),
        ..row
    };
    let commit = |commit: SnapshotCommit| async move {
        let row = node.catalog.commit_snapshot(&commit).await?.into_inner();
        Ok(if row.id == commit.row.id { Outcome::Ours(row) } else { Outcome::Other(row) })
    };
    match store(node, &call.team, captured, parent, row, commit).await? {
        Outcome::Ours(row) => {
            tracing::info!(sandbox = id, snapshot = %row.id, ?pause, new = row.chunks_new, deduplicated = row.chunks_deduplicated, "snapshot taken");
            Ok(row)
        }
        // Another copy of the request was faster.
        Outcome::Other(row) => Ok(row),
    }
}

/// Stores a capture of a guest of `parent`, commits it, keeps its memory for guests of the new snapshot and has it
/// uploaded. `row` completes its catalog row, `commit` sends it; both may be called more than once.
pub(super) async fn store<T, C>(
    node: &Arc<State>,
    team: &TeamId,
    captured: Capture,
    parent: Arc<Resident>,
    row: impl Fn(SnapshotRow) -> SnapshotRow,
    commit: impl Fn(SnapshotCommit) -> C,
) -> Result<Outcome<T>, NodeError>
where
    C: Future<Output = Result<Outcome<T>, CatalogError>>,
{
    let identity = Identity {
        id: SnapshotId::random(),
        key: node.catalog.ensure_team(team).await?.dedup_key,
        shape: parent.shape(),
        parent: Some(parent),
        created_unix_ms: node.clock.now_unix_ms(),
    };
    let kept = capture::keep_capture(node, &identity, captured)?;
    let row = |stored: &capture::Stored| row(capture::row(node, &identity, stored, team));
    let (stored, outcome) = capture::publish(node, &identity, &kept, row, commit).await?;
    if matches!(outcome, Outcome::Ours(_)) {
        keep_warm(node, &identity, stored).await;
        node.uploads.notify_one();
    }
    Ok(outcome)
}

/// Makes the captured memory the image that clones on this node start from. The snapshot is committed already: when
/// this fails, clones read it from the store like any other.
async fn keep_warm(node: &State, identity: &Identity, stored: capture::Stored) {
    match node.residency.wrap(identity.key, &identity.id, Arc::clone(&stored.manifest), &[]).await {
        Ok(cold) => {
            // From now on what the image lacks comes from the new snapshot itself, not from its parent.
            let own = crate::source::StoredImage::new(cold.reader.image(&stored.manifest.memory));
            if let Err(error) = stored.memory.set_source(own) {
                tracing::warn!(snapshot = %identity.id, %error, "the captured image goes on reading its parent");
            }
            let inherited = identity.parent.as_ref().map(|parent| parent.working_set.clone());
            let working_set = inherited.unwrap_or_else(|| cold.working_set.clone());
            let warm = Resident { memory: stored.memory, working_set, ..cold };
            node.residency.adopt(Arc::new(warm));
        }
        Err(error) => tracing::warn!(snapshot = %identity.id, %error, "the captured image is not kept in memory"),
    }
}
