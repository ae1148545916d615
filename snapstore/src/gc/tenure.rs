//! The collector's lease during one cycle.
//!
//! Between steps it is renewed when half of its time is over, so that the revision that fences writes does not change
//! while writes are under way. Before each DELETE, which no transaction can fence, the clock is asked.

use super::GcError;
use crate::catalog::{Catalog, CatalogError, Lease, LeaseHolder};

/// The name of the lease.
const NAME: &str = "collector";

/// A lease that this process holds.
pub(super) struct Tenure<'a> {
    catalog: &'a Catalog,
    lease: Lease,
    ttl_ms: i64,
}

fn lost(error: CatalogError) -> GcError {
    match error {
        CatalogError::LeaseLost { .. } => GcError::LeaseLost,
        error => error.into(),
    }
}

impl<'a> Tenure<'a> {
    pub(super) async fn begin(catalog: &'a Catalog, holder: LeaseHolder, ttl_ms: i64) -> Result<Self, GcError> {
        let lease = catalog.acquire_lease(NAME, holder, ttl_ms).await?.ok_or(GcError::Busy)?;
        Ok(Self { catalog, lease, ttl_ms })
    }

    /// The fence for writes. To be asked for between writes, not while some are under way.
    pub(super) async fn fence(&mut self) -> Result<Lease, GcError> {
        if self.lease.left_ms(self.catalog.now_unix_ms()) <= self.ttl_ms / 2 {
            self.lease = self.catalog.renew_lease(&self.lease, self.ttl_ms).await.map_err(lost)?;
        }
        Ok(self.lease.clone())
    }

    /// A write conflicted: because of its own row, or because of the lease?
    pub(super) async fn check(&self) -> Result<(), GcError> {
        self.catalog.held(&self.lease).await.map(drop).map_err(lost)
    }

    /// Fails unless others have to wait for a good while yet.
    pub(super) fn may_delete(&self, lease: &Lease) -> Result<(), GcError> {
        let margin_ms = self.ttl_ms / 4;
        if lease.left_ms(self.catalog.now_unix_ms()) > margin_ms { Ok(()) } else { Err(GcError::LeaseLost) }
    }

    pub(super) async fn end(self) {
        if let Err(error) = self.catalog.release_lease(&self.lease).await {
            tracing::info!(%error, "the collector's lease ends by itself");
        }
    }
}
