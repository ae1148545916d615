//! The embedded engine of the catalog: RocksDB in a directory of its own. The only module that knows RocksDB here.
//!
//! ```text
//!   txn ──▶ queue ──▶ writer thread: takes all that wait ─ judges each on (database + earlier ones of the group)
//!                                    └▶ one write batch, one synced WAL write ─▶ answers every one of the group
//!   get_many, range ──▶ blocking pool, on a RocksDB snapshot
//! ```
//!
//! One thread writes, so compares are judged on a state that nobody else changes; the transactions that arrive while a
//! sync is under way share the next one, so a burst of creates costs a few syncs and not one each.
//!
//! Stored: key → revision (8 bytes, little endian) and value. The engine's own records have keys with a leading NUL:
//! `\0format` (one byte, the layout's version) and `\0revision` (the last one given out, written in the batch that uses it).
//!
//! Crash story: a batch is in the WAL as a whole or not at all. Before the sync returns nobody was told `Committed`. After
//! a crash the tail of the WAL may be torn: that is the batch nobody was told of, it is dropped. Damage anywhere else is an
//! error on opening, never a silent loss. If a sync fails, RocksDB refuses all further writes; those in the group are
//! `Unknown`, later ones are too, until the directory is opened again.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use async_trait::async_trait;
use bytes::Bytes;
use rocksdb::{
    DB, DBCompressionType, DBRecoveryMode, Direction, IteratorMode, Options, ReadOptions, WriteBatch, WriteOptions,
};
use tokio::sync::{mpsc, oneshot};

use super::kv::{
    Compare, Entry, Key, KeyRange, KeyValue, KvError, Op, Order, Revision, TxnOutcome, check_key, check_txn,
};

const FORMAT_KEY: &[u8] = b"\0format";
const FORMAT: &[u8] = &[1];
const REVISION_KEY: &[u8] = b"\0revision";
const REVISION_LEN: usize = 8;

/// Transactions that may wait for the writer before callers have to.
const QUEUE: usize = 1024;
/// Transactions that share one sync, at most.
const GROUP: usize = 256;

const WRITE_BUFFER_BYTES: usize = 16 << 20;
const WAL_BYTES: u64 = 64 << 20;

struct Job {
    compares: Vec<Compare>,
    ops: Vec<Op>,
    reply: oneshot::Sender<Result<TxnOutcome, KvError>>,
}

/// The embedded engine. Dropping it ends the writer after what it has been given.
pub struct RocksKv {
    db: Arc<DB>,
    queue: Option<mpsc::Sender<Job>>,
    writer: Option<thread::JoinHandle<()>>,
}

impl RocksKv {
    /// Opens the database in `dir`, or creates it. Blocks; RocksDB itself refuses a second opening of the directory.
    pub fn open(dir: &Path) -> Result<Self, KvError> {
        let unavailable = |error: rocksdb::Error| KvError::Unavailable { action: "open", reason: error.to_string() };
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_compression_type(DBCompressionType::None);
        options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
        options.set_write_buffer_size(WRITE_BUFFER_BYTES);
        options.set_max_total_wal_size(WAL_BYTES);
        options.set_max_open_files(256);
        options.set_keep_log_file_num(2);
        let db = DB::open(&options, dir).map_err(unavailable)?;

        match db.get(FORMAT_KEY).map_err(unavailable)? {
            None => db.put_opt(FORMAT_KEY, FORMAT, &synced()).map_err(unavailable)?,
            Some(format) if format == FORMAT => {}
            Some(format) => {
                let reason = format!("written by another version: layout {format:?}, this one reads {FORMAT:?}");
                return Err(KvError::Refused { action: "open", reason });
            }
        }
        let last = match db.get(REVISION_KEY).map_err(unavailable)? {
            None => 0,
            Some(bytes) => {
                u64::from_le_bytes(bytes.as_slice().try_into().map_err(|_| corrupt(REVISION_KEY, "not 8 bytes"))?)
            }
        };

        let db = Arc::new(db);
        let (queue, jobs) = mpsc::channel(QUEUE);
        let writer = thread::Builder::new()
            .name("catalog-writer".into())
            .spawn({
                let db = Arc::clone(&db);
                move || Writer { db, last: Revision(last) }.run(jobs)
            })
            .map_err(|error| KvError::Unavailable { action: "start its writer", reason: error.to_string() })?;
        Ok(Self { db, queue: Some(queue), writer: Some(writer) })
    }
}

