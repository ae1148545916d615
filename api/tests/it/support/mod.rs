//! A running API with everything behind it scripted.

pub mod backends;
pub mod client;
pub mod guest;

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use snapyard_api::{ApiConfig, ServeError, serve};
use snapyard_proto::auth::ClusterToken;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use backends::Backends;
use guest::Gateway;

/// An API server, the tiers behind it, and one guest gateway.
pub struct World {
    pub backends: Backends,
    pub gateway: Gateway,
    pub address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), ServeError>>,
}

pub fn token() -> ClusterToken {
    ClusterToken::new("test-token").expect("ascii")
}

impl World {
    pub async fn start() -> Self {
        let gateway = Gateway::start().await;
        let backends = Backends::start(&gateway.address).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let (stop, stopped) = oneshot::channel::<()>();
        let config = ApiConfig {
            domain: "sandboxes.test".into(),
            shutdown_deadline: Duration::from_secs(20),
            ..ApiConfig::new(&backends.url, &backends.url, token())
        };
        let server = tokio::spawn(serve(listener, config, async {
            let _ = stopped.await;
        }));
        Self { backends, gateway, address, stop, server }
    }

    /// A sandbox that is running, as the catalog knows it.
    pub fn with_sandbox(self, id: &str) -> Self {
        self.backends.add_sandbox(id);
        self
    }

    /// Shuts the server down and waits for it.
    pub async fn stop(self) {
        self.stop.send(()).expect("running");
        self.server.await.expect("joined").expect("served");
    }
}

/// Bounds a wait for something that must happen; the failure names it.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(60), future).await {
        Ok(value) => value,
        Err(_) => panic!("never happened: {what}"),
    }
}
