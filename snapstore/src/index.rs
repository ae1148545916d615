//! The chunk index of an image: chunk number to chunk id, as a tree of two levels.
//!
//! ```text
//!   ImageRef { size, chunk size, root }
//!                                 |
//!                        root: one id per index page         (a chunk like any other)
//!                        /        |         \
//!                    page 0    page 1  …  page n             (chunks too; FANOUT ids each)
//!                   ids 0..    ids 256..
//! ```
//!
//! Index pages and the root are content-addressed and stored as chunks, so a child snapshot shares every page in which it
//! changed nothing, and a large image's index is loaded page by page. [`ChunkId::ZERO`] stands for an all-zero chunk in a
//! page, for a page of nothing but zero chunks in the root, and for a root of nothing but zero pages in the `ImageRef`.
//!
//! Stored form of a node: magic `SYIX`, version u8 (1), level u8 (0 page, 1 root), u16 zero, then 32 bytes per id. A page
//! always holds [`FANOUT`] ids, the last one padded with zero ids. A later version takes the next version byte; old readers
//! refuse it.

use bytes::{BufMut, Bytes, BytesMut};

use crate::chunk::MAX_PLAIN_BYTES;
use crate::ids::{ChunkId, ChunkNo};

/// Ids per index page. With chunks of 64 KiB a page of 8 KiB covers 16 MiB.
pub const FANOUT: usize = 256;

/// The most index pages of an image: what fits in the largest root.
const MAX_PAGES: u64 = ((MAX_PLAIN_BYTES - HEADER_BYTES) / ID_BYTES) as u64;

const HEADER_BYTES: usize = 8;
const ID_BYTES: usize = 32;
const MAGIC: &[u8; 4] = b"SYIX";
const VERSION: u8 = 1;

/// Smallest chunk size, bytes: a guest page.
pub const MIN_CHUNK_BYTES: u32 = 4096;

/// Largest chunk size of an image, bytes.
pub const MAX_CHUNK_BYTES: u32 = 1024 * 1024;

/// An index that cannot be what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// The chunk size is not a power of two between [`MIN_CHUNK_BYTES`] and [`MAX_CHUNK_BYTES`].
    #[error("chunk size {0} is not a power of two from 4 KiB to 1 MiB")]
    ChunkSize(u32),
    /// The image is empty, or larger than an index of two levels reaches.
    #[error("an image of {size_bytes} bytes cannot be indexed with chunks of {chunk_size} bytes")]
    ImageSize {
        /// The image's size.
        size_bytes: u64,
        /// Its chunk size.
        chunk_size: u32,
    },
    /// Verified bytes that are no index node of the wanted level and length.
    #[error("not an index {wanted} of {ids} ids")]
    NotANode {
        /// "page" or "root".
        wanted: &'static str,
        /// How many ids it should hold.
        ids: usize,
    },
}

/// Size and chunking of an image: everything that is known before its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    size_bytes: u64,
    chunk_size: u32,
}

impl Geometry {
    /// Checks that an image of this size can be indexed.
    pub fn new(size_bytes: u64, chunk_size: u32) -> Result<Self, IndexError> {
        if !chunk_size.is_power_of_two() || !(MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_size) {
            return Err(IndexError::ChunkSize(chunk_size));
        }
        let geometry = Self { size_bytes, chunk_size };
        if size_bytes == 0 || geometry.pages() > MAX_PAGES {
            return Err(IndexError::ImageSize { size_bytes, chunk_size });
        }
        Ok(geometry)
    }

    /// The image's size, bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes per chunk; the last chunk may be shorter.
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// How many chunks the image has.
    pub fn chunks(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.chunk_size))
    }

    /// How many index pages the image has.
    pub fn pages(&self) -> u64 {
        self.chunks().div_ceil(FANOUT as u64)
    }

    /// Plain length of one chunk, bytes; `None` beyond the end of the image.
    pub fn chunk_len(&self, chunk: ChunkNo) -> Option<usize> {
        let start = chunk.0.checked_mul(u64::from(self.chunk_size))?;
        let rest = self.size_bytes.checked_sub(start).filter(|rest| *rest > 0)?;
        usize::try_from(rest.min(u64::from(self.chunk_size))).ok()
    }

    /// Number of ids in the root.
    pub fn root_ids(&self) -> usize {
        usize::try_from(self.pages()).expect("Geometry::new caps the pages")
    }
}

