//! Collections, usage and checks, for people and programs.

use comfy_table::{Cell, Table};
use serde_json::{Value, json};
use snapyard_proto::v1::{CheckReport, CollectGarbageResponse, Tally, Usage};

use super::{bytes, facts_table, plain_table, share};

/// What a collection did, or would do.
pub fn gc_table(report: &CollectGarbageResponse) -> Table {
    let packs = |tally: Option<Tally>| {
        let Tally { count, bytes: size } = tally.unwrap_or_default();
        format!("{count} packs, {}", bytes(size))
    };
    let mut facts = vec![
        ("snapshots", report.snapshots.to_string()),
        ("in use", packs(report.used)),
        ("of no use, marked", packs(report.condemned)),
        ("of use after all", packs(report.restored)),
        ("of no use for long", packs(report.doomed)),
        ("deleted", packs(report.deleted)),
    ];
    if let Some(done) = report.repacked.filter(|done| done.snapshots_amended > 0) {
        let copied = format!("{} packs, {} written", done.packs_copied, bytes(done.bytes_written));
        facts.push(("mostly dead, copied", copied));
        facts.push(("named no more", format!("{} packs, {}", done.packs_dropped, bytes(done.bytes_dropped))));
    }
    if !report.not_repacked.is_empty() {
        facts.push(("not rewritten", report.not_repacked.clone()));
    }
    // What is not so as a rule is shown when it is.
    for (name, tally) in [
        ("not deleted, tried again", report.delete_failed),
        ("found without an owner", report.adopted),
        ("deleted once more", report.deleted_again),
        ("lone manifests, marked", report.orphans_marked),
        ("lone manifests, deleted", report.orphans_deleted),
    ] {
        if tally.is_some_and(|tally| tally.count > 0) {
            facts.push((name, packs(tally).replace("packs", "objects")));
        }
    }
    for (name, count) in [
        ("objects that are not ours", report.strange_keys),
        ("tombstones removed", report.purged),
        ("writers counted as dead", report.writers_ended),
        ("left to the next time", report.unsettled),
        ("NAMED THOUGH THEY LEAVE", report.named_while_leaving),
    ] {
        if count > 0 {
            facts.push((name, count.to_string()));
        }
    }
    if report.dry_run {
        facts.push(("", "nothing was done: it was a dry run".to_owned()));
    }
    facts_table(facts)
}

/// The same for programs.
pub fn gc_json(report: &CollectGarbageResponse) -> Value {
    let tally = |tally: Option<Tally>| {
        let Tally { count, bytes } = tally.unwrap_or_default();
        json!({ "count": count, "bytes": bytes })
    };
    json!({
        "dry_run": report.dry_run,
        "snapshots": report.snapshots,
        "used": tally(report.used),
        "condemned": tally(report.condemned),
        "restored": tally(report.restored),
        "doomed": tally(report.doomed),
        "deleted": tally(report.deleted),
        "delete_failed": tally(report.delete_failed),
        "adopted": tally(report.adopted),
        "deleted_again": tally(report.deleted_again),
        "orphans_marked": tally(report.orphans_marked),
        "orphans_deleted": tally(report.orphans_deleted),
        "strange_keys": report.strange_keys,
        "purged": report.purged,
        "writers_ended": report.writers_ended,
        "unsettled": report.unsettled,
        "named_while_leaving": report.named_while_leaving,
        "repacked": report.repacked.map(|done| json!({
            "packs_copied": done.packs_copied,
            "bytes_written": done.bytes_written,
            "packs_dropped": done.packs_dropped,
            "bytes_dropped": done.bytes_dropped,
            "snapshots_amended": done.snapshots_amended,
        })),
        "not_repacked": report.not_repacked,
    })
}

