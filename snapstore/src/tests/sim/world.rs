//! The world of a simulation: time, an adversary before the catalog's engine and the object store, and the judge.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::blob::{BlobEntry, BlobError, BlobOp, BlobStore, MemoryBlobs, PutMode, PutOutcome, pack_key};
use crate::catalog::kv::{Compare, Entry, Key, KeyRange, KeyValue, KvError, Op, Order, Revision, TxnOutcome};
use crate::catalog::memory::MemoryKv;
use crate::catalog::{PackState, decoded_pack_for_tests};
use crate::clock::Clock;
use crate::ids::{PackId, SnapshotId};
use crate::manifest::Manifest;

/// Numbers that depend on the seed alone (SplitMix64).
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `sides`, exclusive.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.next() % sides.max(1)
    }
}

/// What a snapshot holds: the seed of each chunk's content, 0 for zeros.
pub(super) type Content = Vec<u64>;

/// What the clients were told.
#[derive(Default)]
pub(super) struct Told {
    /// Snapshots whose publication was acknowledged.
    pub(super) acknowledged: BTreeMap<SnapshotId, Content>,
    /// What publications under way, or of unknown outcome, hold.
    pub(super) begun: BTreeMap<SnapshotId, Content>,
    /// Snapshots that may be gone: somebody asked for their deletion, or they have expired.
    pub(super) given_up: HashSet<SnapshotId>,
}

pub(super) struct World {
    pub(super) dice: Mutex<Dice>,
    pub(super) kv: Arc<MemoryKv>,
    pub(super) blobs: Arc<MemoryBlobs>,
    pub(super) told: Mutex<Told>,
    /// Where nodes stage packs.
    pub(super) staging: Vec<PathBuf>,
    /// No faults any more.
    pub(super) calm: AtomicBool,
    jumped_ms: AtomicI64,
    epoch: Instant,
    /// Objects that were deleted: a stale list shows them.
    ghosts: Mutex<Vec<BlobEntry>>,
    /// The objects of which a read was damaged: once each, since two damaged reads of one in a row are as good as a loss.
    damaged: Mutex<HashSet<String>>,
    /// Packs by manifest, as they were last judged.
    judged: Mutex<HashMap<SnapshotId, (Revision, Vec<PackId>)>>,
    /// What happened, for comparing runs.
    pub(super) trace: Mutex<blake3::Hasher>,
    /// The first broken invariant.
    pub(super) broken: Mutex<Option<String>>,
}

impl World {
    pub(super) fn new(seed: u64, staging: Vec<PathBuf>) -> Arc<Self> {
        Arc::new(Self {
            dice: Mutex::new(Dice::new(seed)),
            kv: Arc::new(MemoryKv::new()),
            blobs: Arc::new(MemoryBlobs::new()),
            told: Mutex::default(),
            staging,
            calm: AtomicBool::new(false),
            jumped_ms: AtomicI64::new(0),
            epoch: Instant::now(),
            ghosts: Mutex::default(),
            damaged: Mutex::default(),
            judged: Mutex::default(),
            trace: Mutex::new(blake3::Hasher::new()),
            broken: Mutex::default(),
        })
    }

    pub(super) fn roll(&self, sides: u64) -> u64 {
        self.dice.lock().roll(sides)
    }

    /// Once in `sides`, unless all is calm.
    fn strikes(&self, sides: u64) -> bool {
        !self.calm.load(Ordering::Relaxed) && self.roll(sides) == 0
    }

    pub(super) fn jump_ms(&self, ms: i64) {
        self.jumped_ms.fetch_add(ms, Ordering::Relaxed);
    }

    pub(super) fn now_ms(&self) -> i64 {
        let passed = i64::try_from(self.epoch.elapsed().as_millis()).expect("a short time");
        1_000_000 + passed + self.jumped_ms.load(Ordering::Relaxed)
    }

