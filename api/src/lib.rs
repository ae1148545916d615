//! The API tier: REST for the public SDKs, and the proxy into sandboxes, on one plaintext HTTP/1.1 port.
//!
//! ```text
//!                         ┌─ a sandbox is named (header or host) ─▶ proxy ──▶ guest gateway of its node
//!   SDK ──HTTP/1.1──▶ serve
//!                         └─ otherwise ─▶ routes ──gRPC──▶ catalog, scheduler, the sandbox's node
//! ```
//!
//! The tier holds no state of its own: everything it answers comes from the catalog or a node, so any number of
//! instances may run. Handlers validate, convert and call; what a request means is decided behind gRPC.
//!
//! | module | concern |
//! | --- | --- |
//! | `serve` | the port: accept, dispatch, shutdown |
//! | `body` | request bodies: capped, read politely |
//! | `routes` | REST handlers, one file per resource |
//! | `fields`, `validate`, `names` | what a client may send (pure) |
//! | `wire` | what it gets back |
//! | `errors` | gRPC status to HTTP answer |
//! | `proxy` | the data plane |
//! | `placement` | room on a node, reserved and given back |
//! | `resume` | a paused sandbox gets a VM again |
//! | `clients` | gRPC channels |
//!
//! # A client that hangs up
//!
//! A REST request that has arrived whole is answered, whether or not its client still listens: it runs in a task of its
//! own from the moment its head is read. A create whose client is gone ends as an ordinary sandbox, with its timeout. A
//! client that hangs up within its body has asked for nothing. In the data plane the guest sees its client go.

mod body;
mod clients;
mod config;
mod errors;
mod fields;
mod names;
mod placement;
mod proxy;
mod resume;
mod routes;
mod serve;
mod team;
mod timing;
mod validate;
mod wire;

pub use clients::BadUrl;
pub use config::ApiConfig;
pub use serve::{ServeError, serve};
