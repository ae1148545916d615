//! Images in, images out: random contents and histories, sharing, deduplication, misuse.

use std::future::ready;

use futures::StreamExt as _;
use proptest::prelude::*;

use super::*;
use crate::ids::ChunkId;
use crate::{ReadError, StoreError};

/// Random changes to an image of `chunks` chunks: few seeds, so that contents repeat; seed 0 is a chunk of zeros.
fn changes(chunks: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..chunks, 0..6u64), 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// A chain of snapshots, each changing what it inherits: every one reads back as it was taken, on the node that took
    /// them, and on another one from the blob store alone.
    #[test]
    fn histories_read_back(history in prop::collection::vec(changes(600), 1..4), cut in 0..CHUNK) {
        let runtime = tokio::runtime::Runtime::new().expect("runtime");
        runtime.block_on(async move {
            let world = World::new();
            let (home, away) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
            let store = world.node(home.path()).await;
            let mut state = Model::new(600);
            state.size_bytes -= u64::from(cut);
            let mut taken: Vec<(Arc<Manifest>, Model)> = Vec::new();
            for step in history {
                let mut changed = Model { chunks: BTreeMap::new(), ..state.clone() };
                for (chunk, seed) in step {
                    changed.fill(chunk, seed);
                    state.fill(chunk, seed);
                }
                let (manifest, _) = snapshot(&store, &changed, taken.last().map(|(manifest, _)| manifest)).await;
                taken.push((manifest, state.clone()));
            }
            for (manifest, model) in &taken {
                check_image(&memory_of(&store, manifest).await, model).await;
                store.upload(&manifest.snapshot_id, manifest).await.expect("upload");
            }
            let other = world.node(away.path()).await;
            for (manifest, model) in &taken {
                let manifest = other.manifest_from_blobs(&manifest.snapshot_id).await.expect("manifest");
                check_image(&memory_of(&other, &Arc::new(manifest)).await, model).await;
            }
        });
    }
}

#[tokio::test]
async fn equal_chunks_are_stored_once_within_an_image_and_against_the_parent() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut model = Model::new(100);
    for chunk in 0..60 {
        model.fill(chunk, 1 + chunk % 3);
    }
    model.fill(99, 0);
    let (parent, sealed) = snapshot(&store, &model, None).await;
    // Three contents and the device state.
    assert_eq!((sealed.chunks_new, sealed.chunks_deduplicated), (4, 57));

    let mut changed = Model::new(100);
    changed.fill(70, 2); // known from the parent, at another place
    changed.fill(71, 9); // new
    let (child, sealed) = snapshot(&store, &changed, Some(&parent)).await;
    assert_eq!((sealed.chunks_new, sealed.chunks_deduplicated), (1, 2), "the device state is known, too");
    assert_eq!(sealed.new_packs.len(), 1);
    assert_eq!(child.packs.len(), 2);

    let (_, sealed) = snapshot(&store, &Model::new(100), Some(&child)).await;
    assert_eq!((sealed.bytes_new, sealed.new_packs.len()), (0, 0), "no change, nothing stored");
    let stats = store.stats();
    assert_eq!((stats.chunks_new, stats.chunks_deduplicated), (5, 60));
}

#[tokio::test]
async fn a_child_shares_the_index_pages_that_it_did_not_change() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut model = Model::new(256 * 4);
    for page in 0..4 {
        model.fill(page * 256, page + 1);
    }
    let (parent, _) = snapshot(&store, &model, None).await;
    let mut changed = Model::new(256 * 4);
    changed.fill(256 + 7, 50);
    changed.fill(512, 0); // the only content of its page: the page goes
    let (child, _) = snapshot(&store, &changed, Some(&parent)).await;
    let before = memory_of(&store, &parent).await.root().await.expect("root");
    let after = memory_of(&store, &child).await.root().await.expect("root");
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
    assert_eq!(after[2], ChunkId::ZERO);
    assert_eq!(after[3], before[3]);

    let (same, _) = snapshot(&store, &Model::new(256 * 4), Some(&child)).await;
    assert_eq!(same.memory, child.memory);
}

#[tokio::test]
async fn an_image_of_zeros_is_stored_nowhere() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut model = Model::new(300);
    model.fill(5, 0);
    let ingest = store.begin(KEY, None).await.expect("begin");
    let image = write_image(&ingest, &model, None).await;
    let sealed = ingest.seal().await.expect("seal");
    assert_eq!(image.root, ChunkId::ZERO);
    assert_eq!(sealed, Sealed::default());
    let manifest = Arc::new(manifest(image, BlobRef::default(), None, &sealed));
    check_image(&memory_of(&store, &manifest).await, &model).await;
}

