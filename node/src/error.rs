//! What can go wrong on a node, and the gRPC status that a caller gets for it.
//!
//! Messages name the object and say what to do. Whether the same call may be sent again travels with the status:
//! a refusal before anything happened says yes.

use snapyard_proto::retry::{ShouldRetry, mark};
use snapyard_snapstore::catalog::{CatalogError, ErrorKind};
use snapyard_snapstore::gc::GcError;
use snapyard_snapstore::repack::RepackError;
use snapyard_snapstore::rewrite::RewriteError;
use snapyard_snapstore::{ReadError, StoreError};
use snapyard_vmm::VmError;
use tonic::Status;

/// A failed operation of the node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The catalog refused or failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The store could not write.
    #[error("the snapshot store failed: {0}")]
    Store(#[from] StoreError),
    /// Garbage was not collected, or the bucket is somebody else's.
    #[error(transparent)]
    Gc(#[from] GcError),
    /// Packs that are mostly dead were not rewritten.
    #[error("packs were not rewritten: {0}")]
    Repack(#[from] RepackError),
    /// Stored bytes could not be had.
    #[error("snapshot {snapshot} cannot be read: {cause}")]
    Read {
        /// The snapshot that was being opened.
        snapshot: String,
        /// Why.
        cause: ReadError,
    },
    /// The virtual machine failed.
    #[error("the virtual machine of {sandbox} failed: {cause}")]
    Vm {
        /// The sandbox, or the template being built.
        sandbox: String,
        /// Why.
        cause: VmError,
    },
    /// The agent inside the guest did not do what it was asked.
    #[error("the agent inside {sandbox} failed at {what}: {cause}")]
    Agent {
        /// The sandbox.
        sandbox: String,
        /// The request.
        what: &'static str,
        /// Why.
        cause: String,
    },
    /// The guest stopped for good, with the reason.
    #[error("sandbox {sandbox} was lost: {reason}")]
    Lost {
        /// The sandbox.
        sandbox: String,
        /// What stopped it.
        reason: String,
    },
    /// No such sandbox on this node.
    #[error("sandbox {0} was not found; list the running ones with GET /v2/sandboxes")]
    NoSandbox(String),
    /// The sandbox is in the middle of something else.
    #[error("sandbox {sandbox} is {phase}; try again when that has ended")]
    Busy {
        /// The sandbox.
        sandbox: String,
        /// What it is doing.
        phase: &'static str,
    },
    /// A sandbox of that id exists.
    #[error("sandbox {0} exists already")]
    Exists(String),
    /// The request cannot be right.
    #[error("{0}")]
    Invalid(String),
    /// The snapshot does not fit what it is asked for.
    #[error("{0}")]
    Mismatch(String),
    /// No room.
    #[error("node {node} runs {most} sandboxes, its most; kill one or add a node")]
    Full {
        /// The node.
        node: String,
        /// Its limit.
        most: usize,
    },
    /// A template build failed.
    #[error("template {alias} could not be built: {why}")]
    Build {
        /// The recipe's alias.
        alias: String,
        /// What failed.
        why: String,
    },
    /// The node is shutting down, or broken in a way that no caller can mend.
    #[error("internal: {0}")]
    Internal(String),
}

impl From<NodeError> for Status {
    fn from(error: NodeError) -> Self {
        let text = error.to_string();
        match error {
            NodeError::Catalog(cause) => catalog_status(&cause, text),
            NodeError::Gc(GcError::Catalog(cause)) => catalog_status(&cause, text),
            NodeError::Gc(GcError::Busy | GcError::LeaseLost) => mark(Status::aborted(text), ShouldRetry::Yes),
            NodeError::Gc(GcError::Blob(cause)) if cause.is_transient() => {
                mark(Status::unavailable(text), ShouldRetry::Yes)
            }
            NodeError::Repack(RepackError::Rewrite(RewriteError::Catalog(cause))) => catalog_status(&cause, text),
            NodeError::Gc(_) | NodeError::Repack(_) => Status::failed_precondition(text),
            NodeError::NoSandbox(_) | NodeError::Lost { .. } => Status::not_found(text),
            NodeError::Busy { .. } => mark(Status::failed_precondition(text), ShouldRetry::Yes),
            NodeError::Exists(_) => Status::already_exists(text),
            NodeError::Mismatch(_) => Status::failed_precondition(text),
            NodeError::Invalid(_) => Status::invalid_argument(text),
            NodeError::Full { .. } => mark(Status::unavailable(text), ShouldRetry::Yes),
            // The bytes may come back (an object store that is down), the operation left nothing behind.
            NodeError::Read { cause, .. } if cause.is_transient() => mark(Status::unavailable(text), ShouldRetry::Yes),
            NodeError::Read { .. }
            | NodeError::Store(_)
            | NodeError::Vm { .. }
            | NodeError::Agent { .. }
            | NodeError::Build { .. }
            | NodeError::Internal(_) => Status::internal(text),
        }
    }
}

fn catalog_status(cause: &CatalogError, text: String) -> Status {
    match cause.kind() {
        ErrorKind::NotFound => Status::not_found(text),
        ErrorKind::Invalid => Status::invalid_argument(text),
        ErrorKind::Conflict => Status::failed_precondition(text),
        ErrorKind::Unavailable => mark(Status::unavailable(text), ShouldRetry::Yes),
        ErrorKind::Unknown => mark(Status::internal(text), ShouldRetry::No),
        ErrorKind::Corrupt => Status::internal(text),
    }
}
