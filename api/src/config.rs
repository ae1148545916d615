//! What the API tier needs to know to run.

use std::time::Duration;

use snapyard_proto::auth::ClusterToken;

/// Configuration of [`crate::serve`].
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// gRPC endpoint that serves `Catalog`, e.g. `http://127.0.0.1:7001`. Any node does.
    pub catalog_url: String,
    /// gRPC endpoint of the scheduler.
    pub scheduler_url: String,
    /// The deployment's secret, sent with every call and to guest gateways.
    pub cluster_token: ClusterToken,
    /// Sandboxes are told to be at `<port>-<id>.<domain>`. A request is routed by that first label under any domain.
    pub domain: String,
    /// Life of a sandbox whose create or connect names no timeout, seconds.
    pub default_timeout_s: u32,
    /// Largest body of a REST request, bytes. The data plane has no limit.
    pub max_body_bytes: usize,
    /// How long shutdown waits for requests under way.
    pub shutdown_deadline: Duration,
}

impl ApiConfig {
    /// The defaults for a server on one machine.
    pub fn new(catalog_url: impl Into<String>, scheduler_url: impl Into<String>, cluster_token: ClusterToken) -> Self {
        Self {
            catalog_url: catalog_url.into(),
            scheduler_url: scheduler_url.into(),
            cluster_token,
            domain: "snapyard.localhost".into(),
            default_timeout_s: 300,
            max_body_bytes: 1 << 20,
            shutdown_deadline: Duration::from_secs(10),
        }
    }
}
