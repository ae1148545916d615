//! A seeded simulation: two nodes, the catalog and the object store, and an adversary between them.
//!
//! Everything of ours is real: catalog, ingest, publication, upload, reading, retention, collector, repacking, each node
//! with its own cache (RocksDB) and staging directory. Simulated are time, the order of events, the engine below the catalog
//! and the object store. They lose answers, apply writes long after they were given up, refuse, stall, damage what they
//! deliver, and list what is gone and not what is there; clocks are skewed and jump; nodes are killed at random points and
//! start again, sometimes without their cache.
//!
//! One thread and virtual time: what happens depends on the seed alone. After every transaction and every DELETE the judge
//! looks at the whole ([`World::judge`]): what a snapshot names is live and somewhere, and what was acknowledged is there.
//! Whatever is read is compared. In the end, when all is calm, everything can be read, and nothing is left that no snapshot
//! needs.
//!
//! `SNAPYARD_SEEDS=n` changes how many seeds there are, `SNAPYARD_SEED=n` runs one.

mod node;
mod world;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use self::node::{GRACE_MS, Node};
use self::world::World;
use crate::blob::pack_key;
use crate::cache::{CacheLimits, ChunkCache};
use crate::catalog::decoded_pack_for_tests;
use crate::catalog::kv::KeyRange;
use crate::manifest::Manifest;
use crate::mutant::{self, Mutant};

const NODES: usize = 2;

/// Caches are used for so many seeds: to open one takes longer than most of a run.
const SEEDS_PER_CACHE: u64 = 50;

/// Kills of a node in one run.
const LIVES: u64 = 2;

fn caches(dir: &Path) -> Vec<Arc<ChunkCache>> {
    let limits = CacheLimits { disk_bytes: 1 << 30, block_cache_bytes: 1 << 20, write_buffer_bytes: 128 << 20 };
    let open = |number| Arc::new(ChunkCache::open(&dir.join(format!("cache-{number}")), limits).expect("opens"));
    (0..NODES).map(open).collect()
}

