//! Recordings of what restores touched.

use super::*;

fn recording(first: u64) -> Recording {
    Recording { memory: (first..first + 5).collect(), disk: vec![first] }
}

#[tokio::test]
async fn a_few_are_kept_and_go_with_the_snapshot() {
    let f = Fixture::new().await;
    let row = f.commit(&f.snapshot(None)).await;
    assert_eq!(f.catalog.recordings(&row.id).await.expect("reads"), []);
    for number in 0..RECORDINGS as u64 + 2 {
        let count = f.catalog.add_recording(&row.id, recording(number)).await.expect("added");
        assert_eq!(count, RECORDINGS.min(number as usize + 1));
    }
    let kept: Vec<Recording> = (0..RECORDINGS as u64).map(recording).collect();
    assert_eq!(f.catalog.recordings(&row.id).await.expect("reads"), kept);
    f.check().await;

    f.catalog.delete_snapshot(&f.team, &row.id.to_string()).await.expect("deleted");
    assert_eq!(f.catalog.recordings(&row.id).await.expect("reads"), []);
    let error = f.catalog.add_recording(&row.id, recording(0)).await.expect_err("gone");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    f.check().await;
}

#[tokio::test]
async fn nodes_that_record_at_once_are_all_heard() {
    let f = Fixture::new().await;
    let row = f.commit(&f.snapshot(None)).await;
    let adding = (0..8).map(|number| f.catalog.add_recording(&row.id, recording(number)));
    for added in futures::future::join_all(adding).await {
        added.expect("added, or there were enough");
    }
    let mut kept = f.catalog.recordings(&row.id).await.expect("reads");
    kept.dedup();
    assert_eq!(kept.len(), RECORDINGS);
    f.check().await;
}

#[tokio::test]
async fn a_long_one_is_cut_and_fits() {
    let f = Fixture::new().await;
    let row = f.commit(&f.snapshot(None)).await;
    let far = 1 << 28;
    let long = Recording { memory: (far..far + 20_000).collect(), disk: (far..far + 20_000).collect() };
    for _ in 0..RECORDINGS {
        f.catalog.add_recording(&row.id, long.clone()).await.expect("fits");
    }
    let kept = f.catalog.recordings(&row.id).await.expect("reads");
    assert!(kept.iter().all(|recording| recording.memory.len() == 16 << 10 && recording.disk.is_empty()));
}
