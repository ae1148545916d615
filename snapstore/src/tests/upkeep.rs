//! A node with its catalog over time: packs are rewritten, collected, damaged, repaired.

use super::*;
use crate::blob::{manifest_key, pack_key};
use crate::catalog::memory::MemoryKv;
use crate::catalog::{Addition, Amended, Catalog, CatalogError, Removal, SnapshotCommit, SnapshotRow};
use crate::census::Census;
use crate::check::{CheckReport, check, repair};
use crate::gc::policy::Policy;
use crate::gc::{Collector, Settings};
use crate::ids::{NodeId, PackId, TeamId};
use crate::publish::Writer;
use crate::repack::{Repacked, repack};
use crate::rewrite::Rewriter;

const CHUNKS: u64 = 64;

struct Fixture {
    world: World,
    catalog: Arc<Catalog>,
    clock: Arc<ManualClock>,
    writer: Writer,
    node: NodeId,
    team: TeamId,
    key: DomainKey,
    store: Arc<Store>,
    dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let world = World::new();
        let dir = tempfile::tempdir().expect("dir");
        let clock = Arc::new(ManualClock::new(1_000_000));
        let catalog = Catalog::open(Arc::new(MemoryKv::new()), clock.clone()).await.expect("opens");
        let (node, team) = (NodeId::new("node-1").expect("an id"), TeamId::new("default").expect("an id"));
        let writer = Writer::register(Arc::clone(&catalog), node.clone(), 1 << 40).await.expect("registers");
        let key = catalog.ensure_team(&team).await.expect("a team").dedup_key;
        let store = world.node(dir.path()).await;
        Self { world, catalog, clock, writer, node, team, key, store, dir }
    }

    fn rewriter(&self) -> Rewriter<'_> {
        Rewriter { store: &self.store, catalog: &self.catalog, writer: &self.writer, node: &self.node }
    }

    async fn reader(&self, id: &SnapshotId) -> SnapshotReader {
        let manifest = Manifest::decode(&self.catalog.manifest(id).await.expect("there")).expect("decodes");
        let reader = self.store.open_snapshot(self.key, Arc::new(manifest)).await.expect("opens");
        reader.following(Arc::clone(&self.catalog))
    }

    /// Commits and uploads a snapshot of one image.
    async fn snapshot(&self, changes: &Model, parent: Option<&SnapshotId>) -> SnapshotId {
        let parent = match parent {
            Some(parent) => Some(self.reader(parent).await),
            None => None,
        };
        let inherited = match &parent {
            Some(parent) => Some(parent.current().await.expect("reads")),
            None => None,
        };
        let ingest = self.store.begin(self.key, inherited.as_ref()).await.expect("begin");
        let image = parent.as_ref().map(|parent| parent.image(&parent.manifest().memory));
        let image = write_image(&ingest, changes, image).await;
        let state = ingest.blob(Bytes::from_static(b"device state")).await.expect("blob");
        let sealed = ingest.seal().await.expect("seal");
        let manifest = manifest(image, state, None, &sealed);
        let id = manifest.snapshot_id;
        let row = SnapshotRow::new(id, self.team.clone(), self.node.clone(), manifest.shape, 0);
        let staged = self.store.staged_among(&manifest.packs).await;
        let (packs, writer) = (manifest.packs.clone(), Some(self.writer.lease()));
        let commit = SnapshotCommit { row, manifest: manifest.encode(), packs, staged, writer };
        self.catalog.commit_snapshot(&commit).await.expect("commits");
        self.upload().await;
        id
    }

    async fn upload(&self) {
        for pending in self.catalog.pending_uploads().await.expect("reads") {
            let encoded = self.catalog.manifest(&pending.row.id).await.expect("there");
            let manifest = Manifest::decode(&encoded).expect("decodes");
            self.store.upload(&pending.row.id, &manifest).await.expect("uploads");
            assert!(self.catalog.uploaded(&pending.row.id, &encoded).await.expect("notes"));
        }
    }

    async fn repack(&self) -> Repacked {
        repack(self.rewriter()).await.expect("repacks").expect("nobody else does")
    }

    /// Collections until what is of no use is gone.
    async fn collect(&self) {
        let policy = Policy { grace_ms: 1000, ..Policy::default() };
        let settings = Settings { policy, ..Settings::default() };
        for _ in 0..3 {
            let mut collector = Collector::new(Arc::clone(&self.catalog), Arc::clone(&self.world.blobs) as _, settings);
            let report = collector.collect().await.expect("collects");
            assert_eq!((report.named_while_leaving, report.unsettled), (0, 0));
            self.clock.advance_ms(2000);
        }
        let gone = self.catalog.gone_since(0).await.expect("reads");
        self.store.drop_gone(&gone).await.expect("drops");
    }

    async fn packs_of(&self, id: &SnapshotId) -> Vec<PackId> {
        let manifest = Manifest::decode(&self.catalog.manifest(id).await.expect("there")).expect("decodes");
        manifest.packs.iter().map(|pack| pack.id).collect()
    }

    fn packs_stored(&self) -> usize {
        self.world.memory.keys().iter().filter(|key| key.starts_with("packs/")).count()
    }

    async fn check(&self) -> CheckReport {
        check(&self.store, &self.catalog, &|_, _, _| {}).await.expect("checks")
    }

    async fn repair(&self) -> CheckReport {
        let report = repair(self.rewriter(), &|_, _, _| {}).await.expect("repairs");
        self.upload().await;
        report
    }

    /// The node's process starts again, with nothing cached.
    async fn restart_without_cache(mut self) -> Self {
        self.store.close().await;
        drop(self.store);
        wipe_cache(self.dir.path());
        self.store = self.world.node(self.dir.path()).await;
        self
    }
}

