//! Snapshots: commit, look-up, deletion.
//!
//! ```text
//!             commit ──▶ usable ──expires──▶ expired ──retention, nothing occupies it──▶ gone
//!                          │                    └──retention, occupied──▶ condemned
//!   (a template's own)     ├──template deleted──────────────────────────▶ condemned ── nothing occupies it ─▶ gone
//!   (a paused sandbox's)   ├──sandbox resumed───────────────────────────▶ condemned
//!                          └──delete, nothing occupies it──▶ gone
//! ```
//!
//! A snapshot exists when its commit is, never earlier: row, manifest, name, index entries and pack rows come in one
//! transaction. Before it there are only packs on the node that nobody refers to. It is gone in one transaction too.
//!
//! Retries: a commit sent twice finds its own row (by id) or its idempotency key, and answers it. A delete sent twice
//! finds nothing, and says so.
//!
//! Names: the name's row says who holds it. A commit may take it from a holder that is expired or condemned, and then
//! also takes the name out of the holder's row: whatever clocks do afterwards, two rows never claim one name.

use std::collections::HashSet;

use bytes::Bytes;

use crate::ids::{PackId, SandboxId, SnapshotId, TeamId};
use crate::pack::PackRef;

use super::error::CatalogError;
use super::idempotency::{Made, gone, mismatch};
use super::kv::{Entry, Order};
use super::leases::WriterLease;
use super::names::{FullName, SnapshotName};
use super::{Catalog, Committed, Draft, SnapshotRow, keys, until_settled, wire};

/// The largest manifest that the catalog takes: what an engine of the cluster has room for in one request.
pub const MAX_MANIFEST_BYTES: usize = 1 << 20;

/// Occupants that an error counts.
const COUNTED: usize = 100;

/// A snapshot about to exist.
#[derive(Debug, Clone)]
pub struct SnapshotCommit {
    /// Its row.
    pub row: SnapshotRow,
    /// Its manifest, encoded.
    pub manifest: Bytes,
    /// Every pack that the manifest names.
    pub packs: Vec<PackRef>,
    /// The packs among them that are sealed on the committing node's own disk and were not uploaded yet. Only those may be
    /// new to the catalog: of any other, no row means that it was deleted.
    pub staged: HashSet<PackId>,
    /// The process that wrote it, which must not have been counted as dead meanwhile. None: whoever commits knows that no
    /// collector runs.
    pub writer: Option<WriterLease>,
}

/// What all snapshots come to, those of templates included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotTotals {
    /// How many.
    pub snapshots: u64,
    /// Guest memory and disk of all of them.
    pub logical_bytes: u64,
}

impl Catalog {
    /// Makes a snapshot exist, or nothing at all. Errors: the name is taken, packs are not live, the writer's lease
    /// is lost, the idempotency key was used otherwise.
    pub async fn commit_snapshot(&self, commit: &SnapshotCommit) -> Result<Committed<SnapshotRow>, CatalogError> {
        let row = &commit.row;
        if row.condemned || row.internal && (row.name.is_some() || row.expires_unix_ms.is_none()) {
            return Err(CatalogError::invalid("snapshot", "one that nobody sees has no name, and expires"));
        }
        let outcome = until_settled!(format_args!("committing snapshot {}", row.id), {
            let mut draft = Draft::default();
            if let Some(earlier) = self.draft_commit(&mut draft, commit).await? {
                break Committed::Replayed(earlier);
            }
            if self.send(draft).await? {
                break Committed::New(row.clone());
            }
        });
        if row.idempotency.is_some() && matches!(outcome, Committed::New(_)) {
            self.forget_over_age().await;
        }
        Ok(outcome)
    }

