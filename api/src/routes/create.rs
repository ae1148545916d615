//! `POST /sandboxes` and `/v2/sandboxes`.
//!
//! ```text
//!   parse (400) ▶ Catalog.Resolve (404) ▶ what a snapshot forbids (400) ▶ what we lack (501)
//!     ▶ Scheduler.Place (503, nothing happened) ▶ Node.CreateSandbox ▶ Scheduler.Release, in every case
//! ```
//!
//! When the client hangs up, the sandbox is created all the same and lives until its timeout. A client that sent an
//! `Idempotency-Key` gets that same sandbox when it asks again. If this process dies between placing and releasing, the
//! reservation expires in the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use snapyard_proto::v1;

use super::{App, after_the_fact};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::names::{new_access_token, new_sandbox_id};
use crate::placement;
use crate::team::{Team, team_of};
use crate::timing::{Received, restore_headers};
use crate::validate::{Create, CreateDefaults, idempotency_key};
use crate::wire::CreatedSandbox;

/// The route of `cubesandbox`, whose commands never send an access token: not secure unless asked for.
pub(super) async fn v1(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    create(app, received, &headers, body, false).await
}

/// The route of `e2b`, whose v2 contract is that every sandbox is secure.
pub(super) async fn v2(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    create(app, received, &headers, body, true).await
}

async fn create(
    app: Arc<App>,
    received: Received,
    headers: &HeaderMap,
    body: Bytes,
    secure: bool,
) -> Result<Response, ApiError> {
    let team = team_of(headers)?;
    let idempotency_key = idempotency_key(headers)?;
    let defaults = CreateDefaults { timeout_s: app.config.default_timeout_s, secure };
    let request = Create::from_fields(&Fields::parse(&body)?, defaults)?;
    let request_digest = if idempotency_key.is_empty() { Vec::new() } else { blake3::hash(&body).as_bytes().to_vec() };

    let resolved = resolve(&app, &team, &request.reference).await?;
    if resolved.is_snapshot {
        request.check_from_snapshot()?;
    }
    request.check_supported()?;

    let sandbox_id = request.sandbox_id.unwrap_or_else(|| new_sandbox_id(random()));
    let access_token = if request.secure { new_access_token(random()) } else { String::new() };

    let create = v1::CreateSandboxRequest {
        team: team.to_field(),
        sandbox_id,
        snapshot_id: resolved.snapshot_id,
        template_id: resolved.template_id,
        alias: resolved.alias,
        reservation_id: String::new(),
        timeout_ms: request.timeout_ms,
        metadata: request.metadata,
        env: request.env,
        access_token,
        auto_pause: request.auto_pause,
        auto_resume: request.auto_resume,
        idempotency_key,
        request_digest,
    };
    let created = place_and_create(&app, create, resolved.shape, received).await?;
    let headers = restore_headers(Some(created.place), created.before_node, created.timings.as_ref());
    let body = axum::Json(CreatedSandbox::new(created.sandbox, &app.config.domain));
    Ok((StatusCode::CREATED, headers, body).into_response())
}

/// A sandbox that was created, and what that took.
pub(super) struct Created {
    pub(super) sandbox: v1::Sandbox,
    place: Duration,
    before_node: Duration,
    timings: Option<v1::RestoreTimings>,
}

/// Creates a sandbox where there is room for it. The reservation goes into the request here.
pub(super) async fn place_and_create(
    app: &App,
    create: v1::CreateSandboxRequest,
    shape: Option<v1::Shape>,
    received: Received,
) -> Result<Created, ApiError> {
    let place_started = Instant::now();
    let (team, sandbox_id) = (create.team.clone(), create.sandbox_id.clone());
    let placed = placement::place(&app.clients, team, sandbox_id, create.snapshot_id.clone(), shape).await?;
    let place = place_started.elapsed();

    let before_node = received.0.elapsed();
    let created = match app.clients.node(&placed.url) {
        Ok(mut node) => {
            let create = v1::CreateSandboxRequest { reservation_id: placed.reservation_id.clone(), ..create };
            node.create_sandbox(create).await.map_err(|status| after_the_fact(status.into()))
        }
        Err(error) => Err(error),
    };
    // Not waited for: the client has nothing to gain from it.
    let clients = app.clients.clone();
    app.tasks.spawn(async move { placement::release(&clients, placed.reservation_id).await });

    let v1::CreateSandboxResponse { sandbox, timings } = created?.into_inner();
    let sandbox = sandbox
        .ok_or_else(|| tonic::Status::internal(format!("node {} answered without a sandbox", placed.node_id)))?;
    tracing::info!(
        sandbox_id = sandbox.id,
        snapshot_id = sandbox.snapshot_id,
        node_id = placed.node_id,
        ms = received.0.elapsed().as_millis() as u64,
        "sandbox created"
    );
    Ok(Created { sandbox, place, before_node, timings })
}

async fn resolve(app: &App, team: &Team, reference: &str) -> Result<v1::ResolveResponse, ApiError> {
    let request = v1::ResolveRequest { team: team.to_field(), reference: reference.to_owned() };
    let answer = app.clients.catalog().resolve(request).await.map_err(|status| {
        ApiError::from(status).if_not_found(|| {
            ApiError::not_found(format!("template or snapshot `{reference}` was not found; see `GET /templates`"))
        })
    })?;
    Ok(answer.into_inner())
}

pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}
