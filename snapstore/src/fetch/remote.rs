//! What the blob store has: frames, neighbours in one read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::future::{BoxFuture, Shared};
use futures::{FutureExt as _, StreamExt as _};

use super::{Fetcher, REMOTE_TRIES, Scope, Search};
use crate::blob::{BlobError, pack_key};
use crate::blocking::blocking;
use crate::cache::Place;
use crate::chunk::{self, FrameError};
use crate::error::Source;
use crate::ids::PackId;
use crate::pack::FramePlace;

/// A hole between two wanted frames that is read along rather than asked around.
const GAP_BYTES: u64 = 64 << 10;

/// The most bytes of one read: longer ones are cut, so that they go over several connections.
const MAX_RANGE_BYTES: u64 = 4 << 20;

/// A read that several frames wait for.
pub(super) type RangeFlight = Shared<BoxFuture<'static, Result<Bytes, BlobError>>>;

/// The plain content of a frame that arrived, unverified.
pub(super) type Decoded = Result<Bytes, FrameError>;

/// Chunks wanted of one frame: which of the searches, and where in it.
type Wanted = Vec<(usize, Place)>;

/// Frames of one pack that are read together: neighbours, or nearly.
fn coalesce(frames: impl Iterator<Item = FramePlace>) -> Vec<(PackId, Range<u64>)> {
    let mut ranges: Vec<(PackId, Range<u64>)> = Vec::new();
    for frame in frames {
        let end = frame.offset + u64::from(frame.len);
        match ranges.last_mut() {
            Some((pack, range))
                if *pack == frame.pack
                    && frame.offset.saturating_sub(range.end) <= GAP_BYTES
                    && end - range.start <= MAX_RANGE_BYTES =>
            {
                range.end = range.end.max(end);
            }
            _ => ranges.push((frame.pack, frame.offset..end)),
        }
    }
    ranges
}

impl Fetcher {
    /// Asks the blob store for everything that is still missing, place by place, until nothing is or no place is left.
    pub(super) async fn look_away(self: &Arc<Self>, scope: &Arc<Scope>, mut searches: Vec<Search>) -> Vec<Search> {
        loop {
            let mut wanted = BTreeMap::<FramePlace, Wanted>::new();
            for (number, search) in searches.iter_mut().enumerate().filter(|(_, search)| search.is_open()) {
                if let Some(place) = search.places.pop() {
                    search.seen.insert(place.frame.pack);
                    wanted.entry(place.frame).or_default().push((number, place));
                }
            }
            if wanted.is_empty() {
                return searches;
            }
            searches = self.ask_for(scope, searches, wanted).await;
        }
    }

    async fn ask_for(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        mut searches: Vec<Search>,
        wanted: BTreeMap<FramePlace, Wanted>,
    ) -> Vec<Search> {
        let new = wanted.keys().filter(|frame| !self.frames.contains(frame)).copied();
        let ranges: Vec<_> =
            coalesce(new).into_iter().map(|(pack, range)| (pack, self.range(pack, range.clone()), range)).collect();
        let mut arriving = futures::stream::FuturesUnordered::new();
        for (frame, wanted) in wanted {
            let inside = |(pack, _, range): &&(PackId, RangeFlight, Range<u64>)| {
                *pack == frame.pack && range.start <= frame.offset && frame.offset < range.end
            };
            let (flight, _) = self.frames.join(frame, || {
                let (read, from) = match ranges.iter().find(inside) {
                    Some((_, read, range)) => (read.clone(), range.start),
                    // It was in the air a moment ago.
                    None => (self.range(frame.pack, frame.range()), frame.offset),
                };
                let fetcher = Arc::clone(self);
                async move { fetcher.land(frame, read, from).await }
            });
            arriving.push(async move { (frame, wanted, flight.await) });
        }
        while let Some((frame, wanted, mut landed)) = arriving.next().await {
            let mut missing = wanted;
            for attempt in 1..=REMOTE_TRIES {
                match landed {
                    Ok(plain) => (searches, missing) = self.take_in(scope, searches, frame, missing, plain).await,
                    Err(error) => {
                        fail(&mut searches, &missing, frame, &error);
                        break;
                    }
                }
                if missing.is_empty() || attempt == REMOTE_TRIES {
                    break;
                }
                landed = Arc::clone(self).land(frame, self.range(frame.pack, frame.range()), frame.offset).await;
            }
        }
        searches
    }

