//! What people and programs get to read.

use snapyard_proto::v1::{MemoryImageStats, Shape, StoreStats, VmStats};

use super::*;

const NOW: UnixMs = 1_800_000_000_000;

fn sandbox() -> Sandbox {
    Sandbox {
        id: "abc123".into(),
        template_id: "tpl-00".into(),
        alias: "base".into(),
        state: SandboxState::Snapshotting.into(),
        started_unix_ms: NOW - 90_000,
        ends_unix_ms: NOW + 3 * 3_600_000,
        shape: Some(Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 2 << 30 }),
        metadata: [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())].into(),
        access_token: "secret".into(),
        ..Default::default()
    }
}

fn snapshot() -> Snapshot {
    Snapshot {
        id: "5c0e9f3c-0000-4000-8000-000000000000".into(),
        names: vec!["default/v1:default".into()],
        created_unix_ms: NOW - 2 * 86_400_000,
        expires_unix_ms: 0,
        new_bytes: 3 << 20,
        remote_status: RemoteStatus::Ready.into(),
        ..Default::default()
    }
}

#[test]
fn spans_have_one_unit() {
    assert_eq!(ago(NOW, NOW + 5000), "0 s ago", "a clock that is behind");
    assert_eq!(ago(NOW, NOW - 59_999), "59 s ago");
    assert_eq!(ago(NOW, NOW - 60_000), "1 min ago");
    assert_eq!(ago(NOW, NOW - 47 * 3_600_000), "47 h ago");
    assert_eq!(until(NOW, NOW + 7 * 86_400_000), "in 7 d");
    assert_eq!(until(NOW, NOW), "now");
    assert_eq!(until(NOW, 0), "never");
}

#[test]
fn a_sandbox_is_shown_with_its_true_state() {
    assert_eq!(
        render(&sandbox_table(&[sandbox()], NOW)),
        "SANDBOX  STATE         FROM  STARTED    ENDS    CPU  MEMORY      METADATA\n\
         abc123   snapshotting  base  1 min ago  in 3 h  2    512.00 MiB  a=1 b=2\n"
    );
}

#[test]
fn a_lost_sandbox_says_why() {
    let lost = Sandbox { state: SandboxState::Lost.into(), lost_reason: "no good copy".into(), ..sandbox() };
    assert!(render(&sandbox_table(&[lost], NOW)).contains("lost: no good copy"));
}

#[test]
fn json_has_units_and_nulls_and_no_secrets() {
    let json = sandbox_json(&Sandbox { ends_unix_ms: 0, ..sandbox() });
    assert_eq!(json["memory_bytes"], 512 << 20);
    assert_eq!(json["started_at"], "2027-01-15T07:58:30Z");
    assert_eq!(json["ends_at"], Value::Null);
    assert!(!json.to_string().contains("secret"));
    let json = snapshot_json(&snapshot());
    assert_eq!(json["remote_status"], "ready");
    assert_eq!(json["expires_at"], Value::Null);
}

#[test]
fn snapshots_are_listed_with_what_they_cost() {
    let text = render(&snapshot_table(&[snapshot(), Snapshot { names: vec![], ..snapshot() }], NOW));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[1].contains("default/v1:default") && lines[1].ends_with("ready"), "{text}");
    assert!(lines[1].contains("3.00 MiB") && lines[1].contains("2 d ago") && lines[1].contains("never"), "{text}");
    assert!(lines[2].contains("  -  "), "an unnamed one has a dash: {text}");
    assert!(render(&snapshot_facts(&snapshot(), NOW)).contains("added to the store"));
}

#[test]
fn statistics_of_an_empty_node_divide_by_nothing() {
    let tables = stats_tables(&NodeStats::default());
    assert_eq!(tables.len(), 1);
    assert!(render(&tables[0]).contains("0, 0 found here (-)"));
}

#[test]
fn statistics_show_images_and_vmms() {
    let stats = NodeStats {
        node_id: "n1".into(),
        store: Some(StoreStats { chunks_new: 1, chunks_deduplicated: 3, ..Default::default() }),
        images: vec![MemoryImageStats { snapshot_id: "s".into(), size_bytes: 1000, filled_bytes: 25, guests: 8 }],
        vms: vec![VmStats { pid: 42, private_bytes: 1 << 20, ..Default::default() }],
        ..Default::default()
    };
    let text: String = stats_tables(&stats).iter().map(render).collect();
    assert!(text.contains("4 chunks, 3 known already (75.0 %)"), "{text}");
    assert!(text.contains("2.5 %"), "{text}");
    assert!(text.contains("(waiting)"), "{text}");
    let json = stats_json(&stats, 2);
    assert_eq!(json["vms"][0]["sandbox_id"], Value::Null);
    assert_eq!(json["reservations"], 2);
    assert_eq!(json["store"]["chunks_deduplicated"], 3);
}
