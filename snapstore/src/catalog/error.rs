//! What can go wrong in the catalog: a rich error with ids, and a coarse kind by what the caller must do.

use crate::ids::{PackId, SandboxId, SnapshotId, TemplateId};

use super::kv::KvError;
use super::names::NameError;
use super::rows::{BuildStatus, SandboxState};

/// What a caller must do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request can never succeed as it is (HTTP 400).
    Invalid,
    /// What it names does not exist for this team (HTTP 404).
    NotFound,
    /// The state of things forbids it; nothing was changed (HTTP 409).
    Conflict,
    /// It did not happen; try again later (HTTP 503).
    Unavailable,
    /// It may have happened; find out before trying again (HTTP 500, `Should-Retry: false`).
    Unknown,
    /// What is stored cannot be read (HTTP 500).
    Corrupt,
}

fn not_live(packs: &[PackId]) -> String {
    const NAMED: usize = 3;
    let named: Vec<String> = packs.iter().take(NAMED).map(PackId::to_string).collect();
    let more = if packs.len() > NAMED { ", …" } else { "" };
    format!("{} pack(s) are not live ({}{more})", packs.len(), named.join(", "))
}

/// An error of the catalog. Unless the kind is [`ErrorKind::Unknown`], nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CatalogError {
    /// No such object in the caller's team.
    #[error("no {kind} {what:?}")]
    NotFound {
        /// "snapshot", "sandbox", "template" or "team".
        kind: &'static str,
        /// The text or id that was looked for, cut to 200 characters.
        what: String,
    },
    /// A name, or a reference by name, that cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A field of a request that cannot be.
    #[error("{field}: {reason}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// Why.
        reason: String,
    },
    /// Another usable snapshot has the name.
    #[error("the name {name} is taken by snapshot {holder}: delete that one or choose another name or tag")]
    NameTaken {
        /// `short:tag`.
        name: String,
        /// Who has it.
        holder: SnapshotId,
    },
    /// Sandboxes exist that were restored from the snapshot.
    #[error("snapshot {snapshot} is in use by {count} sandbox(es), one is {example}: kill them first")]
    Occupied {
        /// The snapshot.
        snapshot: SnapshotId,
        /// How many, up to a hundred.
        count: usize,
        /// One of them.
        example: SandboxId,
    },
    /// The sandbox id is in use.
    #[error("a sandbox {id} exists: choose another id or kill it first")]
    SandboxExists {
        /// The id.
        id: SandboxId,
    },
    /// The sandbox is already on its way to another snapshot.
    #[error("sandbox {id} is being rolled back to snapshot {to}: wait for that to end")]
    MoveInProgress {
        /// The sandbox.
        id: SandboxId,
        /// Where to.
        to: SnapshotId,
    },
    /// The sandbox is not on its way anywhere.
    #[error("sandbox {id} is not being rolled back")]
    NoMove {
        /// The sandbox.
        id: SandboxId,
    },
    /// The sandbox is not in the state that this needs.
    #[error("sandbox {id} is {state}, not {wanted}")]
    State {
        /// The sandbox.
        id: SandboxId,
        /// What it is doing.
        state: SandboxState,
        /// What it would have to do.
        wanted: SandboxState,
    },
    /// Another template of the team has the alias, or the template exists.
    #[error("the template name {alias:?} is taken by {holder}: delete that one or choose another")]
    AliasTaken {
        /// The alias.
        alias: String,
        /// Who has it.
        holder: TemplateId,
    },
    /// The template cannot start sandboxes (yet).
    #[error("template {id} is not ready (its build: {status}): wait for the build, or build it again")]
    TemplateNotReady {
        /// The template.
        id: TemplateId,
        /// How far its build is.
        status: BuildStatus,
    },
    /// Packs that the snapshot uses are being deleted, or are not known: their chunks must be written again.
    #[error("{}: write their chunks into new packs and commit again", not_live(packs))]
    PacksNotLive {
        /// All of them.
        packs: Vec<PackId>,
    },
    /// Another has taken the lease, or its holder was counted as dead: what the holder had under way did not happen.
    #[error("the lease {lease} is lost: take it anew and begin again")]
    LeaseLost {
        /// Its key.
        lease: String,
    },
    /// The idempotency key was used for another request.
    #[error("the idempotency key {key:?} was used with a different request: use a new key")]
    IdempotencyMismatch {
        /// The key, cut to 80 characters.
        key: String,
    },
    /// The request was answered, and what it made no longer exists.
    #[error(
        "the request with idempotency key {key:?} was answered with {object}, which no longer exists: use a new key"
    )]
    IdempotencyGone {
        /// The key, cut to 80 characters.
        key: String,
        /// What it had made.
        object: String,
    },
    /// Others changed the same rows each time it was tried.
    #[error("{what}: others kept changing it, nothing was done; try again")]
    Contended {
        /// What was tried.
        what: String,
    },
    /// A row that does not decode.
    #[error("the catalog's row {key:?} is damaged: {reason}")]
    CorruptRow {
        /// Its key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The store under the catalog.
    #[error(transparent)]
    Kv(#[from] KvError),
}

impl CatalogError {
    /// What the caller must do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Name(_) | Self::Invalid { .. } => ErrorKind::Invalid,
            Self::NameTaken { .. }
            | Self::Occupied { .. }
            | Self::SandboxExists { .. }
            | Self::MoveInProgress { .. }
            | Self::NoMove { .. }
            | Self::State { .. }
            | Self::AliasTaken { .. }
            | Self::TemplateNotReady { .. }
            | Self::IdempotencyMismatch { .. }
            | Self::IdempotencyGone { .. } => ErrorKind::Conflict,
            Self::Contended { .. } | Self::PacksNotLive { .. } | Self::LeaseLost { .. } => ErrorKind::Unavailable,
            Self::CorruptRow { .. } => ErrorKind::Corrupt,
            Self::Kv(KvError::Refused { .. }) => ErrorKind::Invalid,
            Self::Kv(KvError::Unavailable { .. }) => ErrorKind::Unavailable,
            Self::Kv(KvError::Unknown { .. }) => ErrorKind::Unknown,
            Self::Kv(KvError::Corrupt { .. }) => ErrorKind::Corrupt,
        }
    }

    pub(super) fn not_found(kind: &'static str, what: impl ToString) -> Self {
        Self::NotFound { kind, what: what.to_string().chars().take(200).collect() }
    }

    pub(super) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }
}
