//! What every engine must do (see [`super::kv`]), as one function that takes a fresh, empty store.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;

use super::kv::{Compare, Key, KeyRange, KeyValue, KvError, Op, Order, Revision, TxnOutcome};

fn key(text: &str) -> Key {
    text.as_bytes().to_vec()
}

fn put(k: &str, v: &str) -> Op {
    Op::Put(key(k), Bytes::copy_from_slice(v.as_bytes()))
}

async fn commit(kv: &dyn KeyValue, compares: Vec<Compare>, ops: Vec<Op>) -> Revision {
    match kv.txn(compares, ops).await.expect("the store answers") {
        TxnOutcome::Committed(revision) => revision,
        TxnOutcome::Conflict => panic!("no compare should have failed"),
    }
}

async fn conflict(kv: &dyn KeyValue, compares: Vec<Compare>, ops: Vec<Op>) {
    assert_eq!(kv.txn(compares, ops).await.expect("the store answers"), TxnOutcome::Conflict);
}

async fn value(kv: &dyn KeyValue, k: &str) -> Option<String> {
    kv.get(key(k)).await.expect("reads").map(|entry| String::from_utf8(entry.value.to_vec()).expect("text"))
}

/// Runs every check. The store must be empty.
pub async fn check(kv: Arc<dyn KeyValue>) {
    reads_and_revisions(kv.as_ref()).await;
    compares(kv.as_ref()).await;
    ranges(kv.as_ref()).await;
    refusals(kv.as_ref()).await;
    racing_counters(&kv).await;
    racing_for_emptiness(&kv).await;
}

async fn reads_and_revisions(kv: &dyn KeyValue) {
    assert_eq!(kv.get(key("r/a")).await.expect("reads"), None);
    let first = commit(kv, vec![], vec![put("r/a", "1"), put("r/empty", "")]).await;
    let entry = kv.get(key("r/a")).await.expect("reads").expect("was put");
    assert_eq!((entry.key, entry.value.as_ref(), entry.revision), (key("r/a"), &b"1"[..], first));
    assert_eq!(value(kv, "r/empty").await.as_deref(), Some(""), "an empty value is a value");

    let second = commit(kv, vec![], vec![put("r/a", "1")]).await;
    assert!(second > first, "the same value put again is a new revision");
    assert_eq!(kv.get(key("r/empty")).await.expect("reads").expect("still there").revision, first);

    let many = kv.get_many(vec![key("r/none"), key("r/a"), key("r/a")]).await.expect("reads");
    let revisions: Vec<_> = many.into_iter().map(|entry| entry.map(|e| e.revision)).collect();
    assert_eq!(revisions, [None, Some(second), Some(second)], "in the order asked, repeated keys and all");

    commit(kv, vec![], vec![Op::Delete(key("r/a")), Op::Delete(key("r/none"))]).await;
    assert_eq!(value(kv, "r/a").await, None);
    let third = commit(kv, vec![], vec![put("r/a", "3")]).await;
    assert!(third > second, "a key that comes back does not get an old revision");
    conflict(kv, vec![Compare::Revision(key("r/a"), second)], vec![put("r/a", "4")]).await;
}

async fn compares(kv: &dyn KeyValue) {
    let revision = commit(kv, vec![Compare::Absent(key("c/a"))], vec![put("c/a", "1")]).await;
    conflict(kv, vec![Compare::Absent(key("c/a"))], vec![put("c/a", "2")]).await;
    conflict(kv, vec![Compare::Present(key("c/none"))], vec![put("c/a", "2")]).await;
    conflict(kv, vec![Compare::Revision(key("c/none"), revision)], vec![put("c/a", "2")]).await;
    conflict(kv, vec![Compare::Revision(key("c/a"), Revision(revision.0 + 1))], vec![put("c/a", "2")]).await;
    let mixed = vec![Compare::Present(key("c/a")), Compare::Absent(key("c/a"))];
    conflict(kv, mixed, vec![put("c/a", "2"), put("c/b", "2")]).await;
    assert_eq!(value(kv, "c/a").await.as_deref(), Some("1"), "a conflict writes nothing");
    assert_eq!(value(kv, "c/b").await, None);

    let all = vec![
        Compare::Present(key("c/a")),
        Compare::Revision(key("c/a"), revision),
        Compare::Absent(key("c/b")),
        Compare::Empty(KeyRange::prefix(b"c/b/")),
    ];
    commit(kv, all, vec![put("c/b/1", "x"), Op::Delete(key("c/a"))]).await;
    conflict(kv, vec![Compare::Empty(KeyRange::prefix(b"c/b/"))], vec![put("c/z", "x")]).await;
    commit(kv, vec![Compare::Empty(KeyRange { start: key("c/b/2"), end: key("c/b/1") })], vec![]).await;
    commit(kv, vec![], vec![Op::Delete(key("c/b/1"))]).await;
    commit(kv, vec![Compare::Empty(KeyRange::prefix(b"c/b/"))], vec![put("c/z", "x")]).await;
    assert_eq!(value(kv, "c/z").await.as_deref(), Some("x"));
    commit(kv, vec![Compare::Present(key("c/z"))], vec![]).await;
}

