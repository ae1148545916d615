//! Snapshots: commit, names, expiry, deletion, uploads, idempotency, resolving.

use std::collections::HashSet;

use super::*;
use crate::catalog::names::NameError;

#[tokio::test]
async fn a_team_keeps_its_key() {
    let f = Fixture::new().await;
    let team = f.catalog.ensure_team(&f.team).await.expect("a team");
    assert_eq!(team.name.as_ref().map(|name| name.as_str()), Some("default"));
    assert_eq!(f.catalog.ensure_team(&f.team).await.expect("a team"), team);
    let other = f.catalog.ensure_team(&TeamId::new("Other.Team").expect("an id")).await.expect("a team");
    assert_eq!(other.name, None, "an id that cannot be a name makes none");
    assert_ne!(other.dedup_key, team.dedup_key);
    let unnamed = f.catalog.check_name(&other.id, "x").await.expect_err("no name");
    assert!(matches!(unnamed, CatalogError::Name(NameError::TeamWithoutName)) && unnamed.kind() == ErrorKind::Invalid);
}

#[tokio::test]
async fn a_commit_is_found_again_in_every_way() {
    let f = Fixture::new().await;
    let commit = f.snapshot(Some("short:v1"));
    assert!(f.catalog.get_snapshot(&f.team, "default/short:v1").await.is_err(), "it does not exist yet");
    let row = f.commit(&commit).await;
    assert_eq!(row, commit.row);
    for reference in
        [row.id.to_string(), row.id.to_string().to_uppercase(), "default/short:v1".into(), " DEFAULT/Short:V1 ".into()]
    {
        assert_eq!(f.catalog.get_snapshot(&f.team, &reference).await.expect("found"), row, "{reference}");
    }
    assert_eq!(f.catalog.manifest(&row.id).await.expect("found"), commit.manifest);
    let team = f.catalog.team(&f.team).await.expect("found");
    assert_eq!(team.names_of(&row), ["default/short:v1"]);
    assert_eq!(f.catalog.pack(&pack(1).id).await.expect("reads").map(|pack| pack.state), Some(PackState::Live));
    let asked = HashSet::from([pack(1).id, pack(2).id]);
    assert_eq!(f.catalog.packs_kept(&asked).await.expect("reads"), HashSet::from([pack(1).id]));
    for absent in [
        "default/short",
        "default/short:v2",
        "other/short:v1",
        "short:v1",
        "short",
        "",
        &SnapshotId::random().to_string(),
    ] {
        let error = f.catalog.get_snapshot(&f.team, absent).await.expect_err(absent);
        assert_eq!(error.kind(), ErrorKind::NotFound, "{absent}: {error}");
    }
    let malformed = f.catalog.get_snapshot(&f.team, "a/b/c").await.expect_err("malformed");
    assert_eq!(malformed.kind(), ErrorKind::Invalid);
    f.check().await;
}

#[tokio::test]
async fn a_commit_sent_twice_is_one() {
    let f = Fixture::new().await;
    let commit = f.snapshot(Some("a"));
    f.commit(&commit).await;
    let again = f.catalog.commit_snapshot(&commit).await.expect("the same");
    assert_eq!(again, Committed::Replayed(commit.row.clone()));
    f.check().await;
}

#[tokio::test]
async fn a_name_has_one_holder_until_that_is_gone() {
    let f = Fixture::new().await;
    let first = f.commit(&f.snapshot(Some("a"))).await;
    let error = f.catalog.commit_snapshot(&f.snapshot(Some("a:default"))).await.expect_err("taken");
    assert!(matches!(&error, CatalogError::NameTaken { holder, .. } if *holder == first.id), "{error}");
    assert_eq!(f.catalog.check_name(&f.team, "A").await.expect_err("taken").kind(), ErrorKind::Conflict);
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/a").await.expect("untouched"), first);
    f.commit(&f.snapshot(Some("a:other"))).await;
    f.commit(&f.snapshot(None)).await;
    f.commit(&f.snapshot(None)).await;

    f.catalog.delete_snapshot(&f.team, "default/a").await.expect("deleted");
    assert_eq!(f.catalog.check_name(&f.team, "default/A").await.expect("free").to_string(), "a:default");
    f.commit(&f.snapshot(Some("a"))).await;
    f.check().await;
}

