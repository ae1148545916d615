//! Listings: order, filters, pages, and walks while others write.

use std::collections::{BTreeSet, HashSet};

use super::*;

async fn walk(f: &Fixture, filter: &SnapshotFilter, limit: u32) -> Vec<SnapshotId> {
    let mut ids = Vec::new();
    let mut token = None;
    loop {
        let page = f.catalog.list_snapshots(&f.team, filter, limit, token.as_deref()).await.expect("lists");
        assert!(page.items.len() <= usize::try_from(limit).expect("small"));
        assert!(page.next.is_none() || !page.items.is_empty());
        ids.extend(page.items.into_iter().map(|row| row.id));
        match page.next {
            Some(next) => token = Some(next),
            None => return ids,
        }
    }
}

#[tokio::test]
async fn pages_are_newest_first_and_complete() {
    let f = Fixture::new().await;
    let mut expected = Vec::new();
    for i in 0..23 {
        let mut commit = f.snapshot(None);
        commit.row.created_unix_ms = START_MS + i / 3;
        if i % 5 == 0 {
            commit.row.expires_unix_ms = Some(START_MS - 1);
        } else {
            expected.push((commit.row.created_unix_ms, commit.row.id.to_string(), commit.row.id));
        }
        f.commit(&commit).await;
    }
    expected.sort();
    let expected: Vec<SnapshotId> = expected.into_iter().rev().map(|(_, _, id)| id).collect();
    for limit in [1, 2, 6, 9, 18, 19, 100] {
        assert_eq!(walk(&f, &SnapshotFilter::default(), limit).await, expected, "pages of {limit}");
    }
    let whole = f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 18, None).await.expect("lists");
    assert_eq!((whole.items.len(), whole.next), (18, None), "no token when the last page is full");
    for bad in [101, 1000] {
        let error =
            f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), bad, None).await.expect_err("too many");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let good = format!("{:016x}_{}", START_MS, SnapshotId::random());
    assert!(f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 1, Some(&good)).await.is_ok());
    for bad in ["", "x", "_", "0_0", &good[1..], &good.replace('_', "/"), "zzzzzzzzzzzzzzzz_x", &format!("{good}/..")] {
        let error = f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 1, Some(bad)).await.expect_err(bad);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}");
    }
}

#[tokio::test]
async fn filters_narrow_the_list() {
    let f = Fixture::new().await;
    let mut by_name = Vec::new();
    for (i, name) in [Some("a:v1"), Some("a:v2"), Some("ab"), None, Some("a")].into_iter().enumerate() {
        let mut commit = f.snapshot(name);
        commit.row.created_unix_ms += i64::try_from(i).expect("small");
        commit.row.sandbox_id = Some(sandbox_id(if i % 2 == 0 { "even" } else { "odd" }));
        by_name.push(f.commit(&commit).await.id);
    }
    let [v1, v2, ab, unnamed, default] = by_name[..] else { panic!("five") };
    let list = async |sandbox: Option<&str>, name: Option<&str>| {
        let filter = SnapshotFilter { sandbox_id: sandbox.map(str::to_owned), name: name.map(str::to_owned) };
        let all = walk(&f, &filter, 100).await;
        assert_eq!(walk(&f, &filter, 1).await, all, "page by page");
        all
    };
    assert_eq!(list(None, Some("a")).await, [default, v2, v1], "every tag");
    assert_eq!(list(None, Some(" A ")).await, [default, v2, v1]);
    assert_eq!(list(None, Some("default/a")).await, [default, v2, v1]);
    assert_eq!(list(None, Some("a:v2")).await, [v2]);
    assert_eq!(list(None, Some("a:default")).await, [default]);
    assert_eq!(list(Some("even"), None).await, [default, ab, v1]);
    assert_eq!(list(Some("odd"), None).await, [unnamed, v2]);
    assert_eq!(list(Some("odd"), Some("a")).await, [v2]);
    for (sandbox, name) in [
        (None, Some("none")),
        (None, Some("a:none")),
        (None, Some("other/a")),
        (None, Some("no name!")),
        (None, Some("")),
        (Some("none"), None),
        (Some("Not-An-Id"), None),
        (Some("even"), Some("a:v2")),
    ] {
        assert_eq!(list(sandbox, name).await, [], "{sandbox:?} {name:?}");
    }
    f.catalog.delete_snapshot(&f.team, "default/a:v2").await.expect("deleted");
    assert_eq!(list(None, Some("a")).await, [default, v1]);
}

