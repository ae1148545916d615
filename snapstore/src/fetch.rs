//! From chunk ids to verified bytes: where copies are looked for, in which order, and what happens to bad ones.
//!
//! ```text
//!   fetch_run ──> here: frames in memory ──> cache ──> staged packs          one look for all chunks of the run
//!                    │ not here
//!                    └──> blob store: the frames they are in, neighbours in one read, single flight per frame
//!                            │ none good
//!                            └──> footers not read yet ──> here ──> blob store      (new places only)
//!                                    │ none good
//!                                    └──> the snapshot's packs as the catalog has them now ──> footers ──> …
//!
//!   every chunk from wherever ──> check: keyed hash == id ──> good: to the caller; its frame into cache and memory
//!                                                         ──> bad:  its frame is dropped, counted; next place
//! ```
//!
//! Invariants:
//! - nothing leaves that was not verified under the caller's key just now;
//! - a place that cannot be asked at the moment is not a place without a copy: if no other copy is good, the answer is
//!   [`ReadError::Unavailable`], never [`ReadError::NoGoodCopy`];
//! - reads in flight are bounded, local and remote ones separately, so that a stalled blob store does not hold up chunks
//!   that are here;
//! - however many callers want chunks of one frame, the blob store is asked once.

mod footers;
mod local;
mod remote;
mod scope;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use tokio::sync::Semaphore;

pub(crate) use self::footers::FooterError;
pub(crate) use self::scope::Scope;

use self::local::MemoryFrames;
use self::remote::Decoded;
use crate::blob::{BlobError, BlobStore};
use crate::cache::{ChunkCache, Place};
use crate::error::{ReadError, Source, Tried};
use crate::flight::Flights;
use crate::ids::{ChunkId, PackId};
use crate::pack::FramePlace;
use crate::staging::Staging;
use crate::stats::Counters;

/// A frame or footer from the blob store that does not verify is read again once: it may have been damaged on the way.
const REMOTE_TRIES: u32 = 2;

/// How much a fetcher does at once and keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchLimits {
    /// Looks at this node at the same time.
    pub(crate) local_at_once: usize,
    /// Reads of the blob store at the same time.
    pub(crate) remote_at_once: usize,
    /// Plain bytes of frames kept in memory.
    pub(crate) memory_bytes: u64,
}

/// The places chunks come from.
pub(crate) struct Fetcher {
    pub(crate) cache: Arc<ChunkCache>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) blobs: Arc<dyn BlobStore>,
    pub(crate) counters: Arc<Counters>,
    memory: MemoryFrames,
    frames: Flights<FramePlace, Result<Decoded, BlobError>>,
    footers: Flights<PackId, Result<(), FooterError>>,
    local_slots: Semaphore,
    remote_slots: Arc<Semaphore>,
}

/// One chunk that is being looked for.
struct Search {
    id: ChunkId,
    found: Option<Bytes>,
    tried: Vec<Tried>,
    /// Why not every place could be asked.
    unavailable: Option<String>,
    /// Packs that were asked for it.
    seen: HashSet<PackId>,
    /// Where it may be in the blob store, the likeliest place last.
    places: Vec<Place>,
}

impl Search {
    fn new(id: ChunkId) -> Self {
        let (tried, seen, places) = (Vec::new(), HashSet::new(), Vec::new());
        Self { id, found: None, tried, unavailable: None, seen, places }
    }

    fn is_open(&self) -> bool {
        self.found.is_none()
    }

    fn note(&mut self, source: Source, outcome: impl ToString) {
        self.tried.push(Tried { source, outcome: outcome.to_string() });
    }

    fn result(self) -> Result<Bytes, ReadError> {
        match (self.found, self.unavailable) {
            (Some(plain), _) => Ok(plain),
            (None, Some(cause)) => Err(ReadError::Unavailable { chunk: self.id, cause }),
            (None, None) => {
                let error = ReadError::NoGoodCopy { chunk: self.id, tried: self.tried };
                tracing::error!(chunk = %self.id, %error, "a chunk is lost");
                Err(error)
            }
        }
    }
}

impl Fetcher {
    pub(crate) fn new(
        cache: Arc<ChunkCache>,
        staging: Arc<Staging>,
        blobs: Arc<dyn BlobStore>,
        counters: Arc<Counters>,
        limits: FetchLimits,
    ) -> Arc<Self> {
        Arc::new(Self {
            cache,
            staging,
            blobs,
            counters,
            memory: MemoryFrames::new(limits.memory_bytes),
            frames: Flights::default(),
            footers: Flights::default(),
            local_slots: Semaphore::new(limits.local_at_once.max(1)),
            remote_slots: Arc::new(Semaphore::new(limits.remote_at_once.max(1))),
        })
    }

    /// The plain bytes of a chunk. Not for [`ChunkId::ZERO`], which is stored nowhere.
    pub(crate) async fn fetch(self: &Arc<Self>, scope: &Arc<Scope>, id: ChunkId) -> Result<Bytes, ReadError> {
        let mut one = self.fetch_run(scope, vec![id]).await?;
        Ok(one.pop().expect("one was asked for"))
    }

    /// The plain bytes of several chunks, in the order asked. Chunks that lie beside each other are cheapest together.
    pub(crate) async fn fetch_run(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        ids: Vec<ChunkId>,
    ) -> Result<Vec<Bytes>, ReadError> {
        let searches: Vec<Search> = ids.into_iter().map(Search::new).collect();
        let searches = self.look_here(scope, searches).await;
        let here = searches.iter().filter(|search| search.found.is_some()).count() as u64;
        let missing = searches.len() as u64 - here;
        self.counters.cache_hits.fetch_add(here, Ordering::Relaxed);
        self.counters.cache_misses.fetch_add(missing, Ordering::Relaxed);
        if missing == 0 {
            return searches.into_iter().map(Search::result).collect();
        }
        let mut searches = self.look_away(scope, searches).await;
        if searches.iter().any(Search::is_open) {
            searches = self.look_in_footers(scope, searches).await;
        }
        // Its chunks may have been moved since the snapshot was opened.
        if searches.iter().any(Search::is_open) {
            match scope.refresh().await {
                Ok(true) => searches = self.look_in_footers(scope, searches).await,
                Ok(false) => {}
                Err(error) => {
                    for search in searches.iter_mut().filter(|search| search.is_open()) {
                        search.unavailable = Some(error.to_string());
                    }
                }
            }
        }
        searches.into_iter().map(Search::result).collect()
    }

    /// Looks again when it is known of every pack what it holds.
    async fn look_in_footers(self: &Arc<Self>, scope: &Arc<Scope>, mut searches: Vec<Search>) -> Vec<Search> {
        for (pack, error) in self.load_footers(scope).await {
            for search in searches.iter_mut().filter(|search| search.is_open()) {
                match &error {
                    FooterError::Blob(error) if error.is_transient() => search.unavailable = Some(error.to_string()),
                    error => search.note(Source::Footer(pack), error),
                }
            }
        }
        let searches = self.look_here(scope, searches).await;
        self.look_away(scope, searches).await
    }

    fn bad_copy(&self, search: &mut Search, source: Source, error: &dyn ToString) {
        let outcome = error.to_string();
        tracing::warn!(chunk = %search.id, %source, outcome, "a copy of a chunk is no good");
        self.counters.bad_copies.fetch_add(1, Ordering::Relaxed);
        search.note(source, outcome);
    }

    /// Frames being fetched now.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.frames.len()
    }
}
