//! Background upload: what is durable on this node goes to the object store, packs first, the manifest last.
//!
//! One task, woken by a commit and by a timer. `remote_status` goes pending, inprogress, then ready or failed; failed
//! ones are tried again with a growing pause. A crash at any point leaves a status other than ready, so the next start
//! takes the snapshot up again; uploads are idempotent, a pack's name is the hash of its bytes.

use std::sync::Arc;
use std::time::Duration;

use snapyard_snapstore::catalog::{CatalogError, PendingUpload, RemoteStatus};
use snapyard_snapstore::ids::SnapshotId;

use crate::error::NodeError;
use crate::node::State;
use crate::residency::decoded_manifest;

/// The pause after a round in which an upload failed, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Uploads until shutdown.
pub async fn run(node: Arc<State>) {
    let mut pause = RETRY.0;
    loop {
        let clean = round(&node).await;
        pause = if clean { RETRY.0 } else { (pause * 2).min(RETRY.1) };
        tokio::select! {
            () = node.shutdown.cancelled() => return,
            () = node.uploads.notified() => {}
            () = tokio::time::sleep(if clean { RETRY.1 } else { pause }) => {}
        }
    }
}

/// One pass over everything that is not in the object store yet. True when all of it is now.
async fn round(node: &State) -> bool {
    let pending = match node.catalog.pending_uploads().await {
        Ok(pending) => pending,
        Err(error) => {
            tracing::warn!(%error, "cannot list pending uploads");
            return false;
        }
    };
    let mut clean = true;
    for PendingUpload { row, .. } in pending.into_iter().filter(|pending| pending.node == node.id) {
        if node.shutdown.is_cancelled() {
            return clean;
        }
        let id = row.id;
        match one(node, &id).await {
            Ok(()) => {}
            // Deleted meanwhile: nothing is left to upload.
            Err(NodeError::Catalog(CatalogError::NotFound { .. })) => {
                tracing::info!(snapshot = %id, "deleted before its upload")
            }
            Err(error) => {
                tracing::warn!(snapshot = %id, %error, "upload failed; it will be tried again");
                clean = false;
                // Best effort: the status is for people; the retry does not depend on it.
                let _ = node.catalog.set_remote_status(&id, RemoteStatus::Failed).await;
            }
        }
    }
    clean
}

async fn one(node: &State, id: &SnapshotId) -> Result<(), NodeError> {
    node.upkeep.claim_bucket().await?;
    node.catalog.set_remote_status(id, RemoteStatus::InProgress).await?;
    loop {
        let encoded = node.catalog.manifest(id).await?;
        let manifest = decoded_manifest(id, &encoded)?;
        node.store.upload(id, &manifest).await?;
        // Its packs may have been amended meanwhile: then there is more to upload.
        if node.catalog.uploaded(id, &encoded).await? {
            return Ok(());
        }
    }
}
