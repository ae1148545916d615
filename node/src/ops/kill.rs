//! Kill: the end of a sandbox, asked for or not, running or paused.
//!
//! Order: connections are cut, the virtual machine ends, the row and its occupancy go, the id is free. A node that dies
//! in between has no guest and still a row, which its next start ends. Retry: the second call finds nothing.

use std::sync::Arc;

use snapyard_snapstore::catalog::{CatalogError, SandboxState};
use snapyard_snapstore::ids::{SandboxId, TeamId};

use crate::error::NodeError;
use crate::node::State;
use crate::sandbox::{Phase, Sandbox};

/// Ends a sandbox; when this returns its snapshot is no longer occupied by it.
pub async fn kill(node: &State, team: &TeamId, id: &SandboxId) -> Result<(), NodeError> {
    let sandbox = match node.sandboxes.get(team, id) {
        Err(NodeError::NoSandbox(_)) => return kill_paused(node, team, id).await,
        found => found?,
    };
    match sandbox.enter(Phase::Killing) {
        Ok(guard) => guard.forget(),
        // Its time was over, or somebody else was faster: gone when this returns, but not by this call.
        Err(_) if sandbox.phase() == Phase::Killing => {
            sandbox.ended.cancelled().await;
            return kill_paused(node, team, id).await;
        }
        Err(busy) => return Err(busy),
    }
    end(node, &sandbox, None).await
}

/// Ends a sandbox that has no guest on this node because it is paused.
async fn kill_paused(node: &State, team: &TeamId, id: &SandboxId) -> Result<(), NodeError> {
    let none = || NodeError::NoSandbox(id.to_string());
    match node.catalog.get_sandbox(team, id).await {
        Ok(row) if row.state == SandboxState::Paused => {}
        Ok(row) if row.state == SandboxState::Resuming => {
            return Err(NodeError::Busy { sandbox: id.to_string(), phase: "being resumed" });
        }
        Ok(_) | Err(CatalogError::NotFound { .. }) => return Err(none()),
        Err(error) => return Err(error.into()),
    }
    match node.catalog.end_sandbox(team, id).await {
        Ok(row) => {
            node.forget_if_gone(&row.snapshot_id).await;
            Ok(())
        }
        Err(CatalogError::NotFound { .. }) => Err(none()),
        Err(error) => Err(error.into()),
    }
}

/// The guest died, or its bytes cannot be had: the sandbox ends, with the reason kept for those who ask.
pub async fn bury(node: &State, sandbox: &Arc<Sandbox>, reason: &str) {
    if !sandbox.doom() {
        return;
    }
    tracing::warn!(sandbox = %sandbox.facts.id, reason, "lost");
    node.sandboxes.remember_lost(&sandbox.facts.id, reason);
    if let Err(error) = end(node, sandbox, Some(reason)).await {
        tracing::error!(sandbox = %sandbox.facts.id, %error, "the row of a lost sandbox could not be removed");
    }
}

async fn end(node: &State, sandbox: &Arc<Sandbox>, reason: Option<&str>) -> Result<(), NodeError> {
    end_guest(sandbox, reason).await;
    let ended = node.catalog.end_sandbox(&sandbox.facts.team, &sandbox.facts.id).await;
    forget(node, sandbox);
    match ended {
        Ok(row) => {
            node.forget_if_gone(&row.snapshot_id).await;
            Ok(())
        }
        Err(CatalogError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Ends what this node has of a sandbox that lives on without it: paused.
pub async fn dismiss(node: &State, sandbox: &Arc<Sandbox>, reason: Option<&str>) {
    end_guest(sandbox, reason).await;
    forget(node, sandbox);
}

async fn end_guest(sandbox: &Arc<Sandbox>, reason: Option<&str>) {
    sandbox.close(reason);
    let guest = sandbox.guest.lock().await.take();
    if let Some(guest) = guest {
        guest.vm.kill().await;
    }
}

fn forget(node: &State, sandbox: &Arc<Sandbox>) {
    node.sandboxes.remove(&sandbox.facts.id);
    sandbox.ended.cancel();
}

/// Ends every sandbox of the node, for its shutdown.
pub async fn kill_all(node: &Arc<State>) {
    let ends = node.sandboxes.all().into_iter().map(|sandbox| async move {
        sandbox.doom();
        if let Err(error) = end(node, &sandbox, Some("its node was shut down")).await {
            tracing::warn!(sandbox = %sandbox.facts.id, %error, "not ended cleanly");
        }
    });
    futures::future::join_all(ends).await;
}
