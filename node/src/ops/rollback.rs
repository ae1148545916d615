//! Rollback: the sandbox goes back to a snapshot, in place.
//!
//! A rollback is a restore beside the old guest, then a switch. The old guest runs until the new one has answered, so
//! a failure at any point before leaves the sandbox as it was. The switch itself is a conditional move of the
//! occupancy in the catalog; a node that dies after it has no guests left either way. Retry: rolling back twice is
//! the same as once, for the snapshot does not change.

use std::sync::Arc;
use std::time::Instant;

use snapyard_snapstore::catalog::{CatalogError, SnapshotRow};
use snapyard_snapstore::ids::{SandboxId, TeamId};

use super::restore::{Timings, restore};
use crate::error::NodeError;
use crate::node::State;
use crate::sandbox::{Guest, Link, Phase, Sandbox};

/// Rolls back to the snapshot that `reference` (id or full name) names.
pub async fn rollback(
    node: &Arc<State>,
    team: &TeamId,
    id: &SandboxId,
    reference: &str,
) -> Result<(SnapshotRow, Timings), NodeError> {
    let started = Instant::now();
    let sandbox = node.sandboxes.get(team, id)?;
    let target = node.catalog.get_snapshot(team, reference).await?;
    let guard = sandbox.enter(Phase::RollingBack)?;
    // New connections wait for the switch; those of the old guest go on until then.
    let old_link = sandbox.hold();
    let switched = switch(node, &sandbox, &target, &old_link, started).await;
    if switched.is_err() {
        sandbox.release(old_link);
    }
    drop(guard);
    switched.map(|timings| (target, timings))
}

async fn switch(
    node: &Arc<State>,
    sandbox: &Arc<Sandbox>,
    target: &SnapshotRow,
    old_link: &Link,
    started: Instant,
) -> Result<Timings, NodeError> {
    let id = sandbox.facts.id.as_str();
    let shape = {
        let guest = sandbox.guest.lock().await;
        guest.as_ref().ok_or_else(|| NodeError::NoSandbox(id.to_owned()))?.resident.shape()
    };
    let resident = node.residency.open(&sandbox.facts.team, &target.id).await?;
    if resident.shape() != shape {
        return Err(NodeError::Mismatch(format!(
            "snapshot {} was taken on {:?}, sandbox {id} has {shape:?}; create a new sandbox from it instead",
            target.id,
            resident.shape()
        )));
    }
    // Both snapshots are occupied while both guests exist.
    let (team, sandbox_id) = (&sandbox.facts.team, &sandbox.facts.id);
    node.catalog.begin_move(team, sandbox_id, &target.id).await?;
    let (guest, endpoints, timings) = match restore(node, &sandbox.facts, resident, started).await {
        Ok(restored) => restored,
        Err(error) => {
            abort_move(node, sandbox).await;
            return Err(error);
        }
    };
    if let Err(error) = node.catalog.finish_move(team, sandbox_id).await {
        guest.vm.kill().await;
        abort_move(node, sandbox).await;
        return Err(error.into());
    }
    node.guard(sandbox, &guest.vm, endpoints.cut.clone());
    let old = replace(sandbox, guest).await?;
    if let Link::Open(old) = old_link {
        old.cut.cancel();
    }
    sandbox.link.send_replace(Link::Open(endpoints));
    old.vm.kill().await;
    node.forget_if_gone(&old.resident.id).await;
    tracing::info!(sandbox = id, snapshot = %target.id, ?timings, "rolled back");
    Ok(timings)
}

/// Gives the target's occupancy back.
async fn abort_move(node: &State, sandbox: &Sandbox) {
    match node.catalog.abort_move(&sandbox.facts.team, &sandbox.facts.id).await {
        // Not found: the sandbox was ended meanwhile, and all it occupied with it. No move: it had been finished.
        Ok(_) | Err(CatalogError::NotFound { .. } | CatalogError::NoMove { .. }) => {}
        Err(error) => {
            tracing::error!(sandbox = %sandbox.facts.id, %error, "a failed rollback still occupies its target")
        }
    }
}

/// Puts the new guest in the old one's place, unless the sandbox was ended meanwhile.
async fn replace(sandbox: &Arc<Sandbox>, guest: Guest) -> Result<Guest, NodeError> {
    let mut slot = sandbox.guest.lock().await;
    match slot.take() {
        Some(old) if sandbox.phase() == Phase::RollingBack => {
            *slot = Some(guest);
            Ok(old)
        }
        old => {
            *slot = old;
            guest.vm.kill().await;
            Err(NodeError::NoSandbox(sandbox.facts.id.to_string()))
        }
    }
}
