//! Sandboxes, and which snapshots they occupy.
//!
//! ```text
//!   create ─▶ row + occupancy of its snapshot ─▶ … ─▶ end: row and every occupancy of it gone, at once
//!               │                                ▲
//!               └─ begin_move ─▶ occupies both ──┼─ finish_move ─▶ occupies the new one
//!                                                └─ abort_move  ─▶ occupies the old one
//! ```
//!
//! A sandbox's row is made before its VM is started and goes after that has ended, so what a running guest may still read
//! is always occupied. A rollback occupies where it leads before anything is read from there, and leaves where it came
//! from only when the old VM is gone; the row says where it is moving to, so ending a sandbox in the middle of a move, or
//! after a crash in the middle of one, releases both.
//!
//! What the rows of a node that died hold on to is found by `sandboxes_of_node` and released by ending each.

use crate::ids::{NodeId, SandboxId, SnapshotId, TeamId};

use super::error::CatalogError;
use super::idempotency::{Made, gone, mismatch};
use super::kv::Entry;
use super::{Catalog, Committed, Draft, SandboxRow, SandboxState, SnapshotRow, keys, until_settled, wire};

impl Catalog {
    /// Makes a sandbox exist and occupy its snapshot, or nothing at all. The snapshot must be the team's and usable.
    pub async fn create_sandbox(&self, row: &SandboxRow) -> Result<Committed<SandboxRow>, CatalogError> {
        if row.moving_to.is_some() {
            return Err(CatalogError::invalid("moving_to", "a new sandbox is not moving anywhere"));
        }
        let outcome = until_settled!(format_args!("creating sandbox {}", row.id), {
            let mut draft = Draft::default();
            if let Some(request) = &row.idempotency {
                match self.remember(&mut draft, &row.team, request, Made::Sandbox(row.id.clone())).await? {
                    None => {}
                    Some(made @ Made::Sandbox(_)) => {
                        let Made::Sandbox(earlier) = &made else { return Err(mismatch(request)) };
                        let found = self.row::<SandboxRow>(keys::sandbox(earlier)).await?;
                        let found = found.filter(|(found, _)| found.team == row.team);
                        break Committed::Replayed(found.map(|(found, _)| found).ok_or_else(|| gone(request, &made))?);
                    }
                    Some(Made::Snapshot(_)) => return Err(mismatch(request)),
                }
            }
            let key = keys::sandbox(&row.id);
            if self.kv.get(key.clone()).await?.is_some() {
                return Err(CatalogError::SandboxExists { id: row.id.clone() });
            }
            self.draft_occupancy(&mut draft, &row.team, &row.snapshot_id, &row.id).await?;
            draft.require_absent(key.clone());
            draft.put_row(key, row)?;
            draft.mark(keys::timed(&keys::sandboxes(&row.team), row.started_unix_ms, &row.id));
            draft.mark(keys::on_node(&row.node_id, &row.id));
            if self.send(draft).await? {
                break Committed::New(row.clone());
            }
        });
        if row.idempotency.is_some() && matches!(outcome, Committed::New(_)) {
            self.forget_over_age().await;
        }
        Ok(outcome)
    }

    /// Requires that the snapshot is the team's and usable, and occupies it.
    async fn draft_occupancy(
        &self,
        draft: &mut Draft,
        team: &TeamId,
        snapshot: &SnapshotId,
        sandbox: &SandboxId,
    ) -> Result<(), CatalogError> {
        let found = self.row::<SnapshotRow>(keys::snapshot(snapshot)).await?;
        let (_, entry) = found
            .filter(|(found, _)| found.team == *team && found.is_usable(self.now()))
            .ok_or_else(|| CatalogError::not_found("snapshot", snapshot))?;
        draft.require_unchanged(&entry);
        draft.mark(keys::occupancy(snapshot, sandbox));
        Ok(())
    }

    pub(super) async fn sandbox_entry(
        &self,
        team: &TeamId,
        id: &SandboxId,
    ) -> Result<(SandboxRow, Entry), CatalogError> {
        let found = self.row::<SandboxRow>(keys::sandbox(id)).await?;
        found.filter(|(row, _)| row.team == *team).ok_or_else(|| CatalogError::not_found("sandbox", id))
    }

