//! The seam between this crate's guest lifecycle and one kind of VMM.
//!
//! ```text
//!   start(Boot) ────▶ stopped at its first instruction ─── resume ──▶ running ──┐
//!   start(Waiting) ─▶ waiting for a state ── load_state ──▶ stopped ── resume ──┤
//!                                                              ▲                │ stop
//!                                              save_state ─────┴────────────────┘
//! ```
//!
//! A driver turns these verbs into its VMM's language. What every VMM needs and what does not depend on its kind — memory
//! images and page faults, the disk server, the pool, failure reports — is above the seam.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::facts::HostFacts;
use crate::preload::PreloadChannel;
use crate::process::VmmProcess;
use crate::shape::{GuestPort, Shape};

/// Something a VMM did not do.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{step}: {reason}")]
pub struct DriverError {
    /// What was tried.
    pub step: &'static str,
    /// Why it failed.
    pub reason: String,
}

impl DriverError {
    /// An error of this step.
    pub fn new(step: &'static str, cause: impl std::fmt::Display) -> Self {
        Self { step, reason: cause.to_string() }
    }
}

/// What a VMM is started for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartMode {
    /// To boot a kernel; these words are added to its command line.
    Boot {
        /// Added to the kernel's command line.
        cmdline: String,
    },
    /// To wait for a saved state.
    Waiting,
}

/// A VMM that was started and does not run yet.
#[derive(Debug)]
pub struct Started {
    /// The process.
    pub process: VmmProcess,
    /// The library inside it that holds its memory.
    pub memory: PreloadChannel,
    /// How to tell it things.
    pub control: Box<dyn VmControl>,
    /// Where on loopback the guest's ports are.
    pub ports: Vec<(GuestPort, SocketAddr)>,
}

/// One kind of VMM.
#[async_trait]
pub trait VmDriver: std::fmt::Debug + Send + Sync + 'static {
    /// What must be equal on the host that takes a snapshot and the one that restores it.
    fn facts(&self) -> &HostFacts;

    /// Starts a VMM that takes its disk from the NBD server at the other end of `disk`. Returns when it answers on its
    /// control channel. It may connect to the disk before that, and must not read it.
    async fn start(&self, shape: Shape, mode: StartMode, disk: OwnedFd) -> Result<Started, DriverError>;

    /// Returns when nothing is left of any VMM. All have been told to end, and none is started any more.
    async fn all_ended(&self);
}

/// The control channel of one VMM.
#[async_trait]
pub trait VmControl: std::fmt::Debug + Send + Sync + 'static {
    /// Stops the virtual CPUs. When it returns, no disk request is under way and memory does not change.
    async fn stop(&self) -> Result<(), DriverError>;

    /// Lets the virtual CPUs run, whatever stopped them.
    async fn resume(&self) -> Result<(), DriverError>;

    /// The state of the devices and CPUs of a stopped guest, without its memory. The guest stays stopped; after a failure
    /// it can still be resumed.
    async fn save_state(&self) -> Result<Bytes, DriverError>;

    /// Gives a waiting VMM its state; it is stopped afterwards. After a failure it is useless.
    async fn load_state(&self, state: &Bytes) -> Result<(), DriverError>;

    /// What the VMM announced as the reason of its end, if it did.
    fn last_words(&self) -> Option<String>;

    /// The end of what the guest wrote to its console.
    fn console(&self) -> String;
}

/// How long each part of a restore took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreTimings {
    /// Whether a waiting VMM was there.
    pub pooled: bool,
    /// Getting a VMM: from the pool, or by starting one.
    pub take: Duration,
    /// Mapping the memory image and starting its page server.
    pub attach: Duration,
    /// Loading the device state.
    pub load: Duration,
    /// Letting the guest run.
    pub resume: Duration,
}

impl RestoreTimings {
    /// From the request until the guest ran.
    pub fn total(&self) -> Duration {
        self.take + self.attach + self.load + self.resume
    }
}
