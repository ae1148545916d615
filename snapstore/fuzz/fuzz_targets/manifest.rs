//! A manifest of any bytes, and any payload under a good checksum: refused, or complete and within the caps.

#![no_main]

use libfuzzer_sys::fuzz_target;
use snapyard_snapstore_fuzz::manifest::{MANIFEST_VERSION, Manifest};

fuzz_target!(|input: &[u8]| {
    let check = |bytes: &[u8]| {
        if let Ok(manifest) = Manifest::decode(bytes) {
            assert!(manifest.memory.geometry().is_ok() && manifest.disk.geometry().is_ok());
            assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
        }
    };
    check(input);
    let mut sealed = b"SYMANIF\0".to_vec();
    sealed.extend_from_slice(&MANIFEST_VERSION.to_le_bytes());
    sealed.extend_from_slice(&u32::try_from(input.len()).expect("small").to_le_bytes());
    sealed.extend_from_slice(blake3::hash(input).as_bytes());
    sealed.extend_from_slice(input);
    check(&sealed);
});
