//! Retention: snapshots whose time is over go.
//!
//! ```text
//!   expired, nothing occupies it ──▶ gone
//!   expired, a paused sandbox's ──▶ sandbox and snapshot gone
//!   expired, occupied ──▶ condemned: name free, not usable, its content kept ──last occupant ends──▶ gone
//! ```
//!
//! Each snapshot is one conditional transaction, so any number of processes may do this at once, and stop anywhere. What
//! one of them has dealt with has no expiry entry any more: the next round begins with the rest. The time is the
//! catalog's clock; a sandbox that is created at the same moment either finds the snapshot expired or occupies it first.

use crate::ids::SnapshotId;

use super::error::{CatalogError, ErrorKind};
use super::kv::{Entry, Order};
use super::snapshots::{draft_condemnation, draft_removal};
use super::{Catalog, Draft, SandboxState, SnapshotRow, keys, until_settled, wire};

/// What a round of retention did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expired {
    /// Snapshots that are gone.
    pub removed: Vec<SnapshotId>,
    /// Snapshots that go when their last sandbox ends.
    pub condemned: Vec<SnapshotId>,
    /// Rows that could not be read, and stay.
    pub damaged: u64,
    /// Whether there are more to do: the round ended at its limit.
    pub more: bool,
}

impl Expired {
    fn note_damage(&mut self, error: &CatalogError) {
        tracing::error!(%error, "a snapshot cannot expire");
        self.damaged += 1;
    }
}

enum Fate {
    Removed,
    Condemned,
    /// Somebody else was faster.
    Settled,
}

impl Catalog {
    /// Deals with up to `limit` snapshots whose time is over, and removes what a crash left condemned and unoccupied.
    pub async fn expire(&self, limit: usize) -> Result<Expired, CatalogError> {
        let mut over = keys::under(keys::EXPIRY);
        over.end = format!("{}{}", keys::EXPIRY, keys::time(self.now().saturating_add(1))).into_bytes();
        let entries = self.kv.range(over, limit, Order::Ascending).await?;
        let mut expired = Expired { more: entries.len() == limit, ..Expired::default() };
        for entry in entries {
            let id: SnapshotId = match wire::id_of_key(&entry.key) {
                Ok(id) => id,
                Err(error) => {
                    expired.note_damage(&error);
                    continue;
                }
            };
            match self.expire_one(&id, &entry).await {
                Ok(Fate::Removed) => expired.removed.push(id),
                Ok(Fate::Condemned) => expired.condemned.push(id),
                Ok(Fate::Settled) => {}
                // One row that cannot be read does not keep the others.
                Err(error) if error.kind() == ErrorKind::Corrupt => expired.note_damage(&error),
                Err(error) => return Err(error),
            }
        }
        // Those just condemned may have lost their last occupant meanwhile; others were left by a crash.
        let removed = self.collect_all_condemned().await?;
        expired.condemned.retain(|id| !removed.contains(id));
        expired.removed.extend(removed);
        Ok(expired)
    }

    async fn expire_one(&self, id: &SnapshotId, expiry: &Entry) -> Result<Fate, CatalogError> {
        until_settled!(format_args!("expiring snapshot {id}"), {
            let found = self.row::<SnapshotRow>(keys::snapshot(id)).await?;
            let own = |row: &SnapshotRow| {
                row.expires_unix_ms.is_some_and(|expires| keys::timed(keys::EXPIRY, expires, id) == expiry.key)
            };
            let (draft, fate) = match found {
                Some((row, entry)) if own(&row) && !row.condemned => {
                    if row.is_usable(self.now()) {
                        // The clock went back.
                        break Ok(Fate::Settled);
                    }
                    match self.held_by(&row).await? {
                        Some(sandbox) if sandbox.state == SandboxState::Paused => {
                            // The sandbox has no other life than this; a resume that begins now finds it gone.
                            tracing::info!(sandbox = %sandbox.id, "ended: it was paused for as long as is allowed");
                            self.end_sandbox(&sandbox.team, &sandbox.id).await?;
                            break Ok(Fate::Removed);
                        }
                        // Whatever comes of it, the next round knows.
                        Some(sandbox) if sandbox.state == SandboxState::Resuming => break Ok(Fate::Settled),
                        _ => {}
                    }
                    if self.is_occupied(id).await? {
                        let mut draft = Draft::default();
                        draft_condemnation(&mut draft, row, entry)?;
                        (draft, Fate::Condemned)
                    } else {
                        (draft_removal(&row, &entry), Fate::Removed)
                    }
                }
                // An entry that stands for nothing; or the row went meanwhile, and the entry with it.
                found => {
                    let mut draft = Draft::default();
                    draft.require_as_read(keys::snapshot(id), found.as_ref().map(|(_, entry)| entry));
                    draft.delete(expiry.key.clone());
                    (draft, Fate::Settled)
                }
            };
            if self.send(draft).await? {
                break Ok(fate);
            }
        })
    }
}
