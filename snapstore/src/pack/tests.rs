use proptest::prelude::*;

use super::*;

const NONCE: [u8; 16] = [3; 16];

fn content(chunk_len: u32, last_len: u32, chunks: &[u8]) -> Content {
    Content { chunk_len, last_len, chunks: chunks.iter().map(|id| ShortId([*id; 16])).collect() }
}

fn build(frames: &[(Vec<u8>, Content)]) -> (PackRef, Vec<PackFrame>, Vec<u8>) {
    let mut builder = PackBuilder::new(NONCE);
    let mut bytes = builder.header().to_vec();
    for (frame, content) in frames {
        builder.append(frame, content.clone()).expect("fits");
        bytes.extend_from_slice(frame);
    }
    let (pack, entries, tail) = builder.finish();
    bytes.extend_from_slice(&tail);
    (pack, entries, bytes)
}

fn two_frames() -> (PackRef, Vec<PackFrame>, Vec<u8>) {
    build(&[(vec![1; 10], content(4096, 100, &[1, 2])), (vec![2; 20], content(30, 30, &[3]))])
}

fn tail_of<'a>(pack: &PackRef, bytes: &'a [u8]) -> &'a [u8] {
    &bytes[bytes.len() - usize::try_from(tail_len(pack)).expect("small")..]
}

/// Rewrites the footer's checksum, so that only the check that is meant can refuse it.
fn reseal(tail: &mut [u8]) {
    let split = tail.len() - 40;
    let checksum = *blake3::hash(&tail[..split]).as_bytes();
    tail[split..split + 32].copy_from_slice(&checksum);
}

fn frames() -> impl Strategy<Value = Vec<(Vec<u8>, Content)>> {
    let content = (1..5000u32, 1..5000u32, prop::collection::vec(any::<u8>(), 1..5)).prop_map(|(a, b, ids)| {
        let last_len = if ids.len() > 1 { a.min(b) } else { a.max(b) };
        content(a.max(b), last_len, &ids)
    });
    prop::collection::vec((prop::collection::vec(any::<u8>(), 1..100), content), 0..20)
}

proptest! {
    #[test]
    fn packs_round_trip(frames in frames()) {
        let (pack, entries, bytes) = build(&frames);
        prop_assert_eq!(bytes.len() as u64, pack.size_bytes);
        prop_assert!(is_whole(&pack.id, &bytes));
        prop_assert_eq!(peek(pack.id, &bytes).expect("own trailer"), pack);
        let read = parse_tail(&pack, tail_of(&pack, &bytes)).expect("own tail");
        prop_assert_eq!(&read, &entries);
        for (entry, (frame, content)) in read.iter().zip(&frames) {
            let start = usize::try_from(entry.offset).expect("small");
            prop_assert_eq!(&bytes[start..start + entry.len as usize], &frame[..]);
            prop_assert_eq!(&entry.content, content);
            let end = entry.content.places().last().map(|(_, start, len)| u64::from(start + len));
            prop_assert_eq!(end, Some(entry.content.plain_len()));
        }
    }

    #[test]
    fn a_flipped_bit_in_the_tail_is_refused(at in any::<prop::sample::Index>(), bit in 0..8u8) {
        let (pack, _, bytes) = two_frames();
        let mut tail = tail_of(&pack, &bytes).to_vec();
        let at = at.index(tail.len());
        tail[at] ^= 1 << bit;
        prop_assert!(parse_tail(&pack, &tail).is_err());
    }

    #[test]
    fn no_bytes_make_the_parsers_panic(
        tail in prop::collection::vec(any::<u8>(), 0..400),
        size_bytes in any::<u64>(),
        (frames, chunks) in any::<(u32, u32)>(),
        (few_frames, few_chunks) in (0..4u32, 0..8u32),
    ) {
        let id = PackId([0; 32]);
        let _ = parse_tail(&PackRef { id, size_bytes, frames, chunks }, &tail);
        let pack = PackRef { id, size_bytes, frames: few_frames, chunks: few_chunks };
        let _ = parse_tail(&pack, &tail);
        let _ = decode_footer(&tail);
        let want = usize::try_from(tail_len(&pack)).expect("small");
        let mut tail = tail;
        tail.resize(want, 0);
        tail[want - 8..want - 1].copy_from_slice(END);
        tail[want - 1] = VERSION;
        reseal(&mut tail);
        let _ = parse_tail(&pack, &tail);
        let _ = peek(id, &tail);
    }
}

