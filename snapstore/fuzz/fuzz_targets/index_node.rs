//! An index node of any bytes: refused, or exactly what encodes to these bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use snapyard_snapstore_fuzz::index::{FANOUT, Level, decode_node, encode_node};

fuzz_target!(|input: (u16, bool, Vec<u8>)| {
    let (ids, root, bytes) = input;
    let level = if root { Level::Root } else { Level::Page };
    for ids in [usize::from(ids), FANOUT, bytes.len().saturating_sub(8) / 32] {
        if let Ok(decoded) = decode_node(level, ids, &bytes) {
            assert_eq!(decoded.len(), ids);
            if let Some(encoded) = encode_node(level, &decoded) {
                assert_eq!(&encoded[..], &bytes[..]);
            }
        }
    }
});