async fn booted(world: &Arc<World>, number: usize, dir: &Path, cache: &Arc<ChunkCache>) -> Arc<Node> {
    loop {
        match Node::boot(world, number, dir, cache).await {
            Ok(node) => return Arc::new(node),
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

/// The lives of one node.
async fn lives(world: &Arc<World>, number: usize, dir: &Path, cache: &Arc<ChunkCache>) {
    for _ in 0..LIVES {
        let life = async { booted(world, number, dir, cache).await.live().await };
        let span = Duration::from_millis(500 + world.roll(4_000));
        let _killed = tokio::time::timeout(span, life).await;
        // Tasks of the dead process run out; a request that is on its way does not.
        sleep(Duration::from_millis(100)).await;
        if world.roll(3) == 0 {
            cache.registered().iter().for_each(|pack| cache.forget_pack(pack));
        }
        if world.roll(2) == 0 {
            world.jump_ms(i64::try_from(world.roll(2 * GRACE_MS.unsigned_abs())).expect("small"));
        }
    }
}

/// All is calm: what has to be done is done, and then nothing is left to do.
async fn settle(world: &Arc<World>, dirs: &[PathBuf], caches: &[Arc<ChunkCache>]) {
    sleep(Duration::from_secs(30)).await; // the last late requests arrive
    world.calm.store(true, Ordering::Relaxed);
    let mut nodes = Vec::new();
    for (number, dir) in dirs.iter().enumerate() {
        nodes.push(booted(world, number, dir, &caches[number]).await);
    }
    for round in 0..5 {
        for node in &nodes {
            node.tidy_up().await;
            node.upload().await;
            if round < 2 {
                node.repack().await;
                node.upload().await;
            }
            node.collect().await;
        }
        world.jump_ms(2 * GRACE_MS);
    }
    for node in &nodes {
        node.collect().await;
        node.read_all().await;
    }
    let mut named = HashSet::new();
    for entry in world.kv.entries(&KeyRange::prefix(b"manifest/")) {
        let manifest = Manifest::decode(&entry.value).expect("decodes");
        named.extend(manifest.packs.iter().map(|pack| pack_key(&pack.id)));
    }
    let stored: HashSet<String> = world.blobs.keys().into_iter().filter(|key| key.starts_with("packs/")).collect();
    if stored != named {
        let (more, less) = (stored.difference(&named).count(), named.difference(&stored).count());
        world.fail(format!("in the end {more} packs are stored that nobody needs, and {less} are missing"));
    }
    for pack in nodes.iter().flat_map(|node| node.store.staged_packs()) {
        let row = world.kv.entry(format!("pack/{pack}").as_bytes()).map(|row| decoded_pack_for_tests(&row).state);
        world.fail(format!("in the end {pack} is staged still, and is {row:?}"));
    }
}

/// One run. The first broken invariant, if any, and a hash of what happened.
fn run(seed: u64, scratch: &Path, caches: &[Arc<ChunkCache>]) -> (Option<String>, blake3::Hash) {
    crate::blocking::inline::turn_on();
    crate::random::seeded::start(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let outcome = runtime.block_on(async {
        let dirs: Vec<PathBuf> = (0..NODES).map(|number| scratch.join(format!("{seed}-{number}"))).collect();
        dirs.iter().for_each(|dir| std::fs::create_dir_all(dir).expect("creates"));
        let world = World::new(seed, dirs.iter().map(|dir| dir.join("staging")).collect());
        let all = dirs.iter().enumerate().map(|(number, dir)| lives(&world, number, dir, &caches[number]));
        futures::future::join_all(all).await;
        settle(&world, &dirs, caches).await;
        dirs.iter().for_each(|dir| std::fs::remove_dir_all(dir).expect("removes"));
        let broken = world.broken.lock().take();
        let trace = world.trace.lock().finalize();
        (broken, trace)
    });
    drop(runtime);
    outcome
}

/// Runs seeds on every core until one fails. Answers it.
fn hunt(seeds: std::ops::Range<u64>, mutant: Option<Mutant>) -> Option<(u64, String)> {
    let next = AtomicU64::new(seeds.start);
    let found = parking_lot::Mutex::new(None);
    let hunter = || {
        mutant::set(mutant);
        let scratch = scratch();
        // RocksDB allocates more than it writes, which costs in memory and is free on a disk.
        let on_disk = tempfile::tempdir().expect("a directory");
        let mut opened = None;
        let mut runs = 0;
        while found.lock().is_none() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            if runs % SEEDS_PER_CACHE == 0 {
                drop(opened.take());
                opened = Some(caches(&on_disk.path().join(format!("caches-{runs}"))));
            }
            runs += 1;
            let caches = opened.as_deref().expect("opened above");
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, scratch.path(), caches)));
            let broken = match outcome {
                Ok((broken, _)) => broken,
                Err(_) => Some("a panic, see above".to_owned()),
            };
            if let Some(broken) = broken {
                found.lock().get_or_insert((seed, broken));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, std::num::NonZero::get) {
            scope.spawn(hunter);
        }
    });
    found.into_inner()
}

/// In memory, where there is room: nothing here is about surviving a loss of power.
fn scratch() -> tempfile::TempDir {
    match Path::new("/dev/shm") {
        shm if shm.is_dir() => tempfile::tempdir_in(shm),
        _ => tempfile::tempdir(),
    }
    .expect("a directory")
}

fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect(variable))
}

#[test]
fn no_seed_loses_or_corrupts_anything() {
    let seeds = match number_from("SNAPYARD_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number_from("SNAPYARD_SEEDS").unwrap_or(10_000),
    };
    if let Some((seed, broken)) = hunt(seeds, None) {
        panic!("seed {seed}: {broken}\nagain: SNAPYARD_SEED={seed} cargo nextest run -p snapyard-snapstore no_seed");
    }
}

#[test]
fn a_seed_says_everything() {
    let scratch = scratch();
    for seed in 0..20 {
        let traces = [1, 2].map(|turn| {
            let caches = caches(&scratch.path().join(format!("caches-{seed}-{turn}")));
            run(seed, scratch.path(), &caches).1
        });
        assert_eq!(traces[0], traces[1], "seed {seed}");
    }
}

/// A simulation that cannot fail shows nothing: without one of the safeguards it must.
#[test]
fn without_a_safeguard_some_seed_fails() {
    for mutant in [Mutant::CommitAnyPack, Mutant::OneMark, Mutant::Unverified] {
        let (seed, broken) = hunt(0..3_000, Some(mutant)).unwrap_or_else(|| panic!("{mutant:?} goes unnoticed"));
        eprintln!("{mutant:?}: seed {seed}: {broken}");
    }
}
