//! Rows in bytes: an envelope around a protobuf message.
//!
//! ```text
//!   0      2      3         4           12
//!   "SY"   kind   version   checksum    message (protobuf), to the end
//! ```
//!
//! `checksum` is the first 8 bytes of the BLAKE3 of kind, version and message. A row is at most [`MAX_ROW_BYTES`]; engines
//! of the cluster take no larger values.
//!
//! To add a field: give it the next tag; rows without it read as its default, which must mean what rows meant before. To
//! change what a field means: raise the row's `VERSION`, keep reading the older ones, add a golden file. Never reuse a tag.

use bytes::Bytes;
use prost::Message;

use crate::ids::{DomainKey, InvalidId, PackId, SnapshotId};

use super::error::CatalogError;
use super::kv::Entry;
use super::names::{SnapshotName, TeamName};
use super::rows::{
    BuildStatus, Idempotency, PackRow, PackState, RemoteStatus, SandboxRow, SandboxState, Shape, SnapshotRow, Team,
    TemplateRow,
};

/// The largest row.
pub(super) const MAX_ROW_BYTES: usize = 256 << 10;

const MAGIC: &[u8; 2] = b"SY";
const HEAD_LEN: usize = 12;

/// A row that can be written and read.
pub(super) trait Row: Sized {
    /// Tells the kinds of rows apart.
    const KIND: u8;
    /// The layout that is written.
    const VERSION: u8 = 1;
    /// The layout as a message.
    type Wire: Message + Default + for<'a> From<&'a Self> + TryInto<Self, Error = String>;
}

fn checksum(kind: u8, version: u8, body: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[kind, version]);
    hasher.update(body);
    *hasher.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes")
}

/// The bytes of a row.
pub(super) fn encode<R: Row>(row: &R) -> Result<Bytes, CatalogError> {
    let body = R::Wire::from(row).encode_to_vec();
    let mut bytes = Vec::with_capacity(HEAD_LEN + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&[R::KIND, R::VERSION]);
    bytes.extend_from_slice(&checksum(R::KIND, R::VERSION, &body));
    bytes.extend_from_slice(&body);
    if bytes.len() > MAX_ROW_BYTES {
        return Err(CatalogError::invalid("row", format!("of {} bytes, at most {MAX_ROW_BYTES} fit", bytes.len())));
    }
    Ok(bytes.into())
}

/// The row in an entry.
pub(super) fn decode<R: Row>(entry: &Entry) -> Result<R, CatalogError> {
    parse(&entry.value)
        .map_err(|reason| CatalogError::CorruptRow { key: String::from_utf8_lossy(&entry.key).into_owned(), reason })
}

fn parse<R: Row>(bytes: &[u8]) -> Result<R, String> {
    let Some((head, body)) = bytes.split_first_chunk::<HEAD_LEN>() else {
        return Err(format!("{} bytes are too short for a row", bytes.len()));
    };
    let [m0, m1, kind, version, sum @ ..] = *head;
    if [m0, m1] != *MAGIC || kind != R::KIND {
        return Err(format!("begins with {head:02x?}, not as a row of kind {}", R::KIND));
    }
    if version != R::VERSION {
        return Err(format!("written in version {version}, this program reads {}", R::VERSION));
    }
    if sum != checksum(kind, version, body) {
        return Err("its checksum does not match".into());
    }
    R::Wire::decode(body).map_err(|error| error.to_string())?.try_into()
}

/// The id in an entry that holds nothing else, as text.
pub(super) fn decode_id<I: std::str::FromStr<Err = InvalidId>>(entry: &Entry) -> Result<I, CatalogError> {
    id_text(&entry.value).map_err(|reason| corrupt(&entry.key, reason))
}

/// The id that ends an index key.
pub(super) fn id_of_key<I: std::str::FromStr<Err = InvalidId>>(key: &[u8]) -> Result<I, CatalogError> {
    id_text(super::keys::tail(key)).map_err(|reason| corrupt(key, reason))
}

