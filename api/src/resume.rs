//! Resuming a paused sandbox: asked for over REST, or by a request to a sandbox that is to wake by itself.

use snapyard_proto::v1;

use crate::clients::Clients;
use crate::errors::ApiError;
use crate::placement::{place, release};
use crate::team::Team;

/// Resumes `sandbox` where there is room, for `timeout_ms` from now (-1: for ever). 409 when it is not paused.
pub(crate) async fn resume(
    clients: &Clients,
    team: &Team,
    sandbox: &v1::Sandbox,
    timeout_ms: i64,
) -> Result<v1::CreateSandboxResponse, ApiError> {
    let id = &sandbox.id;
    let placed = place(clients, team.to_field(), id.clone(), sandbox.snapshot_id.clone(), sandbox.shape).await?;
    let request = v1::ResumeSandboxRequest { team: team.to_field(), sandbox_id: id.clone(), timeout_ms };
    let resumed = match clients.node(&placed.url) {
        Ok(mut node) => node.resume_sandbox(request).await.map_err(ApiError::from),
        Err(error) => Err(error),
    };
    release(clients, placed.reservation_id).await;
    let resumed = resumed.map_err(|error| error.if_not_found(|| ApiError::no_sandbox(id)))?.into_inner();
    tracing::info!(sandbox_id = id, node_id = placed.node_id, "sandbox resumed");
    Ok(resumed)
}
