//! Templates and their own snapshots.

use super::*;

#[tokio::test]
async fn a_template_becomes_ready_with_its_snapshot() {
    let f = Fixture::new().await;
    let row = template(&f.team, START_MS, 1, Some("base"));
    f.catalog.create_template(&row).await.expect("created");
    let failed = f.catalog.set_build_status(&f.team, &row.id, BuildStatus::Error, "no network").await.expect("set");
    assert_eq!((failed.build_status, failed.build_message.as_str()), (BuildStatus::Error, "no network"));
    let early = f.catalog.set_build_status(&f.team, &row.id, BuildStatus::Ready, "").await.expect_err("no snapshot");
    assert_eq!(early.kind(), ErrorKind::Invalid);

    let mut commit = internal(&f.team, START_MS);
    commit.row.shape.vcpus = 7;
    let ready = f.catalog.complete_template(&f.team, &row.id, &commit).await.expect("completed");
    assert_eq!((ready.build_status, ready.snapshot_id), (BuildStatus::Ready, Some(commit.row.id)));
    assert_eq!((ready.shape.vcpus, ready.build_message.as_str()), (7, ""));
    assert_eq!(f.catalog.complete_template(&f.team, &row.id, &commit).await.expect("again"), ready, "a retry");
    for reference in ["base", row.id.as_str(), " base "] {
        assert_eq!(f.catalog.get_template(&f.team, reference).await.expect("found"), ready);
    }
    let listed = f.catalog.list_snapshots(&f.team, &SnapshotFilter::default(), 0, None).await.expect("lists");
    assert_eq!(listed.items, [], "its snapshot is its own");
    let by_id = f.catalog.delete(&f.team, &commit.row.id.to_string()).await.expect_err("not to be had by id");
    assert_eq!(by_id.kind(), ErrorKind::NotFound);
    assert_eq!(f.catalog.pending_uploads().await.expect("reads").len(), 1, "but it is uploaded");
    f.check().await;
}

#[tokio::test]
async fn an_alias_is_unique_in_its_team() {
    let f = Fixture::new().await;
    f.catalog.create_template(&template(&f.team, START_MS, 1, Some("base"))).await.expect("created");
    let taken = f.catalog.create_template(&template(&f.team, START_MS, 2, Some("base"))).await.expect_err("taken");
    assert!(
        matches!(&taken, CatalogError::AliasTaken { holder, .. } if *holder == TemplateId::from_random(1)),
        "{taken}"
    );
    let same_id = f.catalog.create_template(&template(&f.team, START_MS, 1, None)).await.expect_err("exists");
    assert_eq!(same_id.kind(), ErrorKind::Conflict);
    let other = TeamId::new("other").expect("an id");
    f.catalog.create_template(&template(&other, START_MS, 3, Some("base"))).await.expect("another team's own");
    assert_eq!(f.catalog.get_template(&other, "base").await.expect("found").id, TemplateId::from_random(3));
    let hidden = f.catalog.get_template(&other, TemplateId::from_random(1).as_str()).await.expect_err("another team's");
    assert_eq!(hidden.kind(), ErrorKind::NotFound);
    for bad in ["", "a/b", "A", "tpl-0000000000000005", "ä", &"x".repeat(129)] {
        let refused = f.catalog.create_template(&template(&f.team, START_MS, 9, Some(bad))).await.expect_err(bad);
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{bad}");
    }
    f.catalog.delete_template(&f.team, "base").await.expect("deleted");
    f.catalog.create_template(&template(&f.team, START_MS, 2, Some("base"))).await.expect("free again");
    f.check().await;
}

#[tokio::test]
async fn deleting_a_template_leaves_its_sandboxes_and_their_snapshots() {
    let f = Fixture::new().await;
    let row = template(&f.team, START_MS, 1, Some("base"));
    f.catalog.create_template(&row).await.expect("created");
    let inside = internal(&f.team, START_MS);
    f.catalog.complete_template(&f.team, &row.id, &inside).await.expect("ready");
    f.create(&f.sandbox("s1", inside.row.id)).await;
    f.create(&f.sandbox("s2", inside.row.id)).await;
    let mut child = f.snapshot(Some("child"));
    child.row.parent = Some(inside.row.id);
    f.commit(&child).await;

    assert_eq!(f.catalog.delete(&f.team, "base").await.expect("deleted"), Deleted::Template(row.id.clone()));
    assert_eq!(f.catalog.delete(&f.team, "base").await.expect_err("twice").kind(), ErrorKind::NotFound);
    let late = f.catalog.create_sandbox(&f.sandbox("s3", inside.row.id)).await.expect_err("no longer usable");
    assert_eq!(late.kind(), ErrorKind::NotFound);
    assert!(f.catalog.manifest(&inside.row.id).await.is_ok(), "its guests read on");
    assert_eq!(f.catalog.get_snapshot(&f.team, "default/child").await.expect("untouched"), child.row);
    f.check().await;

    f.catalog.end_sandbox(&f.team, &sandbox_id("s1")).await.expect("ended");
    assert!(f.catalog.snapshot_row(&inside.row.id).await.expect("reads").is_some_and(|row| row.condemned));
    f.catalog.end_sandbox(&f.team, &sandbox_id("s2")).await.expect("ended");
    assert_eq!(f.catalog.snapshot_row(&inside.row.id).await.expect("reads"), None, "gone with the last");
    assert_eq!(state::check(f.kv.as_ref()).await, (1, 0));
}

#[tokio::test]
async fn a_rebuild_replaces_the_snapshot() {
    let f = Fixture::new().await;
    let row = template(&f.team, START_MS, 1, Some("base"));
    f.catalog.create_template(&row).await.expect("created");
    let (first, second, third) =
        (internal(&f.team, START_MS), internal(&f.team, START_MS), internal(&f.team, START_MS));
    f.catalog.complete_template(&f.team, &row.id, &first).await.expect("ready");
    f.create(&f.sandbox("s1", first.row.id)).await;
    f.catalog.complete_template(&f.team, &row.id, &second).await.expect("rebuilt");
    f.check().await;
    assert_eq!(f.catalog.resolve(&f.team, "base").await.expect("found").snapshot_id, second.row.id);
    assert!(f.catalog.snapshot_row(&first.row.id).await.expect("reads").is_some_and(|row| row.condemned));
    f.catalog.complete_template(&f.team, &row.id, &third).await.expect("rebuilt");
    assert_eq!(f.catalog.snapshot_row(&second.row.id).await.expect("reads"), None, "nothing occupied it");
    f.catalog.end_sandbox(&f.team, &sandbox_id("s1")).await.expect("ended");
    assert_eq!(f.catalog.snapshot_row(&first.row.id).await.expect("reads"), None);
    let not_internal = f.catalog.complete_template(&f.team, &row.id, &f.snapshot(None)).await.expect_err("refused");
    assert_eq!(not_internal.kind(), ErrorKind::Invalid);
    f.check().await;
}

#[tokio::test]
async fn templates_are_listed_newest_first() {
    let f = Fixture::new().await;
    for i in 0..205_u64 {
        let now = START_MS + i64::try_from(i).expect("small");
        f.catalog.create_template(&template(&f.team, now, i, None)).await.expect("created");
    }
    let listed = f.catalog.list_templates(&f.team).await.expect("lists");
    let expected: Vec<_> = (0..205).rev().map(TemplateId::from_random).collect();
    assert_eq!(listed.into_iter().map(|row| row.id).collect::<Vec<_>>(), expected);
    assert_eq!(f.catalog.list_templates(&TeamId::new("other").expect("an id")).await.expect("lists"), []);
}
