//! Pause and resume of sandboxes.

use super::*;

const KEPT_MS: i64 = 7 * 24 * 3600 * 1000;

/// What a pause of `sandbox` commits.
fn pause_of(f: &Fixture, sandbox: &SandboxRow) -> SnapshotCommit {
    let now = f.clock.now_unix_ms();
    let mut commit = internal(&f.team, now);
    commit.row.sandbox_id = Some(sandbox.id.clone());
    commit.row.expires_unix_ms = Some(now + KEPT_MS);
    commit
}

fn elsewhere() -> Place {
    Place {
        node_id: NodeId::new("node-2").expect("an id"),
        node_url: "http://127.0.0.2:1".to_owned(),
        gateway: "127.0.0.2:2".to_owned(),
    }
}

async fn running(f: &Fixture) -> SandboxRow {
    let source = f.commit(&f.snapshot(None)).await;
    let row = f.sandbox("s1", source.id);
    f.create(&row).await;
    row
}

#[tokio::test]
async fn paused_and_resumed_elsewhere_and_paused_again() {
    let f = Fixture::new().await;
    let row = running(&f).await;
    let first = pause_of(&f, &row);
    let paused = f.catalog.commit_pause(&first).await.expect("paused");
    assert_eq!((paused.state, paused.snapshot_id), (SandboxState::Paused, first.row.id));
    assert_eq!(paused.ends_unix_ms, first.row.expires_unix_ms);
    assert_eq!(f.catalog.commit_pause(&first).await.expect("the same again"), paused);
    assert_eq!(f.catalog.occupancy_rows().await.expect("reads"), [(first.row.id, row.id.clone())]);
    let listed = f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 0, None).await.expect("lists");
    assert!(listed.items.iter().all(|snapshot| snapshot.id != first.row.id), "nobody's to see");
    let error = f.catalog.get_snapshot(&f.team, &first.row.id.to_string()).await.expect_err("not by its id either");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    f.check().await;

    let resuming = f.catalog.begin_resume(&f.team, &row.id, &elsewhere()).await.expect("begins");
    assert_eq!((resuming.state, &resuming.node_id), (SandboxState::Resuming, &elsewhere().node_id));
    let error = f.catalog.begin_resume(&f.team, &row.id, &elsewhere()).await.expect_err("once");
    assert_eq!(error.kind(), ErrorKind::Conflict);
    f.check().await;
    let resumed = f.catalog.finish_resume(&f.team, &row.id, Some(5)).await.expect("resumed");
    assert_eq!((resumed.state, resumed.ends_unix_ms), (SandboxState::Running, Some(5)));
    f.check().await;

    let second = pause_of(&f, &row);
    f.catalog.commit_pause(&second).await.expect("paused again");
    assert_eq!(f.catalog.snapshot_row(&first.row.id).await.expect("reads"), None, "nobody needs the first any more");
    f.catalog.end_sandbox(&f.team, &row.id).await.expect("killed while it is paused");
    assert_eq!(f.catalog.snapshot_row(&second.row.id).await.expect("reads"), None, "nor what held it");
    f.check().await;
}

#[tokio::test]
async fn a_resume_that_fails_leaves_it_paused() {
    let f = Fixture::new().await;
    let row = running(&f).await;
    let error = f.catalog.begin_resume(&f.team, &row.id, &elsewhere()).await.expect_err("it runs");
    assert_eq!(error.to_string(), "sandbox s1 is running, not paused");
    let paused = f.catalog.commit_pause(&pause_of(&f, &row)).await.expect("paused");
    f.catalog.begin_resume(&f.team, &row.id, &elsewhere()).await.expect("begins");
    // Its time is over in the middle of that: it is not taken away under the restore.
    f.clock.advance_ms(KEPT_MS);
    f.catalog.expire(100).await.expect("expires");
    f.check().await;
    let back = f.catalog.abort_resume(&f.team, &row.id).await.expect("taken back");
    assert_eq!((back.state, back.snapshot_id), (SandboxState::Paused, paused.snapshot_id));
    assert_eq!(f.catalog.abort_resume(&f.team, &row.id).await.expect_err("once").kind(), ErrorKind::Conflict);
    f.check().await;
    // The next round finds it paused, with its time over.
    f.catalog.expire(100).await.expect("expires");
    assert_eq!(f.catalog.find_sandbox(&row.id).await.expect("reads"), None);
    assert_eq!(f.catalog.snapshot_row(&paused.snapshot_id).await.expect("reads"), None);
    f.check().await;
}

#[tokio::test]
async fn what_a_fork_starts_from_goes_with_the_last() {
    let f = Fixture::new().await;
    let row = running(&f).await;
    let hidden = pause_of(&f, &row);
    f.commit(&hidden).await;
    f.create(&f.sandbox("s2", hidden.row.id)).await;
    f.catalog.discard_hidden(&f.team, &hidden.row.id).await.expect("discarded");
    f.catalog.discard_hidden(&f.team, &hidden.row.id).await.expect("again");
    assert!(f.catalog.snapshot_row(&hidden.row.id).await.expect("reads").is_some(), "it is in use");
    let late = f.catalog.create_sandbox(&f.sandbox("s3", hidden.row.id)).await.expect_err("no new ones");
    assert_eq!(late.kind(), ErrorKind::NotFound);
    f.check().await;
    f.catalog.end_sandbox(&f.team, &sandbox_id("s2")).await.expect("ended");
    assert_eq!(f.catalog.snapshot_row(&hidden.row.id).await.expect("reads"), None);
    f.catalog.discard_hidden(&f.team, &hidden.row.id).await.expect("gone already");
    let listed = f.commit(&f.snapshot(None)).await;
    let error = f.catalog.discard_hidden(&f.team, &listed.id).await.expect_err("somebody sees it");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn what_cannot_be_a_pause_is_refused() {
    let f = Fixture::new().await;
    let row = running(&f).await;
    let good = pause_of(&f, &row);
    let mut listed = good.clone();
    listed.row.internal = false;
    let mut for_ever = good.clone();
    for_ever.row.expires_unix_ms = None;
    let mut of_none = good.clone();
    of_none.row.sandbox_id = None;
    for commit in [listed, for_ever, of_none] {
        assert_eq!(f.catalog.commit_pause(&commit).await.expect_err("refused").kind(), ErrorKind::Invalid);
    }
    let target = f.commit(&f.snapshot(None)).await;
    f.catalog.begin_move(&f.team, &row.id, &target.id).await.expect("moves");
    assert_eq!(f.catalog.commit_pause(&good).await.expect_err("moving").kind(), ErrorKind::Conflict);
    f.catalog.finish_move(&f.team, &row.id).await.expect("moved");
    f.catalog.commit_pause(&good).await.expect("paused");
    let again = pause_of(&f, &row);
    assert_eq!(f.catalog.commit_pause(&again).await.expect_err("paused").kind(), ErrorKind::Conflict);
    f.catalog.end_sandbox(&f.team, &row.id).await.expect("ended");
    assert_eq!(f.catalog.commit_pause(&again).await.expect_err("gone").kind(), ErrorKind::NotFound);
    f.check().await;
}