fn id_text<I: std::str::FromStr<Err = InvalidId>>(bytes: &[u8]) -> Result<I, String> {
    std::str::from_utf8(bytes).map_err(|error| error.to_string())?.parse().map_err(|error: InvalidId| error.to_string())
}

/// An error about the row or index entry under `key`.
pub(super) fn corrupt(key: &[u8], reason: String) -> CatalogError {
    CatalogError::CorruptRow { key: String::from_utf8_lossy(key).into_owned(), reason }
}

fn id<I: std::str::FromStr<Err = InvalidId>>(text: &str) -> Result<I, String> {
    text.parse().map_err(|error: InvalidId| error.to_string())
}

fn optional<I: std::str::FromStr<Err = InvalidId>>(text: Option<String>) -> Result<Option<I>, String> {
    text.map(|text| id(&text)).transpose()
}

/// Enums as numbers: from 1, since 0 is what an absent field reads as, and no row may mean something by absence.
macro_rules! numbered {
    ($type:ident { $($variant:ident = $number:literal),+ $(,)? }) => {
        impl $type {
            fn number(self) -> u32 {
                match self { $(Self::$variant => $number),+ }
            }

            fn from_number(number: u32) -> Result<Self, String> {
                match number {
                    $($number => Ok(Self::$variant),)+
                    other => Err(format!(concat!("{} is not a ", stringify!($type)), other)),
                }
            }
        }
    };
}

numbered!(RemoteStatus { Pending = 1, InProgress = 2, Ready = 3, Failed = 4 });
numbered!(PackState { Live = 1, Condemned = 2, Doomed = 3, Gone = 4 });
numbered!(BuildStatus { Building = 1, Ready = 2, Error = 3 });
numbered!(SandboxState {
    Creating = 1,
    Running = 2,
    Snapshotting = 3,
    Pausing = 4,
    Paused = 5,
    Resuming = 6,
    Killed = 7,
    Lost = 8,
});

#[derive(Clone, PartialEq, Message)]
pub(super) struct ShapeWire {
    #[prost(uint32, tag = "1")]
    vcpus: u32,
    #[prost(uint64, tag = "2")]
    memory_bytes: u64,
    #[prost(uint64, tag = "3")]
    disk_bytes: u64,
}

impl From<Shape> for ShapeWire {
    fn from(shape: Shape) -> Self {
        Self { vcpus: shape.vcpus, memory_bytes: shape.memory_bytes, disk_bytes: shape.disk_bytes }
    }
}

fn shape(wire: Option<ShapeWire>) -> Result<Shape, String> {
    let wire = wire.ok_or("has no shape")?;
    Ok(Shape { vcpus: wire.vcpus, memory_bytes: wire.memory_bytes, disk_bytes: wire.disk_bytes })
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestWire {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(bytes = "vec", tag = "2")]
    digest: Vec<u8>,
}

impl From<&Idempotency> for RequestWire {
    fn from(request: &Idempotency) -> Self {
        Self { key: request.key.clone(), digest: request.digest.clone() }
    }
}

impl From<RequestWire> for Idempotency {
    fn from(wire: RequestWire) -> Self {
        Self { key: wire.key, digest: wire.digest }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TeamWire {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(bytes = "vec", tag = "3")]
    dedup_key: Vec<u8>,
    #[prost(int64, tag = "4")]
    created_unix_ms: i64,
}

impl Row for Team {
    const KIND: u8 = 1;
    type Wire = TeamWire;
}

impl From<&Team> for TeamWire {
    fn from(row: &Team) -> Self {
        Self {
            id: row.id.to_string(),
            name: row.name.as_ref().map(ToString::to_string),
            dedup_key: row.dedup_key.0.to_vec(),
            created_unix_ms: row.created_unix_ms,
        }
    }
}

impl TryFrom<TeamWire> for Team {
    type Error = String;