impl Drop for RocksKv {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the catalog's writer thread panicked");
        }
    }
}

impl std::fmt::Debug for RocksKv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RocksKv").field("dir", &self.db.path()).finish_non_exhaustive()
    }
}

#[async_trait]
impl KeyValue for RocksKv {
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError> {
        let db = Arc::clone(&self.db);
        blocking("read", move || {
            let state = db.snapshot();
            keys.into_iter()
                .map(|key| {
                    check_key(&key)?;
                    let stored = state.get(&key).map_err(|error| read_error(&key, &error))?;
                    stored.map(|stored| decode(key, stored)).transpose()
                })
                .collect()
        })
        .await
    }

    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError> {
        let db = Arc::clone(&self.db);
        blocking("read a range", move || {
            check_key(&range.start)?;
            if range.start >= range.end {
                return Ok(Vec::new());
            }
            let mut found = Vec::new();
            for item in entries(&db, &range, order).take(limit) {
                let (key, stored) = item.map_err(|error| read_error(&range.start, &error))?;
                found.push(decode(key.into_vec(), stored.into_vec())?);
            }
            Ok(found)
        })
        .await
    }

    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError> {
        check_txn(&compares, &ops)?;
        let stopped = |_| KvError::Unavailable { action: "write", reason: "its writer has stopped".into() };
        let queue = self.queue.as_ref().expect("the queue is taken only by drop");
        let (reply, answer) = oneshot::channel();
        queue.send(Job { compares, ops, reply }).await.map_err(stopped)?;
        answer.await.map_err(|_| KvError::Unknown { action: "write", reason: "its writer stopped meanwhile".into() })?
    }
}

fn synced() -> WriteOptions {
    let mut options = WriteOptions::default();
    options.set_sync(true);
    options
}

/// A key and its stored value, or why the iteration ends.
type RawEntry = Result<(Box<[u8]>, Box<[u8]>), rocksdb::Error>;

fn entries<'a>(db: &'a DB, range: &KeyRange, order: Order) -> impl Iterator<Item = RawEntry> + use<'a> {
    let mut options = ReadOptions::default();
    options.set_iterate_lower_bound(range.start.clone());
    options.set_iterate_upper_bound(range.end.clone());
    let mode = match order {
        Order::Ascending => IteratorMode::From(&range.start, Direction::Forward),
        Order::Descending => IteratorMode::End,
    };
    db.iterator_opt(mode, options)
}

fn decode(key: Key, mut stored: Vec<u8>) -> Result<Entry, KvError> {
    let Some((revision, _)) = stored.split_first_chunk::<REVISION_LEN>() else {
        return Err(corrupt(&key, "shorter than a revision"));
    };
    let revision = Revision(u64::from_le_bytes(*revision));
    stored.drain(..REVISION_LEN);
    Ok(Entry { key, value: stored.into(), revision })
}

fn encode(revision: Revision, value: &Bytes) -> Vec<u8> {
    let mut stored = Vec::with_capacity(REVISION_LEN + value.len());
    stored.extend_from_slice(&revision.0.to_le_bytes());
    stored.extend_from_slice(value);
    stored
}

fn corrupt(key: &[u8], reason: &str) -> KvError {
    KvError::Corrupt { key: String::from_utf8_lossy(key).into_owned(), reason: reason.into() }
}

fn read_error(key: &[u8], error: &rocksdb::Error) -> KvError {
    match error.kind() {
        rocksdb::ErrorKind::Corruption => corrupt(key, error.as_ref()),
        _ => KvError::Unavailable { action: "read", reason: error.to_string() },
    }
}

async fn blocking<T: Send + 'static>(
    action: &'static str,
    work: impl FnOnce() -> Result<T, KvError> + Send + 'static,
) -> Result<T, KvError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| KvError::Unavailable { action, reason: format!("the runtime is stopping: {error}") })?
}

