//! The catalog: what exists (teams, snapshots, sandboxes, templates, packs), as ordered keys with conditional transactions.
//!
//! ```text
//!   teams  snapshots  listing  sandboxes  templates  packs  resolve  idempotency     what may happen, over
//!   pausing  working_sets  uploads  amending  leases  retention                      and how it is kept up
//!   references  sweeping
//!   ─────────────────────────────────────────────────────────────────────────────
//!   rows (values) · wire (their bytes) · keys (where they lie) · names (their text)
//!   ─────────────────────────────────────────────────────────────────────────────
//!   kv: get_many, range, txn                                                         the seam
//!   ─────────────────────────────────────────────────────────────────────────────
//!   rocks: embedded engine · memory: for tests
//! ```
//!
//! Every change is one conditional transaction: read the rows it depends on, decide, write on the condition that they have
//! not changed; if they have, start over. So there is no state between two steps for a crash to leave behind. The rules
//! that hold between any two transactions, whatever races:
//!
//! 1. A name of a team has one row, and that row names its one holder. A snapshot that is not the holder does not say it
//!    has the name, so at most one usable snapshot has it.
//! 2. A sandbox row implies an occupancy row for its snapshot (and for the one it is moving to), and the reverse: none
//!    outlives its sandbox.
//! 3. A snapshot row goes only while no occupancy row for it exists. A row that is gone or condemned gets no new one.
//! 4. A committed snapshot has its manifest, and a row for every pack that the manifest names: live, or condemned until a
//!    look sees the snapshot.
//! 5. Index entries (listing, by source, by node, expiry, upload) are written and removed with their rows.
//!
//! A transaction whose outcome is unknown (the engine failed after it was sent) is reported as such, and may be sent again:
//! commits recognise their own object by its id or idempotency key and answer it again.
//!
//! Deliberately absent: the bytes of chunks and packs, anything about processes, and waiting.

mod amending;
#[cfg(test)]
pub(crate) mod conformance;
mod error;
mod idempotency;
mod keys;
pub mod kv;
mod leases;
mod listing;
pub mod memory;
pub mod names;
mod packs;
mod pausing;
mod references;
mod resolve;
mod retention;
pub mod rocks;
mod rows;
mod sandboxes;
mod snapshots;
mod sweeping;
mod teams;
mod templates;
mod upkeep_rows;
mod uploads;
mod wire;
mod working_sets;

use std::sync::Arc;

use bytes::Bytes;

pub use amending::{Addition, Amended, Removal};
pub use error::{CatalogError, ErrorKind};
pub use idempotency::{IDEMPOTENCY_MS, Made};
pub use leases::{Lease, WriterLease};
pub use listing::{MAX_PAGE, Page, SandboxFilter, SnapshotFilter};
pub use packs::{Moved, PackSeen};
pub use pausing::Place;
pub use references::ManifestSeen;
pub use resolve::{Deleted, Resolved};
pub use retention::Expired;
pub use rows::{
    BuildStatus, Idempotency, PackRow, PackState, RemoteStatus, SandboxRow, SandboxState, Shape, SnapshotRow, Team,
    TemplateRow,
};
pub use snapshots::{MAX_MANIFEST_BYTES, SnapshotCommit, SnapshotTotals};
pub use sweeping::OrphanSeen;
pub use upkeep_rows::LeaseHolder;
pub use uploads::PendingUpload;
pub use working_sets::{RECORDINGS, Recording};

use crate::clock::Clock;

use kv::{Compare, Entry, Key, KeyRange, KeyValue, Op, Revision, TxnOutcome};
use wire::Row;

/// How often a change is tried again because others changed the same rows.
const MAX_ATTEMPTS: usize = 100;

/// Entries read at a time where a whole range is wanted.
const SCAN_BATCH: usize = 500;

/// What a request for a new object came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Committed<T> {
    /// It was made now.
    New(T),
    /// An earlier try of the same request had made it.
    Replayed(T),
}

impl<T> Committed<T> {
    /// The object, whenever it was made.
    pub fn into_inner(self) -> T {
        match self {
            Self::New(object) | Self::Replayed(object) => object,
        }
    }
}

/// The catalog. Cheap to share; all state is in the store below.
pub struct Catalog {
    kv: Arc<dyn KeyValue>,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").finish_non_exhaustive()
    }
}

