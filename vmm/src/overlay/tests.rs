//! The disk against a model: plain bytes, and a copy of them at each freeze.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use tokio::runtime::Runtime;

use super::*;

const CHUNK: u32 = 16 << 10;
const SIZE: u64 = 40 * BLOCK_SIZE;
/// The base is shorter than the disk, and its last chunk is shorter than a chunk.
const BASE: u64 = 30 * BLOCK_SIZE;

/// A base whose chunks can fail: so many times each, or for good.
struct TestBase {
    bytes: Vec<u8>,
    failures: Mutex<BTreeMap<ChunkNo, u32>>,
    lost: Mutex<BTreeSet<ChunkNo>>,
}

impl TestBase {
    fn new(seed: u8) -> Arc<Self> {
        let mut bytes: Vec<u8> = (0..BASE).map(|at| (at / 7) as u8 ^ (at / BLOCK_SIZE) as u8 ^ seed).collect();
        bytes[8 * BLOCK_SIZE as usize..12 * BLOCK_SIZE as usize].fill(0);
        Arc::new(Self { bytes, failures: Mutex::default(), lost: Mutex::default() })
    }

    fn image(&self) -> Vec<u8> {
        let mut image = self.bytes.clone();
        image.resize(SIZE as usize, 0);
        image
    }
}

#[async_trait]
impl PageSource for TestBase {
    fn size_bytes(&self) -> u64 {
        BASE
    }

    fn chunk_size(&self) -> u32 {
        CHUNK
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        if self.lost.lock().contains(&chunk) {
            return Err(SourceError::lost("lost"));
        }
        if let Some(left) = self.failures.lock().get_mut(&chunk).filter(|left| **left > 0) {
            *left -= 1;
            return Err(SourceError::new("not now"));
        }
        let begin = (chunk.0 * u64::from(CHUNK)) as usize;
        let bytes = &self.bytes[begin..(begin + CHUNK as usize).min(self.bytes.len())];
        let zeros = bytes.iter().all(|byte| *byte == 0);
        Ok(if zeros { ChunkData::Zero } else { ChunkData::Bytes(Bytes::copy_from_slice(bytes)) })
    }
}

fn policy() -> FillPolicy {
    FillPolicy {
        deadline: Duration::from_secs(600),
        first_backoff: Duration::from_micros(1),
        max_backoff: Duration::from_micros(1),
    }
}

fn disk(directory: &tempfile::TempDir) -> Arc<Overlay> {
    Overlay::new(directory.path().to_owned(), SIZE, policy(), Handle::current()).unwrap()
}

async fn contents(source: &dyn PageSource) -> Vec<u8> {
    let geometry = Geometry::of(source).unwrap();
    let mut bytes = Vec::new();
    for chunk in 0..geometry.chunks() {
        match source.read(ChunkNo(chunk)).await.unwrap() {
            ChunkData::Zero => bytes.resize(bytes.len() + geometry.chunk_len(ChunkNo(chunk)) as usize, 0),
            ChunkData::Bytes(data) => bytes.extend_from_slice(&data),
        }
    }
    bytes
}

#[derive(Debug, Clone)]
enum Step {
    Write { offset: u64, len: u64, byte: u8 },
    Zeros { offset: u64, len: u64 },
    Trim { offset: u64, len: u64 },
    Read { offset: u64, len: u64 },
    FailOnce { chunk: u64 },
    Freeze,
    Check { which: usize },
    Forget { which: usize },
    WaitForMerge,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let aligned = (0..SIZE / BLOCK_SIZE).prop_flat_map(|first| {
        (Just(first * BLOCK_SIZE), (1..=SIZE / BLOCK_SIZE - first).prop_map(|count| count.min(9) * BLOCK_SIZE))
    });
    let odd = (0..SIZE).prop_flat_map(|offset| (Just(offset), 1..=(SIZE - offset).min(20_000)));
    prop_oneof![aligned, odd]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (range(), any::<u8>()).prop_map(|((offset, len), byte)| Step::Write { offset, len, byte }),
        2 => range().prop_map(|(offset, len)| Step::Zeros { offset, len }),
        2 => range().prop_map(|(offset, len)| Step::Trim { offset, len }),
        4 => range().prop_map(|(offset, len)| Step::Read { offset, len }),
        1 => (0..BASE.div_ceil(u64::from(CHUNK))).prop_map(|chunk| Step::FailOnce { chunk }),
        3 => Just(Step::Freeze),
        3 => any::<usize>().prop_map(|which| Step::Check { which }),
        3 => any::<usize>().prop_map(|which| Step::Forget { which }),
        1 => Just(Step::WaitForMerge),
    ]
}