#[tokio::test]
async fn an_expired_snapshot_is_not_there_and_its_name_is_free_whatever_the_clock_does() {
    let f = Fixture::new().await;
    let mut commit = f.snapshot(Some("a"));
    commit.row.expires_unix_ms = Some(START_MS + 1000);
    let old = f.commit(&commit).await;
    let occupant = f.sandbox("s1", old.id);
    f.create(&occupant).await;
    f.clock.advance_ms(999);
    assert!(f.catalog.get_snapshot(&f.team, "default/a").await.is_ok());
    f.clock.advance_ms(1);
    for reference in [old.id.to_string(), "default/a".into()] {
        assert_eq!(f.catalog.get_snapshot(&f.team, &reference).await.expect_err("expired").kind(), ErrorKind::NotFound);
        assert_eq!(
            f.catalog.delete_snapshot(&f.team, &reference).await.expect_err("expired").kind(),
            ErrorKind::NotFound
        );
        assert_eq!(f.catalog.resolve(&f.team, &reference).await.expect_err("expired").kind(), ErrorKind::NotFound);
    }
    let error = f.catalog.create_sandbox(&f.sandbox("s2", old.id)).await.expect_err("expired");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(
        f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 0, None).await.expect("lists").items.is_empty()
    );
    assert_eq!(f.catalog.manifest(&old.id).await.expect("its guests read on"), commit.manifest);

    let new = f.commit(&f.snapshot(Some("a"))).await;
    f.clock.set_unix_ms(START_MS);
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/a").await.expect("found").id, new.id);
    assert_eq!(f.catalog.get_snapshot(&f.team, &old.id.to_string()).await.expect("the clock went back").name, None);
    f.check().await;
    f.catalog.end_sandbox(&f.team, &occupant.id).await.expect("ended");
    f.catalog.delete_snapshot(&f.team, &old.id.to_string()).await.expect("deleted");
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/a").await.expect("still found").id, new.id);
    f.check().await;
}

