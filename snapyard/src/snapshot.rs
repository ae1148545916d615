//! `snapyard snapshot create|ls|info|rm`.

use http::Method;
use serde_json::json;
use snapyard_proto::v1::{GetSnapshotRequest, ListSnapshotsRequest};

use crate::cli::{SnapshotCreateArgs, SnapshotLsArgs, SnapshotRef, SnapshotRmArgs};
use crate::context::Context;
use crate::failure::Failure;
use crate::grpc::TEAM;
use crate::output;
use crate::rest::segment;
use crate::sandbox::text;

/// Snapshots per page when listing.
const PAGE: u32 = 100;

/// `snapshot create`: the id on standard output.
pub async fn create(context: &Context, args: SnapshotCreateArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/snapshots", segment(&args.sandbox));
    let body = args.name.map_or_else(|| json!({}), |name| json!({"name": name}));
    let answer = context.api()?.call(Method::POST, &path, Some(&body)).await?;
    if context.json {
        return Ok(output::print_json(&answer.body)?);
    }
    output::print_line(text(&answer.body, "snapshotID")?)?;
    Ok(())
}

/// `snapshot ls`: from the catalog, since REST lists ids and names only.
pub async fn ls(context: &Context, args: SnapshotLsArgs) -> Result<(), Failure> {
    let mut catalog = context.node().await?.catalog();
    let mut snapshots = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListSnapshotsRequest {
            team: TEAM.into(),
            sandbox_id: args.sandbox.clone().unwrap_or_default(),
            name: args.name.clone().unwrap_or_default(),
            limit: PAGE,
            page_token,
        };
        let page = catalog.list_snapshots(request).await.map_err(|status| Failure::from_status(&status))?.into_inner();
        snapshots.extend(page.snapshots);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    if context.json {
        output::print_json(&snapshots.iter().map(output::snapshot_json).collect())?;
    } else if args.quiet {
        for snapshot in &snapshots {
            output::print_line(&snapshot.id)?;
        }
    } else if snapshots.is_empty() {
        eprintln!("no snapshots; `snapyard snapshot create SANDBOX` takes one");
    } else {
        output::print_table(&output::snapshot_table(&snapshots, output::now()))?;
    }
    Ok(())
}

/// `snapshot info`.
pub async fn info(context: &Context, args: SnapshotRef) -> Result<(), Failure> {
    let request = GetSnapshotRequest { team: TEAM.into(), reference: args.snapshot };
    let mut catalog = context.node().await?.catalog();
    let snapshot = catalog.get_snapshot(request).await.map_err(|status| Failure::from_status(&status))?.into_inner();
    if context.json {
        output::print_json(&output::snapshot_json(&snapshot))?;
    } else {
        output::print_table(&output::snapshot_facts(&snapshot, output::now()))?;
    }
    Ok(())
}

/// `snapshot rm`: every one is tried; the first failure decides the exit code.
pub async fn rm(context: &Context, args: SnapshotRmArgs) -> Result<(), Failure> {
    let api = context.api()?;
    context
        .each(&args.snapshots, "deleted", async |reference| {
            api.call(Method::DELETE, &format!("/templates/{}", segment(reference)), None).await.map(drop)
        })
        .await
}
