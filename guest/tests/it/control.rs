//! The node's port: identity, cutting of connections, tunnels.

use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::client::{Guest, PATIENCE, connect, eventually, exists, send};

#[tokio::test]
async fn health_is_there_on_both_ports_whatever_the_token() {
    let guest = Guest::start().await;
    guest.init(Some("token")).await;
    assert_eq!(send(guest.control, "GET", "/health", &[], "").await.status, StatusCode::NO_CONTENT);
    assert_eq!(send(guest.sdk, "GET", "/health", &[], "").await.status, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn the_token_is_asked_for_everywhere_else() {
    let guest = Guest::start().await;
    guest.init(Some("token")).await;
    for (path, body) in [("/process.Process/List", "{}"), ("/metrics", ""), ("/envs", "")] {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let without = send(guest.sdk, method, path, &[], body).await;
        assert_eq!(without.status, StatusCode::UNAUTHORIZED, "{path}");
        assert!(without.json()["message"].as_str().unwrap().contains("X-Access-Token"));
        let wrong = send(guest.sdk, method, path, &[("x-access-token", "tokem")], body).await;
        assert_eq!(wrong.status, StatusCode::UNAUTHORIZED, "{path}");
        let with = send(guest.sdk, method, path, &[("x-access-token", "token")], body).await;
        assert_eq!(with.status, StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn the_machine_id_is_written_and_a_repeat_gives_the_same() {
    let guest = Guest::start().await;
    let mut seen = Vec::new();
    for _ in 0..2 {
        assert_eq!(guest.init(None).await.status, StatusCode::NO_CONTENT);
        seen.push(std::fs::read_to_string(guest.path("machine-id")).unwrap());
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].trim().len(), 32);
    assert_eq!(guest.agent.session().generation, 2);
}

#[tokio::test]
async fn a_bad_init_changes_nothing() {
    let guest = Guest::start().await;
    let short = json!({"sandbox_id": "x", "hostname": "x", "unix_ns": 1, "entropy": "YQ=="}).to_string();
    for body in ["", "{}", "[1]", &short] {
        let reply = send(guest.control, "POST", "/init", &[], body.to_owned()).await;
        assert!(reply.status.is_client_error() || reply.status.is_server_error(), "{body}");
    }
    assert_eq!(guest.agent.session().generation, 0);
    assert_eq!(std::fs::read_to_string(guest.path("machine-id")).unwrap(), "");
}

#[tokio::test]
async fn an_agent_that_is_started_again_knows_its_session() {
    let guest = Guest::start().await;
    guest.init(Some("token")).await;
    let next = guest.successor().await;
    assert_eq!(next.agent.session().access_token.as_deref(), Some("token"));
    assert_eq!(next.agent.session().env, guest.agent.session().env);
}

#[tokio::test]
async fn init_resets_all_other_connections_and_no_process() {
    let guest = Guest::start().await;
    let go = guest.path("go");
    let marker = guest.path("done");
    let script = format!("while [ ! -e {go} ]; do sleep 0.01; done; echo on; touch {marker}");
    let mut running = guest.start_script(&script, &[]).await;
    running.pid().await;
    let mut idle = connect(guest.sdk).await;
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: guest\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    idle.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 204");

    assert_eq!(guest.init(None).await.status, StatusCode::NO_CONTENT, "its own connection is spared");
    assert_eq!(running.next().await, None, "a stream breaks off without an end");
    let mut rest = Vec::new();
    let error = timeout(PATIENCE, idle.read_to_end(&mut rest)).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);

    assert_eq!(send(guest.sdk, "GET", "/health", &[], "").await.status, StatusCode::NO_CONTENT);
    std::fs::write(go, "").unwrap();
    eventually("the process's end", || exists(&marker)).await;
}

/// Opens a tunnel to `port`, with `early` sent right behind the request.
async fn tunnel(guest: &Guest, port: u16, early: &[u8]) -> (TcpStream, String) {
    let mut stream = connect(guest.control).await;
    let request = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    stream.write_all(&[request.as_bytes(), early].concat()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap());
    }
    (stream, String::from_utf8(head).unwrap())
}

async fn echo_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    port
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways_and_ends_with_its_ends() {
    let guest = Guest::start().await;
    let (mut stream, head) = tunnel(&guest, echo_server().await, b"early ").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    stream.write_all(b"late").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut echoed = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut echoed)).await.unwrap().unwrap();
    assert_eq!(echoed, b"early late");
}

#[tokio::test]
async fn a_tunnel_is_reset_by_init() {
    let guest = Guest::start().await;
    let (mut stream, _) = tunnel(&guest, echo_server().await, b"x").await;
    stream.read_u8().await.unwrap();
    guest.init(None).await;
    let error = timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_tunnel_to_nowhere_is_refused() {
    let guest = Guest::start().await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let (mut stream, head) = tunnel(&guest, closed, b"").await;
    assert!(head.starts_with("HTTP/1.1 502"), "{head}");
    let length = r#"{"code":502,"message":"port is not open"}"#.len();
    let mut body = vec![0; length];
    timeout(PATIENCE, stream.read_exact(&mut body)).await.unwrap().unwrap();
    assert_eq!(body, br#"{"code":502,"message":"port is not open"}"#);
}

#[tokio::test]
async fn a_tunnel_leads_into_this_guest_only() {
    let guest = Guest::start().await;
    let mut stream = connect(guest.control).await;
    stream.write_all(b"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org\r\n\r\n").await.unwrap();
    let mut head = [0; 12];
    timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
    assert_eq!(&head, b"HTTP/1.1 400");
}