    /// Everything a new snapshot consists of. Answers the row instead if an earlier try made it.
    pub(super) async fn draft_commit(
        &self,
        draft: &mut Draft,
        commit: &SnapshotCommit,
    ) -> Result<Option<SnapshotRow>, CatalogError> {
        let SnapshotCommit { row, manifest, packs, staged, writer } = commit;
        if manifest.len() > MAX_MANIFEST_BYTES {
            let reason = format!("of {} bytes, at most {MAX_MANIFEST_BYTES} fit", manifest.len());
            return Err(CatalogError::invalid("manifest", reason));
        }
        let key = keys::snapshot(&row.id);
        if let Some((found, _)) = self.row::<SnapshotRow>(key.clone()).await? {
            // Ids are random: the same one again is the same commit again, its outcome having been unknown.
            return if found.team == row.team {
                Ok(Some(found))
            } else {
                Err(CatalogError::invalid("snapshot id", format!("{} exists", row.id)))
            };
        }
        if let Some(request) = &row.idempotency {
            match self.remember(draft, &row.team, request, Made::Snapshot(row.id)).await? {
                None => {}
                Some(Made::Snapshot(earlier)) => {
                    let found = self.row::<SnapshotRow>(keys::snapshot(&earlier)).await?;
                    let found = found.filter(|(found, _)| found.is_visible(self.now()));
                    return found.map(|(found, _)| Some(found)).ok_or_else(|| gone(request, &Made::Snapshot(earlier)));
                }
                Some(Made::Sandbox(_)) => return Err(mismatch(request)),
            }
        }
        if let Some(name) = &row.name {
            self.draft_name(draft, row, name).await?;
        }
        self.use_packs(draft, packs, staged).await?;
        if let Some(writer) = writer {
            self.draft_writer(draft, writer).await?;
        }

        draft.require_absent(key.clone());
        draft.put_row(key, row)?;
        draft.put(keys::manifest(&row.id), manifest.clone());
        for entry in index_entries(row) {
            draft.mark(entry);
        }
        draft.mark(keys::upload(&row.id));
        Ok(None)
    }

    /// Gives the name to `row`, if it is free or its holder is not usable any more.
    async fn draft_name(&self, draft: &mut Draft, row: &SnapshotRow, name: &SnapshotName) -> Result<(), CatalogError> {
        let key = keys::name(&row.team, name);
        let held = self.kv.get(key.clone()).await?;
        if let Some(entry) = &held {
            let holder: SnapshotId = wire::decode_id(entry)?;
            let found = self.row::<SnapshotRow>(keys::snapshot(&holder)).await?;
            if let Some((mut holder, holder_entry)) = found {
                if holder.is_usable(self.now()) {
                    return Err(CatalogError::NameTaken { name: name.to_string(), holder: holder.id });
                }
                holder.name = None;
                draft.require_unchanged(&holder_entry);
                draft.put_row(holder_entry.key, &holder)?;
            } else {
                draft.require_absent(keys::snapshot(&holder));
            }
        }
        draft.require_as_read(key.clone(), held.as_ref());
        draft.put(key, row.id.to_string());
        Ok(())
    }

    /// Who a name's row names, if there is such a row and snapshot: usable or not.
    pub(super) async fn name_holder(
        &self,
        team: &TeamId,
        name: &SnapshotName,
    ) -> Result<Option<(SnapshotRow, Entry)>, CatalogError> {
        let Some(entry) = self.kv.get(keys::name(team, name)).await? else { return Ok(None) };
        self.row(keys::snapshot(&wire::decode_id(&entry)?)).await
    }

    /// The snapshot's row, whoever owns it and whether or not it is usable: for the node's own purposes.
    pub async fn snapshot_row(&self, id: &SnapshotId) -> Result<Option<SnapshotRow>, CatalogError> {
        Ok(self.row::<SnapshotRow>(keys::snapshot(id)).await?.map(|(row, _)| row))
    }

    /// A snapshot that the team can see, by id or full name (`team/short[:tag]`).
    pub async fn get_snapshot(&self, team: &TeamId, reference: &str) -> Result<SnapshotRow, CatalogError> {
        self.visible(team, reference).await.map(|(row, _)| row)
    }

