//! The node's chunk cache: the only module that knows RocksDB for chunks.
//!
//! ```text
//!   column family   key                            value
//!   p<n>, k<n>      pack id ‖ offset (BE)          frame            values in blob files; see `generations`
//!   places          first half of a chunk's id     places           for each pack that holds it: pack id, the frame's
//!                                                                   offset and length, the chunk's start and length
//!   packs           'f' ‖ pack id                  size, counts     its places are registered, all of them
//!                   't' ‖ pack id                  footer           the same the other way round: what the pack holds
//!                   'r' ‖ pack id                  (empty)          the pack is known to be in the blob store
//!   default         "format"                       version of this layout
//! ```
//!
//! Frames are kept within a budget of bytes on disk, what is read again longest. Places and packs are small beside them and
//! go when their pack is forgotten.
//!
//! Invariants:
//! - everything in here can be had again: frames from staged packs or the blob store, places from pack footers. Nothing
//!   is synced; a cache that cannot be opened, or has another format, is wiped and started anew;
//! - a pack's `f` row and its places are one atomic write: either all of its places are known or none;
//! - a failure to read is a miss, a failure to write is a warning: the cache can make the store slow, never wrong;
//! - what comes out is *not* verified here: [`crate::chunk::check`] is the reader's first act.
//!
//! Crash: after a kill the log is replayed; after a loss of power its tail is gone and the cache is as it was some time
//! earlier, which is a state it could have been in anyway. A `r` row may then be missing (costs a HEAD), never invented.

mod generations;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use parking_lot::Mutex;
use rocksdb::{
    BlockBasedOptions, BoundColumnFamily, Cache, ColumnFamilyDescriptor, DBCompressionType, DBWithThreadMode,
    Direction, ErrorKind, IteratorMode, MergeOperands, MultiThreaded, Options, WriteBatch,
};

use self::generations::{Evictions, Frames};

use crate::chunk::{MAX_FRAME_BYTES, MAX_PLAIN_BYTES};
use crate::ids::{PackId, ShortId};
use crate::pack::{self, FramePlace, PackFrame, PackRef};

const FORMAT: &[u8] = b"5";
const FORMAT_KEY: &[u8] = b"format";
const PLACES: &str = "places";
const PACKS: &str = "packs";
const ID_BYTES: usize = 32;
const PLACE_BYTES: usize = ID_BYTES + 20;
const PACK_ROW_BYTES: usize = 16;

/// Values below this many bytes stay in the tree.
const MIN_BLOB_BYTES: u64 = 512;

/// The cache cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("chunk cache {path}: {reason}")]
pub struct CacheError {
    /// Its directory.
    pub path: PathBuf,
    /// What RocksDB or the file system said.
    pub reason: String,
}

/// Where a chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The frame it is in.
    pub frame: FramePlace,
    /// Where it starts in the frame's plain content, bytes.
    pub start: u32,
    /// Its plain length, bytes.
    pub len: u32,
}

impl Place {
    /// The chunk's part of its frame's plain content; `None` when the content is too short to be the frame's.
    pub fn of<'a>(&self, plain: &'a [u8]) -> Option<&'a [u8]> {
        let start = self.start as usize;
        plain.get(start..start.checked_add(self.len as usize)?)
    }
}

/// What the cache counts, since it was opened.
#[derive(Debug, Default)]
pub struct CacheCounters {
    /// Values that RocksDB itself called corrupt.
    pub corrupt_values: AtomicU64,
    /// Reads and writes that failed for another reason.
    pub failures: AtomicU64,
}

/// Limits of the cache.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    /// Bytes that frames may take on disk. A budget below a few MiB is not kept to.
    pub disk_bytes: u64,
    /// Blocks and frames kept in memory, bytes.
    pub block_cache_bytes: usize,
    /// Unflushed writes, bytes.
    pub write_buffer_bytes: usize,
}

type Db = DBWithThreadMode<MultiThreaded>;

