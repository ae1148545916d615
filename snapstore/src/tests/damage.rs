//! Bad copies: a reader gets the right bytes or an error, whatever was damaged.

use super::*;
use crate::blob::{BlobError, BlobOp, pack_key};
use crate::ids::{ChunkId, PackId};
use crate::pack::FramePlace;
use crate::{ReadError, Source, StoreError};

/// A node that holds a snapshot of one chunk that matters.
struct Scene {
    world: World,
    dir: tempfile::TempDir,
    store: Arc<Store>,
    manifest: Arc<Manifest>,
    model: Model,
    chunk: ChunkId,
    pack: PackId,
}

impl Scene {
    async fn new() -> Self {
        let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
        let store = world.node(dir.path()).await;
        let mut model = Model::new(20);
        model.fill(3, 1);
        model.fill(4, 2);
        let (manifest, sealed) = snapshot(&store, &model, None).await;
        let chunk = memory_of(&store, &manifest).await.chunk_id(ChunkNo(3)).await.expect("id");
        let pack = sealed.new_packs[0];
        Self { world, dir, store, manifest, model, chunk, pack }
    }

    async fn upload(&self) {
        self.store.upload(&self.manifest.snapshot_id, &self.manifest).await.expect("upload");
    }

    /// Flips a bit in the chunk's frame, in whatever holds the whole pack.
    fn flip(&self) -> impl FnOnce(&mut Vec<u8>) + use<> {
        let place = self.frame_of(&self.chunk);
        move |bytes| bytes[usize::try_from(place.offset).expect("small") + 100] ^= 1
    }

    /// Where the chunk's frame lies.
    fn frame_of(&self, chunk: &ChunkId) -> FramePlace {
        self.store.fetcher().cache.places(&chunk.short())[0].frame
    }

    async fn read(&self) -> Result<ChunkData, ReadError> {
        memory_of(&self.store, &self.manifest).await.read(ChunkNo(3)).await
    }

    async fn good(&self) {
        assert_eq!(self.read().await, Ok(ChunkData::Bytes(self.model.chunks[&3].clone())));
    }

    fn corrupt(&self) -> u64 {
        self.store.stats().bad_copies
    }

    async fn restart(self) -> Self {
        let Self { world, dir, store, manifest, model, chunk, pack } = self;
        drop(store);
        let store = world.node(dir.path()).await;
        Self { world, dir, store, manifest, model, chunk, pack }
    }

    async fn restart_without_cache(self) -> Self {
        let Self { world, dir, store, manifest, model, chunk, pack } = self;
        drop(store);
        wipe_cache(dir.path());
        let store = world.node(dir.path()).await;
        Self { world, dir, store, manifest, model, chunk, pack }
    }
}

#[tokio::test]
async fn a_wrong_value_in_the_cache_is_replaced_from_the_staged_pack() {
    let scene = Scene::new().await;
    // In both places, and the cache's is bad.
    let place = scene.frame_of(&scene.chunk);
    let frame = scene.store.fetcher().staging.read(&place).expect("read").expect("staged");
    scene.store.fetcher().cache.put(&place, &frame);
    scene.store.fetcher().cache.tamper(&place, |frame| frame[100] ^= 1);
    scene.good().await;
    assert_eq!(scene.corrupt(), 1);
    let scene = scene.restart().await;
    scene.good().await;
    assert_eq!(scene.corrupt(), 0, "the bad copy is gone");
    assert_eq!(scene.store.stats().blob_gets, 0);
}

#[tokio::test]
async fn a_wrong_value_in_the_cache_is_replaced_from_the_blob_store() {
    let scene = Scene::new().await;
    scene.upload().await;
    // The device state's frame: a good frame, and still the wrong content.
    let other = scene.frame_of(&scene.manifest.device_state.pieces[0]);
    let wrong = scene.store.fetcher().cache.get(&other).expect("cached");
    scene.store.fetcher().cache.tamper(&scene.frame_of(&scene.chunk), |frame| *frame = wrong.to_vec());
    scene.good().await;
    assert_eq!((scene.corrupt(), scene.store.stats().blob_gets), (1, 1));
    let scene = scene.restart().await;
    scene.good().await;
    assert_eq!((scene.corrupt(), scene.store.stats().blob_gets), (0, 0), "the good copy took its place");
}

