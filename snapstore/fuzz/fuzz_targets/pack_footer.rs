//! The tail of a pack of any bytes, also with its checksum put right: refused, or places that lie inside the pack.

#![no_main]

use libfuzzer_sys::fuzz_target;
use snapyard_snapstore_fuzz::ids::PackId;
use snapyard_snapstore_fuzz::pack::{self, PackRef};

fn check(pack: &PackRef, tail: &[u8]) {
    if let Ok(frames) = pack::parse_tail(pack, tail) {
        let end = pack.size_bytes - pack::tail_len(pack);
        assert!(frames.iter().all(|frame| frame.offset >= 24 && frame.offset + u64::from(frame.len) <= end));
        assert_eq!(frames.iter().map(|frame| frame.content.chunks.len()).sum::<usize>(), pack.chunks as usize);
    }
}

fuzz_target!(|input: (u64, u8, u8, Vec<u8>)| {
    let (size_bytes, frames, chunks, mut tail) = input;
    let id = PackId([0; 32]);
    let _ = pack::decode_footer(&tail);
    let _ = pack::peek(id, &tail);
    let mut pack = PackRef { id, size_bytes, frames: frames.into(), chunks: chunks.into() };
    check(&pack, &tail);
    // Sizes that fit each other and a checksum that is right, so that the records are reached.
    pack.frames = pack.frames.min(pack.chunks);
    tail.resize(usize::try_from(pack::tail_len(&pack)).expect("small"), 0);
    let records = tail.len() - 56;
    let mut at = 0;
    let mut frames_bytes = 0;
    while let Some(record) = tail.get(at..at + 8).filter(|_| at + 8 <= records) {
        frames_bytes += u64::from(u32::from_le_bytes([record[0], record[1], record[2], record[3]]));
        let count = u32::from_le_bytes([record[4], record[5], record[6], record[7]]);
        at = at.saturating_add(16).saturating_add((count as usize).saturating_mul(16));
    }
    pack.size_bytes = 24_u64.saturating_add(frames_bytes).saturating_add(tail.len() as u64);
    tail[records..records + 8].copy_from_slice(&pack.size_bytes.to_le_bytes());
    tail[records + 8..records + 12].copy_from_slice(&pack.frames.to_le_bytes());
    tail[records + 12..records + 16].copy_from_slice(&pack.chunks.to_le_bytes());
    let checksum = *blake3::hash(&tail[..records + 16]).as_bytes();
    tail[records + 16..records + 48].copy_from_slice(&checksum);
    tail[records + 48..].copy_from_slice(b"SYPKEND\x02");
    check(&pack, &tail);
    let _ = pack::peek(id, &tail);
});
