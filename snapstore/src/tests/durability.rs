//! Crashes, restarts, lost caches, uploads: what was sealed stays, what was not leaves nothing.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::StoreError;
use crate::blob::{BlobError, BlobOp, BlobStore as _, PutMode, manifest_key, pack_key};

fn model(chunks: u64, first_seed: u64) -> Model {
    let mut model = Model::new(chunks);
    for chunk in 0..chunks {
        model.fill(chunk, first_seed + chunk);
    }
    model
}

#[tokio::test]
async fn a_sealed_snapshot_survives_a_crash_and_the_loss_of_the_cache() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let model = model(100, 1);
    let store = world.node(dir.path()).await;
    let (manifest, sealed) = snapshot(&store, &model, None).await;
    assert!(sealed.new_packs.len() > 3);
    drop(store); // no close, no flush
    let store = world.node(dir.path()).await;
    check_image(&memory_of(&store, &manifest).await, &model).await;
    drop(store);
    wipe_cache(dir.path());
    let store = world.node(dir.path()).await;
    check_image(&memory_of(&store, &manifest).await, &model).await;
    assert_eq!(world.memory.keys(), Vec::<String>::new(), "all of it came from this node");
    let state = open(&store, &manifest).await.blob(&manifest.device_state).await.expect("device state");
    assert_eq!(&state[..], b"device state");
}

#[tokio::test]
async fn after_a_crash_between_seal_and_upload_the_upload_is_made_up_for() {
    let (world, dir, away) = (World::new(), tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
    let model = model(100, 1);
    let store = world.node(dir.path()).await;
    let (manifest, sealed) = snapshot(&store, &model, None).await;
    drop(store);
    let store = world.node(dir.path()).await;
    let keep = manifest.packs.iter().map(|pack| pack.id).collect();
    assert_eq!(store.drop_unreferenced_staging(&keep).await.expect("drop"), 0);
    assert_eq!(store.stats().packs_staged, sealed.new_packs.len() as u64);
    let report = store.upload(&manifest.snapshot_id, &manifest).await.expect("upload");
    assert_eq!((report.packs_uploaded, report.packs_already_there), (sealed.new_packs.len() as u64, 0));
    assert_eq!(store.stats().packs_staged, 0);
    drop(store);
    // The node is lost; another has the blob store alone.
    let other = world.node(away.path()).await;
    let manifest = Arc::new(other.manifest_from_blobs(&manifest.snapshot_id).await.expect("manifest"));
    check_image(&memory_of(&other, &manifest).await, &model).await;
}

#[tokio::test]
async fn an_upload_may_be_repeated_and_goes_on_where_it_stopped() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let model = model(100, 1);
    let store = world.node(dir.path()).await;
    let (manifest, sealed) = snapshot(&store, &model, None).await;
    let packs = sealed.new_packs.len();
    let puts = AtomicU32::new(0);
    world.blobs.fail(move |op, key| {
        let unlucky = op == BlobOp::Put && puts.fetch_add(1, Ordering::SeqCst) >= 2;
        unlucky.then(|| BlobError::Unknown { op, key: key.into(), reason: "the answer was lost".into() })
    });
    let error = store.upload(&manifest.snapshot_id, &manifest).await.expect_err("interrupted");
    assert!(error.is_transient(), "{error}");
    assert!(!world.memory.keys().contains(&manifest_key(&manifest.snapshot_id)), "the manifest comes last");
    assert_eq!(store.stats().packs_staged as usize, packs - 2);
    check_image(&memory_of(&store, &manifest).await, &model).await;
    world.blobs.fail(|_, _| None);
    drop(store);

    let store = world.node(dir.path()).await;
    let report = store.upload(&manifest.snapshot_id, &manifest).await.expect("goes on");
    assert_eq!((report.packs_uploaded as usize, report.packs_already_there as usize), (packs - 2, 2));
    let usage = store.refresh_remote_usage().await.expect("usage");
    assert_eq!((usage.objects as usize, usage.as_of_unix_ms), (packs + 1, 77));
    let keys = world.memory.keys();
    let report = store.upload(&manifest.snapshot_id, &manifest).await.expect("again");
    assert_eq!((report.packs_uploaded, report.packs_already_there as usize), (0, packs));
    assert_eq!(world.memory.keys(), keys);
    assert_eq!(store.stats().remote, usage);
}

