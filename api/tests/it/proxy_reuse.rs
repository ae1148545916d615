//! Connections to guests are reused; one that turns out dead costs the client nothing that it could notice, except
//! where the request may have been acted on.

use std::net::SocketAddr;
use std::sync::Arc;

use http::Method;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::World;
use crate::support::guest::serve_echo;
use crate::support::soon;

/// A server that answers one request on each connection, keeps it open, and closes it without a word when the next
/// request has come.
struct ClosesOnSecond {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl ClosesOnSecond {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let this = Self { address: listener.local_addr().expect("bound"), requests: Arc::default() };
        let requests = this.requests.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("accepted");
                let requests = requests.clone();
                tokio::spawn(async move {
                    let Some(first) = request(&mut stream).await else { return };
                    requests.lock().push(first);
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.expect("written");
                    if let Some(second) = request(&mut stream).await {
                        requests.lock().push(second);
                    }
                });
            }
        });
        this
    }

    /// Requests beyond the first of a connection: each died with its connection.
    fn died(&self, world: &World) -> usize {
        self.requests.lock().len() - world.gateway.connections()
    }
}

/// The first line of a request, read with its body (whose length is announced, or absent).
async fn request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).expect("ascii").to_lowercase();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().expect("n"));
    stream.read_exact(&mut vec![0; length]).await.ok()?;
    Some(head.lines().next().expect("a line").split(' ').next().expect("a method").to_owned())
}

/// Waits until the proxy holds an idle connection again: it takes a moment after the answer's last byte.
async fn ask_until_reused(world: &World, port: u16) {
    soon("a reused connection", async {
        loop {
            let before = world.gateway.connections();
            assert_eq!(world.ask_sandbox(Method::GET, "abc", port, "").await.status, 200);
            if world.gateway.connections() == before {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn requests_share_a_connection_and_different_ports_do_not() {
    let world = World::start().await.with_sandbox("abc");
    let echo = serve_echo().await;
    world.gateway.open_port("abc", 8000, echo);
    world.gateway.open_port("abc", 8001, echo);
    ask_until_reused(&world, 8000).await;
    let before = world.gateway.connections();
    assert_eq!(world.ask_sandbox(Method::GET, "abc", 8001, "").await.status, 200);
    assert_eq!(world.gateway.connections(), before + 1);
}

#[tokio::test]
async fn a_reused_connection_that_dies_under_a_repeatable_request_is_not_noticed() {
    let world = World::start().await.with_sandbox("abc");
    let server = ClosesOnSecond::start().await;
    world.gateway.open_port("abc", 8000, server.address);
    for (method, body) in [(Method::GET, ""), (Method::PUT, "body"), (Method::DELETE, "")] {
        for _ in 0..10 {
            let answer = world.ask_sandbox(method.clone(), "abc", 8000, body).await;
            assert_eq!(answer.status, 200, "{method}: {:?}", answer.body);
        }
    }
    soon("a connection that dies under a GET", async {
        while server.died(&world) == 0 {
            assert_eq!(world.ask_sandbox(Method::GET, "abc", 8000, "").await.status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_that_may_have_been_acted_on_is_not_repeated() {
    let world = World::start().await.with_sandbox("abc");
    let server = ClosesOnSecond::start().await;
    world.gateway.open_port("abc", 8000, server.address);
    let refused = soon("a POST on a reused connection", async {
        loop {
            let answer = world.ask_sandbox(Method::POST, "abc", 8000, "body").await;
            if answer.status != 200 {
                break answer;
            }
        }
    })
    .await;
    assert_eq!(refused.status, 502);
    assert!(refused.error().contains("may have been acted on"), "{}", refused.error());
    assert_eq!(refused.header("should-retry"), Some("false"));
    assert_eq!(server.died(&world), 1, "sent once");
}
