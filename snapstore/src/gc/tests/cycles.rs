//! What cycles do when nothing fails, and what they refuse.

use super::*;
use crate::blob::{BlobError, BlobOp};
use crate::catalog::LeaseHolder;
use crate::catalog::kv::Op;

#[tokio::test]
async fn a_pack_that_nobody_uses_goes_in_three_steps_and_others_stay() {
    let world = World::new().await;
    let (kept, left) = (world.snapshot(&[pack(1), pack(2)]).await, world.snapshot(&[pack(2), pack(3)]).await);
    let report = world.collect().await;
    assert_eq!((report.snapshots, report.used.count, report.condemned.count), (2, 3, 0));
    world.delete(&left).await;

    let report = world.collect().await;
    assert_eq!(report.condemned, Tally { count: 1, bytes: 1000 });
    assert_eq!(world.state(&pack(3)).await, Some(PackState::Condemned));
    let report = world.collect().await;
    assert_eq!(report.doomed.count, 0, "not before the grace period");
    world.clock.advance_ms(GRACE_MS - 1);
    assert_eq!(world.collect().await.doomed.count, 0);
    assert!(world.has(&pack(3)));
    world.clock.advance_ms(1);
    let report = world.collect().await;
    assert_eq!((report.doomed.count, report.deleted.count), (1, 1));
    assert!(!world.has(&pack(3)));
    assert_eq!(world.state(&pack(3)).await, Some(PackState::Gone));
    // The manifest object of the deleted snapshot was seen then for the first time, or a grace period ago.
    assert_eq!(world.objects(), [pack_key(&pack(1).id), pack_key(&pack(2).id), manifest_key(&kept)].into());
    assert_eq!(world.rows("orphan/").len(), 0);

    world.clock.advance_ms(TOMBSTONE_MS);
    assert_eq!(world.collect().await.purged, 1);
    assert_eq!(world.state(&pack(3)).await, None);
    assert_eq!(
        (world.state(&pack(1)).await, world.state(&pack(2)).await),
        (Some(PackState::Live), Some(PackState::Live))
    );
    assert_eq!(world.rows("tombstone/").len() + world.rows("lease/").len(), 0);
}

