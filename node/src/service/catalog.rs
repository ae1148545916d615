//! `snapyard.v1.Catalog`.

use std::sync::Arc;

use snapyard_proto::retry::{ShouldRetry, mark};
use snapyard_proto::v1;
use snapyard_snapstore::catalog::{BuildStatus, CatalogError, Deleted};
use tonic::{Request, Response, Status};

use super::convert;
use crate::error::NodeError;
use crate::maintenance;
use crate::node::State;

/// What exists, for the API tier.
pub struct CatalogService(Arc<State>);

impl CatalogService {
    /// A service over the node's state.
    pub fn new(state: &Arc<State>) -> Self {
        Self(Arc::clone(state))
    }
}

#[tonic::async_trait]
impl v1::catalog_server::Catalog for CatalogService {
    async fn resolve(&self, request: Request<v1::ResolveRequest>) -> Result<Response<v1::ResolveResponse>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let resolved = self.0.catalog.resolve(&team, &request.reference).await.map_err(|error| match error {
            // A build takes a minute: whoever asks meanwhile is told to come back, not that there is a conflict.
            CatalogError::TemplateNotReady { status: BuildStatus::Building, .. } => {
                mark(Status::unavailable(error.to_string()), ShouldRetry::Yes)
            }
            error => NodeError::from(error).into(),
        })?;
        Ok(Response::new(convert::resolved(&resolved)))
    }

    async fn get_snapshot(&self, request: Request<v1::GetSnapshotRequest>) -> Result<Response<v1::Snapshot>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let row = self.0.catalog.get_snapshot(&team, &request.reference).await.map_err(NodeError::from)?;
        Ok(Response::new(convert::snapshot(&self.0, &row).await?))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let filter = convert::snapshot_filter(&request);
        let token = (!request.page_token.is_empty()).then_some(request.page_token.as_str());
        let page = self.0.catalog.list_snapshots(&team, &filter, request.limit, token).await;
        let page = page.map_err(NodeError::from)?;
        let mut snapshots = Vec::with_capacity(page.items.len());
        for row in &page.items {
            snapshots.push(convert::snapshot(&self.0, row).await?);
        }
        Ok(Response::new(v1::ListSnapshotsResponse { snapshots, next_page_token: page.next.unwrap_or_default() }))
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteResponse>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        // What a template starts from, if it is one: known only before.
        let start = self.0.catalog.get_template(&team, &request.reference).await.ok().and_then(|row| row.snapshot_id);
        let deleted = self.0.catalog.delete(&team, &request.reference).await.map_err(NodeError::from)?;
        match (deleted, start) {
            (Deleted::Snapshot(id), _) => {
                maintenance::forget(&self.0, &id);
            }
            // A template's own snapshot goes from memory by age: sandboxes of it may still run.
            (Deleted::Template(_), Some(id)) => self.0.standbys.forget(&id),
            (Deleted::Template(_), None) => {}
        }
        Ok(Response::new(v1::DeleteResponse {}))
    }

    async fn discard(&self, request: Request<v1::DiscardRequest>) -> Result<Response<v1::DiscardResponse>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let id = convert::snapshot_id(&request.snapshot_id)?;
        self.0.catalog.discard_hidden(&team, &id).await.map_err(NodeError::from)?;
        self.0.forget_if_gone(&id).await;
        Ok(Response::new(v1::DiscardResponse {}))
    }

    async fn get_template(&self, request: Request<v1::GetTemplateRequest>) -> Result<Response<v1::Template>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let row = self.0.catalog.get_template(&team, &request.reference).await.map_err(NodeError::from)?;
        Ok(Response::new(convert::template(&row)))
    }

    async fn list_templates(
        &self,
        request: Request<v1::ListTemplatesRequest>,
    ) -> Result<Response<v1::ListTemplatesResponse>, Status> {
        let team = convert::team(&request.into_inner().team)?;
        let rows = self.0.catalog.list_templates(&team).await.map_err(NodeError::from)?;
        Ok(Response::new(v1::ListTemplatesResponse { templates: rows.iter().map(convert::template).collect() }))
    }

    async fn get_sandbox(&self, request: Request<v1::GetSandboxRequest>) -> Result<Response<v1::Sandbox>, Status> {
        let request = request.into_inner();
        let (team, id) = (convert::team(&request.team)?, convert::sandbox_id(&request.sandbox_id)?);
        let row = self.0.catalog.get_sandbox(&team, &id).await.map_err(|error| {
            match self.0.sandboxes.lost_reason(id.as_str()) {
                Some(reason) => NodeError::Lost { sandbox: id.to_string(), reason },
                None => NodeError::from(error),
            }
        })?;
        Ok(Response::new(convert::sandbox(&self.0, &row)))
    }

    async fn list_sandboxes(
        &self,
        request: Request<v1::ListSandboxesRequest>,
    ) -> Result<Response<v1::ListSandboxesResponse>, Status> {
        let request = request.into_inner();
        let team = convert::team(&request.team)?;
        let filter = convert::sandbox_filter(&request);
        let token = (!request.page_token.is_empty()).then_some(request.page_token.as_str());
        let page = self.0.catalog.list_sandboxes(&team, &filter, request.limit, token).await;
        let page = page.map_err(NodeError::from)?;
        Ok(Response::new(v1::ListSandboxesResponse {
            sandboxes: page.items.iter().map(|row| convert::sandbox(&self.0, row)).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }
}