/// Frames by place, and the places of chunks. Every method blocks: call it on a blocking thread.
pub struct ChunkCache {
    frames: Frames,
    db: Db,
    /// One pack is registered or forgotten at a time: both change values that packs share.
    registering: Mutex<()>,
    counters: CacheCounters,
}

impl ChunkCache {
    /// Opens the cache in `dir`, creating it if need be. Holds RocksDB's lock on the directory.
    pub fn open(dir: &Path, limits: CacheLimits) -> Result<Self, CacheError> {
        match Self::try_open(dir, limits) {
            Ok(Some(cache)) => return Ok(cache),
            Ok(None) => {
                tracing::warn!(dir = %dir.display(), "the chunk cache has another format: starting an empty one");
            }
            Err(error) if matches!(error.kind(), ErrorKind::Corruption | ErrorKind::InvalidArgument) => {
                tracing::warn!(dir = %dir.display(), %error, "the chunk cache cannot be opened: starting an empty one");
            }
            Err(error) => return Err(Self::error(dir, &error)),
        }
        Self::wipe(dir)?;
        let fresh = Self::try_open(dir, limits).map_err(|e| Self::error(dir, &e))?;
        fresh.ok_or_else(|| Self::error(dir, &"an empty cache has another format"))
    }

    /// `None`: it has another format.
    fn try_open(dir: &Path, limits: CacheLimits) -> Result<Option<Self>, rocksdb::Error> {
        let families = match dir.join("CURRENT").exists() {
            true => Db::list_cf(&Options::default(), dir)?,
            false => Vec::new(),
        };
        let memory = Cache::new_lru_cache(limits.block_cache_bytes);
        let frames = frame_options(&memory);
        let db = open_db(dir, limits, &memory, &frames, &families)?;
        match db.get(FORMAT_KEY)?.as_deref() {
            Some(FORMAT) => {}
            Some(_) => return Ok(None),
            None => db.put(FORMAT_KEY, FORMAT)?,
        }
        let frames = Frames::open(&db, &families, limits.disk_bytes, frames)?;
        Ok(Some(Self { frames, db, registering: Mutex::new(()), counters: CacheCounters::default() }))
    }

    fn error(dir: &Path, reason: &dyn ToString) -> CacheError {
        CacheError { path: dir.into(), reason: reason.to_string() }
    }

