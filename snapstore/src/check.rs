//! Checking what is stored: every pack that a snapshot names is read whole from where it is kept, and every chunk in it is
//! compared with its name.
//!
//! ```text
//!   census ─▶ packs ─▶ whole? ─▶ footer ─▶ frames ─▶ chunks: good, or not
//!          └▶ reachable chunks without a good copy there: missing, with the snapshots that they hit
//! ```
//!
//! The node's cache is not what is checked, and does not count as a place: it may be gone tomorrow. [`check`] changes
//! nothing. [`repair`] does use the cache: whatever a hit snapshot needs and is good anywhere on this node or in the blob
//! store is copied into new packs, which its manifest names instead of the bad ones. A snapshot of which something is lost
//! for good keeps naming them: they may come back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::{BlobError, pack_key};
use crate::blocking::blocking;
use crate::catalog::Catalog;
use crate::census::{Census, CensusError};
use crate::chunk;
use crate::ids::{ChunkId, DomainKey, PackId, ShortId, SnapshotId};
use crate::pack::{self, PackRef};
use crate::rewrite::{Copy, RewriteError, Rewriter};
use crate::store::Store;

/// A pack in which something is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadPack {
    /// Which.
    pub id: PackId,
    /// What.
    pub reason: String,
}

/// A chunk that a snapshot needs and that has no good copy where it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingChunk {
    /// The chunk: the first half of its id.
    pub id: ShortId,
    /// The snapshots that cannot be read without it.
    pub snapshots: Vec<SnapshotId>,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// Snapshots.
    pub snapshots: u64,
    /// Packs read.
    pub packs: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Distinct chunks that a snapshot needs.
    pub chunks: u64,
    /// Chunks that are stored, and needed by none.
    pub unreachable_chunks: u64,
    /// Packs in which something is wrong.
    pub bad_packs: Vec<BadPack>,
    /// Chunks without a good copy; after a repair those that it found nowhere.
    pub missing: Vec<MissingChunk>,
    /// What a repair did.
    pub repaired: Repaired,
}

/// What a repair did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Repaired {
    /// Chunks that are in good packs again.
    pub chunks: u64,
    /// Snapshots whose manifests name those packs now.
    pub snapshots: u64,
}

impl CheckReport {
    /// Whether every snapshot can be read, and nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.bad_packs.is_empty() && self.missing.is_empty()
    }
}

/// Why a repair ended early. What was done by then stays done.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The examination.
    #[error(transparent)]
    Census(#[from] CensusError),
    /// The copying.
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
}

