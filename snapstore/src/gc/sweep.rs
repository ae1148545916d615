//! What lies in the bucket and should not: pages of the listing against the catalog's rows.
//!
//! ```text
//!   pack object      no row: adopted, as condemned · gone: deleted again · any other row: not the sweep's business
//!   manifest object  no snapshot: marked · marked for the grace period: deleted
//! ```
//!
//! How a pack's object can be there though its row is gone: a PUT that was under way when the pack was deleted, or whose
//! answer was lost. Though it has no row: the tombstone was purged since.

use std::collections::HashSet;
use std::str::FromStr;

use super::GcError;
use super::collect::{Cycle, DELETES_AT_ONCE};
use crate::blob::{BlobEntry, MANIFESTS_PREFIX, PACKS_PREFIX, manifest_key, pack_key};
use crate::catalog::{OrphanSeen, PackState};
use crate::ids::{PackId, SnapshotId};

/// Objects listed at a time.
const PAGE: u16 = 1000;

/// Objects by the id in their key. Keys without one are counted and left alone.
fn ids_of<I: FromStr>(page: &[BlobEntry], prefix: &str, strange: &mut u64) -> Vec<(I, u64)> {
    let mut found = Vec::with_capacity(page.len());
    for entry in page {
        match entry.key.strip_prefix(prefix).and_then(|id| id.parse().ok()) {
            Some(id) => found.push((id, entry.len)),
            None => *strange += 1,
        }
    }
    found
}

async fn page(cycle: &Cycle<'_>, prefix: &str, after: &mut Option<String>) -> Result<Option<Vec<BlobEntry>>, GcError> {
    let page = cycle.collector.blobs.list(prefix, after.as_deref(), PAGE).await?;
    *after = page.last().map(|entry| entry.key.clone());
    Ok((!page.is_empty()).then_some(page))
}

/// Pack objects.
pub(super) async fn packs(cycle: &mut Cycle<'_>) -> Result<(), GcError> {
    let mut after = None;
    while let Some(listed) = page(cycle, PACKS_PREFIX, &mut after).await? {
        let listed = ids_of::<PackId>(&listed, PACKS_PREFIX, &mut cycle.report.strange_keys);
        let mut again = Vec::new();
        let mut unknown = Vec::new();
        for (id, len) in listed {
            match cycle.mark.row(&id).map(|seen| seen.row.state) {
                Some(PackState::Gone) => again.push((id, len)),
                Some(PackState::Live | PackState::Condemned | PackState::Doomed) => {}
                None => unknown.push((id, len)),
            }
        }
        // Most of them were committed and uploaded since the rows were read.
        let ids: Vec<PackId> = unknown.iter().map(|(id, _)| *id).collect();
        let rows = cycle.collector.catalog.packs_seen(&ids).await?;
        for ((id, len), row) in unknown.into_iter().zip(rows) {
            match row.map(|seen| seen.row.state) {
                None => adopt(cycle, id, len).await?,
                Some(PackState::Gone) => again.push((id, len)),
                Some(PackState::Live | PackState::Condemned | PackState::Doomed) => {}
            }
        }
        for some in again.chunks(DELETES_AT_ONCE) {
            let fence = cycle.tenure.fence().await?;
            let keys = some.iter().map(|(id, _)| pack_key(id)).collect();
            for ((_, len), done) in some.iter().zip(cycle.delete_objects(&fence, keys).await?) {
                let tally = if done { &mut cycle.report.deleted_again } else { &mut cycle.report.delete_failed };
                tally.add(*len);
            }
        }
    }
    Ok(())
}

async fn adopt(cycle: &mut Cycle<'_>, id: PackId, len: u64) -> Result<(), GcError> {
    let fence = cycle.tenure.fence().await?;
    let adopted = cycle.collector.catalog.adopt_pack(&fence, id, len).await;
    match cycle.settle(adopted)? {
        Some(true) => cycle.report.adopted.add(len),
        Some(false) => cycle.raced().await?,
        None => {}
    }
    Ok(())
}

/// Manifest objects.
pub(super) async fn manifests(cycle: &mut Cycle<'_>) -> Result<(), GcError> {
    let mut seen_now = HashSet::new();
    let mut after = None;
    while let Some(listed) = page(cycle, MANIFESTS_PREFIX, &mut after).await? {
        let listed = ids_of::<SnapshotId>(&listed, MANIFESTS_PREFIX, &mut cycle.report.strange_keys);
        let ids: Vec<SnapshotId> = listed.iter().map(|(id, _)| *id).collect();
        let seen = cycle.collector.catalog.orphans_seen(&ids).await?;
        for ((id, len), seen) in listed.into_iter().zip(seen) {
            let fence = cycle.tenure.fence().await?;
            match seen {
                OrphanSeen::Owned => continue,
                OrphanSeen::New => {
                    let marked = cycle.collector.catalog.mark_orphan(&fence, &id).await;
                    match cycle.settle(marked)? {
                        Some(true) => cycle.report.orphans_marked.add(len),
                        Some(false) => cycle.raced().await?,
                        None => {}
                    }
                }
                OrphanSeen::Since { first_seen_unix_ms, revision } => {
                    seen_now.insert(id);
                    let now = cycle.collector.catalog.now_unix_ms();
                    if !cycle.collector.settings.policy.orphan_is_over(first_seen_unix_ms, now) {
                        continue;
                    }
                    let key = manifest_key(&id);
                    if cycle.delete_objects(&fence, vec![key]).await? != [true] {
                        cycle.report.delete_failed.add(len);
                        continue;
                    }
                    cycle.report.orphans_deleted.add(len);
                    let forgotten = cycle.collector.catalog.forget_orphan(&fence, &id, revision).await;
                    if cycle.settle(forgotten)? == Some(false) {
                        cycle.raced().await?;
                    }
                }
            }
        }
    }
    stale_marks(cycle, &seen_now).await
}

/// Marks of objects that somebody else deleted. To remove one too early costs one more grace period, nothing else.
async fn stale_marks(cycle: &mut Cycle<'_>, seen_now: &HashSet<SnapshotId>) -> Result<(), GcError> {
    for (id, first_seen_unix_ms, revision) in cycle.collector.catalog.orphan_marks().await? {
        let now = cycle.collector.catalog.now_unix_ms();
        if seen_now.contains(&id) || !cycle.collector.settings.policy.mark_is_stale(first_seen_unix_ms, now) {
            continue;
        }
        let fence = cycle.tenure.fence().await?;
        let forgotten = cycle.collector.catalog.forget_orphan(&fence, &id, revision).await;
        if cycle.settle(forgotten)? == Some(false) {
            cycle.raced().await?;
        }
    }
    Ok(())
}
