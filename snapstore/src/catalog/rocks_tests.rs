//! Tests of the embedded engine: the conformance suite, and what is particular to a directory on disk.

use std::sync::Arc;

use super::*;
use crate::catalog::conformance;

fn put(key: &str, value: &str) -> Op {
    Op::Put(key.as_bytes().to_vec(), Bytes::copy_from_slice(value.as_bytes()))
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("creates");
    for entry in std::fs::read_dir(from).expect("lists") {
        let entry = entry.expect("lists");
        if entry.file_name() != "LOCK" {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copies");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms() {
    let dir = tempfile::tempdir().expect("a directory");
    conformance::check(Arc::new(RocksKv::open(dir.path()).expect("opens"))).await;
}

#[tokio::test]
async fn revisions_go_on_after_reopening() {
    let dir = tempfile::tempdir().expect("a directory");
    let kv = RocksKv::open(dir.path()).expect("opens");
    let TxnOutcome::Committed(first) = kv.txn(vec![], vec![put("a", "1")]).await.expect("answers") else {
        panic!("no compare")
    };
    drop(kv);
    let kv = RocksKv::open(dir.path()).expect("opens again");
    let entry = kv.get(b"a".to_vec()).await.expect("reads").expect("kept");
    assert_eq!((entry.value.as_ref(), entry.revision), (&b"1"[..], first));
    kv.txn(vec![], vec![Op::Delete(b"a".to_vec())]).await.expect("answers");
    drop(kv);
    let kv = RocksKv::open(dir.path()).expect("opens again");
    let TxnOutcome::Committed(later) = kv.txn(vec![], vec![put("a", "2")]).await.expect("answers") else {
        panic!("no compare")
    };
    assert!(later.0 > first.0 + 1, "a delete used a revision, and it is remembered");
}

/// The directory as it is while the process runs is what `kill -9` leaves: everything committed must be in it.
#[tokio::test]
async fn what_was_committed_is_on_disk_without_closing() {
    let dir = tempfile::tempdir().expect("a directory");
    let kv = RocksKv::open(&dir.path().join("live")).expect("opens");
    for i in 0..50 {
        kv.txn(vec![], vec![put(&format!("k/{i:02}"), "v"), put("last", &i.to_string())]).await.expect("answers");
    }
    copy_dir(&dir.path().join("live"), &dir.path().join("killed"));
    kv.txn(vec![], vec![put("after", "x")]).await.expect("answers");

    let killed = RocksKv::open(&dir.path().join("killed")).expect("opens what a kill leaves");
    let all = killed.range(KeyRange::prefix(b"k/"), 100, Order::Ascending).await.expect("reads");
    assert_eq!(all.len(), 50);
    assert_eq!(killed.get(b"last".to_vec()).await.expect("reads").expect("kept").value.as_ref(), b"49");
    assert_eq!(killed.get(b"after".to_vec()).await.expect("reads"), None);
}

/// Power lost in the middle of a write tears the tail of the log: the half-written transaction is gone as a whole.
#[tokio::test]
async fn a_torn_tail_loses_only_the_transaction_nobody_was_told_of() {
    let dir = tempfile::tempdir().expect("a directory");
    let kv = RocksKv::open(&dir.path().join("live")).expect("opens");
    kv.txn(vec![], vec![put("a", "1"), put("b", "1")]).await.expect("answers");
    kv.txn(vec![], vec![put("a", "2"), put("b", "2")]).await.expect("answers");
    let torn = dir.path().join("torn");
    copy_dir(&dir.path().join("live"), &torn);
    let log = std::fs::read_dir(&torn)
        .expect("lists")
        .map(|entry| entry.expect("lists").path())
        .filter(|path| path.extension().is_some_and(|e| e == "log"))
        .max_by_key(|path| std::fs::metadata(path).expect("stat").len())
        .expect("a write-ahead log");
    let file = std::fs::OpenOptions::new().write(true).open(&log).expect("opens");
    file.set_len(file.metadata().expect("stat").len() - 3).expect("cuts");

    let kv = RocksKv::open(&torn).expect("opens");
    let values = kv.get_many(vec![b"a".to_vec(), b"b".to_vec()]).await.expect("reads");
    let values: Vec<_> = values.into_iter().map(|entry| entry.expect("kept").value).collect();
    assert_eq!(values, ["1", "1"], "both of the first, none of the second");
}

#[test]
fn an_unknown_layout_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    drop(RocksKv::open(dir.path()).expect("opens"));
    let mut options = Options::default();
    options.create_if_missing(true);
    DB::open(&options, dir.path()).expect("opens").put(FORMAT_KEY, [2]).expect("puts");
    assert!(matches!(RocksKv::open(dir.path()), Err(KvError::Refused { .. })));
}

#[tokio::test]
async fn a_record_too_short_for_its_revision_is_reported_with_its_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let kv = RocksKv::open(dir.path()).expect("opens");
    kv.db.put(b"bad", b"123").expect("puts");
    for error in [
        kv.get(b"bad".to_vec()).await.expect_err("damaged"),
        kv.txn(vec![Compare::Present(b"bad".to_vec())], vec![put("x", "")]).await.expect_err("damaged"),
    ] {
        assert!(matches!(&error, KvError::Corrupt { key, .. } if key == "bad"), "{error}");
    }
    assert_eq!(kv.get(b"x".to_vec()).await.expect("reads"), None);
}
