//! Guest memory end to end: a stand-in VMM with the real preload library, the real kernel interface, real page servers.
//! Needs `/dev/userfaultfd` or the right to call `userfaultfd(2)`, and Linux 6.7 for `PAGEMAP_SCAN`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::guest::{Guest, answer, serve, within};
use common::source::{CHUNK, PAGES_PER_CHUNK, TestSource, image_bytes, is_zero_chunk, page_bytes};
use snapyard_vmm::{
    Backing, ChunkNo, Geometry, MemoryImage, PAGE_SIZE, PageRange, PreloadError, ZeroSource, capture_dirty,
    private_bytes,
};
use tokio::sync::oneshot::error::TryRecvError;

const MIB: u64 = 1 << 20;

#[test]
#[ignore = "the process that the other tests start"]
fn stand_in_vmm() {
    common::stand_in::run();
}

fn image_over(source: &Arc<TestSource>) -> Arc<MemoryImage> {
    MemoryImage::new("test", source.clone(), Backing::Memory).unwrap()
}

fn chunk_bytes(seed: u64, chunk: u64) -> Vec<u8> {
    (chunk * PAGES_PER_CHUNK..(chunk + 1) * PAGES_PER_CHUNK).flat_map(|page| page_bytes(seed, page)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn lazy_reads_see_the_bytes_of_the_source() {
    let source = TestSource::new(1, 4 * MIB);
    let image = image_over(&source);
    let guest = Guest::start(4 * MIB);
    let served = guest.attach(&image);
    guest.expect(5 * CHUNK, &chunk_bytes(1, 5)).await;
    assert_eq!(source.reads().keys().copied().collect::<Vec<_>>(), [5], "only what was touched is read");
    assert_eq!(image.filled_bytes(), CHUNK);
    guest.expect(0, &image_bytes(1, 4 * MIB)).await;
    assert_eq!(served.touched().len(), 64, "every chunk was touched");
    assert_eq!(served.touched()[0], ChunkNo(5));
    assert_eq!(
        private_bytes(guest.pid(), &guest.channel.regions().unwrap()).unwrap(),
        0,
        "reading makes nothing private"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_makes_a_private_copy_and_leaves_the_image_alone() {
    let source = TestSource::new(2, MIB);
    let image = image_over(&source);
    let (writer, reader) = (Guest::start(MIB), Guest::start(MIB));
    let _served = (writer.attach(&image), reader.attach(&image));
    let mut expected = image_bytes(2, MIB);
    // Never read before, read before, inside a page, across pages, in a chunk of zeros.
    writer.expect(2 * CHUNK, &chunk_bytes(2, 2)).await;
    for (offset, len) in
        [(0, PAGE_SIZE), (2 * CHUNK, PAGE_SIZE), (5 * CHUNK + 100, 50), (6 * CHUNK - 10, 20), (3 * CHUNK, 8)]
    {
        writer.fill(offset, len, 0xAB).await;
        expected[offset as usize..(offset + len) as usize].fill(0xAB);
    }
    writer.expect(0, &expected).await;
    reader.expect(0, &image_bytes(2, MIB)).await;
    assert_eq!(private_bytes(writer.pid(), &writer.channel.regions().unwrap()).unwrap(), 6 * PAGE_SIZE);
    let snapyard_vmm::ChunkData::Bytes(bytes) = image.chunk_bytes(ChunkNo(0)).await.unwrap() else { panic!("zeros") };
    assert_eq!(bytes, chunk_bytes(2, 0), "the image is unchanged");
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_of_one_image_read_each_chunk_from_the_source_once() {
    let source = TestSource::new(3, 4 * MIB);
    let image = image_over(&source);
    let guests: Vec<Guest> = (0..3).map(|_| Guest::start(4 * MIB)).collect();
    let _served: Vec<_> = guests.iter().map(|guest| guest.attach(&image)).collect();
    let whole = image_bytes(3, 4 * MIB);
    let expected = common::stand_in::digest(&whole);
    let pending: Vec<_> = guests.iter().map(|guest| guest.begin(format!("digest 0 {}", 4 * MIB))).collect();
    for pending in pending {
        assert_eq!(answer(pending).await, expected);
    }
    let reads = source.reads();
    assert_eq!(reads.len(), 64);
    assert!(reads.values().all(|count| *count == 1), "reads per chunk: {reads:?}");
    let zero_chunks = (0..64).filter(|chunk| is_zero_chunk(chunk * PAGES_PER_CHUNK)).count() as u64;
    assert_eq!(image.filled_bytes(), 4 * MIB - zero_chunks * CHUNK);
    assert_eq!(image.resident_bytes().unwrap(), image.filled_bytes(), "zeros cost nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_of_zeros_costs_no_memory_until_it_is_written() {
    let source = TestSource::new(4, MIB);
    let image = image_over(&source);
    let guest = Guest::start(MIB);
    let served = guest.attach(&image);
    guest.expect(3 * CHUNK, &vec![0; CHUNK as usize]).await;
    assert_eq!(image.resident_bytes().unwrap(), 0);
    assert_eq!(served.stats().zero_bytes, CHUNK);
    let regions = guest.channel.regions().unwrap();
    assert_eq!(private_bytes(guest.pid(), &regions).unwrap(), 0);
    guest.fill(3 * CHUNK + PAGE_SIZE, 1, 7).await;
    assert_eq!(private_bytes(guest.pid(), &regions).unwrap(), PAGE_SIZE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_chunk_holds_up_nobody_else() {
    let source = TestSource::new(5, MIB);
    source.hold(4);
    let image = image_over(&source);
    let guest = Guest::start(MIB);
    let _served = guest.attach(&image);
    let mut slow = guest.begin(format!("digest {} {CHUNK}", 4 * CHUNK));
    within(source.asked(4, 1)).await;
    for chunk in [0, 1, 2, 3, 5, 6] {
        guest.expect(chunk * CHUNK, &chunk_bytes(5, chunk)).await;
    }
    assert_eq!(slow.try_recv(), Err(TryRecvError::Empty), "the slow one waits");
    source.release(4);
    assert_eq!(answer(slow).await, common::stand_in::digest(&chunk_bytes(5, 4)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_is_lost_fails_the_guest_and_is_never_served_as_zeros() {
    let source = TestSource::new(6, MIB);
    source.lose(4);
    let image = image_over(&source);
    let mut guest = Guest::start(MIB);
    let served = guest.attach(&image);
    let mut failure = served.failure();
    let mut reader = guest.begin(format!("digest {} {PAGE_SIZE}", 4 * CHUNK));
    let fault = within(failure.wait_for(Option::is_some)).await.unwrap().clone().unwrap();
    assert!(fault.reason.contains("chunk 4") && fault.reason.contains("the object is gone"), "{fault}");
    guest.expect(CHUNK, &chunk_bytes(6, 1)).await;
    served.stop();
    assert_eq!(guest.call("ping").await, "pong");
    assert_eq!(reader.try_recv(), Err(TryRecvError::Empty), "the reader waits, server or no server");
    guest.kill();
    within(&mut reader).await.expect_err("it waited until it was killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_page_server_adopts_a_guest_whose_fault_was_read_but_not_answered() {
    let source = TestSource::new(7, MIB);
    source.hold(4);
    let image = image_over(&source);
    let guest = Guest::start(MIB);
    let first = guest.attach(&image);
    let mut reader = guest.begin(format!("digest {} {CHUNK}", 4 * CHUNK));
    within(source.asked(4, 1)).await;
    first.stop();
    source.release(4);
    within(image.ensure(ChunkNo(4))).await.unwrap();
    assert_eq!(guest.call("ping").await, "pong");
    assert_eq!(reader.try_recv(), Err(TryRecvError::Empty), "nobody serves it");
    let (uffd, regions) = guest.channel.uffd().unwrap();
    let second = serve(uffd, regions, &image);
    assert_eq!(answer(reader).await, common::stand_in::digest(&chunk_bytes(7, 4)));
    assert!(second.stats().faults >= 1, "the fault came again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_finds_exactly_the_written_pages() {
    let source = TestSource::new(8, 2 * MIB);
    let image = image_over(&source);
    let guest = Guest::start(2 * MIB);
    let _served = guest.attach(&image);
    // Read everywhere first: pages that are only read are not the guest's.
    guest.expect(0, &image_bytes(8, 2 * MIB)).await;
    let page = |number: u64| number * PAGE_SIZE;
    guest.fill(page(1), 1, 9).await;
    guest.fill(page(20), page(3), 9).await;
    guest.fill(page(40), page(1), 0).await;
    // Chunk 3 is all zeros: one page written with zeros, one with something.
    guest.fill(page(3 * 16 + 2), page(1), 0).await;
    guest.fill(page(3 * 16 + 3), 1, 1).await;
    guest.fill(page(511), page(1), 5).await;
    let dirty = capture_dirty(guest.pid(), &guest.channel.regions().unwrap()).unwrap();
    let run = |first, count| PageRange { first, count };
    assert_eq!(dirty.ranges(), [run(1, 1), run(20, 3), run(40, 1), run(50, 2), run(511, 1)]);
    assert_eq!(dirty.size_bytes(), 2 * MIB);

    let mut expected = image_bytes(8, 2 * MIB);
    expected[page(1) as usize] = 9;
    expected[page(20) as usize..page(23) as usize].fill(9);
    expected[page(40) as usize..page(41) as usize].fill(0);
    expected[page(51) as usize] = 1;
    expected[page(511) as usize..].fill(5);
    let child = MemoryImage::child("child", image.clone(), dirty).unwrap();
    assert_eq!(child.dirty_chunks(), [0, 1, 2, 3, 31].map(ChunkNo));
    let restored = Guest::start(2 * MIB);
    let _child_served = restored.attach(&child);
    restored.expect(0, &expected).await;
    guest.expect(0, &expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partly_dirty_chunk_serves_its_dirty_pages_at_once_and_keeps_them() {
    let source = TestSource::new(9, MIB);
    let image = image_over(&source);
    let guest = Guest::start(MIB);
    let served = guest.attach(&image);
    guest.fill(4 * CHUNK + 3 * PAGE_SIZE, 2 * PAGE_SIZE, 0x77).await;
    let dirty = capture_dirty(guest.pid(), &guest.channel.regions().unwrap()).unwrap();
    drop(served);
    // The stored parent, not the warm image.
    let cold = TestSource::new(9, MIB);
    cold.hold(4);
    let child = MemoryImage::child("child", cold.clone(), dirty).unwrap();
    let restored = Guest::start(MIB);
    let _served = restored.attach(&child);
    restored.expect(4 * CHUNK + 3 * PAGE_SIZE, &[0x77; 2 * PAGE_SIZE as usize]).await;
    assert_eq!(cold.reads().len(), 0, "dirty pages need no parent");
    let whole = restored.begin(format!("digest {} {CHUNK}", 4 * CHUNK));
    within(cold.asked(4, 1)).await;
    restored.fill(4 * CHUNK + 4 * PAGE_SIZE, PAGE_SIZE, 0x78).await;
    cold.release(4);
    let _whole = answer(whole).await;
    let mut expected = chunk_bytes(9, 4);
    expected[3 * PAGE_SIZE as usize..4 * PAGE_SIZE as usize].fill(0x77);
    expected[4 * PAGE_SIZE as usize..5 * PAGE_SIZE as usize].fill(0x78);
    restored.expect(4 * CHUNK, &expected).await;
    expected[4 * PAGE_SIZE as usize..5 * PAGE_SIZE as usize].fill(0x77);
    let snapyard_vmm::ChunkData::Bytes(bytes) = child.chunk_bytes(ChunkNo(4)).await.unwrap() else { panic!("zeros") };
    assert_eq!(bytes, expected, "the image has the captured pages, not the later write");
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_lazily_restored_guests_stack_up() {
    let source = TestSource::new(10, 2 * MIB);
    let mut image = image_over(&source);
    let mut expected = image_bytes(10, 2 * MIB);
    for generation in 0..4u64 {
        let guest = Guest::start(2 * MIB);
        let _served = guest.attach(&image);
        // Each generation writes its own pages and one that all write, and reads almost nothing.
        for page in [generation * 37 + 5, 100, 3 * 16 + generation] {
            let byte = generation as u8 + 1;
            guest.fill(page * PAGE_SIZE, PAGE_SIZE, byte).await;
            expected[(page * PAGE_SIZE) as usize..((page + 1) * PAGE_SIZE) as usize].fill(byte);
        }
        let dirty = capture_dirty(guest.pid(), &guest.channel.regions().unwrap()).unwrap();
        assert_eq!(dirty.dirty_bytes(), 3 * PAGE_SIZE);
        image = MemoryImage::child("child", image, dirty).unwrap();
    }
    let guest = Guest::start(2 * MIB);
    let _served = guest.attach(&image);
    guest.expect(0, &expected).await;
    let reads = source.reads();
    assert!(reads.values().all(|count| *count == 1), "reads per chunk: {reads:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_to_a_chunk_that_is_being_filled_is_kept() {
    let source = TestSource::new(11, MIB);
    source.hold(4);
    let image = image_over(&source);
    let (writer, reader) = (Guest::start(MIB), Guest::start(MIB));
    let _served = (writer.attach(&image), reader.attach(&image));
    let write = writer.begin(format!("fill {} 10 99", 4 * CHUNK + 5));
    let read = reader.begin(format!("digest {} {CHUNK}", 4 * CHUNK));
    within(source.asked(4, 1)).await;
    source.release(4);
    assert_eq!(answer(write).await, "ok");
    assert_eq!(answer(read).await, common::stand_in::digest(&chunk_bytes(11, 4)));
    let mut expected = chunk_bytes(11, 4);
    expected[5..15].fill(99);
    writer.expect(4 * CHUNK, &expected).await;
    assert_eq!(source.reads()[&4], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_threads_in_two_guests_see_only_right_bytes() {
    let source = TestSource::new(12, 16 * MIB);
    let image = image_over(&source);
    let guests = [Guest::start(16 * MIB), Guest::start(16 * MIB)];
    let served = guests.each_ref().map(|guest| guest.attach(&image));
    let random = 0x5EED;
    let pending = guests.each_ref().map(|guest| guest.begin(format!("hammer 12 {random} 32 4000")));
    for pending in pending {
        assert_eq!(answer(pending).await, "ok", "random seed {random:#x}");
    }
    let reads = source.reads();
    assert!(reads.values().all(|count| *count == 1), "reads per chunk: {reads:?}");
    assert!(served.iter().all(|served| served.failure().borrow().is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_a_booted_guest_is_captured_over_zeros() {
    let guest = Guest::start(2 * MIB);
    guest.expect(0, &vec![0; 2 * MIB as usize]).await;
    guest.fill(10 * PAGE_SIZE, PAGE_SIZE, 1).await;
    guest.fill(300 * PAGE_SIZE + 9, 1, 2).await;
    let regions = guest.channel.regions().unwrap();
    let dirty = capture_dirty(guest.pid(), &regions).unwrap();
    let run = |first| PageRange { first, count: 1 };
    assert_eq!(dirty.ranges(), [run(10), run(300)], "reading dirties nothing, huge pages are not used");
    let below = ZeroSource::new(Geometry::new(2 * MIB, CHUNK as u32).unwrap());
    let image = MemoryImage::child("template", below, dirty).unwrap();
    let mut expected = vec![0; 2 * MIB as usize];
    expected[10 * PAGE_SIZE as usize..11 * PAGE_SIZE as usize].fill(1);
    expected[300 * PAGE_SIZE as usize + 9] = 2;
    let restored = Guest::start(2 * MIB);
    let _served = restored.attach(&image);
    restored.expect(0, &expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attaching_again_replaces_all_of_guest_memory() {
    let guest = Guest::start(MIB);
    for seed in [13, 14] {
        let image = image_over(&TestSource::new(seed, MIB));
        let _served = guest.attach(&image);
        guest.expect(0, &image_bytes(seed, MIB)).await;
        guest.fill(0, MIB, 0xEE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_reads_unfilled_guest_memory_too() {
    let image = image_over(&TestSource::new(15, MIB));
    let guest = Guest::start(MIB);
    let _served = guest.attach(&image);
    let found = guest.call(format!("kernel-read {}", 9 * PAGE_SIZE)).await;
    assert_eq!(found, common::stand_in::digest(&page_bytes(15, 9)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unprivileged_vmm_is_served_too() {
    let image = image_over(&TestSource::new(16, MIB));
    // Only root can start it as somebody else; anybody else is unprivileged already.
    let somebody_else = nix::unistd::geteuid().is_root().then_some(65534);
    let guest = Guest::start_as(MIB, somebody_else);
    let _served = guest.attach(&image);
    guest.expect(0, &image_bytes(16, MIB)).await;
    guest.fill(0, PAGE_SIZE, 1).await;
    let dirty = capture_dirty(guest.pid(), &guest.channel.regions().unwrap()).unwrap();
    assert_eq!(dirty.ranges(), [PageRange { first: 0, count: 1 }]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_too_small_is_refused_and_a_dead_vmm_noticed() {
    let mut guest = Guest::start(2 * MIB);
    let small = image_over(&TestSource::new(17, MIB));
    let refusal = guest.channel.attach(&small).unwrap_err();
    assert!(matches!(refusal, PreloadError::Refused { request: "attach", .. }), "{refusal}");
    assert!(matches!(guest.channel.uffd().unwrap_err(), PreloadError::Refused { request: "uffd", .. }));
    guest.kill();
    let image = image_over(&TestSource::new(17, 2 * MIB));
    let gone = guest.channel.attach(&image).unwrap_err();
    assert!(matches!(gone, PreloadError::Gone { request: "attach" }), "{gone}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_server_outlives_its_vmm() {
    let source = TestSource::new(18, MIB);
    source.hold(4);
    let image = image_over(&source);
    let mut guest = Guest::start(MIB);
    let served = guest.attach(&image);
    let _reader = guest.begin(format!("digest {} {CHUNK}", 4 * CHUNK));
    within(source.asked(4, 1)).await;
    guest.kill();
    source.release(4);
    within(image.ensure(ChunkNo(4))).await.unwrap();
    assert!(served.failure().borrow().is_none(), "a guest that is gone is not a failure of its memory");
    served.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zero_page_that_a_vmm_planted_in_the_image_reaches_no_guest() {
    use std::num::NonZeroUsize;

    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

    let image = image_over(&TestSource::new(19, MIB));
    let len = NonZeroUsize::new(MIB as usize).unwrap();
    // What a VMM can do with its descriptor: map it shared, read-only, and touch every hole.
    // SAFETY: a new mapping at a place that the kernel chooses.
    let map = unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, image.guest_fd(), 0) }.unwrap();
    // SAFETY: the mapping is as long as this, and nobody writes to it meanwhile.
    let planted = unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<u8>(), MIB as usize) };
    assert!(planted.iter().all(|byte| *byte == 0));
    // SAFETY: the mapping made above, which nothing refers to any more.
    unsafe { munmap(map, MIB as usize) }.unwrap();
    assert_eq!(image.resident_bytes().unwrap(), MIB, "the holes are gone");
    let guest = Guest::start(MIB);
    let _served = guest.attach(&image);
    guest.expect(0, &image_bytes(19, MIB)).await;
}
