//! What this node has: frames in memory, in the cache, in staged packs.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::{Fetcher, Scope, Search};
use crate::blocking::blocking;
use crate::cache::Place;
use crate::chunk;
use crate::error::Source;
use crate::pack::FramePlace;

/// Plain content of frames read lately: a frame holds neighbours, and who wants one wants the others next. Bounded by
/// bytes; what is read once in a long scan does not push out what is read again and again (S3-FIFO's idea, the library's
/// work).
pub(super) struct MemoryFrames(Cache<FramePlace, Bytes, ByBytes>);

#[derive(Clone)]
struct ByBytes;

impl Weighter<FramePlace, Bytes> for ByBytes {
    fn weight(&self, _: &FramePlace, plain: &Bytes) -> u64 {
        plain.len() as u64 + 128
    }
}

impl MemoryFrames {
    pub(super) fn new(bytes: u64) -> Self {
        let frames = usize::try_from(bytes / chunk::FRAME_TARGET_BYTES as u64).unwrap_or(usize::MAX);
        Self(Cache::with_weighter(frames.max(16), bytes, ByBytes))
    }

    pub(super) fn get(&self, place: &FramePlace) -> Option<Bytes> {
        self.0.get(place)
    }

    pub(super) fn insert(&self, place: FramePlace, plain: Bytes) {
        self.0.insert(place, plain);
    }

    pub(super) fn remove(&self, place: &FramePlace) {
        self.0.remove(place);
    }
}

impl Fetcher {
    /// One look at this node for everything that is still missing. Fills in where else it may be.
    pub(super) async fn look_here(self: &Arc<Self>, scope: &Arc<Scope>, mut searches: Vec<Search>) -> Vec<Search> {
        let _slot = self.local_slots.acquire().await.expect("never closed");
        let (fetcher, scope) = (Arc::clone(self), Arc::clone(scope));
        blocking(move || {
            let mut last = None;
            for search in searches.iter_mut().filter(|search| search.is_open()) {
                last = fetcher.look_for(&scope, search, last);
            }
            searches
        })
        .await
    }

    /// Looks for one chunk, beside the one found before it first. Answers where this one was found. Blocks.
    fn look_for(&self, scope: &Scope, search: &mut Search, last: Option<(Place, Bytes)>) -> Option<(Place, Bytes)> {
        if let Some((last, plain)) = last {
            let next = Place { start: last.start.saturating_add(last.len), ..last };
            if take(scope, search, &next, &plain) {
                return Some((next, plain));
            }
        }
        let packs = scope.packs();
        let mut places = self.cache.places(&search.id.short());
        places.retain(|place| !search.seen.contains(&place.frame.pack));
        // Our own packs are sure to exist as long as the snapshot does; others may be gone.
        places.sort_by_key(|place| !packs.has(&place.frame.pack));
        for place in &places {
            if let Some(plain) = self.frame_here(scope, search, place) {
                return Some((*place, plain));
            }
        }
        places.retain(|place| packs.has(&place.frame.pack) || self.cache.is_remote(&place.frame.pack));
        places.reverse();
        search.places = places;
        None
    }

    /// The plain frame at `place` from this node, if the chunk in it is good. Blocks.
    fn frame_here(&self, scope: &Scope, search: &mut Search, place: &Place) -> Option<Bytes> {
        let began = Instant::now();
        if let Some(plain) = self.memory.get(&place.frame) {
            if take(scope, search, place, &plain) {
                self.counters.memory.record(place.len.into(), began.elapsed());
                return Some(plain);
            }
            // Counted when it is found where it came from.
            self.memory.remove(&place.frame);
        }
        if let Some(frame) = self.cache.get(&place.frame) {
            if let Some(plain) = self.try_frame(scope, search, place, Source::Cache, &frame) {
                self.counters.disk.record(frame.len() as u64, began.elapsed());
                return Some(plain);
            }
            self.cache.remove(&place.frame);
        }
        let source = Source::Staged(place.frame.pack);
        match self.staging.read(&place.frame) {
            Ok(Some(frame)) => {
                let plain = self.try_frame(scope, search, place, source, &frame)?;
                self.counters.staged.record(frame.len() as u64, began.elapsed());
                Some(plain)
            }
            Ok(None) => None,
            Err(error) => {
                self.bad_copy(search, source, &error);
                None
            }
        }
    }

    /// Decodes a frame and takes the chunk out of it if it is good. Blocks.
    fn try_frame(
        &self,
        scope: &Scope,
        search: &mut Search,
        place: &Place,
        source: Source,
        frame: &Bytes,
    ) -> Option<Bytes> {
        match chunk::decode(frame) {
            Ok(plain) => {
                if self.take_checked(scope, search, place, source, &plain) {
                    self.memory.insert(place.frame, plain.clone());
                    return Some(plain);
                }
            }
            Err(error) => self.bad_copy(search, source, &error),
        }
        None
    }

    /// Takes the chunk out of its frame's plain content if it is good; counts a bad copy if not.
    pub(super) fn take_checked(
        &self,
        scope: &Scope,
        search: &mut Search,
        place: &Place,
        source: Source,
        plain: &Bytes,
    ) -> bool {
        let checked = match place.of(plain) {
            Some(content) => chunk::check(&scope.key, &search.id, content).map_err(|error| error.to_string()),
            None => Err(format!("the frame holds {} bytes", plain.len())),
        };
        match checked {
            Ok(()) => {
                search.found = Some(slice(place, plain));
                true
            }
            Err(error) => {
                self.bad_copy(search, source, &error);
                false
            }
        }
    }

    /// Keeps a frame that came from the blob store. Blocks.
    pub(super) fn keep(&self, place: &FramePlace, frame: &Bytes, plain: &Bytes) {
        self.cache.put(place, frame);
        self.memory.insert(*place, plain.clone());
    }

    /// Drops a frame in which something was bad. Blocks.
    pub(super) fn drop_frame(&self, place: &FramePlace) {
        self.memory.remove(place);
        self.cache.remove(place);
    }
}

fn slice(place: &Place, plain: &Bytes) -> Bytes {
    plain.slice(place.start as usize..(place.start + place.len) as usize)
}

/// Takes the chunk if it lies at `place`, which is a guess: no harm if it does not.
fn take(scope: &Scope, search: &mut Search, place: &Place, plain: &Bytes) -> bool {
    let good = place.of(plain).is_some_and(|content| chunk::check(&scope.key, &search.id, content).is_ok());
    if good {
        search.found = Some(slice(place, plain));
    }
    good
}
