//! Memory images without guests: who reads what when, and what a failure leaves behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::AtomicBool;

use tokio::sync::Notify;

use super::*;

const SIZE: u64 = 10 * 8192 + 4096;
const CHUNK: u32 = 8192;

/// Chunk `n` holds the byte `n + base`; chunk 3 is zeros. Fails `failures` times, waits while `held`.
struct Scripted {
    base: u8,
    reads: AtomicU64,
    failures: AtomicU64,
    lost: AtomicBool,
    short: AtomicBool,
    held: AtomicBool,
    asked: Notify,
    go_on: Notify,
}

fn scripted(base: u8) -> Arc<Scripted> {
    Arc::new(Scripted {
        base,
        reads: AtomicU64::new(0),
        failures: AtomicU64::new(0),
        lost: AtomicBool::new(false),
        short: AtomicBool::new(false),
        held: AtomicBool::new(false),
        asked: Notify::new(),
        go_on: Notify::new(),
    })
}

#[async_trait]
impl PageSource for Scripted {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn chunk_size(&self) -> u32 {
        CHUNK
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.asked.notify_one();
        if self.held.load(Ordering::SeqCst) {
            self.go_on.notified().await;
        }
        if self.lost.load(Ordering::SeqCst) {
            return Err(SourceError::lost("gone"));
        }
        if self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(SourceError::new("not now"));
        }
        if chunk.0 == 3 {
            return Ok(ChunkData::Zero);
        }
        let len = Geometry::of(self).unwrap().chunk_len(chunk) as usize;
        let len = if self.short.load(Ordering::SeqCst) { len - 1 } else { len };
        Ok(ChunkData::Bytes(Bytes::from(vec![chunk.0 as u8 + self.base; len])))
    }
}

fn bytes_of(data: ChunkData) -> Vec<u8> {
    match data {
        ChunkData::Zero => panic!("zeros"),
        ChunkData::Bytes(bytes) => bytes.to_vec(),
    }
}

#[tokio::test]
async fn many_readers_one_read() {
    let source = scripted(1);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    let readers: Vec<_> = (0..20)
        .map(|_| {
            let image = Arc::clone(&image);
            tokio::spawn(async move { image.chunk_bytes(ChunkNo(5)).await })
        })
        .collect();
    for reader in readers {
        assert_eq!(bytes_of(reader.await.unwrap().unwrap()), [6; CHUNK as usize]);
    }
    assert_eq!(source.reads.load(Ordering::SeqCst), 1);
    assert_eq!(image.filled_bytes(), u64::from(CHUNK));
}

#[tokio::test]
async fn the_last_chunk_may_be_short_and_there_is_none_behind_it() {
    let image = MemoryImage::new("t", scripted(1), Backing::Memory).unwrap();
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(10)).await.unwrap()), [11; 4096]);
    let error = image.ensure(ChunkNo(11)).await.unwrap_err();
    assert!(matches!(error, FillError::OutOfRange { chunk: ChunkNo(11), .. }));
    assert_eq!(image.page_state(21), PageState::Missing);
}

