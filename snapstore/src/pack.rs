//! Packs: many frames in one immutable object.
//!
//! ```text
//!   0            8          24                                     footer            size - 56        size
//!   +------------+----------+---------+---------+-- … --+---------+-----------------+----------------+
//!   | "SYPACK"   | nonce    | frame   | frame   |       | frame   | one record each | trailer        |
//!   | 0, version | 16 bytes |         |         |       |         |                 |                |
//!   +------------+----------+---------+---------+-- … --+---------+-----------------+----------------+
//!
//!   record:   frame length u32 LE | chunks u32 LE | plain length of each chunk but the last, and of the last, u32 LE each
//!             | for each chunk: first half of its id (16)
//!   trailer:  pack size u64 LE | frames u32 LE | chunks u32 LE | BLAKE3 of footer and the 16 bytes before (32) | "SYPKEND" version
//! ```
//!
//! Invariants:
//! - a pack's id is the BLAKE3 of all its bytes, so an id never names two contents and a PUT may be repeated at will;
//! - no id is made twice: the nonce is random. So an id that was deleted never comes back, and whatever still speaks of it
//!   (a cache, a request that was under way) cannot mean another pack;
//! - frames lie back to back in the order of their records, and so do the chunks inside a frame: places are sums of lengths,
//!   and a footer whose sums do not fill the pack, or whose lengths are over a cap, is refused, whatever its checksum says;
//! - the chunks of a frame are equally long, but for the last one, which may be shorter;
//! - the footer is checked by its own checksum, so the place of a chunk can be believed without reading the whole pack;
//!   the content at that place is checked by the chunk's id.
//!
//! A later version takes the next version byte, at both ends; readers refuse every version but their own by name.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::chunk::{MAX_FRAME_BYTES, MAX_PLAIN_BYTES};
use crate::ids::{PackId, ShortId};

/// The most bytes of one pack: a writer stops far earlier, a reader refuses more.
pub const MAX_PACK_BYTES: u64 = 256 * 1024 * 1024;

/// The most chunks of one pack.
pub const MAX_PACK_CHUNKS: u32 = 256 * 1024;

const MAGIC: &[u8; 7] = b"SYPACK\0";
const END: &[u8; 7] = b"SYPKEND";
const VERSION: u8 = 2;
const NONCE_BYTES: usize = 16;
const HEADER_BYTES: usize = 8 + NONCE_BYTES;
const RECORD_BYTES: usize = 16;
const CHUNK_BYTES: usize = 16;
const TRAILER_BYTES: usize = 56;

/// Bytes that are not a pack, or not a footer of one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Another magic.
    #[error("not a pack")]
    NotAPack,
    /// Written by another version of this program.
    #[error("pack version {0} is not known")]
    Version(u8),
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
    /// How many frames it holds.
    pub frames: u32,
    /// How many chunks these hold together.
    pub chunks: u32,
}

/// Where a frame lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FramePlace {
    /// The pack.
    pub pack: PackId,
    /// Where the frame starts, bytes from the start of the pack.
    pub offset: u64,
    /// Length of the frame, bytes.
    pub len: u32,
}

impl FramePlace {
    /// Its bytes in the pack.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }
}

/// What a frame holds: chunks back to back, equally long but for the last one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Plain length of each chunk but the last, bytes; of a single chunk, its own.
    pub chunk_len: u32,
    /// Plain length of the last chunk, bytes: not more than the others'.
    pub last_len: u32,
    /// The chunks.
    pub chunks: Vec<ShortId>,
}

impl Content {
    /// Of one chunk.
    pub fn single(chunk: ShortId, len: u32) -> Self {
        Self { chunk_len: len, last_len: len, chunks: vec![chunk] }
    }

    /// Each chunk, with where it starts in the frame's plain content and how long it is there, bytes.
    pub fn places(&self) -> impl Iterator<Item = (ShortId, u32, u32)> + use<'_> {
        let last = self.chunks.len() - 1;
        self.chunks.iter().enumerate().map(move |(number, chunk)| {
            let start = u32::try_from(number).expect("a pack caps its chunks") * self.chunk_len;
            (*chunk, start, if number == last { self.last_len } else { self.chunk_len })
        })
    }

    /// Plain length of the whole frame, bytes.
    pub fn plain_len(&self) -> u64 {
        (self.chunks.len() as u64 - 1) * u64::from(self.chunk_len) + u64::from(self.last_len)
    }
}

/// A record of the footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackFrame {
    /// Where the frame starts, bytes from the start of the pack.
    pub offset: u64,
    /// Length of the frame, bytes.
    pub len: u32,
    /// What it holds.
    pub content: Content,
}