    fn wipe(dir: &Path) -> Result<(), CacheError> {
        match std::fs::remove_dir_all(dir) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Self::error(dir, &error)),
        }
    }

    fn family(&self, name: &str) -> Arc<BoundColumnFamily<'_>> {
        self.db.cf_handle(name).expect("open creates every column family")
    }

    /// The counters.
    pub fn counters(&self) -> &CacheCounters {
        &self.counters
    }

    /// A frame, unverified. What RocksDB calls corrupt is removed and counted, and is a miss.
    pub fn get(&self, place: &FramePlace) -> Option<Bytes> {
        match self.frames.get(&self.db, &frame_key(place)) {
            Ok(frame) => frame,
            Err(error) if error.kind() == ErrorKind::Corruption => {
                tracing::warn!(?place, %error, "RocksDB reports a corrupt value: removed");
                self.counters.corrupt_values.fetch_add(1, Ordering::Relaxed);
                self.remove(place);
                None
            }
            Err(error) => {
                self.failed("get", &error);
                None
            }
        }
    }

    /// Keeps a frame.
    pub fn put(&self, place: &FramePlace, frame: &[u8]) {
        if let Err(error) = self.frames.put(&self.db, &frame_key(place), frame) {
            self.failed("put", &error);
        }
    }

    /// Forgets a frame, in which something did not verify.
    pub fn remove(&self, place: &FramePlace) {
        if let Err(error) = self.frames.remove(&self.db, &frame_key(place)) {
            self.failed("remove", &error);
        }
    }

    /// All known places of a chunk. Entries that cannot be right are left out.
    pub fn places(&self, chunk: &ShortId) -> Vec<Place> {
        match self.db.get_pinned_cf(&self.family(PLACES), chunk.0) {
            Ok(value) => value.map(|value| decode_places(&value).collect()).unwrap_or_default(),
            Err(error) => {
                self.failed("places", &error);
                Vec::new()
            }
        }
    }

    /// Notes where a pack holds its chunks, in one atomic write. Safe to repeat.
    pub fn register_pack(&self, pack: &PackRef, frames: &[PackFrame]) {
        let _one = self.registering.lock();
        if self.is_registered(&pack.id) {
            return;
        }
        let mut batch = WriteBatch::default();
        for (chunk, place) in places_of(&pack.id, frames) {
            batch.merge_cf(&self.family(PLACES), chunk.0, encode_place(&place));
        }
        let mut footer = BytesMut::new();
        pack::encode_footer(frames, &mut footer);
        batch.put_cf(&self.family(PACKS), pack_row(b't', &pack.id), &footer);
        let mut row = BytesMut::with_capacity(PACK_ROW_BYTES);
        row.put_u64_le(pack.size_bytes);
        row.put_u32_le(pack.frames);
        row.put_u32_le(pack.chunks);
        batch.put_cf(&self.family(PACKS), pack_row(b'f', &pack.id), &row);
        if let Err(error) = self.db.write(batch) {
            self.failed("register pack", &error);
        }
    }

    /// The pack as a manifest names it, if its places are registered.
    pub fn pack(&self, pack: &PackId) -> Option<PackRef> {
        let row = self.row(b'f', pack)?;
        let mut row: &[u8] = row.as_ref();
        (row.len() == PACK_ROW_BYTES).then(|| PackRef {
            id: *pack,
            size_bytes: row.get_u64_le(),
            frames: row.get_u32_le(),
            chunks: row.get_u32_le(),
        })
    }

    /// The pack and where it holds its chunks, if that is registered.
    pub fn footer(&self, pack: &PackId) -> Option<(PackRef, Vec<PackFrame>)> {
        let named = self.pack(pack)?;
        let footer = self.row(b't', pack)?;
        Some((named, pack::decode_footer(&footer)?))
    }

    fn row(&self, kind: u8, pack: &PackId) -> Option<Vec<u8>> {
        match self.db.get_cf(&self.family(PACKS), pack_row(kind, pack)) {
            Ok(row) => row,
            Err(error) => {
                self.failed("look up pack", &error);
                None
            }
        }
    }

    /// Whether the pack's places are registered.
    pub fn is_registered(&self, pack: &PackId) -> bool {
        self.row(b'f', pack).is_some()
    }

    /// All packs whose places are registered.
    pub fn registered(&self) -> Vec<PackId> {
        let from = IteratorMode::From(b"f", Direction::Forward);
        let rows = self.db.iterator_cf(&self.family(PACKS), from).map_while(Result::ok);
        rows.map_while(|(key, _)| PackId::from_slice(key.strip_prefix(b"f")?).ok()).collect()
    }

    /// Forgets a pack that is gone: its places, its footer, and that it was in the blob store. Its frames are asked for by
    /// nobody then, and go with their generation. Safe to repeat.
    pub fn forget_pack(&self, pack: &PackId) {
        let _one = self.registering.lock();
        let mut batch = WriteBatch::default();
        let frames = self.footer(pack).map(|(_, frames)| frames).unwrap_or_default();
        let chunks: HashSet<ShortId> = frames.iter().flat_map(|frame| &frame.content.chunks).copied().collect();
        for chunk in chunks {
            let others: Vec<u8> =
                self.places(&chunk).iter().filter(|place| place.frame.pack != *pack).flat_map(encode_place).collect();
            match others.is_empty() {
                true => batch.delete_cf(&self.family(PLACES), chunk.0),
                false => batch.put_cf(&self.family(PLACES), chunk.0, others),
            }
        }
        for kind in *b"ftr" {
            batch.delete_cf(&self.family(PACKS), pack_row(kind, pack));
        }
        if let Err(error) = self.db.write(batch) {
            self.failed("forget pack", &error);
        }
    }

    /// Notes that the pack is in the blob store.
    pub fn mark_remote(&self, pack: &PackId) {
        if let Err(error) = self.db.put_cf(&self.family(PACKS), pack_row(b'r', pack), b"") {
            self.failed("mark remote", &error);
        }
    }

    /// Whether the pack is known to be in the blob store.
    pub fn is_remote(&self, pack: &PackId) -> bool {
        self.row(b'r', pack).is_some()
    }

    /// Bytes on disk: tables and blob files. Unflushed writes are not in it.
    pub fn disk_bytes(&self) -> u64 {
        let frames = self.frames.families();
        let names = frames.iter().map(String::as_str).chain([PLACES, PACKS]);
        names.map(|name| disk_bytes_of(&self.db, name)).sum()
    }

    /// What was dropped to keep to the budget.
    pub fn evictions(&self) -> &Evictions {
        &self.frames.evictions
    }

    /// RocksDB's estimate of how many chunks have a known place.
    pub fn known_chunks(&self) -> u64 {
        let rows = self.db.property_int_value_cf(&self.family(PLACES), c"rocksdb.estimate-num-keys");
        rows.ok().flatten().unwrap_or(0)
    }

    /// Writes out what is in memory, so that the next start is quick. The database closes when the last owner drops it.
    pub fn flush(&self) {
        let frames = self.frames.families();
        for name in frames.iter().map(String::as_str).chain([PLACES, PACKS]) {
            // A generation may have been dropped this instant.
            if let Some(family) = self.db.cf_handle(name)
                && let Err(error) = self.db.flush_cf(&family)
            {
                self.failed("flush", &error);
            }
        }
    }

    fn failed(&self, what: &'static str, error: &rocksdb::Error) {
        tracing::warn!(what, %error, "chunk cache operation failed");
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts a wrong value in a frame's place, as a bad disk would.
    #[cfg(test)]
    pub(crate) fn tamper(&self, place: &FramePlace, change: impl FnOnce(&mut Vec<u8>)) {
        let mut frame = self.get(place).expect("tampering with a frame that is cached").to_vec();
        change(&mut frame);
        self.remove(place); // it may lie in two generations
        self.put(place, &frame);
    }
}

