//! From a chunk id to verified bytes: where copies are looked for, in which order, and what happens to bad ones.
//!
//! ```text
//!   fetch ─┬─ single flight per chunk id
//!          │
//!          └─> cache ──> staged packs ──> blob store ──> footers not read yet ──> staged packs ──> blob store
//!                │            │               │                                        (of the new places)
//!                └────────────┴───────────────┴──> verify: decode, keyed hash == id
//!                                                    good: into the cache (unless it came from there), to all callers
//!                                                    bad:  dropped, counted, next place
//! ```
//!
//! Invariants:
//! - nothing leaves that was not verified under the caller's key just now;
//! - a place that cannot be asked at the moment is not a place without a copy: if no other copy is good, the answer is
//!   [`ReadError::Unavailable`], never [`ReadError::NoGoodCopy`];
//! - reads in flight are bounded, local and remote ones separately, so that a stalled blob store does not hold up chunks
//!   that are here.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::StreamExt as _;
use tokio::sync::Semaphore;

use crate::blob::{BlobError, BlobStore, pack_key};
use crate::blocking::blocking;
use crate::cache::{ChunkCache, Location};
use crate::chunk;
use crate::error::{ReadError, Source, Tried};
use crate::flight::Flights;
use crate::ids::{ChunkId, DomainKey, PackId};
use crate::pack::{self, PackError, PackRef};
use crate::staging::Staging;
use crate::stats::Counters;

/// Footers read at the same time.
const FOOTERS_AT_ONCE: usize = 8;

/// A chunk or footer from the blob store that does not verify is read again once: it may have been damaged on the way.
const REMOTE_TRIES: u32 = 2;

/// What a reader may see: its domain's key, and the packs that hold its chunks.
pub(crate) struct Scope {
    pub(crate) key: DomainKey,
    pub(crate) packs: Vec<PackRef>,
    ids: HashSet<PackId>,
    footers_known: AtomicBool,
}

impl Scope {
    pub(crate) fn new(key: DomainKey, packs: Vec<PackRef>) -> Arc<Self> {
        let ids = packs.iter().map(|pack| pack.id).collect();
        Arc::new(Self { key, packs, ids, footers_known: AtomicBool::new(false) })
    }
}

/// Why a pack's footer could not be read.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum FooterError {
    #[error(transparent)]
    Blob(#[from] BlobError),
    #[error(transparent)]
    Pack(#[from] PackError),
}

/// The places chunks come from.
pub(crate) struct Fetcher {
    pub(crate) cache: Arc<ChunkCache>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) blobs: Arc<dyn BlobStore>,
    pub(crate) counters: Arc<Counters>,
    chunks: Flights<ChunkId, Result<Bytes, SearchFailed>>,
    footers: Flights<PackId, Result<(), FooterError>>,
    local_slots: Semaphore,
    remote_slots: Semaphore,
}

/// A search that found no good copy, and where it was allowed to look.
#[derive(Clone)]
struct SearchFailed {
    error: ReadError,
    scope: Arc<Scope>,
}

impl SearchFailed {
    /// Whether a search in `scope` would have failed likewise.
    fn answers(&self, scope: &Scope) -> bool {
        self.error.is_transient() || (self.scope.key == scope.key && scope.ids.is_subset(&self.scope.ids))
    }
}

/// What one look at this node found.
enum Local {
    Found(Bytes),
    /// Not here; these places in the blob store may have it.
    Elsewhere(Vec<Location>),
}

/// What was tried for one chunk so far.
#[derive(Default)]
struct Attempt {
    tried: Vec<Tried>,
    unavailable: Option<BlobError>,
    seen: HashSet<PackId>,
}

impl Attempt {
    fn note(&mut self, source: Source, outcome: impl ToString) {
        self.tried.push(Tried { source, outcome: outcome.to_string() });
    }
}

