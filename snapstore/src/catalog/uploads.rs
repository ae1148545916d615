//! Which snapshots are wholly in the object store, and who has to see to the others.
//!
//! ```text
//!   commit ──▶ entry, pending ──▶ in progress ──▶ failed ──▶ in progress ──▶ uploaded: ready, no entry
//!   packs amended ──▶ entry again, the status stays ready: the packs it was ready with are still there
//! ```
//!
//! The entry goes only if the manifest is the one that was uploaded: of an amendment that comes meanwhile nothing is lost.
//! A row that was never ready has its entry; so a crash at any point leaves the upload to be done, or done again.

use bytes::Bytes;

use crate::ids::{NodeId, SnapshotId};

use super::error::CatalogError;
use super::{Catalog, Draft, RemoteStatus, SnapshotRow, keys, until_settled, wire};

/// A snapshot that is not wholly in the object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingUpload {
    /// Its row.
    pub row: SnapshotRow,
    /// The node that has what is missing.
    pub node: NodeId,
}

impl Catalog {
    /// Says how far an upload is: in progress, or failed. Of one that was ready before it says nothing.
    pub async fn set_remote_status(&self, id: &SnapshotId, status: RemoteStatus) -> Result<SnapshotRow, CatalogError> {
        if status == RemoteStatus::Ready {
            return Err(CatalogError::invalid(
                "upload status",
                "ready is what an upload of the whole manifest makes it",
            ));
        }
        until_settled!(format_args!("the upload status of snapshot {id}"), {
            let found = self.row::<SnapshotRow>(keys::snapshot(id)).await?;
            let (mut row, entry) = found.ok_or_else(|| CatalogError::not_found("snapshot", id))?;
            if row.remote_status == status || row.remote_status == RemoteStatus::Ready {
                break Ok(row);
            }
            row.remote_status = status;
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if self.send(draft).await? {
                break Ok(row);
            }
        })
    }

    /// Everything that `manifest`, encoded, names is in the object store, and so is the manifest. `false`: the snapshot has
    /// another manifest by now, which is to be uploaded.
    pub async fn uploaded(&self, id: &SnapshotId, manifest: &Bytes) -> Result<bool, CatalogError> {
        until_settled!(format_args!("the upload of snapshot {id}"), {
            let found = self.kv.get_many(vec![keys::snapshot(id), keys::manifest(id)]).await?;
            let [Some(entry), Some(now)] = &found[..] else {
                return Err(CatalogError::not_found("snapshot", id));
            };
            if now.value != *manifest {
                break Ok(false);
            }
            let row = SnapshotRow { remote_status: RemoteStatus::Ready, ..wire::decode(entry)? };
            let mut draft = Draft::default();
            draft.require_unchanged(entry);
            draft.require_unchanged(now);
            draft.put_row(entry.key.clone(), &row)?;
            draft.delete(keys::upload(id));
            if self.send(draft).await? {
                break Ok(true);
            }
        })
    }

    /// Every snapshot not wholly in the object store, those of templates included. The caller picks out its own node's.
    pub async fn pending_uploads(&self) -> Result<Vec<PendingUpload>, CatalogError> {
        let mut pending = Vec::new();
        for entry in self.scan(keys::under(keys::UPLOADS)).await? {
            let Some(row) = self.snapshot_row(&wire::id_of_key(&entry.key)?).await? else { continue };
            let node = match std::str::from_utf8(&entry.value).ok().filter(|node| !node.is_empty()) {
                Some(node) => NodeId::new(node).map_err(|error| wire::corrupt(&entry.key, error.to_string()))?,
                None => row.origin_node.clone(),
            };
            pending.push(PendingUpload { row, node });
        }
        Ok(pending)
    }
}