impl PackFrame {
    /// Where it lies, as a frame of `pack`.
    pub fn place(&self, pack: &PackId) -> FramePlace {
        FramePlace { pack: *pack, offset: self.offset, len: self.len }
    }
}

/// Lays out one pack. Pure: the caller writes [`PackBuilder::header`], then each appended frame, then the tail.
pub struct PackBuilder {
    header: [u8; HEADER_BYTES],
    hasher: blake3::Hasher,
    frames: Vec<PackFrame>,
    chunks: usize,
    offset: u64,
}

impl PackBuilder {
    /// An empty pack: its header is accounted for already. `nonce` must be random.
    pub fn new(nonce: [u8; NONCE_BYTES]) -> Self {
        let mut header = [0; HEADER_BYTES];
        header[..7].copy_from_slice(MAGIC);
        header[7] = VERSION;
        header[8..].copy_from_slice(&nonce);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&header);
        Self { header, hasher, frames: Vec::new(), chunks: 0, offset: HEADER_BYTES as u64 }
    }

    /// The bytes the pack starts with.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Takes note of a frame that is written next, and of what it holds.
    pub fn append(&mut self, frame: &[u8], content: Content) -> Result<(), PackError> {
        let does_not_fit = || PackError::DoesNotFit { bytes: frame.len() as u64 };
        let len = u32::try_from(frame.len()).map_err(|_| does_not_fit())?;
        if !frame_is_possible(len, &content) {
            return Err(does_not_fit());
        }
        let chunks = content.chunks.len();
        let tail = tail_bytes(self.frames.len() + 1, self.chunks + chunks);
        if self.chunks + chunks > MAX_PACK_CHUNKS as usize || self.offset + u64::from(len) + tail > MAX_PACK_BYTES {
            return Err(does_not_fit());
        }
        self.hasher.update(frame);
        self.frames.push(PackFrame { offset: self.offset, len, content });
        self.chunks += chunks;
        self.offset += u64::from(len);
        Ok(())
    }

    /// Bytes up to here, without the tail.
    pub fn len(&self) -> u64 {
        self.offset
    }

    /// Whether no frame was appended yet.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether one more frame of this length, with so many chunks, fits.
    pub fn has_room(&self, frame_bytes: usize, chunks: usize) -> bool {
        let tail = tail_bytes(self.frames.len() + 1, self.chunks + chunks);
        self.chunks + chunks <= MAX_PACK_CHUNKS as usize && self.offset + frame_bytes as u64 + tail <= MAX_PACK_BYTES
    }

    /// The bytes that end the pack, its name, and where everything lies.
    pub fn finish(mut self) -> (PackRef, Vec<PackFrame>, Bytes) {
        let count = |count: usize| u32::try_from(count).expect("append caps the chunks, and with them the frames");
        let (frames, chunks) = (count(self.frames.len()), count(self.chunks));
        let tail_len = tail_bytes(self.frames.len(), self.chunks);
        let size_bytes = self.offset + tail_len;
        let mut tail = BytesMut::with_capacity(usize::try_from(tail_len).expect("capped"));
        encode_footer(&self.frames, &mut tail);
        tail.put_u64_le(size_bytes);
        tail.put_u32_le(frames);
        tail.put_u32_le(chunks);
        let checksum = blake3::hash(&tail);
        tail.put_slice(checksum.as_bytes());
        tail.put_slice(END);
        tail.put_u8(VERSION);
        self.hasher.update(&tail);
        let id = PackId(*self.hasher.finalize().as_bytes());
        (PackRef { id, size_bytes, frames, chunks }, self.frames, tail.freeze())
    }
}

fn tail_bytes(frames: usize, chunks: usize) -> u64 {
    (frames * RECORD_BYTES + chunks * CHUNK_BYTES + TRAILER_BYTES) as u64
}

fn frame_is_possible(len: u32, content: &Content) -> bool {
    let Content { chunk_len, last_len, chunks } = content;
    len > 0
        && len as usize <= MAX_FRAME_BYTES
        && !chunks.is_empty()
        && *last_len > 0
        && last_len <= chunk_len
        && (chunks.len() > 1 || last_len == chunk_len)
        && content.plain_len() <= MAX_PLAIN_BYTES as u64
}

/// Length of footer and trailer of a pack, bytes: what has to be read to know where its chunks are.
pub fn tail_len(pack: &PackRef) -> u64 {
    tail_bytes(pack.frames as usize, pack.chunks as usize)
}

