use super::*;

const LIMITS: CacheLimits =
    CacheLimits { disk_bytes: 1 << 30, block_cache_bytes: 1 << 20, write_buffer_bytes: 4 << 20 };

fn frame(pack: u8, offset: u64) -> FramePlace {
    FramePlace { pack: PackId([pack; 32]), offset, len: 100 }
}

fn holding(offset: u64, len: u32, chunks: &[u8], last_len: u32) -> PackFrame {
    let chunk_len = if chunks.len() > 1 { 4096 } else { last_len };
    let chunks = chunks.iter().map(|id| ShortId([*id; 16])).collect();
    PackFrame { offset, len, content: pack::Content { chunk_len, last_len, chunks } }
}

#[test]
fn what_is_put_survives_a_restart_until_it_is_removed() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let (small, large) = (frame(1, 24), frame(1, 124));
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
fn places_of_a_pack_come_and_go_together() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
    let one = PackRef { id: PackId([10; 32]), size_bytes: 500, frames: 2, chunks: 3 };
    let two = PackRef { id: PackId([11; 32]), size_bytes: 600, frames: 1, chunks: 1 };
    let frames = [holding(24, 100, &[1, 2], 50), holding(124, 50, &[4], 70)];
    cache.register_pack(&one, &frames);
    cache.register_pack(&two, &[holding(24, 70, &[1], 4096)]);
    cache.register_pack(&two, &[holding(24, 70, &[1], 4096)]);
    let packs = |chunk| cache.places(&ShortId([chunk; 16])).iter().map(|at| at.frame.pack).collect::<Vec<_>>();
    assert_eq!(packs(1), [one.id, two.id]);
    assert_eq!(packs(2), [one.id]);
    assert_eq!(packs(3), []);
    let first = FramePlace { pack: one.id, offset: 24, len: 100 };
    assert_eq!(cache.places(&ShortId([2; 16])), [Place { frame: first, start: 4096, len: 50 }]);
    let second = FramePlace { pack: one.id, offset: 124, len: 50 };
    assert_eq!(cache.places(&ShortId([4; 16])), [Place { frame: second, start: 0, len: 70 }]);
    assert_eq!(cache.footer(&one.id), Some((one, frames.to_vec())));
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
fn impossible_places_are_no_places() {
    let place = |offset, frame_len, start, len| Place {
        frame: FramePlace { pack: PackId([2; 32]), offset, len: frame_len },
        start,
        len,
    };
    let good = place(24, 100, 5, 10);
    assert_eq!(decode_places(&encode_place(&good)).collect::<Vec<_>>(), [good]);
    for (offset, frame_len, start, len) in [
        (24, u32::MAX, 0, 10),
        (24, 0, 0, 10),
        (u64::MAX, 10, 0, 10),
        (pack::MAX_PACK_BYTES, 10, 0, 10),
        (24, 100, u32::MAX, u32::MAX),
        (24, 100, 0, 0),
    ] {
        // Between two good ones, which are still found; a cut one at the end is not.
        let mut value = encode_place(&good).to_vec();
        value.extend(encode_place(&place(offset, frame_len, start, len)));
        value.extend(encode_place(&good));
        value.extend(&encode_place(&good)[..20]);
        assert_eq!(decode_places(&value).collect::<Vec<_>>(), [good, good]);
    }
}

#[test]
fn a_cache_that_cannot_be_opened_or_has_another_format_is_started_anew() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let place = frame(1, 24);
    let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
    cache.put(&place, b"frame");
    cache.flush();
    drop(cache);
    let manifest = std::fs::read_dir(dir.path())
        .expect("list")
        .map(|file| file.expect("entry").path())
        .find(|path| path.to_string_lossy().contains("MANIFEST"))
        .expect("RocksDB's own manifest");
    std::fs::write(manifest, b"rubbish").expect("overwrite");
    let cache = ChunkCache::open(dir.path(), LIMITS).expect("started anew");
    assert_eq!(cache.get(&place), None);
    cache.put(&place, b"frame");
    cache.db.put(FORMAT_KEY, b"0").expect("another format");
    drop(cache);
    let cache = ChunkCache::open(dir.path(), LIMITS).expect("started anew");
    assert_eq!(cache.get(&place), None);
}

