//! Clients of the tiers behind REST, for what REST does not show: true states, sizes, build progress, statistics.

use std::path::Path;
use std::time::Duration;

use snapyard_proto::auth::{AttachToken, ClusterToken};
use snapyard_proto::v1::catalog_client::CatalogClient;
use snapyard_proto::v1::node_client::NodeClient;
use snapyard_proto::v1::scheduler_client::SchedulerClient;
use snapyard_proto::v1::storage_client::StorageClient;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::cluster::ClusterFile;
use crate::failure::{Failure, Kind};

/// A server on loopback accepts at once or is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The one team of this version.
pub const TEAM: &str = "default";

/// A channel that sends the cluster token with every call.
type Authenticated = InterceptedService<Channel, AttachToken>;

/// A connection to one tier of a running server.
#[derive(Debug, Clone)]
pub struct Backend {
    channel: Channel,
    token: ClusterToken,
}

impl Backend {
    /// Connects to a tier by its gRPC endpoint; `name` is for people.
    pub async fn connect(name: &str, url: &str, token: &str) -> Result<Self, Failure> {
        let token = ClusterToken::new(token)
            .ok_or_else(|| Failure::new(Kind::Refused, "the token in cluster.json cannot be sent"))?;
        let wrong = |error: tonic::transport::Error| {
            Failure::new(Kind::Unreachable, format!("cannot talk to the {name} at {url}: {error}"))
                .hint("if the server ended without tidying up, start `snapyard up` again")
        };
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(wrong)?;
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(wrong)?;
        Ok(Self { channel, token })
    }

    /// What exists; for a connection to a node.
    pub fn catalog(&self) -> CatalogClient<Authenticated> {
        CatalogClient::with_interceptor(self.channel.clone(), self.token.attach())
    }

    /// What runs; for a connection to a node.
    pub fn node(&self) -> NodeClient<Authenticated> {
        NodeClient::with_interceptor(self.channel.clone(), self.token.attach())
    }

    /// What is stored; for a connection to a node.
    pub fn storage(&self) -> StorageClient<Authenticated> {
        StorageClient::with_interceptor(self.channel.clone(), self.token.attach())
    }

    /// Where things run; for a connection to a scheduler.
    pub fn scheduler(&self) -> SchedulerClient<Authenticated> {
        SchedulerClient::with_interceptor(self.channel.clone(), self.token.attach())
    }
}

/// Where the tiers of the server are whose data directory this is.
pub fn find(data_dir: &Path) -> Result<ClusterFile, Failure> {
    ClusterFile::read(data_dir)?.ok_or_else(|| {
        Failure::new(Kind::Unreachable, format!("no running server in {}: it has no cluster.json", data_dir.display()))
            .hint("start `snapyard up`, or say where its data is (--data-dir, SNAPYARD_DATA_DIR)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_server_the_failure_says_where_it_looked() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let failure = find(dir.path()).expect_err("nobody there");
        assert_eq!(failure.kind, Kind::Unreachable);
        assert!(failure.to_string().contains(&dir.path().display().to_string()), "{failure}");
    }

    #[tokio::test]
    async fn a_server_that_is_gone_is_told_with_its_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let failure = Backend::connect("node", &url, "token").await.expect_err("nobody there");
        assert_eq!(failure.kind, Kind::Unreachable);
        assert!(failure.to_string().contains(&url), "{failure}");
    }
}
