//! Objects as files: order of listings, crashes, races.

use std::collections::BTreeSet;
use std::io::Write as _;

use proptest::prelude::*;

use super::*;

fn open() -> (tempfile::TempDir, Files) {
    let dir = tempfile::tempdir().expect("a directory");
    let files = Files::open(&dir.path().join("s3")).expect("opens");
    files.create_bucket("bucket").expect("creates");
    (dir, files)
}

fn put(files: &Files, key: &str, bytes: &[u8], only_new: bool) -> Result<Meta, FilesError> {
    let (mut file, temporary) = files.temporary().expect("a file");
    file.write_all(bytes).expect("writes");
    files.commit(&file, temporary, "bucket", key, only_new)
}

fn all(files: &Files, query: Query) -> Vec<String> {
    let (mut found, mut query) = (Vec::new(), query);
    loop {
        let (page, more) = files.list("bucket", &query).expect("lists");
        assert!(page.len() <= query.limit);
        found.extend(page.iter().map(|step| step.key().to_owned()));
        match page.last().filter(|_| more) {
            Some(last) => query.after = last.key().to_owned(),
            None => return found,
        }
    }
}

#[test]
fn a_crash_leaves_only_temporary_files_and_they_go() {
    let (dir, files) = open();
    put(&files, "a/b", b"whole", false).expect("puts");
    let (mut file, temporary) = files.temporary().expect("a file");
    file.write_all(b"half").expect("writes");
    std::mem::forget(temporary);
    drop(files);
    let files = Files::open(&dir.path().join("s3")).expect("opens");
    assert_eq!(std::fs::read_dir(dir.path().join("s3/tmp")).expect("lists").count(), 0);
    assert_eq!(all(&files, Query { limit: 10, ..Query::default() }), ["a/b"]);
    put(&files, "a/c", b"more", false).expect("puts");
}

#[test]
fn a_write_that_is_given_up_leaves_nothing() {
    let (dir, files) = open();
    drop(files.temporary().expect("a file"));
    assert!(matches!(put(&files, &"x".repeat(300), b"", false), Err(FilesError::KeyTooLong)));
    put(&files, "a", b"1", false).expect("puts");
    assert!(matches!(put(&files, "a", b"2", true), Err(FilesError::Exists)));
    assert_eq!(std::fs::read_dir(dir.path().join("s3/tmp")).expect("lists").count(), 0);
}

#[test]
fn of_many_that_create_an_object_one_does() {
    let (_dir, files) = open();
    for round in 0..20 {
        let key = format!("new/{round}/object");
        let won = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8_u8)
                .map(|i| {
                    let (files, key) = (&files, &key);
                    scope.spawn(move || match put(files, key, &[i], true) {
                        Ok(_) => Some(i),
                        Err(FilesError::Exists) => None,
                        Err(error) => panic!("{error}"),
                    })
                })
                .collect();
            writers.into_iter().filter_map(|writer| writer.join().expect("no panic")).collect::<Vec<_>>()
        });
        let (mut file, _) = files.read("bucket", &key).expect("reads").expect("made");
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut bytes).expect("reads");
        assert_eq!(bytes, won, "one won, and it is its object");
    }
}

#[test]
fn who_has_an_object_open_reads_it_whatever_happens_to_its_name() {
    let (_dir, files) = open();
    let first = put(&files, "a", b"first", false).expect("puts");
    let (mut file, meta) = files.read("bucket", "a").expect("reads").expect("there");
    assert_eq!(meta.etag, first.etag);
    let second = put(&files, "a", b"other", false).expect("puts");
    assert_ne!(second.etag, first.etag);
    files.delete("bucket", "a").expect("deletes");
    files.delete("bucket", "a").expect("again");
    files.delete("bucket", "none/at/all").expect("nothing there");
    assert!(files.read("bucket", "a").expect("reads").is_none());
    let mut text = String::new();
    std::io::Read::read_to_string(&mut file, &mut text).expect("reads");
    assert_eq!(text, "first");
    assert!(matches!(files.read("none", "a"), Err(FilesError::NoBucket)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_listing_is_the_sorted_set_of_keys(
        keys in proptest::collection::btree_set("[ab/.!0]{1,6}", 0..24),
        prefix in "[ab/]{0,3}",
        after in "[ab/!]{0,4}",
        limit in 1usize..5,
    ) {
        let (_dir, files) = open();
        for key in &keys {
            put(&files, key, b"", false).expect("puts");
        }
        let expected: Vec<&String> = keys.iter().filter(|key| key.starts_with(&prefix) && **key > after).collect();
        let query = Query { prefix: prefix.clone(), after, by_directory: false, limit };
        let found = all(&files, query);
        prop_assert_eq!(found.iter().collect::<Vec<_>>(), expected);

        let rolled_up: BTreeSet<String> = keys
            .iter()
            .filter_map(|key| key.strip_prefix(&prefix))
            .map(|rest| prefix.clone() + rest.split_inclusive('/').next().unwrap_or_default())
            .collect();
        let query = Query { prefix, by_directory: true, limit, ..Query::default() };
        prop_assert_eq!(all(&files, query), rolled_up.into_iter().collect::<Vec<_>>());
    }
}