/// Reads the last [`tail_len`] bytes of the pack that `pack` names. What comes back agrees with `pack` and lies inside it.
pub fn parse_tail(pack: &PackRef, tail: &[u8]) -> Result<Vec<PackFrame>, PackError> {
    check_sizes(pack)?;
    if tail.len() as u64 != tail_len(pack) {
        return Err(PackError::Layout("the tail has another length"));
    }
    let (checked, rest) = tail.split_at(tail.len() - 40);
    let (checksum, end) = rest.split_at(32);
    check_end(end)?;
    if blake3::hash(checked).as_bytes() != checksum {
        return Err(PackError::Checksum);
    }
    let (footer, mut numbers) = checked.split_at(checked.len() - 16);
    if (numbers.get_u64_le(), numbers.get_u32_le(), numbers.get_u32_le()) != (pack.size_bytes, pack.frames, pack.chunks)
    {
        return Err(PackError::Layout("the trailer belongs to another pack"));
    }
    let frames = decode_footer(footer).ok_or(PackError::Layout("the footer's records do not fit"))?;
    if frames.iter().any(|frame| !frame_is_possible(frame.len, &frame.content)) {
        return Err(PackError::Layout("a frame's length is over the cap"));
    }
    let end = frames.last().map_or(HEADER_BYTES as u64, |last| last.offset + u64::from(last.len));
    let chunks: usize = frames.iter().map(|frame| frame.content.chunks.len()).sum();
    if end + tail_len(pack) != pack.size_bytes || frames.len() != pack.frames as usize || chunks != pack.chunks as usize
    {
        return Err(PackError::Layout("frames do not fill the pack"));
    }
    Ok(frames)
}

fn check_end(end: &[u8]) -> Result<(), PackError> {
    match end.strip_prefix(END) {
        Some([VERSION]) => Ok(()),
        Some([other]) => Err(PackError::Version(*other)),
        _ => Err(PackError::NotAPack),
    }
}

/// What a whole pack calls itself, for a file of which only the name is known: reads the trailer, checks nothing else.
/// Give it the last [`PEEK_BYTES`] at least.
pub fn peek(id: PackId, end_of_pack: &[u8]) -> Result<PackRef, PackError> {
    let mut trailer: &[u8] = end_of_pack.last_chunk::<TRAILER_BYTES>().ok_or(PackError::NotAPack)?;
    check_end(&trailer[TRAILER_BYTES - 8..])?;
    let pack =
        PackRef { id, size_bytes: trailer.get_u64_le(), frames: trailer.get_u32_le(), chunks: trailer.get_u32_le() };
    check_sizes(&pack)?;
    Ok(pack)
}

/// Length of what [`peek`] wants, bytes.
pub const PEEK_BYTES: u64 = TRAILER_BYTES as u64;

/// Whether the numbers of a pack's name can belong together at all.
pub fn check_sizes(pack: &PackRef) -> Result<(), PackError> {
    if pack.chunks > MAX_PACK_CHUNKS || pack.frames > pack.chunks || pack.size_bytes > MAX_PACK_BYTES {
        return Err(PackError::Layout("size or count is over the cap"));
    }
    if pack.size_bytes < HEADER_BYTES as u64 + tail_len(pack) {
        return Err(PackError::Layout("shorter than its own footer"));
    }
    Ok(())
}

/// Whether these bytes are exactly the pack of this id.
pub fn is_whole(id: &PackId, bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC) && blake3::hash(bytes).as_bytes() == id.as_bytes()
}

/// Records as a footer holds them.
pub fn encode_footer(frames: &[PackFrame], out: &mut BytesMut) {
    for frame in frames {
        out.put_u32_le(frame.len);
        out.put_u32_le(u32::try_from(frame.content.chunks.len()).expect("a pack caps its chunks"));
        out.put_u32_le(frame.content.chunk_len);
        out.put_u32_le(frame.content.last_len);
        frame.content.chunks.iter().for_each(|chunk| out.put_slice(&chunk.0));
    }
}

/// The inverse of [`encode_footer`]; `None` when the records do not end where the bytes do, or one holds nothing.
pub fn decode_footer(mut footer: &[u8]) -> Option<Vec<PackFrame>> {
    let mut frames = Vec::new();
    let mut offset = HEADER_BYTES as u64;
    while !footer.is_empty() {
        let (mut numbers, rest) = footer.split_at_checked(RECORD_BYTES)?;
        let (len, count) = (numbers.get_u32_le(), numbers.get_u32_le() as usize);
        let (chunk_len, last_len) = (numbers.get_u32_le(), numbers.get_u32_le());
        let (chunks, rest) = rest.split_at_checked(count.checked_mul(CHUNK_BYTES)?)?;
        let (chunks, _) = chunks.as_chunks::<CHUNK_BYTES>();
        if chunks.is_empty() {
            return None;
        }
        let chunks = chunks.iter().map(|chunk| ShortId(*chunk)).collect();
        frames.push(PackFrame { offset, len, content: Content { chunk_len, last_len, chunks } });
        offset += u64::from(len);
        footer = rest;
    }
    Some(frames)
}

#[cfg(test)]
mod tests;
