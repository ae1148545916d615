//! The way in for the sandbox proxy: `CONNECT <sandbox>:<port> HTTP/1.1`, then raw bytes to that port of the guest.
//!
//! The agent and the interpreter have forwarded ports of their own. Any other port is reached through the agent's
//! control port, which connects from inside the guest: so every port works without being declared, also one that
//! listens on the guest's loopback only, and a closed port is known to be closed. The control port itself is never
//! given out.
//!
//! While a sandbox is rolled back new connections wait for the switch. When its guest ends, by a rollback or a kill,
//! all its connections are reset at once: a stall would look like a slow guest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use snapyard_proto::auth::ClusterToken;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::sandbox::{Endpoints, Link, Registry, Sandbox};

/// The agent's control port inside a guest.
pub const CONTROL_PORT: u16 = 49982;
/// The agent's public port inside a guest.
pub const AGENT_PORT: u16 = 49983;
/// The code interpreter's port inside a guest.
pub const INTERPRETER_PORT: u16 = 49999;

/// How long a connection waits for a sandbox whose guest is being switched.
const HELD: Duration = Duration::from_secs(30);
/// How long the agent may take to connect from inside a guest.
const TUNNEL: Duration = Duration::from_secs(30);
/// The most that the agent's answer to a CONNECT may take before its blank line.
const HEAD_BYTES: usize = 4096;

/// The gateway of one node.
pub struct Gateway {
    /// The node's sandboxes.
    pub sandboxes: Arc<Registry>,
    /// What callers must present.
    pub token: ClusterToken,
    /// Owner of the connections' tasks.
    pub tasks: TaskTracker,
    /// Ends the accept loop and every connection.
    pub shutdown: CancellationToken,
}

type Answer = Response<Full<Bytes>>;

impl Gateway {
    /// Accepts connections until shutdown.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            let stream = tokio::select! {
                () = self.shutdown.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Out of descriptors, mostly: give connections time to end.
                        tracing::warn!(%error, "the guest gateway cannot accept");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            let gateway = Arc::clone(&self);
            self.tasks.spawn(async move { gateway.connection(stream).await });
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let gateway = Arc::clone(&self);
        let service = service_fn(move |request| {
            let gateway = Arc::clone(&gateway);
            async move { Ok::<_, std::convert::Infallible>(gateway.handle(request).await) }
        });
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(10))
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            _ = served => {}
        }
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        let token = request.headers().get("x-snapyard-cluster-token");
        if !token.is_some_and(|token| self.token.matches(token.as_bytes())) {
            return refuse(StatusCode::UNAUTHORIZED, "the cluster token is missing or wrong");
        }
        let target = (request.method() == Method::CONNECT).then(|| request.uri().authority()).flatten();
        let Some((id, port)) = target.and_then(|authority| Some((authority.host().to_owned(), authority.port_u16()?)))
        else {
            return refuse(StatusCode::BAD_REQUEST, "expected CONNECT sandbox:port");
        };
        match self.reach(&id, port).await {
            Ok((guest, cut)) => {
                let shutdown = self.shutdown.clone();
                self.tasks.spawn(async move {
                    let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
                    splice(upgraded, guest, &cut, &shutdown).await;
                });
                Response::new(Full::default())
            }
            Err(answer) => *answer,
        }
    }

    async fn reach(&self, id: &str, port: u16) -> Result<(TcpStream, CancellationToken), Box<Answer>> {
        let Some(sandbox) = self.sandboxes.find(id) else {
            let message = match self.sandboxes.lost_reason(id) {
                Some(reason) => format!("sandbox {id} was not found: it was lost: {reason}"),
                None => format!("sandbox {id} was not found"),
            };
            return Err(Box::new(refuse(StatusCode::NOT_FOUND, &message)));
        };
        let endpoints = open_link(&sandbox).await.map_err(Box::new)?;
        let connected = match port {
            AGENT_PORT => connect(endpoints.agent).await,
            INTERPRETER_PORT => connect(endpoints.interpreter).await,
            CONTROL_PORT => Err(closed(port)),
            port => tunnel(endpoints.control, port).await,
        };
        Ok((connected.map_err(Box::new)?, endpoints.cut))
    }
}

