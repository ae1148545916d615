//! Resume: a paused sandbox gets a virtual machine again, on any node.
//!
//! Order: the sandbox is this node's (connections to it wait), the row says resuming, the guest is restored, the row says
//! running. A node that dies in between leaves a row of its own in the state of resuming, which its next start takes back
//! to paused. An error does the same at once. Retry: the second call finds it no longer paused.

use std::sync::Arc;
use std::time::Instant;

use snapyard_snapstore::catalog::{CatalogError, Place, SandboxRow, SandboxState};
use snapyard_snapstore::ids::{SandboxId, TeamId};

use super::create::install;
use super::restore::{Timings, restore};
use crate::error::NodeError;
use crate::node::State;
use crate::sandbox::{Endpoints, Facts, Guest, Phase, Sandbox};

/// Resumes a paused sandbox, for `timeout_ms` from now (`None`: for ever); answers when its agent has its identity.
pub async fn resume(
    node: &Arc<State>,
    team: &TeamId,
    id: &SandboxId,
    timeout_ms: Option<i64>,
) -> Result<(SandboxRow, Timings), NodeError> {
    let started = Instant::now();
    // Paused here a moment ago: what is left of it goes first.
    if let Ok(old) = node.sandboxes.get(team, id)
        && old.phase() == Phase::Killing
    {
        old.ended.cancelled().await;
    }
    let row = node.catalog.get_sandbox(team, id).await?;
    if row.state != SandboxState::Paused {
        let (state, wanted) = (row.state, SandboxState::Paused);
        return Err(CatalogError::State { id: id.clone(), state, wanted }.into());
    }
    let ends = timeout_ms.map(|timeout| node.clock.now_unix_ms().saturating_add(timeout));
    let sandbox = Sandbox::new(Facts::of(&row), ends);
    match node.sandboxes.insert(&sandbox, node.config.max_sandboxes, &node.config.node_id) {
        Err(NodeError::Exists(id)) => return Err(NodeError::Busy { sandbox: id, phase: "being resumed already" }),
        inserted => inserted?,
    }
    match begin(node, &sandbox, ends, started).await {
        Ok((row, guest, endpoints, timings)) => {
            install(node, &sandbox, guest, endpoints).await;
            tracing::info!(sandbox = %id, snapshot = %row.snapshot_id, ?timings, "resumed");
            Ok((row, timings))
        }
        Err(error) => {
            sandbox.close(None);
            node.sandboxes.remove(id);
            Err(error)
        }
    }
}

async fn begin(
    node: &Arc<State>,
    sandbox: &Arc<Sandbox>,
    ends: Option<i64>,
    started: Instant,
) -> Result<(SandboxRow, Guest, Endpoints, Timings), NodeError> {
    let (team, id) = (&sandbox.facts.team, &sandbox.facts.id);
    let here = Place { node_id: node.id.clone(), node_url: node.url.clone(), gateway: node.gateway.clone() };
    let row = node.catalog.begin_resume(team, id, &here).await?;
    let restored = async {
        let resident = node.residency.open(team, &row.snapshot_id).await?;
        restore(node, &sandbox.facts, resident, started).await
    };
    let finished = match restored.await {
        Ok((guest, endpoints, timings)) => match node.catalog.finish_resume(team, id, ends).await {
            Ok(row) => return Ok((row, guest, endpoints, timings)),
            Err(error) => {
                guest.vm.kill().await;
                error.into()
            }
        },
        Err(error) => error,
    };
    match node.catalog.abort_resume(team, id).await {
        // Not found: it was killed meanwhile.
        Ok(_) | Err(CatalogError::NotFound { .. }) => {}
        Err(error) => {
            tracing::error!(sandbox = %id, %error, "a failed resume could not be taken back; a restart does it")
        }
    }
    Err(finished)
}