    fn try_from(wire: TeamWire) -> Result<Self, String> {
        let dedup_key = wire.dedup_key.try_into().map_err(|_| "its dedup key is not 32 bytes")?;
        let name = wire.name.as_deref().map(TeamName::parse).transpose().map_err(|error| error.to_string())?;
        let created_unix_ms = wire.created_unix_ms;
        Ok(Self { id: id(&wire.id)?, name, dedup_key: DomainKey(dedup_key), created_unix_ms })
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SnapshotWire {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    team: String,
    #[prost(string, optional, tag = "3")]
    name: Option<String>,
    #[prost(string, optional, tag = "4")]
    sandbox_id: Option<String>,
    #[prost(int64, tag = "5")]
    created_unix_ms: i64,
    #[prost(int64, optional, tag = "6")]
    expires_unix_ms: Option<i64>,
    #[prost(message, optional, tag = "7")]
    shape: Option<ShapeWire>,
    #[prost(uint32, tag = "8")]
    remote_status: u32,
    #[prost(string, tag = "9")]
    origin_node: String,
    #[prost(uint64, tag = "10")]
    logical_bytes: u64,
    #[prost(uint64, tag = "11")]
    new_bytes: u64,
    #[prost(uint64, tag = "12")]
    chunks_new: u64,
    #[prost(uint64, tag = "13")]
    chunks_deduplicated: u64,
    #[prost(uint32, tag = "14")]
    pause_us: u32,
    #[prost(string, optional, tag = "15")]
    parent: Option<String>,
    #[prost(bool, tag = "16")]
    internal: bool,
    #[prost(bool, tag = "17")]
    condemned: bool,
    #[prost(message, optional, tag = "18")]
    request: Option<RequestWire>,
}

impl Row for SnapshotRow {
    const KIND: u8 = 2;
    type Wire = SnapshotWire;
}

impl From<&SnapshotRow> for SnapshotWire {
    fn from(row: &SnapshotRow) -> Self {
        Self {
            id: row.id.to_string(),
            team: row.team.to_string(),
            name: row.name.as_ref().map(ToString::to_string),
            sandbox_id: row.sandbox_id.as_ref().map(ToString::to_string),
            created_unix_ms: row.created_unix_ms,
            expires_unix_ms: row.expires_unix_ms,
            shape: Some(row.shape.into()),
            remote_status: row.remote_status.number(),
            origin_node: row.origin_node.to_string(),
            logical_bytes: row.logical_bytes,
            new_bytes: row.new_bytes,
            chunks_new: row.chunks_new,
            chunks_deduplicated: row.chunks_deduplicated,
            pause_us: row.pause_us,
            parent: row.parent.as_ref().map(ToString::to_string),
            internal: row.internal,
            condemned: row.condemned,
            request: row.idempotency.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<SnapshotWire> for SnapshotRow {
    type Error = String;

    fn try_from(wire: SnapshotWire) -> Result<Self, String> {
        Ok(Self {
            id: id(&wire.id)?,
            team: id(&wire.team)?,
            name: wire.name.as_deref().map(SnapshotName::parse).transpose().map_err(|error| error.to_string())?,
            sandbox_id: optional(wire.sandbox_id)?,
            created_unix_ms: wire.created_unix_ms,
            expires_unix_ms: wire.expires_unix_ms,
            shape: shape(wire.shape)?,
            remote_status: RemoteStatus::from_number(wire.remote_status)?,
            origin_node: id(&wire.origin_node)?,
            logical_bytes: wire.logical_bytes,
            new_bytes: wire.new_bytes,
            chunks_new: wire.chunks_new,
            chunks_deduplicated: wire.chunks_deduplicated,
            pause_us: wire.pause_us,
            parent: optional(wire.parent)?,
            internal: wire.internal,
            condemned: wire.condemned,
            idempotency: wire.request.map(Into::into),
        })
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PackWire {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint64, tag = "2")]
    size_bytes: u64,
    #[prost(uint32, tag = "3")]
    chunks: u32,
    #[prost(uint32, tag = "4")]
    state: u32,
    #[prost(int64, tag = "5")]
    created_unix_ms: i64,
    /// Absent: since it was created.
    #[prost(int64, tag = "6")]
    since_unix_ms: i64,
}

impl Row for PackRow {
    const KIND: u8 = 3;
    type Wire = PackWire;
}

impl From<&PackRow> for PackWire {
    fn from(row: &PackRow) -> Self {
        Self {
            id: row.id.as_bytes().to_vec(),
            size_bytes: row.size_bytes,
            chunks: row.chunks,
            state: row.state.number(),
            created_unix_ms: row.created_unix_ms,
            since_unix_ms: if row.since_unix_ms == row.created_unix_ms { 0 } else { row.since_unix_ms },
        }
    }
}

impl TryFrom<PackWire> for PackRow {
    type Error = String;

    fn try_from(wire: PackWire) -> Result<Self, String> {
        Ok(Self {
            id: PackId::from_slice(&wire.id).map_err(|error| error.to_string())?,
            size_bytes: wire.size_bytes,
            chunks: wire.chunks,
            state: PackState::from_number(wire.state)?,
            created_unix_ms: wire.created_unix_ms,
            since_unix_ms: if wire.since_unix_ms == 0 { wire.created_unix_ms } else { wire.since_unix_ms },
        })
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxWire {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    team: String,
    #[prost(string, tag = "3")]
    template_id: String,
    #[prost(string, tag = "4")]
    alias: String,
    #[prost(string, tag = "5")]
    snapshot_id: String,
    #[prost(string, optional, tag = "6")]
    moving_to: Option<String>,
    #[prost(uint32, tag = "7")]
    state: u32,
    #[prost(int64, tag = "8")]
    started_unix_ms: i64,
    #[prost(int64, optional, tag = "9")]
    ends_unix_ms: Option<i64>,
    #[prost(message, optional, tag = "10")]
    shape: Option<ShapeWire>,
    #[prost(btree_map = "string, string", tag = "11")]
    metadata: std::collections::BTreeMap<String, String>,
    #[prost(string, tag = "12")]
    node_id: String,
    #[prost(string, tag = "13")]
    node_url: String,
    #[prost(string, tag = "14")]
    gateway: String,
    #[prost(string, tag = "15")]
    access_token: String,
    #[prost(string, tag = "16")]
    agent_version: String,
    #[prost(bool, tag = "17")]
    auto_pause: bool,
    #[prost(bool, tag = "18")]
    auto_resume: bool,
    #[prost(string, tag = "19")]
    lost_reason: String,
    #[prost(message, optional, tag = "20")]
    request: Option<RequestWire>,
    #[prost(btree_map = "string, string", tag = "21")]
    env: std::collections::BTreeMap<String, String>,
}

impl Row for SandboxRow {
    const KIND: u8 = 4;
    type Wire = SandboxWire;
}

impl From<&SandboxRow> for SandboxWire {
    fn from(row: &SandboxRow) -> Self {
        Self {
            id: row.id.to_string(),
            team: row.team.to_string(),
            template_id: row.template_id.clone(),
            alias: row.alias.clone(),
            snapshot_id: row.snapshot_id.to_string(),
            moving_to: row.moving_to.as_ref().map(SnapshotId::to_string),
            state: row.state.number(),
            started_unix_ms: row.started_unix_ms,
            ends_unix_ms: row.ends_unix_ms,
            shape: Some(row.shape.into()),
            metadata: row.metadata.clone(),
            node_id: row.node_id.to_string(),
            node_url: row.node_url.clone(),
            gateway: row.gateway.clone(),
            access_token: row.access_token.clone(),
            env: row.env.clone(),
            agent_version: row.agent_version.clone(),
            auto_pause: row.auto_pause,
            auto_resume: row.auto_resume,
            lost_reason: row.lost_reason.clone(),
            request: row.idempotency.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<SandboxWire> for SandboxRow {
    type Error = String;

    fn try_from(wire: SandboxWire) -> Result<Self, String> {
        Ok(Self {
            id: id(&wire.id)?,
            team: id(&wire.team)?,
            template_id: wire.template_id,
            alias: wire.alias,
            snapshot_id: id(&wire.snapshot_id)?,
            moving_to: optional(wire.moving_to)?,
            state: SandboxState::from_number(wire.state)?,
            started_unix_ms: wire.started_unix_ms,
            ends_unix_ms: wire.ends_unix_ms,
            shape: shape(wire.shape)?,
            metadata: wire.metadata,
            node_id: id(&wire.node_id)?,
            node_url: wire.node_url,
            gateway: wire.gateway,
            access_token: wire.access_token,
            env: wire.env,
            agent_version: wire.agent_version,
            auto_pause: wire.auto_pause,
            auto_resume: wire.auto_resume,
            lost_reason: wire.lost_reason,
            idempotency: wire.request.map(Into::into),
        })
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TemplateWire {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, optional, tag = "2")]
    alias: Option<String>,
    #[prost(string, tag = "3")]
    team: String,
    #[prost(string, optional, tag = "4")]
    snapshot_id: Option<String>,
    #[prost(message, optional, tag = "5")]
    shape: Option<ShapeWire>,
    #[prost(int64, tag = "6")]
    created_unix_ms: i64,
    #[prost(uint32, tag = "7")]
    build_status: u32,
    #[prost(string, tag = "8")]
    build_message: String,
}

impl Row for TemplateRow {
    const KIND: u8 = 5;
    type Wire = TemplateWire;
}

impl From<&TemplateRow> for TemplateWire {
    fn from(row: &TemplateRow) -> Self {
        Self {
            id: row.id.to_string(),
            alias: row.alias.clone(),
            team: row.team.to_string(),
            snapshot_id: row.snapshot_id.as_ref().map(ToString::to_string),
            shape: Some(row.shape.into()),
            created_unix_ms: row.created_unix_ms,
            build_status: row.build_status.number(),
            build_message: row.build_message.clone(),
        }
    }
}

impl TryFrom<TemplateWire> for TemplateRow {
    type Error = String;

    fn try_from(wire: TemplateWire) -> Result<Self, String> {
        Ok(Self {
            id: id(&wire.id)?,
            alias: wire.alias,
            team: id(&wire.team)?,
            snapshot_id: optional(wire.snapshot_id)?,
            shape: shape(wire.shape)?,
            created_unix_ms: wire.created_unix_ms,
            build_status: BuildStatus::from_number(wire.build_status)?,
            build_message: wire.build_message,
        })
    }
}

/// What a request with an idempotency key made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IdempotencyRow {
    pub(super) digest: Vec<u8>,
    pub(super) object: super::idempotency::Made,
    pub(super) created_unix_ms: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct IdempotencyWire {
    #[prost(bytes = "vec", tag = "1")]
    digest: Vec<u8>,
    #[prost(string, optional, tag = "2")]
    sandbox: Option<String>,
    #[prost(string, optional, tag = "3")]
    snapshot: Option<String>,
    #[prost(int64, tag = "4")]
    created_unix_ms: i64,
}

impl Row for IdempotencyRow {
    const KIND: u8 = 6;
    type Wire = IdempotencyWire;
}

impl From<&IdempotencyRow> for IdempotencyWire {
    fn from(row: &IdempotencyRow) -> Self {
        use super::idempotency::Made;
        let (sandbox, snapshot) = match &row.object {
            Made::Sandbox(id) => (Some(id.to_string()), None),
            Made::Snapshot(id) => (None, Some(id.to_string())),
        };
        Self { digest: row.digest.clone(), sandbox, snapshot, created_unix_ms: row.created_unix_ms }
    }
}

impl TryFrom<IdempotencyWire> for IdempotencyRow {
    type Error = String;

    fn try_from(wire: IdempotencyWire) -> Result<Self, String> {
        use super::idempotency::Made;
        let object = match (wire.sandbox, wire.snapshot) {
            (Some(sandbox), None) => Made::Sandbox(id(&sandbox)?),
            (None, Some(snapshot)) => Made::Snapshot(id(&snapshot)?),
            _ => return Err("names not exactly one object".into()),
        };
        Ok(Self { digest: wire.digest, object, created_unix_ms: wire.created_unix_ms })
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