impl Catalog {
    /// Opens the catalog in a store, empty or not, and removes condemned snapshots that a crash kept from going.
    pub async fn open(kv: Arc<dyn KeyValue>, clock: Arc<dyn Clock>) -> Result<Arc<Self>, CatalogError> {
        let catalog = Arc::new(Self { kv, clock });
        catalog.collect_all_condemned().await?;
        Ok(catalog)
    }

    /// The time by the catalog's clock.
    pub fn now_unix_ms(&self) -> i64 {
        self.clock.now_unix_ms()
    }

    /// The catalog in a store as it is: nothing is read or tidied up first.
    #[cfg(test)]
    pub(crate) fn over_for_tests(kv: Arc<dyn KeyValue>, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { kv, clock })
    }

    fn now(&self) -> i64 {
        self.now_unix_ms()
    }

    /// Reads a row with the entry it came from.
    async fn row<R: Row>(&self, key: Key) -> Result<Option<(R, Entry)>, CatalogError> {
        let Some(entry) = self.kv.get(key).await? else { return Ok(None) };
        Ok(Some((wire::decode(&entry)?, entry)))
    }

    /// Every entry of a range, whatever its size. Not one state, but every entry that was there all along.
    async fn scan(&self, mut range: KeyRange) -> Result<Vec<Entry>, CatalogError> {
        let mut all = Vec::new();
        loop {
            let batch = self.kv.range(range.clone(), SCAN_BATCH, kv::Order::Ascending).await?;
            let Some(last) = batch.last().filter(|_| batch.len() == SCAN_BATCH) else {
                all.extend(batch);
                return Ok(all);
            };
            range = keys::following(range, last.key.clone());
            all.extend(batch);
        }
    }

    /// Sends a draft. `false`: a condition did not hold, read again and decide anew.
    async fn send(&self, draft: Draft) -> Result<bool, CatalogError> {
        Ok(self.send_for_revision(draft).await?.is_some())
    }

    /// The same; answers the revision of what was written.
    async fn send_for_revision(&self, draft: Draft) -> Result<Option<Revision>, CatalogError> {
        match self.kv.txn(draft.compares, draft.ops).await? {
            TxnOutcome::Committed(revision) => Ok(Some(revision)),
            TxnOutcome::Conflict => Ok(None),
        }
    }
}

/// A transaction being put together.
#[derive(Debug, Default)]
struct Draft {
    compares: Vec<Compare>,
    ops: Vec<Op>,
}

impl Draft {
    fn require_absent(&mut self, key: Key) {
        self.compares.push(Compare::Absent(key));
    }

    fn require_unchanged(&mut self, entry: &Entry) {
        self.compares.push(Compare::Revision(entry.key.clone(), entry.revision));
    }

    fn require_revision(&mut self, key: Key, revision: Revision) {
        self.compares.push(Compare::Revision(key, revision));
    }

    fn require_as_read(&mut self, key: Key, entry: Option<&Entry>) {
        match entry {
            Some(entry) => self.require_unchanged(entry),
            None => self.require_absent(key),
        }
    }

    fn require_empty(&mut self, range: KeyRange) {
        self.compares.push(Compare::Empty(range));
    }

    fn put_row<R: Row>(&mut self, key: Key, row: &R) -> Result<(), CatalogError> {
        self.ops.push(Op::Put(key, wire::encode(row)?));
        Ok(())
    }

    fn put(&mut self, key: Key, value: impl Into<Bytes>) {
        self.ops.push(Op::Put(key, value.into()));
    }

    /// An index entry: its key says everything.
    fn mark(&mut self, key: Key) {
        self.ops.push(Op::Put(key, Bytes::new()));
    }

    fn delete(&mut self, key: Key) {
        self.ops.push(Op::Delete(key));
    }
}

/// Tries `$body` until it yields a value by `break`ing with one; falling through means "read again".
macro_rules! until_settled {
    ($what:expr, $body:block) => {{
        let mut attempts = 0;
        loop {
            $body
            attempts += 1;
            if attempts == $crate::catalog::MAX_ATTEMPTS {
                return Err($crate::catalog::CatalogError::Contended { what: $what.to_string() });
            }
        }
    }};
}
use until_settled;

/// A pack's row as it lies in the store, for tests that put one in its place.
#[cfg(test)]
pub(crate) fn encoded_for_tests(row: &PackRow) -> Bytes {
    wire::encode(row).expect("a row of a test is small")
}

/// The row in an entry, for tests that look at the store itself.
#[cfg(test)]
pub(crate) fn decoded_pack_for_tests(entry: &Entry) -> PackRow {
    wire::decode(entry).expect("a row that was committed")
}

#[cfg(test)]
mod tests;
