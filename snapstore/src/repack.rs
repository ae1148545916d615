//! Packs that are mostly dead: what is still needed of them is copied into new packs, and they are not named any more.
//!
//! ```text
//!   census ─▶ packs of which less than half is needed
//!               nothing is needed ───────────────────────▶ not named any more
//!               all that is needed is in other packs that
//!               every snapshot names that names this one ▶ not named any more, once those are uploaded
//!               else ────────────────────────────────────▶ copied, the copies named as well: next time, the above
//! ```
//!
//! What no snapshot names is the collector's business ([`crate::gc`]). A guest that runs from a snapshot whose packs went
//! finds its chunks where they are now ([`crate::SnapshotReader::following`]).
//!
//! Half dead is where copying one byte frees one. The census is not one state, and that does no harm: a snapshot that it
//! missed names for itself what it needs.
//!
//! Crash anywhere: each manifest is amended, or not; the next time goes on from there.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::catalog::{Amended, CatalogError, LeaseHolder, Removal};
use crate::census::{self, Census, CensusError, PackUsage};
use crate::ids::{DomainKey, PackId, ShortId, SnapshotId};
use crate::rewrite::{Copy, RewriteError, Rewriter};

/// The lease of whoever repacks: two at once would copy everything twice.
const LEASE: &str = "repack";
const LEASE_MS: i64 = 600 * 1000;

/// Compressed bytes that are copied at a time, at most.
const COPIED_AT_ONCE: u64 = 1 << 30;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Repacked {
    /// Packs whose chunks were copied.
    pub packs_copied: u64,
    /// Compressed bytes written for that.
    pub bytes_written: u64,
    /// Packs that are named by fewer snapshots than before.
    pub packs_dropped: u64,
    /// Their bytes.
    pub bytes_dropped: u64,
    /// Manifests that were changed, and are to be uploaded.
    pub snapshots_amended: u64,
}

/// Why it ended early. What was done by then stays done.
#[derive(Debug, thiserror::Error)]
pub enum RepackError {
    /// The census.
    #[error(transparent)]
    Census(#[from] CensusError),
    /// The copying.
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
    /// A part of what is stored cannot be read, so nobody knows what is needed.
    #[error("not while a part of what is stored cannot be read")]
    Damaged,
}

impl From<CatalogError> for RepackError {
    fn from(error: CatalogError) -> Self {
        Self::Rewrite(error.into())
    }
}

/// Less than half of it is needed.
fn is_mostly_dead(usage: &PackUsage) -> bool {
    usage.live_bytes * 2 < usage.pack.size_bytes
}

/// A pack that is mostly dead, and what of it is needed, in the order in which it lies there.
struct Candidate {
    usage: PackUsage,
    needed: Vec<ShortId>,
}

/// What is to be done with a candidate.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// It need not be named where these are.
    Drop { given: HashSet<PackId> },
    /// What is needed of it is to be copied.
    Copy,
}

/// `holders`: the packs that hold a chunk; `named_by`: the snapshots that name a pack. Of two packs that could stand in for
/// each other one is kept.
fn decide(
    candidates: &[Candidate],
    holders: &HashMap<ShortId, Vec<PackId>>,
    named_by: impl Fn(&PackId) -> HashSet<SnapshotId>,
) -> Vec<Fate> {
    let mut dropped = HashSet::new();
    let fate = |candidate: &Candidate| {
        let this = candidate.usage.pack.id;
        let namers = named_by(&this);
        let mut given = HashSet::new();
        for chunk in &candidate.needed {
            let others = holders.get(chunk).map_or(&[][..], Vec::as_slice);
            let stands_in =
                |other: &&PackId| **other != this && !dropped.contains(*other) && namers.is_subset(&named_by(other));
            match others.iter().find(|other| given.contains(*other)).or_else(|| others.iter().find(stands_in)) {
                Some(other) => given.insert(*other),
                None => return Fate::Copy,
            };
        }
        dropped.insert(this);
        Fate::Drop { given }
    };
    candidates.iter().map(fate).collect()
}