/// The guest's endpoints, waiting while it is being switched.
async fn open_link(sandbox: &Sandbox) -> Result<Endpoints, Answer> {
    let id = &sandbox.facts.id;
    let mut link = sandbox.link.subscribe();
    let settled = tokio::time::timeout(HELD, link.wait_for(|link| !matches!(link, Link::Held))).await;
    match settled.as_ref().map(|settled| settled.as_ref().map(|link| &**link)) {
        Ok(Ok(Link::Open(endpoints))) => Ok(endpoints.clone()),
        Ok(Ok(Link::Gone(Some(reason)))) => {
            Err(refuse(StatusCode::NOT_FOUND, &format!("sandbox {id} was not found: {reason}")))
        }
        Ok(_) => Err(refuse(StatusCode::NOT_FOUND, &format!("sandbox {id} was not found"))),
        Err(_) => Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &format!("sandbox {id} is being switched; try again"))),
    }
}

async fn connect(address: SocketAddr) -> Result<TcpStream, Answer> {
    let stream = TcpStream::connect(address)
        .await
        .map_err(|error| refuse(StatusCode::BAD_GATEWAY, &format!("the guest cannot be reached: {error}")))?;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// Asks the agent to connect to `port` from inside.
async fn tunnel(control: SocketAddr, port: u16) -> Result<TcpStream, Answer> {
    let mut stream = connect(control).await?;
    let asked = tokio::time::timeout(TUNNEL, ask(&mut stream, port)).await;
    match asked {
        Ok(Ok(status)) if (200..300).contains(&status) => Ok(stream),
        Ok(Ok(_)) => Err(closed(port)),
        Ok(Err(error)) => Err(refuse(StatusCode::BAD_GATEWAY, &format!("the guest's agent broke off: {error}"))),
        Err(_) => Err(refuse(StatusCode::BAD_GATEWAY, "the guest's agent did not answer in time")),
    }
}

/// Sends the CONNECT and reads the answer's head byte by byte, so that nothing of what follows is consumed.
async fn ask(stream: &mut TcpStream, port: u16) -> std::io::Result<u16> {
    let request = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::with_capacity(256);
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= HEAD_BYTES {
            return Err(std::io::Error::other("its answer has no end"));
        }
        head.push(stream.read_u8().await?);
    }
    status_of(&head).ok_or_else(|| std::io::Error::other("its answer is not HTTP"))
}

/// The status code of an HTTP/1 response head.
fn status_of(head: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(head).ok()?.lines().next()?;
    let mut words = line.split(' ');
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok()
}

fn closed(port: u16) -> Answer {
    refuse(StatusCode::BAD_GATEWAY, &format!("port {port}: port is not open"))
}

fn refuse(status: StatusCode, message: &str) -> Answer {
    let body = serde_json::json!({ "code": status.as_u16(), "message": message }).to_string();
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
    response
}

/// Copies both ways until either side ends or the guest is cut off; then the guest's side is reset.
async fn splice(
    upgraded: hyper::upgrade::Upgraded,
    mut guest: TcpStream,
    cut: &CancellationToken,
    shutdown: &CancellationToken,
) {
    let mut caller = TokioIo::new(upgraded);
    tokio::select! {
        () = cut.cancelled() => {
            let _ = guest.set_zero_linger();
        }
        () = shutdown.cancelled() => {}
        _ = copy(&mut caller, &mut guest) => {}
    }
}

async fn copy(
    caller: &mut (impl AsyncRead + AsyncWrite + Unpin),
    guest: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> std::io::Result<(u64, u64)> {
    tokio::io::copy_bidirectional_with_sizes(caller, guest, 64 << 10, 64 << 10).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines_are_read_and_others_refused() {
        assert_eq!(status_of(b"HTTP/1.1 200 OK\r\n\r\n"), Some(200));
        assert_eq!(status_of(b"HTTP/1.1 502\r\n\r\n"), Some(502));
        assert_eq!(status_of(b"SSH-2.0-OpenSSH\r\n\r\n"), None);
        assert_eq!(status_of(b"HTTP/1.1 abc\r\n\r\n"), None);
        assert_eq!(status_of(&[0xff, 0xfe]), None);
    }
}
