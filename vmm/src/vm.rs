//! A guest and all that serves it: its VMM, its memory, its disk.
//!
//! ```text
//!            ┌── stop ─ save state ─ copy dirty pages ─ freeze disk ─ resume ──┐
//!            ▼                    (capture, one at a time)                     │
//!   running ─┴────────────────────────────────────────────────────────────────▶ running
//!      │ VMM exits · a page or a block cannot be had, ever
//!      ▼
//!   failed (says why; the owner kills it)        kill: process reaped, threads and tasks joined, nothing left
//! ```
//!
//! Invariants:
//! - Whatever fails in a capture, the guest is told to run again. A caller that goes away in the middle changes nothing:
//!   the capture ends by itself, and its result is dropped.
//! - A guest that lacks bytes waits. It is reported as failed after the deadline and never gets others instead.
//! - Dropping a `Vm` kills its process, at the latest when a capture under way has ended; [`Vm::kill`] also waits for it.

use std::fs;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::Instant;

use crate::capture::{DirtyPages, capture_dirty, private_bytes};
use crate::driver::{DriverError, VmControl};
use crate::nbd::{DiskFault, DiskServer};
use crate::overlay::{DiskError, FrozenDisk, Overlay};
use crate::pageserver::{FaultStats, GuestFault, ServedGuest};
use crate::process::{VmmExit, VmmProcess};
use crate::region::Region;
use crate::shape::{GuestPort, Shape};
use crate::source::ChunkNo;

/// A guest operation that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The node has as many guests as it may have. Nothing happened.
    #[error("the node runs {max_vms} guests already")]
    Full {
        /// The limit.
        max_vms: usize,
    },
    /// The hypervisor is being shut down. Nothing happened.
    #[error("the node is shutting down")]
    Closed,
    /// No machine has this shape, or what was given does not fit it. Nothing happened.
    #[error("{reason}")]
    Unfit {
        /// What does not fit.
        reason: String,
    },
    /// The VMM did not do something.
    #[error("VMM {pid}: {cause}")]
    Driver {
        /// Its process id; 0 if it did not start.
        pid: u32,
        /// What, and why.
        #[source]
        cause: DriverError,
    },
    /// The guest's memory could not be mapped, served or copied.
    #[error("VMM {pid}: memory: {reason}")]
    Memory {
        /// The VMM's process id.
        pid: u32,
        /// Why.
        reason: String,
    },
    /// The guest's disk failed.
    #[error("VMM {pid}: {cause}")]
    Disk {
        /// The VMM's process id; 0 if there is none yet.
        pid: u32,
        /// Why.
        #[source]
        cause: DiskError,
    },
    /// The guest has failed, before or meanwhile.
    #[error("VMM {pid}: {failure}")]
    Failed {
        /// The VMM's process id.
        pid: u32,
        /// How.
        failure: VmFailure,
    },
}

/// How a guest ended against its owner's will.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmFailure {
    /// The VMM exited: killed, crashed, or because the guest shut down or panicked.
    #[error("the VMM ended: {reason}")]
    Exited {
        /// Signal or status, and what the VMM said of it.
        reason: String,
    },
    /// A page could not be had.
    #[error(transparent)]
    Memory(#[from] GuestFault),
    /// A block of the disk could not be had.
    #[error(transparent)]
    Disk(#[from] DiskFault),
    /// The guest could not be let run again after a capture.
    #[error("the guest stays stopped: {reason}")]
    Stuck {
        /// Why.
        reason: String,
    },
}

/// A guest's whole state at one instant.
#[derive(Debug)]
pub struct Capture {
    /// Devices and CPUs.
    pub device_state: Bytes,
    /// The pages that the guest wrote since it was restored; for one that was booted, all that it ever wrote.
    pub dirty: DirtyPages,
    /// The disk.
    pub disk: FrozenDisk,
    /// For how long the guest was stopped. If it stays stopped: until the state was complete.
    pub pause: Duration,
}

/// What a guest costs and did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes of the VMM process that nobody shares.
    pub private_bytes: u64,
    /// How much of that is pages that the guest wrote.
    pub guest_private_bytes: u64,
    /// What the page server did; zero for a booted guest.
    pub faults: FaultStats,
}

/// What becomes of the guest after a capture that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Afterwards {
    Run,
    StayStopped,
}

