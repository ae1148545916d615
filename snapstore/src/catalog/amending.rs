//! Amending a snapshot's packs: where its chunks lie changes, what they are never does.
//!
//! ```text
//!   chunks copied into new packs ──▶ add: the manifest names old and new ──upload──▶ drop: the old ones are not named
//! ```
//!
//! A manifest may name more packs than it needs, never fewer. So packs are added as soon as they are durable on a node, and
//! dropped only when those that stand in for them are named and uploaded: at no point does a snapshot depend on a pack that
//! fewer places hold than before. What is damaged is replaced at once. Each step is one conditional transaction on the snapshot's row and manifest; what is added
//! is subject to the rule of commits (see `packs`).
//!
//! Retries: an amendment sent twice finds nothing left to change.

use std::collections::HashSet;

use crate::ids::{NodeId, PackId, SnapshotId};
use crate::manifest::Manifest;
use crate::pack::PackRef;

use super::error::CatalogError;
use super::leases::WriterLease;
use super::{Catalog, Draft, keys, until_settled, wire};

/// Packs to be added to a manifest.
#[derive(Debug, Clone)]
pub struct Addition {
    /// What it is to name as well.
    pub packs: Vec<PackRef>,
    /// Those among them that are sealed on the node's own disk and were not uploaded yet.
    pub staged: HashSet<PackId>,
    /// What it is not to name any more: damaged, and all that was good in it is in `packs`.
    pub replaces: HashSet<PackId>,
    /// The process that wrote them.
    pub writer: WriterLease,
    /// The node that has to upload them.
    pub node: NodeId,
}

/// Packs to be dropped from a manifest.
#[derive(Debug, Clone)]
pub struct Removal {
    /// What it need not name.
    pub packs: HashSet<PackId>,
    /// What it must name for that, and have uploaded.
    pub given: HashSet<PackId>,
    /// The node that uploads the new manifest.
    pub node: NodeId,
}

/// What an amendment came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amended {
    /// The manifest is another one now, and to be uploaded.
    Changed,
    /// It is as it is to be, or what it depends on is not so.
    Unchanged,
    /// The snapshot is gone.
    Gone,
}

/// One or the other.
enum Change<'a> {
    Add(&'a Addition),
    Drop(&'a Removal),
}

impl Catalog {
    /// Makes the snapshot's manifest name more packs.
    pub async fn add_packs(&self, id: &SnapshotId, addition: &Addition) -> Result<Amended, CatalogError> {
        self.amend(id, Change::Add(addition)).await
    }

    /// Makes the snapshot's manifest name fewer packs, if all that it names is uploaded.
    pub async fn drop_packs(&self, id: &SnapshotId, removal: &Removal) -> Result<Amended, CatalogError> {
        self.amend(id, Change::Drop(removal)).await
    }

    async fn amend(&self, id: &SnapshotId, change: Change<'_>) -> Result<Amended, CatalogError> {
        until_settled!(format_args!("amending snapshot {id}"), {
            let found = self.kv.get_many(vec![keys::snapshot(id), keys::manifest(id)]).await?;
            let [Some(row), Some(entry)] = &found[..] else { break Ok(Amended::Gone) };
            let mut manifest =
                Manifest::decode(&entry.value).map_err(|error| wire::corrupt(&entry.key, error.to_string()))?;
            let mut draft = Draft::default();
            let changed = match change {
                Change::Add(addition) => self.draft_addition(&mut draft, id, &mut manifest, addition).await?,
                Change::Drop(removal) => self.draft_drop(&mut draft, id, &mut manifest, removal).await?,
            };
            if !changed {
                break Ok(Amended::Unchanged);
            }
            draft.require_unchanged(row);
            draft.require_unchanged(entry);
            draft.put(entry.key.clone(), manifest.encode());
            if self.send(draft).await? {
                break Ok(Amended::Changed);
            }
        })
    }

    async fn draft_addition(
        &self,
        draft: &mut Draft,
        id: &SnapshotId,
        manifest: &mut Manifest,
        addition: &Addition,
    ) -> Result<bool, CatalogError> {
        let named: HashSet<PackId> = manifest.packs.iter().map(|pack| pack.id).collect();
        let new: Vec<PackRef> = addition.packs.iter().filter(|pack| !named.contains(&pack.id)).copied().collect();
        if new.is_empty() && named.is_disjoint(&addition.replaces) {
            return Ok(false);
        }
        self.use_packs(draft, &new, &addition.staged).await?;
        self.draft_writer(draft, &addition.writer).await?;
        manifest.packs.retain(|pack| !addition.replaces.contains(&pack.id));
        manifest.packs.extend(new);
        draft.put(keys::upload(id), addition.node.to_string());
        Ok(true)
    }

    async fn draft_drop(
        &self,
        draft: &mut Draft,
        id: &SnapshotId,
        manifest: &mut Manifest,
        removal: &Removal,
    ) -> Result<bool, CatalogError> {
        let named: HashSet<PackId> = manifest.packs.iter().map(|pack| pack.id).collect();
        let uploaded = self.kv.get(keys::upload(id)).await?.is_none();
        if named.is_disjoint(&removal.packs) || !removal.given.is_subset(&named) || !uploaded {
            return Ok(false);
        }
        draft.require_absent(keys::upload(id));
        manifest.packs.retain(|pack| !removal.packs.contains(&pack.id));
        draft.put(keys::upload(id), removal.node.to_string());
        Ok(true)
    }
}
