//! Leases: one holder, fenced writes, writers that were counted as dead.

use super::*;

const TTL: i64 = 1000;

fn holder(byte: u8) -> LeaseHolder {
    LeaseHolder([byte; 16])
}

async fn acquire(f: &Fixture, byte: u8) -> Option<Lease> {
    f.catalog.acquire_lease("collector", holder(byte), TTL).await.expect("answers")
}

#[tokio::test]
async fn a_lease_has_one_holder_until_its_time_is_over() {
    let f = Fixture::new().await;
    let first = acquire(&f, 1).await.expect("free");
    assert_eq!(acquire(&f, 2).await, None);
    assert_eq!(first.left_ms(f.clock.now_unix_ms()), TTL);
    let again = acquire(&f, 1).await.expect("the same holder, whose answer was lost");
    f.clock.advance_ms(TTL - 1);
    assert_eq!(acquire(&f, 2).await, None);
    let renewed = f.catalog.renew_lease(&first, TTL).await.expect("finds the newer row");
    assert_ne!(renewed, again);
    f.clock.advance_ms(TTL - 1);
    assert_eq!(acquire(&f, 2).await, None);
    f.clock.advance_ms(1);
    let second = acquire(&f, 2).await.expect("its time is over");
    let error = f.catalog.renew_lease(&renewed, TTL).await.expect_err("lost");
    assert!(matches!(error, CatalogError::LeaseLost { .. }) && error.kind() == ErrorKind::Unavailable, "{error}");
    f.catalog.release_lease(&renewed).await.expect("lost is given back already");
    assert_eq!(acquire(&f, 3).await, None, "it was not the second holder's to give");
    f.catalog.release_lease(&second).await.expect("given back");
    f.catalog.release_lease(&second).await.expect("again");
    assert!(acquire(&f, 3).await.is_some());
    f.check().await;
}

#[tokio::test]
async fn a_holder_whose_time_is_over_goes_on_until_another_takes_the_lease() {
    let f = Fixture::new().await;
    let lease = acquire(&f, 1).await.expect("free");
    f.clock.advance_ms(10 * TTL);
    f.catalog.renew_lease(&lease, TTL).await.expect("nobody wanted it");
}

#[tokio::test]
async fn what_a_former_holder_writes_does_not_happen() {
    let f = Fixture::new().await;
    f.commit(&f.snapshot(None)).await;
    let seen = f.catalog.packs_seen(&[pack(1).id]).await.expect("reads")[0].expect("a row");
    let first = acquire(&f, 1).await.expect("free");
    f.clock.advance_ms(TTL);
    let second = acquire(&f, 2).await.expect("its time is over");
    let raced = f.catalog.move_pack(&first, &seen, PackState::Condemned).await.expect("answers");
    assert_eq!(raced, Moved::Raced);
    assert!(!f.catalog.adopt_pack(&first, pack(2).id, 1).await.expect("answers"));
    assert!(!f.catalog.mark_orphan(&first, &SnapshotId::random()).await.expect("answers"));
    assert_eq!(f.catalog.fence_expired_writers(&first).await.expect("answers"), 0);
    let moved = f.catalog.move_pack(&second, &seen, PackState::Condemned).await.expect("answers");
    let Moved::Done(condemned) = moved else { panic!("the holder writes") };
    assert_eq!((condemned.row.state, condemned.row.since_unix_ms), (PackState::Condemned, START_MS + TTL));
    let twice = f.catalog.move_pack(&second, &seen, PackState::Condemned).await.expect("answers");
    assert_eq!(twice, Moved::Raced, "it is not as it was read");
    f.check().await;
}

#[tokio::test]
async fn packs_move_along_the_drawing_only_and_leave_a_tombstone_for_a_while() {
    use PackState::{Condemned, Doomed, Gone, Live};
    let f = Fixture::new().await;
    f.commit(&f.snapshot(None)).await;
    let lease = acquire(&f, 1).await.expect("free");
    let mut seen = f.catalog.packs_seen(&[pack(1).id, pack(2).id]).await.expect("reads")[0].expect("a row");
    for (to, others) in [
        (Condemned, [Live, Doomed, Gone].as_slice()),
        (Live, &[Condemned, Gone]),
        (Condemned, &[Live, Doomed, Gone]),
        (Doomed, &[Condemned, Gone]),
        (Gone, &[Live, Condemned, Doomed]),
    ] {
        for other in others.iter().filter(|other| !may(seen.row.state, **other)) {
            let error = f.catalog.move_pack(&lease, &seen, *other).await.expect_err("not in the drawing");
            assert_eq!(error.kind(), ErrorKind::Invalid, "{:?} to {other:?}", seen.row.state);
        }
        assert_eq!(f.catalog.gone_since(0).await.expect("reads").len(), 0);
        f.clock.advance_ms(1);
        let moved = f.catalog.move_pack(&lease, &seen, to).await.expect("moves");
        let Moved::Done(next) = moved else { panic!("{to:?}: {moved:?}") };
        seen = next;
    }
    let since = seen.row.since_unix_ms;
    assert_eq!(f.catalog.gone_since(since).await.expect("reads"), [pack(1).id].into());
    assert_eq!(f.catalog.gone_since(since + 1).await.expect("reads"), [].into());
    f.check().await;
    assert!(f.catalog.purge_pack(&lease, &seen).await.expect("purges"));
    assert_eq!(f.catalog.pack(&pack(1).id).await.expect("reads"), None);
    assert_eq!(f.catalog.gone_since(0).await.expect("reads"), [].into());
    assert!(!f.catalog.purge_pack(&lease, &seen).await.expect("answers"));
    // Not resurrected: what has no row must be staged.
    let mut late = f.snapshot(None);
    late.staged.clear();
    assert!(matches!(f.catalog.commit_snapshot(&late).await, Err(CatalogError::PacksNotLive { .. })));
}