#[tokio::test]
async fn an_occupied_snapshot_is_not_deleted() {
    let f = Fixture::new().await;
    let row = f.commit(&f.snapshot(Some("a"))).await;
    f.create(&f.sandbox("s1", row.id)).await;
    f.create(&f.sandbox("s2", row.id)).await;
    let error = f.catalog.delete(&f.team, "default/a").await.expect_err("occupied");
    assert!(matches!(&error, CatalogError::Occupied { count: 2, .. }), "{error}");
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/a").await.expect("untouched"), row);
    f.catalog.end_sandbox(&f.team, &sandbox_id("s1")).await.expect("ended");
    f.catalog.delete(&f.team, "default/a").await.expect_err("still occupied");
    f.catalog.end_sandbox(&f.team, &sandbox_id("s2")).await.expect("ended");
    assert_eq!(f.catalog.delete(&f.team, "default/a").await.expect("deleted"), Deleted::Snapshot(row.id));
    assert_eq!(f.catalog.delete(&f.team, &row.id.to_string()).await.expect_err("gone").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.manifest(&row.id).await.expect_err("gone").kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn another_teams_objects_do_not_exist() {
    let f = Fixture::new().await;
    let row = f.commit(&f.snapshot(Some("a"))).await;
    f.create(&f.sandbox("s1", row.id)).await;
    let other = TeamId::new("other").expect("an id");
    f.catalog.ensure_team(&other).await.expect("a team");
    for reference in [row.id.to_string(), "default/a".into()] {
        assert_eq!(f.catalog.get_snapshot(&other, &reference).await.expect_err("hidden").kind(), ErrorKind::NotFound);
        assert_eq!(f.catalog.delete(&other, &reference).await.expect_err("hidden").kind(), ErrorKind::NotFound);
        assert_eq!(f.catalog.resolve(&other, &reference).await.expect_err("hidden").kind(), ErrorKind::NotFound);
    }
    let stolen = sandbox(&other, START_MS, "s2", row.id);
    assert_eq!(f.catalog.create_sandbox(&stolen).await.expect_err("hidden").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.get_sandbox(&other, &sandbox_id("s1")).await.expect_err("hidden").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.end_sandbox(&other, &sandbox_id("s1")).await.expect_err("hidden").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.check_name(&other, "default/x").await.expect_err("not theirs").kind(), ErrorKind::Invalid);
    let same_name = snapshot(&other, START_MS, Some("a"));
    f.commit(&same_name).await;
    assert_eq!(f.catalog.get_snapshot(&other, "other/a").await.expect("their own").id, same_name.row.id);
    f.check().await;
}

#[tokio::test]
async fn uploads_are_pending_until_ready_and_ready_is_final() {
    let f = Fixture::new().await;
    let commit = f.snapshot(None);
    let row = f.commit(&commit).await;
    let pending = async || -> Vec<SnapshotId> {
        f.catalog.pending_uploads().await.expect("reads").into_iter().map(|upload| upload.row.id).collect()
    };
    assert_eq!(pending().await, [row.id]);
    for status in [RemoteStatus::InProgress, RemoteStatus::Failed] {
        assert_eq!(f.catalog.set_remote_status(&row.id, status).await.expect("set").remote_status, status);
        assert_eq!(pending().await, [row.id]);
        f.check().await;
    }
    assert!(!f.catalog.uploaded(&row.id, &Bytes::from_static(b"another manifest")).await.expect("answers"));
    assert_eq!(pending().await, [row.id]);
    assert!(f.catalog.uploaded(&row.id, &commit.manifest).await.expect("set"));
    let late = f.catalog.set_remote_status(&row.id, RemoteStatus::InProgress).await.expect("ignored");
    assert_eq!(late.remote_status, RemoteStatus::Ready);
    assert_eq!(pending().await, []);
    let totals = f.catalog.snapshot_totals().await.expect("reads");
    assert_eq!(totals, SnapshotTotals { snapshots: 1, logical_bytes: row.logical_bytes });
    f.catalog.delete_snapshot(&f.team, &row.id.to_string()).await.expect("deleted");
    let gone = f.catalog.uploaded(&row.id, &commit.manifest).await.expect_err("gone");
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn what_cannot_be_a_snapshot_is_refused() {
    let f = Fixture::new().await;
    let mut large = f.snapshot(None);
    large.manifest = Bytes::from(vec![0; MAX_MANIFEST_BYTES + 1]);
    let mut condemned = f.snapshot(None);
    condemned.row.condemned = true;
    let mut keyless = f.snapshot(None);
    keyless.row.idempotency = request("", "d");
    let mut long_key = f.snapshot(None);
    long_key.row.idempotency = request(&"k".repeat(256), "d");
    for commit in [large, condemned, keyless, long_key, internal(&f.team, START_MS)] {
        let error = f.catalog.commit_snapshot(&commit).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(state::check(f.kv.as_ref()).await, (0, 0));
}

#[tokio::test]
async fn the_same_request_makes_the_same_snapshot() {
    let f = Fixture::new().await;
    let mut first = f.snapshot(Some("a"));
    first.row.idempotency = request("key/1", "body");
    f.commit(&first).await;
    let asked = first.row.idempotency.clone().expect("set");
    assert_eq!(f.catalog.made_by(&f.team, &asked).await.expect("known"), Some(Made::Snapshot(first.row.id)));

    let mut again = f.snapshot(Some("a"));
    again.row.idempotency = request("key/1", "body");
    let outcome = f.catalog.commit_snapshot(&again).await.expect("replayed");
    assert_eq!(outcome, Committed::Replayed(first.row.clone()));
    let mut other = f.snapshot(Some("b"));
    other.row.idempotency = request("key/1", "other body");
    let error = f.catalog.commit_snapshot(&other).await.expect_err("another request");
    assert!(matches!(error, CatalogError::IdempotencyMismatch { .. }) && error.kind() == ErrorKind::Conflict);
    let mut as_sandbox = f.sandbox("s1", first.row.id);
    as_sandbox.idempotency = request("key/1", "body");
    assert_eq!(f.catalog.create_sandbox(&as_sandbox).await.expect_err("another kind").kind(), ErrorKind::Conflict);

    f.catalog.delete_snapshot(&f.team, "default/a").await.expect("deleted");
    let error = f.catalog.commit_snapshot(&again).await.expect_err("what it made is gone");
    assert!(matches!(error, CatalogError::IdempotencyGone { .. }), "{error}");
    f.check().await;

    f.clock.advance_ms(IDEMPOTENCY_MS);
    assert_eq!(f.catalog.made_by(&f.team, &asked).await.expect("forgotten"), None);
    f.commit(&again).await;
    f.check().await;
}

#[tokio::test]
async fn forgotten_requests_do_not_pile_up() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    let rows = async || f.catalog.scan(keys::under("idempotency/")).await.expect("reads").len();
    for i in 0..8 {
        let mut row = f.sandbox(&format!("s{i}"), source.id);
        row.idempotency = request(&format!("k{i}"), "d");
        f.create(&row).await;
    }
    assert_eq!(rows().await, 8);
    f.clock.advance_ms(IDEMPOTENCY_MS + 1);
    for i in 8..12 {
        let mut row = f.sandbox(&format!("s{i}"), source.id);
        row.idempotency = request(&format!("k{i}"), "d");
        f.create(&row).await;
        f.check().await;
    }
    assert_eq!(rows().await, 4, "only what is not over age");
}

#[tokio::test]
async fn what_a_create_names() {
    let f = Fixture::new().await;
    let named = f.commit(&f.snapshot(Some("base"))).await;
    let row = template(&f.team, START_MS, 1, Some("base"));
    f.catalog.create_template(&row).await.expect("created");
    let not_ready = f.catalog.resolve(&f.team, "base").await.expect_err("still building");
    assert!(matches!(not_ready, CatalogError::TemplateNotReady { .. }) && not_ready.kind() == ErrorKind::Conflict);
    let inside = internal(&f.team, START_MS);
    f.catalog.complete_template(&f.team, &row.id, &inside).await.expect("ready");

    let resolve = async |reference: &str| f.catalog.resolve(&f.team, reference).await.map_err(|error| error.kind());
    let by_alias = resolve("base").await.expect("the template");
    let expected = Resolved {
        snapshot_id: inside.row.id,
        template_id: row.id.to_string(),
        alias: "base".into(),
        is_snapshot: false,
        shape: SHAPE,
    };
    assert_eq!(by_alias, expected);
    assert_eq!(resolve(row.id.as_str()).await, Ok(expected));
    let by_name = resolve("default/base").await.expect("the snapshot");
    assert_eq!((by_name.snapshot_id, by_name.is_snapshot), (named.id, true));
    assert_eq!(by_name.template_id, named.id.to_string());
    assert_eq!(resolve(&named.id.to_string()).await, Ok(by_name));
    assert_eq!(resolve("default/none").await, Err(ErrorKind::NotFound), "never a template of that name");
    assert_eq!(resolve("other/base").await, Err(ErrorKind::NotFound));
    assert_eq!(resolve(&inside.row.id.to_string()).await, Err(ErrorKind::NotFound), "a template's own snapshot");
    for malformed in ["/base", "base/", "a/b/c", "default/Bad Name", "default/base:"] {
        assert_eq!(resolve(malformed).await, Err(ErrorKind::Invalid), "{malformed}");
    }
    for unknown in ["none", "base:default", "", "tpl-0000000000000009", "tpl-x", &"n".repeat(10_000)] {
        assert_eq!(resolve(unknown).await, Err(ErrorKind::NotFound), "{unknown}");
    }

    let uuid_alias = SnapshotId::random().to_string();
    let row = template(&f.team, START_MS, 2, Some(&uuid_alias));
    f.catalog.create_template(&row).await.expect("created");
    f.catalog.complete_template(&f.team, &row.id, &internal(&f.team, START_MS)).await.expect("ready");
    assert_eq!(resolve(&uuid_alias).await.expect("a UUID may be a template's name").template_id, row.id.to_string());
    assert_eq!(f.catalog.delete(&f.team, &uuid_alias).await.expect("deleted"), Deleted::Template(row.id));
    f.check().await;
}
