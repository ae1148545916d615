//! The images of a benchmark: four directories with a memory and a disk each, and a recorded working set.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

/// What the store named an image when it was exported, to tell which image a recorded read was of.
#[derive(Serialize, Deserialize)]
pub struct Names {
    /// Root of the memory's index, as hexadecimal text.
    pub memory: String,
    /// Root of the disk's index.
    pub disk: String,
    /// Bytes per chunk of both.
    pub chunk_size: u64,
}

/// One read of a restore.
#[derive(Deserialize)]
struct Read {
    image: String,
    chunk: u64,
}

/// A captured guest.
pub struct Snapshot {
    /// Guest memory.
    pub memory: Mmap,
    /// Its disk.
    pub disk: Mmap,
}

impl Snapshot {
    /// Both images, memory first.
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.memory, &self.disk]
    }
}

/// A range of an image that a restore wants.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// 0 memory, 1 disk.
    pub part: usize,
    /// First byte.
    pub start: u64,
    /// First byte behind.
    pub end: u64,
}

/// What was exported.
pub struct Images {
    /// The captured guests, in order.
    pub snapshots: Vec<Snapshot>,
    /// What a restore of the third reads, in order.
    pub working_set: Vec<Wanted>,
}

/// Which of the snapshots the working set is of.
pub const RESTORED: usize = 2;

impl Images {
    /// Maps the files below `dir`.
    pub fn open(dir: &Path) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let names: Vec<Names> = serde_json::from_slice(&std::fs::read(dir.join("names.json"))?)?;
        let reads: Vec<Read> = serde_json::from_slice(&std::fs::read(dir.join("working_set.json"))?)?;
        let mut snapshots = Vec::new();
        for number in 1..=names.len() {
            let dir = dir.join(number.to_string());
            snapshots.push(Snapshot { memory: map(&dir.join("memory.img"))?, disk: map(&dir.join("disk.img"))? });
        }
        let restored = &names[RESTORED];
        let parts = HashMap::from([(restored.memory.as_str(), 0), (restored.disk.as_str(), 1)]);
        let lengths = snapshots[RESTORED].parts().map(|part| part.len() as u64);
        let working_set = reads.iter().filter_map(|read| {
            let part = *parts.get(read.image.as_str())?;
            let start = read.chunk * restored.chunk_size;
            Some(Wanted { part, start, end: (start + restored.chunk_size).min(lengths[part]) })
        });
        Ok(Self { working_set: working_set.collect(), snapshots })
    }

    /// The first reads of the working set, up to this share of the memory.
    pub fn first_reads(&self, share: f64) -> Vec<Wanted> {
        let budget = (self.snapshots[RESTORED].memory.len() as f64 * share) as u64;
        let mut bytes = 0;
        let within = self.working_set.iter().take_while(|wanted| {
            bytes += wanted.end - wanted.start;
            bytes <= budget
        });
        within.copied().collect()
    }
}

fn map(path: &Path) -> Result<Mmap, Box<dyn std::error::Error + Send + Sync>> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    // SAFETY: the images are this benchmark's own files, which nobody changes while it runs.
    Ok(unsafe { Mmap::map(&file)? })
}
