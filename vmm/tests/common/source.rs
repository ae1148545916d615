//! A source whose bytes everybody can compute.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use snapyard_vmm::{ChunkData, ChunkNo, Geometry, PAGE_SIZE, PageSource, SourceError};
use tokio::sync::watch;

pub const CHUNK: u64 = 64 * 1024;
pub const PAGES_PER_CHUNK: u64 = CHUNK / PAGE_SIZE;

/// Every seventh chunk is all zeros.
pub fn is_zero_chunk(page: u64) -> bool {
    (page / PAGES_PER_CHUNK) % 7 == 3
}

/// The bytes of a page of the image with this seed: unlike those of every other page and seed.
pub fn page_bytes(seed: u64, page: u64) -> Vec<u8> {
    if is_zero_chunk(page) {
        return vec![0; PAGE_SIZE as usize];
    }
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ page.wrapping_mul(0xD1B5_4A32_D192_ED03);
    let mut bytes = Vec::with_capacity(PAGE_SIZE as usize);
    for _ in 0..PAGE_SIZE / 8 {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes
}

/// The whole image with this seed.
pub fn image_bytes(seed: u64, size: u64) -> Vec<u8> {
    (0..size / PAGE_SIZE).flat_map(|page| page_bytes(seed, page)).collect()
}

#[derive(Default)]
struct State {
    reads: HashMap<u64, u32>,
    held: HashSet<u64>,
    lost: HashSet<u64>,
}

/// The image with a seed, which counts its reads and can hold chunks back.
pub struct TestSource {
    geometry: Geometry,
    seed: u64,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

impl TestSource {
    pub fn new(seed: u64, size: u64) -> Arc<Self> {
        let geometry = Geometry::new(size, CHUNK as u32).unwrap();
        Arc::new(Self { geometry, seed, state: Mutex::default(), changed: watch::Sender::new(()) })
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock());
        self.changed.send_replace(());
        result
    }

    /// From now on reads of this chunk wait.
    pub fn hold(&self, chunk: u64) {
        self.change(|state| state.held.insert(chunk));
    }

    /// Lets the waiting reads go on.
    pub fn release(&self, chunk: u64) {
        self.change(|state| state.held.remove(&chunk));
    }

    /// From now on this chunk is lost for good.
    pub fn lose(&self, chunk: u64) {
        self.change(|state| state.lost.insert(chunk));
    }

    /// How often each chunk was read.
    pub fn reads(&self) -> HashMap<u64, u32> {
        self.state.lock().reads.clone()
    }

    /// Waits until the chunk was asked for at least so many times.
    pub async fn asked(&self, chunk: u64, times: u32) {
        let mut changed = self.changed.subscribe();
        while self.state.lock().reads.get(&chunk).copied().unwrap_or(0) < times {
            changed.changed().await.unwrap();
        }
    }
}

#[async_trait]
impl PageSource for TestSource {
    fn size_bytes(&self) -> u64 {
        self.geometry.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        self.geometry.chunk_size()
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let mut changed = self.changed.subscribe();
        self.change(|state| *state.reads.entry(chunk.0).or_default() += 1);
        while self.state.lock().held.contains(&chunk.0) {
            changed.changed().await.map_err(SourceError::new)?;
        }
        if self.state.lock().lost.contains(&chunk.0) {
            return Err(SourceError::lost("the object is gone"));
        }
        let first = chunk.0 * PAGES_PER_CHUNK;
        if is_zero_chunk(first) {
            return Ok(ChunkData::Zero);
        }
        let pages = self.geometry.chunk_len(chunk) / PAGE_SIZE;
        let bytes: Vec<u8> = (first..first + pages).flat_map(|page| page_bytes(self.seed, page)).collect();
        Ok(ChunkData::Bytes(Bytes::from(bytes)))
    }
}
