//! HTTP/1.1 on the three ports, and the one thing that is special about it: all connections of before a restore are cut.
//!
//! ```text
//! accept ─► id = next ─► serve ──────────────┬─► client hangs up: the handler is dropped
//!                          └─ upgrade ─► tunnel ─┤
//!                                                └─► cut(before, spared): RST, unless id ≥ before or id = spared
//! ```
//!
//! A connection that was open when a snapshot was taken has no peer in a guest restored from it: its bytes would go to
//! somebody who never sent the request. The reset happens in the one call that gives the guest its new identity.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A response's body.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;
/// A response.
pub type Answer = Response<Body>;

/// Number of an accepted connection; grows over all ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// Which connections must go: those accepted before `before`, except `spared`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cut {
    before: ConnectionId,
    spared: ConnectionId,
}

impl Cut {
    fn hits(self, id: ConnectionId) -> bool {
        id < self.before && id != self.spared
    }
}

/// Hands out connection numbers, and cuts connections.
#[derive(Clone)]
pub struct Connections {
    next: Arc<AtomicU64>,
    cut: watch::Sender<Cut>,
}

impl Default for Connections {
    fn default() -> Self {
        Self { next: Arc::new(AtomicU64::new(1)), cut: watch::Sender::new(Cut::default()) }
    }
}

impl Connections {
    /// Resets all connections that are open now, on every port, but `spared`.
    pub fn cut_all_but(&self, spared: ConnectionId) {
        let before = ConnectionId(self.next.load(Ordering::SeqCst));
        self.cut.send_replace(Cut { before, spared });
    }

    fn accept(&self) -> Scope {
        let id = ConnectionId(self.next.fetch_add(1, Ordering::SeqCst));
        Scope { id, cut: self.cut.subscribe() }
    }
}

/// A connection's number, and its way to learn that it was cut. A handler that keeps the connection (a tunnel) takes it
/// along.
#[derive(Clone)]
pub struct Scope {
    /// The number.
    pub id: ConnectionId,
    cut: watch::Receiver<Cut>,
}

impl Scope {
    /// Waits until this connection is cut.
    pub async fn cut(&mut self) {
        let id = self.id;
        if self.cut.wait_for(|cut| cut.hits(id)).await.is_err() {
            // Nobody is left who could cut.
            std::future::pending::<()>().await;
        }
    }
}

/// A TCP stream that ends with a reset instead of an orderly close once its flag is set.
pub struct Stream {
    inner: TcpStream,
    reset: Arc<AtomicBool>,
}

impl Stream {
    /// Makes the close of this stream a reset.
    pub fn reset_on_close(&self) {
        self.reset.store(true, Ordering::SeqCst);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.reset.load(Ordering::SeqCst) {
            // Should it fail, the peer gets a FIN, which ends the connection as well.
            let _ = self.inner.set_zero_linger();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Who may connect to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Everybody.
    All,
    /// Nobody from inside this guest: whoever connects from the address that he connects to.
    OutsideOnly,
}

impl Peers {
    fn allows(self, peer: SocketAddr, local: SocketAddr) -> bool {
        self == Self::All || (peer.ip() != local.ip() && !peer.ip().is_loopback())
    }
}

/// Serves `listener` for ever. `handler` gets each request with the scope of its connection.
pub async fn serve<H, F>(listener: TcpListener, connections: Connections, peers: Peers, handler: H)
where
    H: Fn(Request<Incoming>, Scope) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                // Out of descriptors, most likely: what is being served may give some back.
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        if stream.local_addr().is_ok_and(|local| !peers.allows(peer, local)) {
            continue;
        }
        let _ = stream.set_nodelay(true);
        tokio::spawn(connection(stream, connections.accept(), handler.clone()));
    }
}

async fn connection<H, F>(stream: TcpStream, mut scope: Scope, handler: H)
where
    H: Fn(Request<Incoming>, Scope) -> F + Send + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let reset = Arc::new(AtomicBool::new(false));
    let io = TokioIo::new(Stream { inner: stream, reset: reset.clone() });
    let of_request = scope.clone();
    let service = service_fn(move |request| {
        let answer = handler(request, of_request.clone());
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    // Pinned out here: a future that is moved into `select!` is dropped, and its stream closed, before the other branch's
    // handler has said how to close it.
    let mut serving = pin!(http1::Builder::new().serve_connection(io, service).with_upgrades());
    tokio::select! {
        // The cut first: a request that waited for the thaw is its source's, and must not go on in a copy.
        biased;
        () = scope.cut() => reset.store(true, Ordering::SeqCst),
        // How a connection ends is its client's affair.
        _ = &mut serving => {}
    }
}

/// An answer without a body.
pub fn empty(status: StatusCode) -> Answer {
    let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response
}

/// An answer with a body that is there already.
pub fn full(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// An answer with `value` as JSON.
pub fn json(status: StatusCode, value: &impl serde::Serialize) -> Answer {
    full(status, "application/json", serde_json::to_vec(value).expect("our own types serialise"))
}

/// An error in the form of all plain HTTP routes: `{"code", "message"}`.
pub fn error(status: StatusCode, message: &str) -> Answer {
    json(status, &serde_json::json!({ "code": status.as_u16(), "message": message }))
}

/// Why a request's body could not be had.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// More than the limit, in bytes.
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// The connection broke, or the chunks were malformed.
    #[error("the body could not be read: {0}")]
    Broken(#[from] hyper::Error),
}

/// Reads a body of at most `limit` bytes.
pub async fn collect(mut body: Incoming, limit: usize) -> Result<Bytes, BodyError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(BodyError::TooLarge(limit));
    }
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if first.is_empty() {
            // Nearly every body is one piece: no copy.
            first = data;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&first);
            }
            rest.extend_from_slice(&data);
        }
        if first.len().max(rest.len()) > limit {
            return Err(BodyError::TooLarge(limit));
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}
