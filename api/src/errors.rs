//! Answers to requests that fail: always JSON `{"code": <int>, "message": "<what, which id, what to do>"}`.
//!
//! `Should-Retry` tells a client whether the same request may be sent again. A node or the scheduler says so with a
//! mark on the status ([`snapyard_proto::retry`]). An unmarked failure is judged by how far the request had come:
//! before anything could have happened, or after ([`ApiError::or_retry`]).

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use snapyard_proto::retry::{ShouldRetry, marked};
use thiserror::Error;
use tonic::Code;

/// How long a client waits before it repeats a request that was refused for now, seconds.
const RETRY_AFTER_SECONDS: &str = "1";

/// A failed request.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{status}: {message}")]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    should_retry: Option<ShouldRetry>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), should_retry: None }
    }

    /// 400: the request is wrong as it stands.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 404.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// 404 for a sandbox. The wording matters: an SDK tells kinds of 404 apart by it.
    pub(crate) fn no_sandbox(id: &str) -> Self {
        Self::not_found(format!("sandbox {id} was not found; it was killed, reached its timeout, or never existed"))
    }

    /// 409: the sandbox is in the middle of something, or paused; later it may be possible.
    pub(crate) fn busy(id: &str, doing: &str) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox {id} is {doing}; try again when that has ended"))
            .or_retry(ShouldRetry::Yes)
    }

    /// 409: it has no VM.
    pub(crate) fn paused(id: &str) -> Self {
        Self::new(StatusCode::CONFLICT, format!("sandbox {id} is paused; resume it or connect to it first"))
            .or_retry(ShouldRetry::No)
    }

    /// 501: a route or an option of the public API that this server does not have.
    pub(crate) fn unimplemented(what: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, format!("{what}: not implemented by this server"))
            .or_retry(ShouldRetry::No)
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The same failure under another status.
    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Sets what the failure says about a repetition, unless its origin has said so already.
    pub(crate) fn or_retry(mut self, should_retry: ShouldRetry) -> Self {
        self.should_retry.get_or_insert(should_retry);
        self
    }

    /// Replaces the message of a 404, where the caller knows better than the origin what was looked for.
    pub(crate) fn if_not_found(self, better: impl FnOnce() -> Self) -> Self {
        if self.status == StatusCode::NOT_FOUND { better() } else { self }
    }
}

impl From<tonic::Status> for ApiError {
    fn from(status: tonic::Status) -> Self {
        let http = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => StatusCode::CONFLICT,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unavailable | Code::DeadlineExceeded => StatusCode::SERVICE_UNAVAILABLE,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if http.is_server_error() {
            tracing::warn!(code = ?status.code(), message = status.message(), "a call behind the API failed");
        }
        Self { status: http, message: status.message().to_owned(), should_retry: marked(&status) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "code": self.status.as_u16(), "message": self.message });
        let mut response = (self.status, axum::Json(body)).into_response();
        let headers = response.headers_mut();
        if let Some(should_retry) = self.should_retry {
            let value = match should_retry {
                ShouldRetry::Yes => "true",
                ShouldRetry::No => "false",
            };
            headers.insert("should-retry", HeaderValue::from_static(value));
        }
        let later = self.status == StatusCode::SERVICE_UNAVAILABLE || self.should_retry == Some(ShouldRetry::Yes);
        if later && self.should_retry != Some(ShouldRetry::No) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECONDS));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use snapyard_proto::retry::mark;
    use tonic::Status;

    use super::*;

    fn headers(error: ApiError) -> (Option<String>, Option<String>) {
        let response = error.into_response();
        let text = |name: &str| response.headers().get(name).map(|v| v.to_str().expect("ascii").to_owned());
        (text("should-retry"), text("retry-after"))
    }

    #[test]
    fn every_grpc_code_has_its_http_status() {
        let expected = [
            (Code::InvalidArgument, 400),
            (Code::OutOfRange, 400),
            (Code::Unauthenticated, 401),
            (Code::NotFound, 404),
            (Code::AlreadyExists, 409),
            (Code::FailedPrecondition, 409),
            (Code::Aborted, 409),
            (Code::ResourceExhausted, 429),
            (Code::Unavailable, 503),
            (Code::DeadlineExceeded, 503),
            (Code::Unimplemented, 501),
            (Code::Internal, 500),
            (Code::Unknown, 500),
            (Code::Cancelled, 500),
            (Code::DataLoss, 500),
            (Code::PermissionDenied, 500),
        ];
        for (code, status) in expected {
            let error = ApiError::from(Status::new(code, "sandbox abc is busy"));
            assert_eq!(error.status().as_u16(), status, "{code:?}");
            assert_eq!(error.message(), "sandbox abc is busy");
        }
    }

    #[test]
    fn a_mark_of_the_origin_outweighs_the_stage() {
        let busy = || mark(Status::aborted("busy"), ShouldRetry::Yes);
        assert_eq!(headers(ApiError::from(busy())), (Some("true".into()), Some("1".into())));
        assert_eq!(headers(ApiError::from(busy()).or_retry(ShouldRetry::No)).0, Some("true".into()));
        assert_eq!(headers(ApiError::from(Status::aborted("name taken"))), (None, None));
    }

    #[test]
    fn unavailable_says_when_to_come_back_unless_it_may_have_happened() {
        let gone = || ApiError::from(Status::unavailable("gone"));
        assert_eq!(headers(gone()), (None, Some("1".into())));
        assert_eq!(headers(gone().or_retry(ShouldRetry::Yes)), (Some("true".into()), Some("1".into())));
        assert_eq!(headers(gone().or_retry(ShouldRetry::No)), (Some("false".into()), None));
    }
}