#[test]
fn a_value_that_rocksdb_calls_corrupt_is_a_miss_and_is_counted() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let place = frame(1, 24);
    let cache = ChunkCache::open(dir.path(), LIMITS).expect("open");
    cache.put(&place, &[7; 100_000]);
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
    assert_eq!(cache.get(&place), None);
    assert_eq!(cache.counters().corrupt_values.load(Ordering::Relaxed), 1);
    assert_eq!(cache.get(&place), None);
    assert_eq!(cache.counters().corrupt_values.load(Ordering::Relaxed), 1, "it was removed");
}

/// 100 KiB a frame: a budget of 20 MiB holds 200 of them.
const SMALL: CacheLimits = CacheLimits { disk_bytes: 20 << 20, ..LIMITS };

fn content(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; 100 << 10];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn numbered(number: u64) -> FramePlace {
    frame(1, number * 1000)
}

#[test]
fn the_budget_is_kept_on_disk_and_what_is_read_again_survives_a_scan_and_a_restart() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let cache = ChunkCache::open(dir.path(), SMALL).expect("open");
    let hot = 0..40;
    for number in hot.clone() {
        cache.put(&numbered(number), &content(number));
    }
    for number in hot.clone() {
        assert!(cache.get(&numbered(number)).is_some(), "read again: it leaves probation");
    }
    // Five budgets of frames that are put and read but once or never, while the hot ones are read now and then.
    for number in 1000..2000 {
        cache.put(&numbered(number), &content(number));
        if number % 10 == 0 {
            cache.get(&numbered(number / 10 % 40));
        }
    }
    cache.flush();
    assert!(cache.disk_bytes() <= SMALL.disk_bytes, "{} bytes on disk", cache.disk_bytes());
    assert!(cache.evictions().bytes.load(Ordering::Relaxed) > 80 << 20);
    drop(cache);
    let cache = ChunkCache::open(dir.path(), SMALL).expect("open again");
    for number in hot {
        let frame = cache.get(&numbered(number)).unwrap_or_else(|| panic!("hot frame {number} was pushed out"));
        assert_eq!(frame, content(number));
    }
    assert!(cache.get(&numbered(1000)).is_none(), "the scan's first frame is gone");
    assert!(cache.get(&numbered(1999)).is_some(), "its last one is not");
}

#[test]
fn what_is_read_rarely_makes_room_for_what_is_read_often() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let cache = ChunkCache::open(dir.path(), SMALL).expect("open");
    let read_twice = |numbers: std::ops::Range<u64>| {
        for number in numbers {
            cache.put(&numbered(number), &content(number));
            cache.get(&numbered(number));
        }
    };
    read_twice(0..20);
    read_twice(100..600);
    cache.flush();
    assert!(cache.disk_bytes() <= SMALL.disk_bytes, "{} bytes on disk", cache.disk_bytes());
    assert!(
        (0..20).all(|number| cache.get(&numbered(number)).is_none()),
        "long not read: gone from the kept ones, too"
    );
}

#[test]
fn a_frame_is_removed_from_every_generation() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let cache = ChunkCache::open(dir.path(), SMALL).expect("open");
    cache.put(&numbered(1), &content(1));
    assert!(cache.get(&numbered(1)).is_some(), "now in both queues");
    cache.remove(&numbered(1));
    assert!(cache.get(&numbered(1)).is_none());
}

#[test]
fn threads_that_fill_a_generation_at_once_begin_one_new_one() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let cache = ChunkCache::open(dir.path(), SMALL).expect("open");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cache = &cache;
            scope.spawn(move || {
                for number in 0..100 {
                    let number = thread * 1000 + number;
                    cache.put(&numbered(number), &content(number));
                    cache.get(&numbered(number));
                }
            });
        }
    });
    assert_eq!(cache.counters().failures.load(Ordering::Relaxed), 0);
    cache.flush();
    assert!(cache.disk_bytes() <= SMALL.disk_bytes, "{} bytes on disk", cache.disk_bytes());
}
