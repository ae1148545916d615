//! The QEMU driver: microvm machines, all of whose channels are inherited descriptors.
//!
//! ```text
//!   node                                         QEMU (own user, own cgroup, seccomp)
//!    ├─ QMP socket pair ───────────────────────▶ monitor           qmp.rs
//!    ├─ console socket pair ───────────────────▶ serial port       tail.rs
//!    ├─ disk socket pair ──────────────────────▶ NBD client        nbd.rs
//!    ├─ library channel, /dev/userfaultfd ─────▶ preload library   preload.rs
//!    ├─ placeholder memfd ─────────────────────▶ memory backend (never used: the library maps over it)
//!    └─ kernel, initrd (opened once by the node) ▶ -kernel /proc/self/fd/N
//! ```
//!
//! So nothing has a path: no socket or file is left behind by a crash, and QEMU needs no access to the node's directories.
//!
//! State is saved and loaded as a migration that leaves out shared memory (`x-ignore-shared`: QEMU believes the backend
//! to be shared, the library maps it privately), through memfds given by `getfd`. The recipe is known to work with QEMU
//! 7.2; see `command` for each option's reason.

pub mod accel;
pub mod command;
mod migration;
mod network;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;

use crate::cgroup::{CgroupMode, Cgroups, Limits};
use crate::descriptors::inherit;
use crate::driver::{DriverError, StartMode, Started, VmControl, VmDriver};
use crate::facts::{Accelerator, HostFacts, host_cpu, kernel_id, measure_tsc_khz};
use crate::preload::{Preload, placeholder};
use crate::process::{Identity, Spawner, VmmProcess, inherit_nothing};
use crate::qmp::{Qmp, QmpError};
use crate::shape::Shape;
use crate::tail::Tail;
use accel::AcceleratorChoice;
use command::Launch;

/// QEMU's model, and the number of the set of devices and features that [`command`] gives it. Counted up with every change
/// after which a device state of before would not load.
const MACHINE: &str = "microvm/2";
const CONSOLE_KEPT: usize = 64 << 10;
/// What QEMU may use beside guest memory: translated code, kernel and initrd, its own heap.
const OVERHEAD_BYTES: u64 = 512 << 20;
const TASKS: u64 = 128;

/// How QEMU is run.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// The program.
    pub program: PathBuf,
    /// The guest kernel. Readable for everybody, as is the initrd; directories need not be.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: PathBuf,
    /// The library that holds guest memory.
    pub preload_so: PathBuf,
    /// As whom VMMs run; `None`: as whom the node runs.
    pub identity: Option<Identity>,
    /// Whether VMMs die when the node dies.
    pub die_with_node: bool,
    /// Which accelerator.
    pub accelerator: AcceleratorChoice,
    /// Where VMMs' control groups are made.
    pub cgroups: CgroupMode,
    /// Size of the buffer of translated code (TCG), in MiB.
    pub tcg_buffer_mib: u32,
    /// Whether guests reach the outside.
    pub egress: bool,
    /// How long QEMU may take to start, and for each command.
    pub patience: Duration,
}

/// The driver.
#[derive(Debug)]
pub struct Qemu {
    config: QemuConfig,
    facts: HostFacts,
    cpu: &'static str,
    kernel: File,
    initrd: File,
    library: File,
    cgroups: Option<Cgroups>,
    spawner: Spawner,
}

