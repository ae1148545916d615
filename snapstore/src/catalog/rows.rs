//! The rows of the catalog as values. How they lie in bytes is [`super::wire`]'s business.

use std::collections::BTreeMap;
use std::fmt;

use crate::ids::{DomainKey, NodeId, PackId, SandboxId, SnapshotId, TeamId, TemplateId};

use super::names::{FullName, SnapshotName, TeamName};

pub use crate::manifest::Shape;

/// A team: the owner of everything, and a dedup domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Team {
    /// Its id.
    pub id: TeamId,
    /// The first part of its snapshots' full names. A team without one can make only unnamed snapshots.
    pub name: Option<TeamName>,
    /// The key under which its chunks are hashed. Secret; lost, all its snapshots are.
    pub dedup_key: DomainKey,
    /// When it was first seen.
    pub created_unix_ms: i64,
}

impl Team {
    /// `team/short:tag`, or nothing for an unnamed snapshot: what clients see as `names`.
    pub fn names_of(&self, snapshot: &SnapshotRow) -> Vec<String> {
        match (&self.name, &snapshot.name) {
            (Some(team), Some(name)) => vec![FullName { team: team.clone(), name: name.clone() }.to_string()],
            _ => Vec::new(),
        }
    }
}

/// How far a snapshot is on its way into the object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteStatus {
    /// Only on its node so far.
    Pending,
    /// Being uploaded.
    InProgress,
    /// Wholly in the object store: survives its node.
    Ready,
    /// The last attempt failed; it will be tried again.
    Failed,
}

/// What a client sent to make a retry recognisable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    /// The client's key, at most 255 bytes of anything.
    pub key: String,
    /// A digest of the whole request: route, object and body, so that two different requests never look alike.
    pub digest: Vec<u8>,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// Its id.
    pub id: SnapshotId,
    /// Its owner.
    pub team: TeamId,
    /// Its name, if it has one.
    pub name: Option<SnapshotName>,
    /// The sandbox it was taken of; none for a template's.
    pub sandbox_id: Option<SandboxId>,
    /// When the guest stood still for it.
    pub created_unix_ms: i64,
    /// From when on it is neither listed nor usable; none: never.
    pub expires_unix_ms: Option<i64>,
    /// The hardware it needs.
    pub shape: Shape,
    /// How far it is in the object store.
    pub remote_status: RemoteStatus,
    /// Where it was taken.
    pub origin_node: NodeId,
    /// Guest memory and disk.
    pub logical_bytes: u64,
    /// Compressed bytes that it added to the store.
    pub new_bytes: u64,
    /// Chunks that it added.
    pub chunks_new: u64,
    /// Chunks that the store had.
    pub chunks_deduplicated: u64,
    /// How long the source stood still.
    pub pause_us: u32,
    /// What the source had been restored from.
    pub parent: Option<SnapshotId>,
    /// Nobody's to see: not listed, not nameable, not to be deleted by its id. A template's own, what holds a paused sandbox,
    /// or what a fork starts from.
    pub internal: bool,
    /// Its time, or its template, is over: it is removed when nothing occupies it, and not usable any more.
    pub condemned: bool,
    /// The request that made it.
    pub idempotency: Option<Idempotency>,
}

impl SnapshotRow {
    /// A row with nothing that is optional and no figures, of a snapshot that is not uploaded yet.
    pub fn new(id: SnapshotId, team: TeamId, origin_node: NodeId, shape: Shape, created_unix_ms: i64) -> Self {
        Self {
            id,
            team,
            name: None,
            sandbox_id: None,
            created_unix_ms,
            expires_unix_ms: None,
            shape,
            remote_status: RemoteStatus::Pending,
            origin_node,
            logical_bytes: 0,
            new_bytes: 0,
            chunks_new: 0,
            chunks_deduplicated: 0,
            pause_us: 0,
            parent: None,
            internal: false,
            condemned: false,
            idempotency: None,
        }
    }

    /// Whether sandboxes can be made from it at this time.
    pub fn is_usable(&self, now_unix_ms: i64) -> bool {
        !self.condemned && self.expires_unix_ms.is_none_or(|expires| now_unix_ms < expires)
    }

