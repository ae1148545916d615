//! What every blob store must do, as one suite: each implementation runs it against an empty store.

use bytes::Bytes;

use super::{BlobError, BlobStore, PutMode, PutOutcome};

/// Panics at the first promise that `blobs` breaks. Leaves the store empty.
pub(crate) async fn run(blobs: &dyn BlobStore) {
    missing_objects(blobs).await;
    whole_and_partial_reads(blobs).await;
    conditional_puts(blobs).await;
    listing(blobs).await;
    deleting(blobs).await;
}

fn pattern(len: usize) -> Bytes {
    (0..len).map(|i| u8::try_from(i % 251).expect("small")).collect()
}

async fn missing_objects(blobs: &dyn BlobStore) {
    let not_found = |error: BlobError| assert_eq!(error, BlobError::NotFound { key: "packs/none".into() });
    not_found(blobs.get("packs/none", 100).await.expect_err("get of nothing"));
    not_found(blobs.get_range("packs/none", 0..1).await.expect_err("range of nothing"));
    not_found(blobs.head("packs/none").await.expect_err("head of nothing"));
    blobs.delete("packs/none").await.expect("deleting nothing succeeds");
    assert_eq!(blobs.list("packs/", None, 10).await.expect("empty list"), []);
}

async fn whole_and_partial_reads(blobs: &dyn BlobStore) {
    let bytes = pattern(300_000);
    assert_eq!(blobs.put("packs/a", bytes.clone(), PutMode::Overwrite).await.expect("put"), PutOutcome::Written);
    assert_eq!(blobs.head("packs/a").await.expect("head"), 300_000);
    assert_eq!(blobs.get("packs/a", 300_000).await.expect("get"), bytes);
    for range in [0..1, 0..300_000, 299_999..300_000, 1000..70_000] {
        let at = |n: u64| usize::try_from(n).expect("small");
        let got = blobs.get_range("packs/a", range.clone()).await.expect("range");
        assert_eq!(got, bytes.slice(at(range.start)..at(range.end)), "{range:?}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "a caller's mistake must be answered, too")]
    for range in [0..300_001, 300_000..300_001, 400_000..400_010, 5..5, 9..5, 0..u64::MAX] {
        let error = blobs.get_range("packs/a", range.clone()).await.expect_err("not wholly inside");
        assert!(matches!(error, BlobError::BadAnswer { .. }), "{range:?}: {error}");
    }
    let error = blobs.get("packs/a", 299_999).await.expect_err("over the cap");
    assert!(matches!(error, BlobError::BadAnswer { .. }), "{error}");

    blobs.put("packs/empty", Bytes::new(), PutMode::Overwrite).await.expect("put of nothing");
    assert_eq!(blobs.get("packs/empty", 0).await.expect("get"), Bytes::new());
    blobs.delete("packs/empty").await.expect("delete");
    blobs.delete("packs/a").await.expect("delete");
}

async fn conditional_puts(blobs: &dyn BlobStore) {
    let put = async |bytes: &'static [u8], mode| blobs.put("manifests/m", Bytes::from_static(bytes), mode).await;
    assert_eq!(put(b"one", PutMode::IfAbsent).await.expect("absent"), PutOutcome::Written);
    assert_eq!(put(b"two", PutMode::IfAbsent).await.expect("there"), PutOutcome::AlreadyThere);
    assert_eq!(&blobs.get("manifests/m", 10).await.expect("get")[..], b"one", "a refused put changes nothing");
    assert_eq!(put(b"three", PutMode::Overwrite).await.expect("overwrite"), PutOutcome::Written);
    assert_eq!(&blobs.get("manifests/m", 10).await.expect("get")[..], b"three");
    blobs.delete("manifests/m").await.expect("delete");
}

async fn listing(blobs: &dyn BlobStore) {
    for key in ["packs/c", "packs/a", "packs/b", "packs0", "pack", "manifests/a"] {
        blobs.put(key, Bytes::from_static(b"xy"), PutMode::Overwrite).await.expect("put");
    }
    let keys = async |prefix: &str, after: Option<&str>, limit| -> Vec<String> {
        let entries = blobs.list(prefix, after, limit).await.expect("list");
        assert!(entries.iter().all(|entry| entry.len == 2));
        entries.into_iter().map(|entry| entry.key).collect()
    };
    assert_eq!(keys("packs/", None, 10).await, ["packs/a", "packs/b", "packs/c"]);
    assert_eq!(keys("packs/", None, 2).await, ["packs/a", "packs/b"]);
    assert_eq!(keys("packs/", Some("packs/b"), 2).await, ["packs/c"]);
    assert_eq!(keys("packs/", Some("packs/c"), 2).await, Vec::<String>::new());
    assert_eq!(keys("packs/", Some("a"), 1).await, ["packs/a"]);
    for key in ["packs/c", "packs/a", "packs/b", "packs0", "pack", "manifests/a"] {
        blobs.delete(key).await.expect("delete");
    }
}

async fn deleting(blobs: &dyn BlobStore) {
    blobs.put("packs/d", Bytes::from_static(b"x"), PutMode::Overwrite).await.expect("put");
    blobs.delete("packs/d").await.expect("delete");
    blobs.delete("packs/d").await.expect("and again");
    assert!(matches!(blobs.head("packs/d").await, Err(BlobError::NotFound { .. })));
}