fn disk_bytes_of(db: &Db, family: &str) -> u64 {
    let Some(family) = db.cf_handle(family) else { return 0 };
    [c"rocksdb.live-sst-files-size", c"rocksdb.total-blob-file-size"]
        .into_iter()
        .filter_map(|name| db.property_int_value_cf(&family, name).ok().flatten())
        .sum()
}

fn base_options() -> Options {
    let mut base = Options::default();
    base.create_if_missing(true);
    base.create_missing_column_families(true);
    base.set_compression_type(DBCompressionType::None);
    base
}

fn table(memory: &Cache, bloom: bool) -> BlockBasedOptions {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(memory);
    if bloom {
        table.set_bloom_filter(10.0, false);
    }
    table
}

fn frame_options(memory: &Cache) -> Options {
    let mut frames = base_options();
    frames.set_block_based_table_factory(&table(memory, true));
    frames.set_enable_blob_files(true);
    frames.set_min_blob_size(MIN_BLOB_BYTES);
    frames.set_blob_compression_type(DBCompressionType::None);
    frames.set_blob_file_size(256 << 20);
    frames.set_blob_cache(memory);
    frames
}

fn open_db(
    dir: &Path,
    limits: CacheLimits,
    memory: &Cache,
    frames: &Options,
    families: &[String],
) -> Result<Db, rocksdb::Error> {
    let mut base = base_options();
    base.set_db_write_buffer_size(limits.write_buffer_bytes);
    base.set_max_total_wal_size(2 * limits.write_buffer_bytes as u64);
    base.set_keep_log_file_num(4);
    base.set_bytes_per_sync(1 << 20);
    base.set_max_open_files(1024);

    // An ingest asks for every chunk that it has not seen, and mostly gets no for an answer: from the filters.
    let mut places = base_options();
    places.set_block_based_table_factory(&table(memory, true));
    places.set_memtable_whole_key_filtering(true);
    places.set_memtable_prefix_bloom_ratio(0.05);
    places.set_merge_operator_associative("append", append);

    let mut packs = base_options();
    packs.set_block_based_table_factory(&table(memory, false));

    let generations = families.iter().filter(|name| generations::is_generation(name));
    let generations = generations.map(|name| ColumnFamilyDescriptor::new(name, frames.clone()));
    let fixed = [(PLACES, places), (PACKS, packs)].map(|(name, options)| ColumnFamilyDescriptor::new(name, options));
    Db::open_cf_descriptors(&base, dir, fixed.into_iter().chain(generations))
}

