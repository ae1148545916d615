//! The data plane: HTTP/1.1 requests for a sandbox, passed on to a port inside it.
//!
//! ```text
//!   client ──▶ route ──▶ idle connection to that port? ──yes──▶ send ──▶ answer, streamed
//!                              │ no                              │ dead before it took the request
//!                              ▼                                 ▼
//!                        lookup ▶ gateway (CONNECT) ▶ HTTP/1.1 ▶ send
//! ```
//!
//! Bodies are streamed in both directions, without limit, without a total time-out, and never held back. An idle
//! connection that turns out dead is replaced in silence when the request has not been sent on it, or when repeating
//! it is harmless ([`connection::prepare`]); otherwise the client is told that it may have happened.
//!
//! A client that hangs up takes its request to the guest with it: the connection is closed, as it would be without a
//! proxy. (The agent keeps a command running all the same.)

mod connection;
mod gateway;
mod headers;
mod lookup;
mod pool;
pub(crate) mod route;
mod upgrade;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body as ResponseBody;
use axum::response::IntoResponse;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::Either;
use hyper::body::{Body, Incoming};
use parking_lot::Mutex;
use snapyard_proto::auth::ClusterToken;
use snapyard_proto::retry::ShouldRetry;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::discard;
use crate::clients::Clients;
use crate::errors::ApiError;
use connection::{Connection, Outgoing, Replay};
use gateway::GatewayError;
use lookup::Lookup;
use pool::IdlePool;
use route::{CONTROL_PORT, Target};

