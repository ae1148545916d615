//! `snapyard store stats`.

use snapyard_proto::v1::{GetStatsRequest, ListNodesRequest};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// `store stats`: what the node holds, and (for programs) what the scheduler has promised.
pub async fn stats(context: &Context) -> Result<(), Failure> {
    let mut node = context.node().await?.node();
    let stats = node.get_stats(GetStatsRequest {}).await.map_err(|status| Failure::from_status(&status))?.into_inner();
    if context.json {
        let mut scheduler = context.scheduler().await?.scheduler();
        let nodes = scheduler.list_nodes(ListNodesRequest {}).await.map_err(|status| Failure::from_status(&status))?;
        let reservations = nodes.into_inner().nodes.iter().map(|node| node.reserved).sum();
        return Ok(output::print_json(&output::stats_json(&stats, reservations))?);
    }
    for (number, table) in output::stats_tables(&stats).iter().enumerate() {
        if number > 0 {
            output::print_line("")?;
        }
        output::print_table(table)?;
    }
    Ok(())
}
