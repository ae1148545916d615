//! Packs: many frames in one immutable object.
//!
//! ```text
//!   0            8                                        footer                 size - 56        size
//!   +------------+---------+---------+-- … --+------------+----------------------+----------------+
//!   | "SYPACK"   | frame   | frame   |       | frame      | entry, 44 bytes each | trailer        |
//!   | 0, version |         |         |       |            |                      |                |
//!   +------------+---------+---------+-- … --+------------+----------------------+----------------+
//!
//!   entry:    chunk id (32) | offset u64 LE | length u32 LE
//!   trailer:  pack size u64 LE | entries u32 LE | zero u32 | BLAKE3 of footer and the 16 bytes before (32) | "SYPKEND" version
//! ```
//!
//! Invariants:
//! - a pack's id is the BLAKE3 of all its bytes, so an id never names two contents and a PUT may be repeated at will;
//! - frames lie back to back in the order in which they were written, and entries say so in that order: a footer with a gap,
//!   an overlap or a length over [`MAX_FRAME_BYTES`] is refused, whatever its checksum says;
//! - the footer is checked by its own checksum, so the location of a chunk can be believed without reading the whole pack;
//!   the content at that location is checked by the chunk's id.
//!
//! A later version takes the next version byte, at both ends; old readers refuse it.

use bytes::{BufMut, Bytes, BytesMut};

use crate::chunk::MAX_FRAME_BYTES;
use crate::ids::{ChunkId, PackId};

/// The most bytes of one pack: a writer stops far earlier, a reader refuses more.
pub const MAX_PACK_BYTES: u64 = 256 * 1024 * 1024;

/// The most chunks of one pack.
pub const MAX_PACK_CHUNKS: u32 = 128 * 1024;

const HEADER: &[u8; 8] = b"SYPACK\0\x01";
const END: &[u8; 8] = b"SYPKEND\x01";
const ENTRY_BYTES: usize = 44;
const TRAILER_BYTES: usize = 56;

/// Bytes that are not a pack, or not a footer of one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Another magic or version.
    #[error("not a pack of a version this program reads")]
    NotAPack,
    /// Sizes and counts do not fit together, or are over a cap.
    #[error("pack layout is impossible: {0}")]
    Layout(&'static str),
    /// The footer's checksum does not match.
    #[error("pack footer is damaged")]
    Checksum,
    /// The frame to append is over the cap, or the pack is full.
    #[error("a frame of {bytes} bytes does not fit in the pack")]
    DoesNotFit {
        /// Length of the frame.
        bytes: u64,
    },
}

/// A pack as a manifest names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackRef {
    /// BLAKE3 of the pack's bytes.
    pub id: PackId,
    /// Length of the whole pack, bytes.
    pub size_bytes: u64,
    /// How many chunks it holds.
    pub chunks: u32,
}

/// Where a pack holds a chunk's frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackEntry {
    /// The chunk.
    pub chunk: ChunkId,
    /// Where its frame starts, bytes from the start of the pack.
    pub offset: u64,
    /// Length of its frame, bytes.
    pub len: u32,
}

/// Lays out one pack. Pure: the caller writes [`PackBuilder::HEADER`], then each appended frame, then the tail.
pub struct PackBuilder {
    hasher: blake3::Hasher,
    entries: Vec<PackEntry>,
    offset: u64,
}

impl Default for PackBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl PackBuilder {
    /// The bytes every pack starts with.
    pub const HEADER: &'static [u8] = HEADER;

