//! The scheduler: which nodes there are, and which of them a new guest goes to.
//!
//! ```text
//!   node ──Register (stream of reports = lease)──▶ ┌──────────┐
//!                                                  │ registry │──candidates──▶ policy (pure)
//!   API ──Place / Release────────────────────────▶ └──────────┘
//! ```
//!
//! [`policy`] decides, [`registry`] remembers (nodes, reservations) and applies, [`serve`] speaks gRPC. Policy and
//! registry are plain data: the clock and the randomness are passed in, so a simulator can run the same code.
//!
//! Nothing here is durable. After a restart the nodes register again within their reconnect delay, and reservations
//! that were lost are covered by the sandboxes that the nodes report (starting ones included).

pub mod policy;
pub mod registry;
mod serve;

pub use serve::{SchedulerConfig, ServeError, serve};
