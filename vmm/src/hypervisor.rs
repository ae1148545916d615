//! The node's guests: boots them, restores them from a pool of waiting VMMs, and takes them all down at the end.
//!
//! ```text
//!   prewarm ─▶ pool: VMM started, disk server connected to it, no memory, no disk, no state
//!                │ take (or start one, when none waits)
//!                ▼
//!   restore:  attach memory image ─▶ attach disk base ─▶ load device state ─▶ resume ─▶ Vm
//!                │ any step fails: the VMM is killed, the caller gets the reason, nothing is left
//!                └─▶ refill in the background
//! ```
//!
//! Invariants:
//! - A VMM is used for one guest; one that a restore failed in is not used again.
//! - A restore that is abandoned by its caller leaves no process: what it held kills what it owned.
//! - After [`Hypervisor::shutdown`] no VMM of this hypervisor lives and none starts.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::cgroup::CgroupMode;
use crate::driver::{DriverError, RestoreTimings, StartMode, Started, VmControl, VmDriver};
use crate::facts::HostFacts;
use crate::image::{FillPolicy, MemoryImage};
use crate::nbd::DiskServer;
use crate::overlay::Overlay;
use crate::pageserver::{PageServer, ServeConfig};
use crate::pool::Pool;
use crate::preload::PreloadChannel;
use crate::process::{Identity, Spawner, VmmProcess};
use crate::qemu::accel::AcceleratorChoice;
use crate::qemu::{Qemu, QemuConfig};
use crate::shape::Shape;
use crate::source::PageSource;
use crate::vm::{Inner, Parts, Vm, VmError, VmFailure, became};

/// Nobody, in every distribution.
const NOBODY: u32 = 65534;
const WARM_SHAPES: usize = 4;
/// The wait after a VMM did not start, before the pool tries again.
const REFILL_BACKOFF: Duration = Duration::from_secs(1);

/// How guests are run on this node. Make one with [`VmmConfig::new`] and change what should differ.
#[derive(Debug, Clone)]
pub struct VmmConfig {
    /// QEMU.
    pub qemu: PathBuf,
    /// The guest kernel. Must be readable for the VMM's user; its directory need not be. So must the next two.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: PathBuf,
    /// The library that holds guest memory inside the VMM.
    pub preload_so: PathBuf,
    /// Where disk layers live, as files without names.
    pub run_dir: PathBuf,
    /// How many VMMs wait for each shape that was restored lately.
    pub pool_target: usize,
    /// How many guests may run at once. Waiting VMMs do not count.
    pub max_vms: usize,
    /// As which user and group VMMs run when the node is root; `None`: as root. Ignored when it is not.
    pub vmm_uid: Option<u32>,
    /// Whether VMMs die when the node dies.
    pub die_with_node: bool,
    /// Which accelerator.
    pub accelerator: AcceleratorChoice,
    /// Where VMMs' control groups are made.
    pub cgroups: CgroupMode,
    /// Size of each VMM's buffer of translated code, in MiB.
    pub tcg_buffer_mib: u32,
    /// Whether guests reach the outside.
    pub egress: bool,
    /// How page faults are served.
    pub serve: ServeConfig,
    /// How long a chunk of a disk's base is waited for.
    pub disk_policy: FillPolicy,
    /// How long a VMM may take to start, and for each command.
    pub patience: Duration,
}

impl VmmConfig {
    /// The usual settings.
    pub fn new(
        kernel: impl Into<PathBuf>,
        initrd: impl Into<PathBuf>,
        preload_so: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
    ) -> Self {
        Self {
            qemu: "qemu-system-x86_64".into(),
            kernel: kernel.into(),
            initrd: initrd.into(),
            preload_so: preload_so.into(),
            run_dir: run_dir.into(),
            pool_target: 2,
            max_vms: 256,
            vmm_uid: Some(NOBODY),
            die_with_node: true,
            accelerator: AcceleratorChoice::Auto,
            cgroups: CgroupMode::Auto,
            tcg_buffer_mib: 64,
            egress: false,
            serve: ServeConfig::default(),
            disk_policy: FillPolicy::default(),
            patience: Duration::from_secs(30),
        }
    }
}

/// What a guest is restored from.
#[derive(Clone)]
pub struct RestoreFrom {
    /// Its memory, shared with other guests of the same snapshot.
    pub memory: Arc<MemoryImage>,
    /// Its disk; may be shared too.
    pub disk: Arc<dyn PageSource>,
    /// Its device state, as captured.
    pub device_state: Bytes,
}

