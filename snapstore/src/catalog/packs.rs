//! Packs: one small row for each that a committed snapshot uses, so that collecting garbage can be conditional.
//!
//! ```text
//!   (absent) ──commit; staged on the committing node──▶ live ◀───────────────┐ used after all
//!      │                                                  │ no snapshot uses it │
//!      └──(collector) an object without a row──────▶ condemned ──────────────┘
//!                                                         │ long enough, and a look that began later agrees
//!                                                       doomed ──object deleted──▶ gone ──a week──▶ (absent)
//! ```
//!
//! A commit requires each of its packs to be live, in the same transaction as the manifest, so no snapshot ever names a
//! pack that was on its way out. A commit does not touch the rows that it finds: two that use one pack do not contend.
//! A row is made only for a pack that is sealed on the committing node's own disk: what a node merely believes to be in
//! the blob store, and has no row, was deleted there. A pack's id is never made twice, so what is doomed stays away.

use std::collections::HashSet;

use crate::ids::PackId;
use crate::pack::PackRef;

use super::error::CatalogError;
use super::kv::{Order, Revision};
use super::leases::Lease;
use super::{Catalog, Draft, PackRow, PackState, SCAN_BATCH, keys, wire};

impl Catalog {
    /// Requires every pack to be live, and makes the rows of those that are new: only what is `staged` can be.
    pub(super) async fn use_packs(
        &self,
        draft: &mut Draft,
        packs: &[PackRef],
        staged: &HashSet<PackId>,
    ) -> Result<(), CatalogError> {
        let now = self.now();
        let mut seen = HashSet::new();
        let mut refused = Vec::new();
        let packs: Vec<&PackRef> = packs.iter().filter(|pack| seen.insert(pack.id)).collect();
        let found = self.kv.get_many(packs.iter().map(|pack| keys::pack(&pack.id)).collect()).await?;
        for (pack, entry) in packs.into_iter().zip(found) {
            #[cfg(test)]
            if entry.is_some() && crate::mutant::is_on(crate::mutant::Mutant::CommitAnyPack) {
                continue;
            }
            match entry {
                Some(entry) => match wire::decode::<PackRow>(&entry)?.state {
                    PackState::Live => draft.require_unchanged(&entry),
                    PackState::Condemned | PackState::Doomed | PackState::Gone => refused.push(pack.id),
                },
                None if staged.contains(&pack.id) => {
                    let row = PackRow {
                        id: pack.id,
                        size_bytes: pack.size_bytes,
                        chunks: pack.chunks,
                        state: PackState::Live,
                        created_unix_ms: now,
                        since_unix_ms: now,
                    };
                    draft.require_absent(keys::pack(&pack.id));
                    draft.put_row(keys::pack(&pack.id), &row)?;
                }
                None => refused.push(pack.id),
            }
        }
        if refused.is_empty() { Ok(()) } else { Err(CatalogError::PacksNotLive { packs: refused }) }
    }

    /// The row of a pack, if it has one.
    pub async fn pack(&self, id: &PackId) -> Result<Option<PackRow>, CatalogError> {
        Ok(self.row::<PackRow>(keys::pack(id)).await?.map(|(row, _)| row))
    }

    /// Which of these packs a snapshot may still need: those that are live or condemned. What is staged on a node and not
    /// among them is deleted, or an orphan, or of a snapshot that is still being committed.
    pub async fn packs_kept(&self, packs: &HashSet<PackId>) -> Result<HashSet<PackId>, CatalogError> {
        self.packs_in(packs, &[PackState::Live, PackState::Condemned]).await
    }

    /// Which of these packs are live.
    pub async fn packs_live(&self, packs: &HashSet<PackId>) -> Result<HashSet<PackId>, CatalogError> {
        self.packs_in(packs, &[PackState::Live]).await
    }

    async fn packs_in(&self, packs: &HashSet<PackId>, states: &[PackState]) -> Result<HashSet<PackId>, CatalogError> {
        let mut asked: Vec<PackId> = packs.iter().copied().collect();
        asked.sort_unstable();
        let mut kept = HashSet::new();
        for some in asked.chunks(SCAN_BATCH) {
            for entry in self.kv.get_many(some.iter().map(keys::pack).collect()).await?.into_iter().flatten() {
                let row: PackRow = wire::decode(&entry)?;
                if states.contains(&row.state) {
                    kept.insert(row.id);
                }
            }
        }
        Ok(kept)
    }
}

