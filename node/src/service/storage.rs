//! `snapyard.v1.Storage`: what operators ask of the storage.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use snapyard_proto::v1;
use snapyard_snapstore::census::{Census, CensusError};
use snapyard_snapstore::check::{self, CheckReport, RepairError};
use snapyard_snapstore::gc::{Report, Tally};
use snapyard_snapstore::repack::Repacked;
use snapyard_snapstore::rewrite::RewriteError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status};

use crate::maintenance;
use crate::node::State;

/// Collections, usage and checks.
pub struct StorageService(Arc<State>);

impl StorageService {
    /// A service over the node's state.
    pub fn new(state: &Arc<State>) -> Self {
        Self(Arc::clone(state))
    }

    /// A stream of what `work` reports; it is the node's task, and ends with the caller's interest or the node.
    fn stream<T, W>(&self, work: impl FnOnce(Arc<State>, mpsc::UnboundedSender<Result<T, Status>>) -> W) -> Messages<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let (messages, received) = mpsc::unbounded_channel();
        let work = work(Arc::clone(&self.0), messages.clone());
        let node = Arc::clone(&self.0);
        self.0.tasks.spawn(async move {
            let last = tokio::select! {
                last = work => last,
                () = messages.closed() => return,
                () = node.shutdown.cancelled() => Err(Status::unavailable("the node is shutting down")),
            };
            let _ = messages.send(last); // nobody may be left to read it
        });
        UnboundedReceiverStream::new(received).boxed()
    }
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::storage_server::Storage for StorageService {
    async fn collect_garbage(
        &self,
        request: Request<v1::CollectGarbageRequest>,
    ) -> Result<Response<v1::CollectGarbageResponse>, Status> {
        if request.into_inner().dry_run {
            return Ok(Response::new(collected(&maintenance::rehearse(&self.0).await?)));
        }
        maintenance::expire(&self.0).await?;
        let (repacked, report) = maintenance::collect(&self.0).await?;
        let mut response = collected(&report);
        match repacked {
            Ok(done) => response.repacked = Some(rewritten(done)),
            Err(error) => response.not_repacked = error.to_string(),
        }
        Ok(Response::new(response))
    }

    type MeasureUsageStream = Messages<v1::UsageProgress>;

    async fn measure_usage(
        &self,
        _request: Request<v1::MeasureUsageRequest>,
    ) -> Result<Response<Self::MeasureUsageStream>, Status> {
        let stream = self.stream(|node, messages| async move {
            let progress = |done, total| {
                let _ = messages.send(Ok(v1::UsageProgress { done, total, usage: None }));
            };
            let census = Census::take(&node.store, &node.catalog, progress).await.map_err(refused)?;
            if !census.lost_nodes.is_empty() || !census.lost_packs.is_empty() {
                let why = "a part of what is stored cannot be read: `snapyard store fsck` says which";
                return Err(Status::data_loss(why));
            }
            let total = census.snapshots.len() as u64;
            Ok(v1::UsageProgress { done: total, total, usage: Some(usage(&census)) })
        });
        Ok(Response::new(stream))
    }

    type CheckStoreStream = Messages<v1::CheckProgress>;

    async fn check_store(
        &self,
        request: Request<v1::CheckStoreRequest>,
    ) -> Result<Response<Self::CheckStoreStream>, Status> {
        let repair = request.into_inner().repair;
        let stream = self.stream(move |node, messages| async move {
            let progress = move |step: &'static str, done, total| {
                let _ = messages.send(Ok(v1::CheckProgress { step: step.to_owned(), done, total, report: None }));
            };
            let report = match repair {
                true => {
                    let repaired = check::repair(maintenance::rewriter(&node), &progress).await;
                    node.uploads.notify_one();
                    repaired.map_err(not_repaired)?
                }
                false => check::check(&node.store, &node.catalog, &progress).await.map_err(refused)?,
            };
            Ok(v1::CheckProgress { step: "done".to_owned(), done: 1, total: 1, report: Some(checked(&report)) })
        });
        Ok(Response::new(stream))
    }
}

fn refused(error: CensusError) -> Status {
    match error {
        CensusError::Unavailable { .. } => Status::unavailable(error.to_string()),
        CensusError::Manifest { .. } => Status::data_loss(error.to_string()),
        CensusError::Catalog(_) | CensusError::Store(_) => Status::internal(error.to_string()),
    }
}

fn not_repaired(error: RepairError) -> Status {
    match error {
        RepairError::Census(error) => refused(error),
        RepairError::Rewrite(RewriteError::Read(error)) if error.is_transient() => {
            Status::unavailable(error.to_string())
        }
        RepairError::Rewrite(error) => Status::internal(error.to_string()),
    }
}

fn rewritten(done: Repacked) -> v1::Repacked {
    let Repacked { packs_copied, bytes_written, packs_dropped, bytes_dropped, snapshots_amended } = done;
    v1::Repacked { packs_copied, bytes_written, packs_dropped, bytes_dropped, snapshots_amended }
}

fn tally(tally: Tally) -> Option<v1::Tally> {
    Some(v1::Tally { count: tally.count, bytes: tally.bytes })
}

fn collected(report: &Report) -> v1::CollectGarbageResponse {
    v1::CollectGarbageResponse {
        dry_run: report.dry_run,
        snapshots: report.snapshots,
        used: tally(report.used),
        condemned: tally(report.condemned),
        restored: tally(report.restored),
        doomed: tally(report.doomed),
        deleted: tally(report.deleted),
        delete_failed: tally(report.delete_failed),
        adopted: tally(report.adopted),
        deleted_again: tally(report.deleted_again),
        orphans_marked: tally(report.orphans_marked),
        orphans_deleted: tally(report.orphans_deleted),
        strange_keys: report.strange_keys,
        purged: report.purged,
        writers_ended: report.writers_ended,
        unsettled: report.unsettled,
        named_while_leaving: report.named_while_leaving,
        repacked: None,
        not_repacked: String::new(),
    }
}

fn usage(census: &Census) -> v1::Usage {
    let snapshots = census.snapshots.iter().map(|usage| v1::SnapshotUsage {
        snapshot_id: usage.id.to_string(),
        team: usage.team.to_string(),
        data_bytes: usage.data_bytes,
        exclusive_bytes: usage.exclusive_bytes,
    });
    v1::Usage {
        snapshots: snapshots.collect(),
        chunks: census.reachable().len() as u64,
        data_bytes: census.snapshots.iter().map(|usage| usage.data_bytes).sum(),
        stored_bytes: census.stored_bytes,
        live_bytes: census.packs.iter().map(|usage| usage.live_bytes).sum(),
    }
}

fn checked(report: &CheckReport) -> v1::CheckReport {
    let bad = |bad: &check::BadPack| v1::BadPack { pack_id: bad.id.to_string(), reason: bad.reason.clone() };
    let missing = |missing: &check::MissingChunk| v1::MissingChunk {
        chunk_id: missing.id.to_string(),
        snapshot_ids: missing.snapshots.iter().map(ToString::to_string).collect(),
    };
    v1::CheckReport {
        snapshots: report.snapshots,
        packs: report.packs,
        bytes: report.bytes,
        chunks: report.chunks,
        unreachable_chunks: report.unreachable_chunks,
        bad_packs: report.bad_packs.iter().map(bad).collect(),
        missing: report.missing.iter().map(missing).collect(),
        repaired_chunks: report.repaired.chunks,
        repaired_snapshots: report.repaired.snapshots,
    }
}