impl std::fmt::Debug for RestoreFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestoreFrom")
            .field("memory", &self.memory)
            .field("device_state_bytes", &self.device_state.len())
            .finish_non_exhaustive()
    }
}

/// A VMM with its disk server: a guest that lacks memory, disk and state.
#[derive(Debug)]
struct Shell {
    process: VmmProcess,
    memory: Arc<PreloadChannel>,
    control: Arc<dyn VmControl>,
    ports: Vec<(crate::shape::GuestPort, std::net::SocketAddr)>,
    overlay: Arc<Overlay>,
    disk: DiskServer,
}

impl Shell {
    async fn kill(self) {
        self.process.kill().await;
        self.disk.stop().await;
    }
}

/// The guests of one node.
#[derive(Debug)]
pub struct Hypervisor {
    config: VmmConfig,
    driver: Arc<dyn VmDriver>,
    runtime: Handle,
    pool: Mutex<Pool<Shape, Shell>>,
    /// Changes whenever the pool does.
    pool_version: watch::Sender<u64>,
    refills: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    vms: Mutex<Vec<Weak<Inner>>>,
    closed: watch::Sender<bool>,
    this: Weak<Self>,
}

impl Hypervisor {
    /// Looks at the host (which takes a while: an accelerator is tried) and gets ready. Must be called on `runtime`.
    pub async fn new(config: VmmConfig, runtime: Handle) -> Result<Arc<Self>, VmError> {
        let failed =
            |step, cause: &dyn std::fmt::Display| VmError::Driver { pid: 0, cause: DriverError::new(step, cause) };
        std::fs::create_dir_all(&config.run_dir).map_err(|cause| failed("make the run directory", &cause))?;
        let spawner = Spawner::new(runtime.clone()).map_err(|cause| failed("start the spawner", &cause))?;
        let root = nix::unistd::geteuid().is_root();
        let identity = config.vmm_uid.filter(|_| root).map(|uid| Identity { uid, gid: uid });
        let qemu = QemuConfig {
            program: config.qemu.clone(),
            kernel: config.kernel.clone(),
            initrd: config.initrd.clone(),
            preload_so: config.preload_so.clone(),
            identity,
            die_with_node: config.die_with_node,
            accelerator: config.accelerator,
            cgroups: config.cgroups.clone(),
            tcg_buffer_mib: config.tcg_buffer_mib,
            egress: config.egress,
            patience: config.patience,
        };
        let driver = match spawn_blocking(move || Qemu::new(qemu, spawner)).await {
            Ok(driver) => driver.map_err(|cause| VmError::Driver { pid: 0, cause })?,
            Err(cause) => return Err(failed("look at the host", &cause)),
        };
        Ok(Self::with_driver(config, Arc::new(driver), runtime))
    }

