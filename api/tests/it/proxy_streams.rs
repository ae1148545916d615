//! Streams through the proxy: passed on as they come, in both directions, of any length, until either end is gone.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::support::World;
use crate::support::client::{read, send};
use crate::support::guest::{full, serve_guest};
use crate::support::soon;

type Pieces = mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>;
type PieceBody = StreamBody<UnboundedReceiverStream<Result<Frame<Bytes>, Infallible>>>;

/// A body that is written while it is being sent.
fn piecewise() -> (Pieces, PieceBody) {
    let (pieces, stream) = mpsc::unbounded_channel();
    (pieces, StreamBody::new(UnboundedReceiverStream::new(stream)))
}

fn piece(text: &'static str) -> Result<Frame<Bytes>, Infallible> {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

async fn next_piece(body: &mut Incoming) -> Option<Bytes> {
    let frame = soon("a piece of the answer", body.frame()).await?.expect("an unbroken stream");
    Some(frame.into_data().expect("data"))
}

/// A guest that sends back each piece of the request as it comes.
async fn echoing_guest(world: &World) {
    let server = serve_guest(|request| async move {
        let pieces = request.into_body().into_data_stream().map(|piece| Ok(Frame::data(piece.expect("a piece"))));
        Response::new(BodyExt::boxed(StreamBody::new(pieces)))
    });
    world.gateway.open_port("abc", 8000, server.await);
}

#[tokio::test]
async fn pieces_are_passed_on_in_both_directions_while_the_request_is_still_being_sent() {
    let world = World::start().await.with_sandbox("abc");
    echoing_guest(&world).await;
    let (pieces, body) = piecewise();
    pieces.send(piece("one")).expect("open");
    let request = world.to_sandbox(Method::POST, "abc", 8000).body(body).expect("a request");
    let mut answer = soon("the answer's head", send(world.address, request)).await.into_body();
    assert_eq!(next_piece(&mut answer).await.as_deref(), Some(&b"one"[..]));
    pieces.send(piece("two")).expect("open");
    assert_eq!(next_piece(&mut answer).await.as_deref(), Some(&b"two"[..]));
    drop(pieces);
    assert_eq!(next_piece(&mut answer).await, None);
}

#[tokio::test]
async fn a_large_chunked_upload_arrives_whole() {
    const PIECES: u64 = 256;
    const PIECE: usize = 256 << 10;
    let world = World::start().await.with_sandbox("abc");
    let server = serve_guest(|request| async move {
        let chunked = request.headers().contains_key("transfer-encoding");
        let mut stream = request.into_body().into_data_stream();
        let (mut length, mut sum) = (0_u64, 0_u64);
        while let Some(piece) = stream.next().await {
            let piece = piece.expect("a piece");
            length += piece.len() as u64;
            sum += piece.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        }
        Response::new(full(format!("{chunked} {length} {sum}")))
    });
    world.gateway.open_port("abc", 8000, server.await);
    let pieces = futures::stream::iter(
        (0..PIECES).map(|number| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![number as u8; PIECE])))),
    );
    let request = world.to_sandbox(Method::PUT, "abc", 8000).body(StreamBody::new(pieces)).expect("a request");
    let answer = soon("the upload", async { read(send(world.address, request).await).await }).await;
    let sum = (0..PIECES).sum::<u64>() * PIECE as u64;
    assert_eq!(answer.body, format!("true {} {sum}", PIECES * PIECE as u64));
}

#[tokio::test]
async fn a_connection_switches_protocols_and_carries_bytes_both_ways() {
    let world = World::start().await.with_sandbox("abc");
    let server = serve_guest(|mut request| async move {
        assert_eq!(request.headers()["upgrade"], "websocket");
        assert_eq!(request.headers()["sec-websocket-key"], "k");
        let switched = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut io = TokioIo::new(switched.await.expect("switched"));
            io.write_all(b"guest first").await.expect("written");
            let mut said = [0; 4];
            io.read_exact(&mut said).await.expect("read");
            io.write_all(&said).await.expect("written");
            let mut rest = Vec::new();
            io.read_to_end(&mut rest).await.expect("the client closes");
            assert!(rest.is_empty());
        });
        Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-accept", "a")
            .body(full(""))
            .expect("a response")
    });
    world.gateway.open_port("abc", 8000, server.await);
    let request = world
        .to_sandbox(Method::GET, "abc", 8000)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-key", "k")
        .body(Empty::<Bytes>::new())
        .expect("a request");
    let mut response = soon("the switch", send(world.address, request)).await;
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["sec-websocket-accept"], "a");
    assert_eq!(response.headers()["upgrade"], "websocket");
    let mut io = TokioIo::new(hyper::upgrade::on(&mut response).await.expect("switched"));
    let mut said = [0; 11];
    soon("the guest's first words", io.read_exact(&mut said)).await.expect("read");
    assert_eq!(&said, b"guest first");
    io.write_all(b"echo").await.expect("written");
    let mut back = [0; 4];
    soon("the echo", io.read_exact(&mut back)).await.expect("read");
    assert_eq!(&back, b"echo");

    // An open WebSocket does not keep the server from shutting down.
    soon("shutdown", world.stop()).await;
    let mut rest = Vec::new();
    let _ = soon("the end", io.read_to_end(&mut rest)).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_answer() {
    let world = World::start().await.with_sandbox("abc");
    let server = serve_guest(|_| async {
        Response::builder().status(StatusCode::FORBIDDEN).body(full("no sockets here")).expect("a response")
    });
    world.gateway.open_port("abc", 8000, server.await);
    let request = world
        .to_sandbox(Method::GET, "abc", 8000)
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .body(Empty::<Bytes>::new())
        .expect("a request");
    let answer = soon("an answer", async { read(send(world.address, request).await).await }).await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (403, &b"no sockets here"[..]));
}

#[tokio::test]
async fn a_client_that_hangs_up_is_noticed_by_the_guest() {
    let world = World::start().await.with_sandbox("abc");
    let (asked, gone) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    struct Tell(Arc<Notify>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }
    let server = serve_guest({
        let (asked, gone) = (asked.clone(), gone.clone());
        move |_| {
            let (asked, tell) = (asked.clone(), Tell(gone.clone()));
            async move {
                let _tell = tell;
                asked.notify_one();
                std::future::pending().await
            }
        }
    });
    world.gateway.open_port("abc", 8000, server.await);
    let request = world.to_sandbox(Method::POST, "abc", 8000).body(Full::new(Bytes::from("x"))).expect("a request");
    let client = tokio::spawn(send(world.address, request));
    soon("the request at the guest", asked.notified()).await;
    client.abort();
    soon("the guest's server drops the request", gone.notified()).await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_seen_to_break_off() {
    let world = World::start().await.with_sandbox("abc");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    world.gateway.open_port("abc", 8000, listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        let _ = stream.read(&mut [0; 4096]).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this").await.expect("written");
    });
    let request = world.to_sandbox(Method::GET, "abc", 8000).body(Empty::<Bytes>::new()).expect("a request");
    let response = soon("the head", send(world.address, request)).await;
    assert_eq!(response.status(), 200);
    assert!(soon("the end", response.into_body().collect()).await.is_err(), "not a short body that looks whole");
}