#[tokio::test]
async fn a_damaged_index_page_is_replaced_like_any_chunk() {
    let scene = Scene::new().await;
    scene.upload().await;
    let page = memory_of(&scene.store, &scene.manifest).await.root().await.expect("root")[0];
    let scene = scene.restart().await;
    for node in [scene.manifest.memory.root, page] {
        scene.store.fetcher().cache.tamper(&scene.frame_of(&node), |frame| frame[20] ^= 1);
    }
    scene.good().await;
    assert_eq!(scene.corrupt(), 2);
}

#[tokio::test]
async fn a_damaged_staged_pack_yields_to_the_blob_store() {
    let scene = Scene::new().await;
    // The pack is in both places: an upload that ended before the staged file went.
    let bytes = scene.store.fetcher().staging.read_all(&scene.pack).expect("read").expect("staged");
    scene.store.fetcher().blobs.put(&pack_key(&scene.pack), bytes, crate::blob::PutMode::Overwrite).await.expect("put");
    scene.store.fetcher().staging.tamper(&scene.pack, scene.flip());
    scene.good().await;
    assert_eq!((scene.corrupt(), scene.store.stats().blob_gets), (1, 1));
}

#[tokio::test]
async fn a_damaged_staged_pack_is_not_uploaded() {
    let scene = Scene::new().await;
    scene.store.fetcher().staging.tamper(&scene.pack, scene.flip());
    let failed = scene.store.upload(&scene.manifest.snapshot_id, &scene.manifest).await;
    assert!(matches!(failed, Err(StoreError::PackDamaged { pack }) if pack == scene.pack), "{failed:?}");
    assert_eq!(scene.world.memory.keys(), Vec::<String>::new());
    assert_eq!(scene.store.stats().packs_staged, 1);
}

/// A flipped bit in content that does not compress hurts one chunk of its frame, and no other.
#[tokio::test]
async fn neighbours_of_a_damaged_chunk_in_its_frame_are_still_good() {
    let scene = Scene::new().await;
    let other = memory_of(&scene.store, &scene.manifest).await.chunk_id(ChunkNo(4)).await.expect("id");
    assert_eq!(scene.frame_of(&scene.chunk), scene.frame_of(&other));
    scene.store.fetcher().staging.tamper(&scene.pack, scene.flip());
    let run = memory_of(&scene.store, &scene.manifest).await;
    assert_eq!(run.read(ChunkNo(4)).await, Ok(ChunkData::Bytes(scene.model.chunks[&4].clone())));
    assert!(
        matches!(run.read_run(ChunkNo(3), 2).await, Err(ReadError::NoGoodCopy { chunk, .. }) if chunk == scene.chunk)
    );
}

#[tokio::test]
async fn without_a_good_copy_the_error_names_every_place() {
    let scene = Scene::new().await;
    scene.upload().await;
    let flip = scene.flip();
    assert!(scene.world.memory.tamper(&pack_key(&scene.pack), flip));
    scene.store.fetcher().cache.tamper(&scene.frame_of(&scene.chunk), |frame| frame.truncate(5));
    let Err(ReadError::NoGoodCopy { chunk, tried }) = scene.read().await else { panic!("there is no good copy") };
    assert_eq!(chunk, scene.chunk);
    let places: Vec<Source> = tried.iter().map(|tried| tried.source).collect();
    // The blob store is asked twice: the damage may have happened on the way.
    assert_eq!(places, [Source::Cache, Source::Blob(scene.pack), Source::Blob(scene.pack)]);
    assert_eq!(scene.corrupt(), 3);
    // The other chunk of the frame is not concerned.
    let other = memory_of(&scene.store, &scene.manifest).await.read(ChunkNo(4)).await;
    assert_eq!(other, Ok(ChunkData::Bytes(scene.model.chunks[&4].clone())));
}

#[tokio::test]
async fn a_pack_that_vanished_is_no_good_copy_and_comes_back_when_the_pack_does() {
    let scene = Scene::new().await;
    scene.upload().await;
    let scene = scene.restart_without_cache().await;
    let key = pack_key(&scene.pack);
    let bytes = scene.store.fetcher().blobs.get(&key, 1 << 20).await.expect("get");
    scene.store.fetcher().blobs.delete(&key).await.expect("delete");
    let error = scene.read().await.expect_err("nothing left");
    assert!(matches!(error, ReadError::NoGoodCopy { .. }) && !error.is_transient(), "{error}");
    scene.store.fetcher().blobs.put(&key, bytes, crate::blob::PutMode::Overwrite).await.expect("put");
    scene.good().await;
}

