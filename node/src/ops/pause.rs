//! Pause: a snapshot that is nobody's but the sandbox's, and the end of its virtual machine.
//!
//! ```text
//! hold the link ─► freeze, stop, capture ─► store ─► commit: the row says paused ─► cut, kill, forget
//!                         the guest stays stopped: what it would do from here on would be lost
//! ```
//!
//! Crash points. Before the commit the row says running: the next start of this node ends the sandbox like any other whose
//! guest died with it. After it the sandbox is paused, and its guest dead with this process. An error before the commit
//! lets the guest run on as it was. Retry: the second call finds it paused.

use std::sync::Arc;

use snapyard_snapstore::catalog::{SandboxRow, SnapshotCommit, SnapshotRow};
use snapyard_snapstore::ids::{SandboxId, TeamId};
use snapyard_snapstore::publish::Outcome;

use super::{kill, snapshot};
use crate::agent::Agent;
use crate::capture;
use crate::error::NodeError;
use crate::node::State;
use crate::sandbox::{Link, Phase, Sandbox};

/// Pauses a running sandbox; when this returns its virtual machine is gone and its state durable on this node.
pub async fn pause(node: &Arc<State>, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, NodeError> {
    let sandbox = node.sandboxes.get(team, id)?;
    let guard = sandbox.enter(Phase::Pausing)?;
    let _busy = node.standbys.busy();
    // New connections wait; open ones are of no effect from the freeze on.
    let link = sandbox.hold();
    let left = sandbox.guest.lock().await.as_ref().map(|guest| guest.resident.id);
    let row = match put_away(node, &sandbox, &link).await {
        Ok(row) => row,
        Err(error) => {
            sandbox.release(link);
            return Err(error);
        }
    };
    // From here on nobody buries it, whatever becomes of the guest.
    if !sandbox.doom() {
        return Err(NodeError::NoSandbox(id.to_string()));
    }
    guard.forget();
    if let Link::Open(endpoints) = link {
        endpoints.cut.cancel();
    }
    kill::dismiss(node, &sandbox, Some("it is paused")).await;
    if let Some(left) = left {
        node.forget_if_gone(&left).await;
    }
    tracing::info!(sandbox = %id, snapshot = %row.snapshot_id, "paused");
    Ok(row)
}

/// Makes the guest's state durable and the row paused. The guest is stopped then; after an error it runs.
async fn put_away(node: &Arc<State>, sandbox: &Arc<Sandbox>, link: &Link) -> Result<SandboxRow, NodeError> {
    let id = sandbox.facts.id.as_str();
    let Link::Open(endpoints) = link else { return Err(NodeError::NoSandbox(id.to_owned())) };
    let agent = Agent::new(endpoints.control, id);
    let guest = sandbox.guest.lock().await;
    let guest = guest.as_ref().ok_or_else(|| NodeError::NoSandbox(id.to_owned()))?;
    let captured = capture::capture_and_stop(&guest.vm, &agent, id).await?;
    let retention_ms = node.config.retention.as_millis() as i64;
    let row = |row: SnapshotRow| SnapshotRow {
        internal: true,
        sandbox_id: Some(sandbox.facts.id.clone()),
        expires_unix_ms: Some(row.created_unix_ms.saturating_add(retention_ms)),
        ..row
    };
    let commit = |commit: SnapshotCommit| async move { Ok(Outcome::Ours(node.catalog.commit_pause(&commit).await?)) };
    let stored = snapshot::store(node, &sandbox.facts.team, captured, Arc::clone(&guest.resident), row, commit).await;
    if stored.is_err() {
        capture::run_on(&guest.vm, &agent, id).await;
    }
    Ok(match stored? {
        Outcome::Ours(row) | Outcome::Other(row) => row,
    })
}