impl Qemu {
    /// Looks at the host and at QEMU. Blocks, for as long as the trial of the accelerator takes.
    pub fn new(mut config: QemuConfig, spawner: Spawner) -> Result<Self, DriverError> {
        let version = version(&config.program).map_err(|cause| {
            DriverError::new("ask QEMU for its version", format!("{}: {cause}", config.program.display()))
        })?;
        let open = |path: &PathBuf| {
            File::open(path).map_err(|cause| DriverError::new("open", format!("{}: {cause}", path.display())))
        };
        let (kernel, initrd, library) = (open(&config.kernel)?, open(&config.initrd)?, open(&config.preload_so)?);
        let kernel_id = kernel_id(&config.kernel).map_err(|cause| DriverError::new("read the kernel", cause))?;
        let accelerator = accel::choose(config.accelerator, &config.program, &config.kernel)?;
        if let (Accelerator::Kvm, Some(identity)) = (accelerator, &mut config.identity) {
            // The device belongs to a group, and a VMM has just one.
            let device = fs::metadata("/dev/kvm").map_err(|cause| DriverError::new("look at /dev/kvm", cause))?;
            identity.gid = device.gid();
        }
        let (cpu, cpu_model) = match accelerator {
            // Page tables of four levels, not five: each miss of the emulated TLB walks them.
            Accelerator::Tcg => ("max,la57=off", "max,la57=off".to_owned()),
            Accelerator::Kvm => ("host", format!("host: {}", host_cpu())),
        };
        let facts = HostFacts {
            vmm_version: version,
            machine: MACHINE.into(),
            accelerator,
            cpu_model,
            kernel: kernel_id,
            tsc_khz: measure_tsc_khz(),
        };
        tracing::info!(?facts, "QEMU is ready");
        let cgroups = Cgroups::find(&config.cgroups);
        Ok(Self { config, facts, cpu, kernel, initrd, library, cgroups, spawner })
    }

    /// Everything up to the process: what it inherits and what it is told.
    fn prepare(&self, shape: Shape, mode: &StartMode, disk: OwnedFd) -> io::Result<Prepared> {
        let (control, control_theirs) = StdUnixStream::pair()?;
        let (console, console_theirs) = StdUnixStream::pair()?;
        let memory = placeholder(shape.memory_bytes)?;
        let mut command = Command::new(&self.config.program);
        command.env_clear().current_dir("/");
        inherit_nothing(&mut command);
        let channel = Preload::prepare(&mut command, &self.config.preload_so, &memory).map_err(io::Error::other)?;
        // By descriptor: the VMM's user need not be able to walk to the library.
        let library = inherit(&mut command, self.library.try_clone()?.into());
        command.env("LD_PRELOAD", format!("/proc/self/fd/{library}"));
        let boot = match mode {
            StartMode::Boot { cmdline } => Some(command::Boot {
                kernel: inherit(&mut command, self.kernel.try_clone()?.into()),
                initrd: inherit(&mut command, self.initrd.try_clone()?.into()),
                cmdline: self.cmdline(cmdline),
            }),
            StartMode::Waiting => None,
        };
        let launch = Launch {
            shape,
            accelerator: self.facts.accelerator,
            cpu: self.cpu,
            tcg_buffer_mib: self.config.tcg_buffer_mib,
            egress: self.config.egress,
            boot,
            memory: inherit(&mut command, memory),
            control: inherit(&mut command, control_theirs.into()),
            console: inherit(&mut command, console_theirs.into()),
            disk: inherit(&mut command, disk),
        };
        command.args(launch.arguments());
        Ok(Prepared { command, channel, control, console })
    }

    fn cmdline(&self, extra: &str) -> String {
        // No pressure statistics, no audit, no security modules but those that programs use on themselves: nobody asks for
        // them, and each is on the way of every context switch, system call or new process.
        let mut cmdline = String::from("console=ttyS0 quiet panic=-1 reboot=t psi=0 audit=0 lsm=landlock,yama");
        if self.facts.accelerator == Accelerator::Tcg {
            // See `measure_tsc_khz`. Without the word that the counter is reliable the guest keeps time by counting timer
            // interrupts, 4 ms each, and loses those that a busy host delays. Translated code does not speculate on the
            // guest's branches, so what guards against that only costs.
            cmdline.push_str(&format!(" tsc_early_khz={} tsc=reliable mitigations=off", self.facts.tsc_khz));
        }
        if !extra.is_empty() {
            cmdline.push(' ');
            cmdline.push_str(extra);
        }
        cmdline
    }