    /// The same with its entry. A reference that is neither a UUID nor a name is of no snapshot; only a slash in a wrong
    /// place is an error of its own.
    async fn visible(&self, team: &TeamId, reference: &str) -> Result<(SnapshotRow, Entry), CatalogError> {
        let text = reference.trim();
        let found = if text.contains('/') {
            self.by_full_name(team, &FullName::parse(text)?).await?
        } else if let Ok(id) = text.parse() {
            self.row::<SnapshotRow>(keys::snapshot(&id)).await?
        } else {
            None
        };
        found
            .filter(|(row, _)| row.team == *team && row.is_visible(self.now()))
            .ok_or_else(|| CatalogError::not_found("snapshot", reference))
    }

    async fn by_full_name(&self, team: &TeamId, full: &FullName) -> Result<Option<(SnapshotRow, Entry)>, CatalogError> {
        // Another team's snapshot does not exist for this one.
        match self.team(team).await {
            Ok(own) if own.name.as_ref() == Some(&full.team) => self.name_holder(team, &full.name).await,
            Ok(_) | Err(CatalogError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A snapshot's manifest, encoded. For as long as its row exists, usable or not.
    pub async fn manifest(&self, id: &SnapshotId) -> Result<Bytes, CatalogError> {
        let found = self.kv.get(keys::manifest(id)).await?;
        found.map(|entry| entry.value).ok_or_else(|| CatalogError::not_found("snapshot", id))
    }

    /// Deletes a snapshot that the team can see, by id or full name, unless a sandbox occupies it.
    pub async fn delete_snapshot(&self, team: &TeamId, reference: &str) -> Result<SnapshotId, CatalogError> {
        until_settled!(format_args!("deleting snapshot {reference}"), {
            let (row, entry) = self.visible(team, reference).await?;
            let occupants = self.kv.range(keys::under(&keys::occupants(&row.id)), COUNTED, Order::Ascending).await?;
            if let Some(first) = occupants.first() {
                let example: SandboxId = wire::id_of_key(&first.key)?;
                return Err(CatalogError::Occupied { snapshot: row.id, count: occupants.len(), example });
            }
            if self.send(draft_removal(&row, &entry)).await? {
                break Ok(row.id);
            }
        })
    }

    /// Lets a snapshot that its team does not see go with its last sandbox; at once if there is none. Nothing if it is gone.
    pub async fn discard_hidden(&self, team: &TeamId, id: &SnapshotId) -> Result<(), CatalogError> {
        until_settled!(format_args!("discarding snapshot {id}"), {
            let Some((row, entry)) = self.row::<SnapshotRow>(keys::snapshot(id)).await? else { return Ok(()) };
            if row.team != *team || !row.internal || row.sandbox_id.is_none() {
                return Err(CatalogError::not_found("hidden snapshot", id));
            }
            if row.condemned {
                break;
            }
            let mut draft = Draft::default();
            draft_condemnation(&mut draft, row, entry)?;
            if self.send(draft).await? {
                break;
            }
        });
        self.collect_condemned(id).await.map(drop)
    }

    /// Counts every snapshot. Reads all rows: for people, not for every request.
    pub async fn snapshot_totals(&self) -> Result<SnapshotTotals, CatalogError> {
        let mut totals = SnapshotTotals::default();
        for entry in self.scan(keys::under(keys::SNAPSHOTS)).await? {
            let row: SnapshotRow = wire::decode(&entry)?;
            totals.snapshots += 1;
            totals.logical_bytes += row.logical_bytes;
        }
        Ok(totals)
    }

    /// Every occupancy: which sandbox holds which snapshot. For operators and tests.
    pub async fn occupancy_rows(&self) -> Result<Vec<(SnapshotId, SandboxId)>, CatalogError> {
        let entries = self.scan(keys::under(keys::OCCUPANCIES)).await?;
        entries
            .iter()
            .map(|entry| {
                let damaged = || wire::corrupt(&entry.key, "is not occupancy/<snapshot>/<sandbox>".into());
                let end = entry.key.len().checked_sub(keys::tail(&entry.key).len() + 1).ok_or_else(damaged)?;
                Ok((wire::id_of_key(&entry.key[..end])?, wire::id_of_key(&entry.key)?))
            })
            .collect()
    }

    /// Adds to `draft` that a snapshot, if it exists, is to go when nothing occupies it, and is not usable from now on.
    pub(super) async fn draft_condemnation(&self, draft: &mut Draft, id: &SnapshotId) -> Result<(), CatalogError> {
        match self.row::<SnapshotRow>(keys::snapshot(id)).await? {
            Some((row, entry)) => draft_condemnation(draft, row, entry),
            None => Ok(()),
        }
    }

    /// Removes the snapshot if it is condemned and nothing occupies it. Called after whatever may have made that so: of
    /// two that race (the last sandbox ending, the template being deleted) the later one finds both true. Returns whether it
    /// was removed by this call.
    pub(super) async fn collect_condemned(&self, id: &SnapshotId) -> Result<bool, CatalogError> {
        until_settled!(format_args!("removing condemned snapshot {id}"), {
            let Some((row, entry)) = self.row::<SnapshotRow>(keys::snapshot(id)).await? else { break Ok(false) };
            if !row.condemned || self.is_occupied(id).await? {
                break Ok(false);
            }
            if self.send(draft_removal(&row, &entry)).await? {
                break Ok(true);
            }
        })
    }

    /// Removes every condemned snapshot that nothing occupies. Returns which.
    pub(super) async fn collect_all_condemned(&self) -> Result<Vec<SnapshotId>, CatalogError> {
        let mut removed = Vec::new();
        for entry in self.scan(keys::under(keys::CONDEMNED)).await? {
            let id = wire::id_of_key(&entry.key)?;
            if self.collect_condemned(&id).await? {
                removed.push(id);
            }
        }
        Ok(removed)
    }

    pub(super) async fn is_occupied(&self, id: &SnapshotId) -> Result<bool, CatalogError> {
        Ok(!self.kv.range(keys::under(&keys::occupants(id)), 1, Order::Ascending).await?.is_empty())
    }
}

/// The entries that stand for `row` in the indexes.
fn index_entries(row: &SnapshotRow) -> Vec<super::kv::Key> {
    let mut entries = Vec::new();
    if !row.internal {
        entries.push(keys::timed(&keys::listing(&row.team), row.created_unix_ms, &row.id));
    }
    if let Some(sandbox) = &row.sandbox_id {
        entries.push(keys::timed(&keys::taken(sandbox), row.created_unix_ms, &row.id));
    }
    if let Some(expires) = row.expires_unix_ms {
        entries.push(keys::timed(keys::EXPIRY, expires, &row.id));
    }
    entries
}

/// Makes a snapshot, if it is as it was read, one that goes when nothing occupies it, and frees its name.
pub(super) fn draft_condemnation(draft: &mut Draft, mut row: SnapshotRow, entry: Entry) -> Result<(), CatalogError> {
    draft.require_unchanged(&entry);
    row.condemned = true;
    if let Some(name) = row.name.take() {
        draft.delete(keys::name(&row.team, &name));
    }
    if let Some(expires) = row.expires_unix_ms {
        draft.delete(keys::timed(keys::EXPIRY, expires, &row.id));
    }
    draft.mark(keys::condemned(&row.id));
    draft.put_row(entry.key, &row)
}

/// Removes all of a snapshot, if it is as it was read and nothing occupies it.
pub(super) fn draft_removal(row: &SnapshotRow, entry: &Entry) -> Draft {
    let mut draft = Draft::default();
    draft.require_unchanged(entry);
    draft.require_empty(keys::under(&keys::occupants(&row.id)));
    draft.delete(entry.key.clone());
    draft.delete(keys::manifest(&row.id));
    draft.delete(keys::working_set(&row.id));
    for key in index_entries(row) {
        draft.delete(key);
    }
    draft.delete(keys::upload(&row.id));
    // The row says that it has the name, so the name's row is its own (rule 1 of the module above).
    if let Some(name) = &row.name {
        draft.delete(keys::name(&row.team, name));
    }
    if row.condemned {
        draft.delete(keys::condemned(&row.id));
    }
    draft
}
