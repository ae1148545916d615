//! Everything at once: many clients on few names, snapshots and sandboxes, the clock moving, the store failing.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;

use super::*;
use crate::catalog::kv::{Compare, Entry, Key, KeyRange, KvError, Op, Order, TxnOutcome};

/// splitmix64: small, seeded, good enough to choose what happens next.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(sides).expect("small")).expect("small")
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.roll(from.len())].clone())
    }
}

/// What the clients share: what they know of, whether or not it still exists.
#[derive(Default)]
struct Known {
    snapshots: Vec<SnapshotId>,
    sandboxes: Vec<SandboxId>,
}

struct World {
    catalog: Arc<Catalog>,
    clock: Arc<ManualClock>,
    team: TeamId,
    known: Mutex<Known>,
    next: AtomicU64,
    /// Whether the store may fail, so that an outcome may be unknown.
    failing: bool,
}

impl World {
    fn expected<T>(&self, outcome: Result<T, CatalogError>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                let kind = error.kind();
                let fine = matches!(kind, ErrorKind::NotFound | ErrorKind::Conflict)
                    || (self.failing && matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown));
                assert!(fine, "{error}");
                None
            }
        }
    }

    /// Does one thing. Whoever creates a sandbox watches over its snapshot until it ends the sandbox itself.
    async fn step(&self, dice: &mut Dice) {
        let now = self.clock.now_unix_ms();
        let snapshot_id = dice.pick(&self.known.lock().snapshots);
        let sandbox_id = dice.pick(&self.known.lock().sandboxes);
        match dice.roll(11) {
            0 | 1 => {
                let name = ["a", "a:x", "b"][dice.roll(3)];
                let mut commit = snapshot(&self.team, now, (dice.roll(4) > 0).then_some(name));
                commit.row.expires_unix_ms =
                    (dice.roll(3) > 0).then(|| now + i64::try_from(dice.roll(30)).expect("small"));
                commit.packs = vec![pack(u8::try_from(dice.roll(5)).expect("small"))];
                if dice.roll(4) == 0 {
                    commit.row.idempotency = request(&dice.roll(40).to_string(), "d");
                }
                self.known.lock().snapshots.push(commit.row.id);
                self.expected(self.catalog.commit_snapshot(&commit).await);
            }
            2 => {
                if let Some(id) = snapshot_id {
                    self.expected(self.catalog.delete_snapshot(&self.team, &id.to_string()).await);
                }
            }
            3 | 4 => {
                let Some(source) = snapshot_id else { return };
                let id = format!("s{}", self.next.fetch_add(1, Ordering::Relaxed));
                let row = sandbox(&self.team, now, &id, source);
                if self.expected(self.catalog.create_sandbox(&row).await).is_some() {
                    assert!(self.exists(&source).await, "the snapshot went under a sandbox that was just made");
                    if dice.roll(3) > 0 {
                        self.known.lock().sandboxes.push(row.id);
                    } else {
                        tokio::task::yield_now().await;
                        assert!(self.exists(&source).await, "the snapshot went under a sandbox that is its own");
                        self.expected(self.catalog.end_sandbox(&self.team, &row.id).await);
                    }
                }
            }
            5 => {
                if let Some(id) = sandbox_id {
                    self.expected(self.catalog.end_sandbox(&self.team, &id).await);
                }
            }
            6 => {
                if let (Some(id), Some(to)) = (sandbox_id, snapshot_id) {
                    self.expected(self.catalog.begin_move(&self.team, &id, &to).await);
                }
            }
            7 => {
                if let Some(id) = sandbox_id {
                    self.expected(if dice.roll(2) == 0 {
                        self.catalog.finish_move(&self.team, &id).await
                    } else {
                        self.catalog.abort_move(&self.team, &id).await
                    });
                }
            }
            8 => {
                let id = self.next.fetch_add(1, Ordering::Relaxed);
                let row = template(&self.team, now, id, Some(["base", "other"][dice.roll(2)]));
                if self.expected(self.catalog.create_template(&row).await).is_some() {
                    let inside = internal(&self.team, now);
                    self.known.lock().snapshots.push(inside.row.id);
                    self.expected(self.catalog.complete_template(&self.team, &row.id, &inside).await);
                }
            }
            9 => {
                self.expected(self.catalog.delete_template(&self.team, ["base", "other"][dice.roll(2)]).await);
            }
            _ => {
                if let Some(id) = snapshot_id
                    && let Some(manifest) = self.expected(self.catalog.manifest(&id).await)
                {
                    self.expected(self.catalog.uploaded(&id, &manifest).await);
                }
                self.clock.advance_ms(i64::try_from(dice.roll(5)).expect("small") - 1);
            }
        }
    }

    async fn exists(&self, id: &SnapshotId) -> bool {
        self.failing || self.catalog.snapshot_row(id).await.expect("reads").is_some()
    }

    async fn end_all(&self, catalog: &Catalog) {
        for (team, id) in state::all_sandboxes(catalog).await {
            catalog.end_sandbox(&team, &id).await.expect("ends");
        }
        assert_eq!(catalog.occupancy_rows().await.expect("reads"), []);
        assert_eq!(state::condemned_unoccupied(catalog).await, []);
    }
}

fn world(f: &Fixture, catalog: Arc<Catalog>, failing: bool) -> Arc<World> {
    Arc::new(World {
        catalog,
        clock: Arc::clone(&f.clock),
        team: f.team.clone(),
        known: Mutex::default(),
        next: AtomicU64::new(0),
        failing,
    })
}

