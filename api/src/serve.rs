//! The port: accept connections, send each request to the data plane or to the REST routes, shut down in order.
//!
//! Shutdown: no new connections; those that switched protocols are closed; each other one ends after the request it is
//! in; operations under way end. After the deadline what is left is cut off.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body as ResponseBody;
use axum::response::IntoResponse;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::{collect, discard};
use crate::clients::{BadUrl, Clients};
use crate::config::ApiConfig;
use crate::errors::ApiError;
use crate::proxy::Proxy;
use crate::proxy::route::{Target, target};
use crate::routes::{App, router};
use crate::timing::Received;

/// Longest wait for a request's head, the idle time before it included: more than the 300 s after which the SDKs give
/// up a connection themselves, so that none is closed under a request that is just being sent.
const HEAD_PATIENCE: Duration = Duration::from_secs(330);

/// Pause after a failed accept: most often the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The server could not start.
#[derive(Debug, Error)]
pub enum ServeError {
    /// A configured endpoint is not a URL.
    #[error(transparent)]
    BadUrl(#[from] BadUrl),
}

/// Serves until `shutdown` resolves, then until requests under way have ended or the deadline has passed.
pub async fn serve(
    listener: TcpListener,
    config: ApiConfig,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let tasks = TaskTracker::new();
    let stop = CancellationToken::new();
    let cut_off = CancellationToken::new();
    let deadline = config.shutdown_deadline;
    let clients = Arc::new(Clients::new(&config.catalog_url, &config.scheduler_url, config.cluster_token.clone())?);
    let wake_ms = i64::from(config.default_timeout_s) * 1000;
    let proxy = Proxy::new(clients.clone(), wake_ms, config.cluster_token.clone(), tasks.clone(), stop.clone());
    tasks.spawn(proxy.clone().sweep_until_stopped());
    let port = Arc::new(Port::new(App { config, clients, proxy, tasks: tasks.clone() }));

    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = port.clone().connection(stream);
                let stop = stop.clone();
                tasks.spawn(cut_off.clone().run_until_cancelled_owned(async move {
                    let mut connection = pin!(connection);
                    let ended = match stop.run_until_cancelled(connection.as_mut()).await {
                        Some(ended) => ended,
                        None => {
                            connection.as_mut().graceful_shutdown();
                            connection.await
                        }
                    };
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a client's connection ended");
                    }
                }));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    drop(listener);
    stop.cancel();
    tasks.close();
    if tokio::time::timeout(deadline, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "cutting off requests that did not end within the shutdown deadline");
        cut_off.cancel();
    }
    Ok(())
}

type Connection<S> = http1::UpgradeableConnection<TokioIo<TcpStream>, S>;

/// What a request is answered by.
enum Work {
    Guest(Target, Box<Request<Incoming>>),
    Rest(JoinHandle<Response<ResponseBody>>),
    Refused(ApiError),
}

/// What requests are sent to.
struct Port {
    app: Arc<App>,
    routes: TowerToHyperService<axum::Router>,
}

impl Port {
    fn new(app: App) -> Self {
        let app = Arc::new(app);
        Self { routes: TowerToHyperService::new(router(app.clone())), app }
    }

    fn connection(
        self: Arc<Self>,
        stream: TcpStream,
    ) -> Connection<
        impl Service<
            Request<Incoming>,
            Response = Response<ResponseBody>,
            Error = Infallible,
            Future = impl Future<Output = Result<Response<ResponseBody>, Infallible>> + Send,
        >,
    > {
        // Answers are often small pieces of a stream, each worth sending at once.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        let service = service_fn(move |request| self.clone().answer(request));
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_PATIENCE)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
    }

    /// hyper drops the future of a request when it sees the client's end of the connection closed, which can be before
    /// that future was polled once. So a REST request, which is a thing to be done, becomes a task in this very call;
    /// one for a guest is a conversation, and ends with its client.
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<Response<ResponseBody>, Infallible>> + Send {
        let received = Received(Instant::now());
        let authority = request.uri().authority().map(|authority| authority.as_str());
        let work = match target(request.headers(), authority) {
            Ok(Some(target)) => Work::Guest(target, Box::new(request)),
            Ok(None) => Work::Rest(self.app.tasks.spawn(self.clone().rest(request, received))),
            Err(error) => {
                let (head, body) = request.into_parts();
                discard(&head.headers, body, &self.app.tasks);
                Work::Refused(error)
            }
        };
        async move {
            Ok(match work {
                Work::Guest(target, request) => self.app.proxy.forward(&target, *request).await,
                Work::Rest(task) => task.await.unwrap_or_else(|error| {
                    tracing::error!(%error, "an operation broke off");
                    let text = "the server broke off; look before you repeat it";
                    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
                }),
                Work::Refused(error) => error.into_response(),
            })
        }
    }

    async fn rest(self: Arc<Self>, request: Request<Incoming>, received: Received) -> Response<ResponseBody> {
        let (mut head, body) = request.into_parts();
        let body = match collect(&head.headers, body, self.app.config.max_body_bytes, &self.app.tasks).await {
            Ok(body) => body,
            Err(error) => return error.into_response(),
        };
        head.extensions.insert(received);
        let Ok(response) = self.routes.call(Request::from_parts(head, Full::new(body))).await;
        response
    }
}