#[tokio::test]
async fn a_use_that_a_mark_missed_is_seen_by_the_next_one() {
    let world = World::new().await;
    let first = world.snapshot(&[pack(1)]).await;
    world.delete(&first).await;
    world.collect().await;
    // As if this commit had come between the mark and the condemnation: it does not touch the pack's row.
    let commit = world.commit(&[pack(1)]);
    let key = format!("pack/{}", pack(1).id).into_bytes();
    let condemned = world.kv.entry(&key).expect("a row");
    let mut live = world.catalog.pack(&pack(1).id).await.expect("reads").expect("a row");
    live.state = PackState::Live;
    // The row is put as it was, the commit made, and the condemnation after it.
    let value = crate::catalog::encoded_for_tests(&live);
    world.kv.txn(vec![], vec![Op::Put(key.clone(), value)]).await.expect("puts");
    world.catalog.commit_snapshot(&commit).await.expect("live");
    world.kv.txn(vec![], vec![Op::Put(key, condemned.value)]).await.expect("puts");

    world.clock.advance_ms(10 * GRACE_MS);
    let report = world.collect().await;
    assert_eq!((report.restored.count, report.doomed.count), (1, 0));
    assert_eq!(world.state(&pack(1)).await, Some(PackState::Live));
    assert!(world.has(&pack(1)));
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_stops_everything() {
    for damage in ["missing", "damaged", "another's"] {
        let world = World::new().await;
        let (first, second, third) =
            (world.snapshot(&[pack(1)]).await, world.snapshot(&[pack(2)]).await, world.snapshot(&[pack(3)]).await);
        world.delete(&third).await;
        let key = |id: &SnapshotId| format!("manifest/{id}").into_bytes();
        let op = match damage {
            "missing" => Op::Delete(key(&second)),
            "damaged" => {
                let mut bytes = world.kv.entry(&key(&second)).expect("there").value.to_vec();
                bytes[60] ^= 1;
                Op::Put(key(&second), bytes.into())
            }
            _ => Op::Put(key(&second), world.kv.entry(&key(&first)).expect("there").value),
        };
        world.kv.txn(vec![], vec![op]).await.expect("puts");
        world.clock.advance_ms(10 * GRACE_MS);
        for dry_run in [true, false] {
            let mut collector = world.collector();
            collector.settings.dry_run = dry_run;
            let error = collector.collect().await.expect_err(damage);
            assert!(error.to_string().contains(&second.to_string()), "{damage}: {error}");
        }
        assert_eq!(world.state(&pack(3)).await, Some(PackState::Live), "{damage}");
        assert_eq!(world.objects().len(), 6, "{damage}");
    }
}

#[tokio::test]
async fn a_dry_run_tells_and_writes_nothing() {
    let world = World::new().await;
    let (_kept, left) = (world.snapshot(&[pack(1)]).await, world.snapshot(&[pack(2)]).await);
    world.delete(&left).await;
    let everything = KeyRange { start: Vec::new(), end: vec![0xff] };
    let before = (world.kv.entries(&everything), world.memory.keys());
    let mut collector = world.collector();
    collector.settings.dry_run = true;
    let report = collector.collect().await.expect("computes");
    assert_eq!((report.dry_run, report.used.count, report.condemned.count), (true, 1, 1));
    assert_eq!((world.kv.entries(&everything), world.memory.keys()), before);
}

#[tokio::test]
async fn a_second_collector_waits_and_a_late_one_stops() {
    let world = World::new().await;
    let lease = world.catalog.acquire_lease("collector", LeaseHolder([1; 16]), LEASE_MS).await.expect("answers");
    assert!(lease.is_some());
    assert!(matches!(world.collector().collect().await, Err(GcError::Busy)));
    world.clock.advance_ms(LEASE_MS);
    world.collect().await;
    // The clock jumps in the middle of a cycle, before its DELETEs, and another takes over.
    let left = world.snapshot(&[pack(1)]).await;
    world.delete(&left).await;
    world.collect().await;
    world.clock.advance_ms(GRACE_MS);
    let (clock, catalog) = (Arc::clone(&world.clock), Arc::clone(&world.catalog));
    world.blobs.fail(move |op, key| {
        if op == BlobOp::Get && key == owner::OWNER_KEY {
            clock.advance_ms(LEASE_MS);
            let taken = catalog.acquire_lease("collector", LeaseHolder([2; 16]), LEASE_MS);
            assert!(futures::executor::block_on(taken).expect("answers").is_some());
        }
        None
    });
    assert!(matches!(world.collector().collect().await, Err(GcError::LeaseLost)));
    assert!(world.has(&pack(1)));
    world.blobs.fail(|_, _| None);
    world.clock.advance_ms(LEASE_MS);
    world.collect().await;
    assert!(!world.has(&pack(1)));
}

#[tokio::test]
async fn a_bucket_of_another_deployment_is_not_touched() {
    let (world, other) = (World::new().await, World::new().await);
    world.snapshot(&[pack(1)]).await;
    world.collect().await;
    let mut intruder = Collector::new(Arc::clone(&other.catalog), Arc::clone(&world.memory) as _, settings());
    for _ in 0..3 {
        other.clock.advance_ms(10 * GRACE_MS);
        assert!(matches!(intruder.collect().await, Err(GcError::ForeignBucket { .. })));
    }
    assert!(world.has(&pack(1)));
    assert_eq!(other.rows("pack/").len() + other.rows("lease/").len(), 0);
}

#[tokio::test]
async fn a_delete_that_fails_is_counted_and_tried_again() {
    let world = World::new().await;
    let left = world.snapshot(&[pack(1)]).await;
    world.delete(&left).await;
    world.collect().await;
    world.clock.advance_ms(GRACE_MS);
    world.blobs.fail(|op, key| {
        (op == BlobOp::Delete).then(|| BlobError::Unavailable { op, key: key.into(), reason: "503".into() })
    });
    let report = world.collect().await;
    assert_eq!((report.doomed.count, report.deleted.count, report.delete_failed.count), (1, 0, 2), "the manifest, too");
    assert_eq!(world.state(&pack(1)).await, Some(PackState::Doomed));
    assert_eq!(world.collect().await.delete_failed.count, 2);
    world.blobs.fail(|_, _| None);
    let report = world.collect().await;
    assert_eq!((report.deleted.count, report.orphans_deleted.count, report.delete_failed.count), (1, 1, 0));
    assert_eq!(world.objects(), HashSet::new());
}

#[tokio::test]
async fn an_object_that_comes_late_is_deleted_again() {
    let world = World::new().await;
    let left = world.snapshot(&[pack(1)]).await;
    world.delete(&left).await;
    world.collect().await;
    world.clock.advance_ms(GRACE_MS);
    world.collect().await;
    assert_eq!(world.objects(), HashSet::new());
    // An uploader that was frozen meanwhile.
    world.put(&pack_key(&pack(1).id)).await;
    assert_eq!(world.collect().await.deleted_again.count, 1);
    // And one that was frozen for longer than tombstones stay.
    world.clock.advance_ms(TOMBSTONE_MS);
    world.collect().await;
    assert_eq!(world.state(&pack(1)).await, None);
    world.put(&pack_key(&pack(1).id)).await;
    assert_eq!(world.collect().await.adopted, Tally { count: 1, bytes: 6 });
    world.clock.advance_ms(GRACE_MS);
    world.collect().await;
    assert_eq!(world.objects(), HashSet::new());
}

#[tokio::test]
async fn keys_that_are_not_ours_and_uploads_under_way_are_left_alone() {
    let world = World::new().await;
    for strange in ["packs/readme.txt", "manifests/x", "other"] {
        world.put(strange).await;
    }
    // Committed, and its packs are uploaded while the collection runs.
    let commit = world.commit(&[pack(7)]);
    let (catalog, memory) = (Arc::clone(&world.catalog), Arc::clone(&world.memory));
    let row = commit.row.id;
    let first = std::sync::Mutex::new(Some(commit));
    world.blobs.fail(move |op, key| {
        if op == BlobOp::List
            && key == "packs/"
            && let Some(commit) = first.lock().expect("not poisoned").take()
        {
            futures::executor::block_on(async {
                catalog.commit_snapshot(&commit).await.expect("commits");
                memory.put(&pack_key(&pack(7).id), Bytes::new(), PutMode::Overwrite).await.expect("put");
                memory.put(&manifest_key(&row), Bytes::new(), PutMode::Overwrite).await.expect("put");
            });
        }
        None
    });
    let report = world.collect().await;
    assert_eq!((report.strange_keys, report.adopted.count, report.orphans_marked.count), (2, 0, 0));
    world.clock.advance_ms(TOMBSTONE_MS);
    let report = world.collect().await;
    assert_eq!((report.used.count, report.strange_keys), (1, 2));
    assert_eq!(world.objects().len(), 5);
}

#[tokio::test]
async fn a_named_pack_that_leaves_is_an_alarm_and_its_object_stays() {
    let world = World::new().await;
    world.snapshot(&[pack(1)]).await;
    let mut row = world.catalog.pack(&pack(1).id).await.expect("reads").expect("a row");
    row.state = PackState::Doomed;
    let value = crate::catalog::encoded_for_tests(&row);
    world.kv.txn(vec![], vec![Op::Put(format!("pack/{}", row.id).into_bytes(), value)]).await.expect("puts");
    let report = world.collect().await;
    assert_eq!((report.named_while_leaving, report.deleted.count), (1, 0));
    assert!(world.has(&pack(1)));
}

#[tokio::test]
async fn dead_writers_are_ended() {
    let world = World::new().await;
    let node = NodeId::new("node-1").expect("an id");
    let dead = world.catalog.register_writer(&node, LeaseHolder([1; 16]), 10).await.expect("registers");
    let alive = world.catalog.register_writer(&node, LeaseHolder([2; 16]), 10_000).await.expect("registers");
    world.clock.advance_ms(10);
    assert_eq!(world.collect().await.writers_ended, 1);
    world.catalog.renew_writer(&alive, 10).await.expect("alive");
    world.catalog.renew_writer(&dead, 10).await.expect_err("ended");
}
