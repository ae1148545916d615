//! The node service: the guests of one machine, restored from and captured into the store.
//!
//! `node` is the only place where the store and the VMMs meet. What is where:
//!
//! | module | owns |
//! | --- | --- |
//! | [`config`] | what a node is told at start |
//! | [`node`] | start and stop: opens everything, serves gRPC, joins its tasks |
//! | [`residency`] | snapshots that this node has open, and their shared memory images |
//! | [`source`] | the adapter from stored images to the page sources that VMMs read |
//! | [`sandbox`] | one sandbox: its phases, its VM, its guardian task |
//! | [`ops`] | create, kill, time-out, snapshot, rollback: one file an operation |
//! | [`standby`] | guests restored ahead of need |
//! | [`template`] | recipes, root file systems, and the first capture |
//! | [`capture`] | from a stopped guest's dirty pages to a committed snapshot |
//! | [`agent`] | the client of the control port inside a guest |
//! | [`gateway`] | the way in for the sandbox proxy |
//! | [`upload`] | background upload of what is durable here to the object store |
//! | [`recover`] | what a restart finds of its predecessor |
//! | [`service`] | the gRPC handlers: they validate, convert and call |
//! | [`error`] | what can go wrong, and the status that it becomes |

pub mod agent;
pub mod capture;
pub mod config;
pub mod error;
pub mod gateway;
pub mod maintenance;
mod node;
pub mod ops;
pub mod recover;
pub mod residency;
pub mod sandbox;
pub mod service;
pub mod source;
pub mod standby;
pub mod template;
pub mod upload;
mod working_set;

pub use config::NodeConfig;
pub use error::NodeError;
pub use node::Node;
