//! What commands print: tables for people, JSON for programs. Pure but for [`print_json`] and [`print_table`].
//!
//! JSON keys are snake_case with the unit in the name; times are RFC 3339 in UTC; what does not apply is `null`.

pub mod storage;

use std::io::{self, Write as _};

use comfy_table::{Cell, ContentArrangement, Table};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use snapyard_proto::v1::{NodeStats, RemoteStatus, Sandbox, SandboxState, Snapshot, Template};

/// Milliseconds since 1970, as everywhere on the wire; 0 means "never" where an end is meant.
pub type UnixMs = i64;

/// The wall clock; the only place that reads it.
pub fn now() -> UnixMs {
    jiff::Timestamp::now().as_millisecond()
}

/// RFC 3339; `null` for 0 or what is no time.
fn time_json(ms: UnixMs) -> Value {
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(time) if ms != 0 => json!(time.to_string()),
        _ => Value::Null,
    }
}

/// `null` for an empty string.
fn text_json(text: &str) -> Value {
    if text.is_empty() { Value::Null } else { json!(text) }
}

/// A duration with its largest unit only: exact enough for a table, and short.
fn span(ms: i64) -> String {
    let s = ms / 1000;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min", s / 60),
        3600..172_800 => format!("{} h", s / 3600),
        _ => format!("{} d", s / 86400),
    }
}

/// How long ago.
pub fn ago(now: UnixMs, then: UnixMs) -> String {
    format!("{} ago", span((now - then).max(0)))
}

/// How long still, for an end that may be "never".
pub fn until(now: UnixMs, end: UnixMs) -> String {
    match end {
        0 => "never".into(),
        end if end <= now => "now".into(),
        end => format!("in {}", span(end - now)),
    }
}

/// Bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    HumanBytes(count).to_string()
}

/// The true state, as one word.
pub fn state_word(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Unspecified => "unknown",
        SandboxState::Creating => "creating",
        SandboxState::Running => "running",
        SandboxState::Snapshotting => "snapshotting",
        SandboxState::Pausing => "pausing",
        SandboxState::Paused => "paused",
        SandboxState::Resuming => "resuming",
        SandboxState::Killed => "killed",
        SandboxState::Lost => "lost",
    }
}

/// Where a snapshot's bytes are, as one word of the reference.
pub fn remote_word(status: RemoteStatus) -> &'static str {
    match status {
        RemoteStatus::Unspecified => "unknown",
        RemoteStatus::Pending => "pending",
        RemoteStatus::Inprogress => "inprogress",
        RemoteStatus::Ready => "ready",
        RemoteStatus::Failed => "failed",
    }
}

fn plain_table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().copied());
    table
}

/// Removes the outer padding that a borderless table leaves at the start and the end of its lines.
pub fn render(table: &Table) -> String {
    table.to_string().lines().map(|line| line.strip_prefix(' ').unwrap_or(line).trim_end()).fold(
        String::new(),
        |mut text, line| {
            text.push_str(line);
            text.push('\n');
            text
        },
    )
}

/// Two columns: what, and its value.
fn facts_table(facts: Vec<(&str, String)>) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    for (name, value) in facts {
        table.add_row([name, &value]);
    }
    table
}

/// `-` for an empty string, so that a column never looks cut off.
fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

/// Table of `sandbox ls`.
pub fn sandbox_table(sandboxes: &[Sandbox], now: UnixMs) -> Table {
    let mut table = plain_table(&["SANDBOX", "STATE", "FROM", "STARTED", "ENDS", "CPU", "MEMORY", "METADATA"]);
    for sandbox in sandboxes {
        let shape = sandbox.shape.unwrap_or_default();
        let mut metadata: Vec<String> = sandbox.metadata.iter().map(|(k, v)| format!("{k}={v}")).collect();
        metadata.sort();
        let from = if sandbox.alias.is_empty() { &sandbox.template_id } else { &sandbox.alias };
        let state = match (sandbox.state(), sandbox.lost_reason.as_str()) {
            (state, "") => state_word(state).to_owned(),
            (state, reason) => format!("{}: {reason}", state_word(state)),
        };
        table.add_row([
            Cell::new(&sandbox.id),
            Cell::new(state),
            Cell::new(or_dash(from)),
            Cell::new(ago(now, sandbox.started_unix_ms)),
            Cell::new(until(now, sandbox.ends_unix_ms)),
            Cell::new(shape.vcpus),
            Cell::new(bytes(shape.memory_bytes)),
            Cell::new(or_dash(&metadata.join(" "))),
        ]);
    }
    table
}

