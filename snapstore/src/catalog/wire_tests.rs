//! Rows in bytes: golden file, round trips, damage.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::catalog::idempotency::Made;
use crate::catalog::upkeep_rows::{DeploymentRow, LeaseHolder, LeaseRow, OrphanRow};
use crate::ids::{NodeId, SandboxId, TeamId, TemplateId};

const GOLDEN: &str = include_str!("golden/rows_v1.txt");

fn snapshot() -> SnapshotRow {
    SnapshotRow {
        id: SnapshotId::from_random([7; 16]),
        team: TeamId::new("default").expect("an id"),
        name: Some(SnapshotName::parse("short:v1").expect("a name")),
        sandbox_id: Some(SandboxId::new("s1").expect("an id")),
        created_unix_ms: 1_800_000_000_000,
        expires_unix_ms: Some(1_800_604_800_000),
        shape: Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 1 << 30 },
        remote_status: RemoteStatus::InProgress,
        origin_node: NodeId::new("node-1").expect("an id"),
        logical_bytes: (512 << 20) + (1 << 30),
        new_bytes: 4096,
        chunks_new: 3,
        chunks_deduplicated: 5,
        pause_us: 12_000,
        parent: Some(SnapshotId::from_random([8; 16])),
        internal: false,
        condemned: true,
        idempotency: Some(Idempotency { key: "k/1".into(), digest: vec![1, 2, 3] }),
    }
}

fn sandbox() -> SandboxRow {
    SandboxRow {
        id: SandboxId::new("s1").expect("an id"),
        team: TeamId::new("default").expect("an id"),
        template_id: "tpl-0000000000000001".into(),
        alias: "base".into(),
        snapshot_id: SnapshotId::from_random([7; 16]),
        moving_to: Some(SnapshotId::from_random([8; 16])),
        state: SandboxState::Paused,
        started_unix_ms: 1_800_000_000_000,
        ends_unix_ms: None,
        shape: Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 1 << 30 },
        metadata: BTreeMap::from([("a".into(), "1".into()), ("b".into(), "2".into())]),
        node_id: NodeId::new("node-1").expect("an id"),
        node_url: "http://127.0.0.1:1".into(),
        gateway: "127.0.0.1:2".into(),
        access_token: "secret".into(),
        env: std::collections::BTreeMap::new(),
        agent_version: "0.1.0".into(),
        auto_pause: true,
        auto_resume: true,
        lost_reason: "node gone".into(),
        idempotency: None,
    }
}

fn template() -> TemplateRow {
    TemplateRow {
        id: TemplateId::from_random(1),
        alias: Some("base".into()),
        team: TeamId::new("default").expect("an id"),
        snapshot_id: Some(SnapshotId::from_random([7; 16])),
        shape: Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 1 << 30 },
        created_unix_ms: 1_800_000_000_000,
        build_status: BuildStatus::Ready,
        build_message: "done".into(),
    }
}

fn team() -> Team {
    Team {
        id: TeamId::new("default").expect("an id"),
        name: Some(TeamName::parse("default").expect("a name")),
        dedup_key: DomainKey([9; 32]),
        created_unix_ms: 1_800_000_000_000,
    }
}

fn pack() -> PackRow {
    PackRow {
        id: PackId([5; 32]),
        size_bytes: 16 << 20,
        chunks: 700,
        state: PackState::Live,
        created_unix_ms: 1_800_000_000_000,
        since_unix_ms: 1_800_000_000_000,
    }
}

fn left(state: PackState) -> PackRow {
    PackRow { state, since_unix_ms: 1_800_000_060_000, ..pack() }
}

fn idempotency() -> IdempotencyRow {
    let object = Made::Sandbox(SandboxId::new("s1").expect("an id"));
    IdempotencyRow { digest: vec![1, 2, 3], object, created_unix_ms: 1_800_000_000_000 }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The row's line in the golden file; what that line holds must read as the row.
fn line<R: Row + PartialEq + std::fmt::Debug>(name: &str, row: &R) -> String {
    if let Some(golden) = GOLDEN.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')) {
        let bytes: Vec<u8> =
            (0..golden.len() / 2).map(|i| u8::from_str_radix(&golden[2 * i..2 * i + 2], 16).expect("hex")).collect();
        assert_eq!(&parse::<R>(&bytes).expect("a row that was stored reads"), row, "{name}");
    }
    format!("{name} {}\n", hex(&encode(row).expect("encodes")))
}

/// If this fails, rows that are stored already would not read any more, or older programs would not read new ones.
#[test]
fn the_layout_is_what_it_was() {
    let written = [
        line("team", &team()),
        line("snapshot", &snapshot()),
        line("pack", &pack()),
        line("sandbox", &sandbox()),
        line("template", &template()),
        line("idempotency", &idempotency()),
        line("condemned-pack", &left(PackState::Condemned)),
        line("doomed-pack", &left(PackState::Doomed)),
        line("gone-pack", &left(PackState::Gone)),
        line("lease", &LeaseRow { holder: LeaseHolder([3; 16]), expires_unix_ms: 1_800_000_060_000 }),
        line("orphan", &OrphanRow { first_seen_unix_ms: 1_800_000_060_000 }),
        line("deployment", &DeploymentRow { id: [4; 16] }),
    ];
    assert_eq!(written.concat(), GOLDEN);
}

#[test]
fn every_damaged_byte_is_noticed() {
    let bytes = encode(&snapshot()).expect("encodes");
    for i in 0..bytes.len() {
        let mut damaged = bytes.to_vec();
        damaged[i] ^= 1 << (i % 8);
        assert!(parse::<SnapshotRow>(&damaged).is_err(), "byte {i}");
        assert!(parse::<SnapshotRow>(&bytes[..i]).is_err(), "cut to {i}");
    }
    assert!(parse::<SandboxRow>(&bytes).is_err(), "another kind");
}

#[test]
fn a_row_has_a_largest_size() {
    let mut row = sandbox();
    row.metadata.insert("large".into(), "x".repeat(MAX_ROW_BYTES));
    assert!(matches!(encode(&row), Err(CatalogError::Invalid { .. })));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(parse::<SnapshotRow>(&bytes).is_err());
        // With a right head, so that the message is read too.
        let mut row = MAGIC.to_vec();
        row.extend_from_slice(&[SandboxRow::KIND, SandboxRow::VERSION]);
        row.extend_from_slice(&checksum(SandboxRow::KIND, SandboxRow::VERSION, &bytes));
        row.extend_from_slice(&bytes);
        prop_assert!(parse::<SandboxRow>(&row).is_err(), "no such message has every field that must be there");
    }
}
