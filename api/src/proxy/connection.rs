//! HTTP/1.1 over a stream to a guest's port.

use bytes::Bytes;
use http::{Method, Request, header, request};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::task::TaskTracker;

/// Largest body that is kept for a second attempt, bytes.
const REPLAY_BYTES: u64 = 64 << 10;

/// What is sent to a guest: a body in memory, or the client's as it comes.
pub(super) type Outgoing = Either<Full<Bytes>, Incoming>;

/// A connection to a guest's port, ready for one request at a time.
pub(super) type Connection = SendRequest<Outgoing>;

/// Speaks HTTP/1.1 on `stream`. The connection lives in a task until either end closes it.
pub(super) async fn start(stream: TcpStream, tasks: &TaskTracker) -> hyper::Result<Connection> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tasks.spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to a guest ended");
        }
    });
    Ok(sender)
}

/// A request that can be sent a second time on another connection, when the first turns out dead.
#[derive(Debug)]
pub(super) struct Replay {
    head: request::Parts,
    body: Bytes,
}

impl Replay {
    /// A request without a body.
    pub(super) fn new(head: request::Parts) -> Self {
        Self { head, body: Bytes::new() }
    }

    pub(super) fn request(&self) -> Request<Outgoing> {
        Request::from_parts(self.head.clone(), Either::Left(Full::new(self.body.clone())))
    }
}

/// Makes the outgoing request. One that may be repeated by its method (RFC 9110, section 9.2.2) and whose body is
/// announced to be small is kept, so that a reused connection that dies under it costs the client nothing. Everything
/// else streams. The error is the client's, whose body broke off.
pub(super) async fn prepare(
    head: request::Parts,
    body: Incoming,
) -> hyper::Result<(Request<Outgoing>, Option<Replay>)> {
    let idempotent = matches!(
        head.method,
        Method::GET | Method::HEAD | Method::PUT | Method::DELETE | Method::OPTIONS | Method::TRACE
    );
    let small = body.size_hint().upper().is_some_and(|bytes| bytes <= REPLAY_BYTES);
    if !idempotent || !small {
        return Ok((Request::from_parts(head, Either::Right(body)), None));
    }
    let replay = Replay { body: body.collect().await?.to_bytes(), head };
    debug_assert!(replay.head.headers.get(header::TRANSFER_ENCODING).is_none(), "framing is made anew");
    Ok((replay.request(), Some(replay)))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_the_guest_closes_is_not_ready_any_more() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
        let (guest, _) = listener.accept().await.expect("accepted");
        let tasks = TaskTracker::new();
        let mut connection = start(stream, &tasks).await.expect("handshake");
        connection.ready().await.expect("open");
        assert!(connection.is_ready());
        drop(guest);
        tasks.close();
        tasks.wait().await;
        assert!(!connection.is_ready());
    }
}
