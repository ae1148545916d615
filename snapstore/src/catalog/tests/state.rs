//! The whole catalog judged as one state: every key that the rows call for is there, and no other.
//!
//! The range read that fetches it is one state (see the seam's promises), so this may run while others write.

use std::collections::{BTreeMap, BTreeSet};

use super::super::wire::{self, IdempotencyRow, Row};
use super::super::*;
use crate::ids::{SandboxId, SnapshotId, TeamId, TemplateId};

type Entries = BTreeMap<Vec<u8>, kv::Entry>;

fn rows<R: Row>(entries: &Entries, prefix: &str) -> Vec<R> {
    let range = keys::under(prefix);
    entries.range(range.start..range.end).map(|(_, entry)| wire::decode(entry).expect("decodes")).collect()
}

/// Panics, naming what is wrong, unless the state is consistent. Answers how many rows of snapshots, of sandboxes there are.
pub(super) async fn check(kv: &dyn kv::KeyValue) -> (usize, usize) {
    let everything = kv::KeyRange { start: vec![1], end: vec![0xff] };
    let entries: Entries = kv
        .range(everything, usize::MAX, kv::Order::Ascending)
        .await
        .expect("reads")
        .into_iter()
        .map(|entry| (entry.key.clone(), entry))
        .collect();
    let mut expected = BTreeSet::new();
    let snapshots: BTreeMap<SnapshotId, SnapshotRow> =
        rows::<SnapshotRow>(&entries, keys::SNAPSHOTS).into_iter().map(|row| (row.id, row)).collect();
    for (id, row) in &snapshots {
        expected.insert(keys::snapshot(id));
        expected.insert(keys::manifest(id));
        if let Some(name) = &row.name {
            let key = keys::name(&row.team, name);
            let holder: SnapshotId = wire::decode_id(entries.get(&key).expect("a name's row")).expect("an id");
            assert_eq!(holder, *id, "{name} says it is another's");
            assert!(expected.insert(key), "two snapshots say that they are {name}");
        }
        if entries.contains_key(&keys::working_set(id)) {
            expected.insert(keys::working_set(id));
        }
        if !row.internal {
            expected.insert(keys::timed(&keys::listing(&row.team), row.created_unix_ms, id));
        }
        if let Some(sandbox) = &row.sandbox_id {
            expected.insert(keys::timed(&keys::taken(sandbox), row.created_unix_ms, id));
        }
        if let Some(expires) = row.expires_unix_ms.filter(|_| !row.condemned) {
            expected.insert(keys::timed(keys::EXPIRY, expires, id));
        }
        if row.remote_status != RemoteStatus::Ready {
            expected.insert(keys::upload(id));
        }
        if row.condemned {
            expected.insert(keys::condemned(id));
        }
    }
    let sandboxes: Vec<SandboxRow> = rows(&entries, "sandbox/");
    for row in &sandboxes {
        expected.insert(keys::sandbox(&row.id));
        expected.insert(keys::timed(&keys::sandboxes(&row.team), row.started_unix_ms, &row.id));
        expected.insert(keys::on_node(&row.node_id, &row.id));
        for snapshot in [Some(row.snapshot_id), row.moving_to].into_iter().flatten() {
            assert!(snapshots.contains_key(&snapshot), "{snapshot}, occupied by {}, is gone", row.id);
            expected.insert(keys::occupancy(&snapshot, &row.id));
        }
    }
    for row in rows::<TemplateRow>(&entries, "template/") {
        expected.insert(keys::template(&row.id));
        expected.insert(keys::timed(&keys::templates(&row.team), row.created_unix_ms, &row.id));
        if let Some(alias) = &row.alias {
            let key = keys::alias(&row.team, alias);
            let holder: TemplateId = wire::decode_id(entries.get(&key).expect("an alias's row")).expect("an id");
            assert_eq!(holder, row.id, "{alias} says it is another's");
            expected.insert(key);
        }
        if let Some(snapshot) = &row.snapshot_id {
            let snapshot = snapshots.get(snapshot).expect("a template's snapshot exists");
            assert!(snapshot.internal && !snapshot.condemned, "{snapshot:?}");
        }
    }
    for row in rows::<Team>(&entries, "team/") {
        expected.insert(keys::team(&row.id));
    }
    for row in rows::<PackRow>(&entries, keys::PACKS) {
        expected.insert(keys::pack(&row.id));
        if row.state == PackState::Gone {
            expected.insert(keys::timed(keys::TOMBSTONES, row.since_unix_ms, &row.id));
        }
    }
    // What stands for itself.
    let alone = ["writer/", "lease/", "orphan/", "deployment"];
    expected
        .extend(entries.keys().filter(|key| alone.iter().any(|prefix| key.starts_with(prefix.as_bytes()))).cloned());
    for key in entries.keys().filter(|key| key.starts_with(b"idempotency/")) {
        let row: IdempotencyRow = wire::decode(&entries[key]).expect("decodes");
        let text = std::str::from_utf8(key).expect("text").strip_prefix("idempotency/").expect("filtered");
        expected.insert(format!("{}{}/{text}", keys::IDEMPOTENT_SINCE, keys::time(row.created_unix_ms)).into_bytes());
        expected.insert(key.clone());
    }
    let actual: BTreeSet<Vec<u8>> = entries.into_keys().collect();
    let text = |keys: Vec<&Vec<u8>>| keys.into_iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
    let missing: Vec<String> = text(expected.difference(&actual).collect());
    let left_over: Vec<String> = text(actual.difference(&expected).collect());
    assert!(missing.is_empty() && left_over.is_empty(), "missing {missing:?}, left over {left_over:?}");
    (snapshots.len(), sandboxes.len())
}

/// Whether any snapshot is condemned while nothing occupies it.
pub(super) async fn condemned_unoccupied(catalog: &Catalog) -> Vec<SnapshotId> {
    let occupied: BTreeSet<SnapshotId> =
        catalog.occupancy_rows().await.expect("reads").into_iter().map(|(snapshot, _)| snapshot).collect();
    let entries = catalog.scan(keys::under(keys::CONDEMNED)).await.expect("reads");
    let condemned = entries.iter().map(|entry| wire::id_of_key(&entry.key).expect("an id"));
    condemned.filter(|id| !occupied.contains(id)).collect()
}

/// Every sandbox there is, of whatever team.
pub(super) async fn all_sandboxes(catalog: &Catalog) -> Vec<(TeamId, SandboxId)> {
    let entries = catalog.scan(keys::under("sandbox/")).await.expect("reads");
    let rows = entries.iter().map(|entry| wire::decode::<SandboxRow>(entry).expect("decodes"));
    rows.map(|row| (row.team, row.id)).collect()
}
