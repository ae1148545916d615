//! Sandboxes without a VM: paused, and resumed.
//!
//! ```text
//!   running ──commit_pause──▶ paused ──begin_resume──▶ resuming ──finish_resume──▶ running
//!              its snapshot,    ▲ │                       │          the snapshot is condemned:
//!              internal         │ │                       │          it goes when the sandbox has left it
//!                               │ │                       │
//!                               └─┼──────abort_resume─────┘
//!                                 └──the snapshot expires──▶ gone (see `retention`)
//! ```
//!
//! The snapshot that a pause makes is nobody's but the sandbox's: not listed, not nameable, not to be created from. It comes
//! to be in the transaction in which the sandbox becomes paused and occupies it, so a crash leaves either a running
//! sandbox, whose VM its node's next start finds dead, or a paused one. A resume that a crash cut short is found by the
//! node's next start ([`Catalog::sandboxes_of_node`]) and taken back.
//!
//! Retries: a pause sent twice finds its own snapshot and answers the row; a resume sent twice finds the sandbox no
//! longer paused.

use crate::ids::{NodeId, SandboxId, TeamId};

use super::error::CatalogError;
use super::{Catalog, Draft, SandboxRow, SandboxState, SnapshotCommit, SnapshotRow, keys, until_settled};

/// Where a sandbox is to run from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The node.
    pub node_id: NodeId,
    /// Its gRPC endpoint.
    pub node_url: String,
    /// `host:port` of its guest gateway.
    pub gateway: String,
}

impl Catalog {
    /// Commits the snapshot that holds a sandbox's state and makes the sandbox paused on it, in one transaction.
    /// `commit.row` must be internal, without a name, of the sandbox, and expire; with it the paused sandbox ends.
    pub async fn commit_pause(&self, commit: &SnapshotCommit) -> Result<SandboxRow, CatalogError> {
        let snapshot = &commit.row;
        let refuse = || CatalogError::invalid("snapshot", "a pause's is internal, nameless, expiring and of a sandbox");
        let id = snapshot.sandbox_id.as_ref().ok_or_else(refuse)?;
        let expires = snapshot.expires_unix_ms.ok_or_else(refuse)?;
        if !snapshot.internal || snapshot.condemned || snapshot.name.is_some() {
            return Err(refuse());
        }
        let (row, left) = until_settled!(format_args!("pausing sandbox {id}"), {
            let (mut row, entry) = self.sandbox_entry(&snapshot.team, id).await?;
            if row.snapshot_id == snapshot.id {
                // An earlier try, whose outcome was unknown.
                return Ok(row);
            }
            if let Some(to) = row.moving_to {
                return Err(CatalogError::MoveInProgress { id: id.clone(), to });
            }
            in_state(&row, SandboxState::Running)?;
            let mut draft = Draft::default();
            if self.draft_commit(&mut draft, commit).await?.is_some() {
                return Err(CatalogError::invalid("snapshot id", format!("{} exists", snapshot.id)));
            }
            let left = std::mem::replace(&mut row.snapshot_id, snapshot.id);
            row.state = SandboxState::Paused;
            row.ends_unix_ms = Some(expires);
            draft.delete(keys::occupancy(&left, id));
            draft.mark(keys::occupancy(&snapshot.id, id));
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if self.send(draft).await? {
                break (row, left);
            }
        });
        self.collect_condemned(&left).await?;
        Ok(row)
    }

    /// A paused sandbox is about to be restored at `place`. Its environment comes with the row.
    pub async fn begin_resume(&self, team: &TeamId, id: &SandboxId, place: &Place) -> Result<SandboxRow, CatalogError> {
        self.update_sandbox(team, id, |row| {
            in_state(row, SandboxState::Paused)?;
            row.state = SandboxState::Resuming;
            row.node_id = place.node_id.clone();
            row.node_url.clone_from(&place.node_url);
            row.gateway.clone_from(&place.gateway);
            Ok(())
        })
        .await
    }

    /// A resumed sandbox runs, until `ends_unix_ms`. The snapshot that held its state goes when it has left that.
    pub async fn finish_resume(
        &self,
        team: &TeamId,
        id: &SandboxId,
        ends_unix_ms: Option<i64>,
    ) -> Result<SandboxRow, CatalogError> {
        until_settled!(format_args!("resuming sandbox {id}"), {
            let (mut row, entry) = self.sandbox_entry(team, id).await?;
            in_state(&row, SandboxState::Resuming)?;
            row.state = SandboxState::Running;
            row.ends_unix_ms = ends_unix_ms;
            let mut draft = Draft::default();
            self.draft_condemnation(&mut draft, &row.snapshot_id).await?;
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if self.send(draft).await? {
                break Ok(row);
            }
        })
    }

    /// A resume that failed, or that nobody goes on with: the sandbox is paused as it was.
    pub async fn abort_resume(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, CatalogError> {
        self.update_sandbox(team, id, |row| {
            in_state(row, SandboxState::Resuming)?;
            row.state = SandboxState::Paused;
            Ok(())
        })
        .await
    }

    /// The sandbox that the snapshot was made for by a pause, if it still is of that snapshot.
    pub(super) async fn held_by(&self, snapshot: &SnapshotRow) -> Result<Option<SandboxRow>, CatalogError> {
        let Some(id) = snapshot.sandbox_id.as_ref().filter(|_| snapshot.internal) else { return Ok(None) };
        Ok(self.find_sandbox(id).await?.filter(|row| row.snapshot_id == snapshot.id))
    }
}

fn in_state(row: &SandboxRow, wanted: SandboxState) -> Result<(), CatalogError> {
    if row.state == wanted {
        return Ok(());
    }
    Err(CatalogError::State { id: row.id.clone(), state: row.state, wanted })
}
