//! Which frames stay when the cache is full: generations of column families, dropped whole.
//!
//! ```text
//!   put ──> probation:  [ p2 ][ p3 ]                      a fifth of the budget
//!                         │ read again: copied
//!                         └──> kept:  [ k5 ][ k6 ][ k7 ][ k8 ]      the rest
//!                                       └── read again in the older half: copied into the newest
//!
//!   the newest is full ──> a new one is begun, the oldest is dropped: files deleted, no compaction, no garbage
//! ```
//!
//! S3-FIFO's idea (a small queue that what is read once never leaves, a large one with second chances), with a column
//! family for a segment of a queue. So what a long scan reads once passes through probation and pushes out nothing that
//! was read twice. What the budget bounds is bytes on disk: dropping a family deletes its files, where deletes would leave
//! holes until RocksDB collects its blob files.
//!
//! There is no index in memory to be lost or persisted: after a restart every generation is there, and the newest of each
//! queue is the one with the highest number.
//!
//! A frame may lie in two generations: then they hold the same bytes. Removing one removes it everywhere.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::RwLock;
use rocksdb::Options;

use super::Db;

/// How many generations a queue has, the one being filled included, and the share of the budget they take together.
const PROBATION: (usize, u64) = (2, 20);
const KEPT: (usize, u64) = (4, 76);

/// The smallest generation: below, column families would come and go all the time.
const MIN_GENERATION_BYTES: u64 = 1 << 20;

/// One of the two queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Probation,
    Kept,
}

impl Queue {
    fn name(self, number: u64) -> String {
        let prefix = match self {
            Self::Probation => "p",
            Self::Kept => "k",
        };
        format!("{prefix}{number:012}")
    }

    fn generations(self) -> usize {
        match self {
            Self::Probation => PROBATION.0,
            Self::Kept => KEPT.0,
        }
    }

    /// Bytes after which a generation is full.
    fn full_at(self, budget: u64) -> u64 {
        let (generations, percent) = match self {
            Self::Probation => PROBATION,
            Self::Kept => KEPT,
        };
        (budget / 100 * percent / generations as u64).max(MIN_GENERATION_BYTES)
    }
}

struct Generation {
    number: u64,
    bytes: AtomicU64,
}

/// The generations of one queue, oldest first. Never empty.
struct Line {
    queue: Queue,
    generations: Vec<Generation>,
}

impl Line {
    fn newest(&self) -> &Generation {
        self.generations.last().expect("a line is never empty")
    }
}

/// What the cache dropped to keep to its budget, since it was opened.
#[derive(Debug, Default)]
pub struct Evictions {
    /// Generations dropped.
    pub generations: AtomicU64,
    /// Bytes in them.
    pub bytes: AtomicU64,
    /// Frames that were read again and copied.
    pub promoted: AtomicU64,
}

/// Frames by place, within a budget.
pub(super) struct Frames {
    lines: RwLock<[Line; 2]>,
    budget_bytes: u64,
    options: Options,
    pub(super) evictions: Evictions,
}

/// Whether a column family is a generation of frames.
pub(super) fn is_generation(family: &str) -> bool {
    parse(family).is_some()
}

fn parse(family: &str) -> Option<(Queue, u64)> {
    let queue = match family.as_bytes().first()? {
        b'p' => Queue::Probation,
        b'k' => Queue::Kept,
        _ => return None,
    };
    let number = family.get(1..).filter(|digits| digits.len() == 12)?.parse().ok()?;
    Some((queue, number))
}

