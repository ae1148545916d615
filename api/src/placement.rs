//! Room for a guest: asked of the scheduler before a node restores one, given back when that has ended either way.

use snapyard_proto::retry::ShouldRetry;
use snapyard_proto::v1;

use crate::clients::Clients;
use crate::errors::ApiError;

/// Chooses a node and reserves room on it for a restore of `snapshot_id`. A failure had no effect.
pub(crate) async fn place(
    clients: &Clients,
    team: String,
    sandbox_id: String,
    snapshot_id: String,
    shape: Option<v1::Shape>,
) -> Result<v1::PlaceResponse, ApiError> {
    let request = v1::PlaceRequest { team, sandbox_id, snapshot_id, shape, needs: None };
    let placed = clients.scheduler().place(request).await;
    Ok(placed.map_err(|status| ApiError::from(status).or_retry(ShouldRetry::Yes))?.into_inner())
}

/// Gives the room back. A release that is lost is made good by the reservation's expiry.
pub(crate) async fn release(clients: &Clients, reservation_id: String) {
    if let Err(status) = clients.scheduler().release(v1::ReleaseRequest { reservation_id }).await {
        tracing::warn!(message = status.message(), "a reservation could not be released; it will expire");
    }
}
