//! gRPC channels to the tiers behind the API: one to the catalog, one to the scheduler, one to each node.
//!
//! Channels connect when they are first used and again after every failure, so the tiers may start in any order.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use snapyard_proto::auth::{AttachToken, ClusterToken};
use snapyard_proto::v1;
use snapyard_proto::v1::catalog_client::CatalogClient;
use snapyard_proto::v1::node_client::NodeClient;
use snapyard_proto::v1::scheduler_client::SchedulerClient;
use thiserror::Error;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::errors::ApiError;
use crate::team::Team;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the catalog or the scheduler. Calls to nodes have no limit here: the node knows its own.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(30);

type Authenticated = InterceptedService<Channel, AttachToken>;

/// An endpoint's address is not a URL.
#[derive(Debug, Error)]
#[error("`{url}` is not the URL of a gRPC endpoint")]
pub struct BadUrl {
    url: String,
    source: tonic::transport::Error,
}

/// All channels. Cheap to use from any task.
#[derive(Debug)]
pub(crate) struct Clients {
    catalog: CatalogClient<Authenticated>,
    scheduler: SchedulerClient<Authenticated>,
    nodes: Mutex<HashMap<String, NodeClient<Authenticated>>>,
    token: ClusterToken,
}

fn endpoint(url: &str) -> Result<Endpoint, BadUrl> {
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|source| BadUrl { url: url.to_owned(), source })?;
    Ok(endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true))
}

impl Clients {
    pub(crate) fn new(catalog_url: &str, scheduler_url: &str, token: ClusterToken) -> Result<Self, BadUrl> {
        let lookup = |url: &str| Ok(endpoint(url)?.timeout(LOOKUP_TIMEOUT).connect_lazy());
        Ok(Self {
            catalog: CatalogClient::with_interceptor(lookup(catalog_url)?, token.attach()),
            scheduler: SchedulerClient::with_interceptor(lookup(scheduler_url)?, token.attach()),
            nodes: Mutex::new(HashMap::new()),
            token,
        })
    }

    pub(crate) fn catalog(&self) -> CatalogClient<Authenticated> {
        self.catalog.clone()
    }

    pub(crate) fn scheduler(&self) -> SchedulerClient<Authenticated> {
        self.scheduler.clone()
    }

    /// The node at `url`, as the catalog or the scheduler gave it.
    pub(crate) fn node(&self, url: &str) -> Result<NodeClient<Authenticated>, ApiError> {
        if let Some(known) = self.nodes.lock().get(url) {
            return Ok(known.clone());
        }
        let endpoint = endpoint(url).map_err(|error| {
            tracing::error!(%error, "a node has registered with an unusable URL");
            ApiError::from(tonic::Status::internal(error.to_string()))
        })?;
        let client = NodeClient::with_interceptor(endpoint.connect_lazy(), self.token.attach());
        self.nodes.lock().insert(url.to_owned(), client.clone());
        Ok(client)
    }

    /// A sandbox's row; 404 when it is unknown, killed, or another team's.
    pub(crate) async fn sandbox(&self, team: &Team, id: &str) -> Result<v1::Sandbox, ApiError> {
        if !crate::names::is_sandbox_id(id) {
            return Err(ApiError::no_sandbox(&id.chars().take(64).collect::<String>()));
        }
        let request = v1::GetSandboxRequest { team: team.to_field(), sandbox_id: id.to_owned() };
        let answer = self.catalog().get_sandbox(request).await;
        let sandbox = answer.map_err(|status| ApiError::from(status).if_not_found(|| ApiError::no_sandbox(id)))?;
        Ok(sandbox.into_inner())
    }

    /// The same, for a sandbox that must be there to be used: one that was lost with its node is 404, with the reason.
    pub(crate) async fn usable_sandbox(&self, team: &Team, id: &str) -> Result<v1::Sandbox, ApiError> {
        let sandbox = self.sandbox(team, id).await?;
        match sandbox.state() {
            v1::SandboxState::Killed => Err(ApiError::no_sandbox(id)),
            v1::SandboxState::Lost => {
                Err(ApiError::not_found(format!("sandbox {id} was not found: it was lost ({})", sandbox.lost_reason)))
            }
            _ => Ok(sandbox),
        }
    }

    /// The same, for one that must have a VM: 409 when it is paused, or on the way there or back.
    pub(crate) async fn running_sandbox(&self, team: &Team, id: &str) -> Result<v1::Sandbox, ApiError> {
        let sandbox = self.usable_sandbox(team, id).await?;
        match sandbox.state() {
            v1::SandboxState::Paused => Err(ApiError::paused(id)),
            v1::SandboxState::Pausing => Err(ApiError::busy(id, "being paused")),
            v1::SandboxState::Resuming => Err(ApiError::busy(id, "being resumed")),
            _ => Ok(sandbox),
        }
    }
}