/// One sandbox for programs.
pub fn sandbox_json(sandbox: &Sandbox) -> Value {
    let shape = sandbox.shape.unwrap_or_default();
    json!({
        "sandbox_id": sandbox.id,
        "state": state_word(sandbox.state()),
        "lost_reason": text_json(&sandbox.lost_reason),
        "template_id": text_json(&sandbox.template_id),
        "alias": text_json(&sandbox.alias),
        "snapshot_id": text_json(&sandbox.snapshot_id),
        "started_at": time_json(sandbox.started_unix_ms),
        "ends_at": time_json(sandbox.ends_unix_ms),
        "vcpus": shape.vcpus,
        "memory_bytes": shape.memory_bytes,
        "disk_bytes": shape.disk_bytes,
        "metadata": sandbox.metadata,
        "node_id": sandbox.node_id,
        "gateway": sandbox.gateway,
    })
}

/// Table of `snapshot ls`.
pub fn snapshot_table(snapshots: &[Snapshot], now: UnixMs) -> Table {
    let mut table = plain_table(&["SNAPSHOT", "NAME", "OF SANDBOX", "CREATED", "EXPIRES", "ADDED", "REMOTE"]);
    for snapshot in snapshots {
        table.add_row([
            Cell::new(&snapshot.id),
            Cell::new(or_dash(&snapshot.names.join(" "))),
            Cell::new(or_dash(&snapshot.sandbox_id)),
            Cell::new(ago(now, snapshot.created_unix_ms)),
            Cell::new(until(now, snapshot.expires_unix_ms)),
            Cell::new(bytes(snapshot.new_bytes)),
            Cell::new(remote_word(snapshot.remote_status())),
        ]);
    }
    table
}

/// `snapshot info`.
pub fn snapshot_facts(snapshot: &Snapshot, now: UnixMs) -> Table {
    let shape = snapshot.shape.unwrap_or_default();
    let time = |ms| time_json(ms).as_str().unwrap_or("-").to_owned();
    let chunks = snapshot.chunks_new + snapshot.chunks_deduplicated;
    facts_table(vec![
        ("snapshot", snapshot.id.clone()),
        ("name", or_dash(&snapshot.names.join(" ")).to_owned()),
        ("team", snapshot.team.clone()),
        ("of sandbox", or_dash(&snapshot.sandbox_id).to_owned()),
        ("parent", or_dash(&snapshot.parent_snapshot_id).to_owned()),
        ("created", format!("{} ({})", time(snapshot.created_unix_ms), ago(now, snapshot.created_unix_ms))),
        ("expires", format!("{} ({})", time(snapshot.expires_unix_ms), until(now, snapshot.expires_unix_ms))),
        ("machine", format!("{} vCPU, {} memory", shape.vcpus, bytes(shape.memory_bytes))),
        ("disk", bytes(shape.disk_bytes)),
        ("source stood still", format!("{:.1} ms", f64::from(snapshot.pause_us) / 1000.0)),
        ("logical size", bytes(snapshot.logical_bytes)),
        ("added to the store", bytes(snapshot.new_bytes)),
        ("chunks", format!("{chunks} put, {} new, {} known", snapshot.chunks_new, snapshot.chunks_deduplicated)),
        ("taken on node", or_dash(&snapshot.origin_node).to_owned()),
        ("object store", remote_word(snapshot.remote_status()).to_owned()),
    ])
}

/// One snapshot for programs.
pub fn snapshot_json(snapshot: &Snapshot) -> Value {
    let shape = snapshot.shape.unwrap_or_default();
    json!({
        "snapshot_id": snapshot.id,
        "names": snapshot.names,
        "team": snapshot.team,
        "sandbox_id": text_json(&snapshot.sandbox_id),
        "parent_snapshot_id": text_json(&snapshot.parent_snapshot_id),
        "created_at": time_json(snapshot.created_unix_ms),
        "expires_at": time_json(snapshot.expires_unix_ms),
        "vcpus": shape.vcpus,
        "memory_bytes": shape.memory_bytes,
        "disk_bytes": shape.disk_bytes,
        "pause_us": snapshot.pause_us,
        "logical_bytes": snapshot.logical_bytes,
        "new_bytes": snapshot.new_bytes,
        "chunks_new": snapshot.chunks_new,
        "chunks_deduplicated": snapshot.chunks_deduplicated,
        "origin_node": snapshot.origin_node,
        "remote_status": remote_word(snapshot.remote_status()),
    })
}