impl Frames {
    /// Takes over the generations among `families`, and begins the first of each queue if there is none.
    pub(super) fn open(
        db: &Db,
        families: &[String],
        budget_bytes: u64,
        options: Options,
    ) -> Result<Self, rocksdb::Error> {
        let line = |queue: Queue| -> Result<Line, rocksdb::Error> {
            let mut numbers: Vec<u64> =
                families.iter().filter_map(|name| parse(name)).filter(|(of, _)| *of == queue).map(|(_, n)| n).collect();
            numbers.sort_unstable();
            if numbers.is_empty() {
                db.create_cf(queue.name(1), &options)?;
                numbers.push(1);
            }
            let generations = numbers.into_iter().map(|number| Generation {
                number,
                bytes: AtomicU64::new(super::disk_bytes_of(db, &queue.name(number))),
            });
            Ok(Line { queue, generations: generations.collect() })
        };
        let lines = RwLock::new([line(Queue::Probation)?, line(Queue::Kept)?]);
        Ok(Self { lines, budget_bytes, options, evictions: Evictions::default() })
    }

    /// The names of all generations.
    pub(super) fn families(&self) -> Vec<String> {
        let lines = self.lines.read();
        lines.iter().flat_map(|line| line.generations.iter().map(|one| line.queue.name(one.number))).collect()
    }

    /// A frame from whichever generation has it. One that deserves it is copied into the newest of those that are kept.
    pub(super) fn get(&self, db: &Db, key: &[u8]) -> Result<Option<Bytes>, rocksdb::Error> {
        let lines = self.lines.read();
        for line in lines.iter().rev() {
            for (age, generation) in line.generations.iter().rev().enumerate() {
                let Some(family) = db.cf_handle(&line.queue.name(generation.number)) else { continue };
                let Some(value) = db.get_pinned_cf(&family, key)? else { continue };
                let frame = Bytes::copy_from_slice(&value);
                let old = line.queue == Queue::Probation || age >= line.queue.generations() / 2;
                drop(lines);
                if old {
                    self.evictions.promoted.fetch_add(1, Ordering::Relaxed);
                    self.put_into(db, Queue::Kept, key, &frame)?;
                }
                return Ok(Some(frame));
            }
        }
        Ok(None)
    }

    /// Keeps a frame, on probation.
    pub(super) fn put(&self, db: &Db, key: &[u8], frame: &[u8]) -> Result<(), rocksdb::Error> {
        self.put_into(db, Queue::Probation, key, frame)
    }

    fn put_into(&self, db: &Db, queue: Queue, key: &[u8], frame: &[u8]) -> Result<(), rocksdb::Error> {
        let full = {
            let lines = self.lines.read();
            let newest = lines[queue as usize].newest();
            let family = db.cf_handle(&queue.name(newest.number)).expect("families go only with their generation");
            db.put_cf(&family, key, frame)?;
            let added = (key.len() + frame.len()) as u64;
            newest.bytes.fetch_add(added, Ordering::Relaxed) + added >= queue.full_at(self.budget_bytes)
        };
        if full { self.turn(db, queue) } else { Ok(()) }
    }

    /// Begins a new generation, unless somebody else has, and drops the oldest.
    ///
    /// Crash between the two: one generation too many, dropped at the next turn.
    fn turn(&self, db: &Db, queue: Queue) -> Result<(), rocksdb::Error> {
        let mut lines = self.lines.write();
        let line = &mut lines[queue as usize];
        if line.newest().bytes.load(Ordering::Relaxed) < queue.full_at(self.budget_bytes) {
            return Ok(());
        }
        let number = line.newest().number + 1;
        db.create_cf(queue.name(number), &self.options)?;
        line.generations.push(Generation { number, bytes: AtomicU64::new(0) });
        while line.generations.len() > queue.generations() {
            let oldest = line.generations.remove(0);
            db.drop_cf(&queue.name(oldest.number))?;
            self.evictions.generations.fetch_add(1, Ordering::Relaxed);
            self.evictions.bytes.fetch_add(oldest.bytes.into_inner(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Forgets a frame in every generation.
    pub(super) fn remove(&self, db: &Db, key: &[u8]) -> Result<(), rocksdb::Error> {
        for name in self.families() {
            if let Some(family) = db.cf_handle(&name) {
                db.delete_cf(&family, key)?;
            }
        }
        Ok(())
    }
}
