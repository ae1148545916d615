//! The proxy: where requests go, what of them arrives, and what is said when they do not.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::Full;
use snapyard_proto::v1::SandboxState;

use crate::support::World;
use crate::support::client::{Answer, read, send};
use crate::support::guest::{Gateway, serve_echo};
use crate::support::soon;

async fn world() -> World {
    let world = World::start().await.with_sandbox("abc");
    world.gateway.open_port("abc", 8000, serve_echo().await);
    world
}

async fn by_host(world: &World, host: &str) -> Answer {
    let request =
        Request::post("/p?q=1").header("host", host).body(Full::<Bytes>::new("hello".into())).expect("a request");
    soon(host, async { read(send(world.address, request).await).await }).await
}

#[tokio::test]
async fn a_request_goes_to_the_port_by_headers_and_by_host_name() {
    let world = world().await;
    let answer = world.ask_sandbox(Method::PUT, "abc", 8000, "body").await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (200, &b"body"[..]));
    assert_eq!((answer.header("x-method"), answer.header("x-uri")), (Some("PUT"), Some("/path?query=1")));

    let answer = by_host(&world, "8000-abc.cube.app").await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (200, &b"hello"[..]));
    assert_eq!((answer.header("x-host"), answer.header("x-uri")), (Some("8000-abc.cube.app"), Some("/p?q=1")));
    assert_eq!(world.get("/health").await.status, 200, "other hosts are the control plane");
}

#[tokio::test]
async fn what_is_for_one_hop_only_stays_there() {
    let world = world().await;
    world.gateway.open_port("abc", 49983, serve_echo().await);
    let ask = async |port: u16| {
        let request = world
            .to_sandbox(Method::POST, "abc", port)
            .header("connection", "keep-alive, x-private")
            .header("x-private", "1")
            .header("te", "trailers")
            .header("x-api-key", "secret")
            .header("x-access-token", "t")
            .body(Full::<Bytes>::new("x".into()))
            .expect("a request");
        soon("an answer", async { read(send(world.address, request).await).await }).await
    };
    let answer = ask(8000).await;
    let routed = "content-length,e2b-sandbox-id,e2b-sandbox-port,host,x-access-token";
    assert_eq!(answer.header("x-names"), Some(format!("{routed},x-api-key").as_str()));
    assert_eq!(answer.header("x-hop"), None);
    assert_eq!(ask(49983).await.header("x-names"), Some(routed), "the agent does not see the key");
}

#[tokio::test]
async fn an_unknown_sandbox_was_not_found() {
    let world = world().await;
    world.gateway.remove_sandbox("abc");
    for (id, why) in [("nope", "the catalog does not know it"), ("abc", "its gateway does not know it")] {
        let answer = world.ask_sandbox(Method::POST, id, 8000, "x").await;
        assert_eq!(answer.status, 502, "{why}");
        assert!(answer.error().contains("was not found"), "{}", answer.error());
        assert_eq!(answer.header("should-retry"), Some("false"));
    }
    assert_eq!(by_host(&world, "8000-nope.cube.app").await.status, 502);
    world.backends.change_sandbox("abc", |sandbox| sandbox.set_state(SandboxState::Lost));
    assert!(world.ask_sandbox(Method::GET, "abc", 8000, "").await.error().contains("was not found"));
}

#[tokio::test]
async fn a_closed_port_is_not_open_and_neither_is_the_nodes_own() {
    let world = world().await;
    world.gateway.open_port("abc", 49982, serve_echo().await);
    for port in [9999, 49982] {
        let answer = world.ask_sandbox(Method::POST, "abc", port, "x").await;
        assert_eq!(answer.status, 502);
        assert!(answer.error().contains("port is not open"), "{}", answer.error());
    }
    assert_eq!(world.gateway.connections(), 0);
}

#[tokio::test]
async fn a_busy_sandbox_and_a_node_that_is_down_are_503() {
    let world = world().await;
    world.gateway.answer_always(503);
    let answer = world.ask_sandbox(Method::GET, "abc", 8000, "").await;
    assert_eq!((answer.status.as_u16(), answer.header("should-retry")), (503, Some("true")));

    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let closed = nobody.local_addr().expect("bound").to_string();
    drop(nobody);
    world.backends.add_sandbox("def");
    world.backends.move_gateway("def", &closed);
    let answer = world.ask_sandbox(Method::GET, "def", 8000, "").await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("1")));

    world.gateway.answer_always(401);
    assert_eq!(world.ask_sandbox(Method::GET, "abc", 8000, "").await.status, 502);
}

#[tokio::test]
async fn malformed_sandbox_headers_are_400() {
    let world = world().await;
    for (id, port) in [("A-B", "80"), ("abc", "0"), ("abc", "http")] {
        let headers = [("e2b-sandbox-id", id), ("e2b-sandbox-port", port)];
        let answer = world.call(Method::POST, "/x", &headers, "x").await;
        assert_eq!(answer.status, 400, "{id} {port}");
        assert!(answer.error().contains("E2b-Sandbox-"));
    }
}

#[tokio::test]
async fn a_sandbox_that_moved_is_found_at_its_new_node() {
    let world = world().await;
    assert_eq!(world.ask_sandbox(Method::GET, "abc", 8000, "").await.status, 200);
    let elsewhere = Gateway::start().await;
    elsewhere.open_port("abc", 8001, serve_echo().await);
    world.gateway.remove_sandbox("abc");
    world.backends.move_gateway("abc", &elsewhere.address);
    let answer = world.ask_sandbox(Method::GET, "abc", 8001, "").await;
    assert_eq!(answer.status, 200, "the old gateway's refusal makes the proxy ask the catalog again");
}

#[tokio::test]
async fn a_killed_sandbox_is_not_reachable_even_on_a_kept_connection() {
    let world = world().await;
    assert_eq!(world.ask_sandbox(Method::GET, "abc", 8000, "").await.status, 200);
    assert_eq!(world.delete("/sandboxes/abc").await.status, 204);
    let answer = world.ask_sandbox(Method::GET, "abc", 8000, "").await;
    assert_eq!(answer.status, 502);
    assert!(answer.error().contains("was not found"));
}