/// One round. `None`: another process is at it.
pub async fn repack(rewriter: Rewriter<'_>) -> Result<Option<Repacked>, RepackError> {
    let Some(lease) = rewriter.catalog.acquire_lease(LEASE, LeaseHolder::random(), LEASE_MS).await? else {
        return Ok(None);
    };
    let done = round(rewriter).await;
    rewriter.catalog.release_lease(&lease).await?;
    done.map(Some)
}

async fn round(rewriter: Rewriter<'_>) -> Result<Repacked, RepackError> {
    let Rewriter { store, catalog, .. } = rewriter;
    let census = Census::take(store, catalog, |_, _| {}).await?;
    if !census.lost_nodes.is_empty() || !census.lost_packs.is_empty() {
        return Err(RepackError::Damaged);
    }
    let mut candidates = Vec::new();
    for usage in census.packs.iter().filter(|usage| is_mostly_dead(usage)) {
        let chunks = rewriter.chunks_of(usage).await?;
        let needed = chunks.into_iter().filter(|chunk| census.is_reachable(chunk)).collect();
        candidates.push(Candidate { usage: *usage, needed });
    }
    if candidates.is_empty() {
        return Ok(Repacked::default());
    }
    let wanted: HashSet<ShortId> = candidates.iter().flat_map(|candidate| &candidate.needed).copied().collect();
    let mut holders = HashMap::<ShortId, Vec<PackId>>::new();
    for usage in &census.packs {
        for chunk in rewriter.chunks_of(usage).await?.into_iter().filter(|chunk| wanted.contains(chunk)) {
            holders.entry(chunk).or_default().push(usage.pack.id);
        }
    }
    let fates = decide(&candidates, &holders, |pack| census.named_by(pack).iter().copied().collect());

    let mut done = Repacked::default();
    let mut to_drop = BTreeMap::<SnapshotId, Removal>::new();
    let mut to_copy = BTreeMap::<[u8; 32], (DomainKey, Vec<Candidate>)>::new();
    let mut left = COPIED_AT_ONCE;
    for (candidate, fate) in candidates.into_iter().zip(fates) {
        match fate {
            Fate::Drop { given } => {
                for snapshot in census.named_by(&candidate.usage.pack.id) {
                    let removal = to_drop.entry(*snapshot).or_insert_with(|| rewriter.removal());
                    removal.packs.insert(candidate.usage.pack.id);
                    removal.given.extend(&given);
                }
            }
            Fate::Copy if candidate.usage.live_bytes <= left => {
                left -= candidate.usage.live_bytes;
                let key = census.key_of(&candidate.usage.pack.id).expect("a pack of the census has a domain");
                to_copy.entry(key.0).or_insert_with(|| (key, Vec::new())).1.push(candidate);
            }
            Fate::Copy => {}
        }
    }
    rewriter.drop_packs(&census, to_drop, &mut done).await?;
    for (key, candidates) in to_copy.into_values() {
        rewriter.copy_packs(&census, key, candidates, &mut done).await?;
    }
    Ok(done)
}

