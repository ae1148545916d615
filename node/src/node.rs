//! Start and stop of a node: opens everything in order, serves gRPC and the gateway, joins its tasks.
//!
//! Start: catalog, object store, cache and staging, then what the predecessor left ([`crate::recover`]), then the
//! hypervisor, and only then the ports. Stop: ports first, then guests, then the pool, then the store; each stage has
//! a deadline, and the log says what is waited for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use snapyard_proto::v1;
use snapyard_proto::v1::scheduler_client::SchedulerClient;
use snapyard_snapstore::blob::{BlobStore, S3Blobs, S3Config};
use snapyard_snapstore::catalog::Catalog;
use snapyard_snapstore::catalog::rocks::RocksKv;
use snapyard_snapstore::clock::{Clock, SystemClock};
use snapyard_snapstore::ids::{NodeId, SnapshotId, TeamId};
use snapyard_snapstore::publish::Writer;
use snapyard_snapstore::{Store, StoreConfig};
use snapyard_vmm::{FillPolicy, Hypervisor, Shape, Vm, VmmConfig};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::gateway::Gateway;
use crate::maintenance::{self, Upkeep};
use crate::ops;
use crate::recover;
use crate::residency::Residency;
use crate::sandbox::{Registry, Sandbox};
use crate::service;
use crate::standby::{self, Standbys};
use crate::template::{self, Templates};
use crate::upload;

/// How often the node reports to the scheduler.
const REPORT_EVERY: Duration = Duration::from_secs(2);
/// How long the node's tasks may take to end.
const STOP_DEADLINE: Duration = Duration::from_secs(20);

/// What every part of the node shares.
pub struct State {
    /// What the node was told at start.
    pub config: NodeConfig,
    /// What exists.
    pub catalog: Arc<Catalog>,
    /// Where bytes are kept.
    pub store: Arc<Store>,
    /// What runs guests.
    pub hypervisor: Arc<Hypervisor>,
    /// Open snapshots.
    pub residency: Residency,
    /// Guests restored ahead of need.
    pub standbys: Standbys,
    /// The sandboxes of this node.
    pub sandboxes: Arc<Registry>,
    /// Template builds.
    pub templates: Templates,
    /// This process as one that commits snapshots.
    pub writer: Writer,
    /// The collector.
    pub upkeep: Upkeep,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Woken when there is something to upload.
    pub uploads: Notify,
    /// Owner of background tasks and of operations, which a caller that hangs up does not stop.
    pub tasks: TaskTracker,
    /// Ends everything.
    pub shutdown: CancellationToken,
    /// Why the node is of no use any more, once it is.
    failure: watch::Sender<Option<String>>,
    /// This node, as the catalog knows it.
    pub id: NodeId,
    /// This node's gRPC endpoint.
    pub url: String,
    /// This node's guest gateway, `host:port`.
    pub gateway: String,
}

impl State {
    /// Watches a sandbox and the virtual machine behind it: its death buries the sandbox. One task a guest; it ends
    /// when the guest's connections are cut, which is how every orderly end begins.
    pub fn guard(self: &Arc<Self>, sandbox: &Arc<Sandbox>, vm: &Vm, cut: CancellationToken) {
        let node = Arc::clone(self);
        let sandbox = Arc::clone(sandbox);
        let failed = vm.failed();
        self.tasks.spawn(async move {
            let reason = tokio::select! {
                () = cut.cancelled() => None,
                reason = ops::failure(failed) => reason,
            };
            if let Some(reason) = reason
                && !cut.is_cancelled()
            {
                ops::kill::bury(&node, &sandbox, &reason).await;
            }
        });
    }

    /// Keeps VMMs of a template's shape waiting: creates come from templates mostly.
    pub fn prewarm(&self, shape: &snapyard_snapstore::Shape) {
        let &snapyard_snapstore::Shape { vcpus, memory_bytes, disk_bytes } = shape;
        self.hypervisor.prewarm(Shape { vcpus, memory_bytes, disk_bytes }, self.config.pool_target);
    }

    /// Lets go of an open snapshot that has ceased to exist with the last sandbox that was restored from it.
    pub async fn forget_if_gone(&self, id: &SnapshotId) {
        if matches!(self.catalog.snapshot_row(id).await, Ok(None)) {
            maintenance::forget(self, id);
        }
    }

    /// Ends a sandbox when its time is over. One task a sandbox.
    pub fn watch_deadline(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let node = Arc::clone(self);
        let sandbox = Arc::clone(sandbox);
        self.tasks.spawn(async move { ops::timeout::watch(&node, &sandbox).await });
    }
}