#[tokio::test]
async fn an_upload_without_cache_and_marks_finds_what_is_there() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let (manifest, _) = snapshot(&store, &model(10, 1), None).await;
    store.upload(&manifest.snapshot_id, &manifest).await.expect("upload");
    drop(store);
    wipe_cache(dir.path());
    let store = world.node(dir.path()).await;
    let report = store.upload(&manifest.snapshot_id, &manifest).await.expect("upload");
    assert_eq!((report.packs_uploaded, report.packs_already_there), (0, 1));

    let key = pack_key(&manifest.packs[0].id);
    world.memory.delete(&key).await.expect("delete");
    drop(store);
    wipe_cache(dir.path());
    let store = world.node(dir.path()).await;
    let lost = store.upload(&manifest.snapshot_id, &manifest).await;
    assert!(matches!(lost, Err(StoreError::PackMissing { pack }) if pack == manifest.packs[0].id), "{lost:?}");
}

#[tokio::test]
async fn a_child_uploads_its_parents_packs_too() {
    let (world, dir, away) = (World::new(), tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let mut state = model(50, 1);
    let (parent, _) = snapshot(&store, &state, None).await;
    let mut changed = Model::new(50);
    changed.fill(7, 1000);
    state.fill(7, 1000);
    let (child, _) = snapshot(&store, &changed, Some(&parent)).await;
    store.upload(&child.snapshot_id, &child).await.expect("upload");
    let other = world.node(away.path()).await;
    check_image(&memory_of(&other, &child).await, &state).await;
}

#[tokio::test]
async fn a_child_on_another_node_deduplicates_against_a_parent_it_never_read() {
    let (world, dir, away) = (World::new(), tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let (parent, _) = snapshot(&store, &model(50, 1), None).await;
    store.upload(&parent.snapshot_id, &parent).await.expect("upload");
    let other = world.node(away.path()).await;
    let mut changed = Model::new(50);
    changed.fill(7, 3); // another chunk's content
    let (child, sealed) = snapshot(&other, &changed, Some(&parent)).await;
    assert_eq!((sealed.chunks_new, sealed.chunks_deduplicated), (0, 2));
    let mut state = model(50, 1);
    state.fill(7, 3);
    check_image(&memory_of(&other, &child).await, &state).await;
}

#[tokio::test]
async fn an_unreachable_parent_costs_space_not_the_snapshot() {
    let (world, dir, away) = (World::new(), tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let (parent, _) = snapshot(&store, &model(50, 1), None).await;
    store.upload(&parent.snapshot_id, &parent).await.expect("upload");
    let other = world.node(away.path()).await;
    world.blobs.fail(|op, key| Some(BlobError::Unavailable { op, key: key.into(), reason: "busy".into() }));
    let ingest = other.begin(KEY, Some(&parent)).await.expect("begin");
    let mut changed = Model::new(50);
    changed.fill(7, 3);
    write_image(&ingest, &changed, None).await;
    assert_eq!(ingest.seal().await.expect("seal").chunks_new, 1);
}

#[tokio::test]
async fn what_is_only_cached_is_not_deduplicated_against() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let model = model(20, 1);
    // Given up before the seal: its chunks are in the cache, and in no pack.
    let ingest = store.begin(KEY, None).await.expect("begin");
    write_image(&ingest, &model, None).await;
    drop(ingest);
    // Sealed, not committed, discarded.
    let (_, sealed) = snapshot(&store, &model, None).await;
    assert_eq!(sealed.chunks_new, 21);
    store.discard(sealed).await.expect("discard");
    assert_eq!(std::fs::read_dir(dir.path().join("staging")).expect("list").count(), 0);

    let (manifest, sealed) = snapshot(&store, &model, None).await;
    assert_eq!((sealed.chunks_new, sealed.chunks_deduplicated), (21, 0));
    drop(store);
    wipe_cache(dir.path());
    let store = world.node(dir.path()).await;
    check_image(&memory_of(&store, &manifest).await, &model).await;
}

#[tokio::test]
async fn orphans_are_dropped_after_a_restart_and_never_deduplicated_against_again() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    // Three packs: the first will be borrowed, the last holds the device state, which the kept snapshot shares.
    let orphaned = model(40, 1);
    let (_, orphan) = snapshot(&store, &orphaned, None).await;
    let kept = model(20, 100);
    let (manifest, _) = snapshot(&store, &kept, None).await;
    drop(store);
    let store = world.node(dir.path()).await;
    let keep: HashSet<_> = manifest.packs.iter().map(|pack| pack.id).collect();
    // A snapshot under way has found a chunk of an orphan: that orphan stays.
    let ingest = store.begin(KEY, None).await.expect("begin");
    let mut changed = Model::new(20);
    changed.fill(0, 1);
    write_image(&ingest, &changed, None).await;
    let before = store.stats().packs_staged;
    let dropped = store.drop_unreferenced_staging(&keep).await.expect("drop");
    assert_eq!(dropped, 1);
    assert_eq!(store.stats().packs_staged, before - dropped);
    let sealed = ingest.seal().await.expect("seal");
    assert!(sealed.packs.iter().all(|pack| store.fetcher().staging.contains(&pack.id)));
    assert!(sealed.packs.iter().any(|pack| orphan.new_packs.contains(&pack.id)), "it was the orphan's");
    check_image(&memory_of(&store, &manifest).await, &kept).await;

    let (again, _) = snapshot(&store, &orphaned, None).await;
    drop(store);
    wipe_cache(dir.path());
    let store = world.node(dir.path()).await;
    check_image(&memory_of(&store, &again).await, &orphaned).await;
}

#[tokio::test]
async fn a_forgotten_pack_is_not_deduplicated_against() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let model = model(5, 1);
    let (manifest, _) = snapshot(&store, &model, None).await;
    store.upload(&manifest.snapshot_id, &manifest).await.expect("upload");
    let (_, sealed) = snapshot(&store, &model, None).await;
    assert_eq!(sealed.chunks_new, 0);
    let packs = manifest.packs.iter().map(|pack| pack.id).collect();
    store.drop_gone(&packs).await.expect("drop");
    let (_, sealed) = snapshot(&store, &model, None).await;
    assert_eq!(sealed.chunks_new, 6);
}

#[tokio::test]
async fn a_manifest_that_is_not_the_snapshots_is_refused() {
    let (world, dir) = (World::new(), tempfile::tempdir().expect("dir"));
    let store = world.node(dir.path()).await;
    let (manifest, _) = snapshot(&store, &model(5, 1), None).await;
    let other = SnapshotId::random();
    world.memory.put(&manifest_key(&other), manifest.encode(), PutMode::Overwrite).await.expect("put");
    assert!(matches!(store.manifest_from_blobs(&other).await, Err(StoreError::WrongManifest { .. })));
    assert!(matches!(store.upload(&other, &manifest).await, Err(StoreError::WrongManifest { .. })));
    world.memory.tamper(&manifest_key(&other), |bytes| bytes[60] ^= 1);
    assert!(matches!(store.manifest_from_blobs(&other).await, Err(StoreError::Manifest { .. })));
    let missing = store.manifest_from_blobs(&SnapshotId::random()).await;
    assert!(matches!(missing, Err(StoreError::Blob(BlobError::NotFound { .. }))));
}
