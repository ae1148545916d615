//! Chunks: what they hash to, and how they are framed for storage.
//!
//! A *frame* is the stored form of one chunk, or of several small ones one after the other, which compress better together.
//! It is the same in the cache, in a staged pack and in the blob store:
//!
//! ```text
//!   0        1        2        4                8
//!   +--------+--------+--------+----------------+----------------------------+
//!   | 0xC5   | codec  | zero   | plain length   | body                       |
//!   | magic  | u8     | u16    | u32 LE         | raw: the plain bytes       |
//!   +--------+--------+--------+----------------+ zstd: one zstd frame       |
//!                                               +----------------------------+
//! ```
//!
//! Invariants:
//! - a frame is never longer than [`MAX_FRAME_BYTES`], and no length inside one is believed before it is checked against
//!   [`MAX_PLAIN_BYTES`], so a damaged frame cannot make a reader allocate more than that;
//! - where in a frame a chunk lies is said by the pack's footer; [`check`], the keyed hash of just these bytes, is what
//!   decides, and every chunk that leaves the crate has passed it;
//! - the frame carries no checksum of its own: its chunks' ids are checksums, and better ones.
//!
//! A new codec takes the next free codec byte; old readers refuse it by name ([`FrameError::UnknownCodec`]). A change of the
//! header takes another magic byte.

use std::cell::RefCell;

use bytes::{BufMut, Bytes, BytesMut};

use crate::ids::{ChunkId, DomainKey};

/// Chunk size of images unless something else is asked for, bytes: a guest page (docs/decisions/0004).
pub const DEFAULT_CHUNK_BYTES: u32 = 4096;

/// Plain bytes of small chunks that are framed together. A chunk that is at least this long has its own frame.
pub const FRAME_TARGET_BYTES: usize = 64 * 1024;

/// The longest plain content of a frame, bytes. The root of an index is a chunk too, and the longest kind.
pub const MAX_PLAIN_BYTES: usize = 4 * 1024 * 1024;

/// The longest frame, bytes: content that does not compress is stored raw.
pub const MAX_FRAME_BYTES: usize = MAX_PLAIN_BYTES + HEADER_BYTES;

const HEADER_BYTES: usize = 8;
const MAGIC: u8 = 0xC5;
const CODEC_RAW: u8 = 0;
const CODEC_ZSTD: u8 = 1;

/// Why bytes are not a good frame of the wanted chunk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Too short for a header, or another magic byte.
    #[error("not a chunk frame")]
    NotAFrame,
    /// Written by a later version.
    #[error("unknown codec {0}")]
    UnknownCodec(u8),
    /// The frame, or the plain length it states, is over the cap.
    #[error("{bytes} bytes are over the cap")]
    TooLong {
        /// The offending length.
        bytes: u64,
    },
    /// The body does not decode to the stated length.
    #[error("the body does not decode to {expected} bytes")]
    BadBody {
        /// The stated length.
        expected: u32,
    },
    /// The content decodes, but it is not the chunk's.
    #[error("the content hashes to {actual}")]
    WrongHash {
        /// What it hashes to under the same key.
        actual: ChunkId,
    },
}

/// The id of a chunk with this content in this dedup domain. All-zero content has [`ChunkId::ZERO`].
pub fn chunk_id(key: &DomainKey, plain: &[u8]) -> ChunkId {
    if is_zero(plain) { ChunkId::ZERO } else { hash(key, plain) }
}

fn hash(key: &DomainKey, plain: &[u8]) -> ChunkId {
    ChunkId(*blake3::keyed_hash(&key.0, plain).as_bytes())
}

/// Whether every byte is zero. The empty string is zero.
pub fn is_zero(plain: &[u8]) -> bool {
    let whole = plain.len() - plain.len() % 16;
    // Sixteen bytes at a time: the compiler makes vector instructions of it.
    plain[..whole].chunks_exact(16).all(|word| word == [0; 16]) && plain[whole..].iter().all(|byte| *byte == 0)
}

/// Frames `plain`, compressed when that saves space. `plain` must not be longer than [`MAX_PLAIN_BYTES`].
pub fn encode(plain: &[u8], level: i32) -> Result<Bytes, FrameError> {
    if plain.len() > MAX_PLAIN_BYTES {
        return Err(FrameError::TooLong { bytes: plain.len() as u64 });
    }
    let compressed = compress(plain, level);
    let (codec, body) = match &compressed {
        Some(body) if body.len() < plain.len() => (CODEC_ZSTD, body.as_slice()),
        _ => (CODEC_RAW, plain),
    };
    let mut frame = BytesMut::with_capacity(HEADER_BYTES + body.len());
    frame.put_u8(MAGIC);
    frame.put_u8(codec);
    frame.put_u16_le(0);
    frame.put_u32_le(u32::try_from(plain.len()).expect("MAX_PLAIN_BYTES fits in 32 bits"));
    frame.put_slice(body);
    Ok(frame.freeze())
}

