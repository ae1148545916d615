//! One layer of a disk: a sparse file without a name, and a map of what is in it.
//!
//! A block lies in the file at its place on the disk, so that a layer needs no index and freezing one copies nothing.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::fcntl::{FallocateFlags, fallocate};

use super::blocks::{BLOCK_SIZE, BlockMap, BlockState};

const COPY_BLOCKS: u64 = 256;

/// The bytes of a layer.
#[derive(Debug)]
pub struct LayerFile {
    file: File,
    /// How many frozen disks rely on the bytes staying as they are.
    pins: AtomicUsize,
}

impl LayerFile {
    /// An empty file in `directory`, gone when the last user is gone, even if this process is killed.
    pub fn create(directory: &Path, size_bytes: u64) -> io::Result<Arc<Self>> {
        let unnamed = OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_TMPFILE).open(directory);
        let file = match unnamed {
            Ok(file) => file,
            // Some file systems cannot make files without a name.
            Err(_) => tempfile::tempfile_in(directory)?,
        };
        file.set_len(size_bytes)?;
        Ok(Arc::new(Self { file, pins: AtomicUsize::new(0) }))
    }

    /// Reads `buffer.len()` bytes at `offset`.
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Writes all the bytes at `offset`.
    pub fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    /// Gives back the space of blocks that no longer count. A file system that cannot do that loses space only.
    pub fn discard(&self, blocks: &Range<u64>) {
        let (offset, len) = (blocks.start * BLOCK_SIZE, (blocks.end - blocks.start) * BLOCK_SIZE);
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if let Err(cause) = fallocate(&self.file, flags, offset as i64, len as i64) {
            tracing::debug!(%cause, "space of discarded blocks not given back");
        }
    }

    fn pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }
}

/// A layer that is never written again, except by a merge that no reader can tell.
#[derive(Debug)]
pub struct FrozenLayer {
    /// Its bytes.
    pub file: Arc<LayerFile>,
    /// What is in them.
    pub map: BlockMap,
}

/// A frozen layer whose file no merge may touch while this lives.
#[derive(Debug)]
pub struct Pinned(Arc<FrozenLayer>);

impl Pinned {
    /// Must be called under the lock under which merges are chosen.
    pub fn new(layer: &Arc<FrozenLayer>) -> Self {
        layer.file.pins.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(layer))
    }

    /// The layer.
    pub fn layer(&self) -> &Arc<FrozenLayer> {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.file.pins.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Which layer the one above it should be merged into, so that at most `keep` layers remain; `None` if there are few
/// enough or none may be touched. Layers are given oldest first.
pub fn merge_candidate(frozen: &[Arc<FrozenLayer>], keep: usize) -> Option<usize> {
    if frozen.len() <= keep {
        return None;
    }
    (0..frozen.len() - 1)
        .filter(|lower| !frozen[*lower].file.pinned())
        .min_by_key(|lower| frozen[lower + 1].map.data_blocks())
}

/// Copies what `upper` holds into the file of `lower`, and returns the layer that replaces the two.
///
/// Safe beside readers of the two: they look into `upper` first wherever a byte of `lower` changes. Stopped half-way
/// (`Ok(None)`, or an error) the two layers are as good as before, for the same reason.
pub fn merge(lower: &FrozenLayer, upper: &FrozenLayer, stop: &AtomicBool) -> io::Result<Option<FrozenLayer>> {
    let mut buffer = vec![0; (COPY_BLOCKS * BLOCK_SIZE) as usize];
    for (run, state) in upper.map.known_runs() {
        if state == BlockState::Zero {
            lower.file.discard(&run);
            continue;
        }
        for first in run.clone().step_by(COPY_BLOCKS as usize) {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let count = (run.end - first).min(COPY_BLOCKS);
            let piece = &mut buffer[..(count * BLOCK_SIZE) as usize];
            upper.file.read(piece, first * BLOCK_SIZE)?;
            lower.file.write(piece, first * BLOCK_SIZE)?;
        }
    }
    Ok(Some(FrozenLayer { file: Arc::clone(&lower.file), map: lower.map.merged_with(&upper.map) }))
}
