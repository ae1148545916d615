//! Create: a sandbox from a snapshot.
//!
//! Crash points: the catalog row (with the occupancy of the snapshot) and the guest come into being side by side. A
//! node that dies in between leaves at most a row of its own, which its next start ends. Retry: the same
//! idempotency key with the same body answers the sandbox that the first call made.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use snapyard_snapstore::catalog::{CatalogError, Committed, Idempotency, Made, SandboxRow, SandboxState};
use snapyard_snapstore::ids::{SandboxId, SnapshotId, TeamId};

use super::restore::{Timings, restore};
use crate::error::NodeError;
use crate::node::State;
use crate::sandbox::{Endpoints, Facts, Guest, Sandbox};

/// A create, validated.
pub struct Create {
    /// Who.
    pub team: TeamId,
    /// The new sandbox.
    pub id: SandboxId,
    /// What to restore.
    pub snapshot: SnapshotId,
    /// What the client named, resolved.
    pub template_id: String,
    /// The template's alias, if any.
    pub alias: String,
    /// Milliseconds from now; `None`: never.
    pub timeout_ms: Option<i64>,
    /// The client's labels.
    pub metadata: HashMap<String, String>,
    /// Environment of the guest's processes.
    pub env: BTreeMap<String, String>,
    /// Data-plane token, or empty.
    pub access_token: String,
    /// Pause instead of kill when the time is over.
    pub auto_pause: bool,
    /// Wake on a request.
    pub auto_resume: bool,
    /// What makes a retry of the client's request recognisable.
    pub idempotency: Option<Idempotency>,
}

/// The version of the agent's protocol, on which the public SDKs gate what they use. Must be that of the guest agent.
pub const AGENT_VERSION: &str = "0.5.7";

/// A key that made something of another kind.
pub fn other_kind(request: &Idempotency) -> NodeError {
    NodeError::Mismatch(format!(
        "the idempotency key {:.80?} was used with a different request: use a new key",
        request.key
    ))
}

/// Creates the sandbox; answers when its agent has its identity.
pub async fn create(node: &Arc<State>, create: Create) -> Result<(SandboxRow, Timings), NodeError> {
    let started = Instant::now();
    if let Some(request) = &create.idempotency
        && let Some(made) = node.catalog.made_by(&create.team, request).await?
    {
        let Made::Sandbox(id) = made else { return Err(other_kind(request)) };
        return Ok((node.catalog.get_sandbox(&create.team, &id).await?, Timings::default()));
    }
    let now = node.clock.now_unix_ms();
    let ends = create.timeout_ms.map(|timeout| now.saturating_add(timeout));
    let facts = Facts {
        id: create.id.clone(),
        team: create.team.clone(),
        template_id: create.template_id.clone(),
        access_token: create.access_token.clone(),
        env: create.env.clone(),
        auto_pause: create.auto_pause,
    };
    let sandbox = Sandbox::new(facts, ends);
    node.sandboxes.insert(&sandbox, node.config.max_sandboxes, &node.config.node_id)?;
    match begin(node, &sandbox, create, now, ends, started).await {
        Ok((row, guest, endpoints, timings)) => {
            install(node, &sandbox, guest, endpoints).await;
            tracing::info!(sandbox = %row.id, snapshot = %row.snapshot_id, ?timings, "created");
            Ok((row, timings))
        }
        Err(error) => {
            sandbox.close(None);
            node.sandboxes.remove(&sandbox.facts.id);
            Err(error)
        }
    }
}

/// The sandbox runs from now on: its guest is watched, its deadline too, and connections get through.
pub(super) async fn install(node: &Arc<State>, sandbox: &Arc<Sandbox>, guest: Guest, endpoints: Endpoints) {
    node.guard(sandbox, &guest.vm, endpoints.cut.clone());
    *sandbox.guest.lock().await = Some(guest);
    sandbox.started(endpoints);
    node.watch_deadline(sandbox);
}

async fn begin(
    node: &Arc<State>,
    sandbox: &Arc<Sandbox>,
    create: Create,
    now: i64,
    ends: Option<i64>,
    started: Instant,
) -> Result<(SandboxRow, Guest, Endpoints, Timings), NodeError> {
    let resident = node.residency.open(&create.team, &create.snapshot).await?;
    let row = SandboxRow {
        id: create.id,
        team: create.team,
        template_id: create.template_id,
        alias: create.alias,
        snapshot_id: create.snapshot,
        moving_to: None,
        state: SandboxState::Running,
        started_unix_ms: now,
        ends_unix_ms: ends,
        shape: resident.manifest.shape,
        metadata: create.metadata.into_iter().collect(),
        node_id: node.id.clone(),
        node_url: node.url.clone(),
        gateway: node.gateway.clone(),
        access_token: create.access_token,
        env: create.env,
        agent_version: AGENT_VERSION.to_owned(),
        auto_pause: create.auto_pause,
        auto_resume: create.auto_resume,
        lost_reason: String::new(),
        idempotency: create.idempotency,
    };
    // The row is a synced write: it need not delay the guest, but both must succeed.
    let (recorded, restored) =
        tokio::join!(node.catalog.create_sandbox(&row), restore(node, &sandbox.facts, resident, started));
    match (recorded, restored) {
        (Ok(Committed::New(_)), Ok((guest, endpoints, timings))) => Ok((row, guest, endpoints, timings)),
        // Another copy of the same request was faster: the caller finds its sandbox when it asks again.
        (Ok(Committed::Replayed(other)), restored) => {
            if let Ok((guest, ..)) = restored {
                guest.vm.kill().await;
            }
            Err(NodeError::Busy { sandbox: other.id.to_string(), phase: "being created by the same request" })
        }
        (Err(error), Ok((guest, ..))) => {
            guest.vm.kill().await;
            Err(error.into())
        }
        (Ok(Committed::New(_)), Err(error)) => {
            release(node, &row).await;
            Err(error)
        }
        (Err(error), Err(_)) => Err(error.into()),
    }
}

/// Takes the row of a create that failed back, with its occupancy.
async fn release(node: &State, row: &SandboxRow) {
    match node.catalog.end_sandbox(&row.team, &row.id).await {
        Ok(_) | Err(CatalogError::NotFound { .. }) => {}
        // The next start of this node ends it: the row names this node and no guest is behind it.
        Err(error) => tracing::error!(sandbox = %row.id, %error, "the row of a failed create could not be removed"),
    }
}