#[tokio::test(start_paused = true)]
async fn failures_that_pass_are_waited_out() {
    let source = scripted(1);
    source.failures.store(5, Ordering::SeqCst);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    image.ensure(ChunkNo(0)).await.unwrap();
    assert_eq!(source.reads.load(Ordering::SeqCst), 6);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_lasts_is_reported_at_the_deadline_and_the_next_reader_tries_anew() {
    let source = scripted(1);
    source.failures.store(u64::MAX, Ordering::SeqCst);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    let error = image.ensure(ChunkNo(0)).await.unwrap_err();
    let FillError::Source { waited, cause, .. } = &error else { panic!("{error}") };
    assert!(*waited <= Duration::from_secs(30) && *waited > Duration::from_secs(28), "{waited:?}");
    assert_eq!(cause.to_string(), "not now");
    assert_eq!(image.page_state(0), PageState::Missing);
    source.failures.store(0, Ordering::SeqCst);
    image.ensure(ChunkNo(0)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_source_that_never_answers_and_one_that_answers_wrongly_are_failures() {
    let source = scripted(1);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    source.short.store(true, Ordering::SeqCst);
    let error = image.ensure(ChunkNo(0)).await.unwrap_err();
    assert!(error.to_string().contains("8191 bytes instead of 8192"), "{error}");
    source.held.store(true, Ordering::SeqCst);
    let error = image.ensure(ChunkNo(0)).await.unwrap_err();
    assert!(error.to_string().contains("no answer"), "{error}");
    assert_eq!(image.page_state(0), PageState::Missing);
}

#[tokio::test]
async fn what_is_lost_is_not_tried_again() {
    let source = scripted(1);
    source.lost.store(true, Ordering::SeqCst);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    let error = image.ensure(ChunkNo(0)).await.unwrap_err();
    assert!(matches!(error, FillError::Source { tries: 1, .. }), "{error}");
    let through = PageSource::read(&*image, ChunkNo(0)).await.unwrap_err();
    assert!(through.is_lost(), "a child learns it too");
}

#[tokio::test]
async fn a_reader_that_goes_away_stops_no_fill() {
    let source = scripted(1);
    source.held.store(true, Ordering::SeqCst);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    let reader = tokio::spawn({
        let image = Arc::clone(&image);
        async move { image.ensure(ChunkNo(0)).await }
    });
    source.asked.notified().await;
    reader.abort();
    assert!(reader.await.unwrap_err().is_cancelled());
    source.go_on.notify_one();
    image.ensure(ChunkNo(0)).await.unwrap();
    assert_eq!(source.reads.load(Ordering::SeqCst), 1);
}

#[test]
fn a_fill_whose_runtime_ends_is_abandoned_and_can_be_done_on_another() {
    let source = scripted(1);
    source.held.store(true, Ordering::SeqCst);
    let image = MemoryImage::new("t", source.clone(), Backing::Memory).unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let waiting = first.block_on(async {
        let outcome = image.join_flight(ChunkNo(0)).unwrap().unwrap();
        source.asked.notified().await;
        outcome
    });
    drop(first);
    assert!(waiting.has_changed().is_err(), "the waiters learn of it");
    source.held.store(false, Ordering::SeqCst);
    runtime().block_on(image.ensure(ChunkNo(0))).unwrap();
}

#[tokio::test]
async fn a_fill_completes_a_partly_dirty_chunk_around_its_dirty_pages() {
    let page = [0xDD; 4096];
    // Chunk 2 half dirty, chunk 3 (zeros below) half dirty, chunk 4 all dirty, one page of them with zeros.
    let zeros = [0; 4096];
    let pages: [(u64, &[u8]); 4] = [(5, &page), (6, &page), (8, &page), (9, &zeros)];
    let dirty = DirtyPages::of(SIZE, pages).unwrap();
    let source = scripted(1);
    let image = MemoryImage::child("t", source.clone(), dirty).unwrap();
    let states = (4..10).map(|page| image.page_state(page)).collect::<Vec<_>>();
    use PageState::{Missing, Present};
    assert_eq!(states, [Missing, Present, Present, Missing, Present, Present]);
    assert_eq!(image.dirty_chunks(), [2, 3, 4].map(ChunkNo));
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(2)).await.unwrap()), [[3; 4096], page].concat());
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(3)).await.unwrap()), [page, [0; 4096]].concat());
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(4)).await.unwrap()), [page, zeros].concat());
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(1)).await.unwrap()), [2; CHUNK as usize]);
    assert_eq!(source.reads.load(Ordering::SeqCst), 3, "a chunk that is all dirty needs no parent");
    assert!((4..10).all(|page| image.page_state(page) == Present));
}

#[tokio::test]
async fn a_new_source_takes_over_while_the_old_one_is_being_read() {
    let (old, new) = (scripted(1), scripted(1));
    old.held.store(true, Ordering::SeqCst);
    let dirty = DirtyPages::of(SIZE, [(0, &[0xDD; 4096][..])]).unwrap();
    let image = MemoryImage::child("t", old.clone(), dirty).unwrap();
    let reader = tokio::spawn({
        let image = Arc::clone(&image);
        async move { image.chunk_bytes(ChunkNo(0)).await }
    });
    old.asked.notified().await;
    image.set_source(new.clone()).unwrap();
    image.ensure(ChunkNo(1)).await.unwrap();
    old.go_on.notify_one();
    assert_eq!(bytes_of(reader.await.unwrap().unwrap()), [[0xDD; 4096], [1; 4096]].concat());
    assert_eq!((old.reads.load(Ordering::SeqCst), new.reads.load(Ordering::SeqCst)), (1, 1));
    let other = crate::source::ZeroSource::new(Geometry::new(SIZE, CHUNK * 2).unwrap());
    assert!(matches!(image.set_source(other), Err(ImageError::Mismatch { .. })));
}

#[tokio::test]
async fn a_file_holds_an_image_too_and_leaves_no_name() {
    let directory = tempfile::tempdir().unwrap();
    let image = MemoryImage::new("t", scripted(1), Backing::File(directory.path().to_owned())).unwrap();
    assert_eq!(bytes_of(image.chunk_bytes(ChunkNo(7)).await.unwrap()), [8; CHUNK as usize]);
    assert_eq!(image.chunk_bytes(ChunkNo(3)).await.unwrap(), ChunkData::Zero);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_guest_can_neither_write_nor_resize_the_image() {
    let image = MemoryImage::new("t", scripted(1), Backing::Memory).unwrap();
    let guest = File::from(image.guest_fd().try_clone_to_owned().unwrap());
    assert!(guest.write_at(&[1], 0).is_err(), "its descriptor is read-only");
    assert!(guest.set_len(0).is_err());
    assert!(image.file.set_len(SIZE / 2).is_err(), "the size is sealed for everybody");
    assert!(image.file.set_len(SIZE * 2).is_err());
    assert_eq!(guest.metadata().unwrap().permissions().mode() & 0o777, 0o400);
}

#[test]
fn dirty_pages_of_another_size_are_refused() {
    let dirty = DirtyPages::none(SIZE + 4096).unwrap();
    assert!(matches!(MemoryImage::child("t", scripted(1), dirty), Err(ImageError::Mismatch { .. })));
}