    /// One frame out of a read, decoded and kept. Kept unverified: whoever takes a chunk out of it checks that chunk, and
    /// drops the frame if it is bad. What was kept before this flight began is not fetched again.
    async fn land(self: Arc<Self>, frame: FramePlace, read: RangeFlight, from: u64) -> Result<Decoded, BlobError> {
        if let Some(plain) = self.memory.get(&frame) {
            return Ok(Ok(plain));
        }
        let bytes = read.await?;
        blocking(move || {
            let start = usize::try_from(frame.offset - from).expect("reads are small");
            let bytes = bytes.slice(start..start + frame.len as usize);
            let plain = chunk::decode(&bytes);
            if let Ok(plain) = &plain {
                self.keep(&frame, &bytes, plain);
            }
            Ok(plain)
        })
        .await
    }

    /// A read of the blob store, counted and bounded, that starts when somebody waits for it.
    fn range(self: &Arc<Self>, pack: PackId, range: Range<u64>) -> RangeFlight {
        let fetcher = Arc::clone(self);
        let read = async move {
            let _slot = fetcher.remote_slots.acquire().await.expect("never closed");
            let began = Instant::now();
            let bytes = fetcher.blobs.get_range(&pack_key(&pack), range).await?;
            fetcher.counters.blob.record(bytes.len() as u64, began.elapsed());
            Ok(bytes)
        };
        read.boxed().shared()
    }

    /// Gives each search its chunk. Answers those whose chunk is bad; then the frame is not kept.
    async fn take_in(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        mut searches: Vec<Search>,
        frame: FramePlace,
        wanted: Wanted,
        plain: Decoded,
    ) -> (Vec<Search>, Wanted) {
        let (fetcher, scope) = (Arc::clone(self), Arc::clone(scope));
        blocking(move || {
            let source = Source::Blob(frame.pack);
            let mut bad = Wanted::new();
            for (number, place) in wanted {
                let search = &mut searches[number];
                let good = match &plain {
                    Ok(plain) => fetcher.take_checked(&scope, search, &place, source, plain),
                    Err(error) => {
                        fetcher.bad_copy(search, source, error);
                        false
                    }
                };
                if !good {
                    bad.push((number, place));
                }
            }
            if !bad.is_empty() {
                fetcher.drop_frame(&frame);
            }
            (searches, bad)
        })
        .await
    }
}

fn fail(searches: &mut [Search], wanted: &Wanted, frame: FramePlace, error: &BlobError) {
    for (number, _) in wanted {
        let search = &mut searches[*number];
        if error.is_transient() {
            search.unavailable = Some(error.to_string());
        } else {
            search.note(Source::Blob(frame.pack), error);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every frame is in exactly one range, no range is over the cap unless one frame is, and nothing is read in vain
        /// but small gaps.
        #[test]
        fn ranges_cover_the_frames(frames in prop::collection::btree_set((0..2u8, 0..200u64), 1..40)) {
            let frames: Vec<FramePlace> = frames
                .into_iter()
                .map(|(pack, at)| FramePlace { pack: PackId([pack; 32]), offset: at * 30_000, len: 20_000 })
                .collect();
            let ranges = coalesce(frames.iter().copied());
            for frame in &frames {
                let end = frame.offset + u64::from(frame.len);
                let holders = ranges.iter().filter(|(pack, range)| {
                    *pack == frame.pack && range.start <= frame.offset && end <= range.end
                });
                prop_assert_eq!(holders.count(), 1);
            }
            for (_, range) in &ranges {
                prop_assert!(range.end - range.start <= MAX_RANGE_BYTES);
            }
            let read: u64 = ranges.iter().map(|(_, range)| range.end - range.start).sum();
            let wanted: u64 = frames.iter().map(|frame| u64::from(frame.len)).sum();
            prop_assert!(read <= wanted + frames.len() as u64 * GAP_BYTES);
        }
    }
}
