//! `GET /sandboxes/{id}/metrics`: what a guest uses now, asked of its agent. No history is kept, so the list has one
//! reading, or none when the client asks about another time or the sandbox is paused.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use snapyard_proto::v1::SandboxState;

use super::query::Query;
use super::{App, PathText};
use crate::errors::ApiError;
use crate::proxy::route::{AGENT_PORT, Target};
use crate::team::team_of;
use crate::wire::Metrics;

/// An agent that is alive answers at once, even when emulated.
const PATIENCE: Duration = Duration::from_secs(20);

/// Largest answer that is read, bytes. The real one is a few hundred.
const MAX_ANSWER: usize = 16 << 10;

/// The agent's `/metrics`: sizes in bytes, time in Unix seconds.
#[derive(Debug, Deserialize)]
pub(crate) struct AgentMetrics {
    pub(crate) ts: i64,
    pub(crate) cpu_count: u32,
    pub(crate) cpu_used_pct: f64,
    pub(crate) mem_total: u64,
    pub(crate) mem_used: u64,
    #[serde(default)]
    pub(crate) mem_cache: u64,
    pub(crate) disk_total: u64,
    pub(crate) disk_used: u64,
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    PathText(id): PathText<String>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let start = seconds(&query, "start")?.unwrap_or(i64::MIN);
    let end = seconds(&query, "end")?.unwrap_or(i64::MAX);
    let sandbox = app.clients.usable_sandbox(&team_of(&headers)?, &id).await?;
    if matches!(sandbox.state(), SandboxState::Paused | SandboxState::Pausing | SandboxState::Resuming) {
        // Asking would wake it.
        return Ok(axum::Json(Vec::<Metrics>::new()).into_response());
    }
    let reading = tokio::time::timeout(PATIENCE, read(&app, &id, &sandbox.access_token)).await;
    let reading = reading.unwrap_or_else(|_| {
        Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, format!("the agent of sandbox {id} did not answer")))
    })?;
    let readings: Vec<Metrics> =
        if (start..=end).contains(&reading.ts) { vec![Metrics::from(reading)] } else { Vec::new() };
    Ok(axum::Json(readings).into_response())
}

fn seconds(query: &Query, name: &str) -> Result<Option<i64>, ApiError> {
    query
        .get(name)
        .map(|text| text.parse().map_err(|_| ApiError::invalid(format!("`{name}` must be a time in Unix seconds"))))
        .transpose()
}

async fn read(app: &App, id: &str, access_token: &str) -> Result<AgentMetrics, ApiError> {
    let broken = |what: &str| ApiError::new(StatusCode::BAD_GATEWAY, format!("the agent of sandbox {id} {what}"));
    let target = Target { sandbox_id: id.to_owned(), port: AGENT_PORT };
    let mut request = Request::get("/metrics").header(header::HOST, format!("{AGENT_PORT}-{id}"));
    if let Ok(token) = HeaderValue::try_from(access_token)
        && !token.is_empty()
    {
        request = request.header("x-access-token", token);
    }
    let request = request.body(()).expect("a path and headers that are valid");
    let response = app.proxy.ask(&target, request).await?;
    if response.status() != StatusCode::OK {
        return Err(broken(&format!("answered its metrics with {}", response.status())));
    }
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|_| broken("broke off while it told its metrics"))?.to_bytes();
    serde_json::from_slice(&body).map_err(|_| broken("told metrics that cannot be read"))
}