/// What all snapshots take together, and each of them.
pub fn usage_tables(usage: &Usage) -> Vec<Table> {
    let mut tables = vec![facts_table(vec![
        ("data of all snapshots", format!("{} that are not zero", bytes(usage.data_bytes))),
        ("distinct", format!("{} chunks, index included", usage.chunks)),
        ("stored for them", bytes(usage.stored_bytes)),
        ("of which needed", format!("{} ({})", bytes(usage.live_bytes), share(usage.live_bytes, usage.stored_bytes))),
        ("stored of the data", share(usage.stored_bytes, usage.data_bytes)),
    ])];
    if !usage.snapshots.is_empty() {
        let mut each = plain_table(&["SNAPSHOT", "TEAM", "DATA", "ITS OWN", "OF ITS DATA"]);
        for snapshot in &usage.snapshots {
            each.add_row([
                Cell::new(&snapshot.snapshot_id),
                Cell::new(&snapshot.team),
                Cell::new(bytes(snapshot.data_bytes)),
                Cell::new(bytes(snapshot.exclusive_bytes)),
                Cell::new(share(snapshot.exclusive_bytes, snapshot.data_bytes)),
            ]);
        }
        tables.push(each);
    }
    tables
}

/// The same for programs. `exclusive_bytes`: compressed, what deleting the snapshot frees.
pub fn usage_json(usage: &Usage) -> Value {
    let snapshots = usage.snapshots.iter().map(|snapshot| {
        json!({
            "snapshot_id": snapshot.snapshot_id,
            "team": snapshot.team,
            "data_bytes": snapshot.data_bytes,
            "exclusive_bytes": snapshot.exclusive_bytes,
        })
    });
    json!({
        "snapshots": snapshots.collect::<Vec<Value>>(),
        "chunks": usage.chunks,
        "data_bytes": usage.data_bytes,
        "stored_bytes": usage.stored_bytes,
        "live_bytes": usage.live_bytes,
    })
}

/// What a check found.
pub fn fsck_tables(report: &CheckReport) -> Vec<Table> {
    let mut facts = vec![
        ("snapshots", report.snapshots.to_string()),
        ("read", format!("{} packs, {}", report.packs, bytes(report.bytes))),
        ("chunks needed", report.chunks.to_string()),
        ("needed by nobody", format!("{} chunks", report.unreachable_chunks)),
        ("without a good copy", format!("{} chunks", report.missing.len())),
    ];
    if report.repaired_chunks + report.repaired_snapshots > 0 {
        let repaired = format!("{} chunks, for {} snapshots", report.repaired_chunks, report.repaired_snapshots);
        facts.push(("repaired", repaired));
    }
    let mut tables = vec![facts_table(facts)];
    if !report.bad_packs.is_empty() {
        let mut packs = plain_table(&["BAD PACK", "WHY"]);
        for pack in &report.bad_packs {
            packs.add_row([&pack.pack_id, &pack.reason]);
        }
        tables.push(packs);
    }
    if !report.missing.is_empty() {
        let mut chunks = plain_table(&["MISSING CHUNK", "HITS SNAPSHOT"]);
        for chunk in &report.missing {
            chunks.add_row([&chunk.chunk_id, &chunk.snapshot_ids.join(" ")]);
        }
        tables.push(chunks);
    }
    tables
}

/// The same for programs.
pub fn fsck_json(report: &CheckReport) -> Value {
    let bad = report.bad_packs.iter().map(|pack| json!({ "pack_id": pack.pack_id, "reason": pack.reason }));
    let missing =
        report.missing.iter().map(|chunk| json!({ "chunk_id": chunk.chunk_id, "snapshot_ids": chunk.snapshot_ids }));
    json!({
        "snapshots": report.snapshots,
        "packs": report.packs,
        "bytes": report.bytes,
        "chunks": report.chunks,
        "unreachable_chunks": report.unreachable_chunks,
        "bad_packs": bad.collect::<Vec<Value>>(),
        "missing": missing.collect::<Vec<Value>>(),
        "repaired_chunks": report.repaired_chunks,
        "repaired_snapshots": report.repaired_snapshots,
    })
}
