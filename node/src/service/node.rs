//! `snapyard.v1.Node`.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use snapyard_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::convert;
use crate::error::NodeError;
use crate::node::State;
use crate::ops;
use crate::template;

/// The node's own operations.
pub struct NodeService(Arc<State>);

impl NodeService {
    /// A service over the node's state.
    pub fn new(state: &Arc<State>) -> Self {
        Self(Arc::clone(state))
    }

    /// Runs `operation` in a task of the node and waits for it.
    async fn run<T, F>(&self, operation: F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, NodeError>> + Send + 'static,
    {
        if self.0.shutdown.is_cancelled() {
            return Err(Status::unavailable("the node is shutting down"));
        }
        match self.0.tasks.spawn(operation).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(Status::internal(format!("the operation broke off: {error}"))),
        }
    }
}

#[tonic::async_trait]
impl v1::node_server::Node for NodeService {
    async fn create_sandbox(
        &self,
        request: Request<v1::CreateSandboxRequest>,
    ) -> Result<Response<v1::CreateSandboxResponse>, Status> {
        let create = convert::create(request.into_inner())?;
        let node = Arc::clone(&self.0);
        let (row, timings) = self.run(async move { ops::create::create(&node, create).await }).await?;
        Ok(Response::new(v1::CreateSandboxResponse {
            sandbox: Some(convert::sandbox(&self.0, &row)),
            timings: Some(convert::timings(&timings)),
        }))
    }

    async fn kill_sandbox(
        &self,
        request: Request<v1::KillSandboxRequest>,
    ) -> Result<Response<v1::KillSandboxResponse>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let node = Arc::clone(&self.0);
        self.run(async move { ops::kill::kill(&node, &team, &id).await }).await?;
        Ok(Response::new(v1::KillSandboxResponse {}))
    }

    async fn set_timeout(&self, request: Request<v1::SetTimeoutRequest>) -> Result<Response<v1::Sandbox>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let timeout = convert::timeout(request.timeout_ms);
        let node = Arc::clone(&self.0);
        let set = async move { ops::timeout::set_timeout(&node, &team, &id, timeout, request.never_shorten).await };
        let row = self.run(set).await?;
        Ok(Response::new(convert::sandbox(&self.0, &row)))
    }

    async fn pause_sandbox(&self, request: Request<v1::PauseSandboxRequest>) -> Result<Response<v1::Sandbox>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let node = Arc::clone(&self.0);
        let row = self.run(async move { ops::pause::pause(&node, &team, &id).await }).await?;
        Ok(Response::new(convert::sandbox(&self.0, &row)))
    }

    async fn resume_sandbox(
        &self,
        request: Request<v1::ResumeSandboxRequest>,
    ) -> Result<Response<v1::CreateSandboxResponse>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let timeout = convert::timeout(request.timeout_ms);
        let node = Arc::clone(&self.0);
        let (row, timings) = self.run(async move { ops::resume::resume(&node, &team, &id, timeout).await }).await?;
        Ok(Response::new(v1::CreateSandboxResponse {
            sandbox: Some(convert::sandbox(&self.0, &row)),
            timings: Some(convert::timings(&timings)),
        }))
    }

    async fn snapshot_sandbox(
        &self,
        request: Request<v1::SnapshotSandboxRequest>,
    ) -> Result<Response<v1::SnapshotSandboxResponse>, Status> {
        let call = convert::snapshot_call(request.into_inner())?;
        let node = Arc::clone(&self.0);
        let row = self.run(async move { ops::snapshot::snapshot(&node, call).await }).await?;
        Ok(Response::new(v1::SnapshotSandboxResponse { snapshot: Some(convert::snapshot(&self.0, &row).await?) }))
    }

    async fn rollback_sandbox(
        &self,
        request: Request<v1::RollbackSandboxRequest>,
    ) -> Result<Response<v1::RollbackSandboxResponse>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let node = Arc::clone(&self.0);
        let back = async move { ops::rollback::rollback(&node, &team, &id, &request.snapshot_id).await };
        let (row, timings) = self.run(back).await?;
        Ok(Response::new(v1::RollbackSandboxResponse {
            operation_id: uuid::Uuid::new_v4().to_string(),
            timings: Some(convert::timings(&timings)),
            snapshot: Some(convert::snapshot(&self.0, &row).await?),
        }))
    }

    type BuildTemplateStream = Pin<Box<dyn Stream<Item = Result<v1::BuildProgress, Status>> + Send>>;

    async fn build_template(
        &self,
        request: Request<v1::BuildTemplateRequest>,
    ) -> Result<Response<Self::BuildTemplateStream>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let recipe = template::Recipe::parse(&request.recipe_toml)?;
        let node = Arc::clone(&self.0);
        let (progress, steps) = mpsc::channel(16);
        let build =
            self.0.tasks.spawn(async move { template::build(&node, &team, &recipe, request.rebuild, &progress).await });
        let steps = ReceiverStream::new(steps)
            .map(|step| Ok(v1::BuildProgress { step: step.step.to_owned(), percent: step.percent, done: None }));
        let last = futures::stream::once(async move {
            match build.await {
                Ok(Ok(row)) => {
                    let done = Some(convert::template(&row));
                    Ok(v1::BuildProgress { step: "ready".to_owned(), percent: 100, done })
                }
                Ok(Err(error)) => Err(error.into()),
                Err(error) => Err(Status::internal(format!("the build broke off: {error}"))),
            }
        });
        Ok(Response::new(Box::pin(steps.chain(last))))
    }

    async fn get_stats(&self, _request: Request<v1::GetStatsRequest>) -> Result<Response<v1::NodeStats>, Status> {
        Ok(Response::new(convert::stats(&self.0).await?))
    }
}