const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// The data plane. A handle; clones are the same proxy.
#[derive(Clone, Debug)]
pub(crate) struct Proxy(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    lookup: Lookup,
    idle: Mutex<IdlePool<Connection>>,
    token: ClusterToken,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Proxy {
    /// `wake_ms`: how long a paused sandbox lives that a request wakes. `tasks` will hold everything that goes on after a
    /// request; `stop` ends it.
    pub(crate) fn new(
        clients: Arc<Clients>,
        wake_ms: i64,
        token: ClusterToken,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let lookup = Lookup::new(clients, wake_ms);
        let inner = Inner { lookup, idle: Mutex::new(IdlePool::new()), token, tasks, stop };
        Self(Arc::new(inner))
    }

    /// Closes what is idle for too long, until the proxy is stopped.
    pub(crate) async fn sweep_until_stopped(self) {
        let mut tick = tokio::time::interval(SWEEP_INTERVAL);
        while self.0.stop.run_until_cancelled(tick.tick()).await.is_some() {
            self.0.idle.lock().sweep(Instant::now(), Connection::is_ready);
        }
        self.0.idle.lock().clear();
    }

    /// Forgets where a sandbox is and all idle connections to it: it was killed or rolled back.
    pub(crate) fn forget(&self, sandbox_id: &str) {
        self.0.lookup.forget(sandbox_id);
        self.0.idle.lock().forget(sandbox_id);
    }

    /// Passes a request on. Always answers; a failure of the proxy's own is a JSON error.
    pub(crate) async fn forward(&self, target: &Target, request: Request<Incoming>) -> Response<ResponseBody> {
        match self.try_forward(target, request).await {
            Ok(response) => response,
            Err(error) => {
                tracing::debug!(sandbox_id = target.sandbox_id, port = target.port, %error, "not passed on");
                error.into_response()
            }
        }
    }

    /// Asks a port of a sandbox something on the API's own behalf. The request has no body, and may be repeated.
    pub(crate) async fn ask(&self, target: &Target, request: Request<()>) -> Result<Response<Incoming>, ApiError> {
        let (head, ()) = request.into_parts();
        let replay = Replay::new(head);
        let epoch = self.0.idle.lock().epoch();
        let (response, connection) = self.send(target, replay.request(), Some(replay), true).await?;
        self.keep_when_idle(target.clone(), connection, epoch);
        Ok(response)
    }

    async fn try_forward(
        &self,
        target: &Target,
        mut request: Request<Incoming>,
    ) -> Result<Response<ResponseBody>, ApiError> {
        let refusal = if target.port == CONTROL_PORT {
            Some(port_closed(target))
        } else if request.method() == Method::CONNECT {
            Some(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not passed on to sandboxes"))
        } else {
            None
        };
        if let Some(error) = refusal {
            let (head, body) = request.into_parts();
            discard(&head.headers, body, &self.0.tasks);
            return Err(error);
        }

        // A request that has a body goes on in HTTP whatever it asks for, as RFC 9110, section 7.8 allows.
        let protocol = headers::wanted_upgrade(request.headers()).filter(|_| request.body().is_end_stream());
        let client_side = protocol.is_some().then(|| hyper::upgrade::on(&mut request));

        let (mut head, body) = request.into_parts();
        headers::prepare_request(&mut head.headers, target.port);
        if let Some(protocol) = &protocol {
            headers::set_upgrade(&mut head.headers, protocol.clone());
        }
        head.uri = origin_form(&head.uri);
        head.version = Version::HTTP_11;
        head.extensions.clear();

        let (outgoing, replay) = connection::prepare(head, body)
            .await
            .map_err(|error| ApiError::invalid(format!("the request's body broke off: {error}")))?;
        // A connection that switches protocols is never given back, so none is taken from those that are reused.
        let reuse = protocol.is_none();
        let epoch = self.0.idle.lock().epoch();
        let (response, connection) = self.send(target, outgoing, replay, reuse).await?;

        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return match (client_side, protocol) {
                (Some(client), Some(protocol)) => {
                    Ok(upgrade::switch(response, client, protocol, &self.0.tasks, self.0.stop.clone()))
                }
                _ => Err(broke_off(target, "it switched protocols without having been asked to")),
            };
        }
        self.keep_when_idle(target.clone(), connection, epoch);
        let (mut head, body) = response.into_parts();
        headers::strip_hop_by_hop(&mut head.headers);
        head.version = Version::HTTP_11;
        head.extensions.clear();
        Ok(Response::from_parts(head, ResponseBody::new(body)))
    }

    /// Sends a request on an idle connection or, failing that, on a new one.
    async fn send(
        &self,
        target: &Target,
        mut outgoing: Request<Outgoing>,
        replay: Option<Replay>,
        reuse: bool,
    ) -> Result<(Response<Incoming>, Connection), ApiError> {
        while let Some(mut connection) = if reuse { self.take_idle(target) } else { None } {
            match connection.try_send_request(outgoing).await {
                Ok(response) => return Ok((response, connection)),
                Err(mut failed) => {
                    // Not sent at all: the same request again, its body untouched. Otherwise only what may be repeated.
                    let again = failed.take_message().or_else(|| replay.as_ref().map(Replay::request));
                    let Some(again) = again else { return Err(broke_off(target, failed.into_error())) };
                    outgoing = again;
                }
            }
        }
        let mut connection = match self.connect(target).await {
            Ok(connection) => connection,
            Err(error) => {
                let (head, body) = outgoing.into_parts();
                if let Either::Right(body) = body {
                    discard(&head.headers, body, &self.0.tasks);
                }
                return Err(error);
            }
        };
        let response = connection.send_request(outgoing).await.map_err(|error| broke_off(target, error))?;
        Ok((response, connection))
    }

    fn take_idle(&self, target: &Target) -> Option<Connection> {
        self.0.idle.lock().take(target, Instant::now(), Connection::is_ready)
    }

    async fn connect(&self, target: &Target) -> Result<Connection, ApiError> {
        let mut found = self.find(target).await?;
        let opened = match gateway::open(&found.gateway, &self.0.token, target).await {
            // The sandbox may have moved since the gateway was looked up.
            Err(GatewayError::UnknownSandbox | GatewayError::Unreachable { .. }) if found.remembered => {
                self.0.lookup.forget(&target.sandbox_id);
                found = self.find(target).await?;
                gateway::open(&found.gateway, &self.0.token, target).await
            }
            opened => opened,
        };
        match opened {
            Ok(stream) => connection::start(stream, &self.0.tasks).await.map_err(|error| broke_off(target, error)),
            Err(error) => {
                self.0.lookup.forget(&target.sandbox_id);
                Err(gateway_failed(target, &error))
            }
        }
    }

    async fn find(&self, target: &Target) -> Result<lookup::Found, ApiError> {
        let found = self.0.lookup.find(&target.sandbox_id).await;
        found.map_err(|error| match error.status() {
            StatusCode::NOT_FOUND => error.with_status(StatusCode::BAD_GATEWAY).or_retry(ShouldRetry::No),
            _ => error,
        })
    }

    /// Gives a connection back once the answer that is still coming on it has been read, unless it closes.
    fn keep_when_idle(&self, target: Target, mut connection: Connection, epoch: u64) {
        let proxy = self.clone();
        let stop = self.0.stop.clone();
        self.0.tasks.spawn(stop.run_until_cancelled_owned(async move {
            if connection.ready().await.is_ok() {
                proxy.0.idle.lock().put(target, connection, epoch, Instant::now());
            }
        }));
    }
}

fn origin_form(uri: &Uri) -> Uri {
    uri.path_and_query().cloned().map_or_else(|| Uri::from_static("/"), Uri::from)
}

/// The wording of the next three matters: SDKs look for "was not found" and "port is not open" in a 502.
fn gateway_failed(target: &Target, error: &GatewayError) -> ApiError {
    let Target { sandbox_id, port } = target;
    match error {
        GatewayError::UnknownSandbox => {
            ApiError::no_sandbox(sandbox_id).with_status(StatusCode::BAD_GATEWAY).or_retry(ShouldRetry::No)
        }
        GatewayError::PortClosed => port_closed(target),
        GatewayError::Busy => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, format!("sandbox {sandbox_id} is busy; try again"))
                .or_retry(ShouldRetry::Yes)
        }
        GatewayError::Unreachable { .. } => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, format!("sandbox {sandbox_id}: {error}"))
                .or_retry(ShouldRetry::Yes)
        }
        GatewayError::TimedOut { .. } => {
            ApiError::new(StatusCode::GATEWAY_TIMEOUT, format!("sandbox {sandbox_id}, port {port}: {error}"))
        }
        GatewayError::Unexpected { .. } => broke_off(target, error),
    }
}

fn port_closed(target: &Target) -> ApiError {
    let Target { sandbox_id, port } = target;
    let message = format!("sandbox {sandbox_id} is running, but the port is not open: nothing listens on {port}");
    ApiError::new(StatusCode::BAD_GATEWAY, message).or_retry(ShouldRetry::No)
}

fn broke_off(target: &Target, cause: impl std::fmt::Display) -> ApiError {
    let Target { sandbox_id, port } = target;
    let message = format!(
        "sandbox {sandbox_id}, port {port}: the connection broke before an answer came ({cause}); the request may have \
         been acted on"
    );
    ApiError::new(StatusCode::BAD_GATEWAY, message).or_retry(ShouldRetry::No)
}