    fn note(&self, what: &str, key: &[u8]) {
        let mut trace = self.trace.lock();
        trace.update(what.as_bytes()).update(key).update(&self.now_ms().to_le_bytes());
    }

    pub(super) fn fail(&self, what: String) {
        self.broken.lock().get_or_insert(what);
    }

    /// A while, in which others act. Now and then a long one: a request in a queue, a process that is frozen.
    async fn while_others_act(&self) {
        let ms = match self.strikes(60) {
            true => 500 + self.roll(9_000),
            false => self.roll(20),
        };
        sleep(Duration::from_millis(ms)).await;
    }

    /// A write: once in `late` it arrives when nobody expects it any more, now and then its answer is lost.
    async fn write<T, E>(
        &self,
        late: u64,
        apply: impl Future<Output = Result<T, E>> + Send + 'static,
        unknown: impl Fn() -> E,
    ) -> Result<T, E> {
        if self.strikes(late) {
            let late = Duration::from_millis(self.roll(20_000));
            tokio::spawn(async move {
                sleep(late).await;
                let _ = apply.await;
            });
            return Err(unknown());
        }
        let outcome = apply.await;
        match self.strikes(60) {
            true => Err(unknown()),
            false => outcome,
        }
    }

    /// Whether some node has the pack on its disk.
    pub(super) fn is_staged(&self, pack: &PackId) -> bool {
        self.staging.iter().any(|dir| dir.join(format!("{pack}.pack")).exists())
    }

    /// Whether everything that a snapshot names is there. After each change that could make it otherwise.
    pub(super) fn judge(&self, after: &str) {
        let mut judged = self.judged.lock();
        for entry in self.kv.entries(&KeyRange::prefix(b"manifest/")) {
            let id: SnapshotId = std::str::from_utf8(&entry.key[9..]).expect("text").parse().expect("an id");
            let known = judged.get(&id).filter(|(revision, _)| *revision == entry.revision);
            let packs = match known {
                Some((_, packs)) => packs.clone(),
                None => {
                    let manifest = Manifest::decode(&entry.value).expect("a manifest that was committed");
                    let packs: Vec<PackId> = manifest.packs.iter().map(|pack| pack.id).collect();
                    judged.insert(id, (entry.revision, packs.clone()));
                    packs
                }
            };
            for pack in packs {
                let row =
                    self.kv.entry(format!("pack/{pack}").as_bytes()).map(|row| decoded_pack_for_tests(&row).state);
                if !matches!(row, Some(PackState::Live | PackState::Condemned)) {
                    self.fail(format!("after {after}: {id} names {pack}, which is {row:?}"));
                }
                if !self.blobs.has(&pack_key(&pack)) && !self.is_staged(&pack) {
                    self.fail(format!("after {after}: {id} names {pack}, which is nowhere"));
                }
            }
        }
        let told = self.told.lock();
        for id in told.acknowledged.keys().filter(|id| !told.given_up.contains(id)) {
            if self.kv.entry(format!("manifest/{id}").as_bytes()).is_none() {
                self.fail(format!("after {after}: {id} was acknowledged and is gone"));
            }
        }
    }
}

/// A node's clock: right to within a minute.
pub(super) struct SkewedClock {
    pub(super) world: Arc<World>,
    pub(super) skew_ms: i64,
}

impl Clock for SkewedClock {
    fn now_unix_ms(&self) -> i64 {
        self.world.now_ms() + self.skew_ms
    }
}

/// The catalog's engine as a node sees it.
pub(super) struct AdverseKv(pub(super) Arc<World>);

