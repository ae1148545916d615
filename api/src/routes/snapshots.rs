//! Taking a snapshot of a sandbox, and rolling one back to a snapshot. Both go on when the client hangs up.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use snapyard_proto::v1::{RollbackSandboxRequest, SnapshotSandboxRequest};

use super::{App, PathText, after_the_fact, sandbox_failure};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::names::{is_reference, snapshot_name};
use crate::team::team_of;
use crate::timing::{Received, restore_headers, server_timing};
use crate::validate::idempotency_key;
use crate::wire::{RolledBack, SnapshotInfo};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    let idempotency_key = idempotency_key(&headers)?;
    let fields = Fields::parse(&body)?;
    let name = match fields.string("name")? {
        None | Some("") => String::new(),
        Some(name) => snapshot_name(name, team.name()).map_err(|error| ApiError::invalid(error.to_string()))?,
    };
    if fields.boolean("memory")? == Some(false) {
        return Err(ApiError::unimplemented("`memory=false` (a snapshot of the file system only)"));
    }
    let request_digest = if idempotency_key.is_empty() { Vec::new() } else { blake3::hash(&body).as_bytes().to_vec() };

    let sandbox = app.clients.running_sandbox(&team, &id).await?;
    let request = SnapshotSandboxRequest {
        team: team.to_field(),
        sandbox_id: id.clone(),
        name,
        retention_ms: 0,
        idempotency_key,
        request_digest,
        hidden: false,
    };
    let answer = app.clients.node(&sandbox.node_url)?.snapshot_sandbox(request).await;
    let snapshot = answer
        .map_err(|status| sandbox_failure(status, &id))?
        .into_inner()
        .snapshot
        .ok_or_else(|| tonic::Status::internal(format!("sandbox {id}: the node answered no snapshot")))?;
    tracing::info!(
        snapshot_id = snapshot.id,
        sandbox_id = snapshot.sandbox_id,
        pause_us = snapshot.pause_us,
        "snapshot"
    );
    let pause = Duration::from_micros(u64::from(snapshot.pause_us));
    let timing = server_timing(&[("pause", pause), ("total", received.0.elapsed())]);
    let body = axum::Json(SnapshotInfo::from(snapshot));
    Ok((StatusCode::CREATED, [("server-timing", timing)], body).into_response())
}

pub(super) async fn rollback(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    let snapshot_id = match Fields::parse(&body)?.string("snapshotID")? {
        Some(reference) if is_reference(reference) => reference.to_owned(),
        _ => return Err(ApiError::invalid("`snapshotID` must be a snapshot's id or its full name")),
    };
    let sandbox = app.clients.running_sandbox(&team, &id).await?;
    let request =
        RollbackSandboxRequest { team: team.to_field(), sandbox_id: id.clone(), snapshot_id: snapshot_id.clone() };
    let before_node = received.0.elapsed();
    let answer = app.clients.node(&sandbox.node_url)?.rollback_sandbox(request).await;
    // Whatever came of it: connections to the guest of before must not be used again.
    app.proxy.forget(&id);
    let answer = answer.map_err(|status| after_the_fact(status.into()))?.into_inner();
    let headers = restore_headers(None, before_node, answer.timings.as_ref());
    // A full name is answered with the id behind it.
    let snapshot_id = answer.snapshot.map_or(snapshot_id, |snapshot| snapshot.id);
    let body = RolledBack { sandbox_id: id, snapshot_id, operation_id: answer.operation_id, status: "success" };
    Ok((headers, axum::Json(body)).into_response())
}
