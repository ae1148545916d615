//! An agent for one test, and the simplest client that can talk to it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use snapyard_guest::connect::{FrameDecoder, frame};
use snapyard_guest::state::Agent;
use snapyard_guest::{Options, listen};
use tokio::net::TcpStream;

/// Longest wait for anything: a test that fails to end is a failed test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent with its own root directory for what it writes.
pub struct Guest {
    pub agent: Arc<Agent>,
    pub control: SocketAddr,
    pub sdk: SocketAddr,
    pub root: Arc<tempfile::TempDir>,
}

/// An answer, read to its end.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }
}

impl Guest {
    pub async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        Self::start_in(Arc::new(root)).await
    }

    /// Another agent in the same guest, as after the end of the first.
    pub async fn successor(&self) -> Self {
        Self::start_in(self.root.clone()).await
    }

    async fn start_in(root: Arc<tempfile::TempDir>) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let options =
            Options { guest: false, control: any, agent: any, interpreter: any, runtime: root.path().to_owned() };
        let running = listen(&options).await.unwrap();
        let [control, sdk, _] = running.addresses;
        let agent = running.agent.clone();
        tokio::spawn(running.run());
        Self { agent, control, sdk, root }
    }

    pub fn path(&self, name: &str) -> String {
        self.root.path().join(name).to_str().unwrap().to_owned()
    }

    pub async fn init(&self, token: Option<&str>) -> Reply {
        let body = json!({
            "sandbox_id": "sb1", "hostname": "sb1", "unix_ns": 1, "entropy": BASE64.encode([7; 64]),
            "access_token": token, "env": {"FROM_INIT": "yes"},
        });
        send(self.control, "POST", "/init", &[], body.to_string()).await
    }

    pub async fn unary(&self, method: &str, message: Value) -> Reply {
        self.unary_with(method, message, &[]).await
    }

    pub async fn unary_with(&self, method: &str, message: Value, headers: &[(&str, &str)]) -> Reply {
        let headers = [&[("content-type", "application/json")], headers].concat();
        send(self.sdk, "POST", &format!("/{method}"), &headers, message.to_string()).await
    }

    /// Starts `bash -c script`, and reads its first message.
    pub async fn start_script(&self, script: &str, headers: &[(&str, &str)]) -> Stream {
        self.stream("Start", start_message(script, true), headers).await
    }

    pub async fn stream(&self, method: &str, message: Value, headers: &[(&str, &str)]) -> Stream {
        self.raw_stream(method, frame(message.to_string().as_bytes()), headers).await
    }

    pub async fn raw_stream(&self, method: &str, body: Bytes, headers: &[(&str, &str)]) -> Stream {
        let headers = [&[("content-type", "application/connect+json")], headers].concat();
        let path = format!("/process.Process/{method}");
        let response = request(self.sdk, "POST", &path, &headers, body).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/connect+json");
        Stream { body: response.into_body(), frames: FrameDecoder::default() }
    }
}

pub fn start_message(script: &str, stdin: bool) -> Value {
    json!({"process": {"cmd": "/bin/bash", "args": ["-c", script], "cwd": "/tmp"}, "stdin": stdin})
}

/// A server stream.
pub struct Stream {
    body: Incoming,
    frames: FrameDecoder,
}

/// What a process said until its end.
#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: String,
    pub stderr: String,
    pub end: Value,
    pub error: Value,
}

impl Stream {
    /// The next message; `None` at the end of the body.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(message) = self.frames.next().unwrap() {
                return Some(serde_json::from_slice(&message).unwrap());
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("the stream goes on");
            match frame {
                Some(Ok(frame)) => self.frames.feed(&frame.into_data().unwrap_or_default()),
                Some(Err(_)) | None => return None,
            }
        }
    }

    /// The pid of the first message.
    pub async fn pid(&mut self) -> i64 {
        let first = self.next().await.expect("a first message");
        first["event"]["start"]["pid"].as_i64().unwrap_or_else(|| panic!("no start event: {first}"))
    }

    /// Reads until the end of the stream, which must be said.
    pub async fn finish(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some(message) = self.next().await {
            let event = &message["event"];
            let text = |value: &Value| {
                let bytes = BASE64.decode(value.as_str().unwrap_or_default()).unwrap();
                String::from_utf8(bytes).unwrap()
            };
            outcome.stdout += &text(&event["data"]["stdout"]);
            outcome.stderr += &text(&event["data"]["stderr"]);
            if event["end"].is_object() {
                outcome.end = event["end"].clone();
            }
            if event.is_null() {
                outcome.error = message["error"].clone();
                return outcome;
            }
        }
        panic!("the stream broke off after {outcome:?}");
    }
}

pub async fn connect(address: SocketAddr) -> TcpStream {
    tokio::time::timeout(PATIENCE, TcpStream::connect(address)).await.unwrap().unwrap()
}

pub async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> http::Response<Incoming> {
    let io = TokioIo::new(connect(address).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::builder().method(method).uri(path).header("host", "guest");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body.into())).unwrap();
    tokio::time::timeout(PATIENCE, sender.send_request(request)).await.expect("an answer comes").unwrap()
}

pub async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Reply {
    let response = request(address, method, path, headers, body).await;
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("the body ends").unwrap().to_bytes();
    Reply { status: parts.status, headers: parts.headers, body }
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(tokio::time::Instant::now() < end, "{what} did not come about");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn exists(path: &str) -> bool {
    Path::new(path).exists()
}