    /// An empty pack: its header is accounted for already.
    pub fn new() -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(HEADER);
        Self { hasher, entries: Vec::new(), offset: HEADER.len() as u64 }
    }

    /// Takes note of a frame that is written next.
    pub fn append(&mut self, chunk: ChunkId, frame: &[u8]) -> Result<(), PackError> {
        let does_not_fit = PackError::DoesNotFit { bytes: frame.len() as u64 };
        let len = match u32::try_from(frame.len()) {
            Ok(len) if len > 0 && frame.len() <= MAX_FRAME_BYTES => len,
            _ => return Err(does_not_fit),
        };
        let count = u32::try_from(self.entries.len()).map_err(|_| does_not_fit.clone())?;
        if count >= MAX_PACK_CHUNKS || self.offset + u64::from(len) + tail_len(count + 1) > MAX_PACK_BYTES {
            return Err(does_not_fit);
        }
        self.hasher.update(frame);
        self.entries.push(PackEntry { chunk, offset: self.offset, len });
        self.offset += u64::from(len);
        Ok(())
    }

    /// Bytes up to here, without the tail.
    pub fn len(&self) -> u64 {
        self.offset
    }

    /// Whether no frame was appended yet.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether one more frame of any length is sure to fit.
    pub fn has_room(&self) -> bool {
        let chunks = self.entries.len() as u64 + 1;
        chunks < u64::from(MAX_PACK_CHUNKS)
            && self.offset + MAX_FRAME_BYTES as u64 + chunks * ENTRY_BYTES as u64 + TRAILER_BYTES as u64
                <= MAX_PACK_BYTES
    }

    /// The bytes that end the pack, its name, and where everything lies.
    pub fn finish(mut self) -> (PackRef, Vec<PackEntry>, Bytes) {
        let chunks = u32::try_from(self.entries.len()).expect("append caps the entries");
        let size_bytes = self.offset + tail_len(chunks);
        let mut tail = BytesMut::with_capacity(usize::try_from(tail_len(chunks)).expect("capped"));
        encode_entries(&self.entries, &mut tail);
        tail.put_u64_le(size_bytes);
        tail.put_u32_le(chunks);
        tail.put_u32_le(0);
        let checksum = blake3::hash(&tail);
        tail.put_slice(checksum.as_bytes());
        tail.put_slice(END);
        self.hasher.update(&tail);
        let id = PackId(*self.hasher.finalize().as_bytes());
        (PackRef { id, size_bytes, chunks }, self.entries, tail.freeze())
    }
}

/// Length of footer and trailer of a pack with this many chunks, bytes: what has to be read to know where its chunks are.
pub fn tail_len(chunks: u32) -> u64 {
    u64::from(chunks) * ENTRY_BYTES as u64 + TRAILER_BYTES as u64
}

/// Reads the last [`tail_len`] bytes of the pack that `pack` names. What comes back agrees with `pack` and lies inside it.
pub fn parse_tail(pack: &PackRef, tail: &[u8]) -> Result<Vec<PackEntry>, PackError> {
    check_sizes(pack)?;
    if tail.len() as u64 != tail_len(pack.chunks) {
        return Err(PackError::Layout("the tail has another length"));
    }
    let (checked, rest) = tail.split_at(tail.len() - 40);
    let (checksum, end) = rest.split_at(32);
    if end != END {
        return Err(PackError::NotAPack);
    }
    if blake3::hash(checked).as_bytes() != checksum {
        return Err(PackError::Checksum);
    }
    let (footer, numbers) = checked.split_at(checked.len() - 16);
    let mut expected = BytesMut::with_capacity(16);
    expected.put_u64_le(pack.size_bytes);
    expected.put_u32_le(pack.chunks);
    expected.put_u32_le(0);
    if numbers != &expected[..] {
        return Err(PackError::Layout("the trailer belongs to another pack"));
    }
    let entries = decode_entries(footer).ok_or(PackError::Layout("the footer is cut"))?;
    let mut offset = HEADER.len() as u64;
    for entry in &entries {
        if entry.offset != offset {
            return Err(PackError::Layout("frames do not lie back to back"));
        }
        if entry.len == 0 || entry.len as usize > MAX_FRAME_BYTES {
            return Err(PackError::Layout("a frame's length is over the cap"));
        }
        offset += u64::from(entry.len);
    }
    if offset + tail_len(pack.chunks) != pack.size_bytes {
        return Err(PackError::Layout("frames do not fill the pack"));
    }
    Ok(entries)
}