async fn follow(steps: Vec<Step>) {
    let directory = tempfile::tempdir().unwrap();
    let base = TestBase::new(0x5a);
    let overlay = disk(&directory);
    overlay.attach(base.clone()).unwrap();
    let mut model = base.image();
    let mut frozen: Vec<(FrozenDisk, Vec<u8>)> = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        match step {
            Step::Write { offset, len, byte } => {
                let bytes: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
                model[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
                overlay.write(offset, bytes.into()).await.unwrap();
            }
            Step::Zeros { offset, len } => {
                model[offset as usize..(offset + len) as usize].fill(0);
                overlay.write_zeros(offset, len).await.unwrap();
            }
            Step::Trim { offset, len } => {
                let blocks = whole_blocks(offset, len);
                model[(blocks.start * BLOCK_SIZE) as usize..(blocks.end * BLOCK_SIZE) as usize].fill(0);
                overlay.trim(offset, len).await.unwrap();
            }
            Step::Read { offset, len } => {
                let found = overlay.read(offset, len).await.unwrap();
                assert!(found == model[offset as usize..(offset + len) as usize], "step {number}: read");
            }
            Step::FailOnce { chunk } => {
                base.failures.lock().insert(ChunkNo(chunk), 2);
            }
            Step::Freeze => frozen.push((overlay.freeze().await.unwrap(), model.clone())),
            Step::Check { which } if !frozen.is_empty() => {
                let (disk, expected) = &frozen[which % frozen.len()];
                assert!(contents(disk).await == *expected, "step {number}: a frozen disk changed");
            }
            Step::Forget { which } if !frozen.is_empty() => {
                frozen.remove(which % frozen.len());
            }
            Step::WaitForMerge => overlay.merged().await,
            Step::Check { .. } | Step::Forget { .. } => {}
        }
    }
    assert!(overlay.read(0, SIZE).await.unwrap() == model, "the disk at the end");
    for (disk, expected) in &frozen {
        assert!(contents(disk).await == *expected, "a frozen disk at the end");
        let dirty: BTreeSet<ChunkNo> = disk.dirty_chunks().into_iter().collect();
        let image = base.image();
        for (chunk, (now, before)) in expected.chunks(CHUNK as usize).zip(image.chunks(CHUNK as usize)).enumerate() {
            assert!(now == before || dirty.contains(&ChunkNo(chunk as u64)), "chunk {chunk} changed and is not dirty");
        }
    }
    frozen.clear();
    overlay.merged().await;
    assert!(overlay.layer_count() <= 3, "{} layers though nobody needs them", overlay.layer_count());
    assert!(overlay.read(0, SIZE).await.unwrap() == model, "the disk after the last merge");
    overlay.close().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_disk_and_its_frozen_states_equal_a_model(steps in prop::collection::vec(step(), 1..60)) {
        Runtime::new().unwrap().block_on(follow(steps));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_is_lost_is_an_error_and_never_zeros() {
    let directory = tempfile::tempdir().unwrap();
    let base = TestBase::new(1);
    let overlay = disk(&directory);
    overlay.attach(base.clone()).unwrap();
    base.lost.lock().insert(ChunkNo(1));
    let offset = u64::from(CHUNK);
    let is_lost = |error: &DiskError| matches!(error, DiskError::Base { chunk: ChunkNo(1), .. });
    assert!(is_lost(&overlay.read(offset, 4096).await.unwrap_err()));
    assert!(is_lost(&overlay.write(offset + 1, Bytes::from_static(b"x")).await.unwrap_err()), "the rest of the block");
    // Whole blocks need nothing of the base.
    overlay.write(offset, vec![7; 4096].into()).await.unwrap();
    assert_eq!(overlay.read(offset, 4096).await.unwrap(), vec![7; 4096]);
    let frozen = overlay.freeze().await.unwrap();
    let error = frozen.read(ChunkNo(1)).await.unwrap_err();
    assert!(error.is_lost(), "{error}");
    base.lost.lock().clear();
    assert_eq!(overlay.read(offset + 4096, 4096).await.unwrap(), base.image()[offset as usize + 4096..][..4096]);
}

#[tokio::test(start_paused = true)]
async fn a_chunk_that_stays_away_is_given_up_at_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let base = TestBase::new(1);
    base.failures.lock().insert(ChunkNo(0), u32::MAX);
    let policy = FillPolicy { first_backoff: Duration::from_secs(1), max_backoff: Duration::from_secs(60), ..policy() };
    let overlay = Overlay::new(directory.path().to_owned(), SIZE, policy, Handle::current()).unwrap();
    overlay.attach(base).unwrap();
    let begun = Instant::now();
    let error = overlay.read(0, 512).await.unwrap_err();
    assert!(matches!(error, DiskError::Base { chunk: ChunkNo(0), .. }), "{error}");
    assert!(begun.elapsed() <= policy.deadline, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_for_a_base_that_comes_later() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    let reading = tokio::spawn({
        let overlay = Arc::clone(&overlay);
        async move { overlay.read(0, 4096).await }
    });
    overlay.write(4096, vec![9; 4096].into()).await.unwrap();
    assert_eq!(overlay.read(4096, 4096).await.unwrap(), vec![9; 4096], "what was written needs no base");
    assert!(!reading.is_finished());
    let base = TestBase::new(3);
    overlay.attach(base.clone()).unwrap();
    assert_eq!(reading.await.unwrap().unwrap(), base.image()[..4096]);
    assert!(matches!(overlay.attach(base), Err(DiskError::Attach { .. })), "a disk has one base");
    assert_eq!(overlay.touched(), [ChunkNo(0)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_one_block_can_be_written_side_by_side() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(TestBase::new(3)).unwrap();
    let sectors: Vec<_> = (0..8u8)
        .map(|sector| {
            let overlay = Arc::clone(&overlay);
            tokio::spawn(async move { overlay.write(u64::from(sector) * 512, vec![sector; 512].into()).await })
        })
        .collect();
    for sector in sectors {
        sector.await.unwrap().unwrap();
    }
    let expected: Vec<u8> = (0..8u8).flat_map(|sector| vec![sector; 512]).collect();
    assert_eq!(overlay.read(0, 4096).await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_beyond_the_end_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(TestBase::new(3)).unwrap();
    let refused = |result: Result<(), DiskError>| matches!(result, Err(DiskError::OutOfRange { .. }));
    assert!(refused(overlay.read(SIZE - 1, 2).await.map(drop)));
    assert!(refused(overlay.read(u64::MAX, 2).await.map(drop)));
    assert!(refused(overlay.write(SIZE, vec![1].into()).await));
    assert!(refused(overlay.trim(SIZE - 4096, 8192).await));
    assert!(refused(overlay.write_zeros(u64::MAX - 1, 4).await));
    assert_eq!(overlay.read(SIZE, 0).await.unwrap(), [0u8; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_merged_only_while_nobody_pins_them() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(TestBase::new(3)).unwrap();
    let mut kept = Vec::new();
    for round in 0..6u8 {
        overlay.write(u64::from(round) * 4096, vec![round + 1; 8192].into()).await.unwrap();
        kept.push(overlay.freeze().await.unwrap());
    }
    overlay.merged().await;
    assert_eq!(overlay.layer_count(), 7, "each is pinned");
    let unchanged = overlay.freeze().await.unwrap();
    assert_eq!(overlay.layer_count(), 7, "nothing was written: no new layer");
    drop(unchanged);
    let expected = contents(&kept[5]).await;
    kept.clear();
    overlay.merged().await;
    assert_eq!(overlay.layer_count(), 3);
    assert_eq!(contents(&overlay.freeze().await.unwrap()).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_have_no_names() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(TestBase::new(3)).unwrap();
    overlay.write(0, vec![1; 4096].into()).await.unwrap();
    let _frozen = overlay.freeze().await.unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
