//! Tests of the catalog on the embedded engine. This file: what they share.

mod leases;
mod listing;
mod packs;
mod pausing;
mod races;
mod retention;
mod sandboxes;
mod snapshots;
mod state;
mod templates;
mod working_sets;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::kv::KeyValue;
use super::names::SnapshotName;
use super::rocks::RocksKv;
use super::*;
use crate::clock::ManualClock;
use crate::ids::{NodeId, PackId, SandboxId, SnapshotId, TeamId, TemplateId};
use crate::pack::PackRef;

const START_MS: i64 = 1_800_000_000_000;
const SHAPE: Shape = Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 1 << 30 };

struct Fixture {
    catalog: Arc<Catalog>,
    kv: Arc<dyn KeyValue>,
    clock: Arc<ManualClock>,
    team: TeamId,
    dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let kv: Arc<dyn KeyValue> = Arc::new(RocksKv::open(&dir.path().join("catalog")).expect("opens"));
        let clock = Arc::new(ManualClock::new(START_MS));
        let catalog = Catalog::open(Arc::clone(&kv), clock.clone()).await.expect("opens");
        let team = TeamId::new("default").expect("an id");
        catalog.ensure_team(&team).await.expect("a team");
        Self { catalog, kv, clock, team, dir }
    }

    fn snapshot(&self, name: Option<&str>) -> SnapshotCommit {
        snapshot(&self.team, self.clock.now_unix_ms(), name)
    }

    fn sandbox(&self, id: &str, snapshot: SnapshotId) -> SandboxRow {
        sandbox(&self.team, self.clock.now_unix_ms(), id, snapshot)
    }

    async fn commit(&self, commit: &SnapshotCommit) -> SnapshotRow {
        match self.catalog.commit_snapshot(commit).await.expect("commits") {
            Committed::New(row) => row,
            Committed::Replayed(row) => panic!("{} was there", row.id),
        }
    }

    async fn create(&self, row: &SandboxRow) {
        assert_eq!(self.catalog.create_sandbox(row).await.expect("creates"), Committed::New(row.clone()));
    }

    /// The state must be consistent as a whole.
    async fn check(&self) {
        state::check(self.kv.as_ref()).await;
    }

    /// What another process finds in the directory if this one is killed now.
    async fn after_a_kill(&self) -> (Arc<Catalog>, Arc<dyn KeyValue>) {
        let copy = self.dir.path().join(format!("killed-{}", SnapshotId::random()));
        copy_dir(&self.dir.path().join("catalog"), &copy);
        let kv: Arc<dyn KeyValue> = Arc::new(RocksKv::open(&copy).expect("opens what a kill leaves"));
        (Catalog::open(Arc::clone(&kv), self.clock.clone()).await.expect("opens"), kv)
    }
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("creates");
    for entry in std::fs::read_dir(from).expect("lists") {
        let entry = entry.expect("lists");
        if entry.file_name() != "LOCK" {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copies");
        }
    }
}

fn node() -> NodeId {
    NodeId::new("node-1").expect("an id")
}

fn sandbox_id(text: &str) -> SandboxId {
    SandboxId::new(text).expect("an id")
}

fn pack(byte: u8) -> PackRef {
    PackRef { id: PackId([byte; 32]), size_bytes: 1000, frames: 2, chunks: 10 }
}

fn request(key: &str, digest: &str) -> Option<Idempotency> {
    Some(Idempotency { key: key.into(), digest: digest.as_bytes().to_vec() })
}

fn snapshot(team: &TeamId, now: i64, name: Option<&str>) -> SnapshotCommit {
    let id = SnapshotId::random();
    SnapshotCommit {
        row: SnapshotRow {
            id,
            team: team.clone(),
            name: name.map(|name| SnapshotName::parse(name).expect("a name")),
            sandbox_id: Some(sandbox_id("source")),
            created_unix_ms: now,
            expires_unix_ms: Some(now + 7 * 24 * 3600 * 1000),
            shape: SHAPE,
            remote_status: RemoteStatus::Pending,
            origin_node: node(),
            logical_bytes: SHAPE.memory_bytes + SHAPE.disk_bytes,
            new_bytes: 4096,
            chunks_new: 3,
            chunks_deduplicated: 5,
            pause_us: 12_000,
            parent: None,
            internal: false,
            condemned: false,
            idempotency: None,
        },
        manifest: Bytes::from(format!("manifest of {id}")),
        packs: vec![pack(1)],
        staged: (0..=9).map(|byte| pack(byte).id).collect(),
        writer: None,
    }
}

fn internal(team: &TeamId, now: i64) -> SnapshotCommit {
    let mut commit = snapshot(team, now, None);
    commit.row.internal = true;
    commit.row.sandbox_id = None;
    commit.row.expires_unix_ms = None;
    commit
}

fn template(team: &TeamId, now: i64, id: u64, alias: Option<&str>) -> TemplateRow {
    TemplateRow {
        id: TemplateId::from_random(id),
        alias: alias.map(str::to_owned),
        team: team.clone(),
        snapshot_id: None,
        shape: SHAPE,
        created_unix_ms: now,
        build_status: BuildStatus::Building,
        build_message: String::new(),
    }
}

fn sandbox(team: &TeamId, now: i64, id: &str, snapshot: SnapshotId) -> SandboxRow {
    SandboxRow {
        id: sandbox_id(id),
        team: team.clone(),
        template_id: snapshot.to_string(),
        env: BTreeMap::new(),
        alias: String::new(),
        snapshot_id: snapshot,
        moving_to: None,
        state: SandboxState::Running,
        started_unix_ms: now,
        ends_unix_ms: Some(now + 300_000),
        shape: SHAPE,
        metadata: BTreeMap::new(),
        node_id: node(),
        node_url: "http://127.0.0.1:1".into(),
        gateway: "127.0.0.1:2".into(),
        access_token: String::new(),
        agent_version: "0.1.0".into(),
        auto_pause: false,
        auto_resume: false,
        lost_reason: String::new(),
        idempotency: None,
    }
}
