//! Content-addressed store for the images of guests.
//!
//! An image is cut into chunks, each chunk is known by the keyed hash of its bytes, new chunks are written into packs, and
//! a manifest says which chunks a snapshot consists of.

pub mod catalog;
pub mod clock;
pub mod ids;
pub mod s3d;
