//! The REST routes, and what their handlers share.
//!
//! Handlers validate, convert and call. Each request runs in a task of its own (`serve`), so that a client that hangs
//! up does not cut an operation in the middle.

mod create;
mod lifecycle;
mod listing;
pub(crate) mod metrics;
mod query;
mod sandboxes;
mod snapshots;
mod templates;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use http::StatusCode;
use http::request::Parts;
use snapyard_proto::retry::ShouldRetry;
use tokio_util::task::TaskTracker;

use crate::clients::Clients;
use crate::config::ApiConfig;
use crate::errors::ApiError;
use crate::proxy::Proxy;

/// What every handler can reach.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) config: ApiConfig,
    pub(crate) clients: Arc<Clients>,
    pub(crate) proxy: Proxy,
    /// Everything that goes on after its request; shutdown waits for it.
    pub(crate) tasks: TaskTracker,
}

/// A failure of a call that may have had its effect: unless the node says otherwise, a server error is not to be
/// repeated blindly. (A refusal, 4xx, had no effect.)
fn after_the_fact(error: ApiError) -> ApiError {
    if error.status().is_server_error() { error.or_retry(ShouldRetry::No) } else { error }
}

/// The same for a call about one sandbox, which may be the one that was not found.
fn sandbox_failure(status: tonic::Status, id: &str) -> ApiError {
    after_the_fact(ApiError::from(status)).if_not_found(|| ApiError::no_sandbox(id))
}

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/sandboxes", get(listing::sandboxes).post(create::v1))
        .route("/v2/sandboxes", get(listing::sandboxes).post(create::v2))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/sandboxes/{id}/resume", post(lifecycle::resume))
        .route("/sandboxes/{id}/fork", post(lifecycle::fork))
        .route("/sandboxes/{id}/timeout", post(sandboxes::timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/rollback", post(snapshots::rollback))
        .route("/sandboxes/{id}/metrics", get(metrics::get))
        .route("/sandboxes/{id}/{operation}", any(unimplemented_operation))
        .route("/snapshots", get(listing::snapshots))
        .route("/templates", get(templates::list).post(unimplemented_build))
        .route("/v2/templates", get(templates::list))
        .route("/v3/templates", post(unimplemented_build))
        .route("/v2/templates/{*rest}", any(unimplemented_build))
        .route("/templates/{*reference}", get(templates::get).delete(templates::delete).fallback(unimplemented_build))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        // The body has been read and capped before it comes here.
        .layer(DefaultBodyLimit::disable())
        .with_state(app)
}

async fn health() -> Response {
    axum::Json(serde_json::json!({ "status": "ok" })).into_response()
}

/// Routes of the public API that this server does not have yet.
async fn unimplemented_operation(PathText((_, operation)): PathText<(String, String)>) -> ApiError {
    match operation.as_str() {
        "network" | "logs" => ApiError::unimplemented(&format!("the operation `{operation}` of a sandbox")),
        _ => no_route(),
    }
}

async fn unimplemented_build() -> ApiError {
    ApiError::unimplemented("building and tagging templates over REST (use `snapyard template build`)")
}

async fn unknown() -> ApiError {
    no_route()
}

async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this route exists, but not with this method")
}

fn no_route() -> ApiError {
    ApiError::not_found("there is no such route")
}

/// The variable parts of a path, percent-decoded; 400 when they are no text.
struct PathText<T>(T);

impl<T, S> FromRequestParts<S> for PathText<T>
where
    T: serde::de::DeserializeOwned + Send,
    S: Send + Sync,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            Err(rejection) => Err(ApiError::invalid(format!("the path cannot be read: {rejection}"))),
        }
    }
}
