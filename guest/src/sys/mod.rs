//! What the standard library and `nix` do not offer: the only modules of this crate with `unsafe`.

pub mod cpu;
pub mod exit;
pub mod identity;
pub mod modules;
pub mod net;
pub mod spawn;
