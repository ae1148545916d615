//! What a node can do with sandboxes, one operation a file. Each takes the node's state and domain types, and leaves
//! what it found when it fails.

pub mod create;
pub mod kill;
pub mod pause;
pub mod restore;
pub mod resume;
pub mod rollback;
pub mod snapshot;
pub mod timeout;

pub use restore::{Timings, failure};
