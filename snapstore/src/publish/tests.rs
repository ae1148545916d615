//! Commits that are refused, lost, or late: what is written again, and what is kept.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::Manifest;
use crate::catalog::SnapshotRow;
use crate::catalog::kv::KvError;
use crate::ids::{NodeId, TeamId};
use crate::rewrite::RewriteError as Error;
use crate::tests::{KEY, Model, World, manifest, write_image};

fn row(manifest: &Manifest) -> SnapshotRow {
    SnapshotRow::new(
        manifest.snapshot_id,
        TeamId::new("default").expect("an id"),
        NodeId::new("node-1").expect("an id"),
        manifest.shape,
        0,
    )
}

fn unknown() -> CatalogError {
    KvError::Unknown { action: "write", reason: "the answer was lost".into() }.into()
}

/// What the catalog says to a commit.
type Answer = fn(&SnapshotCommit) -> Result<Outcome<()>, CatalogError>;

/// A store, and images that are published in it.
struct Fixture {
    store: std::sync::Arc<Store>,
    writer: Writer,
    _dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let clock = std::sync::Arc::new(crate::ManualClock::new(1000));
        let kv = std::sync::Arc::new(crate::catalog::memory::MemoryKv::default());
        let catalog = crate::catalog::Catalog::open(kv, clock).await.expect("opens");
        let node = NodeId::new("node-1").expect("an id");
        let writer = Writer::register(catalog, node, 1000).await.expect("registers");
        Self { store: World::new().node(dir.path()).await, writer, _dir: dir }
    }

    fn staged(&self) -> u64 {
        self.store.stats().packs_staged
    }

    /// Publishes an image of five chunks that begin with `seed`; `answers` are what the catalog says, in turn.
    async fn publish(&self, seed: u64, answers: &[Answer]) -> Result<(Manifest, u64), Error> {
        let sends = AtomicU32::new(0);
        let mut model = Model::new(5);
        (0..5).for_each(|chunk| model.fill(chunk, seed + chunk));
        let (model, sends) = (&model, &sends);
        let ingest = || async move {
            let ingest = self.store.begin(KEY, None).await?;
            let image = write_image(&ingest, model, None).await;
            let sealed = ingest.seal().await?;
            let manifest = manifest(image, crate::BlobRef::default(), None, &sealed);
            let commit = SnapshotCommit {
                row: row(&manifest),
                manifest: manifest.encode(),
                packs: manifest.packs.clone(),
                staged: std::collections::HashSet::new(),
                writer: None,
            };
            let new = sealed.chunks_new;
            Ok::<_, Error>(Attempt { commit, sealed, stored: (manifest, new) })
        };
        let commit = |commit: SnapshotCommit| async move {
            let send = sends.fetch_add(1, Ordering::SeqCst) as usize;
            answers[send.min(answers.len() - 1)](&commit)
        };
        Ok(publish(&self.store, &self.writer, ingest, commit).await?.0)
    }
}

fn refuse_all(commit: &SnapshotCommit) -> Result<Outcome<()>, CatalogError> {
    Err(CatalogError::PacksNotLive { packs: commit.packs.iter().map(|pack| pack.id).collect() })
}

#[tokio::test]
async fn a_pack_in_the_way_is_written_again_and_avoided_until_it_is_allowed() {
    let f = Fixture::new().await;
    let (first, _) = f.publish(1, &[|_| Ok(Outcome::Ours(()))]).await.expect("published");
    f.store.upload(&first.snapshot_id, &first).await.expect("uploaded");
    let (same, new) = f.publish(1, &[|_| Ok(Outcome::Ours(()))]).await.expect("published");
    assert_eq!((new, &same.packs), (0, &first.packs));

    let (again, new) = f.publish(1, &[refuse_all, |_| Ok(Outcome::Ours(()))]).await.expect("published");
    assert_eq!(new, 5);
    let old = first.packs[0].id;
    assert_eq!(f.store.avoided_packs(), [old].into());
    assert_eq!(f.store.staged_among(&again.packs).await.len(), 1);
    f.store.allow_packs(&[old].into());
    let (_, new) = f.publish(1, &[|_| Ok(Outcome::Ours(()))]).await.expect("published");
    assert_eq!(new, 0);
}

#[tokio::test]
async fn what_is_refused_for_good_leaves_nothing() {
    let f = Fixture::new().await;
    let taken =
        |_: &SnapshotCommit| Err(CatalogError::NameTaken { name: "a".into(), holder: crate::SnapshotId::random() });
    f.publish(1, &[taken]).await.expect_err("refused");
    assert_eq!(f.staged(), 0);
    f.publish(1, &[refuse_all]).await.expect_err("refused each time");
    assert_eq!(f.staged(), 0);
    f.publish(1, &[|_| Ok(Outcome::Other(()))]).await.expect("another copy was faster");
    assert_eq!(f.staged(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_may_have_happened_keeps_its_packs() {
    let f = Fixture::new().await;
    f.publish(1, &[|_| Err(unknown())]).await.expect_err("never known");
    assert_eq!(f.staged(), 1);
    // The first copy may still happen, whatever the second is told.
    let taken =
        |_: &SnapshotCommit| Err(CatalogError::NameTaken { name: "a".into(), holder: crate::SnapshotId::random() });
    f.publish(10, &[|_| Err(unknown()), taken]).await.expect_err("refused");
    assert_eq!(f.staged(), 2);
    let (_, new) =
        f.publish(20, &[|_| Err(unknown()), |_| Ok(Outcome::Ours(()))]).await.expect("found to have happened");
    assert_eq!((new, f.staged()), (5, 3));
}
