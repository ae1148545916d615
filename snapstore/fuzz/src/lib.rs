//! The stored formats, as the store has them, for the fuzz targets.

#![allow(dead_code, reason = "the store uses more of them than the targets do")]

#[path = "../../src/chunk.rs"]
pub mod chunk;
#[path = "../../src/ids.rs"]
pub mod ids;
#[path = "../../src/index.rs"]
pub mod index;
#[path = "../../src/manifest.rs"]
pub mod manifest;
#[path = "../../src/pack.rs"]
pub mod pack;
