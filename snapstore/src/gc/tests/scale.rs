//! A mark of a million packs: run it by hand, and look at the time that it prints.

use super::*;
use crate::gc::mark::Mark;

#[tokio::test]
#[ignore = "minutes of preparation; `--run-ignored only` prints what a mark takes"]
async fn a_million_packs_and_ten_thousand_snapshots() {
    const SNAPSHOTS: u64 = 10_000;
    const PACKS_EACH: u64 = 100;
    let world = World::new().await;
    for snapshot in 0..SNAPSHOTS {
        let packs: Vec<PackRef> = (0..PACKS_EACH).map(|n| pack(snapshot * PACKS_EACH + n)).collect();
        world.catalog.commit_snapshot(&world.commit(&packs)).await.expect("commits");
    }
    let started = std::time::Instant::now();
    let mark = Mark::read(&world.catalog).await.expect("marks");
    eprintln!("marked {} packs of {} snapshots in {:?}", mark.packs.len(), mark.snapshots, started.elapsed());
    assert_eq!((mark.packs.len() as u64, mark.snapshots), (SNAPSHOTS * PACKS_EACH, SNAPSHOTS));
    assert!(mark.used.iter().all(|used| *used));
}