/// Many clients at once. The whole state is consistent whenever it is looked at, and what a kill leaves is, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_race_never_break_the_state() {
    let f = Fixture::new().await;
    let world = world(&f, Arc::clone(&f.catalog), false);
    let mut clients = tokio::task::JoinSet::new();
    for seed in 1..=12 {
        let world = Arc::clone(&world);
        clients.spawn(async move {
            let mut dice = Dice(seed);
            for _ in 0..120 {
                world.step(&mut dice).await;
            }
        });
    }
    // Look on while they race; the last look is after the last of them.
    let mut kills = 0;
    let mut looks = 0;
    while !clients.is_empty() {
        f.check().await;
        looks += 1;
        if kills < 3 && looks % 5 == 0 {
            kills += 1;
            let (killed, killed_kv) = f.after_a_kill().await;
            state::check(killed_kv.as_ref()).await;
            assert_eq!(state::condemned_unoccupied(&killed).await, [], "opening removes them");
        }
        while let Some(outcome) = clients.try_join_next() {
            outcome.expect("no client panics");
        }
        tokio::task::yield_now().await;
    }
    world.end_all(&f.catalog).await;
    f.check().await;
}

/// The store fails, before or after it did what it was asked; the process goes on as if started anew.
struct Failing {
    inner: Arc<dyn KeyValue>,
    dice: Mutex<Dice>,
}

#[async_trait]
impl KeyValue for Failing {
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError> {
        self.inner.get_many(keys).await
    }

    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError> {
        self.inner.range(range, limit, order).await
    }

    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError> {
        let fate = self.dice.lock().roll(8);
        if fate == 0 {
            return Err(KvError::Unavailable { action: "write", reason: "by the test's will".into() });
        }
        let outcome = self.inner.txn(compares, ops).await?;
        if fate == 1 {
            return Err(KvError::Unknown { action: "write", reason: "by the test's will".into() });
        }
        Ok(outcome)
    }
}

#[tokio::test]
async fn a_store_that_fails_at_any_step_leaves_a_consistent_state() {
    for seed in 1..=4 {
        let f = Fixture::new().await;
        let failing = Arc::new(Failing { inner: Arc::clone(&f.kv), dice: Mutex::new(Dice(seed)) });
        let open = async || Catalog::open(failing.clone(), f.clock.clone()).await;
        let mut catalog = open().await.expect("nothing to collect");
        let mut dice = Dice(seed << 32);
        let mut world = world(&f, Arc::clone(&catalog), true);
        for step in 0..250 {
            world.step(&mut dice).await;
            state::check(f.kv.as_ref()).await;
            if step % 50 == 49
                && let Ok(reopened) = open().await
            {
                assert_eq!(state::condemned_unoccupied(&reopened).await, [], "seed {seed}");
                catalog = Arc::clone(&reopened);
                let known = std::mem::take(&mut *world.known.lock());
                let next = world.next.load(Ordering::Relaxed).into();
                world = Arc::new(World {
                    catalog: reopened,
                    clock: Arc::clone(&f.clock),
                    team: f.team.clone(),
                    known: Mutex::new(known),
                    next,
                    failing: true,
                });
            }
        }
        drop(catalog);
        let healthy = Catalog::open(Arc::clone(&f.kv), f.clock.clone()).await.expect("opens");
        world.end_all(&healthy).await;
        f.check().await;
    }
}

/// The last sandbox ends while its template is deleted: whichever comes second removes the snapshot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_condemned_snapshot_goes_whoever_is_last() {
    let f = Fixture::new().await;
    for round in 0..40 {
        let row = template(&f.team, START_MS, round, None);
        f.catalog.create_template(&row).await.expect("created");
        let inside = internal(&f.team, START_MS);
        f.catalog.complete_template(&f.team, &row.id, &inside).await.expect("ready");
        let mut clients = tokio::task::JoinSet::new();
        for i in 0..3 {
            let id = format!("s{i}");
            f.create(&f.sandbox(&id, inside.row.id)).await;
            let (catalog, team) = (Arc::clone(&f.catalog), f.team.clone());
            clients.spawn(async move { catalog.end_sandbox(&team, &sandbox_id(&id)).await.map(|_| ()) });
        }
        let (catalog, team) = (Arc::clone(&f.catalog), f.team.clone());
        clients.spawn(async move { catalog.delete_template(&team, row.id.as_str()).await.map(|_| ()) });
        for outcome in clients.join_all().await {
            outcome.expect("done");
        }
        assert_eq!(f.catalog.snapshot_row(&inside.row.id).await.expect("reads"), None, "round {round}");
    }
    assert_eq!(state::check(f.kv.as_ref()).await, (0, 0));
}

/// A name that many want at once, again and again as its holders expire or are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_want_a_name_one_gets_it() {
    let f = Fixture::new().await;
    for round in 0..15 {
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let mut commit = f.snapshot(Some("wanted"));
            commit.row.expires_unix_ms = Some(f.clock.now_unix_ms() + 10);
            let catalog = Arc::clone(&f.catalog);
            clients.spawn(async move { catalog.commit_snapshot(&commit).await });
        }
        let outcomes = clients.join_all().await;
        let winners: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
        assert_eq!(winners.len(), 1, "round {round}");
        for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
            assert!(matches!(error, CatalogError::NameTaken { .. }), "{error}");
        }
        let holder = f.catalog.get_snapshot(&f.team, "default/wanted").await.expect("found");
        assert_eq!(winners[0].clone().into_inner(), holder);
        if round % 2 == 0 {
            f.catalog.delete_snapshot(&f.team, "default/wanted").await.expect("deleted");
        } else {
            f.clock.advance_ms(10);
        }
        f.check().await;
    }
}