struct Writer {
    db: Arc<DB>,
    last: Revision,
}

/// What the transactions of the group so far have made of a key.
type Overlay = BTreeMap<Key, Option<Revision>>;

impl Writer {
    fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut group = Vec::with_capacity(GROUP);
        while let Some(first) = jobs.blocking_recv() {
            group.push(first);
            while group.len() < GROUP
                && let Ok(job) = jobs.try_recv()
            {
                group.push(job);
            }
            self.commit(group.drain(..));
        }
    }

    fn commit(&mut self, group: impl Iterator<Item = Job>) {
        let mut batch = WriteBatch::default();
        let mut overlay = Overlay::new();
        let mut answers = Vec::new();
        for Job { compares, ops, reply } in group {
            let outcome = match self.judge(&compares, &overlay) {
                Ok(true) => {
                    self.last.0 += 1;
                    apply(ops, self.last, &mut batch, &mut overlay);
                    Ok(TxnOutcome::Committed(self.last))
                }
                Ok(false) => Ok(TxnOutcome::Conflict),
                Err(error) => Err(error),
            };
            answers.push((reply, outcome));
        }
        let failed = if overlay.is_empty() {
            None
        } else {
            batch.put(REVISION_KEY, self.last.0.to_le_bytes());
            self.db.write_opt(batch, &synced()).err()
        };
        if let Some(error) = &failed {
            tracing::error!(%error, "the catalog could not write");
        }
        for (reply, outcome) in answers {
            let answer = match (&failed, outcome) {
                (None, outcome) => outcome,
                (Some(error), Ok(TxnOutcome::Committed(_))) => {
                    Err(KvError::Unknown { action: "write", reason: error.to_string() })
                }
                // It was judged on writes that may not exist: the conflict is no answer either.
                (Some(error), Ok(TxnOutcome::Conflict)) => {
                    Err(KvError::Unavailable { action: "write", reason: error.to_string() })
                }
                (Some(_), Err(own)) => Err(own),
            };
            // A caller that no longer waits has given up the answer, not the write.
            let _ = reply.send(answer);
        }
    }

    fn judge(&self, compares: &[Compare], overlay: &Overlay) -> Result<bool, KvError> {
        for compare in compares {
            let holds = match compare {
                Compare::Absent(key) => self.revision(key, overlay)?.is_none(),
                Compare::Present(key) => self.revision(key, overlay)?.is_some(),
                Compare::Revision(key, wanted) => self.revision(key, overlay)? == Some(*wanted),
                Compare::Empty(range) => self.is_empty(range, overlay)?,
            };
            if !holds {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn revision(&self, key: &[u8], overlay: &Overlay) -> Result<Option<Revision>, KvError> {
        if let Some(written) = overlay.get(key) {
            return Ok(*written);
        }
        let stored = self.db.get_pinned(key).map_err(|error| read_error(key, &error))?;
        stored
            .map(|stored| match stored.first_chunk::<REVISION_LEN>() {
                Some(revision) => Ok(Revision(u64::from_le_bytes(*revision))),
                None => Err(corrupt(key, "shorter than a revision")),
            })
            .transpose()
    }

    fn is_empty(&self, range: &KeyRange, overlay: &Overlay) -> Result<bool, KvError> {
        if range.start >= range.end {
            return Ok(true);
        }
        if overlay.range(range.start.clone()..range.end.clone()).any(|(_, written)| written.is_some()) {
            return Ok(false);
        }
        for item in entries(&self.db, range, Order::Ascending) {
            let (key, _) = item.map_err(|error| read_error(&range.start, &error))?;
            if overlay.get(key.as_ref()) != Some(&None) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn apply(ops: Vec<Op>, revision: Revision, batch: &mut WriteBatch, overlay: &mut Overlay) {
    for op in ops {
        match op {
            Op::Put(key, value) => {
                batch.put(&key, encode(revision, &value));
                overlay.insert(key, Some(revision));
            }
            Op::Delete(key) => {
                batch.delete(&key);
                overlay.insert(key, None);
            }
        }
    }
}

#[cfg(test)]
#[path = "rocks_tests.rs"]
mod tests;
