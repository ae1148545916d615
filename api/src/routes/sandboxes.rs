//! One sandbox: get, kill, connect, timeout, refresh.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use snapyard_proto::v1::{KillSandboxRequest, Sandbox, SandboxState, SetTimeoutRequest};

use super::lifecycle::wake;
use super::{App, PathText, sandbox_failure};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::team::{Team, team_of};
use crate::timing::Received;
use crate::validate;
use crate::wire::{CreatedSandbox, SandboxInfo};

pub(super) async fn get(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let sandbox = app.clients.usable_sandbox(&team_of(&headers)?, &id).await?;
    Ok(axum::Json(SandboxInfo::detailed(sandbox, &app.config.domain)).into_response())
}

/// Synchronous: when the answer comes, the guest is gone and its snapshot is free. A sandbox that was lost can be
/// killed too, hence no look at its state.
pub(super) async fn kill(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    let sandbox = app.clients.sandbox(&team, &id).await?;
    let request = KillSandboxRequest { team: team.to_field(), sandbox_id: id.clone() };
    let killed = app.clients.node(&sandbox.node_url)?.kill_sandbox(request).await;
    app.proxy.forget(&id);
    killed.map_err(|status| ApiError::from(status).if_not_found(|| ApiError::no_sandbox(&id)))?;
    tracing::info!(sandbox_id = id, "sandbox killed");
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A client that names no timeout keeps the one that is set.
pub(super) async fn connect_v1(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let timeout_ms = validate::connect(&Fields::parse(&body)?)?;
    connect(&app, &team_of(&headers)?, &id, timeout_ms, received).await
}

/// A client that names no timeout means the server's default.
pub(super) async fn connect_v2(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let default_ms = i64::from(app.config.default_timeout_s) * 1000;
    let timeout_ms = validate::connect(&Fields::parse(&body)?)?.unwrap_or(default_ms);
    connect(&app, &team_of(&headers)?, &id, Some(timeout_ms), received).await
}

/// 200 for a running sandbox, 201 for a paused one, which is resumed.
async fn connect(
    app: &App,
    team: &Team,
    id: &str,
    timeout_ms: Option<i64>,
    received: Received,
) -> Result<Response, ApiError> {
    let mut sandbox = app.clients.usable_sandbox(team, id).await?;
    match sandbox.state() {
        SandboxState::Paused => return wake(app, team, &sandbox, timeout_ms, received).await,
        SandboxState::Pausing => return Err(ApiError::busy(id, "being paused")),
        // Another client's connect is resuming it, for as long as that one said.
        SandboxState::Resuming => return Ok(connected(app, sandbox)),
        _ => {}
    }
    if let Some(timeout_ms) = timeout_ms {
        sandbox = set_timeout(app, team, &sandbox, timeout_ms, true).await?;
    }
    Ok(connected(app, sandbox))
}

fn connected(app: &App, sandbox: Sandbox) -> Response {
    axum::Json(CreatedSandbox::new(sandbox, &app.config.domain)).into_response()
}

pub(super) async fn timeout(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let timeout_ms = validate::set_timeout(&Fields::parse(&body)?)?;
    let team = team_of(&headers)?;
    let sandbox = app.clients.running_sandbox(&team, &id).await?;
    set_timeout(&app, &team, &sandbox, timeout_ms, false).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn refresh(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let timeout_ms = validate::refresh(&Fields::parse(&body)?, app.config.default_timeout_s)?;
    let team = team_of(&headers)?;
    let sandbox = app.clients.running_sandbox(&team, &id).await?;
    // A refresh of nothing prolongs nothing; to the node 0 would mean the end.
    if timeout_ms > 0 {
        set_timeout(&app, &team, &sandbox, timeout_ms, true).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn set_timeout(
    app: &App,
    team: &Team,
    sandbox: &Sandbox,
    timeout_ms: i64,
    never_shorten: bool,
) -> Result<Sandbox, ApiError> {
    let id = sandbox.id.clone();
    let request = SetTimeoutRequest { team: team.to_field(), sandbox_id: id.clone(), timeout_ms, never_shorten };
    let answer = app.clients.node(&sandbox.node_url)?.set_timeout(request).await;
    let answer = answer.map_err(|status| sandbox_failure(status, &id))?;
    Ok(answer.into_inner())
}
