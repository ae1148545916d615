//! Which packs a commit may use.

use std::collections::HashSet;

use super::*;
use crate::catalog::kv::Op;

async fn put(f: &Fixture, row: &PackRow) {
    let mut ops = vec![Op::Put(keys::pack(&row.id), wire::encode(row).expect("encodes"))];
    if row.state == PackState::Gone {
        ops.push(Op::Put(keys::timed(keys::TOMBSTONES, row.since_unix_ms, &row.id), Bytes::new()));
    }
    f.kv.txn(vec![], ops).await.expect("puts");
}

#[tokio::test]
async fn a_snapshot_uses_live_packs_only_and_the_refusal_names_all_others() {
    let f = Fixture::new().await;
    let mut first = f.snapshot(Some("a"));
    first.packs = vec![pack(1), pack(2), pack(1), pack(3), pack(4)];
    f.commit(&first).await;
    for (byte, state) in [(2, PackState::Condemned), (3, PackState::Doomed), (4, PackState::Gone)] {
        let mut row = f.catalog.pack(&pack(byte).id).await.expect("reads").expect("made by the commit");
        assert_eq!(row.state, PackState::Live);
        row.state = state;
        put(&f, &row).await;
    }
    let mut second = f.snapshot(Some("b"));
    second.packs = vec![pack(1), pack(2), pack(3), pack(4), pack(5)];
    let error = f.catalog.commit_snapshot(&second).await.expect_err("not live");
    let CatalogError::PacksNotLive { packs } = &error else { panic!("{error}") };
    assert_eq!(*packs, [pack(2).id, pack(3).id, pack(4).id], "staged or not: what has a row is judged by it");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/b").await.expect_err("nothing").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.pack(&pack(5).id).await.expect("reads"), None, "a refusal makes no row");
    second.packs = vec![pack(1), pack(5)];
    f.commit(&second).await;
    f.check().await;
}

#[tokio::test]
async fn only_a_pack_on_the_committers_own_disk_may_be_new() {
    let f = Fixture::new().await;
    let mut commit = f.snapshot(None);
    commit.packs = vec![pack(1), pack(2), pack(3)];
    commit.staged = HashSet::from([pack(2).id]);
    let error = f.catalog.commit_snapshot(&commit).await.expect_err("not staged, not known");
    assert!(matches!(&error, CatalogError::PacksNotLive { packs } if *packs == [pack(1).id, pack(3).id]), "{error}");
    commit.packs = vec![pack(2)];
    f.commit(&commit).await;
    // Now it is live, and whoever has it in the blob store may use it.
    let mut other = f.snapshot(None);
    other.packs = vec![pack(2)];
    other.staged = HashSet::new();
    f.commit(&other).await;
    f.check().await;
}

#[tokio::test]
async fn kept_is_what_is_not_on_its_way_out_for_good() {
    let f = Fixture::new().await;
    for (byte, state) in [(1, PackState::Live), (2, PackState::Condemned), (3, PackState::Doomed), (4, PackState::Gone)]
    {
        let PackRef { id, size_bytes, chunks, .. } = pack(byte);
        put(&f, &PackRow { id, size_bytes, chunks, state, created_unix_ms: START_MS, since_unix_ms: START_MS }).await;
    }
    let asked = (1..=5).map(|byte| pack(byte).id).collect();
    let kept = f.catalog.packs_kept(&asked).await.expect("reads");
    assert_eq!(kept, HashSet::from([pack(1).id, pack(2).id]));
}