/// What a whole pack calls itself, for a file of which only the name is known: reads the trailer, checks nothing else.
/// Give it the last 56 bytes at least.
pub fn peek(id: PackId, end_of_pack: &[u8]) -> Result<PackRef, PackError> {
    let Some(trailer) = end_of_pack.last_chunk::<TRAILER_BYTES>() else {
        return Err(PackError::NotAPack);
    };
    if !trailer.ends_with(END) {
        return Err(PackError::NotAPack);
    }
    let (size, rest) = trailer.split_first_chunk::<8>().ok_or(PackError::NotAPack)?;
    let chunks = rest.first_chunk::<4>().ok_or(PackError::NotAPack)?;
    let pack = PackRef { id, size_bytes: u64::from_le_bytes(*size), chunks: u32::from_le_bytes(*chunks) };
    check_sizes(&pack)?;
    Ok(pack)
}

/// Length of what [`peek`] wants, bytes.
pub const PEEK_BYTES: u64 = TRAILER_BYTES as u64;

/// Whether the numbers of a pack's name can belong together at all.
pub fn check_sizes(pack: &PackRef) -> Result<(), PackError> {
    if pack.chunks > MAX_PACK_CHUNKS || pack.size_bytes > MAX_PACK_BYTES {
        return Err(PackError::Layout("size or count is over the cap"));
    }
    if pack.size_bytes < HEADER.len() as u64 + tail_len(pack.chunks) {
        return Err(PackError::Layout("shorter than its own footer"));
    }
    Ok(())
}

/// Whether these bytes are exactly the pack of this id.
pub fn is_whole(id: &PackId, bytes: &[u8]) -> bool {
    bytes.starts_with(HEADER) && blake3::hash(bytes).as_bytes() == id.as_bytes()
}

/// Entries as a footer holds them.
pub fn encode_entries(entries: &[PackEntry], out: &mut BytesMut) {
    for entry in entries {
        out.put_slice(entry.chunk.as_bytes());
        out.put_u64_le(entry.offset);
        out.put_u32_le(entry.len);
    }
}

