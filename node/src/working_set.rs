//! The working set of a snapshot: recorded at its first restores, read ahead at later ones.
//!
//! ```text
//! guest runs ─► touches… ─► quiet for a while, or long enough ─► recording, to the catalog     (the first few restores)
//! snapshot opened ─► recordings merged ─► batches into the shared images, a few at a time      (with the first guest)
//! ```
//!
//! A hint and nothing else: without it, or with a wrong one, every page still comes when it is touched. Reading ahead never
//! keeps a demand waiting for longer than one batch: what it has not begun, a fault reads by itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use snapyard_snapstore::DEFAULT_CHUNK_BYTES;
use snapyard_snapstore::catalog::{RECORDINGS, Recording};
use snapyard_vmm::{ChunkNo, MemoryImage, Touches};
use tokio_util::sync::CancellationToken;

use crate::node::State;
use crate::residency::Resident;
use crate::source::FILL_BYTES;

/// How often a guest's touches are counted.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Looks without a new touch after which a guest that has been used counts as idle.
const QUIET_LOOKS: u32 = 4;
/// When a recording ends at the latest, idle or not.
const DEADLINE: Duration = Duration::from_secs(5);
/// Units in one read: 1 MiB.
const BATCH: usize = 16;
/// Reads ahead at the same time, of each image.
const DEPTH: usize = 4;

/// Chunks of an image per unit that it is filled by.
const PER_UNIT: u64 = (FILL_BYTES / DEFAULT_CHUNK_BYTES) as u64;

/// One order of several recordings' units: by the place in which most touched them first. What only a minority of the
/// restores touched is left out.
pub fn merge(recordings: &[Recording]) -> Recording {
    Recording {
        memory: merge_lists(recordings.iter().map(|recording| recording.memory.as_slice())),
        disk: merge_lists(recordings.iter().map(|recording| recording.disk.as_slice())),
    }
}

fn merge_lists<'a>(lists: impl Iterator<Item = &'a [u64]> + Clone) -> Vec<u64> {
    let count = lists.clone().count();
    let mut places: HashMap<u64, Vec<usize>> = HashMap::new();
    for list in lists {
        for (place, chunk) in list.iter().enumerate() {
            places.entry(*chunk).or_default().push(place);
        }
    }
    let mut ranked: Vec<(usize, u64)> = places
        .into_iter()
        .filter(|(_, seen)| seen.len() * 2 >= count)
        .map(|(chunk, mut seen)| {
            seen.sort_unstable();
            (seen[seen.len() / 2], chunk)
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, chunk)| chunk).collect()
}

/// Reads what earlier restores of a snapshot touched ahead into its images, once. Ends when all of it is there or could
/// not be had, or when the node stops.
pub async fn read_ahead(resident: Arc<Resident>, stop: CancellationToken) {
    if resident.read_ahead.swap(true, Ordering::Relaxed) {
        return;
    }
    let set = &resident.working_set;
    let both = async { tokio::join!(fill(&resident.memory, &set.memory), fill(&resident.disk, &set.disk)) };
    stop.run_until_cancelled(both).await;
}

async fn fill(image: &MemoryImage, chunks: &[u64]) {
    let mut units: Vec<ChunkNo> = chunks.iter().map(|chunk| ChunkNo(chunk / PER_UNIT)).collect();
    units.retain(|unit| !image.is_ready(*unit));
    let batches: Vec<Vec<ChunkNo>> = units.chunks(BATCH).map(<[ChunkNo]>::to_vec).collect();
    let reads = batches.into_iter().map(|batch| image.prefetch(batch));
    futures::stream::iter(reads).buffer_unordered(DEPTH).collect::<()>().await;
}

/// Watches what a guest touches from its first instant on and records it, if it is one of the first of its snapshot. Ends
/// early when the guest is cut off.
pub async fn record(node: Arc<State>, resident: Arc<Resident>, touches: Touches, cut: CancellationToken) {
    if resident.recordings.fetch_add(1, Ordering::Relaxed) >= RECORDINGS {
        return;
    }
    let chunks = |units: Vec<ChunkNo>| units.into_iter().map(|unit| unit.0 * PER_UNIT).collect();
    let touched = || Recording { memory: chunks(touches.memory()), disk: chunks(touches.disk()) };
    let recorded = cut.run_until_cancelled(watch(touched)).await;
    let Some(recording) = recorded.filter(|recording| !recording.memory.is_empty()) else {
        // Another guest may have more to tell.
        resident.recordings.fetch_sub(1, Ordering::Relaxed);
        return;
    };
    let (memory, disk) = (recording.memory.len(), recording.disk.len());
    match node.catalog.add_recording(&resident.id, recording).await {
        Ok(count) => tracing::debug!(snapshot = %resident.id, memory, disk, count, "working set recorded"),
        Err(error) => tracing::debug!(snapshot = %resident.id, %error, "a working set is not kept"),
    }
}

/// What was touched when the guest fell quiet, or at the deadline.
async fn watch(touched: impl Fn() -> Recording) -> Recording {
    let began = tokio::time::Instant::now();
    let (mut last, mut quiet) = (Recording::default(), 0);
    while began.elapsed() < DEADLINE && quiet < QUIET_LOOKS {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = touched();
        quiet = if now == last { quiet + 1 } else { 0 };
        last = now;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(memory: &[u64]) -> Recording {
        Recording { memory: memory.to_vec(), disk: Vec::new() }
    }

    #[test]
    fn what_most_touched_comes_in_the_order_of_most() {
        assert_eq!(merge(&[]), Recording::default());
        assert_eq!(merge(&[recording(&[3, 1, 2])]).memory, [3, 1, 2]);
        let three = [recording(&[1, 2, 3, 9]), recording(&[1, 3, 2]), recording(&[2, 1, 3])];
        assert_eq!(merge(&three).memory, [1, 2, 3], "9 was touched by one alone");
        let two = [recording(&[1, 2]), recording(&[2, 5])];
        assert_eq!(merge(&two).memory, [1, 2, 5], "of two, one is half");
    }

    #[tokio::test(start_paused = true)]
    async fn a_recording_ends_when_the_guest_is_quiet_or_at_the_deadline() {
        let began = tokio::time::Instant::now();
        let until = move |quiet_after: Duration| {
            move || {
                let looks = began.elapsed().min(quiet_after).as_millis() / LOOK_EVERY.as_millis();
                recording(&(0..looks as u64).collect::<Vec<_>>())
            }
        };
        let quiet = watch(until(Duration::from_secs(1))).await;
        assert_eq!(quiet.memory.len(), 4);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        let busy = watch(until(Duration::from_secs(3600))).await;
        assert!(!busy.memory.is_empty());
        assert!(began.elapsed() < DEADLINE + Duration::from_secs(5));
    }
}
