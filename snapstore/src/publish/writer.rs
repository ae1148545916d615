//! The registration of this process as one that writes snapshots.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::catalog::{Catalog, CatalogError, LeaseHolder, WriterLease};
use crate::ids::NodeId;

/// A registered process. Its owner renews it; whoever commits for it names its lease.
pub struct Writer {
    catalog: Arc<Catalog>,
    node: NodeId,
    ttl_ms: i64,
    lease: Mutex<WriterLease>,
    /// One registration anew at a time.
    renewing: tokio::sync::Mutex<()>,
}

impl Writer {
    /// Registers a process of `node`, and ends what its predecessors left: the caller alone has the node's data.
    pub async fn register(catalog: Arc<Catalog>, node: NodeId, ttl_ms: i64) -> Result<Self, CatalogError> {
        catalog.fence_writers_of(&node).await?;
        let lease = catalog.register_writer(&node, LeaseHolder::random(), ttl_ms).await?;
        Ok(Self { catalog, node, ttl_ms, lease: Mutex::new(lease), renewing: tokio::sync::Mutex::default() })
    }

    /// What commits name.
    pub fn lease(&self) -> WriterLease {
        self.lease.lock().clone()
    }

    /// Says that the process is alive. When it was counted as dead it is registered anew: commits under way fail, and are
    /// begun again by [`super::publish`].
    pub async fn renew(&self) -> Result<(), CatalogError> {
        let lease = self.lease();
        match self.catalog.renew_writer(&lease, self.ttl_ms).await {
            Err(CatalogError::LeaseLost { .. }) => self.replace(&lease).await,
            renewed => renewed,
        }
    }

    /// Registers anew in place of `lost`, unless that was done already.
    pub(crate) async fn replace(&self, lost: &WriterLease) -> Result<(), CatalogError> {
        let _one = self.renewing.lock().await;
        if self.lease() == *lost {
            tracing::warn!(writer = %lost, "counted as dead; registering anew");
            let lease = self.catalog.register_writer(&self.node, LeaseHolder::random(), self.ttl_ms).await?;
            *self.lease.lock() = lease;
        }
        Ok(())
    }
}