    /// Whether its team sees it at this time.
    pub fn is_visible(&self, now_unix_ms: i64) -> bool {
        !self.internal && self.is_usable(now_unix_ms)
    }
}

/// Whether a pack may be referred to, and how far it is on its way out. See [`super::packs`] for the moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackState {
    /// It is kept.
    Live,
    /// No snapshot was seen to use it: no new one may, until a look that began later decides.
    Condemned,
    /// Decided: its object is being deleted. It never comes back.
    Doomed,
    /// Its object is deleted. The row stays for a while, for those who have not heard of it.
    Gone,
}

/// A pack that at least one committed snapshot has used, or whose object was found without a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRow {
    /// Its id.
    pub id: PackId,
    /// Its size.
    pub size_bytes: u64,
    /// How many chunks are in it; 0 when only its object is known.
    pub chunks: u32,
    /// Whether it may be used.
    pub state: PackState,
    /// When its row was made.
    pub created_unix_ms: i64,
    /// Since when it is in this state.
    pub since_unix_ms: i64,
}

/// What a sandbox is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SandboxState {
    /// Being restored for the first time.
    Creating,
    /// Runs.
    Running,
    /// Runs, or stands still for milliseconds, while a snapshot is taken of it.
    Snapshotting,
    /// Being paused.
    Pausing,
    /// Has no VM; a snapshot holds its state.
    Paused,
    /// Being restored after a pause.
    Resuming,
    /// Being ended.
    Killed,
    /// Its node is gone, or its VM died.
    Lost,
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creating => "being created",
            Self::Running => "running",
            Self::Snapshotting => "being snapshotted",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Resuming => "being resumed",
            Self::Killed => "killed",
            Self::Lost => "lost",
        })
    }
}

/// A sandbox. It exists from before its VM is started until after that has ended, and while it is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRow {
    /// Its id.
    pub id: SandboxId,
    /// Its owner.
    pub team: TeamId,
    /// What the create named, resolved: a template's id or a snapshot's.
    pub template_id: String,
    /// The template's alias; empty when it has none.
    pub alias: String,
    /// What its memory came from, and what it occupies.
    pub snapshot_id: SnapshotId,
    /// Where a rollback under way leads; occupied too.
    pub moving_to: Option<SnapshotId>,
    /// What it is doing.
    pub state: SandboxState,
    /// When it was created.
    pub started_unix_ms: i64,
    /// When it times out; none: never.
    pub ends_unix_ms: Option<i64>,
    /// Its hardware.
    pub shape: Shape,
    /// The client's own pairs.
    pub metadata: BTreeMap<String, String>,
    /// Where it runs.
    pub node_id: NodeId,
    /// The node's gRPC endpoint.
    pub node_url: String,
    /// `host:port` of the node's guest gateway.
    pub gateway: String,
    /// What the agent asks for; empty: nothing.
    pub access_token: String,
    /// Environment of its processes.
    pub env: BTreeMap<String, String>,
    /// The agent inside.
    pub agent_version: String,
    /// Paused, not killed, at its timeout.
    pub auto_pause: bool,
    /// Woken by its next request when paused.
    pub auto_resume: bool,
    /// Why it is lost; empty unless it is.
    pub lost_reason: String,
    /// The request that made it.
    pub idempotency: Option<Idempotency>,
}

/// How far the build of a template is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStatus {
    /// Under way.
    Building,
    /// Done: it has a snapshot.
    Ready,
    /// Failed.
    Error,
}

impl BuildStatus {
    /// The word that clients see.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for BuildStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRow {
    /// Its id.
    pub id: TemplateId,
    /// A name for it, unique in its team.
    pub alias: Option<String>,
    /// Its owner.
    pub team: TeamId,
    /// What sandboxes of it are restored from; none until it was built once.
    pub snapshot_id: Option<SnapshotId>,
    /// Its hardware.
    pub shape: Shape,
    /// When it was created.
    pub created_unix_ms: i64,
    /// How far its last build is.
    pub build_status: BuildStatus,
    /// What there is to say about that build.
    pub build_message: String,
}
