//! The node's chunk cache: the only module that knows RocksDB for chunks.
//!
//! ```text
//!   column family   key                            value
//!   chunks          chunk id                       frame            values in blob files, not compressed again
//!   locations       chunk id ‖ pack id             offset, length   where a pack holds the chunk's frame
//!   packs           'f' ‖ pack id                  size, footer     its locations are registered, all of them
//!                   'r' ‖ pack id                  (empty)          the pack is known to be in the blob store
//!   default         "format"                       version of this layout
//! ```
//!
//! Invariants:
//! - everything in here can be had again: frames from staged packs or the blob store, locations from pack footers. Nothing
//!   is synced; a cache that cannot be opened, or has another format, is wiped and started anew;
//! - a pack's `f` row and its locations are one atomic write: either all of its locations are known or none;
//! - a failure to read is a miss, a failure to write is a warning: the cache can make the store slow, never wrong;
//! - what comes out is *not* verified here: [`crate::chunk::verify`] is the reader's first act.
//!
//! Crash: after a kill the log is replayed; after a loss of power its tail is gone and the cache is as it was some time
//! earlier, which is a state it could have been in anyway. A `r` row may then be missing (costs a HEAD), never invented.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType, Direction, ErrorKind,
    IteratorMode, Options, ReadOptions, SliceTransform, WriteBatch,
};

use crate::ids::{ChunkId, PackId};
use crate::pack::{self, PackEntry, PackRef};

const FORMAT: &[u8] = b"1";
const FORMAT_KEY: &[u8] = b"format";
const CHUNKS: &str = "chunks";
const LOCATIONS: &str = "locations";
const PACKS: &str = "packs";
const ID_BYTES: usize = 32;

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

/// Where a chunk's frame lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// The pack.
    pub pack: PackId,
    /// Offset of the frame in it, bytes.
    pub offset: u64,
    /// Length of the frame, bytes.
    pub len: u32,
}

/// What the cache counts, since it was opened.
#[derive(Debug, Default)]
pub struct CacheCounters {
    /// Values that RocksDB itself called corrupt.
    pub corrupt_values: AtomicU64,
    /// Reads and writes that failed for another reason.
    pub failures: AtomicU64,
}

/// Memory limits of the cache.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    /// Blocks and chunk values kept in memory, bytes.
    pub block_cache_bytes: usize,
    /// Unflushed writes, bytes.
    pub write_buffer_bytes: usize,
}

/// Chunks by id, and where packs hold them. Every method blocks: call it on a blocking thread.
pub struct ChunkCache {
    db: DB,
    counters: CacheCounters,
}