/// Every chunk of a pack with its place.
pub fn places_of<'a>(pack: &PackId, frames: &'a [PackFrame]) -> impl Iterator<Item = (ShortId, Place)> + use<'a> {
    let pack = *pack;
    frames.iter().flat_map(move |frame| {
        let place = frame.place(&pack);
        frame.content.places().map(move |(chunk, start, len)| (chunk, Place { frame: place, start, len }))
    })
}

fn pack_row(kind: u8, pack: &PackId) -> [u8; 1 + ID_BYTES] {
    let mut key = [kind; 1 + ID_BYTES];
    key[1..].copy_from_slice(pack.as_bytes());
    key
}

fn frame_key(place: &FramePlace) -> [u8; ID_BYTES + 8] {
    let mut key = [0; ID_BYTES + 8];
    key[..ID_BYTES].copy_from_slice(place.pack.as_bytes());
    // Big-endian, so that frames lie in the database as they lie in the pack.
    key[ID_BYTES..].copy_from_slice(&place.offset.to_be_bytes());
    key
}

fn encode_place(place: &Place) -> [u8; PLACE_BYTES] {
    let mut value = [0; PLACE_BYTES];
    value[..ID_BYTES].copy_from_slice(place.frame.pack.as_bytes());
    let mut rest = &mut value[ID_BYTES..];
    rest.put_u64_le(place.frame.offset);
    rest.put_u32_le(place.frame.len);
    rest.put_u32_le(place.start);
    rest.put_u32_le(place.len);
    value
}

fn decode_places(value: &[u8]) -> impl Iterator<Item = Place> + use<'_> {
    let (places, _) = value.as_chunks::<PLACE_BYTES>();
    places.iter().filter_map(decode_place)
}

fn decode_place(value: &[u8; PLACE_BYTES]) -> Option<Place> {
    let (pack, mut rest) = value.split_at(ID_BYTES);
    let pack = PackId::from_slice(pack).ok()?;
    let frame = FramePlace { pack, offset: rest.get_u64_le(), len: rest.get_u32_le() };
    let place = Place { frame, start: rest.get_u32_le(), len: rest.get_u32_le() };
    let end = frame.offset.checked_add(u64::from(frame.len))?;
    let possible = frame.len > 0 && frame.len as usize <= MAX_FRAME_BYTES && end <= pack::MAX_PACK_BYTES;
    let inside = u64::from(place.start) + u64::from(place.len) <= MAX_PLAIN_BYTES as u64;
    (possible && inside && place.len > 0).then_some(place)
}

/// RocksDB's way of adding to a value without reading it: places of a chunk are appended to those that there are.
fn append(_: &[u8], existing: Option<&[u8]>, added: &MergeOperands) -> Option<Vec<u8>> {
    let mut all = existing.map(<[u8]>::to_vec).unwrap_or_default();
    added.iter().for_each(|places| all.extend_from_slice(places));
    Some(all)
}

#[cfg(test)]
mod tests;
