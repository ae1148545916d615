//! The gRPC handlers: they validate, convert and call. Every operation runs in a task of the node, so a caller that
//! hangs up does not stop it in the middle.

mod catalog;
mod convert;
mod node;
mod storage;

pub use catalog::CatalogService;
pub use node::NodeService;
pub use storage::StorageService;