    /// A hypervisor over another driver.
    pub fn with_driver(config: VmmConfig, driver: Arc<dyn VmDriver>, runtime: Handle) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new_cyclic(|this| Self {
            driver,
            runtime,
            pool: Mutex::new(Pool::new(WARM_SHAPES)),
            pool_version: watch::Sender::new(0),
            // Refilling may take half of the host, so that guests go on meanwhile.
            refills: Arc::new(Semaphore::new((cores / 2).max(1))),
            slots: Arc::new(Semaphore::new(config.max_vms)),
            vms: Mutex::new(Vec::new()),
            closed: watch::Sender::new(false),
            config,
            this: this.clone(),
        })
    }

    /// What must be equal on a host that restores what this one captured.
    pub fn facts(&self) -> &HostFacts {
        self.driver.facts()
    }

    /// How many more guests may run.
    pub fn free_slots(&self) -> usize {
        self.slots.available_permits()
    }

    /// Keeps `count` VMMs of this shape waiting from now on.
    pub fn prewarm(&self, shape: Shape, count: usize) {
        if shape.check().is_err() || *self.closed.borrow() {
            return;
        }
        let surplus = self.pool.lock().want(shape, count);
        drop(surplus);
        self.refill();
    }

    /// How many VMMs of this shape wait.
    pub fn pool_len(&self, shape: Shape) -> usize {
        self.pool.lock().ready(shape)
    }

    /// The processes of the VMMs that wait.
    pub fn pooled(&self) -> Vec<u32> {
        self.pool.lock().waiting().map(|shell| shell.process.pid()).collect()
    }

    /// Returns when as many VMMs of this shape wait as should.
    pub async fn warmed(&self, shape: Shape) {
        let mut version = self.pool_version.subscribe();
        while !self.pool.lock().is_warm(shape) {
            // The sender lives as long as this.
            let _ = version.changed().await;
        }
    }

    /// Boots a guest on a disk: for templates. Running when this returns, which says nothing of the guest's software.
    pub async fn boot(&self, shape: Shape, disk_base: Arc<dyn PageSource>, cmdline_extra: &str) -> Result<Vm, VmError> {
        let permit = self.admit(shape)?;
        let mode = StartMode::Boot { cmdline: cmdline_extra.to_owned() };
        let shell = self.start_shell(shape, mode).await?;
        let pid = shell.process.pid();
        let memory = Arc::clone(&shell.memory);
        let prepared = async {
            shell.overlay.attach(disk_base).map_err(|cause| VmError::Disk { pid, cause })?;
            let regions = spawn_blocking(move || memory.regions()).await;
            let regions = regions.map_err(|cause| cause.to_string()).and_then(|r| r.map_err(|cause| cause.to_string()));
            let regions = regions.map_err(|reason| VmError::Memory { pid, reason })?;
            shell.control.resume().await.map_err(|cause| VmError::Driver { pid, cause })?;
            Ok(regions)
        };
        match prepared.await {
            Ok(regions) => Ok(self.adopt(shape, shell, regions, None, permit)),
            Err(error) => {
                shell.kill().await;
                Err(error)
            }
        }
    }

    /// Restores a guest. It runs when this returns; its pages and blocks come when it touches them.
    pub async fn restore(&self, shape: Shape, from: RestoreFrom, timings: &mut RestoreTimings) -> Result<Vm, VmError> {
        let permit = self.admit(shape)?;
        let found = from.memory.geometry().size_bytes();
        if found != shape.memory_bytes {
            let reason = format!("a memory image of {found} bytes does not fit {shape}");
            return Err(VmError::Unfit { reason });
        }
        let begun = Instant::now();
        let (shell, pooled) = match self.take(shape) {
            Some(shell) => (shell, true),
            None => (self.start_shell(shape, StartMode::Waiting).await?, false),
        };
        *timings = RestoreTimings { pooled, take: begun.elapsed(), ..RestoreTimings::default() };
        match self.fill(shell, shape, from, timings, permit).await {
            Ok(vm) => Ok(vm),
            Err((shell, error)) => {
                shell.kill().await;
                Err(error)
            }
        }
    }

    async fn fill(
        &self,
        shell: Shell,
        shape: Shape,
        from: RestoreFrom,
        timings: &mut RestoreTimings,
        permit: OwnedSemaphorePermit,
    ) -> Result<Vm, (Shell, VmError)> {
        let pid = shell.process.pid();
        let begun = Instant::now();
        let RestoreFrom { memory: image, disk, device_state } = from;
        if let Err(cause) = shell.overlay.attach(disk) {
            return Err((shell, VmError::Disk { pid, cause }));
        }
        let (channel, runtime, config) = (Arc::clone(&shell.memory), self.runtime.clone(), self.config.serve);
        let attached = spawn_blocking(move || {
            let (uffd, regions) = channel.attach(&image).map_err(|cause| cause.to_string())?;
            let served = PageServer::serve_with(uffd, regions.clone(), image, runtime, config);
            served.map(|served| (served, regions)).map_err(|cause| cause.to_string())
        });
        let (served, regions) = match attached.await {
            Ok(Ok(attached)) => attached,
            Ok(Err(reason)) => return Err((shell, VmError::Memory { pid, reason })),
            Err(cause) => return Err((shell, VmError::Memory { pid, reason: cause.to_string() })),
        };
        timings.attach = begun.elapsed();
        let begun = Instant::now();
        // Loading touches guest memory; if that cannot be had, loading never ends.
        let (mut memory_fault, mut disk_fault) = (served.failure(), shell.disk.failure());
        let loaded = tokio::select! {
            loaded = shell.control.load_state(&device_state) => loaded.map_err(|cause| VmError::Driver { pid, cause }),
            fault = became(&mut memory_fault) => Err(VmError::Failed { pid, failure: VmFailure::Memory(fault) }),
            fault = became(&mut disk_fault) => Err(VmError::Failed { pid, failure: VmFailure::Disk(fault) }),
        };
        timings.load = begun.elapsed();
        let begun = Instant::now();
        let running = match loaded {
            Ok(()) => shell.control.resume().await.map_err(|cause| VmError::Driver { pid, cause }),
            Err(error) => Err(error),
        };
        timings.resume = begun.elapsed();
        if let Err(mut error) = running {
            // QEMU says why a state does not load on its standard error, and exits.
            let exit = shell.process.kill().await;
            if let VmError::Driver { cause, .. } = &mut error {
                cause.reason = format!("{}; it ended: {exit}", cause.reason);
            }
            let _ = spawn_blocking(move || drop(served)).await;
            return Err((shell, error));
        }
        Ok(self.adopt(shape, shell, regions, Some(served), permit))
    }

    fn adopt(
        &self,
        shape: Shape,
        shell: Shell,
        regions: Vec<crate::region::Region>,
        served: Option<crate::pageserver::ServedGuest>,
        permit: OwnedSemaphorePermit,
    ) -> Vm {
        let Shell { process, memory: _, control, ports, overlay, disk } = shell;
        let vm = Vm::assemble(Parts { shape, process, control, ports, regions, served, overlay, disk, permit });
        let mut vms = self.vms.lock();
        vms.retain(|vm| vm.strong_count() > 0);
        vms.push(Arc::downgrade(vm.inner()));
        vm
    }

    fn admit(&self, shape: Shape) -> Result<OwnedSemaphorePermit, VmError> {
        shape.check().map_err(|error| VmError::Unfit { reason: error.to_string() })?;
        if *self.closed.borrow() {
            return Err(VmError::Closed);
        }
        let permit = Arc::clone(&self.slots).try_acquire_owned();
        permit.map_err(|_| VmError::Full { max_vms: self.config.max_vms })
    }

    /// A waiting VMM that is alive, if there is one. Starts refilling either way.
    fn take(&self, shape: Shape) -> Option<Shell> {
        let taken = {
            let mut pool = self.pool.lock();
            if !pool.knows(shape) {
                drop(pool.want(shape, self.config.pool_target));
            }
            std::iter::from_fn(|| pool.take(shape)).find(|shell| !shell.process.has_exited())
        };
        self.refill();
        taken
    }

    async fn start_shell(&self, shape: Shape, mode: StartMode) -> Result<Shell, VmError> {
        let failed = |cause: std::io::Error| VmError::Disk { pid: 0, cause: cause.into() };
        let (directory, policy, runtime) = (self.config.run_dir.clone(), self.config.disk_policy, self.runtime.clone());
        let made = spawn_blocking(move || Overlay::new(directory, shape.disk_bytes, policy, runtime));
        let overlay = made.await.map_err(|cause| failed(std::io::Error::other(cause)))?.map_err(failed)?;
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let disk = DiskServer::serve(UnixStream::from_std(ours).map_err(failed)?, Arc::clone(&overlay));
        let started = self.driver.start(shape, mode, theirs.into()).await;
        let Started { process, memory, control, ports } = started.map_err(|cause| VmError::Driver { pid: 0, cause })?;
        let shell = Shell { process, memory: Arc::new(memory), control: control.into(), ports, overlay, disk };
        if *self.closed.borrow() {
            shell.kill().await;
            return Err(VmError::Closed);
        }
        Ok(shell)
    }

    /// Starts what the pool lacks, a few at a time, in the background.
    fn refill(&self) {
        loop {
            let Ok(turn) = Arc::clone(&self.refills).try_acquire_owned() else { return };
            let shape = {
                let mut pool = self.pool.lock();
                let Some(shape) = pool.to_start() else { return };
                pool.begin(shape);
                shape
            };
            let this = self.this.clone();
            self.runtime.spawn(async move {
                let Some(hypervisor) = this.upgrade() else { return };
                let started = hypervisor.start_shell(shape, StartMode::Waiting).await;
                let failed = started.is_err();
                let started = started.inspect_err(|error| tracing::warn!(%error, %shape, "the pool lacks a VMM")).ok();
                let surplus = hypervisor.pool.lock().finish(shape, started);
                hypervisor.pool_version.send_modify(|version| *version += 1);
                if let Some(shell) = surplus {
                    shell.kill().await;
                }
                if failed {
                    sleep(REFILL_BACKOFF).await;
                }
                drop(turn);
                hypervisor.refill();
            });
        }
    }

    /// Kills every VMM, waiting or running, and starts none any more. Returns when all are reaped.
    pub async fn shutdown(&self) {
        self.closed.send_replace(true);
        let waiting = self.pool.lock().close();
        self.pool_version.send_modify(|version| *version += 1);
        for shell in waiting {
            shell.kill().await;
        }
        let running: Vec<_> = self.vms.lock().drain(..).filter_map(|vm| vm.upgrade()).collect();
        for vm in running {
            vm.kill().await;
        }
        // Starts under way end by themselves: they see that all is closed.
        let all = (std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1);
        let _ = self.refills.acquire_many(all as u32).await;
        // And those that were dropped, by a pool that had too many or by an owner that went away.
        self.driver.all_ended().await;
    }
}