/// The inverse of [`encode_entries`]; `None` when the length is no multiple of an entry's.
pub fn decode_entries(footer: &[u8]) -> Option<Vec<PackEntry>> {
    let (entries, rest) = footer.as_chunks::<ENTRY_BYTES>();
    rest.is_empty().then(|| entries.iter().map(decode_entry).collect())
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> PackEntry {
    let mut chunk = [0; 32];
    let mut offset = [0; 8];
    let mut len = [0; 4];
    chunk.copy_from_slice(&bytes[..32]);
    offset.copy_from_slice(&bytes[32..40]);
    len.copy_from_slice(&bytes[40..]);
    PackEntry { chunk: ChunkId(chunk), offset: u64::from_le_bytes(offset), len: u32::from_le_bytes(len) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn build(frames: &[Vec<u8>]) -> (PackRef, Vec<PackEntry>, Vec<u8>) {
        let mut builder = PackBuilder::new();
        let mut bytes = PackBuilder::HEADER.to_vec();
        for (i, frame) in frames.iter().enumerate() {
            builder.append(ChunkId([u8::try_from(i).expect("few"); 32]), frame).expect("fits");
            bytes.extend_from_slice(frame);
        }
        let (pack, entries, tail) = builder.finish();
        bytes.extend_from_slice(&tail);
        (pack, entries, bytes)
    }

    fn tail_of<'a>(pack: &PackRef, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[bytes.len() - usize::try_from(tail_len(pack.chunks)).expect("small")..]
    }

    /// Rewrites the footer's checksum, so that only the check that is meant can refuse it.
    fn reseal(tail: &mut [u8]) {
        let split = tail.len() - 40;
        let checksum = *blake3::hash(&tail[..split]).as_bytes();
        tail[split..split + 32].copy_from_slice(&checksum);
    }

    proptest! {
        #[test]
        fn packs_round_trip(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..100), 0..20)) {
            let (pack, entries, bytes) = build(&frames);
            prop_assert_eq!(bytes.len() as u64, pack.size_bytes);
            prop_assert!(is_whole(&pack.id, &bytes));
            prop_assert_eq!(peek(pack.id, &bytes).expect("own trailer"), pack);
            let read = parse_tail(&pack, tail_of(&pack, &bytes)).expect("own tail");
            prop_assert_eq!(&read, &entries);
            for (entry, frame) in read.iter().zip(&frames) {
                let start = usize::try_from(entry.offset).expect("small");
                prop_assert_eq!(&bytes[start..start + entry.len as usize], &frame[..]);
            }
        }

        #[test]
        fn a_flipped_bit_in_the_tail_is_refused(at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let (pack, _, bytes) = build(&[vec![1; 10], vec![2; 20]]);
            let mut tail = tail_of(&pack, &bytes).to_vec();
            let at = at.index(tail.len());
            tail[at] ^= 1 << bit;
            prop_assert!(parse_tail(&pack, &tail).is_err());
        }

        #[test]
        fn no_bytes_make_the_parsers_panic(
            tail in prop::collection::vec(any::<u8>(), 0..400), size_bytes in any::<u64>(), chunks in any::<u32>(), few in 0..8u32
        ) {
            let id = PackId([0; 32]);
            for chunks in [chunks, few] {
                let _ = parse_tail(&PackRef { id, size_bytes, chunks }, &tail);
                let mut tail = tail.clone();
                let want = usize::try_from(tail_len(few)).expect("small");
                tail.resize(want, 0);
                tail[want - 8..].copy_from_slice(END);
                reseal(&mut tail);
                let _ = parse_tail(&PackRef { id, size_bytes, chunks: few }, &tail);
                let _ = peek(id, &tail);
            }
        }
    }

    #[test]
    fn impossible_layouts_are_refused_even_with_a_good_checksum() {
        let (pack, _, bytes) = build(&[vec![1; 10], vec![2; 20]]);
        let tail = tail_of(&pack, &bytes).to_vec();
        let patch = |at: usize, with: &[u8]| {
            let mut tail = tail.clone();
            tail[at..at + with.len()].copy_from_slice(with);
            reseal(&mut tail);
            parse_tail(&pack, &tail)
        };
        assert!(patch(32, &9u64.to_le_bytes()).is_err(), "first frame starts late");
        assert!(patch(40, &u32::MAX.to_le_bytes()).is_err(), "length over the cap");
        assert!(patch(40, &0u32.to_le_bytes()).is_err(), "empty frame");
        assert!(patch(84, &21u32.to_le_bytes()).is_err(), "runs into the footer");
        assert!(patch(88, &1u64.to_le_bytes()).is_err(), "another pack size");
        assert!(patch(96, &1u32.to_le_bytes()).is_err(), "another count");
    }

    #[test]
    fn sizes_over_the_caps_are_refused() {
        let id = PackId([0; 32]);
        assert!(check_sizes(&PackRef { id, size_bytes: MAX_PACK_BYTES + 1, chunks: 1 }).is_err());
        assert!(check_sizes(&PackRef { id, size_bytes: MAX_PACK_BYTES, chunks: u32::MAX }).is_err());
        assert!(check_sizes(&PackRef { id, size_bytes: 100, chunks: 3 }).is_err());
        let mut builder = PackBuilder::new();
        assert!(builder.append(ChunkId::ZERO, &vec![0; MAX_FRAME_BYTES + 1]).is_err());
        assert!(builder.append(ChunkId::ZERO, &[]).is_err());
        assert!(builder.is_empty());
    }

    /// The stored form is a promise to every snapshot ever taken.
    #[test]
    fn golden_pack() {
        let (pack, _, bytes) = build(&[b"first frame".to_vec(), b"second".to_vec()]);
        let golden = include_bytes!("../testdata/pack-v1.bin");
        assert_eq!(bytes, golden, "the pack format has changed: that needs a new version");
        assert_eq!(pack.id.to_string(), include_str!("../testdata/pack-v1.id").trim());
    }
}
