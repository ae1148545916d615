//! Garbage collection: objects that no snapshot needs leave the bucket.
//!
//! ```text
//!   lease ─▶ owner of the bucket ─▶ dead writers ─▶ pack rows ─▶ mark: every snapshot's manifest
//!     ─▶ live, unused ▶ condemned · condemned, used ▶ live · condemned, unused for long ▶ doomed
//!     ─▶ doomed: delete object ▶ gone ─▶ sweep: objects without a row ─▶ purge old tombstones ─▶ release
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | [`policy`] | what becomes of a pack: pure |
//! | `mark` | which packs are used |
//! | `collect` | one cycle, in order |
//! | `sweep` | what lies in the bucket and should not |
//! | `tenure` | the collector's lease, kept and checked |
//! | [`owner`] | whose bucket it is |
//!
//! Why nothing that is needed goes:
//!
//! 1. Pack rows are read *before* the snapshots. A commit makes a new pack's row together with its snapshot, so whatever
//!    pack is seen without its snapshot had that snapshot's commit before the snapshots were read.
//! 2. A commit that uses an old pack while the snapshots are being read can be missed. So a mark only condemns. After
//!    that, no commit can use the pack; a mark that *begins* later sees every use that there will ever be, and dooms or
//!    restores. Both are conditional on the row as it was read before the mark: one that was restored and condemned again
//!    meanwhile is not the same row.
//! 3. Each write is conditional on the collector's lease as well: of two collectors, the one that lost it writes nothing.
//! 4. Only what is doomed, or gone, is deleted. Neither ever becomes live, and a pack's id is never made twice, so a
//!    DELETE may arrive however late, and as often as it likes. Tombstones outlive any request that is still under way.
//! 5. A manifest that is missing or cannot be read stops the collection before it has written anything about packs.
//! 6. A list of the bucket may be stale. From an object that is listed the collector concludes that it *may* be there;
//!    from one that is not listed it concludes nothing.
//!
//! Crash points, each harmless:
//!
//! | after | found by the next cycle |
//! | --- | --- |
//! | taking the lease | it waits until the lease is over |
//! | some condemned, restored or doomed, others not | rows as they are; it decides anew |
//! | doomed, not deleted | doomed rows are deleted first |
//! | deleted, row still doomed | deleted again, which succeeds |
//! | an object's row adopted, an orphan marked | they go the ordinary way |
//! | an orphan's object deleted, its mark not | the mark goes when it is old |
//! | purged in part | the rest is purged |
//!
//! Retries: a write whose outcome is unknown is left to the next cycle, which reads what became of it. A DELETE that
//! failed leaves its row doomed and is counted; the next cycle tries again.
//!
//! Absent on purpose, for now: writing what is still needed of a pack that is mostly dead into a new one, and telling
//! what is damaged. Both need only what is here: rows, the mark, the moves.

mod collect;
mod mark;
pub mod owner;
pub mod policy;
mod report;
mod sweep;
mod tenure;
#[cfg(test)]
mod tests;

pub use collect::{Collector, Settings};
pub use report::{Report, Tally};

use crate::blob::BlobError;
use crate::catalog::CatalogError;
use crate::ids::SnapshotId;
use crate::manifest::ManifestError;

/// Why a collection did not happen, or ended early. What it had done by then is consistent, and is gone on with later.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// Another collector is at work.
    #[error("another collector is at work")]
    Busy,
    /// Another collector has taken over, or this one was too slow.
    #[error("the collector's lease is lost: another goes on from here")]
    LeaseLost,
    /// The bucket is another deployment's.
    #[error(
        "the bucket belongs to deployment {found}, this one is {own}: \
         give each catalog a bucket of its own, or they delete each other's objects"
    )]
    ForeignBucket {
        /// Who this is.
        own: String,
        /// Whose it is.
        found: String,
    },
    /// The object that says whose bucket it is says nothing that can be read.
    #[error("the object {key:?} that says whose bucket it is cannot be read: {reason}")]
    OwnerUnreadable {
        /// Its key.
        key: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A snapshot whose manifest is not there: what it needs is not known.
    #[error("nothing is collected: snapshot {snapshot} has no manifest in the catalog")]
    ManifestMissing {
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// A snapshot whose manifest does not decode: what it needs is not known.
    #[error("nothing is collected: the manifest of snapshot {snapshot} cannot be read: {source}")]
    Manifest {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The cause.
        source: ManifestError,
    },
    /// The manifest under a snapshot's key is another's.
    #[error("nothing is collected: the manifest of snapshot {snapshot} is that of {found}")]
    WrongManifest {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Whose it is.
        found: SnapshotId,
    },
    /// The catalog could not be read, or refused.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The bucket could not be listed, or its owner not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
}
