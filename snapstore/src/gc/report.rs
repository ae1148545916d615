//! What a collection found and did.

use crate::catalog::PackRow;

/// How many, and how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Objects.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }

    pub(super) fn add_pack(&mut self, pack: &PackRow) {
        self.add(pack.size_bytes);
    }
}

/// What a collection found and did; of a dry run, what it would have done, as far as one cycle goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Nothing was written.
    pub dry_run: bool,
    /// Snapshots whose manifests were read.
    pub snapshots: u64,
    /// Packs that they use.
    pub used: Tally,
    /// Packs that went from live to condemned.
    pub condemned: Tally,
    /// Packs that went back to live: a snapshot uses them after all.
    pub restored: Tally,
    /// Packs that went from condemned to doomed.
    pub doomed: Tally,
    /// Packs whose object was deleted and whose row is a tombstone now.
    pub deleted: Tally,
    /// Doomed packs whose object could not be deleted; tried again in the next cycle.
    pub delete_failed: Tally,
    /// Pack objects without a row that have a condemned one now.
    pub adopted: Tally,
    /// Objects of packs that are gone, which had appeared again, or had never gone, and were deleted.
    pub deleted_again: Tally,
    /// Manifest objects seen without a snapshot for the first time.
    pub orphans_marked: Tally,
    /// Manifest objects without a snapshot that were deleted.
    pub orphans_deleted: Tally,
    /// Objects under keys that are not ours. They stay.
    pub strange_keys: u64,
    /// Tombstones that were removed.
    pub purged: u64,
    /// Processes that were counted as dead.
    pub writers_ended: u64,
    /// Writes whose outcome is not known, or that found a changed row; left to the next cycle.
    pub unsettled: u64,
    /// Packs that a snapshot names though they are doomed or gone. Must be 0: such a snapshot cannot be read. They are
    /// left as they are.
    pub named_while_leaving: u64,
}