/// Table of `template ls`.
pub fn template_table(templates: &[Template], now: UnixMs) -> Table {
    let mut table = plain_table(&["TEMPLATE", "ALIAS", "BUILD", "CREATED", "CPU", "MEMORY", "DISK"]);
    for template in templates {
        let shape = template.shape.unwrap_or_default();
        let build = match template.build_message.as_str() {
            "" => template.build_status.clone(),
            message => format!("{}: {message}", template.build_status),
        };
        table.add_row([
            Cell::new(&template.id),
            Cell::new(or_dash(&template.alias)),
            Cell::new(or_dash(&build)),
            Cell::new(ago(now, template.created_unix_ms)),
            Cell::new(shape.vcpus),
            Cell::new(bytes(shape.memory_bytes)),
            Cell::new(bytes(shape.disk_bytes)),
        ]);
    }
    table
}

/// One template for programs.
pub fn template_json(template: &Template) -> Value {
    let shape = template.shape.unwrap_or_default();
    json!({
        "template_id": template.id,
        "alias": text_json(&template.alias),
        "team": template.team,
        "snapshot_id": text_json(&template.snapshot_id),
        "build_status": template.build_status,
        "build_message": text_json(&template.build_message),
        "created_at": time_json(template.created_unix_ms),
        "vcpus": shape.vcpus,
        "memory_bytes": shape.memory_bytes,
        "disk_bytes": shape.disk_bytes,
    })
}

/// Part of `whole`, in per cent; `-` of nothing.
fn share(part: u64, whole: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    match whole {
        0 => "-".into(),
        whole => format!("{:.1} %", 100.0 * part as f64 / whole as f64),
    }
}

/// The tables of `store stats`: the store, its read path, memory images, VMMs.
pub fn stats_tables(stats: &NodeStats) -> Vec<Table> {
    let store = stats.store.clone().unwrap_or_default();
    let seen = store.chunks_new + store.chunks_deduplicated;
    let known = share(store.chunks_deduplicated, seen);
    let reads = store.cache_hits + store.cache_misses;
    let hit = share(store.cache_hits, reads);
    let mut tables = vec![facts_table(vec![
        ("node", format!("{} ({}, {})", stats.node_id, stats.vmm_version, stats.accelerator)),
        (
            "guests",
            format!("{} running, {} on standby, {} VMMs waiting", stats.sandboxes, stats.standbys, stats.pooled_vmms),
        ),
        ("snapshots", format!("{}, {} logical", store.snapshots, bytes(store.logical_bytes))),
        ("chunks known here", store.chunks.to_string()),
        ("put since start", format!("{seen} chunks, {} known already ({known})", store.chunks_deduplicated)),
        ("new since start", format!("{} chunks, {} compressed", store.chunks_new, bytes(store.bytes_new))),
        ("chunks read", format!("{reads}, {} found here ({hit})", store.cache_hits)),
        ("cache", format!("{}, {} dropped to make room", bytes(store.cache_bytes), bytes(store.cache_evicted_bytes))),
        ("object store", format!("{} objects, {}", store.s3_objects, bytes(store.s3_bytes))),
        ("read from it", format!("{} in {} requests", bytes(store.s3_bytes_read), store.s3_gets)),
        ("written to it", format!("{} in {} requests", bytes(store.s3_bytes_written), store.s3_puts)),
        ("packs to upload", store.packs_staged.to_string()),
        ("bad copies met", store.bad_copies.to_string()),
    ])];
    if store.tiers.iter().any(|tier| tier.hits > 0) {
        let mut tiers = plain_table(&["READ FROM", "READS", "BYTES", "P50 UNDER", "P99 UNDER"]);
        for tier in &store.tiers {
            tiers.add_row([
                Cell::new(&tier.name),
                Cell::new(tier.hits),
                Cell::new(bytes(tier.bytes)),
                Cell::new(format!("{} us", tier.p50_us)),
                Cell::new(format!("{} us", tier.p99_us)),
            ]);
        }
        tables.push(tiers);
    }
    if !stats.images.is_empty() {
        let mut images = plain_table(&["MEMORY IMAGE OF", "SIZE", "FILLED", "", "GUESTS"]);
        for image in &stats.images {
            images.add_row([
                Cell::new(&image.snapshot_id),
                Cell::new(bytes(image.size_bytes)),
                Cell::new(bytes(image.filled_bytes)),
                Cell::new(share(image.filled_bytes, image.size_bytes)),
                Cell::new(image.guests),
            ]);
        }
        tables.push(images);
    }
    if !stats.vms.is_empty() {
        let mut vms = plain_table(&["VMM PID", "SANDBOX", "PRIVATE", "OF GUEST", "FAULTS"]);
        for vm in &stats.vms {
            vms.add_row([
                Cell::new(vm.pid),
                Cell::new(match &*vm.sandbox_id {
                    "" if vm.standby => "(standby)",
                    "" => "(waiting)",
                    id => id,
                }),
                Cell::new(bytes(vm.private_bytes)),
                Cell::new(bytes(vm.guest_private_bytes)),
                Cell::new(vm.faults),
            ]);
        }
        tables.push(vms);
    }
    tables
}

