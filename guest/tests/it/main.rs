//! The agent over its three ports, as programs on this machine: the same code as in a guest, without its cgroup, clock
//! and names. Each test has an agent of its own.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;
mod control;
mod files;
mod filesystem;
mod process;
