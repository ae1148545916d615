//! A sandbox without a VM, and with many: pause, resume, fork.
//!
//! A pause is a snapshot that nobody else sees and the end of the VM; a resume is a restore of it, on any node. A fork is
//! one snapshot that nobody sees and `count` creates from it, each of which succeeds or fails alone; the snapshot
//! goes with the last of them. Should this process die in between, it expires by itself.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, StatusCode};
use snapyard_proto::v1;

use super::create::{place_and_create, random};
use super::{App, PathText, sandbox_failure};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::names::{new_access_token, new_sandbox_id};
use crate::resume::resume as resume_sandbox;
use crate::team::{Team, team_of};
use crate::timing::{Received, restore_headers};
use crate::validate::{self, Fork};
use crate::wire::{CreatedSandbox, Forked};

/// How long what a fork starts from can be started from: longer than any fork takes.
const FORK_RETENTION_MS: i64 = 10 * 60 * 1000;

/// Creates of one fork at the same time.
const FORKS_AT_ONCE: usize = 10;

/// 204; 409 when it is paused already.
pub(super) async fn pause(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    validate::pause(&Fields::parse(&body)?)?;
    let team = team_of(&headers)?;
    let sandbox = app.clients.running_sandbox(&team, &id).await?;
    let request = v1::PauseSandboxRequest { team: team.to_field(), sandbox_id: id.clone() };
    let paused = app.clients.node(&sandbox.node_url)?.pause_sandbox(request).await;
    app.proxy.forget(&id);
    paused.map_err(|status| sandbox_failure(status, &id))?;
    tracing::info!(sandbox_id = id, "sandbox paused");
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// 201; 409 when it runs.
pub(super) async fn resume(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let timeout_ms = validate::connect(&Fields::parse(&body)?)?;
    let team = team_of(&headers)?;
    let sandbox = app.clients.usable_sandbox(&team, &id).await?;
    match sandbox.state() {
        v1::SandboxState::Paused => {}
        // To clients it is paused already.
        v1::SandboxState::Pausing => return Err(ApiError::busy(&id, "being paused")),
        _ => {
            let text = format!("sandbox {id} is not paused; connect to it instead");
            return Err(ApiError::new(StatusCode::CONFLICT, text));
        }
    }
    wake(&app, &team, &sandbox, timeout_ms, received).await
}

/// Resumes for as long as the client says, or the server's default; answers 201.
pub(super) async fn wake(
    app: &App,
    team: &Team,
    sandbox: &v1::Sandbox,
    timeout_ms: Option<i64>,
    received: Received,
) -> Result<Response, ApiError> {
    let timeout_ms = timeout_ms.unwrap_or(i64::from(app.config.default_timeout_s) * 1000);
    let before_node = received.0.elapsed();
    let resumed = resume_sandbox(&app.clients, team, sandbox, timeout_ms).await;
    app.proxy.forget(&sandbox.id);
    let resumed = resumed?;
    let id = &sandbox.id;
    let sandbox = resumed.sandbox.ok_or_else(|| tonic::Status::internal(format!("{id}: the node answered nothing")))?;
    let headers = restore_headers(None, before_node, resumed.timings.as_ref());
    let body = axum::Json(CreatedSandbox::new(sandbox, &app.config.domain));
    Ok((StatusCode::CREATED, headers, body).into_response())
}

/// 201 with `count` entries in order, each a sandbox or an error. 404, 409 when nothing could be started from it.
pub(super) async fn fork(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let Fork { count, timeout_ms } = validate::fork(&Fields::parse(&body)?, app.config.default_timeout_s)?;
    let team = team_of(&headers)?;
    let source = app.clients.running_sandbox(&team, &id).await?;
    let request = v1::SnapshotSandboxRequest {
        team: team.to_field(),
        sandbox_id: id.clone(),
        retention_ms: FORK_RETENTION_MS,
        hidden: true,
        ..v1::SnapshotSandboxRequest::default()
    };
    let taken = app.clients.node(&source.node_url)?.snapshot_sandbox(request).await;
    let taken = taken.map_err(|status| sandbox_failure(status, &id))?;
    let snapshot = taken
        .into_inner()
        .snapshot
        .ok_or_else(|| tonic::Status::internal(format!("{id}: the node answered nothing")))?;
    let forks = (0..count).map(|_| {
        let request = v1::CreateSandboxRequest {
            team: team.to_field(),
            sandbox_id: new_sandbox_id(random()),
            snapshot_id: snapshot.id.clone(),
            template_id: source.template_id.clone(),
            alias: source.alias.clone(),
            timeout_ms,
            metadata: source.metadata.clone(),
            env: source.env.clone(),
            access_token: if source.access_token.is_empty() { String::new() } else { new_access_token(random()) },
            auto_pause: source.lifecycle_auto_pause,
            auto_resume: source.lifecycle_auto_resume,
            ..v1::CreateSandboxRequest::default()
        };
        place_and_create(&app, request, source.shape, received)
    });
    // `buffered`: in the order in which they were asked for.
    let forks: Vec<_> = futures::stream::iter(forks).buffered(FORKS_AT_ONCE).collect().await;
    // It goes with the last of them. Should this not arrive, its time is over soon.
    let discard = v1::DiscardRequest { team: team.to_field(), snapshot_id: snapshot.id };
    if let Err(status) = app.clients.catalog().discard(discard).await {
        tracing::warn!(message = status.message(), "what a fork started from stays until its time is over");
    }
    let failed = forks.iter().filter(|fork| fork.is_err()).count();
    tracing::info!(sandbox_id = id, count, failed, ms = received.0.elapsed().as_millis() as u64, "forked");
    let entries: Vec<Forked> =
        forks.into_iter().map(|fork| Forked::new(fork.map(|created| created.sandbox), &app.config.domain)).collect();
    Ok((StatusCode::CREATED, axum::Json(entries)).into_response())
}
