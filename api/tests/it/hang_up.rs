//! Clients that hang up in the middle: what they began comes to its end.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::support::World;
use crate::support::client::send;
use crate::support::soon;

/// Sends a request, waits until the node has it, hangs up, and lets the node go on.
async fn hang_up_during(world: &World, call: &'static str, method: Method, path: &str, body: Value) {
    world.backends.hold(call);
    let request = Request::builder().method(method).uri(path).body(Full::<Bytes>::new(body.to_string().into()));
    let client = tokio::spawn(send(world.address, request.expect("a request")));
    world.backends.called(call).await;
    client.abort();
    assert!(client.await.expect_err("aborted").is_cancelled());
    world.backends.open_gate();
}

#[tokio::test]
async fn a_create_ends_as_an_ordinary_sandbox() {
    let world = World::start().await;
    let body = json!({"templateID": "base", "sandboxID": "mine"});
    hang_up_during(&world, "create_sandbox", Method::POST, "/sandboxes", body).await;
    world.backends.called("release").await;
    assert_eq!(world.backends.sandbox_ids(), ["mine"]);
    assert_eq!(world.get("/sandboxes/mine").await.status, 200);
}

#[tokio::test]
async fn a_snapshot_is_taken() {
    let world = World::start().await.with_sandbox("abc");
    hang_up_during(&world, "snapshot_sandbox", Method::POST, "/sandboxes/abc/snapshots", json!({})).await;
    soon("the snapshot", async {
        while world.backends.asked_to_snapshot().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_kill_kills() {
    let world = World::start().await.with_sandbox("abc");
    hang_up_during(&world, "kill_sandbox", Method::DELETE, "/sandboxes/abc", json!({})).await;
    soon("the kill", async {
        while !world.backends.sandbox_ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn shutdown_waits_for_an_operation_without_a_client() {
    let world = World::start().await;
    let body = json!({"templateID": "base", "sandboxID": "mine"});
    let backends = world.backends.clone();
    backends.hold("create_sandbox");
    let request = Request::post("/sandboxes").body(Full::<Bytes>::new(body.to_string().into())).expect("a request");
    let client = tokio::spawn(send(world.address, request));
    backends.called("create_sandbox").await;
    client.abort();
    let stopping = tokio::spawn(world.stop());
    tokio::task::yield_now().await;
    assert!(!stopping.is_finished(), "the create is still under way");
    backends.open_gate();
    soon("shutdown", stopping).await.expect("joined");
    assert_eq!(backends.sandbox_ids(), ["mine"]);
}

/// The end of the connection is there together with the last of the request: hyper drops the future of a request when it
/// sees that, and must find that all is under way without it.
#[tokio::test]
async fn a_request_counts_whose_client_goes_with_its_last_byte() {
    let world = World::start().await.with_sandbox("abc");
    let body = r#"{"templateID": "base", "sandboxID": "mine"}"#;
    for (method, path, body) in [("DELETE", "/sandboxes/abc", ""), ("POST", "/sandboxes", body)] {
        let mut client = TcpStream::connect(world.address).expect("a connection");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: any\r\n");
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let (first, last) = request.split_at(request.len() - body.len().max(1));
        client.write_all(first.as_bytes()).expect("sent");
        // The server, on this same thread, comes to where it waits for the rest.
        tokio::time::sleep(Duration::from_millis(20)).await;
        client.write_all(last.as_bytes()).expect("sent");
    }
    soon("both", async {
        while world.backends.sandbox_ids() != ["mine"] {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