/// A whole image, and one that has replaced most of it.
fn generations() -> (Model, Model, Model) {
    let (mut first, mut changes) = (Model::new(CHUNKS), Model::new(CHUNKS));
    (0..CHUNKS).for_each(|chunk| first.fill(chunk, 1000 + chunk));
    (0..CHUNKS).filter(|chunk| chunk % 8 != 0).for_each(|chunk| changes.fill(chunk, 2000 + chunk));
    let mut second = first.clone();
    second.chunks.extend(changes.chunks.clone());
    (first, changes, second)
}

#[tokio::test]
async fn a_pack_that_is_mostly_dead_goes_and_a_reader_from_before_finds_its_chunks() {
    let f = Fixture::new().await;
    let (first, changes, second) = generations();
    let old = f.snapshot(&first, None).await;
    let kept = f.snapshot(&changes, Some(&old)).await;
    let before = Arc::clone(f.reader(&kept).await.manifest());
    let old_packs = f.packs_of(&old).await;
    assert_eq!(f.repack().await, Repacked::default(), "all of it is needed");
    f.catalog.delete_snapshot(&f.team, &old.to_string()).await.expect("deletes");

    let copied = f.repack().await;
    assert_eq!((copied.packs_copied, copied.packs_dropped, copied.snapshots_amended), (old_packs.len() as u64, 0, 1));
    let again = f.repack().await;
    assert_eq!((again.bytes_written, again.packs_dropped), (0, 0), "the copies are not uploaded yet");
    f.upload().await;
    let dropped = f.repack().await;
    assert_eq!((dropped.packs_copied, dropped.packs_dropped), (0, old_packs.len() as u64));
    f.upload().await;
    assert_eq!(f.repack().await, Repacked::default());
    f.collect().await;
    let named = f.packs_of(&kept).await;
    assert!(old_packs.iter().all(|pack| !named.contains(pack)), "{old_packs:?} {named:?}");
    assert_eq!(f.packs_stored(), named.len());

    let f = f.restart_without_cache().await;
    let report = f.check().await;
    assert!(report.is_clean(), "{report:?}");
    check_image(&f.reader(&kept).await.image(&before.memory), &second).await;
    // Opened with packs that are gone by now.
    let stale = f.store.open_snapshot(f.key, Arc::clone(&before)).await.expect("opens");
    let stale = stale.following(Arc::clone(&f.catalog));
    check_image(&stale.image(&before.memory), &second).await;
}

