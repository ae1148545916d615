//! Opening a byte stream to a guest's port, through the guest gateway of its node.
//!
//! ```text
//!   ▶ CONNECT <sandbox>:<port> HTTP/1.1 ⏎ Host ⏎ X-Snapyard-Cluster-Token ⏎ ⏎
//!   ◀ 200: raw bytes to the port   404: no such sandbox   502: port closed   503: busy
//! ```
//!
//! The gateway holds a connection that comes in the middle of a rollback until the switch, and an emulated guest is
//! slow to accept, hence the long patience for the answer.

use std::io;
use std::time::Duration;

use snapyard_proto::auth::ClusterToken;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::route::Target;

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_PATIENCE: Duration = Duration::from_secs(60);

/// Largest head of an answer. The gateway's is a few lines.
const MAX_HEAD: usize = 8 << 10;

/// Why there is no stream.
#[derive(Debug, Error)]
pub(super) enum GatewayError {
    /// The node's gateway does not take connections: the node is down, or has restarted elsewhere.
    #[error("the guest gateway at {gateway} cannot be reached: {source}")]
    Unreachable { gateway: String, source: io::Error },
    #[error("the guest gateway does not know the sandbox")]
    UnknownSandbox,
    #[error("nothing listens on the port")]
    PortClosed,
    #[error("the sandbox is busy")]
    Busy,
    #[error("the guest gateway at {gateway} did not answer within {} s", ANSWER_PATIENCE.as_secs())]
    TimedOut { gateway: String },
    /// The gateway broke off, or said something that is not in the contract.
    #[error("the guest gateway at {gateway} answered {answer}")]
    Unexpected { gateway: String, answer: String },
}

/// Opens a stream to `target` through `gateway` (host:port).
pub(super) async fn open(gateway: &str, token: &ClusterToken, target: &Target) -> Result<TcpStream, GatewayError> {
    let unreachable = |source| GatewayError::Unreachable { gateway: gateway.to_owned(), source };
    let connected = timeout(CONNECT_PATIENCE, TcpStream::connect(gateway)).await;
    let mut stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(unreachable)?;
    // Requests are written in one piece; waiting to fill a segment only adds latency.
    stream.set_nodelay(true).map_err(unreachable)?;
    match timeout(ANSWER_PATIENCE, handshake(&mut stream, token, target)).await {
        Err(_) => Err(GatewayError::TimedOut { gateway: gateway.to_owned() }),
        Ok(Err(error)) => Err(GatewayError::Unexpected { gateway: gateway.to_owned(), answer: error.to_string() }),
        Ok(Ok(200)) => Ok(stream),
        Ok(Ok(404)) => Err(GatewayError::UnknownSandbox),
        Ok(Ok(502)) => Err(GatewayError::PortClosed),
        Ok(Ok(503)) => Err(GatewayError::Busy),
        Ok(Ok(status)) => {
            Err(GatewayError::Unexpected { gateway: gateway.to_owned(), answer: format!("status {status}") })
        }
    }
}

async fn handshake(stream: &mut TcpStream, token: &ClusterToken, target: &Target) -> io::Result<u16> {
    let Target { sandbox_id, port } = target;
    let token = token.expose();
    let request = format!(
        "CONNECT {sandbox_id}:{port} HTTP/1.1\r\nHost: {sandbox_id}:{port}\r\nX-Snapyard-Cluster-Token: {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let head = read_head(stream).await?;
    status(&head).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "something that is not HTTP/1.1"))
}

/// Reads up to the empty line and not a byte further: what follows belongs to the guest.
async fn read_head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head: Vec<u8> = Vec::with_capacity(256);
    let mut ahead = [0; 1024];
    while head.len() < MAX_HEAD {
        let seen = stream.peek(&mut ahead).await?;
        if seen == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The empty line may begin in what was read before.
        let before = head.len();
        head.extend_from_slice(&ahead[..seen]);
        let start = before.saturating_sub(3);
        let end = head[start..].windows(4).position(|four| four == b"\r\n\r\n").map(|at| start + at + 4);
        let taken = end.unwrap_or(head.len()) - before;
        head.truncate(before + taken);
        stream.read_exact(&mut ahead[..taken]).await?;
        if end.is_some() {
            return Ok(head);
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "a head without end"))
}

fn status(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?;
    let digits = rest.get(..3).filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// A gateway that sends `pieces` one after the other, each as a segment of its own, and what `open` makes of it.
    async fn scripted(pieces: &'static [&'static [u8]]) -> (Result<TcpStream, GatewayError>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let gateway = listener.local_addr().expect("bound").to_string();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("accepted");
            stream.set_nodelay(true).expect("socket option");
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.expect("request"));
            }
            for piece in pieces {
                stream.write_all(piece).await.expect("written");
                tokio::task::yield_now().await;
            }
            String::from_utf8(request).expect("ascii")
        });
        let token = ClusterToken::new("t0k").expect("ascii");
        let opened = open(&gateway, &token, &Target { sandbox_id: "abc".into(), port: 80 }).await;
        (opened, server.await.expect("joined"))
    }

    #[tokio::test]
    async fn what_follows_the_head_is_the_guests() {
        let (opened, request) = scripted(&[b"HTTP/1.1 2", b"00 OK\r\nX: y\r", b"\n\r\nguest ", b"speaks first"]).await;
        assert_eq!(request, "CONNECT abc:80 HTTP/1.1\r\nHost: abc:80\r\nX-Snapyard-Cluster-Token: t0k\r\n\r\n");
        let mut said = String::new();
        opened.expect("opened").read_to_string(&mut said).await.expect("read");
        assert_eq!(said, "guest speaks first");
    }

    #[tokio::test]
    async fn refusals_are_told_apart() {
        let refusal = |pieces| async move { scripted(pieces).await.0.expect_err("refused") };
        assert!(matches!(refusal(&[b"HTTP/1.1 404 x\r\n\r\n"]).await, GatewayError::UnknownSandbox));
        assert!(matches!(refusal(&[b"HTTP/1.1 502 x\r\n\r\n"]).await, GatewayError::PortClosed));
        assert!(matches!(refusal(&[b"HTTP/1.1 503 x\r\n\r\n"]).await, GatewayError::Busy));
        for odd in [&[b"HTTP/1.1 401 x\r\n\r\n" as &[u8]], &[b"SSH-2.0\r\n\r\n" as &[u8]], &[b"HTTP" as &[u8]]] {
            assert!(matches!(refusal(odd).await, GatewayError::Unexpected { .. }));
        }
    }

    #[tokio::test]
    async fn a_gateway_that_is_gone_is_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let gateway = listener.local_addr().expect("bound").to_string();
        drop(listener);
        let token = ClusterToken::new("t").expect("ascii");
        let refused = open(&gateway, &token, &Target { sandbox_id: "abc".into(), port: 80 }).await;
        assert!(matches!(refused, Err(GatewayError::Unreachable { .. })));
    }
}