async fn ranges(kv: &dyn KeyValue) {
    let keys: [&[u8]; 6] = [b"g/a", b"g/a/", b"g/a\x00", b"g/b", b"g/\xff", b"h"];
    let ops = keys.iter().map(|k| Op::Put(k.to_vec(), Bytes::from_static(b"v"))).collect();
    commit(kv, vec![], ops).await;
    let names = async |range: KeyRange, limit, order| -> Vec<Key> {
        kv.range(range, limit, order).await.expect("reads").into_iter().map(|entry| entry.key).collect()
    };
    let all = KeyRange::prefix(b"g/");
    let ascending = names(all.clone(), 100, Order::Ascending).await;
    assert_eq!(ascending, [&b"g/a"[..], b"g/a\x00", b"g/a/", b"g/b", b"g/\xff"], "byte order, end exclusive");
    let mut descending = names(all.clone(), 100, Order::Descending).await;
    descending.reverse();
    assert_eq!(descending, ascending);
    assert_eq!(names(all.clone(), 2, Order::Ascending).await, ascending[..2]);
    assert_eq!(names(all.clone(), 2, Order::Descending).await, [&b"g/\xff"[..], b"g/b"]);
    assert_eq!(names(all, 0, Order::Ascending).await, Vec::<Key>::new());
    let middle = KeyRange { start: key("g/a/"), end: key("g/b") };
    assert_eq!(names(middle.clone(), 9, Order::Ascending).await, [b"g/a/"], "start inclusive, end exclusive");
    assert_eq!(names(middle, 9, Order::Descending).await, [b"g/a/"]);
    assert_eq!(names(KeyRange { start: key("g/b"), end: key("g/a") }, 9, Order::Ascending).await, Vec::<Key>::new());
    assert_eq!(names(KeyRange::prefix(b"nothing/"), 9, Order::Descending).await, Vec::<Key>::new());
}

async fn refusals(kv: &dyn KeyValue) {
    let refused = |outcome: Result<TxnOutcome, KvError>| matches!(outcome, Err(KvError::Refused { .. }));
    assert!(refused(kv.txn(vec![], vec![put("", "x")]).await), "the empty key");
    assert!(refused(kv.txn(vec![], vec![put("\0x", "x")]).await), "the engine's own keys");
    assert!(refused(kv.txn(vec![Compare::Absent(vec![])], vec![]).await));
    let twice = vec![put("d/a", "1"), put("d/b", "1"), Op::Delete(key("d/a"))];
    assert!(refused(kv.txn(vec![], twice).await), "a key written twice");
    assert_eq!(value(kv, "d/b").await, None);
    assert!(matches!(kv.get(key("\0revision")).await, Err(KvError::Refused { .. })));
}

/// Many clients count up one key by compare-and-put; none may be lost, and no revision given twice.
async fn racing_counters(kv: &Arc<dyn KeyValue>) {
    const CLIENTS: u64 = 16;
    const EACH: u64 = 20;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let kv = Arc::clone(kv);
        clients.spawn(async move {
            let mut revisions = Vec::new();
            while (revisions.len() as u64) < EACH {
                let now = kv.get(key("n")).await.expect("reads");
                let count = now.as_ref().map_or(0, |entry| {
                    String::from_utf8(entry.value.to_vec()).expect("text").parse::<u64>().expect("a number")
                });
                let compare =
                    now.map_or(Compare::Absent(key("n")), |entry| Compare::Revision(key("n"), entry.revision));
                let outcome = kv.txn(vec![compare], vec![put("n", &(count + 1).to_string())]).await.expect("answers");
                if let TxnOutcome::Committed(revision) = outcome {
                    revisions.push(revision);
                }
            }
            revisions
        });
    }
    let revisions: Vec<Revision> = clients.join_all().await.into_iter().flatten().collect();
    assert_eq!(value(kv.as_ref(), "n").await, Some((CLIENTS * EACH).to_string()));
    assert_eq!(revisions.iter().collect::<HashSet<_>>().len(), revisions.len());
}

/// Of many clients that each want to be the first under a prefix, exactly one is; and one that removes the prefix's owner
/// only when nobody holds it never removes it under a holder.
async fn racing_for_emptiness(kv: &Arc<dyn KeyValue>) {
    for round in 0..20 {
        let mut clients = tokio::task::JoinSet::new();
        for client in 0..8 {
            let kv = Arc::clone(kv);
            clients.spawn(async move {
                let prefix = format!("e/{round}/");
                let only_first = vec![Compare::Empty(KeyRange::prefix(prefix.as_bytes()))];
                let outcome = kv.txn(only_first, vec![put(&format!("{prefix}{client}"), "")]).await.expect("answers");
                matches!(outcome, TxnOutcome::Committed(_))
            });
        }
        assert_eq!(clients.join_all().await.into_iter().filter(|won| *won).count(), 1);

        let owner = format!("o/{round}");
        commit(kv.as_ref(), vec![], vec![put(&owner, "")]).await;
        let hold = {
            let (kv, owner) = (Arc::clone(kv), owner.clone());
            tokio::spawn(async move {
                kv.txn(vec![Compare::Present(key(&owner))], vec![put(&format!("{owner}/holder"), "")])
                    .await
                    .expect("answers")
            })
        };
        let range = KeyRange::prefix(format!("{owner}/").as_bytes());
        let removed = kv.txn(vec![Compare::Empty(range)], vec![Op::Delete(key(&owner))]).await.expect("answers");
        let held = hold.await.expect("no panic");
        assert_ne!(
            matches!(removed, TxnOutcome::Committed(_)),
            matches!(held, TxnOutcome::Committed(_)),
            "either held or removed"
        );
    }
}