impl ChunkCache {
    /// Opens the cache in `dir`, creating it if need be. Holds RocksDB's lock on the directory.
    pub fn open(dir: &Path, limits: CacheLimits) -> Result<Self, CacheError> {
        let db = match Self::open_db(dir, limits) {
            Ok(db) => db,
            Err(error) if matches!(error.kind(), ErrorKind::Corruption | ErrorKind::InvalidArgument) => {
                tracing::warn!(dir = %dir.display(), %error, "the chunk cache cannot be opened: starting an empty one");
                Self::wipe(dir)?;
                Self::open_db(dir, limits).map_err(|e| Self::error(dir, &e))?
            }
            Err(error) => return Err(Self::error(dir, &error)),
        };
        let stored = db.get(FORMAT_KEY).map_err(|e| Self::error(dir, &e))?;
        let db = match stored.as_deref() {
            Some(FORMAT) => db,
            other => {
                let fresh = if other.is_none() {
                    db
                } else {
                    tracing::warn!(dir = %dir.display(), "the chunk cache has another format: starting an empty one");
                    drop(db);
                    Self::wipe(dir)?;
                    Self::open_db(dir, limits).map_err(|e| Self::error(dir, &e))?
                };
                fresh.put(FORMAT_KEY, FORMAT).map_err(|e| Self::error(dir, &e))?;
                fresh
            }
        };
        Ok(Self { db, counters: CacheCounters::default() })
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

    fn open_db(dir: &Path, limits: CacheLimits) -> Result<DB, rocksdb::Error> {
        let memory = Cache::new_lru_cache(limits.block_cache_bytes);
        let table = |bloom: bool| {
            let mut table = BlockBasedOptions::default();
            table.set_block_cache(&memory);
            if bloom {
                table.set_bloom_filter(10.0, false);
            }
            table
        };
        let mut base = Options::default();
        base.create_if_missing(true);
        base.create_missing_column_families(true);
        base.set_compression_type(DBCompressionType::None);
        base.set_db_write_buffer_size(limits.write_buffer_bytes);
        base.set_max_total_wal_size(2 * limits.write_buffer_bytes as u64);
        base.set_keep_log_file_num(4);
        base.set_bytes_per_sync(1 << 20);
        base.set_max_open_files(1024);

        let mut chunks = base.clone();
        chunks.set_block_based_table_factory(&table(true));
        chunks.set_enable_blob_files(true);
        chunks.set_min_blob_size(MIN_BLOB_BYTES);
        chunks.set_blob_compression_type(DBCompressionType::None);
        chunks.set_blob_file_size(256 << 20);
        chunks.set_enable_blob_gc(true);
        chunks.set_blob_gc_age_cutoff(0.5);
        chunks.set_blob_cache(&memory);

        let mut locations = base.clone();
        locations.set_block_based_table_factory(&table(true));
        locations.set_prefix_extractor(SliceTransform::create_fixed_prefix(ID_BYTES));

        let mut packs = base.clone();
        packs.set_block_based_table_factory(&table(false));

        let families = [(CHUNKS, chunks), (LOCATIONS, locations), (PACKS, packs)];
        let families = families.map(|(name, options)| ColumnFamilyDescriptor::new(name, options));
        DB::open_cf_descriptors(&base, dir, families)
    }

    fn family(&self, name: &str) -> &ColumnFamily {
        self.db.cf_handle(name).expect("open creates every column family")
    }

    /// The counters.
    pub fn counters(&self) -> &CacheCounters {
        &self.counters
    }

    /// The frame of a chunk, unverified. What RocksDB calls corrupt is removed and counted, and is a miss.
    pub fn get(&self, chunk: &ChunkId) -> Option<Bytes> {
        match self.db.get_pinned_cf(self.family(CHUNKS), chunk.as_bytes()) {
            Ok(value) => value.map(|frame| Bytes::copy_from_slice(&frame)),
            Err(error) if error.kind() == ErrorKind::Corruption => {
                tracing::warn!(%chunk, %error, "RocksDB reports a corrupt value: removed");
                self.counters.corrupt_values.fetch_add(1, Ordering::Relaxed);
                self.remove(chunk);
                None
            }
            Err(error) => {
                self.failed("get", &error);
                None
            }
        }
    }

    /// Keeps a frame.
    pub fn put(&self, chunk: &ChunkId, frame: &[u8]) {
        if let Err(error) = self.db.put_cf(self.family(CHUNKS), chunk.as_bytes(), frame) {
            self.failed("put", &error);
        }
    }

    /// Forgets a frame, which did not verify.
    pub fn remove(&self, chunk: &ChunkId) {
        if let Err(error) = self.db.delete_cf(self.family(CHUNKS), chunk.as_bytes()) {
            self.failed("remove", &error);
        }
    }

    /// All known places of a chunk. Entries that cannot be right are left out.
    pub fn locations(&self, chunk: &ChunkId) -> Vec<Location> {
        let mut options = ReadOptions::default();
        options.set_prefix_same_as_start(true);
        let from = IteratorMode::From(chunk.as_bytes(), Direction::Forward);
        let mut found = Vec::new();
        for row in self.db.iterator_cf_opt(self.family(LOCATIONS), options, from) {
            match row {
                Ok((key, value)) => found.extend(decode_location(chunk, &key, &value)),
                Err(error) => {
                    self.failed("locations", &error);
                    break;
                }
            }
        }
        found
    }

    /// Notes where a pack holds its chunks, in one atomic write. Safe to repeat.
    pub fn register_pack(&self, pack: &PackRef, entries: &[PackEntry]) {
        if self.is_registered(&pack.id) {
            return;
        }
        let mut batch = WriteBatch::default();
        for entry in entries {
            let (key, value) = encode_location(&pack.id, entry);
            batch.put_cf(self.family(LOCATIONS), key, value);
        }
        let mut row = BytesMut::with_capacity(8 + entries.len() * 44);
        row.put_u64_le(pack.size_bytes);
        pack::encode_entries(entries, &mut row);
        batch.put_cf(self.family(PACKS), pack_row(b'f', &pack.id), &row);
        if let Err(error) = self.db.write(batch) {
            self.failed("register pack", &error);
        }
    }

    /// The pack as a manifest names it, if its locations are registered.
    pub fn pack(&self, pack: &PackId) -> Option<PackRef> {
        self.footer(pack).map(|(pack, _)| pack)
    }

    /// The pack and where it holds its chunks, if that is registered.
    pub fn footer(&self, pack: &PackId) -> Option<(PackRef, Vec<PackEntry>)> {
        let row = match self.db.get_pinned_cf(self.family(PACKS), pack_row(b'f', pack)) {
            Ok(row) => row?,
            Err(error) => {
                self.failed("footer", &error);
                return None;
            }
        };
        let (size, footer) = row.split_first_chunk::<8>()?;
        let entries = pack::decode_entries(footer)?;
        let chunks = u32::try_from(entries.len()).ok()?;
        Some((PackRef { id: *pack, size_bytes: u64::from_le_bytes(*size), chunks }, entries))
    }

    /// Whether the pack's locations are registered.
    pub fn is_registered(&self, pack: &PackId) -> bool {
        self.has_row(b'f', pack)
    }

    /// Forgets a pack that is gone: its locations, its footer, and that it was in the blob store. Safe to repeat.
    pub fn forget_pack(&self, pack: &PackId) {
        let mut batch = WriteBatch::default();
        for entry in self.footer(pack).map(|(_, entries)| entries).unwrap_or_default() {
            batch.delete_cf(self.family(LOCATIONS), encode_location(pack, &entry).0);
        }
        batch.delete_cf(self.family(PACKS), pack_row(b'f', pack));
        batch.delete_cf(self.family(PACKS), pack_row(b'r', pack));
        if let Err(error) = self.db.write(batch) {
            self.failed("forget pack", &error);
        }
    }

    /// Notes that the pack is in the blob store.
    pub fn mark_remote(&self, pack: &PackId) {
        if let Err(error) = self.db.put_cf(self.family(PACKS), pack_row(b'r', pack), b"") {
            self.failed("mark remote", &error);
        }
    }

    /// Whether the pack is known to be in the blob store.
    pub fn is_remote(&self, pack: &PackId) -> bool {
        self.has_row(b'r', pack)
    }

    fn has_row(&self, kind: u8, pack: &PackId) -> bool {
        match self.db.get_pinned_cf(self.family(PACKS), pack_row(kind, pack)) {
            Ok(row) => row.is_some(),
            Err(error) => {
                self.failed("look up pack", &error);
                false
            }
        }
    }

    /// Bytes on disk: tables and blob files. Unflushed writes are not in it.
    pub fn disk_bytes(&self) -> u64 {
        [CHUNKS, LOCATIONS, PACKS]
            .into_iter()
            .flat_map(|family| [(family, c"rocksdb.live-sst-files-size"), (family, c"rocksdb.total-blob-file-size")])
            .filter_map(|(family, name)| self.db.property_int_value_cf(self.family(family), name).ok().flatten())
            .sum()
    }

    /// RocksDB's estimate of how many chunks have a known place; a chunk in two packs counts twice.
    pub fn known_chunks(&self) -> u64 {
        let rows = self.db.property_int_value_cf(self.family(LOCATIONS), c"rocksdb.estimate-num-keys");
        rows.ok().flatten().unwrap_or(0)
    }

    /// Writes out what is in memory, so that the next start is quick. The database closes when the last owner drops it.
    pub fn flush(&self) {
        for family in [CHUNKS, LOCATIONS, PACKS] {
            if let Err(error) = self.db.flush_cf(self.family(family)) {
                self.failed("flush", &error);
            }
        }
    }

    fn failed(&self, what: &'static str, error: &rocksdb::Error) {
        tracing::warn!(what, %error, "chunk cache operation failed");
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts a wrong value in a chunk's place, as a bad disk would.
    #[cfg(test)]
    pub(crate) fn tamper(&self, chunk: &ChunkId, change: impl FnOnce(&mut Vec<u8>)) {
        let mut frame = self.get(chunk).expect("tampering with a chunk that is cached").to_vec();
        change(&mut frame);
        self.put(chunk, &frame);
    }
}

fn pack_row(kind: u8, pack: &PackId) -> [u8; 1 + ID_BYTES] {
    let mut key = [kind; 1 + ID_BYTES];
    key[1..].copy_from_slice(pack.as_bytes());
    key
}

fn encode_location(pack: &PackId, entry: &PackEntry) -> ([u8; 2 * ID_BYTES], [u8; 12]) {
    let mut key = [0; 2 * ID_BYTES];
    key[..ID_BYTES].copy_from_slice(entry.chunk.as_bytes());
    key[ID_BYTES..].copy_from_slice(pack.as_bytes());
    let mut value = [0; 12];
    value[..8].copy_from_slice(&entry.offset.to_le_bytes());
    value[8..].copy_from_slice(&entry.len.to_le_bytes());
    (key, value)
}

fn decode_location(chunk: &ChunkId, key: &[u8], value: &[u8]) -> Option<Location> {
    let pack = PackId::from_slice(key.strip_prefix(chunk.as_bytes().as_slice())?).ok()?;
    let value: &[u8; 12] = value.try_into().ok()?;
    let (offset, len) = value.split_first_chunk::<8>()?;
    let location =
        Location { pack, offset: u64::from_le_bytes(*offset), len: u32::from_le_bytes(len.try_into().ok()?) };
    let end = location.offset.checked_add(u64::from(location.len))?;
    let possible =
        location.len > 0 && location.len as usize <= crate::chunk::MAX_FRAME_BYTES && end <= pack::MAX_PACK_BYTES;
    possible.then_some(location)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: CacheLimits = CacheLimits { block_cache_bytes: 1 << 20, write_buffer_bytes: 4 << 20 };

    fn entry(chunk: u8, offset: u64, len: u32) -> PackEntry {
        PackEntry { chunk: ChunkId([chunk; 32]), offset, len }
    }

    #[test]
    fn what_is_put_survives_a_restart_until_it_is_removed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (small, large) = (ChunkId([1; 32]), ChunkId([2; 32]));
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
        assert_eq!(cache.get(&small), None);
        cache.put(&small, b"in the tree");
        cache.put(&large, &[7; 100_000]);
        drop(cache);
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open again");
        assert_eq!(cache.get(&small).as_deref(), Some(b"in the tree".as_slice()));
        assert_eq!(cache.get(&large).as_deref(), Some([7; 100_000].as_slice()));
        cache.flush();
        assert!(cache.disk_bytes() > 100_000, "the blob files count");
        cache.remove(&large);
        assert_eq!(cache.get(&large), None);
    }

    #[test]
    fn locations_of_a_pack_come_and_go_together() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
        let one = PackRef { id: PackId([10; 32]), size_bytes: 500, chunks: 2 };
        let two = PackRef { id: PackId([11; 32]), size_bytes: 600, chunks: 1 };
        cache.register_pack(&one, &[entry(1, 8, 100), entry(2, 108, 50)]);
        cache.register_pack(&two, &[entry(1, 8, 70)]);
        cache.register_pack(&two, &[entry(1, 8, 70)]);
        let packs = |chunk| cache.locations(&ChunkId([chunk; 32])).iter().map(|at| at.pack).collect::<Vec<_>>();
        assert_eq!(packs(1), [one.id, two.id]);
        assert_eq!(packs(2), [one.id]);
        assert_eq!(packs(3), []);
        assert_eq!(cache.locations(&ChunkId([2; 32])), [Location { pack: one.id, offset: 108, len: 50 }]);
        assert_eq!(cache.pack(&one.id), Some(one));
        cache.mark_remote(&one.id);
        assert!(cache.is_remote(&one.id) && !cache.is_remote(&two.id));
        cache.flush();
        cache.forget_pack(&one.id);
        cache.forget_pack(&one.id);
        assert_eq!(packs(1), [two.id]);
        assert_eq!(packs(2), []);
        assert_eq!(cache.pack(&one.id), None);
        assert!(!cache.is_remote(&one.id));
    }