/// A sandbox id may be used again by another team: what was taken of the first is not theirs to see.
#[tokio::test]
async fn a_filter_by_sandbox_stays_in_the_team() {
    let f = Fixture::new().await;
    f.commit(&f.snapshot(None)).await;
    let other = TeamId::new("other").expect("an id");
    let filter = SnapshotFilter { sandbox_id: Some("source".into()), name: None };
    assert_eq!(f.catalog.list_snapshots(&other, &filter, 0, None).await.expect("lists").items, []);
    assert_eq!(walk(&f, &filter, 100).await.len(), 1);
}

#[tokio::test]
async fn sandboxes_are_listed_by_state_and_metadata() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    use SandboxState::*;
    for (i, state) in [Creating, Running, Snapshotting, Pausing, Paused, Resuming, Killed, Lost].into_iter().enumerate()
    {
        let mut row = f.sandbox(&format!("s{i}"), source.id);
        row.started_unix_ms += i64::try_from(i).expect("small");
        row.state = state;
        row.metadata.insert("user".into(), if i % 2 == 0 { "even" } else { "odd" }.into());
        row.metadata.insert("app".into(), "x".into());
        f.create(&row).await;
    }
    let list = async |states: &[SandboxState], pairs: &[(&str, &str)]| {
        let metadata = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let filter = SandboxFilter { metadata, states: states.to_vec() };
        let page = f.catalog.list_sandboxes(&f.team, &filter, 0, None).await.expect("lists");
        let first = f.catalog.list_sandboxes(&f.team, &filter, 1, None).await.expect("lists");
        assert_eq!(first.items.len(), page.items.len().min(1));
        if let Some(next) = first.next {
            let rest = f.catalog.list_sandboxes(&f.team, &filter, 100, Some(&next)).await.expect("lists");
            assert_eq!(rest.items, page.items[1..]);
        }
        page.items.iter().map(|row| row.id.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(list(&[], &[]).await, ["s5", "s4", "s3", "s2", "s1"]);
    assert_eq!(list(&[Lost, Creating], &[]).await, ["s7", "s0"]);
    assert_eq!(list(&[], &[("user", "odd")]).await, ["s5", "s3", "s1"]);
    assert_eq!(list(&[Paused], &[("user", "even"), ("app", "x")]).await, ["s4"]);
    assert_eq!(list(&[], &[("user", "odd"), ("app", "y")]).await, [""; 0]);
    assert_eq!(list(&[], &[("none", "")]).await, [""; 0]);
}

/// Walks go on while snapshots are made and deleted: each walk sees every snapshot that was there all along, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_walk_is_complete_and_stable_while_others_write() {
    let f = Arc::new(Fixture::new().await);
    let mut steady = BTreeSet::new();
    let mut doomed = Vec::new();
    for i in 0..60 {
        let mut commit = f.snapshot((i % 7 == 0).then(|| format!("n{i}")).as_deref());
        commit.row.created_unix_ms += i / 4;
        let id = f.commit(&commit).await.id;
        if i % 3 == 0 { doomed.push(id) } else { assert!(steady.insert(id)) }
    }
    f.clock.advance_ms(1000);
    let writer = {
        let f = Arc::clone(&f);
        tokio::spawn(async move {
            for id in doomed {
                f.clock.advance_ms(1);
                f.commit(&f.snapshot(None)).await;
                f.catalog.delete_snapshot(&f.team, &id.to_string()).await.expect("deleted");
            }
        })
    };
    let mut walks = 0;
    while !writer.is_finished() || walks < 3 {
        let seen = walk(&f, &SnapshotFilter::default(), 7).await;
        let once: HashSet<_> = seen.iter().collect();
        assert_eq!(once.len(), seen.len(), "nothing twice");
        let missed: Vec<_> = steady.iter().filter(|id| !once.contains(id)).collect();
        assert!(missed.is_empty(), "missed {missed:?}");
        walks += 1;
    }
    writer.await.expect("no panic");
    assert_eq!(walk(&f, &SnapshotFilter::default(), 7).await.len(), 60);
    f.check().await;
}
