//! What keeps parallel work in order: puts come in by number, frames go out by number.
//!
//! ```text
//!   number() ── hashed by some worker ──> take_in ── waits for the puts before it ──> open frame ──> full frames, numbered
//!                                         hand_in ── waits for the frames before it ──> the frames that are next, in order
//! ```
//!
//! Pure but for the locks. Nothing waits inside: whoever completes a gap takes along what was waiting behind it.
//!
//! A chunk is *settled* while its frame is on its way or in a pack that is not registered yet. Once the pack is, the chunk
//! is found like any other; it stays settled until every put is in that may have looked before.

use std::collections::{BTreeMap, HashSet, VecDeque};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::chunk::FRAME_TARGET_BYTES;
use crate::ids::{ChunkId, ShortId};
use crate::pack::Content;

/// A put, hashed.
pub(super) struct Run {
    /// The plain bytes of all its chunks.
    pub(super) plain: Bytes,
    /// Its chunks, in order.
    pub(super) chunks: Vec<Hashed>,
}

/// One chunk of a run.
pub(super) struct Hashed {
    pub(super) id: ChunkId,
    pub(super) len: usize,
    /// Zero, or in a pack that lasts.
    pub(super) stored: bool,
}

/// Plain chunks that are compressed together: equally long, but for the last one.
pub(super) struct Group {
    /// Its place among all frames of the ingest.
    pub(super) number: u64,
    pub(super) plain: Vec<u8>,
    pub(super) content: Content,
}

/// A frame ready to be written.
pub(super) struct Framed {
    pub(super) frame: Bytes,
    pub(super) content: Content,
}

/// The group that is being filled.
#[derive(Default)]
struct OpenGroup {
    plain: Vec<u8>,
    /// Length of each of its chunks: one that is shorter closes it.
    chunk_len: usize,
    last_len: usize,
    chunks: Vec<ShortId>,
}

impl OpenGroup {
    /// Whether a chunk of this length may follow.
    fn takes(&self, len: usize) -> bool {
        self.chunks.is_empty()
            || (self.last_len == self.chunk_len
                && len <= self.chunk_len
                && self.plain.len() + len <= FRAME_TARGET_BYTES)
    }

    fn push(&mut self, id: ShortId, plain: &[u8]) {
        if self.chunks.is_empty() {
            self.chunk_len = plain.len();
        }
        self.last_len = plain.len();
        self.plain.extend_from_slice(plain);
        self.chunks.push(id);
    }
}

#[derive(Default)]
struct Puts {
    next: u64,
    head: u64,
    waiting: BTreeMap<u64, Run>,
    settled: HashSet<ShortId>,
    /// Chunks found in registered packs from the put of this number on.
    retired: VecDeque<(u64, Vec<ShortId>)>,
    open: OpenGroup,
    next_group: u64,
}

#[derive(Default)]
struct Frames {
    head: u64,
    waiting: BTreeMap<u64, Framed>,
}

/// What came of a put, and of those that had waited for it.
#[derive(Default)]
pub(super) struct TakenIn {
    /// Frames to be compressed.
    pub(super) full: Vec<Group>,
    /// Chunks that are new.
    pub(super) new: u64,
    /// Chunks that were there.
    pub(super) deduplicated: u64,
}

/// The order of one ingest.
#[derive(Default)]
pub(super) struct Pipeline {
    puts: Mutex<Puts>,
    frames: Mutex<Frames>,
}

impl Pipeline {
    /// The number of the next put. Every number must be taken in, or the ingest must fail.
    pub(super) fn number(&self) -> u64 {
        let mut puts = self.puts.lock();
        puts.next += 1;
        puts.next - 1
    }

    /// Which of `chunks` are settled: these need not be looked up.
    pub(super) fn settled(&self, chunks: &[ChunkId]) -> Vec<bool> {
        let puts = self.puts.lock();
        chunks.iter().map(|id| puts.settled.contains(&id.short())).collect()
    }

    /// Takes in a put, and those that waited for it.
    pub(super) fn take_in(&self, number: u64, run: Run) -> TakenIn {
        let mut taken = TakenIn::default();
        let mut puts = self.puts.lock();
        puts.waiting.insert(number, run);
        loop {
            let head = puts.head;
            let Some(run) = puts.waiting.remove(&head) else { break };
            puts.head += 1;
            puts.add(&run, &mut taken);
        }
        let head = puts.head;
        while puts.retired.front().is_some_and(|(from, _)| *from <= head) {
            for id in puts.retired.pop_front().into_iter().flat_map(|(_, ids)| ids) {
                puts.settled.remove(&id);
            }
        }
        taken
    }

    /// Settles one chunk that has a frame of its own; false when it is stored or settled already.
    pub(super) fn settle(&self, id: ChunkId, stored: bool) -> bool {
        !stored && self.puts.lock().settled.insert(id.short())
    }

    /// A number for a frame that is not made of puts.
    pub(super) fn number_of_frame(&self) -> u64 {
        self.puts.lock().number_of_group()
    }

    /// What is in the open frame. All puts must be in.
    pub(super) fn flush(&self) -> Option<Group> {
        let mut puts = self.puts.lock();
        (!puts.open.chunks.is_empty()).then(|| puts.close())
    }