/// `store stats` for programs; `reservations` are the scheduler's, for creates under way.
pub fn stats_json(stats: &NodeStats, reservations: u32) -> Value {
    let store = stats.store.clone().unwrap_or_default();
    let tiers: Vec<Value> = store
        .tiers
        .iter()
        .map(|tier| {
            json!({
                "name": tier.name,
                "hits": tier.hits,
                "bytes": tier.bytes,
                "p50_us": tier.p50_us,
                "p99_us": tier.p99_us,
            })
        })
        .collect();
    let images: Vec<Value> = stats
        .images
        .iter()
        .map(|image| {
            json!({
                "snapshot_id": image.snapshot_id,
                "size_bytes": image.size_bytes,
                "filled_bytes": image.filled_bytes,
                "guests": image.guests,
            })
        })
        .collect();
    let vms: Vec<Value> = stats
        .vms
        .iter()
        .map(|vm| {
            json!({
                "sandbox_id": text_json(&vm.sandbox_id),
                "pid": vm.pid,
                "private_bytes": vm.private_bytes,
                "guest_private_bytes": vm.guest_private_bytes,
                "faults": vm.faults,
                "standby": vm.standby,
            })
        })
        .collect();
    json!({
        "node_id": stats.node_id,
        "accelerator": stats.accelerator,
        "vmm_version": stats.vmm_version,
        "sandboxes": stats.sandboxes,
        "pooled_vmms": stats.pooled_vmms,
        "standbys": stats.standbys,
        "occupancy_rows": stats.occupancies,
        "reservations": reservations,
        "images": images,
        "vms": vms,
        "store": {
            "snapshots": store.snapshots,
            "logical_bytes": store.logical_bytes,
            "chunks": store.chunks,
            "chunks_new": store.chunks_new,
            "chunks_deduplicated": store.chunks_deduplicated,
            "bytes_new": store.bytes_new,
            "cache_bytes": store.cache_bytes,
            "cache_hits": store.cache_hits,
            "cache_misses": store.cache_misses,
            "s3_gets": store.s3_gets,
            "s3_puts": store.s3_puts,
            "s3_bytes_read": store.s3_bytes_read,
            "s3_bytes_written": store.s3_bytes_written,
            "s3_objects": store.s3_objects,
            "s3_bytes": store.s3_bytes,
            "packs_staged": store.packs_staged,
            "bad_copies": store.bad_copies,
            "cache_evicted_bytes": store.cache_evicted_bytes,
            "cache_promoted": store.cache_promoted,
            "tiers": tiers,
        },
    })
}

/// Prints one JSON value on a line of its own.
pub fn print_json(value: &Value) -> io::Result<()> {
    writeln!(io::stdout(), "{value}")
}

/// Prints one line; unlike `println!`, a closed pipe is an error and no panic.
pub fn print_line(line: impl std::fmt::Display) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Prints a table.
pub fn print_table(table: &Table) -> io::Result<()> {
    io::stdout().write_all(render(table).as_bytes())
}

#[cfg(test)]
mod tests;