/// Where a chunk's id stands: which index page, and where in it.
pub fn slot(chunk: ChunkNo) -> (usize, usize) {
    let number = usize::try_from(chunk.0).expect("64-bit targets only");
    (number / FANOUT, number % FANOUT)
}

/// Which level of the tree a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Holds ids of chunks.
    Page,
    /// Holds ids of pages.
    Root,
}

impl Level {
    fn byte(self) -> u8 {
        match self {
            Self::Page => 0,
            Self::Root => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Page => "page",
            Self::Root => "root",
        }
    }
}

/// The stored form of a node; `None` when all its ids are zero and it is not stored at all.
pub fn encode_node(level: Level, ids: &[ChunkId]) -> Option<Bytes> {
    if ids.iter().all(ChunkId::is_zero) {
        return None;
    }
    let mut node = BytesMut::with_capacity(HEADER_BYTES + ids.len() * ID_BYTES);
    node.put_slice(MAGIC);
    node.put_u8(VERSION);
    node.put_u8(level.byte());
    node.put_u16_le(0);
    for id in ids {
        node.put_slice(id.as_bytes());
    }
    Some(node.freeze())
}

/// Reads a node that must be of this level and hold exactly `ids` ids.
pub fn decode_node(level: Level, ids: usize, node: &[u8]) -> Result<Vec<ChunkId>, IndexError> {
    let wrong = IndexError::NotANode { wanted: level.name(), ids };
    let Some((header, body)) = node.split_first_chunk::<HEADER_BYTES>() else {
        return Err(wrong);
    };
    let [m0, m1, m2, m3, version, byte, zero_a, zero_b] = *header;
    let good = [m0, m1, m2, m3] == *MAGIC && version == VERSION && byte == level.byte() && zero_a == 0 && zero_b == 0;
    if !good || ids.checked_mul(ID_BYTES) != Some(body.len()) {
        return Err(wrong);
    }
    let (chunks, _) = body.as_chunks::<ID_BYTES>();
    Ok(chunks.iter().map(|id| ChunkId(*id)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(count: usize) -> Vec<ChunkId> {
        (0..count).map(|i| ChunkId([u8::try_from(i % 251).expect("small"); 32])).collect()
    }

    proptest! {
        #[test]
        fn nodes_round_trip(count in 2..600usize) {
            let ids = ids(count);
            for level in [Level::Page, Level::Root] {
                let node = encode_node(level, &ids).expect("not all zero");
                prop_assert_eq!(decode_node(level, count, &node).expect("its own node"), ids.clone());
                prop_assert!(decode_node(level, count + 1, &node).is_err());
            }
            let page = encode_node(Level::Page, &ids).expect("not all zero");
            prop_assert!(decode_node(Level::Root, count, &page).is_err(), "a page is not a root");
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), ids in any::<usize>()) {
            let _ = decode_node(Level::Page, ids, &bytes);
        }

        #[test]
        fn chunk_lengths_add_up(size in 1..40_000_000u64, shift in 12..=20u32) {
            let geometry = Geometry::new(size, 1 << shift).expect("small enough");
            let sum: u64 = (0..geometry.chunks()).map(|n| geometry.chunk_len(ChunkNo(n)).expect("inside") as u64).sum();
            prop_assert_eq!(sum, size);
            prop_assert_eq!(geometry.chunk_len(ChunkNo(geometry.chunks())), None);
            prop_assert_eq!(geometry.chunk_len(ChunkNo(u64::MAX)), None);
        }
    }

    #[test]
    fn sizes_that_no_index_can_hold_are_refused() {
        assert!(Geometry::new(0, 65536).is_err());
        assert!(Geometry::new(u64::MAX, 1 << 20).is_err());
        assert!(Geometry::new(1 << 40, 65536).is_ok(), "a disk of 1 TiB");
        for bad in [0, 1, 2048, 65535, 2 << 20] {
            assert_eq!(Geometry::new(1 << 20, bad), Err(IndexError::ChunkSize(bad)));
        }
    }

    #[test]
    fn all_zero_nodes_are_not_stored() {
        assert_eq!(encode_node(Level::Page, &[ChunkId::ZERO; FANOUT]), None);
    }
}