impl Fetcher {
    pub(crate) fn new(
        cache: Arc<ChunkCache>,
        staging: Arc<Staging>,
        blobs: Arc<dyn BlobStore>,
        counters: Arc<Counters>,
        local_at_once: usize,
        remote_at_once: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            cache,
            staging,
            blobs,
            counters,
            chunks: Flights::default(),
            footers: Flights::default(),
            local_slots: Semaphore::new(local_at_once.max(1)),
            remote_slots: Semaphore::new(remote_at_once.max(1)),
        })
    }

    /// The plain bytes of a chunk. Not for [`ChunkId::ZERO`], which is stored nowhere.
    pub(crate) async fn fetch(self: &Arc<Self>, scope: &Arc<Scope>, id: ChunkId) -> Result<Bytes, ReadError> {
        loop {
            let start = || {
                let (fetcher, scope) = (Arc::clone(self), Arc::clone(scope));
                async move {
                    let found = fetcher.look_everywhere(&scope, id).await;
                    found.map_err(|error| SearchFailed { error, scope })
                }
            };
            let (flight, mine) = self.chunks.join(id, start);
            match flight.await {
                Ok(plain) => return Ok(plain),
                // Somebody else searched in packs that are not ours, and not in all of ours: search ourselves.
                Err(failed) if !mine && !failed.answers(scope) => {}
                Err(failed) => return Err(failed.error),
            }
        }
    }

    async fn look_everywhere(self: &Arc<Self>, scope: &Arc<Scope>, id: ChunkId) -> Result<Bytes, ReadError> {
        let mut attempt = Attempt::default();
        if let Some(plain) = self.look_in_cache(scope, id, &mut attempt).await {
            self.counters.cache_hits.fetch_add(1, Ordering::Relaxed);
            return Ok(plain);
        }
        self.counters.cache_misses.fetch_add(1, Ordering::Relaxed);
        if let Some(plain) = self.look_in_known_places(scope, id, &mut attempt).await {
            return Ok(plain);
        }
        let failures = self.load_footers(scope).await;
        for (pack, error) in failures {
            match error {
                FooterError::Blob(error) if error.is_transient() => attempt.unavailable = Some(error),
                error => attempt.note(Source::Footer(pack), error),
            }
        }
        if let Some(plain) = self.look_in_known_places(scope, id, &mut attempt).await {
            return Ok(plain);
        }
        match attempt.unavailable {
            Some(cause) => Err(ReadError::Unavailable { chunk: id, cause }),
            None => {
                let error = ReadError::NoGoodCopy { chunk: id, tried: attempt.tried };
                tracing::error!(chunk = %id, %error, "a chunk is lost");
                Err(error)
            }
        }
    }

    async fn look_in_cache(self: &Arc<Self>, scope: &Arc<Scope>, id: ChunkId, attempt: &mut Attempt) -> Option<Bytes> {
        let _slot = self.local_slots.acquire().await.expect("never closed");
        let (fetcher, key) = (Arc::clone(self), scope.key);
        let looked = blocking(move || {
            let frame = fetcher.cache.get(&id)?;
            let verified = chunk::verify(&key, &id, &frame);
            if verified.is_err() {
                fetcher.cache.remove(&id);
            }
            Some(verified)
        });
        match looked.await? {
            Ok(plain) => Some(plain),
            Err(error) => {
                self.bad_copy(id, Source::Cache, &error, attempt);
                None
            }
        }
    }

    /// Staged packs, then the blob store; places that were tried before are left out.
    async fn look_in_known_places(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        id: ChunkId,
        attempt: &mut Attempt,
    ) -> Option<Bytes> {
        let places = match self.look_in_staging(scope, id, attempt).await {
            Local::Found(plain) => return Some(plain),
            Local::Elsewhere(places) => places,
        };
        for place in places {
            if let Some(plain) = self.look_in_blob(scope, id, place, attempt).await {
                return Some(plain);
            }
        }
        None
    }

    async fn look_in_staging(self: &Arc<Self>, scope: &Arc<Scope>, id: ChunkId, attempt: &mut Attempt) -> Local {
        let _slot = self.local_slots.acquire().await.expect("never closed");
        let (fetcher, scope, seen) = (Arc::clone(self), Arc::clone(scope), attempt.seen.clone());
        let (found, bad, places) = blocking(move || {
            let mut places = fetcher.cache.locations(&id);
            places.retain(|place| !seen.contains(&place.pack));
            // Our own packs are sure to exist as long as the snapshot does; others may be gone.
            places.sort_by_key(|place| !scope.ids.contains(&place.pack));
            let mut bad = Vec::new();
            for place in &places {
                let frame = match fetcher.staging.read(&place.pack, place.offset, place.len) {
                    Ok(Some(frame)) => frame,
                    Ok(None) => continue,
                    Err(error) => {
                        bad.push((place.pack, error.to_string()));
                        continue;
                    }
                };
                match chunk::verify(&scope.key, &id, &frame) {
                    Ok(plain) => {
                        fetcher.cache.put(&id, &frame);
                        return (Some(plain), bad, Vec::new());
                    }
                    Err(error) => bad.push((place.pack, error.to_string())),
                }
            }
            places.retain(|place| scope.ids.contains(&place.pack) || fetcher.cache.is_remote(&place.pack));
            (None, bad, places)
        })
        .await;
        for (pack, error) in bad {
            self.bad_copy(id, Source::Staged(pack), &error, attempt);
        }
        found.map_or(Local::Elsewhere(places), Local::Found)
    }

    async fn look_in_blob(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        id: ChunkId,
        place: Location,
        attempt: &mut Attempt,
    ) -> Option<Bytes> {
        attempt.seen.insert(place.pack);
        let source = Source::Blob(place.pack);
        let _slot = self.remote_slots.acquire().await.expect("never closed");
        for _ in 0..REMOTE_TRIES {
            let range = place.offset..place.offset + u64::from(place.len);
            let frame = match self.blobs.get_range(&pack_key(&place.pack), range).await {
                Ok(frame) => frame,
                Err(error) if error.is_transient() => {
                    attempt.unavailable = Some(error);
                    return None;
                }
                Err(error) => {
                    attempt.note(source, error);
                    return None;
                }
            };
            let (fetcher, key) = (Arc::clone(self), scope.key);
            let verified = blocking(move || {
                let verified = chunk::verify(&key, &id, &frame);
                if verified.is_ok() {
                    fetcher.cache.put(&id, &frame);
                }
                verified
            });
            match verified.await {
                Ok(plain) => return Some(plain),
                Err(error) => self.bad_copy(id, source, &error, attempt),
            }
        }
        None
    }

    fn bad_copy(&self, id: ChunkId, source: Source, error: &dyn ToString, attempt: &mut Attempt) {
        let outcome = error.to_string();
        tracing::warn!(chunk = %id, %source, outcome, "a copy of a chunk is no good");
        self.counters.bad_copies.fetch_add(1, Ordering::Relaxed);
        attempt.note(source, outcome);
    }

    /// Reads the footers of a scope's packs that this node has not read yet. Returns what failed.
    pub(crate) async fn load_footers(self: &Arc<Self>, scope: &Arc<Scope>) -> Vec<(PackId, FooterError)> {
        if scope.footers_known.load(Ordering::Acquire) {
            return Vec::new();
        }
        let (fetcher, packs) = (Arc::clone(self), Arc::clone(scope));
        let unknown = blocking(move || {
            let unknown = packs.packs.iter().filter(|pack| !fetcher.cache.is_registered(&pack.id));
            unknown.copied().collect::<Vec<PackRef>>()
        })
        .await;
        let failures: Vec<(PackId, FooterError)> = futures::stream::iter(unknown)
            .map(|pack| {
                let fetcher = Arc::clone(self);
                let (flight, _) = self.footers.join(pack.id, || async move { fetcher.load_footer(pack).await });
                async move { flight.await.err().map(|error| (pack.id, error)) }
            })
            .buffer_unordered(FOOTERS_AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await;
        if failures.is_empty() {
            scope.footers_known.store(true, Ordering::Release);
        }
        failures
    }

    async fn load_footer(self: Arc<Self>, pack: PackRef) -> Result<(), FooterError> {
        let fetcher = Arc::clone(&self);
        let here = blocking(move || {
            if fetcher.cache.is_registered(&pack.id) {
                return true;
            }
            match fetcher.staging.footer(&pack.id) {
                Ok(Some((named, entries))) if named == pack => {
                    fetcher.cache.register_pack(&pack, &entries);
                    true
                }
                Ok(_) => false,
                Err(error) => {
                    tracing::warn!(pack = %pack.id, %error, "the footer of a staged pack cannot be read");
                    false
                }
            }
        });
        if here.await {
            return Ok(());
        }
        pack::check_sizes(&pack)?;
        let _slot = self.remote_slots.acquire().await.expect("never closed");
        let start = pack.size_bytes - pack::tail_len(pack.chunks);
        let mut tries = 0;
        let entries = loop {
            let tail = self.blobs.get_range(&pack_key(&pack.id), start..pack.size_bytes).await?;
            tries += 1;
            match pack::parse_tail(&pack, &tail) {
                Ok(entries) => break entries,
                Err(error) => {
                    tracing::warn!(pack = %pack.id, %error, "the footer of a pack is no good");
                    self.counters.bad_copies.fetch_add(1, Ordering::Relaxed);
                    if tries >= REMOTE_TRIES {
                        return Err(error.into());
                    }
                }
            }
        };
        let fetcher = Arc::clone(&self);
        blocking(move || {
            fetcher.cache.register_pack(&pack, &entries);
            fetcher.cache.mark_remote(&pack.id);
        })
        .await;
        Ok(())
    }

    /// Chunks being fetched now.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.chunks.len()
    }
}