/// A pack's row as it was read: what a move is conditional on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackSeen {
    /// The row.
    pub row: PackRow,
    revision: Revision,
}

/// What a move came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// The row is this now.
    Done(PackSeen),
    /// The row was changed meanwhile, or the lease is lost; nothing was written.
    Raced,
}

fn may_follow(from: PackState, to: PackState) -> bool {
    use PackState::{Condemned, Doomed, Gone, Live};
    matches!((from, to), (Live, Condemned) | (Condemned, Live | Doomed) | (Doomed, Gone))
}

/// What a collector does with rows. Each write is conditional on the row as it was read, and on the collector's lease.
impl Catalog {
    /// Up to `limit` rows in the order of the ids, after `after`.
    pub async fn pack_page(&self, after: Option<&PackId>, limit: usize) -> Result<Vec<PackSeen>, CatalogError> {
        let mut range = keys::under(keys::PACKS);
        if let Some(after) = after {
            range = keys::following(range, keys::pack(after));
        }
        let entries = self.kv.range(range, limit, Order::Ascending).await?;
        entries.iter().map(|entry| Ok(PackSeen { row: wire::decode(entry)?, revision: entry.revision })).collect()
    }

    /// The rows of these packs from one state, in the order asked.
    pub async fn packs_seen(&self, packs: &[PackId]) -> Result<Vec<Option<PackSeen>>, CatalogError> {
        let found = self.kv.get_many(packs.iter().map(keys::pack).collect()).await?;
        let seen = found.iter().map(|entry| {
            let Some(entry) = entry else { return Ok(None) };
            Ok(Some(PackSeen { row: wire::decode(entry)?, revision: entry.revision }))
        });
        seen.collect()
    }

    /// Moves a pack to its next state. Only the moves of the drawing are possible.
    pub async fn move_pack(&self, fence: &Lease, seen: &PackSeen, to: PackState) -> Result<Moved, CatalogError> {
        if !may_follow(seen.row.state, to) {
            return Err(CatalogError::invalid("pack state", format!("{:?} does not become {to:?}", seen.row.state)));
        }
        let row = PackRow { state: to, since_unix_ms: self.now(), ..seen.row };
        let key = keys::pack(&row.id);
        let mut draft = Draft::default();
        draft.fence(fence);
        draft.require_revision(key.clone(), seen.revision);
        draft.put_row(key, &row)?;
        if to == PackState::Gone {
            draft.mark(keys::timed(keys::TOMBSTONES, row.since_unix_ms, &row.id));
        }
        let revision = self.send_for_revision(draft).await?;
        Ok(revision.map_or(Moved::Raced, |revision| Moved::Done(PackSeen { row, revision })))
    }

    /// Makes a condemned row for an object that has none. `false`: it has one by now, or the lease is lost.
    pub async fn adopt_pack(&self, fence: &Lease, id: PackId, size_bytes: u64) -> Result<bool, CatalogError> {
        let now = self.now();
        let state = PackState::Condemned;
        let row = PackRow { id, size_bytes, chunks: 0, state, created_unix_ms: now, since_unix_ms: now };
        let mut draft = Draft::default();
        draft.fence(fence);
        draft.require_absent(keys::pack(&id));
        draft.put_row(keys::pack(&id), &row)?;
        self.send(draft).await
    }

    /// Removes the row of a pack that is gone. `false`: it was changed meanwhile, or the lease is lost.
    pub async fn purge_pack(&self, fence: &Lease, seen: &PackSeen) -> Result<bool, CatalogError> {
        if seen.row.state != PackState::Gone {
            return Err(CatalogError::invalid("pack state", format!("{:?} is not gone", seen.row.state)));
        }
        let key = keys::pack(&seen.row.id);
        let mut draft = Draft::default();
        draft.fence(fence);
        draft.require_revision(key.clone(), seen.revision);
        draft.delete(key);
        draft.delete(keys::timed(keys::TOMBSTONES, seen.row.since_unix_ms, &seen.row.id));
        self.send(draft).await
    }

    /// The packs that are gone since `since_unix_ms` or later and have a row still.
    pub async fn gone_since(&self, since_unix_ms: i64) -> Result<HashSet<PackId>, CatalogError> {
        let mut range = keys::under(keys::TOMBSTONES);
        range.start = format!("{}{}", keys::TOMBSTONES, keys::time(since_unix_ms)).into_bytes();
        self.scan(range).await?.iter().map(|entry| wire::id_of_key(&entry.key)).collect()
    }
}
