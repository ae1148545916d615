//! One collection: the steps of the module's drawing, in order.

use std::sync::Arc;

use super::mark::Mark;
use super::policy::{Policy, Verdict};
use super::tenure::Tenure;
use super::{GcError, Report, owner, sweep};
use crate::blob::{BlobStore, pack_key};
use crate::catalog::{Catalog, CatalogError, ErrorKind, Lease, LeaseHolder, Moved, PackSeen, PackState};

/// Writes to the catalog that are under way at once, between two looks at the lease.
const MOVES_AT_ONCE: usize = 64;

/// DELETEs under way at once, between two looks at the lease.
pub(super) const DELETES_AT_ONCE: usize = 8;

/// How a collector works.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// When what goes.
    pub policy: Policy,
    /// How long a collector that says nothing keeps the others from collecting.
    pub lease_ms: i64,
    /// Compute, and write nothing.
    pub dry_run: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { policy: Policy::default(), lease_ms: 120 * 1000, dry_run: false }
    }
}

/// A collector. Any number may exist; one at a time works.
pub struct Collector {
    pub(super) catalog: Arc<Catalog>,
    pub(super) blobs: Arc<dyn BlobStore>,
    pub(super) settings: Settings,
    holder: LeaseHolder,
}

/// A cycle under way: what it may write with, and what it did.
pub(super) struct Cycle<'a> {
    pub(super) collector: &'a Collector,
    pub(super) tenure: Tenure<'a>,
    pub(super) mark: Mark,
    pub(super) report: Report,
}

impl Collector {
    /// A collector of this catalog's bucket.
    pub fn new(catalog: Arc<Catalog>, blobs: Arc<dyn BlobStore>, settings: Settings) -> Self {
        Self { catalog, blobs, settings, holder: LeaseHolder::random() }
    }

    /// One cycle. Exclusive: its lease knows the collector, not the call. Whatever stops it, the next one goes on.
    pub async fn collect(&mut self) -> Result<Report, GcError> {
        if self.settings.dry_run {
            return self.rehearse().await;
        }
        let mut tenure = Tenure::begin(&self.catalog, self.holder, self.settings.lease_ms).await?;
        let (ended, mark) = match self.look(&mut tenure).await {
            Ok(looked) => looked,
            Err(error) => {
                tenure.end().await;
                return Err(error);
            }
        };
        let report = Report { snapshots: mark.snapshots, writers_ended: ended, ..Report::default() };
        let mut cycle = Cycle { collector: self, tenure, mark, report };
        let ran = cycle.run().await;
        let Cycle { tenure, report, .. } = cycle;
        if !matches!(ran, Err(GcError::LeaseLost)) {
            tenure.end().await;
        }
        ran?;
        tracing::info!(?report, "collected");
        Ok(report)
    }

    async fn look(&self, tenure: &mut Tenure<'_>) -> Result<(u64, Mark), GcError> {
        owner::claim(&self.catalog, self.blobs.as_ref()).await?;
        let ended = self.catalog.fence_expired_writers(&tenure.fence().await?).await?;
        Ok((ended, Mark::read(&self.catalog).await?))
    }

    /// What a cycle would do with the packs that there are.
    async fn rehearse(&self) -> Result<Report, GcError> {
        owner::is_ours(&self.catalog, self.blobs.as_ref()).await?;
        let mark = Mark::read(&self.catalog).await?;
        let mut report = Report { dry_run: true, snapshots: mark.snapshots, ..Report::default() };
        for (seen, used) in mark.packs.iter().zip(&mark.used) {
            let row = &seen.row;
            if *used {
                report.used.add_pack(row);
            }
            match self.settings.policy.judge(row, *used, mark.began_unix_ms) {
                Verdict::Keep => {}
                Verdict::Condemn => report.condemned.add_pack(row),
                Verdict::Restore => report.restored.add_pack(row),
                Verdict::Doom => report.doomed.add_pack(row),
                Verdict::Delete => report.deleted.add_pack(row),
                Verdict::Purge => report.purged += 1,
                Verdict::Alarm => report.named_while_leaving += 1,
            }
        }
        Ok(report)
    }
}

/// Packs by what is to be done with them.
#[derive(Default)]
struct Plan {
    condemn: Vec<PackSeen>,
    restore: Vec<PackSeen>,
    doom: Vec<PackSeen>,
    delete: Vec<PackSeen>,
    purge: Vec<PackSeen>,
}