#[test]
fn impossible_layouts_are_refused_even_with_a_good_checksum() {
    let (pack, _, bytes) = two_frames();
    let tail = tail_of(&pack, &bytes).to_vec();
    let patch = |at: usize, with: &[u8]| {
        let mut tail = tail.clone();
        tail[at..at + with.len()].copy_from_slice(with);
        reseal(&mut tail);
        parse_tail(&pack, &tail)
    };
    assert!(patch(0, &10u32.to_le_bytes()).is_ok(), "nothing changed");
    assert!(patch(0, &u32::MAX.to_le_bytes()).is_err(), "length over the cap");
    assert!(patch(0, &0u32.to_le_bytes()).is_err(), "empty frame");
    assert!(patch(0, &11u32.to_le_bytes()).is_err(), "runs into the footer");
    assert!(patch(4, &u32::MAX.to_le_bytes()).is_err(), "more chunks than there are bytes");
    assert!(patch(4, &1u32.to_le_bytes()).is_err(), "fewer chunks than there are");
    assert!(patch(4, &0u32.to_le_bytes()).is_err(), "a frame of nothing");
    assert!(patch(8, &u32::MAX.to_le_bytes()).is_err(), "a chunk over the cap");
    assert!(patch(8, &99u32.to_le_bytes()).is_err(), "a last chunk that is longer");
    assert!(patch(12, &0u32.to_le_bytes()).is_err(), "an empty chunk");
    let numbers = tail.len() - 56;
    assert!(patch(numbers, &1u64.to_le_bytes()).is_err(), "another pack size");
    assert!(patch(numbers + 8, &1u32.to_le_bytes()).is_err(), "another count of frames");
    assert!(patch(numbers + 12, &1u32.to_le_bytes()).is_err(), "another count of chunks");
}

#[test]
fn other_versions_are_refused_by_name() {
    let (pack, _, bytes) = two_frames();
    let mut tail = tail_of(&pack, &bytes).to_vec();
    for version in [1, 3] {
        *tail.last_mut().expect("not empty") = version;
        assert_eq!(parse_tail(&pack, &tail), Err(PackError::Version(version)));
        assert_eq!(peek(pack.id, &tail), Err(PackError::Version(version)));
    }
}

#[test]
fn sizes_over_the_caps_are_refused() {
    let id = PackId([0; 32]);
    let sizes = |size_bytes, frames, chunks| check_sizes(&PackRef { id, size_bytes, frames, chunks });
    assert!(sizes(MAX_PACK_BYTES + 1, 1, 1).is_err());
    assert!(sizes(MAX_PACK_BYTES, u32::MAX, u32::MAX).is_err());
    assert!(sizes(MAX_PACK_BYTES, 2, 1).is_err());
    assert!(sizes(100, 3, 3).is_err());
    let mut builder = PackBuilder::new(NONCE);
    assert!(builder.append(&vec![0; MAX_FRAME_BYTES + 1], content(1, 1, &[1])).is_err());
    assert!(builder.append(&[], content(1, 1, &[1])).is_err());
    assert!(builder.append(&[1], content(1, 1, &[])).is_err());
    assert!(builder.append(&[1], content(0, 0, &[1])).is_err());
    assert!(builder.append(&[1], content(5, 4, &[1])).is_err(), "a single chunk is the last one");
    assert!(builder.append(&[1], content(u32::MAX, u32::MAX, &[1, 2])).is_err());
    assert!(builder.is_empty());
}

#[test]
fn equal_content_makes_another_pack() {
    let frame = (vec![1; 10], content(30, 30, &[1]));
    let mut other = PackBuilder::new([4; 16]);
    other.append(&frame.0, frame.1.clone()).expect("fits");
    assert_ne!(build(&[frame]).0.id, other.finish().0.id);
}

/// The stored form is a promise to every snapshot ever taken.
#[test]
fn golden_pack() {
    let (pack, _, bytes) =
        build(&[(b"first frame".to_vec(), content(4096, 5, &[1, 2])), (b"second".to_vec(), content(8200, 8200, &[3]))]);
    let golden = include_bytes!("../../testdata/pack-v2.bin");
    assert_eq!(bytes, golden, "the pack format has changed: that needs a new version");
    assert_eq!(pack.id.to_string(), include_str!("../../testdata/pack-v2.id").trim());
}