/// What is being done: a word for people, how much is done, and of how much.
pub type Progress<'a> = &'a (dyn Fn(&'static str, u64, u64) + Send + Sync);

/// What an examination found, for people and for a repair.
struct Examined {
    census: Census,
    report: CheckReport,
    /// Where each chunk has good copies: numbers of the census's packs.
    good: HashMap<ShortId, Vec<u32>>,
}

/// Checks everything.
pub async fn check(
    store: &Arc<Store>,
    catalog: &Arc<Catalog>,
    progress: Progress<'_>,
) -> Result<CheckReport, CensusError> {
    Ok(examine(store, catalog, progress).await?.report)
}

async fn examine(store: &Arc<Store>, catalog: &Arc<Catalog>, progress: Progress<'_>) -> Result<Examined, CensusError> {
    let census = Census::take(store, catalog, |done, total| progress("indexes", done, total)).await?;
    let mut report = CheckReport {
        snapshots: census.snapshots.len() as u64,
        chunks: census.reachable().len() as u64,
        unreachable_chunks: census.packs.iter().map(|usage| usage.dead_chunks).sum(),
        ..CheckReport::default()
    };
    let mut good = HashMap::<ShortId, Vec<u32>>::new();
    let lost = census.lost_packs.iter().map(|(id, reason)| BadPack { id: *id, reason: reason.clone() });
    report.bad_packs.extend(lost);
    let total = census.packs.len() as u64;
    for (number, usage) in (0..).zip(&census.packs) {
        let pack = usage.pack;
        let key = census.key_of(&pack.id).expect("a pack of the census has a domain");
        match read_pack(store, pack).await? {
            Ok(bytes) => {
                report.packs += 1;
                report.bytes += bytes.len() as u64;
                let (chunks, reason) = blocking(move || check_pack(key, pack, &bytes)).await;
                for chunk in chunks {
                    good.entry(chunk).or_default().push(number);
                }
                report.bad_packs.extend(reason.map(|reason| BadPack { id: pack.id, reason }));
            }
            Err(reason) => report.bad_packs.push(BadPack { id: pack.id, reason }),
        }
        progress("packs", u64::from(number) + 1, total);
    }
    let missing: HashSet<ShortId> = census.reachable().filter(|chunk| !good.contains_key(*chunk)).copied().collect();
    let mut hit = HashMap::<ShortId, Vec<SnapshotId>>::new();
    if !missing.is_empty() {
        hit = census.needed_by(store, catalog, &missing).await?;
    }
    report.missing =
        missing.into_iter().map(|id| MissingChunk { id, snapshots: hit.remove(&id).unwrap_or_default() }).collect();
    report.missing.sort_by_key(|missing| missing.id);
    Ok(Examined { census, report, good })
}

/// Checks everything, and repairs what it can.
pub async fn repair(rewriter: Rewriter<'_>, progress: Progress<'_>) -> Result<CheckReport, RepairError> {
    let Rewriter { store, catalog, .. } = rewriter;
    let Examined { census, mut report, good } = examine(store, catalog, progress).await?;
    let bad: HashSet<PackId> = report.bad_packs.iter().map(|pack| pack.id).collect();
    let mut hit: HashSet<SnapshotId> = bad.iter().flat_map(|pack| census.named_by(pack)).copied().collect();
    hit.extend(report.missing.iter().flat_map(|chunk| &chunk.snapshots));
    let mut lost = HashSet::new();
    let packs_of = |key| {
        let packs = census.packs.iter().map(|usage| usage.pack);
        packs.filter(|pack| census.key_of(&pack.id) == Some(key)).collect()
    };
    let total = hit.len() as u64;
    for (done, usage) in (1..).zip(census.snapshots.iter().filter(|usage| hit.contains(&usage.id))) {
        let sound = |id: &PackId| census.named_by(id).contains(&usage.id) && !bad.contains(id);
        let named = (0..).zip(&census.packs).filter(|(_, pack)| sound(&pack.pack.id)).map(|(number, _)| number);
        let named: HashSet<u32> = named.collect();
        let mut key = None;
        let safe = |id: &ChunkId| good.get(&id.short()).is_some_and(|at| at.iter().any(|pack| named.contains(pack)));
        let mut chunks = Vec::new();
        census
            .each_id(store, catalog, usage, |of, id| {
                key = Some(of);
                if !safe(&id) {
                    chunks.push(id);
                }
            })
            .await?;
        // Of a snapshot that was deleted meanwhile nothing is needed.
        let Some(key) = key else { continue };
        let mut seen = HashSet::new();
        chunks.retain(|chunk| seen.insert(*chunk));
        let packs = packs_of(key);
        let copy = Copy { key, out_of: bad.clone(), chunks, packs, snapshots: vec![usage.id], replace: true };
        let copied = rewriter.copy(copy).await?;
        report.repaired.chunks += copied.chunks;
        report.repaired.snapshots += copied.amended;
        lost.extend(copied.lost.iter().map(ChunkId::short));
        progress("repairs", done, total);
    }
    report.missing.retain(|chunk| lost.contains(&chunk.id));
    Ok(report)
}

/// A whole pack from where it is kept; the inner error says why it cannot be had.
async fn read_pack(store: &Arc<Store>, pack: PackRef) -> Result<Result<Bytes, String>, CensusError> {
    let fetcher = Arc::clone(store.fetcher());
    let staged = blocking(move || fetcher.staging.read_all(&pack.id)).await;
    if let Ok(Some(bytes)) = staged {
        return Ok(Ok(bytes));
    }
    match store.fetcher().blobs.get(&pack_key(&pack.id), pack::MAX_PACK_BYTES).await {
        Ok(bytes) => Ok(Ok(bytes)),
        Err(error) if error.is_transient() => {
            Err(CensusError::Unavailable { what: format!("pack {}", pack.id), reason: error.to_string() })
        }
        Err(BlobError::NotFound { .. }) => Ok(Err("it is not there".into())),
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// The good chunks of a pack, and what is wrong with it.
fn check_pack(key: DomainKey, pack: PackRef, bytes: &Bytes) -> (Vec<ShortId>, Option<String>) {
    let tail = usize::try_from(pack::tail_len(&pack)).ok().and_then(|len| bytes.len().checked_sub(len));
    let Some(tail) = tail.filter(|_| bytes.len() as u64 == pack.size_bytes) else {
        return (Vec::new(), Some(format!("it has {} bytes instead of {}", bytes.len(), pack.size_bytes)));
    };
    let frames = match pack::parse_tail(&pack, &bytes[tail..]) {
        Ok(frames) => frames,
        Err(error) => return (Vec::new(), Some(error.to_string())),
    };
    let mut reason = (!pack::is_whole(&pack.id, bytes)).then(|| "its bytes do not hash to its name".to_owned());
    let mut good = Vec::new();
    for frame in &frames {
        let range = frame.place(&pack.id).range();
        let at = |offset| usize::try_from(offset).expect("a pack is in memory");
        let Ok(plain) = chunk::decode(&bytes.slice(at(range.start)..at(range.end))) else {
            reason.get_or_insert_with(|| format!("the frame at {} does not decode", frame.offset));
            continue;
        };
        for (id, start, len) in frame.content.places() {
            let content = plain.get(start as usize..(start + len) as usize);
            let actual: Option<ChunkId> = content.map(|content| chunk::chunk_id(&key, content));
            if actual.is_some_and(|actual| actual.short() == id) {
                good.push(id);
            } else {
                reason.get_or_insert_with(|| {
                    format!("a chunk in the frame at {} is not what it is called", frame.offset)
                });
            }
        }
    }
    (good, reason)
}
