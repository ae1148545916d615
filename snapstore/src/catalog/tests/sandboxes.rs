//! Sandboxes: creation, change, end, moves.

use super::*;

#[tokio::test]
async fn a_sandbox_lives_and_ends() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    let row = f.sandbox("s1", source.id);
    f.create(&row).await;
    assert_eq!(f.catalog.get_sandbox(&f.team, &row.id).await.expect("found"), row);
    assert_eq!(f.catalog.find_sandbox(&row.id).await.expect("reads"), Some(row.clone()));
    assert_eq!(f.catalog.occupancy_rows().await.expect("reads"), [(source.id, row.id.clone())]);
    let error = f.catalog.create_sandbox(&row).await.expect_err("the id is in use");
    assert!(matches!(error, CatalogError::SandboxExists { .. }));
    f.check().await;

    assert_eq!(f.catalog.end_sandbox(&f.team, &row.id).await.expect("ended"), row);
    assert_eq!(f.catalog.end_sandbox(&f.team, &row.id).await.expect_err("twice").kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.find_sandbox(&row.id).await.expect("reads"), None);
    assert_eq!(f.catalog.occupancy_rows().await.expect("reads"), []);
    f.create(&row).await;
    f.check().await;
}

#[tokio::test]
async fn a_sandbox_needs_a_snapshot() {
    let f = Fixture::new().await;
    let error = f.catalog.create_sandbox(&f.sandbox("s1", SnapshotId::random())).await.expect_err("no snapshot");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(state::check(f.kv.as_ref()).await, (0, 0));
}

#[tokio::test]
async fn changes_keep_what_must_not_change() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    let row = f.sandbox("s1", source.id);
    f.create(&row).await;
    let other_node = NodeId::new("node-2").expect("an id");
    let changed = f.catalog.update_sandbox(&f.team, &row.id, |row| {
        row.state = SandboxState::Snapshotting;
        row.ends_unix_ms = None;
        row.node_id = NodeId::new("node-2").expect("an id");
        Ok(())
    });
    assert_eq!(changed.await.expect("changed").state, SandboxState::Snapshotting);
    assert_eq!(f.catalog.sandboxes_of_node(&node()).await.expect("reads"), []);
    let there = f.catalog.sandboxes_of_node(&other_node).await.expect("reads");
    assert_eq!(there.iter().map(|row| &row.id).collect::<Vec<_>>(), [&row.id]);
    f.check().await;

    let refuse = f.catalog.update_sandbox(&f.team, &row.id, |_| Err(CatalogError::invalid("state", "busy")));
    assert_eq!(refuse.await.expect_err("the change's own error").to_string(), "state: busy");
    let move_away = f.catalog.update_sandbox(&f.team, &row.id, |row| {
        row.snapshot_id = SnapshotId::random();
        Ok(())
    });
    assert_eq!(move_away.await.expect_err("fixed").kind(), ErrorKind::Invalid);
    let gone = f.catalog.update_sandbox(&f.team, &sandbox_id("none"), |_| Ok(())).await;
    assert_eq!(gone.expect_err("unknown").kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn concurrent_changes_all_count() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    f.create(&f.sandbox("s1", source.id)).await;
    let mut clients = tokio::task::JoinSet::new();
    for i in 0..10 {
        let (catalog, team) = (Arc::clone(&f.catalog), f.team.clone());
        clients.spawn(async move {
            let id = sandbox_id("s1");
            let change = catalog.update_sandbox(&team, &id, move |row| {
                row.metadata.insert(i.to_string(), String::new());
                Ok(())
            });
            change.await.expect("changed");
        });
    }
    clients.join_all().await;
    assert_eq!(f.catalog.get_sandbox(&f.team, &sandbox_id("s1")).await.expect("found").metadata.len(), 10);
}

#[tokio::test]
async fn the_same_request_makes_the_same_sandbox() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    let mut first = f.sandbox("s1", source.id);
    first.idempotency = request("k", "d");
    f.create(&first).await;
    let mut again = f.sandbox("s2", source.id);
    again.idempotency = request("k", "d");
    let outcome = f.catalog.create_sandbox(&again).await.expect("replayed");
    assert_eq!(outcome, Committed::Replayed(first.clone()));
    assert_eq!(f.catalog.create_sandbox(&first).await.expect("replayed"), Committed::Replayed(first.clone()));
    again.idempotency = request("k", "other");
    assert_eq!(f.catalog.create_sandbox(&again).await.expect_err("mismatch").kind(), ErrorKind::Conflict);
    f.catalog.end_sandbox(&f.team, &first.id).await.expect("ended");
    let error = f.catalog.create_sandbox(&first).await.expect_err("what it made is gone");
    assert!(matches!(error, CatalogError::IdempotencyGone { .. }), "{error}");
    f.check().await;
}