impl AdverseKv {
    async fn turn(&self, action: &'static str) -> Result<(), KvError> {
        self.0.while_others_act().await;
        match self.0.strikes(80) {
            true => Err(KvError::Unavailable { action, reason: "struck".into() }),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl KeyValue for AdverseKv {
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError> {
        self.turn("read").await?;
        self.0.note("get", &keys.concat());
        self.0.kv.get_many(keys).await
    }

    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError> {
        self.turn("list").await?;
        self.0.note("range", &range.start);
        self.0.kv.range(range, limit, order).await
    }

    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError> {
        let world = Arc::clone(&self.0);
        self.turn("write").await?;
        let unknown = || KvError::Unknown { action: "write", reason: "struck".into() };
        let apply = async move {
            let outcome = world.kv.txn(compares, ops).await;
            world.note("txn", format!("{outcome:?}").as_bytes());
            if matches!(outcome, Ok(TxnOutcome::Committed(_))) {
                world.judge("a transaction");
            }
            outcome
        };
        self.0.write(100, apply, unknown).await
    }
}

/// The object store as a node sees it.
pub(super) struct AdverseBlobs(pub(super) Arc<World>);

impl AdverseBlobs {
    async fn turn(&self, op: BlobOp, key: &str) -> Result<(), BlobError> {
        self.0.while_others_act().await;
        self.0.note("blob", key.as_bytes());
        match self.0.strikes(40) {
            true => Err(BlobError::Unavailable { op, key: key.into(), reason: "503".into() }),
            false => Ok(()),
        }
    }

    /// What arrives: now and then with a bit of it turned over.
    fn deliver(&self, key: &str, bytes: Bytes) -> Bytes {
        let mut damaged = self.0.damaged.lock();
        if bytes.is_empty() || damaged.contains(key) || !self.0.strikes(8) {
            return bytes;
        }
        damaged.insert(key.to_owned());
        let mut bytes = bytes.to_vec();
        let at = usize::try_from(self.0.roll(bytes.len() as u64)).expect("small");
        bytes[at] ^= 1 << self.0.roll(8);
        bytes.into()
    }

    async fn write<T>(
        &self,
        op: BlobOp,
        key: &str,
        apply: impl Future<Output = Result<T, BlobError>> + Send + 'static,
    ) -> Result<T, BlobError> {
        self.turn(op, key).await?;
        let unknown = || BlobError::Unknown { op, key: key.into(), reason: "reset".into() };
        self.0.write(60, apply, unknown).await
    }
}

#[async_trait]
impl BlobStore for AdverseBlobs {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        let (world, name) = (Arc::clone(&self.0), key.to_owned());
        self.write(BlobOp::Put, key, async move { world.blobs.put(&name, bytes, mode).await }).await
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        self.turn(BlobOp::Get, key).await?;
        let bytes = self.0.blobs.get(key, max_len).await?;
        Ok(self.deliver(key, bytes))
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        self.turn(BlobOp::Get, key).await?;
        let bytes = self.0.blobs.get_range(key, range).await?;
        Ok(self.deliver(key, bytes))
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        self.turn(BlobOp::Head, key).await?;
        self.0.blobs.head(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError> {
        self.turn(BlobOp::List, prefix).await?;
        let mut listed = self.0.blobs.list(prefix, after, limit).await?;
        if self.0.strikes(4) {
            listed.retain(|_| self.0.roll(3) > 0);
            let ghosts = self.0.ghosts.lock();
            let shown = ghosts
                .iter()
                .filter(|ghost| ghost.key.starts_with(prefix) && after.is_none_or(|after| ghost.key.as_str() > after));
            listed.extend(shown.cloned());
            listed.sort_by(|a, b| a.key.cmp(&b.key));
            listed.dedup_by(|a, b| a.key == b.key);
            listed.truncate(usize::from(limit));
        }
        Ok(listed)
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        let (world, name) = (Arc::clone(&self.0), key.to_owned());
        let apply = async move {
            if let Ok(len) = world.blobs.head(&name).await {
                world.ghosts.lock().push(BlobEntry { key: name.clone(), len });
            }
            let outcome = world.blobs.delete(&name).await;
            world.judge("a DELETE");
            outcome
        };
        self.write(BlobOp::Delete, key, apply).await
    }
}
