//! A frame of any bytes: refused, or decoded to the length it states; never a panic, never more memory than the cap.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use snapyard_snapstore_fuzz::chunk;

fuzz_target!(|input: &[u8]| {
    let check = |frame: Vec<u8>| {
        if let Ok(plain) = chunk::decode(&Bytes::from(frame)) {
            assert!(plain.len() <= chunk::MAX_PLAIN_BYTES);
            let again = chunk::encode(&plain, 1).expect("within the cap");
            assert_eq!(chunk::decode(&again).expect("its own frame"), plain);
        }
    };
    check(input.to_vec());
    // The same with the magic in place, so that the body is reached.
    if input.len() >= 8 {
        let mut framed = input.to_vec();
        framed[..4].copy_from_slice(&[0xC5, input[1] % 3, 0, 0]);
        check(framed);
    }
});