/// All that makes a guest, assembled.
#[derive(Debug)]
pub(crate) struct Parts {
    pub shape: Shape,
    pub process: VmmProcess,
    pub control: Arc<dyn VmControl>,
    pub ports: Vec<(GuestPort, SocketAddr)>,
    pub regions: Vec<Region>,
    pub served: Option<ServedGuest>,
    pub overlay: Arc<Overlay>,
    pub disk: DiskServer,
    pub permit: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct Services {
    served: Option<ServedGuest>,
    disk: Option<DiskServer>,
    permit: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    shape: Shape,
    process: VmmProcess,
    control: Arc<dyn VmControl>,
    ports: Vec<(GuestPort, SocketAddr)>,
    regions: Vec<Region>,
    overlay: Arc<Overlay>,
    services: Mutex<Services>,
    capturing: AsyncMutex<()>,
    failed: watch::Receiver<Option<VmFailure>>,
    report: mpsc::UnboundedSender<VmFailure>,
    watcher: JoinHandle<()>,
}

/// A guest.
#[derive(Debug)]
pub struct Vm {
    inner: Arc<Inner>,
}

impl Vm {
    pub(crate) fn assemble(parts: Parts) -> Self {
        let Parts { shape, process, control, ports, regions, served, overlay, disk, permit } = parts;
        let (report, reports) = mpsc::unbounded_channel();
        let (sender, failed) = watch::channel(None);
        let memory = served.as_ref().map(ServedGuest::failure);
        let watch = first_failure(process.exit(), memory, disk.failure(), reports, Arc::clone(&control));
        let pid = process.pid();
        let watcher = tokio::spawn(async move {
            let failure = watch.await;
            tracing::warn!(pid, %failure, "guest failed");
            sender.send_replace(Some(failure));
            // Receivers that come later still see it: the value stays as long as the receiver in `Inner`.
        });
        let services = Mutex::new(Services { served, disk: Some(disk), permit: Some(permit) });
        let capturing = AsyncMutex::new(());
        let inner =
            Inner { shape, process, control, ports, regions, overlay, services, capturing, failed, report, watcher };
        Self { inner: Arc::new(inner) }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// The machine's sizes.
    pub fn shape(&self) -> Shape {
        self.inner.shape
    }

    /// The VMM's process id.
    pub fn pid(&self) -> u32 {
        self.inner.process.pid()
    }

    /// Where a port of the guest is reached from this host.
    pub fn port(&self, port: GuestPort) -> SocketAddr {
        let found = self.inner.ports.iter().find(|(known, _)| *known == port);
        found.map(|(_, address)| *address).expect("a driver gives every port")
    }

    /// Becomes `Some` when the guest has failed, and stays so. Closed without a value: the guest was killed by its owner.
    pub fn failed(&self) -> watch::Receiver<Option<VmFailure>> {
        self.inner.failed.clone()
    }

    /// The end of what the guest wrote to its console.
    pub fn console(&self) -> String {
        self.inner.control.console()
    }

    /// Takes the guest's state at one instant; the guest is stopped meanwhile and runs on afterwards, whatever happens.
    pub async fn capture(&self) -> Result<Capture, VmError> {
        self.capture_then(Afterwards::Run).await
    }

    /// Like [`Vm::capture`], but the guest stays stopped if it succeeds, and nothing happens to it after that instant.
    /// Then either kill it or [`Vm::resume`] it.
    pub async fn capture_and_stay_stopped(&self) -> Result<Capture, VmError> {
        self.capture_then(Afterwards::StayStopped).await
    }

    async fn capture_then(&self, afterwards: Afterwards) -> Result<Capture, VmError> {
        let inner = Arc::clone(&self.inner);
        let pid = self.pid();
        match tokio::spawn(async move { inner.capture(afterwards).await }).await {
            Ok(result) => result,
            Err(cause) => Err(VmError::Driver { pid, cause: DriverError::new("capture", cause) }),
        }
    }

    /// Stops the guest's CPUs until [`Vm::resume`]; its clock stops with them.
    pub async fn pause(&self) -> Result<(), VmError> {
        let _alone = self.inner.capturing.lock().await;
        self.inner.control.stop().await.map_err(|cause| self.inner.driver_error(cause))
    }

    /// Lets a guest run that [`Vm::pause`] or a capture left stopped. A running guest runs on.
    pub async fn resume(&self) -> Result<(), VmError> {
        let _alone = self.inner.capturing.lock().await;
        self.inner.control.resume().await.map_err(|cause| self.inner.driver_error(cause))
    }

    /// Kills the guest. When this returns, the process is reaped, its threads and tasks have ended, its control group is
    /// gone and another guest may take its place. May be called again.
    pub async fn kill(&self) {
        self.inner.kill().await;
    }

    /// What the guest costs and did so far.
    pub async fn memory_stats(&self) -> MemoryStats {
        let faults = self.inner.services.lock().served.as_ref().map(ServedGuest::stats).unwrap_or_default();
        let (pid, regions) = (self.pid(), self.inner.regions.clone());
        let measured = spawn_blocking(move || {
            // A VMM that has just ended costs nothing.
            (process_private_bytes(pid).unwrap_or(0), private_bytes(pid, &regions).unwrap_or(0))
        });
        let (private_bytes, guest_private_bytes) = measured.await.unwrap_or_default();
        MemoryStats { private_bytes, guest_private_bytes, faults }
    }

    /// What the guest touches of its images.
    pub fn touches(&self) -> Touches {
        Touches(Arc::downgrade(&self.inner))
    }
}

/// What a guest touches of its images, for as long as it is there. Keeps nothing of it.
#[derive(Debug, Clone)]
pub struct Touches(Weak<Inner>);

impl Touches {
    /// The chunks of the memory image that it touched, in order of the first touch; empty for a booted guest.
    pub fn memory(&self) -> Vec<ChunkNo> {
        let Some(inner) = self.0.upgrade() else { return Vec::new() };
        inner.services.lock().served.as_ref().map(ServedGuest::touched).unwrap_or_default()
    }

