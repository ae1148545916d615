use proptest::prelude::*;

use super::*;

const NONCE: [u8; 16] = [3; 16];

fn chunk(id: u8, len: u32) -> FrameChunk {
    FrameChunk { id: ChunkId([id; 32]), len }
}

fn build(frames: &[(Vec<u8>, Vec<FrameChunk>)]) -> (PackRef, Vec<PackFrame>, Vec<u8>) {
    let mut builder = PackBuilder::new(NONCE);
    let mut bytes = builder.header().to_vec();
    for (frame, chunks) in frames {
        builder.append(frame, chunks).expect("fits");
        bytes.extend_from_slice(frame);
    }
    let (pack, entries, tail) = builder.finish();
    bytes.extend_from_slice(&tail);
    (pack, entries, bytes)
}

fn two_frames() -> (PackRef, Vec<PackFrame>, Vec<u8>) {
    build(&[(vec![1; 10], vec![chunk(1, 4096), chunk(2, 100)]), (vec![2; 20], vec![chunk(3, 30)])])
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

fn frames() -> impl Strategy<Value = Vec<(Vec<u8>, Vec<FrameChunk>)>> {
    let chunks = prop::collection::vec((any::<u8>(), 1..5000u32).prop_map(|(id, len)| chunk(id, len)), 1..5);
    prop::collection::vec((prop::collection::vec(any::<u8>(), 1..100), chunks), 0..20)
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
        for (entry, (frame, chunks)) in read.iter().zip(&frames) {
            let start = usize::try_from(entry.offset).expect("small");
            prop_assert_eq!(&bytes[start..start + entry.len as usize], &frame[..]);
            prop_assert_eq!(&entry.chunks, chunks);
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
    assert!(patch(40, &u32::MAX.to_le_bytes()).is_err(), "a chunk over the cap");
    assert!(patch(40, &0u32.to_le_bytes()).is_err(), "an empty chunk");
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
    assert!(builder.append(&vec![0; MAX_FRAME_BYTES + 1], &[chunk(1, 1)]).is_err());
    assert!(builder.append(&[], &[chunk(1, 1)]).is_err());
    assert!(builder.append(&[1], &[]).is_err());
    assert!(builder.append(&[1], &[chunk(1, 0)]).is_err());
    assert!(builder.append(&[1], &[chunk(1, u32::MAX), chunk(2, u32::MAX)]).is_err());
    assert!(builder.is_empty());
}

#[test]
fn equal_content_makes_another_pack() {
    let frame = (vec![1; 10], vec![chunk(1, 30)]);
    let mut other = PackBuilder::new([4; 16]);
    other.append(&frame.0, &frame.1).expect("fits");
    assert_ne!(build(&[frame]).0.id, other.finish().0.id);
}

/// The stored form is a promise to every snapshot ever taken.
#[test]
fn golden_pack() {
    let (pack, _, bytes) = build(&[
        (b"first frame".to_vec(), vec![chunk(1, 4096), chunk(2, 5)]),
        (b"second".to_vec(), vec![chunk(3, 8200)]),
    ]);
    let golden = include_bytes!("../../testdata/pack-v2.bin");
    assert_eq!(bytes, golden, "the pack format has changed: that needs a new version");
    assert_eq!(pack.id.to_string(), include_str!("../../testdata/pack-v2.id").trim());
}