#[tokio::test]
async fn a_child_of_a_snapshot_whose_packs_went_inherits_the_new_ones() {
    let f = Fixture::new().await;
    let (first, changes, mut second) = generations();
    let old = f.snapshot(&first, None).await;
    let parent = f.snapshot(&changes, Some(&old)).await;
    let reader = f.reader(&parent).await;
    f.catalog.delete_snapshot(&f.team, &old.to_string()).await.expect("deletes");
    for _ in 0..2 {
        f.repack().await;
        f.upload().await;
    }
    f.collect().await;
    let manifest = reader.current().await.expect("asks");
    assert_ne!(manifest.packs, reader.manifest().packs);
    let mut changes = Model::new(CHUNKS);
    changes.fill(8, 77);
    second.fill(8, 77);
    let child = f.snapshot(&changes, Some(&parent)).await;
    let child = f.reader(&child).await;
    check_image(&child.image(&child.manifest().memory), &second).await;
}

#[tokio::test]
async fn damage_in_the_blob_store_is_named_and_repaired_from_the_cache() {
    for missing in [false, true] {
        let f = Fixture::new().await;
        let (first, changes, second) = generations();
        let parent = f.snapshot(&first, None).await;
        let child = f.snapshot(&changes, Some(&parent)).await;
        assert!(f.check().await.is_clean());
        let hit = f.packs_of(&parent).await[0];
        match missing {
            true => crate::blob::BlobStore::delete(&*f.world.memory, &pack_key(&hit)).await.expect("deleted"),
            false => assert!(f.world.memory.tamper(&pack_key(&hit), |bytes| bytes[5000] ^= 1)),
        }
        let report = f.check().await;
        assert_eq!(report.bad_packs.iter().map(|pack| pack.id).collect::<Vec<_>>(), [hit]);
        assert!(!report.missing.is_empty());
        let ids = |snapshots: &[SnapshotId]| snapshots.contains(&parent);
        assert!(report.missing.iter().all(|chunk| ids(&chunk.snapshots)), "{report:?}");

        let repaired = f.repair().await;
        assert_eq!((repaired.missing.len(), repaired.repaired.snapshots), (0, 2), "{repaired:?}");
        assert!(repaired.repaired.chunks as usize >= report.missing.len());
        assert!(!f.packs_of(&parent).await.contains(&hit) && !f.packs_of(&child).await.contains(&hit));
        f.collect().await;
        let f = f.restart_without_cache().await;
        let report = f.check().await;
        assert!(report.is_clean(), "{report:?}");
        for (id, model) in [(&parent, &first), (&child, &second)] {
            let reader = f.reader(id).await;
            check_image(&reader.image(&reader.manifest().memory), model).await;
        }
    }
}

#[tokio::test]
async fn what_is_good_nowhere_is_named_with_the_snapshots_that_it_hits() {
    let f = Fixture::new().await;
    let (first, changes, _) = generations();
    let parent = f.snapshot(&first, None).await;
    let child = f.snapshot(&changes, Some(&parent)).await;
    // Noise is stored as it is: this is one bit of chunk 0, which both need, and one of chunk 1, which the child replaced.
    let pack = f.packs_of(&parent).await[0];
    let damage = |bytes: &mut Vec<u8>| (bytes[100], bytes[5000]) = (!bytes[100], !bytes[5000]);
    assert!(f.world.memory.tamper(&pack_key(&pack), damage));
    let f = f.restart_without_cache().await;
    let repaired = f.repair().await;
    let mut hit: Vec<usize> = repaired.missing.iter().map(|chunk| chunk.snapshots.len()).collect();
    hit.sort_unstable();
    assert_eq!(hit, [1, 2], "{repaired:?}");
    assert!(f.packs_of(&parent).await.contains(&pack) && f.packs_of(&child).await.contains(&pack));
    assert!(!f.check().await.is_clean());
    assert!(repack(f.rewriter()).await.is_ok(), "the index is whole");
}