/// A running node.
pub struct Node {
    state: Arc<State>,
}

impl Node {
    /// Starts a node. When this returns it serves.
    pub async fn start(config: NodeConfig) -> Result<Self, NodeError> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let run_dir = config.data_dir.join("run");
        recover::clean_run_dir(&run_dir).map_err(|error| start_error("the run directory", error))?;

        let kv = RocksKv::open(&config.data_dir.join("catalog")).map_err(|error| start_error("the catalog", error))?;
        let catalog = Catalog::open(Arc::new(kv), Arc::clone(&clock)).await?;
        let blobs = connect_blobs(&config);
        let node_id = NodeId::new(config.node_id.clone()).map_err(|error| start_error("the node", error))?;
        let writer = Writer::register(Arc::clone(&catalog), node_id.clone(), ttl_ms(maintenance::WRITER_TTL)).await?;
        let upkeep = Upkeep::new(Arc::clone(&catalog), Arc::clone(&blobs), config.gc_grace);
        let mut store_config = StoreConfig::new(config.data_dir.clone());
        store_config.cache.disk_bytes = config.cache_bytes;
        let store = Store::open(store_config, blobs, Arc::clone(&clock)).await?;
        let hypervisor = Hypervisor::new(vmm_config(&config, &run_dir), tokio::runtime::Handle::current())
            .await
            .map_err(|error| start_error("the virtual machine monitor", error))?;

        let listener =
            TcpListener::bind(config.listen).await.map_err(|error| start_error("the gRPC listener", error))?;
        let gateway_listener = TcpListener::bind(config.gateway_listen)
            .await
            .map_err(|error| start_error("the guest gateway's listener", error))?;
        let url = format!("http://{}", local(&listener)?);
        let gateway = local(&gateway_listener)?.to_string();

        let state = Arc::new(State {
            residency: Residency::new(
                Arc::clone(&store),
                Arc::clone(&catalog),
                run_dir,
                config.idle_image_bytes,
                fill_policy(config.fault_deadline),
            ),
            catalog,
            store,
            hypervisor,
            standbys: Standbys::new(config.standbys),
            sandboxes: Arc::default(),
            templates: Templates::default(),
            clock,
            uploads: Notify::new(),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            failure: watch::Sender::new(None),
            writer,
            upkeep,
            id: node_id,
            url,
            gateway,
            config,
        });
        recover::recover(&state).await?;
        state.tasks.spawn(upload::run(Arc::clone(&state)));
        state.tasks.spawn(maintenance::run(Arc::clone(&state)));
        state.tasks.spawn(report(Arc::clone(&state)));
        state.tasks.spawn(standby::run(Arc::clone(&state)));
        let gateway = Gateway {
            sandboxes: Arc::clone(&state.sandboxes),
            token: state.config.cluster_token.clone(),
            tasks: state.tasks.clone(),
            shutdown: state.shutdown.clone(),
        };
        state.tasks.spawn(Arc::new(gateway).serve(gateway_listener));
        state.tasks.spawn(serve_grpc(Arc::clone(&state), listener));
        Ok(Self { state })
    }

    /// The node's gRPC endpoint.
    pub fn url(&self) -> &str {
        &self.state.url
    }

    /// The guest gateway's `host:port`.
    pub fn gateway(&self) -> &str {
        &self.state.gateway
    }

    /// Takes a template out of the way that guests cannot start from here, for a caller that is about to build it again.
    pub async fn drop_misfit(&self, team: &TeamId, alias: &str) -> Result<(), NodeError> {
        template::drop_misfit(&self.state, team, alias).await
    }

    /// Completes, with the reason, when the node cannot go on by itself.
    pub async fn failed(&self) -> String {
        let mut failure = self.state.failure.subscribe();
        let reason = failure.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        match reason {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    /// Stops: no new calls, every guest ended, the store closed.
    pub async fn shutdown(self) {
        let state = self.state;
        state.shutdown.cancel();
        ops::kill::kill_all(&state).await;
        state.hypervisor.shutdown().await;
        state.tasks.close();
        if tokio::time::timeout(STOP_DEADLINE, state.tasks.wait()).await.is_err() {
            tracing::warn!(tasks = state.tasks.len(), "stopping though tasks have not ended");
        }
        state.store.close().await;
    }
}

fn ttl_ms(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}

fn start_error(what: &str, error: impl std::fmt::Display) -> NodeError {
    NodeError::Internal(format!("cannot start {what}: {error}"))
}

fn local(listener: &TcpListener) -> Result<SocketAddr, NodeError> {
    listener.local_addr().map_err(|error| start_error("a listener", error))
}

fn connect_blobs(config: &NodeConfig) -> Arc<dyn BlobStore> {
    let s3 = &config.s3;
    Arc::new(S3Blobs::new(S3Config::new(
        Some(s3.endpoint.clone()),
        &s3.region,
        &s3.bucket,
        &s3.access_key,
        &s3.secret_key,
    )))
}

/// How long bytes that cannot be had are waited for, in memory and on disk.
pub fn fill_policy(deadline: Duration) -> FillPolicy {
    FillPolicy { deadline, ..FillPolicy::default() }
}

fn vmm_config(config: &NodeConfig, run_dir: &std::path::Path) -> VmmConfig {
    let (kernel, initrd) = (config.assets_dir.join("vmlinuz"), config.assets_dir.join("initrd.img"));
    VmmConfig {
        pool_target: config.pool_target,
        // A rollback needs a second VMM for a moment, and a template build one of its own.
        max_vms: config.max_sandboxes.saturating_mul(2).saturating_add(1).saturating_add(config.standbys),
        vmm_uid: Some(config.vmm_uid),
        disk_policy: fill_policy(config.fault_deadline),
        ..VmmConfig::new(kernel, initrd, &config.preload_so, run_dir)
    }
}

async fn serve_grpc(state: Arc<State>, listener: TcpListener) {
    let guard = state.config.cluster_token.require();
    let node = v1::node_server::NodeServer::with_interceptor(service::NodeService::new(&state), guard.clone());
    let catalog =
        v1::catalog_server::CatalogServer::with_interceptor(service::CatalogService::new(&state), guard.clone());
    let storage = v1::storage_server::StorageServer::with_interceptor(service::StorageService::new(&state), guard);
    let served = tonic::transport::Server::builder()
        .add_service(node)
        .add_service(catalog)
        .add_service(storage)
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), state.shutdown.cancelled());
    let served = served.await;
    if !state.shutdown.is_cancelled() {
        let reason = served.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
        state.failure.send_replace(Some(format!("the node's gRPC server: {reason}")));
    }
}