fn may(from: PackState, to: PackState) -> bool {
    use PackState::{Condemned, Doomed, Gone, Live};
    [(Live, Condemned), (Condemned, Live), (Condemned, Doomed), (Doomed, Gone)].contains(&(from, to))
}

#[tokio::test]
async fn a_writer_that_was_counted_as_dead_commits_nothing() {
    let f = Fixture::new().await;
    let lease = acquire(&f, 1).await.expect("free");
    let alive = f.catalog.register_writer(&node(), holder(2), 10 * TTL).await.expect("registers");
    let frozen = f.catalog.register_writer(&node(), holder(3), TTL).await.expect("registers");
    assert_eq!(f.catalog.fence_expired_writers(&lease).await.expect("fences"), 0);
    let commit = |writer: &WriterLease| SnapshotCommit { writer: Some(writer.clone()), ..f.snapshot(None) };
    f.commit(&commit(&frozen)).await;
    f.clock.advance_ms(TTL - 1);
    f.catalog.renew_writer(&frozen, TTL).await.expect("alive");
    f.clock.advance_ms(TTL - 1);
    assert_eq!(f.catalog.fence_expired_writers(&lease).await.expect("fences"), 0);
    f.clock.advance_ms(1);
    assert_eq!(f.catalog.fence_expired_writers(&lease).await.expect("fences"), 1);
    let late = commit(&frozen);
    let error = f.catalog.commit_snapshot(&late).await.expect_err("fenced");
    assert!(matches!(&error, CatalogError::LeaseLost { .. }), "{error}");
    assert_eq!(f.catalog.snapshot_row(&late.row.id).await.expect("reads"), None);
    let error = f.catalog.renew_writer(&frozen, TTL).await.expect_err("fenced");
    assert!(matches!(&error, CatalogError::LeaseLost { .. }), "{error}");
    f.commit(&commit(&alive)).await;
    // A new process on the node ends them all.
    f.catalog.fence_writers_of(&NodeId::new("node-10").expect("an id")).await.expect("another node's");
    f.commit(&commit(&alive)).await;
    f.catalog.fence_writers_of(&node()).await.expect("fences");
    assert!(matches!(f.catalog.commit_snapshot(&commit(&alive)).await, Err(CatalogError::LeaseLost { .. })));
    f.check().await;
}

#[tokio::test]
async fn orphans_are_marked_once_and_only_without_a_snapshot() {
    let f = Fixture::new().await;
    let lease = acquire(&f, 1).await.expect("free");
    let owned = f.commit(&f.snapshot(None)).await.id;
    let orphan = SnapshotId::random();
    assert!(!f.catalog.mark_orphan(&lease, &owned).await.expect("answers"));
    assert!(f.catalog.mark_orphan(&lease, &orphan).await.expect("marks"));
    f.clock.advance_ms(5);
    assert!(!f.catalog.mark_orphan(&lease, &orphan).await.expect("answers"), "the first time counts");
    let seen = f.catalog.orphans_seen(&[owned, orphan, SnapshotId::random()]).await.expect("reads");
    let OrphanSeen::Since { first_seen_unix_ms: START_MS, revision } = seen[1] else { panic!("{seen:?}") };
    assert_eq!((seen[0], seen[2]), (OrphanSeen::Owned, OrphanSeen::New));
    assert_eq!(f.catalog.orphan_marks().await.expect("reads"), [(orphan, START_MS, revision)]);
    assert!(f.catalog.forget_orphan(&lease, &orphan, revision).await.expect("forgets"));
    assert_eq!(f.catalog.orphan_marks().await.expect("reads"), []);
}

#[tokio::test]
async fn the_deployment_keeps_its_id() {
    let f = Fixture::new().await;
    let id = f.catalog.deployment_id().await.expect("made");
    assert_eq!(f.catalog.deployment_id().await.expect("kept"), id);
    let (catalog, _) = f.after_a_kill().await;
    assert_eq!(catalog.deployment_id().await.expect("kept"), id);
    assert_ne!(Fixture::new().await.catalog.deployment_id().await.expect("made"), id);
}