#[tokio::test]
async fn a_damaged_footer_in_the_blob_store_is_an_error_until_it_is_good_again() {
    let scene = Scene::new().await;
    scene.upload().await;
    let scene = scene.restart_without_cache().await;
    let key = pack_key(&scene.pack);
    let flip_footer = |bytes: &mut Vec<u8>| {
        let at = bytes.len() - 60;
        bytes[at] ^= 1;
    };
    assert!(scene.world.memory.tamper(&key, flip_footer));
    let Err(ReadError::NoGoodCopy { tried, .. }) = scene.read().await else { panic!("no place can be known") };
    assert_eq!(tried.iter().map(|tried| tried.source).collect::<Vec<_>>(), [Source::Footer(scene.pack)]);
    assert!(scene.world.memory.tamper(&key, flip_footer));
    scene.good().await;
}

#[tokio::test]
async fn an_unreachable_blob_store_is_not_a_lost_chunk() {
    let scene = Scene::new().await;
    scene.upload().await;
    for wiped in [true, false] {
        let scene_dir = scene.dir.path().to_owned();
        let store = if wiped { scene.world.node(&scene_dir.join("other")).await } else { Arc::clone(&scene.store) };
        store.fetcher().cache.remove(&scene.frame_of(&scene.chunk));
        scene.world.blobs.fail(|op, key| {
            (op == BlobOp::Get).then(|| BlobError::Unavailable { op, key: key.into(), reason: "busy".into() })
        });
        let error = memory_of(&store, &scene.manifest).await.read(ChunkNo(3)).await.expect_err("cannot be asked");
        assert!(error.is_transient() && matches!(error, ReadError::Unavailable { .. }), "{error}");
        scene.world.blobs.fail(|_, _| None);
        let read = memory_of(&store, &scene.manifest).await.read(ChunkNo(3)).await;
        assert_eq!(read, Ok(ChunkData::Bytes(scene.model.chunks[&3].clone())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_readers_of_a_chunk_fetch_it_once() {
    let scene = Scene::new().await;
    scene.upload().await;
    let scene = scene.restart().await;
    scene.store.fetcher().cache.remove(&scene.frame_of(&scene.chunk));
    scene.world.blobs.take_log();
    scene.world.blobs.close_gate();
    // Each reader has opened the snapshot for itself.
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let image = memory_of(&scene.store, &scene.manifest).await;
        readers.spawn(async move { image.read(ChunkNo(3)).await });
    }
    let quitter = memory_of(&scene.store, &scene.manifest).await;
    let quitter = tokio::spawn(async move { quitter.read(ChunkNo(3)).await });
    while scene.world.blobs.log_len() == 0 {
        tokio::task::yield_now().await;
    }
    quitter.abort();
    scene.world.blobs.open_gate();
    while let Some(read) = readers.join_next().await {
        assert_eq!(read.expect("joined"), Ok(ChunkData::Bytes(scene.model.chunks[&3].clone())));
    }
    assert_eq!(scene.world.blobs.take_log(), [(BlobOp::Get, pack_key(&scene.pack))]);
    assert_eq!(scene.store.fetcher().in_flight(), 0);
}

#[tokio::test]
async fn many_readers_of_a_new_snapshot_read_each_footer_once() {
    let scene = Scene::new().await;
    scene.upload().await;
    let scene = scene.restart_without_cache().await;
    scene.world.blobs.take_log();
    let mut readers = Vec::new();
    for _ in 0..20 {
        readers.push(memory_of(&scene.store, &scene.manifest).await);
    }
    let reads = futures::future::join_all(readers.iter().map(|image| image.read(ChunkNo(3)))).await;
    assert!(reads.iter().all(|read| *read == Ok(ChunkData::Bytes(scene.model.chunks[&3].clone()))));
    // The footer, the root, the index page, the chunk.
    assert_eq!(scene.world.blobs.take_log().len(), 4);
}

#[tokio::test]
async fn a_failed_search_of_one_snapshot_is_not_the_answer_to_another() {
    let scene = Scene::new().await;
    scene.upload().await;
    let scene = scene.restart_without_cache().await;
    // The same image under a manifest that names no pack: it cannot find anything.
    let poor = Arc::new(Manifest { packs: Vec::new(), ..(*scene.manifest).clone() });
    scene.world.blobs.close_gate();
    let poor = memory_of(&scene.store, &poor).await;
    let rich = memory_of(&scene.store, &scene.manifest).await;
    let reads = async {
        let (poor, rich) = tokio::join!(poor.root(), rich.root());
        assert!(matches!(poor, Err(ReadError::NoGoodCopy { .. })) || poor == rich);
        rich.expect("its own packs have it")
    };
    let open = async { scene.world.blobs.open_gate() };
    tokio::join!(reads, open);
}