impl Cycle<'_> {
    async fn run(&mut self) -> Result<(), GcError> {
        let plan = self.plan();
        let restored = self.move_all(plan.restore, PackState::Live).await?;
        restored.iter().for_each(|seen| self.report.restored.add_pack(&seen.row));
        let condemned = self.move_all(plan.condemn, PackState::Condemned).await?;
        condemned.iter().for_each(|seen| self.report.condemned.add_pack(&seen.row));
        let mut doom = plan.doom;
        #[cfg(test)]
        if crate::mutant::is_on(crate::mutant::Mutant::OneMark) {
            doom.extend(condemned);
        }
        let doomed = self.move_all(std::mem::take(&mut doom), PackState::Doomed).await?;
        doomed.iter().for_each(|seen| self.report.doomed.add_pack(&seen.row));

        let deleted = self.delete_all(plan.delete.into_iter().chain(doomed).collect()).await?;
        for seen in self.move_all(deleted, PackState::Gone).await? {
            self.report.deleted.add_pack(&seen.row);
        }
        sweep::packs(self).await?;
        sweep::manifests(self).await?;
        self.purge_all(plan.purge).await
    }

    fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        for (seen, used) in self.mark.packs.iter().zip(&self.mark.used) {
            if *used {
                self.report.used.add_pack(&seen.row);
            }
            match self.collector.settings.policy.judge(&seen.row, *used, self.mark.began_unix_ms) {
                Verdict::Keep => {}
                Verdict::Condemn => plan.condemn.push(*seen),
                Verdict::Restore => plan.restore.push(*seen),
                Verdict::Doom => plan.doom.push(*seen),
                Verdict::Delete => plan.delete.push(*seen),
                Verdict::Purge => plan.purge.push(*seen),
                Verdict::Alarm => {
                    tracing::error!(pack = %seen.row.id, state = ?seen.row.state, "a snapshot names a pack that leaves");
                    self.report.named_while_leaving += 1;
                }
            }
        }
        plan
    }

    /// Moves packs; answers those of which it is certain.
    async fn move_all(&mut self, packs: Vec<PackSeen>, to: PackState) -> Result<Vec<PackSeen>, GcError> {
        let mut moved = Vec::with_capacity(packs.len());
        for some in packs.chunks(MOVES_AT_ONCE) {
            let fence = self.tenure.fence().await?;
            let catalog = &self.collector.catalog;
            let moves = some.iter().map(|seen| catalog.move_pack(&fence, seen, to));
            for outcome in futures::future::join_all(moves).await {
                match self.settle(outcome)? {
                    Some(Moved::Done(seen)) => moved.push(seen),
                    Some(Moved::Raced) => self.raced().await?,
                    None => {}
                }
            }
        }
        Ok(moved)
    }

    /// Deletes the objects of doomed packs; answers those that are gone.
    async fn delete_all(&mut self, packs: Vec<PackSeen>) -> Result<Vec<PackSeen>, GcError> {
        let mut deleted = Vec::with_capacity(packs.len());
        for some in packs.chunks(DELETES_AT_ONCE) {
            let fence = self.tenure.fence().await?;
            let keys = some.iter().map(|seen| pack_key(&seen.row.id)).collect();
            for (seen, done) in some.iter().zip(self.delete_objects(&fence, keys).await?) {
                if done {
                    deleted.push(*seen);
                } else {
                    self.report.delete_failed.add_pack(&seen.row);
                }
            }
        }
        Ok(deleted)
    }

    /// Deletes objects, each only while the lease is good for a while. Answers for each whether it is certain to have been
    /// deleted. Give it [`DELETES_AT_ONCE`] keys at most.
    pub(super) async fn delete_objects(&self, lease: &Lease, keys: Vec<String>) -> Result<Vec<bool>, GcError> {
        let deletes = keys.into_iter().map(|key| async move {
            self.tenure.may_delete(lease)?;
            match self.collector.blobs.delete(&key).await {
                Ok(()) => Ok(true),
                Err(error) => {
                    tracing::warn!(key, %error, "not deleted; tried again in the next collection");
                    Ok(false)
                }
            }
        });
        futures::future::join_all(deletes).await.into_iter().collect()
    }

    async fn purge_all(&mut self, packs: Vec<PackSeen>) -> Result<(), GcError> {
        for some in packs.chunks(MOVES_AT_ONCE) {
            let fence = self.tenure.fence().await?;
            let catalog = &self.collector.catalog;
            let purges = some.iter().map(|seen| catalog.purge_pack(&fence, seen));
            for outcome in futures::future::join_all(purges).await {
                match self.settle(outcome)? {
                    Some(true) => self.report.purged += 1,
                    Some(false) => self.raced().await?,
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// What is to be made of a write's outcome: an engine that cannot say leaves it to the next cycle.
    pub(super) fn settle<T>(&mut self, outcome: Result<T, CatalogError>) -> Result<Option<T>, GcError> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable) => {
                tracing::info!(%error, "left to the next collection");
                self.report.unsettled += 1;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A write found something changed. If that is the lease, it is over.
    pub(super) async fn raced(&mut self) -> Result<(), GcError> {
        self.report.unsettled += 1;
        self.tenure.check().await
    }
}