/// Decodes a frame, not knowing whose content it should be: every part of it that is used must pass [`check`].
pub fn decode(frame: &Bytes) -> Result<Bytes, FrameError> {
    if frame.len() > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong { bytes: frame.len() as u64 });
    }
    let Some((header, _)) = frame.split_first_chunk::<HEADER_BYTES>() else {
        return Err(FrameError::NotAFrame);
    };
    let [magic, codec, zero_a, zero_b, len @ ..] = *header;
    if magic != MAGIC || zero_a != 0 || zero_b != 0 {
        return Err(FrameError::NotAFrame);
    }
    let expected = u32::from_le_bytes(len);
    let plain_len = expected as usize;
    if plain_len > MAX_PLAIN_BYTES {
        return Err(FrameError::TooLong { bytes: u64::from(expected) });
    }
    let body = frame.slice(HEADER_BYTES..);
    let plain = match codec {
        CODEC_RAW => body,
        CODEC_ZSTD => Bytes::from(decompress(&body, plain_len).ok_or(FrameError::BadBody { expected })?),
        other => return Err(FrameError::UnknownCodec(other)),
    };
    if plain.len() == plain_len { Ok(plain) } else { Err(FrameError::BadBody { expected }) }
}

/// Whether these bytes are the content of `id`. Nothing that fails this may be used.
pub fn check(key: &DomainKey, id: &ChunkId, plain: &[u8]) -> Result<(), FrameError> {
    #[cfg(test)]
    if crate::mutant::is_on(crate::mutant::Mutant::Unverified) {
        return Ok(());
    }
    let actual = hash(key, plain);
    if actual == *id { Ok(()) } else { Err(FrameError::WrongHash { actual }) }
}

// A context costs more to make than a chunk costs to compress, so every thread that ever does it keeps one.
thread_local! {
    static COMPRESSOR: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// `None` when zstd cannot: the caller then stores the content raw.
fn compress(plain: &[u8], level: i32) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|slot| {
        if slot.as_ref().is_none_or(|(at, _)| *at != level) {
            *slot = Some((level, zstd::bulk::Compressor::new(level).ok()?));
        }
        let (_, compressor) = slot.as_mut()?;
        compressor.compress(plain).ok()
    })
}

fn decompress(body: &[u8], plain_len: usize) -> Option<Vec<u8>> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(zstd::bulk::Decompressor::new().ok()?);
        }
        slot.as_mut()?.decompress(body, plain_len).ok()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: DomainKey = DomainKey([9; 32]);

    proptest! {
        #[test]
        fn any_content_comes_back(plain in prop::collection::vec(any::<u8>(), 0..5000), level in 1..6i32) {
            let frame = encode(&plain, level).expect("short enough");
            let id = hash(&KEY, &plain);
            let back = decode(&frame).expect("its own frame");
            prop_assert_eq!(&back[..], &plain[..]);
            prop_assert_eq!(check(&KEY, &id, &back), Ok(()));
            prop_assert!(check(&DomainKey([8; 32]), &id, &back).is_err(), "another domain's key");
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), framed in any::<bool>()) {
            if framed && bytes.len() >= 4 {
                let codec = bytes[1] % 3;
                bytes[..4].copy_from_slice(&[MAGIC, codec, 0, 0]);
            }
            let _ = decode(&Bytes::from(bytes));
        }

        #[test]
        fn one_flipped_bit_is_found(plain in prop::collection::vec(0..4u8, 1..3000), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let frame = encode(&plain, 3).expect("short enough");
            let mut bad = frame.to_vec();
            bad[at.index(frame.len())] ^= 1 << bit;
            // A flip in zstd's unused bits may decode to the same content: then nothing is wrong with it.
            if let Ok(back) = decode(&Bytes::from(bad)) && check(&KEY, &hash(&KEY, &plain), &back).is_ok() {
                prop_assert_eq!(&back[..], &plain[..]);
            }
        }

        #[test]
        fn zero_is_zero(len in 0..200usize, at in any::<prop::sample::Index>()) {
            let mut plain = vec![0u8; len];
            prop_assert!(is_zero(&plain));
            prop_assert_eq!(chunk_id(&KEY, &plain), ChunkId::ZERO);
            if len > 0 {
                plain[at.index(len)] = 1;
                prop_assert!(!is_zero(&plain));
                prop_assert_ne!(chunk_id(&KEY, &plain), ChunkId::ZERO);
            }
        }
    }

    #[test]
    fn compressible_content_shrinks_and_random_content_does_not_grow() {
        let text = b"the same line again\n".repeat(1000);
        assert!(encode(&text, 3).expect("short").len() < text.len() / 10);
        let mut random = vec![0u8; 4096];
        blake3::Hasher::new().finalize_xof().fill(&mut random);
        assert_eq!(encode(&random, 3).expect("short").len(), random.len() + HEADER_BYTES);
    }

    #[test]
    fn stated_lengths_over_the_cap_are_refused_before_anything_is_allocated() {
        let mut frame = vec![MAGIC, CODEC_ZSTD, 0, 0];
        frame.extend_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(decode(&Bytes::from(frame)), Err(FrameError::TooLong { bytes: u64::from(u32::MAX) }));
        assert!(matches!(encode(&vec![1; MAX_PLAIN_BYTES + 1], 3), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn a_later_codec_is_refused_by_name() {
        let frame = Bytes::from_static(&[MAGIC, 7, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decode(&frame), Err(FrameError::UnknownCodec(7)));
    }

    /// The stored form is a promise to every snapshot ever taken.
    #[test]
    fn golden_frame() {
        let frame = encode(b"snapyard", 3).expect("short");
        assert_eq!(&frame[..], b"\xC5\x00\x00\x00\x08\x00\x00\x00snapyard");
        assert_eq!(
            hash(&DomainKey(*b"0123456789abcdef0123456789abcdef"), b"snapyard").to_string(),
            blake3::keyed_hash(b"0123456789abcdef0123456789abcdef", b"snapyard").to_hex().as_str()
        );
    }
}
