//! Retention: what expires goes, at once or when its last sandbox ends.

use super::*;
use crate::catalog::kv::Op;

/// A snapshot that expires `ms` after the start.
async fn expiring(f: &Fixture, name: Option<&str>, ms: i64) -> SnapshotRow {
    let mut commit = f.snapshot(name);
    commit.row.expires_unix_ms = Some(START_MS + ms);
    f.commit(&commit).await
}

async fn expire(f: &Fixture) -> Expired {
    f.catalog.expire(100).await.expect("expires")
}

#[tokio::test]
async fn what_is_over_goes_and_what_is_not_stays() {
    let f = Fixture::new().await;
    let (first, second) = (expiring(&f, Some("a"), 1000).await, expiring(&f, None, 1001).await);
    let mut kept = f.snapshot(Some("b"));
    kept.row.expires_unix_ms = None;
    f.commit(&kept).await;
    f.clock.advance_ms(999);
    assert_eq!(expire(&f).await, Expired::default());
    f.clock.advance_ms(1);
    assert_eq!(expire(&f).await.removed, [first.id]);
    assert_eq!(f.catalog.snapshot_row(&first.id).await.expect("reads"), None);
    assert!(f.catalog.manifest(&first.id).await.is_err());
    f.clock.advance_ms(1000);
    assert_eq!(expire(&f).await.removed, [second.id]);
    assert_eq!(expire(&f).await, Expired::default());
    assert!(f.catalog.snapshot_row(&kept.row.id).await.expect("reads").is_some());
    f.check().await;
}

#[tokio::test]
async fn an_occupied_one_keeps_its_content_until_its_last_sandbox_ends() {
    let f = Fixture::new().await;
    let row = expiring(&f, Some("a"), 1000).await;
    f.create(&f.sandbox("s1", row.id)).await;
    f.create(&f.sandbox("s2", row.id)).await;
    f.clock.advance_ms(1000);
    let expired = expire(&f).await;
    assert_eq!((expired.removed, expired.condemned), (vec![], vec![row.id]));
    assert_eq!(expire(&f).await, Expired::default(), "it is dealt with");
    f.check().await;
    let condemned = f.catalog.snapshot_row(&row.id).await.expect("reads").expect("kept");
    assert!(condemned.condemned && condemned.name.is_none());
    assert!(f.catalog.manifest(&row.id).await.is_ok());
    // Whatever the clock does now, it is over.
    f.clock.set_unix_ms(START_MS);
    assert_eq!(f.catalog.check_name(&f.team, "a").await.expect("free").to_string(), "a:default");
    assert!(f.catalog.create_sandbox(&f.sandbox("s3", row.id)).await.is_err());
    f.commit(&f.snapshot(Some("a"))).await;
    f.catalog.end_sandbox(&f.team, &sandbox_id("s1")).await.expect("ended");
    assert!(f.catalog.manifest(&row.id).await.is_ok());
    f.catalog.end_sandbox(&f.team, &sandbox_id("s2")).await.expect("ended");
    assert_eq!(f.catalog.snapshot_row(&row.id).await.expect("reads"), None);
    f.check().await;
}

#[tokio::test]
async fn it_goes_on_where_it_stopped_and_says_when_there_is_more() {
    let f = Fixture::new().await;
    for ms in 0..5 {
        expiring(&f, None, ms).await;
    }
    f.clock.advance_ms(10);
    let counts = [2, 2, 1].map(|count| (count, count == 2));
    for (count, more) in counts {
        let expired = f.catalog.expire(2).await.expect("expires");
        assert_eq!((expired.removed.len(), expired.more), (count, more));
        f.check().await;
    }
}

#[tokio::test]
async fn a_crash_between_condemning_and_removing_is_made_up_for() {
    let f = Fixture::new().await;
    let row = expiring(&f, None, 1000).await;
    f.create(&f.sandbox("s1", row.id)).await;
    f.clock.advance_ms(1000);
    expire(&f).await;
    // The sandbox ended, and whoever ended it died before it looked after the snapshot.
    let sandbox = f.catalog.find_sandbox(&sandbox_id("s1")).await.expect("reads").expect("there");
    let ops = [
        keys::sandbox(&sandbox.id),
        keys::timed(&keys::sandboxes(&f.team), sandbox.started_unix_ms, &sandbox.id),
        keys::on_node(&sandbox.node_id, &sandbox.id),
        keys::occupancy(&row.id, &sandbox.id),
    ];
    f.kv.txn(vec![], ops.map(Op::Delete).to_vec()).await.expect("as end_sandbox does");
    assert_eq!(expire(&f).await.removed, [row.id]);
    f.check().await;
}

#[tokio::test]
async fn a_damaged_row_and_an_entry_for_nothing_do_not_keep_the_others() {
    let f = Fixture::new().await;
    let (damaged, good) = (expiring(&f, None, 1).await, expiring(&f, None, 2).await);
    let nothing = keys::timed(keys::EXPIRY, START_MS, &SnapshotId::random());
    let ops = vec![
        Op::Put(keys::snapshot(&damaged.id), Bytes::from_static(b"not a row")),
        Op::Put(nothing.clone(), Bytes::new()),
    ];
    f.kv.txn(vec![], ops).await.expect("puts");
    f.clock.advance_ms(10);
    let expired = expire(&f).await;
    assert_eq!((expired.removed, expired.damaged), (vec![good.id], 1));
    assert_eq!(f.kv.get(nothing).await.expect("reads"), None);
    assert_eq!(expire(&f).await, Expired { damaged: 1, ..Expired::default() });
}

#[tokio::test]
async fn two_at_once_and_a_sandbox_in_between_agree() {
    let f = Fixture::new().await;
    let mut rows = Vec::new();
    for ms in 0..20 {
        rows.push(expiring(&f, None, 100 + ms).await);
    }
    let creates = rows.iter().enumerate().map(|(n, row)| {
        let sandbox = f.sandbox(&format!("s{n}"), row.id);
        let f = &f;
        async move { f.catalog.create_sandbox(&sandbox).await.is_ok() }
    });
    let late = async {
        tokio::task::yield_now().await;
        f.clock.advance_ms(1000);
        futures::future::join_all((0..3).map(|_| f.catalog.expire(100))).await
    };
    let (created, rounds) = tokio::join!(futures::future::join_all(creates), late);
    let rounds: Vec<Expired> = rounds.into_iter().map(|round| round.expect("expires")).collect();
    let removed: Vec<SnapshotId> = rounds.iter().flat_map(|round| round.removed.clone()).collect();
    let condemned: Vec<SnapshotId> = rounds.iter().flat_map(|round| round.condemned.clone()).collect();
    assert_eq!(removed.len() + condemned.len(), rows.len(), "each by one of them, once");
    for (row, created) in rows.iter().zip(created) {
        assert_eq!(condemned.contains(&row.id), created, "occupied first, or gone first");
    }
    f.check().await;
}