#[tokio::test]
async fn a_census_says_what_deleting_a_snapshot_frees() {
    let f = Fixture::new().await;
    let (first, changes, _) = generations();
    let parent = f.snapshot(&first, None).await;
    let child = f.snapshot(&changes, Some(&parent)).await;
    let census = Census::take(&f.store, &f.catalog, |_, _| {}).await.expect("taken");
    let of = |id: &SnapshotId| census.snapshots.iter().find(|usage| usage.id == *id).expect("counted").clone();
    // Memory and disk are the same image.
    assert_eq!((of(&parent).data_bytes, of(&child).data_bytes), (2 * CHUNKS * 4096, 2 * CHUNKS * 4096));
    let own = 56 * 4096..60 * 4096;
    assert!(own.contains(&of(&parent).exclusive_bytes), "{}", of(&parent).exclusive_bytes);
    assert!(own.contains(&of(&child).exclusive_bytes), "{}", of(&child).exclusive_bytes);
    assert!(census.packs.iter().all(|usage| usage.dead_chunks == 0));
    assert_eq!(census.stored_bytes, census.packs.iter().map(|usage| usage.pack.size_bytes).sum::<u64>());
}

#[tokio::test]
async fn amendments_keep_to_the_rules_of_commits() {
    let f = Fixture::new().await;
    let id = f.snapshot(&generations().0, None).await;
    let manifest = Manifest::decode(&f.catalog.manifest(&id).await.expect("there")).expect("decodes");
    let unknown = crate::PackRef { id: PackId([7; 32]), ..manifest.packs[0] };
    let addition = |staged: &[PackId]| Addition {
        packs: vec![unknown],
        staged: staged.iter().copied().collect(),
        replaces: [].into(),
        writer: f.writer.lease(),
        node: f.node.clone(),
    };
    let refused = f.catalog.add_packs(&id, &addition(&[])).await.expect_err("not durable anywhere");
    assert!(matches!(refused, CatalogError::PacksNotLive { .. }), "{refused}");
    let staged = addition(&[unknown.id]);
    assert_eq!(f.catalog.add_packs(&id, &staged).await.expect("adds"), Amended::Changed);
    assert_eq!(f.catalog.add_packs(&id, &staged).await.expect("a retry"), Amended::Unchanged);
    let first = manifest.packs[0].id;
    let removal = |given: PackId| Removal { packs: [first].into(), given: [given].into(), node: f.node.clone() };
    let early = f.catalog.drop_packs(&id, &removal(unknown.id)).await.expect("answers");
    assert_eq!(early, Amended::Unchanged, "what stands in is not uploaded");
    let encoded = f.catalog.manifest(&id).await.expect("there");
    assert!(f.catalog.uploaded(&id, &encoded).await.expect("noted"));
    let without = f.catalog.drop_packs(&id, &removal(PackId([8; 32]))).await.expect("answers");
    assert_eq!(without, Amended::Unchanged, "what stands in is not named");
    assert_eq!(f.catalog.drop_packs(&id, &removal(unknown.id)).await.expect("drops"), Amended::Changed);
    f.catalog.delete_snapshot(&f.team, &id.to_string()).await.expect("deletes");
    assert_eq!(f.catalog.add_packs(&id, &staged).await.expect("answers"), Amended::Gone);
    assert_eq!(f.catalog.pending_uploads().await.expect("reads"), []);
    assert!(f.world.memory.keys().contains(&manifest_key(&id)), "the collector's business");
}