    /// The chunks of the disk's base that it read, in order of the first read.
    pub fn disk(&self) -> Vec<ChunkNo> {
        self.0.upgrade().map(|inner| inner.overlay.touched()).unwrap_or_default()
    }
}

impl Inner {
    fn driver_error(&self, cause: DriverError) -> VmError {
        VmError::Driver { pid: self.process.pid(), cause }
    }

    async fn capture(&self, afterwards: Afterwards) -> Result<Capture, VmError> {
        let pid = self.process.pid();
        let _alone = self.capturing.lock().await;
        if let Some(failure) = self.failed.borrow().clone() {
            return Err(VmError::Failed { pid, failure });
        }
        let begun = Instant::now();
        let stopped = self.control.stop().await;
        let captured = match stopped {
            Ok(()) => self.capture_stopped().await,
            Err(cause) => Err(self.driver_error(cause)),
        };
        let (device_state, dirty, disk) = match captured {
            Ok(captured) if afterwards == Afterwards::StayStopped => captured,
            outcome => {
                if let Err(cause) = self.control.resume().await {
                    // Nobody listens if the guest was killed meanwhile.
                    let _ = self.report.send(VmFailure::Stuck { reason: cause.to_string() });
                    return Err(outcome.err().unwrap_or_else(|| self.driver_error(cause)));
                }
                outcome?
            }
        };
        let pause = begun.elapsed();
        tracing::debug!(pid, ?pause, dirty_bytes = dirty.dirty_bytes(), "captured");
        Ok(Capture { device_state, dirty, disk, pause })
    }

    async fn capture_stopped(&self) -> Result<(Bytes, DirtyPages, FrozenDisk), VmError> {
        let pid = self.process.pid();
        let device_state = self.control.save_state().await.map_err(|cause| self.driver_error(cause))?;
        let regions = self.regions.clone();
        let dirty = match spawn_blocking(move || capture_dirty(pid, &regions)).await {
            Ok(Ok(dirty)) => dirty,
            Ok(Err(cause)) => return Err(VmError::Memory { pid, reason: cause.to_string() }),
            Err(cause) => return Err(VmError::Memory { pid, reason: cause.to_string() }),
        };
        let disk = self.overlay.freeze().await.map_err(|cause| VmError::Disk { pid, cause })?;
        Ok((device_state, dirty, disk))
    }

    pub(crate) async fn kill(&self) {
        self.watcher.abort();
        self.process.kill().await;
        let (served, disk) = {
            let mut services = self.services.lock();
            (services.served.take(), services.disk.take())
        };
        // Joins the page server's thread.
        let _ = spawn_blocking(move || drop(served)).await;
        if let Some(disk) = disk {
            disk.stop().await;
        }
        self.overlay.close().await;
        drop(self.services.lock().permit.take());
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

/// What goes wrong first.
async fn first_failure(
    mut exit: watch::Receiver<Option<VmmExit>>,
    memory: Option<watch::Receiver<Option<GuestFault>>>,
    mut disk: watch::Receiver<Option<DiskFault>>,
    mut reports: mpsc::UnboundedReceiver<VmFailure>,
    control: Arc<dyn VmControl>,
) -> VmFailure {
    let memory = async move {
        match memory {
            Some(mut memory) => became(&mut memory).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        // The exit last: a failure that made the owner kill the VMM is the cause, the exit its effect.
        biased;
        fault = memory => VmFailure::Memory(fault),
        fault = became(&mut disk) => VmFailure::Disk(fault),
        Some(failure) = reports.recv() => failure,
        exit = became(&mut exit) => {
            let reason = match control.last_words() {
                Some(words) => format!("{words}; {exit}"),
                None => exit.to_string(),
            };
            VmFailure::Exited { reason }
        }
    }
}

/// The value that a channel takes; never, if it closes without one.
pub(crate) async fn became<T: Clone>(receiver: &mut watch::Receiver<Option<T>>) -> T {
    let value = receiver.wait_for(Option::is_some).await.ok().and_then(|value| value.clone());
    match value {
        Some(value) => value,
        None => std::future::pending().await,
    }
}

/// Bytes of a process that no other shares, from `/proc/PID/smaps_rollup`.
pub fn process_private_bytes(pid: u32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let kilobytes = rollup.lines().filter(|line| line.starts_with("Private_")).filter_map(|line| {
        let value = line.split_whitespace().nth(1)?;
        value.parse::<u64>().ok()
    });
    Some(kilobytes.sum::<u64>() * 1024)
}