/// Registers with the scheduler, again whenever the stream ends, and reports until shutdown.
async fn report(state: Arc<State>) {
    while !state.shutdown.is_cancelled() {
        if let Err(error) = register(&state).await {
            tracing::warn!(%error, "the scheduler cannot be reached; trying again");
        }
        tokio::select! {
            () = state.shutdown.cancelled() => {}
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
        }
    }
}

async fn register(state: &Arc<State>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let channel = tonic::transport::Endpoint::from_shared(state.config.scheduler_url.clone())?.connect().await?;
    let mut client = SchedulerClient::with_interceptor(channel, state.config.cluster_token.attach());
    let node = Arc::clone(state);
    let reports = futures::stream::unfold((node, true), |(node, first)| async move {
        if !first {
            tokio::select! {
                () = node.shutdown.cancelled() => return None,
                () = tokio::time::sleep(REPORT_EVERY) => {}
            }
        }
        let report = node_report(&node);
        Some((report, (node, false)))
    });
    client.register(reports).await?;
    Ok(())
}

fn node_report(state: &State) -> v1::NodeReport {
    let facts = state.hypervisor.facts();
    let images = state.residency.stats();
    v1::NodeReport {
        node_id: state.config.node_id.clone(),
        url: state.url.clone(),
        gateway: state.gateway.clone(),
        facts: Some(v1::HostFacts {
            vmm_version: facts.vmm_version.clone(),
            machine: facts.machine.clone(),
            accelerator: facts.accelerator.name().to_owned(),
            cpu_model: facts.cpu_model.clone(),
            kernel: facts.kernel.clone(),
        }),
        sandbox_ids: state.sandboxes.all().iter().map(|sandbox| sandbox.facts.id.to_string()).collect(),
        memory_total_bytes: memory_total_bytes(),
        memory_used_bytes: images.iter().map(|image| image.filled_bytes).sum(),
        sandboxes: u32::try_from(state.sandboxes.all().len()).unwrap_or(u32::MAX),
        max_sandboxes: u32::try_from(state.config.max_sandboxes).unwrap_or(u32::MAX),
    }
}

/// Memory of this machine, from `/proc/meminfo`; 0 when it cannot be read.
fn memory_total_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