    async fn launch(&self, prepared: Prepared, shape: Shape) -> Result<Started, DriverError> {
        let Prepared { command, channel, control, console } = prepared;
        let limits = Limits { memory_bytes: shape.memory_bytes + OVERHEAD_BYTES, tasks: TASKS };
        let cgroup = match self.cgroups.clone() {
            Some(groups) => match spawn_blocking(move || groups.create(limits)).await {
                Ok(Ok(group)) => Some(group),
                outcome => {
                    tracing::warn!(?outcome, "a VMM runs without a control group");
                    None
                }
            },
            None => None,
        };
        let QemuConfig { identity, die_with_node, patience, .. } = self.config;
        let process = VmmProcess::start(&self.spawner, command, identity, die_with_node, cgroup)
            .await
            .map_err(|cause| DriverError::new("start QEMU", cause))?;
        let console = console
            .set_nonblocking(true)
            .and_then(|()| UnixStream::from_std(console))
            .map_err(|cause| DriverError::new("follow the console", cause))?;
        let console = Tail::follow(console, CONSOLE_KEPT);
        let ready = async {
            let qmp = Qmp::connect(control, patience).await?;
            migration::prepare(&qmp).await?;
            let listing = qmp.execute("human-monitor-command", json!({ "command-line": "info usernet" })).await?;
            Ok((qmp, listing))
        };
        let (qmp, listing) = match ready.await {
            Ok(ready) => ready,
            Err(error) => {
                let exit = process.kill().await;
                return Err(DriverError::new("start QEMU", format!("{}; it ended: {exit}", shown(&error))));
            }
        };
        let ports = network::ports(listing.as_str().unwrap_or_default())
            .map_err(|reason| DriverError::new("find the guest's ports", reason))?;
        let control = Box::new(QemuControl { qmp, console });
        Ok(Started { process, memory: channel, control, ports })
    }
}

struct Prepared {
    command: Command,
    channel: crate::preload::PreloadChannel,
    control: StdUnixStream,
    console: StdUnixStream,
}

fn shown(error: &QmpError) -> String {
    error.to_string()
}

fn version(program: &PathBuf) -> io::Result<String> {
    let output = Command::new(program).arg("--version").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(line.replace("QEMU emulator version", "QEMU").trim().to_owned()),
        _ => Err(io::Error::other(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)))),
    }
}

#[async_trait]
impl VmDriver for Qemu {
    fn facts(&self) -> &HostFacts {
        &self.facts
    }

    async fn start(&self, shape: Shape, mode: StartMode, disk: OwnedFd) -> Result<Started, DriverError> {
        let prepared =
            self.prepare(shape, &mode, disk).map_err(|cause| DriverError::new("prepare to start QEMU", cause))?;
        self.launch(prepared, shape).await
    }

    async fn all_ended(&self) {
        self.spawner.all_ended().await;
    }
}

#[derive(Debug)]
struct QemuControl {
    qmp: Qmp,
    console: Tail,
}

#[async_trait]
impl VmControl for QemuControl {
    async fn stop(&self) -> Result<(), DriverError> {
        let stopped = self.qmp.execute("stop", Value::Null).await;
        stopped.map(drop).map_err(|cause| DriverError::new("stop the guest", cause))
    }

    async fn resume(&self) -> Result<(), DriverError> {
        let resumed = self.qmp.execute("cont", Value::Null).await;
        resumed.map(drop).map_err(|cause| DriverError::new("let the guest run", cause))
    }

    async fn save_state(&self) -> Result<Bytes, DriverError> {
        migration::save(&self.qmp).await
    }

    async fn load_state(&self, state: &Bytes) -> Result<(), DriverError> {
        migration::load(&self.qmp, state).await
    }

    fn last_words(&self) -> Option<String> {
        self.qmp.shutdown_reason()
    }

    fn console(&self) -> String {
        self.console.text()
    }
}