    /// The team's sandbox.
    pub async fn get_sandbox(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, CatalogError> {
        self.sandbox_entry(team, id).await.map(|(row, _)| row)
    }

    /// A sandbox of whatever team: what a proxy has is only the id in a host name.
    pub async fn find_sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, CatalogError> {
        Ok(self.row::<SandboxRow>(keys::sandbox(id)).await?.map(|(row, _)| row))
    }

    /// Changes a sandbox's row. `change` is called again on the newer row if somebody else changed it meanwhile; an error
    /// of it ends the matter. What identifies the sandbox, when it started and what it occupies must stay.
    pub async fn update_sandbox<F>(
        &self,
        team: &TeamId,
        id: &SandboxId,
        mut change: F,
    ) -> Result<SandboxRow, CatalogError>
    where
        F: FnMut(&mut SandboxRow) -> Result<(), CatalogError> + Send,
    {
        until_settled!(format_args!("changing sandbox {id}"), {
            let (old, entry) = self.sandbox_entry(team, id).await?;
            let mut new = old.clone();
            change(&mut new)?;
            if new == old {
                break Ok(new);
            }
            let fixed = |row: &SandboxRow| {
                (row.id.clone(), row.team.clone(), row.snapshot_id, row.moving_to, row.started_unix_ms)
            };
            if fixed(&new) != fixed(&old) {
                return Err(CatalogError::invalid("sandbox", "its id, team, start and snapshots cannot be changed"));
            }
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &new)?;
            if new.node_id != old.node_id {
                draft.delete(keys::on_node(&old.node_id, id));
                draft.mark(keys::on_node(&new.node_id, id));
            }
            if self.send(draft).await? {
                break Ok(new);
            }
        })
    }

    /// Makes a sandbox cease to exist and releases what it occupies. A second time it is not found.
    pub async fn end_sandbox(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, CatalogError> {
        let row = until_settled!(format_args!("ending sandbox {id}"), {
            let (row, entry) = self.sandbox_entry(team, id).await?;
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.delete(entry.key);
            draft.delete(keys::timed(&keys::sandboxes(&row.team), row.started_unix_ms, id));
            draft.delete(keys::on_node(&row.node_id, id));
            for snapshot in occupied(&row) {
                draft.delete(keys::occupancy(snapshot, id));
            }
            if matches!(row.state, SandboxState::Paused | SandboxState::Resuming) {
                // Nobody else can ever start from it.
                self.draft_condemnation(&mut draft, &row.snapshot_id).await?;
            }
            if self.send(draft).await? {
                break row;
            }
        });
        for snapshot in occupied(&row) {
            self.collect_condemned(snapshot).await?;
        }
        Ok(row)
    }

    /// Every sandbox whose row says that it is on this node, in no order.
    pub async fn sandboxes_of_node(&self, node: &NodeId) -> Result<Vec<SandboxRow>, CatalogError> {
        let mut rows = Vec::new();
        for entry in self.scan(keys::under(&keys::of_node(node))).await? {
            if let Some((row, _)) = self.row::<SandboxRow>(keys::sandbox(&wire::id_of_key(&entry.key)?)).await?
                && row.node_id == *node
            {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Begins a rollback: occupies `to` besides what the sandbox occupies already. `to` must be the team's and usable.
    pub async fn begin_move(&self, team: &TeamId, id: &SandboxId, to: &SnapshotId) -> Result<SandboxRow, CatalogError> {
        until_settled!(format_args!("moving sandbox {id} to snapshot {to}"), {
            let (mut row, entry) = self.sandbox_entry(team, id).await?;
            if let Some(to) = row.moving_to {
                return Err(CatalogError::MoveInProgress { id: id.clone(), to });
            }
            let mut draft = Draft::default();
            self.draft_occupancy(&mut draft, team, to, id).await?;
            row.moving_to = Some(*to);
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if self.send(draft).await? {
                break Ok(row);
            }
        })
    }

    /// Ends a rollback that succeeded: the sandbox is of the new snapshot, and no longer occupies the old one.
    pub async fn finish_move(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, CatalogError> {
        self.end_move(team, id, |row, to| std::mem::replace(&mut row.snapshot_id, to)).await
    }

    /// Ends a rollback that failed: the sandbox is as it was before.
    pub async fn abort_move(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, CatalogError> {
        self.end_move(team, id, |_, to| to).await
    }

    /// `settle` puts the row in its new state and answers which snapshot is left.
    async fn end_move(
        &self,
        team: &TeamId,
        id: &SandboxId,
        settle: impl Fn(&mut SandboxRow, SnapshotId) -> SnapshotId + Send,
    ) -> Result<SandboxRow, CatalogError> {
        let (row, left) = until_settled!(format_args!("ending the move of sandbox {id}"), {
            let (mut row, entry) = self.sandbox_entry(team, id).await?;
            let to = row.moving_to.take().ok_or_else(|| CatalogError::NoMove { id: id.clone() })?;
            let left = settle(&mut row, to);
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if left != row.snapshot_id {
                draft.delete(keys::occupancy(&left, id));
            }
            if self.send(draft).await? {
                break (row, left);
            }
        });
        self.collect_condemned(&left).await?;
        Ok(row)
    }
}

/// The snapshots that a sandbox occupies, each once.
fn occupied(row: &SandboxRow) -> impl Iterator<Item = &SnapshotId> {
    [Some(&row.snapshot_id), row.moving_to.as_ref().filter(|to| **to != row.snapshot_id)].into_iter().flatten()
}