impl Rewriter<'_> {
    async fn chunks_of(&self, usage: &PackUsage) -> Result<Vec<ShortId>, CensusError> {
        let frames = census::footer(self.store, usage.pack).await.map_err(|error| CensusError::Unavailable {
            what: format!("the footer of pack {}", usage.pack.id),
            reason: error.to_string(),
        })?;
        Ok(frames.into_iter().flat_map(|frame| frame.content.chunks).collect())
    }

    fn removal(&self) -> Removal {
        Removal { packs: HashSet::new(), given: HashSet::new(), node: self.node.clone() }
    }

    async fn drop_packs(
        &self,
        census: &Census,
        removals: BTreeMap<SnapshotId, Removal>,
        done: &mut Repacked,
    ) -> Result<(), CatalogError> {
        let mut dropped = HashSet::new();
        for (snapshot, mut removal) in removals {
            // One that goes itself has one that stands in for it, which is given, too.
            removal.given.retain(|pack| !removal.packs.contains(pack));
            if self.catalog.drop_packs(&snapshot, &removal).await? == Amended::Changed {
                done.snapshots_amended += 1;
                dropped.extend(removal.packs);
            }
        }
        for usage in census.packs.iter().filter(|usage| dropped.contains(&usage.pack.id)) {
            done.packs_dropped += 1;
            done.bytes_dropped += usage.pack.size_bytes;
        }
        Ok(())
    }

    async fn copy_packs(
        &self,
        census: &Census,
        key: DomainKey,
        candidates: Vec<Candidate>,
        done: &mut Repacked,
    ) -> Result<(), RepackError> {
        let out_of: HashSet<PackId> = candidates.iter().map(|candidate| candidate.usage.pack.id).collect();
        let snapshots: HashSet<SnapshotId> = out_of.iter().flat_map(|pack| census.named_by(pack)).copied().collect();
        let wanted = candidates.iter().flat_map(|candidate| &candidate.needed).copied().collect();
        let ids = census.ids(self.store, self.catalog, &snapshots, &wanted).await?;
        let mut chunks = Vec::with_capacity(wanted.len());
        let mut seen = HashSet::new();
        for chunk in candidates.iter().flat_map(|candidate| &candidate.needed) {
            // Of a snapshot that was deleted meanwhile nothing is needed.
            if let Some(id) = ids.get(chunk).filter(|_| seen.insert(*chunk)) {
                chunks.push(*id);
            }
        }
        let mut snapshots: Vec<SnapshotId> = snapshots.into_iter().collect();
        snapshots.sort_unstable();
        let packs = candidates.iter().map(|candidate| candidate.usage.pack).collect();
        let copy = Copy { key, out_of, chunks, packs, snapshots, replace: false };
        let copied = self.copy(copy).await?;
        done.packs_copied += candidates.len() as u64;
        done.bytes_written += copied.bytes_new;
        done.snapshots_amended += copied.amended;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pack::PackRef;

    fn candidate(number: u8, needed: &[u8]) -> Candidate {
        let pack = PackRef { id: PackId([number; 32]), size_bytes: 1000, frames: 1, chunks: 10 };
        let usage = PackUsage { pack, live_bytes: 1, chunks: 10, dead_chunks: 9 };
        Candidate { usage, needed: needed.iter().map(|chunk| ShortId([*chunk; 16])).collect() }
    }

    proptest! {
        /// Whatever is dropped: each snapshot that named it names a pack that is kept with each of the chunks.
        #[test]
        fn nobody_is_left_without_a_chunk(
            holds in prop::collection::vec(prop::collection::btree_set(0..6u8, 0..4), 1..8),
            names in prop::collection::vec(prop::collection::btree_set(0..4u128, 1..4), 8),
        ) {
            let namers = |pack: &PackId| -> HashSet<SnapshotId> {
                names[usize::from(pack.0[0])].iter().map(|id| SnapshotId(uuid::Uuid::from_u128(*id))).collect()
            };
            let candidates: Vec<Candidate> = (0..).zip(&holds).map(|(number, chunks)| {
                candidate(number, &chunks.iter().copied().collect::<Vec<u8>>())
            }).collect();
            let mut holders = HashMap::<ShortId, Vec<PackId>>::new();
            for candidate in &candidates {
                for chunk in &candidate.needed {
                    holders.entry(*chunk).or_default().push(candidate.usage.pack.id);
                }
            }
            let fates = decide(&candidates, &holders, namers);
            let kept = |candidate: &&Candidate| {
                let at = usize::from(candidate.usage.pack.id.0[0]);
                fates[at] == Fate::Copy
            };
            for (candidate, fate) in candidates.iter().zip(&fates) {
                let Fate::Drop { given } = fate else { continue };
                for snapshot in namers(&candidate.usage.pack.id) {
                    prop_assert!(given.iter().all(|pack| namers(pack).contains(&snapshot)));
                    for chunk in &candidate.needed {
                        let has = |other: &Candidate| {
                            other.needed.contains(chunk) && namers(&other.usage.pack.id).contains(&snapshot)
                        };
                        prop_assert!(candidates.iter().filter(kept).any(has));
                    }
                }
            }
        }

        /// What is needed of a pack and in no other is copied.
        #[test]
        fn what_is_nowhere_else_is_copied(chunks in prop::collection::vec(0..6u8, 1..4)) {
            let candidates = [candidate(0, &chunks)];
            let holders = chunks.iter().map(|chunk| (ShortId([*chunk; 16]), vec![PackId([0; 32])])).collect();
            prop_assert_eq!(decide(&candidates, &holders, |_| HashSet::new()), vec![Fate::Copy]);
        }
    }
}