/// Copies of one request in flight at once make one sandbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_a_request_in_flight_make_one_sandbox() {
    let f = Fixture::new().await;
    let source = f.commit(&f.snapshot(None)).await;
    let mut clients = tokio::task::JoinSet::new();
    for i in 0..16 {
        let mut row = f.sandbox(&format!("s{i}"), source.id);
        row.idempotency = request("k", "d");
        let catalog = Arc::clone(&f.catalog);
        clients.spawn(async move { catalog.create_sandbox(&row).await.expect("answered") });
    }
    let outcomes = clients.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, Committed::New(_))).count(), 1);
    let ids: std::collections::BTreeSet<_> = outcomes.into_iter().map(|outcome| outcome.into_inner().id).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(state::check(f.kv.as_ref()).await, (1, 1));
}

#[tokio::test]
async fn a_rollback_holds_both_until_it_ends() {
    let f = Fixture::new().await;
    let from = f.commit(&f.snapshot(None)).await;
    let to = f.commit(&f.snapshot(None)).await;
    let row = f.sandbox("s1", from.id);
    f.create(&row).await;
    let delete = async |id: SnapshotId| f.catalog.delete_snapshot(&f.team, &id.to_string()).await.map_err(|e| e.kind());

    for finish in [false, true] {
        let moving = f.catalog.begin_move(&f.team, &row.id, &to.id).await.expect("begun");
        assert_eq!((moving.snapshot_id, moving.moving_to), (from.id, Some(to.id)));
        f.check().await;
        let twice = f.catalog.begin_move(&f.team, &row.id, &from.id).await.expect_err("one at a time");
        assert!(matches!(twice, CatalogError::MoveInProgress { .. }));
        assert_eq!(delete(from.id).await, Err(ErrorKind::Conflict));
        assert_eq!(delete(to.id).await, Err(ErrorKind::Conflict));
        if !finish {
            assert_eq!(f.catalog.abort_move(&f.team, &row.id).await.expect("aborted"), row);
            assert_eq!(f.catalog.occupancy_rows().await.expect("reads"), [(from.id, row.id.clone())]);
        }
    }
    let moved = f.catalog.finish_move(&f.team, &row.id).await.expect("finished");
    assert_eq!((moved.snapshot_id, moved.moving_to), (to.id, None));
    let none = f.catalog.finish_move(&f.team, &row.id).await.expect_err("not moving");
    assert!(matches!(none, CatalogError::NoMove { .. }));
    f.check().await;
    assert_eq!(delete(from.id).await, Ok(from.id));
    assert_eq!(delete(to.id).await, Err(ErrorKind::Conflict));

    f.catalog.begin_move(&f.team, &row.id, &to.id).await.expect("to where it is");
    f.check().await;
    f.catalog.abort_move(&f.team, &row.id).await.expect("aborted");
    assert_eq!(delete(to.id).await, Err(ErrorKind::Conflict), "aborting must not release what it is of");
    f.catalog.begin_move(&f.team, &row.id, &to.id).await.expect("to where it is");
    f.catalog.finish_move(&f.team, &row.id).await.expect("finished");
    assert_eq!(delete(to.id).await, Err(ErrorKind::Conflict));
    let gone = f.catalog.begin_move(&f.team, &row.id, &from.id).await.expect_err("deleted");
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn a_sandbox_that_ends_in_a_rollback_releases_both() {
    let f = Fixture::new().await;
    let from = f.commit(&f.snapshot(None)).await;
    let to = f.commit(&f.snapshot(None)).await;
    let row = f.sandbox("s1", from.id);
    f.create(&row).await;
    f.catalog.begin_move(&f.team, &row.id, &to.id).await.expect("begun");

    let (killed, killed_kv) = f.after_a_kill().await;
    let left = killed.sandboxes_of_node(&node()).await.expect("reads");
    assert_eq!(left.iter().map(|row| row.moving_to).collect::<Vec<_>>(), [Some(to.id)]);
    killed.end_sandbox(&f.team, &row.id).await.expect("ended");
    assert_eq!(state::check(killed_kv.as_ref()).await, (2, 0));

    f.catalog.end_sandbox(&f.team, &row.id).await.expect("ended");
    assert_eq!(f.catalog.occupancy_rows().await.expect("reads"), []);
    f.check().await;
}
