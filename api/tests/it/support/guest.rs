//! A guest gateway, and servers that stand for ports of guests.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

pub type GuestBody = BoxBody<Bytes, Infallible>;

pub fn full(body: impl Into<Bytes>) -> GuestBody {
    Full::new(body.into()).boxed()
}

/// A gateway as a node has one: `CONNECT <sandbox>:<port>`, then raw bytes.
#[derive(Clone)]
pub struct Gateway {
    pub address: String,
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    ports: Mutex<HashMap<String, Option<SocketAddr>>>,
    answer: Mutex<Option<u16>>,
    connections: AtomicUsize,
}

impl Gateway {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound").to_string();
        let inner = Arc::new(Inner::default());
        let gateway = Self { address, inner: inner.clone() };
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("accepted");
                tokio::spawn(connect(stream, inner.clone()));
            }
        });
        gateway
    }

    /// A sandbox of this node; none of its ports is open yet.
    pub fn add_sandbox(&self, id: &str) {
        self.inner.ports.lock().insert(id.to_owned(), None);
    }

    pub fn remove_sandbox(&self, id: &str) {
        self.inner.ports.lock().retain(|known, _| known != id && !known.starts_with(&format!("{id}:")));
    }

    /// Something listens on a port of a sandbox.
    pub fn open_port(&self, id: &str, port: u16, server: SocketAddr) {
        self.add_sandbox(id);
        self.inner.ports.lock().insert(format!("{id}:{port}"), Some(server));
    }

    /// From now on every CONNECT is answered with this status.
    pub fn answer_always(&self, status: u16) {
        *self.inner.answer.lock() = Some(status);
    }

    /// Streams that have been opened to guests.
    pub fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::SeqCst)
    }
}

async fn connect(mut client: TcpStream, inner: Arc<Inner>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = client.read_u8().await else { return };
        head.push(byte);
    }
    let head = String::from_utf8(head).expect("ascii");
    assert!(head.contains("X-Snapyard-Cluster-Token: test-token\r\n"), "{head}");
    let target = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next()).expect("a target").to_owned();
    let sandbox = target.split(':').next().expect("an id").to_owned();
    let (known, server) = {
        let ports = inner.ports.lock();
        (ports.contains_key(&sandbox), ports.get(&target).copied().flatten())
    };
    let forced = *inner.answer.lock();
    let status = forced.unwrap_or(match (known, server) {
        (false, _) => 404,
        (true, None) => 502,
        (true, Some(_)) => 200,
    });
    let answered = client.write_all(format!("HTTP/1.1 {status} x\r\n\r\n").as_bytes()).await;
    let (200, Some(server), Ok(())) = (status, server, answered) else { return };
    inner.connections.fetch_add(1, Ordering::SeqCst);
    let mut guest = TcpStream::connect(server).await.expect("the guest's server");
    let _ = copy_bidirectional(&mut client, &mut guest).await;
}

/// A server that answers every request with what `answer` makes of it.
pub async fn serve_guest<F, A>(answer: F) -> SocketAddr
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<GuestBody>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accepted");
            let answer = answer.clone();
            let service = service_fn(move |request| {
                let answer = answer(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades());
        }
    });
    address
}

/// A server that says what it was asked: method, path and body, and the head as it came.
pub async fn serve_echo() -> SocketAddr {
    serve_guest(|request| async move {
        let (head, body) = request.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        let mut names: Vec<&str> = head.headers.keys().map(http::HeaderName::as_str).collect();
        names.sort_unstable();
        Response::builder()
            .header("x-method", head.method.as_str())
            .header("x-uri", head.uri.to_string())
            .header("x-host", head.headers.get("host").cloned().unwrap_or(http::HeaderValue::from_static("")))
            .header("x-names", names.join(","))
            .header("connection", "x-hop")
            .header("x-hop", "only to the proxy")
            .body(full(body))
            .expect("a response")
    })
    .await
}
