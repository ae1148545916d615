//! What a node is told at start. Plain data: the binary fills it from flags and environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use snapyard_proto::auth::ClusterToken;

/// Where the object store is, and how to sign for it.
#[derive(Clone)]
pub struct S3Config {
    /// Endpoint URL, e.g. `http://127.0.0.1:9000`.
    pub endpoint: String,
    /// Region name that requests are signed for.
    pub region: String,
    /// Bucket; must exist.
    pub bucket: String,
    /// Access key id.
    pub access_key: String,
    /// Secret key; never printed.
    pub secret_key: String,
}

impl std::fmt::Debug for S3Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("S3Config")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

/// Configuration of one node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Name of this node in the catalog and at the scheduler.
    pub node_id: String,
    /// Everything that the node keeps. The caller holds the lock on it.
    pub data_dir: PathBuf,
    /// Guest kernel and initial RAM disk, and the cache of built root file systems.
    pub assets_dir: PathBuf,
    /// The library that VMMs load (see the `snapyard-vmm-preload` crate).
    pub preload_so: PathBuf,
    /// The script that makes a root file system from a recipe's values.
    pub rootfs_script: PathBuf,
    /// gRPC address; port 0 chooses one.
    pub listen: SocketAddr,
    /// Guest gateway's address; port 0 chooses one.
    pub gateway_listen: SocketAddr,
    /// The scheduler to register with.
    pub scheduler_url: String,
    /// The deployment's secret.
    pub cluster_token: ClusterToken,
    /// Where packs and manifests end up.
    pub s3: S3Config,
    /// How long a snapshot is kept when its create does not say.
    pub retention: Duration,
    /// VMMs of the default shape that wait for a guest.
    pub pool_target: usize,
    /// Guests that are kept restored and paused for snapshots in frequent use, at most.
    pub standbys: usize,
    /// Guests at most.
    pub max_sandboxes: usize,
    /// How long a guest may wait for bytes that cannot be had before it is stopped.
    pub fault_deadline: Duration,
    /// Bytes of memory images that are kept though no guest uses them.
    pub idle_image_bytes: u64,
    /// Bytes that the chunk cache may take on disk.
    pub cache_bytes: u64,
    /// How often garbage is collected; `None`: only when an operator says so.
    pub gc_interval: Option<Duration>,
    /// How long a pack must have been of no use before it is deleted.
    pub gc_grace: Duration,
    /// User id of VMM processes when the node runs as root.
    pub vmm_uid: u32,
}