    /// Hands in a frame and calls `write` for it and those behind it that were waiting, in the order of their numbers.
    pub(super) fn hand_in<E>(
        &self,
        number: u64,
        framed: Framed,
        mut write: impl FnMut(Framed) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut frames = self.frames.lock();
        frames.waiting.insert(number, framed);
        loop {
            let head = frames.head;
            let Some(framed) = frames.waiting.remove(&head) else { return Ok(()) };
            frames.head += 1;
            write(framed)?;
        }
    }

    /// These chunks are in a registered pack now.
    pub(super) fn retire(&self, chunks: Vec<ShortId>) {
        let mut puts = self.puts.lock();
        let from = puts.next;
        puts.retired.push_back((from, chunks));
    }
}

impl Puts {
    fn add(&mut self, run: &Run, taken: &mut TakenIn) {
        let mut start = 0;
        for chunk in &run.chunks {
            let plain = &run.plain[start..start + chunk.len];
            start += chunk.len;
            if chunk.id.is_zero() {
                continue;
            }
            if chunk.stored || !self.settled.insert(chunk.id.short()) {
                taken.deduplicated += 1;
                continue;
            }
            taken.new += 1;
            if !self.open.takes(chunk.len) {
                taken.full.push(self.close());
            }
            self.open.push(chunk.id.short(), plain);
            if self.open.plain.len() >= FRAME_TARGET_BYTES {
                taken.full.push(self.close());
            }
        }
    }

    fn close(&mut self) -> Group {
        let number = self.number_of_group();
        let OpenGroup { plain, chunk_len, last_len, chunks } = std::mem::take(&mut self.open);
        let len = |len: usize| u32::try_from(len).expect("a chunk is small");
        Group { number, plain, content: Content { chunk_len: len(chunk_len), last_len: len(last_len), chunks } }
    }

    fn number_of_group(&mut self) -> u64 {
        self.next_group += 1;
        self.next_group - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Most chunks are equally long; some are shorter, as the last one of an image is, or longer, as another image's are.
    fn len_of(id: u8) -> usize {
        match id % 10 {
            3 => 700,
            7 => 16384,
            _ => 4096,
        }
    }

    fn run(ids: &[u8]) -> Run {
        let hashed = |id: &u8| Hashed { id: ChunkId([*id; 32]), len: len_of(*id), stored: *id == 200 };
        let plain: Vec<u8> = ids.iter().flat_map(|id| vec![*id; len_of(*id)]).collect();
        Run { plain: plain.into(), chunks: ids.iter().map(hashed).collect() }
    }

    proptest! {
        /// In whatever order workers finish: the frames are the same, each chunk once, with its own bytes.
        #[test]
        fn the_order_of_the_puts_decides(
            puts in prop::collection::vec(prop::collection::vec(0..=200u8, 1..40), 1..12),
            shuffled in prop::collection::vec(any::<u32>(), 12),
        ) {
            let pack = |order: &[usize]| {
                let pipeline = Pipeline::default();
                let numbers: Vec<u64> = puts.iter().map(|_| pipeline.number()).collect();
                let mut groups = Vec::new();
                for at in order {
                    groups.extend(pipeline.take_in(numbers[*at], run(&puts[*at])).full);
                }
                groups.extend(pipeline.flush());
                let mut written = Vec::new();
                // Compressed in the reverse order.
                for group in groups.into_iter().rev() {
                    let framed = Framed { frame: group.plain.into(), content: group.content };
                    pipeline.hand_in(group.number, framed, |framed| { written.push(framed); Ok::<_, ()>(()) }).expect("written");
                }
                written
            };
            let straight: Vec<usize> = (0..puts.len()).collect();
            let mut order = straight.clone();
            order.sort_by_key(|at| shuffled[*at]);
            let (a, b) = (pack(&straight), pack(&order));
            prop_assert_eq!(a.len(), b.len());
            let mut seen = HashSet::new();
            for (a, b) in a.iter().zip(&b) {
                prop_assert_eq!(&a.frame, &b.frame);
                prop_assert_eq!(&a.content, &b.content);
                prop_assert_eq!(a.content.plain_len(), a.frame.len() as u64);
                prop_assert!(a.frame.len() <= FRAME_TARGET_BYTES);
                for (chunk, start, len) in a.content.places() {
                    let plain = &a.frame[start as usize..(start + len) as usize];
                    prop_assert!(seen.insert(chunk), "stored twice");
                    prop_assert!(plain.iter().all(|byte| *byte == chunk.0[0]));
                    prop_assert_eq!(plain.len(), len_of(chunk.0[0]));
                }
            }
            let wanted: HashSet<ShortId> =
                puts.iter().flatten().filter(|id| !matches!(id, 0 | 200)).map(|id| ShortId([*id; 16])).collect();
            prop_assert_eq!(seen, wanted);
        }
    }

    #[test]
    fn a_retired_chunk_stays_settled_for_those_who_may_have_looked_before() {
        let pipeline = Pipeline::default();
        let (first, second) = (pipeline.number(), pipeline.number());
        assert_eq!(pipeline.take_in(first, run(&[1])).new, 1);
        // The second put has looked already and found nothing; then the first one's pack is registered.
        pipeline.retire(vec![ShortId([1; 16])]);
        assert_eq!(pipeline.take_in(second, run(&[1])).deduplicated, 1);
        assert_eq!(pipeline.settled(&[ChunkId([1; 32])]), [false], "now it is found in the pack");
    }
}
