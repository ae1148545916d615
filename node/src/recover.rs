//! What a restart finds of its predecessor, and what it does about it.
//!
//! Virtual machines die with the node process that serves their pages, so after a restart none is left: the sandboxes
//! that the catalog still shows running on this node were lost, and their hold on snapshots is released. Paused ones
//! stay, and one in the middle of a resume is paused again. Packs that were
//! sealed for a snapshot that was never committed are dropped; uploads that were in progress are taken up again by
//! [`crate::upload`]. Files in the run directory belong to dead virtual machines. All of it is safe to repeat.

use std::path::Path;

use snapyard_snapstore::catalog::{BuildStatus, SandboxRow, SandboxState};
use snapyard_snapstore::ids::TeamId;

use crate::error::NodeError;
use crate::node::State;

/// The one team there is so far.
const DEFAULT_TEAM: &str = "default";

/// Empties the run directory: everything in it belonged to virtual machines that are gone.
pub fn clean_run_dir(run_dir: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(run_dir) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    std::fs::create_dir_all(run_dir)
}

/// Releases what the predecessor's sandboxes held and drops what it staged but never committed.
pub async fn recover(node: &State) -> Result<(), NodeError> {
    for row in node.catalog.sandboxes_of_node(&node.id).await? {
        match row.state {
            SandboxState::Paused | SandboxState::Resuming => {
                // It has no guest here any more, and is asked for where this node is reached now.
                let here = |row: &mut SandboxRow| {
                    row.state = SandboxState::Paused;
                    row.node_url.clone_from(&node.url);
                    row.gateway.clone_from(&node.gateway);
                    Ok(())
                };
                node.catalog.update_sandbox(&row.team, &row.id, here).await?;
                continue;
            }
            _ => {}
        }
        tracing::warn!(sandbox = %row.id, "lost: its node restarted");
        node.sandboxes.remember_lost(&row.id, "its node restarted");
        node.catalog.end_sandbox(&row.team, &row.id).await?;
    }
    let team = TeamId::new(DEFAULT_TEAM).map_err(|error| NodeError::Internal(error.to_string()))?;
    // A build that the predecessor did not finish goes on only when somebody asks for it again.
    for row in node.catalog.list_templates(&team).await? {
        if row.build_status == BuildStatus::Ready {
            node.prewarm(&row.shape);
        }
        if row.build_status == BuildStatus::Building {
            let why = "its node restarted in the middle of the build";
            node.catalog.set_build_status(&row.team, &row.id, BuildStatus::Error, why).await?;
        }
    }
    let keep = node.catalog.packs_kept(&node.store.staged_packs()).await?;
    node.store.drop_unreferenced_staging(&keep).await?;
    Ok(())
}
