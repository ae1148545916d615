//! The gRPC face of the registry.
//!
//! A node's `Register` stream is its lease: the node is alive from its first report until the stream ends, for
//! whatever reason. HTTP/2 keep-alive ends the stream of a node that is hung or unreachable, so no report interval is
//! agreed on. Shutdown ends all leases, then waits for calls under way.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use snapyard_proto::auth::ClusterToken;
use snapyard_proto::retry::{ShouldRetry, mark};
use snapyard_proto::v1::scheduler_server::{Scheduler, SchedulerServer};
use snapyard_proto::v1::{
    ListNodesRequest, ListNodesResponse, NodeReport, PlaceRequest, PlaceResponse, RegisterResponse, ReleaseRequest,
    ReleaseResponse,
};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

use crate::registry::{Lease, Registry};

const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How the scheduler runs.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Every caller must present it.
    pub cluster_token: ClusterToken,
    /// After this a reservation whose create has neither ended nor been reported falls away. Must be longer than any
    /// create takes.
    pub reservation_ttl: Duration,
}

impl SchedulerConfig {
    /// The defaults: reservations stand for five minutes.
    pub fn new(cluster_token: ClusterToken) -> Self {
        Self { cluster_token, reservation_ttl: Duration::from_secs(300) }
    }
}

/// The server could not go on.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("the scheduler's gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `shutdown` resolves.
pub async fn serve(
    listener: TcpListener,
    config: SchedulerConfig,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let (stop, stopping) = watch::channel(false);
    let service = Service { registry: Arc::new(Mutex::new(Registry::new(config.reservation_ttl))), stopping };
    let shutdown = async move {
        shutdown.await;
        // Ends the Register streams: the transport's graceful shutdown would wait for them for ever.
        stop.send_replace(true);
    };
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(SchedulerServer::with_interceptor(service, config.cluster_token.require()))
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), shutdown)
        .await?;
    Ok(())
}

#[derive(Debug)]
struct Service {
    registry: Arc<Mutex<Registry>>,
    stopping: watch::Receiver<bool>,
}

/// Takes the node out of the registry when its stream ends, however it ends.
struct HeldLease {
    registry: Arc<Mutex<Registry>>,
    lease: Lease,
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.registry.lock().leave(&self.lease, Instant::now());
    }
}

#[tonic::async_trait]
impl Scheduler for Service {
    async fn register(&self, request: Request<Streaming<NodeReport>>) -> Result<Response<RegisterResponse>, Status> {
        let mut reports = request.into_inner();
        let mut stopping = self.stopping.clone();
        let mut next = async || {
            tokio::select! {
                report = reports.message() => report,
                _ = stopping.wait_for(|stop| *stop) => Ok(None),
            }
        };
        let Some(first) = next().await? else { return Ok(Response::new(RegisterResponse {})) };
        let node_id = first.node_id.clone();
        if node_id.is_empty() || first.url.is_empty() {
            return Err(Status::invalid_argument("a node's report needs its node_id and its url"));
        }
        tracing::info!(node_id, url = first.url, "node registered");
        let held = HeldLease { registry: self.registry.clone(), lease: self.registry.lock().register(first) };
        while let Some(report) = next().await? {
            if report.node_id != node_id {
                return Err(Status::invalid_argument(format!(
                    "node {node_id} reported as {} on the same stream",
                    report.node_id
                )));
            }
            if !self.registry.lock().report(&held.lease, report) {
                return Err(Status::aborted(format!("node {node_id} has registered again on another stream")));
            }
        }
        tracing::info!(node_id, "node left");
        Ok(Response::new(RegisterResponse {}))
    }

    async fn place(&self, request: Request<PlaceRequest>) -> Result<Response<PlaceResponse>, Status> {
        let request = request.into_inner();
        if request.sandbox_id.is_empty() {
            return Err(Status::invalid_argument("a placement needs the sandbox_id"));
        }
        let id = Uuid::new_v4();
        let (random, _) = id.as_u64_pair();
        let needs = request.needs.unwrap_or_default();
        let placed = self.registry.lock().place(&request.sandbox_id, &needs, id.to_string(), random, Instant::now());
        match placed {
            Ok(placement) => Ok(Response::new(PlaceResponse {
                reservation_id: placement.reservation_id,
                node_id: placement.node_id,
                url: placement.url,
            })),
            Err(reason) => {
                tracing::warn!(sandbox_id = request.sandbox_id, %reason, "no place");
                Err(mark(Status::unavailable(reason.to_string()), ShouldRetry::Yes))
            }
        }
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        self.registry.lock().release(&request.into_inner().reservation_id);
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn list_nodes(&self, _: Request<ListNodesRequest>) -> Result<Response<ListNodesResponse>, Status> {
        let nodes = self.registry.lock().list(Instant::now());
        Ok(Response::new(ListNodesResponse { nodes }))
    }
}

#[cfg(test)]
mod tests;
