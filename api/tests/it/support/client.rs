//! A plain HTTP/1.1 client that shows everything.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::World;

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// The message of an error, which must have the one shape that errors have.
    pub fn error(&self) -> String {
        let body = self.json();
        assert_eq!(body["code"], self.status.as_u16(), "{body}");
        body["message"].as_str().expect("a message").to_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("ascii"))
    }
}

/// Sends one request on a connection of its own; the answer's body is still to come.
pub async fn send<B>(address: SocketAddr, request: Request<B>) -> Response<Incoming>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = TcpStream::connect(address).await.expect("connected");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("handshake");
    tokio::spawn(connection.with_upgrades());
    sender.send_request(request).await.expect("an answer")
}

pub async fn read(response: Response<Incoming>) -> Answer {
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("a whole body").to_bytes();
    Answer { status: head.status, headers: head.headers, body }
}

impl World {
    pub async fn call(&self, method: Method, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("host", self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        super::soon(path, async { read(send(self.address, request).await).await }).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, &[], "").await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.call(Method::DELETE, path, &[], "").await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, &[("content-type", "application/json")], body.to_string()).await
    }

    /// A request to a port of a sandbox, routed by headers.
    pub fn to_sandbox(&self, method: Method, id: &str, port: u16) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri("/path?query=1")
            .header("host", self.address.to_string())
            .header("e2b-sandbox-id", id)
            .header("e2b-sandbox-port", port)
    }

    pub async fn ask_sandbox(&self, method: Method, id: &str, port: u16, body: impl Into<Bytes>) -> Answer {
        let request = self.to_sandbox(method, id, port).body(Full::new(body.into())).expect("a request");
        super::soon("an answer from the sandbox", async { read(send(self.address, request).await).await }).await
    }
}