    #[test]
    fn impossible_locations_are_no_locations() {
        let chunk = ChunkId([1; 32]);
        let pack = PackId([2; 32]);
        let (key, _) = encode_location(&pack, &entry(1, 8, 1));
        let decode = |offset: u64, len: u32| {
            let (_, value) = encode_location(&pack, &PackEntry { chunk, offset, len });
            decode_location(&chunk, &key, &value)
        };
        assert!(decode(8, 100).is_some());
        assert_eq!(decode(8, u32::MAX), None);
        assert_eq!(decode(8, 0), None);
        assert_eq!(decode(u64::MAX, 10), None);
        assert_eq!(decode(pack::MAX_PACK_BYTES, 10), None);
        assert_eq!(decode_location(&ChunkId([9; 32]), &key, &[0; 12]), None);
        assert_eq!(decode_location(&chunk, &key, &[0; 3]), None);
    }

    #[test]
    fn a_cache_that_cannot_be_opened_or_has_another_format_is_started_anew() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let chunk = ChunkId([1; 32]);
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
        cache.put(&chunk, b"frame");
        cache.flush();
        drop(cache);
        let manifest = std::fs::read_dir(dir.path())
            .expect("list")
            .map(|file| file.expect("entry").path())
            .find(|path| path.to_string_lossy().contains("MANIFEST"))
            .expect("RocksDB's own manifest");
        std::fs::write(manifest, b"rubbish").expect("overwrite");
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("started anew");
        assert_eq!(cache.get(&chunk), None);
        cache.put(&chunk, b"frame");
        cache.db.put(FORMAT_KEY, b"0").expect("another format");
        drop(cache);
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("started anew");
        assert_eq!(cache.get(&chunk), None);
    }

    #[test]
    fn a_value_that_rocksdb_calls_corrupt_is_a_miss_and_is_counted() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let chunk = ChunkId([1; 32]);
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
        cache.put(&chunk, &[7; 100_000]);
        cache.flush();
        drop(cache);
        let blob = std::fs::read_dir(dir.path())
            .expect("list")
            .map(|file| file.expect("entry").path())
            .find(|path| path.extension().is_some_and(|ext| ext == "blob"))
            .expect("a blob file");
        let mut bytes = std::fs::read(&blob).expect("read");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        std::fs::write(&blob, bytes).expect("write");
        let cache = ChunkCache::open(dir.path(), LIMITS).expect("open again");
        assert_eq!(cache.get(&chunk), None);
        assert_eq!(cache.counters().corrupt_values.load(Ordering::Relaxed), 1);
        assert_eq!(cache.get(&chunk), None);
        assert_eq!(cache.counters().corrupt_values.load(Ordering::Relaxed), 1, "it was removed");
    }
}
