//! What the memory tests share: a source of known bytes that can be held up or made to fail, and a stand-in VMM.
//!
//! The stand-in is this test binary, started again with the real preload library: it maps the placeholder as QEMU would,
//! and reads and writes that memory on command, each command on a thread of its own.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod guest;
pub mod source;
pub mod stand_in;
