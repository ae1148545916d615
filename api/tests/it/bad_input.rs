//! Whatever comes, the answer is JSON with the right code, and nothing behind the API is touched.

use bytes::Bytes;
use futures::stream;
use http::{Method, Request};
use http_body_util::{Full, StreamBody};
use hyper::body::Frame;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::World;
use crate::support::client::{read, send};
use crate::support::soon;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn malformed_requests_are_refused_with_json() {
    let world = World::start().await.with_sandbox("abc");
    let long_id = format!("/sandboxes/{}", "x".repeat(10_240));
    let long_name = format!("/templates/{}", "x".repeat(10_240));
    let cases: Vec<(Method, &str, &str, u16)> = vec![
        (Method::POST, "/sandboxes", "{", 400),
        (Method::POST, "/v2/sandboxes", "[]", 400),
        (Method::POST, "/sandboxes", "", 400),
        (Method::POST, "/sandboxes", r#"{"templateID": 5}"#, 400),
        (Method::POST, "/sandboxes", r#"{"templateID": "base", "timeout": "soon"}"#, 400),
        (Method::POST, "/sandboxes/abc/rollback", r#"{"snapshotID": ["x"]}"#, 400),
        (Method::POST, "/sandboxes/abc/snapshots", r#"{"name": 7}"#, 400),
        (Method::POST, "/sandboxes/abc/timeout", "null", 400),
        (Method::GET, "/sandboxes/%FF%FE", "", 400),
        (Method::DELETE, "/templates/%FF", "", 400),
        (Method::DELETE, &long_name, "", 400),
        (Method::GET, "/snapshots?limit=many", "", 400),
        (Method::GET, "/v2/sandboxes?order=sideways", "", 400),
        (Method::GET, "/sandboxes/NOT-AN-ID", "", 404),
        (Method::GET, &long_id, "", 404),
        (Method::DELETE, "/sandboxes/a%2Fb", "", 404),
        (Method::GET, "/", "", 404),
        (Method::GET, "/nope", "", 404),
        (Method::POST, "/sandboxes/abc/explode", "", 404),
        (Method::PUT, "/sandboxes", "", 405),
        (Method::GET, "/sandboxes/abc/connect", "", 405),
        (Method::DELETE, "/snapshots", "", 405),
        (Method::POST, "/health", "", 405),
        (Method::POST, "/sandboxes/abc/pause", r#"{"memory": 1}"#, 400),
        (Method::POST, "/sandboxes/abc/pause", r#"{"memory": false}"#, 501),
        (Method::POST, "/sandboxes/abc/resume", r#"{"timeout": 0}"#, 400),
        (Method::POST, "/sandboxes/abc/fork", r#"{"count": 0}"#, 400),
        (Method::POST, "/sandboxes/abc/fork", r#"{"count": 101}"#, 400),
        (Method::POST, "/sandboxes/abc/fork", r#"{"timeout": 0}"#, 400),
        (Method::PUT, "/sandboxes/abc/network", "{}", 501),
        (Method::POST, "/v3/templates", "{}", 501),
        (Method::POST, "/templates/tags", "{}", 501),
        (Method::GET, "/templates/tpl-1/builds/b1/status", "", 501),
    ];
    for (method, path, body, status) in cases {
        let answer = world.call(method.clone(), path, &[], body.to_owned()).await;
        let shown: String = path.chars().take(80).collect();
        assert_eq!(answer.status, status, "{method} {shown} {body}: {:?}", answer.body);
        assert!(!answer.error().is_empty());
        assert!(answer.error().len() < 500, "an error does not repeat what was sent: {shown}");
    }
    assert_eq!(world.backends.calls(), [""; 0], "nothing behind the API was called");
    assert_eq!(world.post("/sandboxes", json!({"templateID": "base"})).await.status, 201, "and all is well");
}

#[tokio::test]
async fn a_hundred_megabytes_are_413_whether_announced_or_not() {
    let world = World::start().await;
    let announced = Request::post("/sandboxes").body(Full::new(Bytes::from(vec![b'x'; 100 * MIB]))).expect("request");
    let answer = soon("413", async { read(send(world.address, announced).await).await }).await;
    assert_eq!((answer.status.as_u16(), answer.error().contains("larger")), (413, true));

    let pieces = stream::iter((0..100).map(|_| Ok::<_, std::io::Error>(Frame::data(Bytes::from(vec![b'x'; MIB])))));
    let chunked = Request::post("/sandboxes").body(StreamBody::new(pieces)).expect("request");
    let answer = soon("413", async { read(send(world.address, chunked).await).await }).await;
    assert_eq!(answer.status, 413);
    assert_eq!(world.backends.calls(), [""; 0]);
}

/// A client that sends everything before it looks for an answer, as most do.
#[tokio::test]
async fn a_client_that_does_not_look_while_it_sends_still_sees_the_answer() {
    let world = World::start().await;
    let mut stream = tokio::net::TcpStream::connect(world.address).await.expect("connected");
    let length = 100 * MIB;
    let head = format!("POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    let answer = soon("the answer", async {
        stream.write_all(head.as_bytes()).await.expect("the head is taken");
        for _ in 0..100 {
            stream.write_all(&vec![b'x'; MIB]).await.expect("the body is taken");
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer, not a reset");
        answer
    })
    .await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_waits_to_be_told_to_send_is_told_no() {
    let world = World::start().await;
    let mut stream = tokio::net::TcpStream::connect(world.address).await.expect("connected");
    let head = "POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\nExpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("written");
    let mut start = [0; 13];
    soon("the answer", stream.read_exact(&mut start)).await.expect("an answer");
    assert_eq!(&start, b"HTTP/1.1 413 ");
}
