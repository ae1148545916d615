//! What the catalog knows of the bucket beyond packs: whose it is, and manifest objects that no snapshot goes with.
//!
//! ```text
//!   object without a snapshot row ──▶ orphan/<uuid>: first seen ──a grace period later, still none──▶ object deleted, row gone
//! ```
//!
//! An object is uploaded only after its snapshot was committed, and ids are random: a snapshot that has no row while its
//! object is there never gets one again.

use crate::ids::SnapshotId;

use super::error::CatalogError;
use super::kv::Revision;
use super::leases::Lease;
use super::upkeep_rows::{DeploymentRow, OrphanRow};
use super::{Catalog, Draft, keys, until_settled, wire};

/// A manifest object, as the catalog knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrphanSeen {
    /// Its snapshot exists.
    Owned,
    /// No snapshot, and nobody has noticed so far.
    New,
    /// No snapshot, and that since at least this time.
    Since {
        /// When it was first seen so.
        first_seen_unix_ms: i64,
        /// Of the mark.
        revision: Revision,
    },
}

impl Catalog {
    /// The catalog's own random id, made when it is first asked for.
    pub async fn deployment_id(&self) -> Result<[u8; 16], CatalogError> {
        let key = keys::DEPLOYMENT.as_bytes().to_vec();
        until_settled!("the deployment's id", {
            if let Some((row, _)) = self.row::<DeploymentRow>(key.clone()).await? {
                break Ok(row.id);
            }
            let row = DeploymentRow { id: crate::random::bytes() };
            let mut draft = Draft::default();
            draft.require_absent(key.clone());
            draft.put_row(key.clone(), &row)?;
            if self.send(draft).await? {
                break Ok(row.id);
            }
        })
    }

    /// The same, if it was ever asked for.
    pub async fn known_deployment_id(&self) -> Result<Option<[u8; 16]>, CatalogError> {
        Ok(self.row::<DeploymentRow>(keys::DEPLOYMENT.as_bytes().to_vec()).await?.map(|(row, _)| row.id))
    }

    /// What is known of the manifest objects of these snapshots, from one state, in the order asked.
    pub async fn orphans_seen(&self, ids: &[SnapshotId]) -> Result<Vec<OrphanSeen>, CatalogError> {
        let asked = ids.iter().flat_map(|id| [keys::snapshot(id), keys::orphan(id)]).collect();
        let found = self.kv.get_many(asked).await?;
        found
            .chunks(2)
            .map(|pair| match pair {
                [None, Some(mark)] => {
                    let OrphanRow { first_seen_unix_ms } = wire::decode(mark)?;
                    Ok(OrphanSeen::Since { first_seen_unix_ms, revision: mark.revision })
                }
                [None, None] => Ok(OrphanSeen::New),
                _ => Ok(OrphanSeen::Owned),
            })
            .collect()
    }

    /// Marks an object as without a snapshot from now on. `false`: not so any more, or the lease is lost.
    pub async fn mark_orphan(&self, fence: &Lease, id: &SnapshotId) -> Result<bool, CatalogError> {
        let mut draft = Draft::default();
        draft.fence(fence);
        draft.require_absent(keys::snapshot(id));
        draft.require_absent(keys::orphan(id));
        draft.put_row(keys::orphan(id), &OrphanRow { first_seen_unix_ms: self.now() })?;
        self.send(draft).await
    }

    /// Removes a mark: its object is deleted. `false`: it was changed, or the lease is lost.
    pub async fn forget_orphan(
        &self,
        fence: &Lease,
        id: &SnapshotId,
        revision: Revision,
    ) -> Result<bool, CatalogError> {
        let mut draft = Draft::default();
        draft.fence(fence);
        draft.require_revision(keys::orphan(id), revision);
        draft.delete(keys::orphan(id));
        self.send(draft).await
    }

    /// Every mark, with the time when it was made.
    pub async fn orphan_marks(&self) -> Result<Vec<(SnapshotId, i64, Revision)>, CatalogError> {
        let entries = self.scan(keys::under(keys::ORPHANS)).await?;
        let marks = entries.iter().map(|entry| {
            Ok((wire::id_of_key(&entry.key)?, wire::decode::<OrphanRow>(entry)?.first_seen_unix_ms, entry.revision))
        });
        marks.collect()
    }
}