#[tokio::test]
async fn blobs_of_any_length_come_back() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let piece = crate::manifest::BLOB_PIECE_BYTES;
    for (seed, len) in [(0, 0), (1, 1), (2, piece), (3, piece + 1), (4, 3 * piece - 1), (0, 2 * piece)] {
        let content = noise(seed, len);
        let ingest = store.begin(KEY, None).await.expect("begin");
        let image = write_image(&ingest, &Model::new(1), None).await;
        let blob = ingest.blob(content.clone()).await.expect("blob");
        let sealed = ingest.seal().await.expect("seal");
        let manifest = Arc::new(manifest(image, blob, None, &sealed));
        let back = open(&store, &manifest).await.blob(&manifest.device_state).await.expect("read");
        assert_eq!(back, content, "{len} bytes");
    }
}

#[tokio::test]
async fn one_domain_neither_reads_nor_deduplicates_against_another() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut model = Model::new(10);
    model.fill(3, 1);
    let (mine, _) = snapshot(&store, &model, None).await;

    let theirs = DomainKey([43; 32]);
    let ingest = store.begin(theirs, None).await.expect("begin");
    write_image(&ingest, &model, None).await;
    let inherited = ingest.image(model.spec(), Some(memory_of(&store, &mine).await));
    assert!(matches!(inherited.finish().await, Err(StoreError::ParentMismatch(_))));
    let sealed = ingest.seal().await.expect("seal");
    assert_eq!((sealed.chunks_new, sealed.chunks_deduplicated), (1, 0));

    let reader = store.open_snapshot(theirs, Arc::clone(&mine)).await.expect("open");
    assert!(matches!(reader.image(&mine.memory).read(ChunkNo(3)).await, Err(ReadError::NoGoodCopy { .. })));
    check_image(&memory_of(&store, &mine).await, &model).await;
}

#[tokio::test]
async fn misuse_of_a_writer_is_refused() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let ingest = store.begin(KEY, None).await.expect("begin");
    let writer = ingest.image(Model::new(10).spec(), None);
    let put = async |chunk, len| writer.put(ChunkNo(chunk), noise(1, len)).await;
    assert!(matches!(put(0, 4095).await, Err(StoreError::ChunkLength { expected: Some(4096), .. })));
    assert!(matches!(put(10, 4096).await, Err(StoreError::ChunkLength { expected: None, .. })));
    put(1, 4096).await.expect("put");
    put(1, 4096).await.expect("found out later");
    let Err(StoreError::IngestFailed(reason)) = writer.finish().await else { panic!("a chunk was put twice") };
    assert_eq!(reason, StoreError::ChunkTwice { chunk: ChunkNo(1) }.to_string());
    let bad = ingest.image(ImageSpec { size_bytes: 10, chunk_size: 1000 }, None);
    assert!(bad.finish().await.is_err());
    assert!(matches!(ingest.seal().await, Err(StoreError::IngestFailed(_))));
    assert_eq!(store.stats().packs_staged, 0, "a failed ingest leaves nothing");

    let ingest = store.begin(KEY, None).await.expect("begin");
    let writer = ingest.image(Model::new(10).spec(), None);
    ingest.seal().await.expect("seal");
    assert!(writer.put(ChunkNo(0), noise(1, 4096)).await.is_err(), "too late");

    let (parent, _) = snapshot(&store, &Model::new(10), None).await;
    let ingest = store.begin(KEY, Some(&parent)).await.expect("begin");
    let smaller = ingest.image(Model::new(9).spec(), Some(memory_of(&store, &parent).await));
    assert!(matches!(smaller.finish().await, Err(StoreError::ParentMismatch(_))));
    let image = memory_of(&store, &parent).await;
    assert!(matches!(image.read(ChunkNo(10)).await, Err(ReadError::OutOfRange { chunks: 10, .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_may_put_at_once_and_memory_stays_bounded() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut model = Model::new(2000);
    for chunk in 0..2000 {
        model.fill(chunk, 1 + chunk);
    }
    let ingest = store.begin(KEY, None).await.expect("begin");
    let writer = ingest.image(model.spec(), None);
    let puts = futures::stream::iter(&model.chunks).map(|(chunk, bytes)| writer.put(ChunkNo(*chunk), bytes.clone()));
    puts.buffer_unordered(50)
        .for_each(|put| {
            put.expect("put");
            ready(())
        })
        .await;
    let image = writer.finish().await.expect("finish");
    let sealed = ingest.seal().await.expect("seal");
    assert_eq!(sealed.chunks_new, 2000);
    assert!(sealed.packs.len() > 100, "packs of 64 KiB");
    assert!(sealed.packs.iter().all(|pack| pack.size_bytes < 80 * 1024));
    let manifest = Arc::new(manifest(image, BlobRef::default(), None, &sealed));
    check_image(&memory_of(&store, &manifest).await, &model).await;
}
