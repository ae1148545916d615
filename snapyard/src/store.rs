//! `snapyard store …`: the node's storage, for operators.

use snapyard_proto::v1::{
    CheckReport, CheckStoreRequest, CollectGarbageRequest, GetStatsRequest, ListNodesRequest, MeasureUsageRequest,
    Usage,
};

use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::output::{self, storage};
use crate::progress::Progress;

/// `store stats`: what the node holds, and (for programs) what the scheduler has promised; with `snapshots` also what each
/// snapshot takes.
pub async fn stats(context: &Context, snapshots: bool) -> Result<(), Failure> {
    let mut node = context.node().await?.node();
    let stats = node.get_stats(GetStatsRequest {}).await.map_err(|status| Failure::from_status(&status))?.into_inner();
    let usage = if snapshots { Some(measure(context).await?) } else { None };
    if context.json {
        let mut scheduler = context.scheduler().await?.scheduler();
        let nodes = scheduler.list_nodes(ListNodesRequest {}).await.map_err(|status| Failure::from_status(&status))?;
        let reservations = nodes.into_inner().nodes.iter().map(|node| node.reserved).sum();
        let mut json = output::stats_json(&stats, reservations);
        if let Some(usage) = &usage {
            json["usage"] = storage::usage_json(usage);
        }
        return Ok(output::print_json(&json)?);
    }
    let mut tables = output::stats_tables(&stats);
    tables.extend(usage.iter().flat_map(storage::usage_tables));
    for (number, table) in tables.iter().enumerate() {
        if number > 0 {
            output::print_line("")?;
        }
        output::print_table(table)?;
    }
    Ok(())
}

async fn measure(context: &Context) -> Result<Usage, Failure> {
    let mut storage = context.node().await?.storage();
    let mut progress = Progress::start("measuring");
    let measured = async {
        let mut messages = storage.measure_usage(MeasureUsageRequest {}).await?.into_inner();
        while let Some(message) = messages.message().await? {
            if let Some(usage) = message.usage {
                return Ok(usage);
            }
            progress.update("indexes", percent(message.done, message.total));
        }
        Err(tonic::Status::unknown("the measurement ended without a result"))
    };
    let measured = measured.await;
    progress.finish(if measured.is_ok() { "done" } else { "failed" });
    measured.map_err(|status| Failure::from_status(&status))
}

/// `store gc`: one collection, now.
pub async fn gc(context: &Context, dry_run: bool) -> Result<(), Failure> {
    let mut storage = context.node().await?.storage();
    let collected = storage.collect_garbage(CollectGarbageRequest { dry_run }).await;
    let report = collected.map_err(|status| Failure::from_status(&status))?.into_inner();
    match context.json {
        true => output::print_json(&storage::gc_json(&report))?,
        false => output::print_table(&storage::gc_table(&report))?,
    }
    Ok(())
}

/// `store fsck`: reads and checks everything. What is wrong, and was not repaired, makes it fail after it has been told.
pub async fn fsck(context: &Context, repair: bool) -> Result<(), Failure> {
    let report = check(context, repair).await?;
    if context.json {
        output::print_json(&storage::fsck_json(&report))?;
    } else {
        for table in storage::fsck_tables(&report) {
            output::print_table(&table)?;
        }
    }
    match (report.bad_packs.len(), report.missing.len()) {
        (0, 0) => Ok(()),
        (_, 0) if repair => Ok(()),
        (packs, chunks) => {
            let message = format!("{packs} packs are damaged or missing; {chunks} chunks have no good copy");
            Err(Failure::new(Kind::Refused, message))
        }
    }
}

async fn check(context: &Context, repair: bool) -> Result<CheckReport, Failure> {
    let mut storage = context.node().await?.storage();
    let mut progress = Progress::start("checking");
    let checked = async {
        let mut messages = storage.check_store(CheckStoreRequest { repair }).await?.into_inner();
        while let Some(message) = messages.message().await? {
            if let Some(report) = message.report {
                return Ok(report);
            }
            progress.update(&message.step, percent(message.done, message.total));
        }
        Err(tonic::Status::unknown("the check ended without a result"))
    };
    let checked = checked.await;
    progress.finish(if checked.is_ok() { "done" } else { "failed" });
    checked.map_err(|status| Failure::from_status(&status))
}

fn percent(done: u64, total: u64) -> u32 {
    u32::try_from(done.saturating_mul(100) / total.max(1)).unwrap_or(100)
}
