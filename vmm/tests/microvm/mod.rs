//! A tiny guest for tests with a real VMM: the project's kernel and modules, busybox, and an HTTP server that runs what
//! it is asked to. Needs the assets (`deploy/build-assets.sh`), QEMU and a static busybox.
//!
//! The guest's initrd is the project's with another archive behind it: the kernel unpacks both, and `/init` of the second
//! one wins.

#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use snapyard_vmm::{
    Accelerator, AcceleratorChoice, Backing, Capture, ChunkData, ChunkNo, Geometry, GuestPort, Hypervisor, MemoryImage,
    PageSource, RestoreFrom, RestoreTimings, Shape, SourceError, Vm, VmmConfig, ZeroSource,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

pub const MIB: u64 = 1 << 20;
pub const SHAPE: Shape = Shape { vcpus: 1, memory_bytes: 128 * MIB, disk_bytes: 64 * MIB };
pub const CHUNK: u32 = 64 << 10;

const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox --install -s /bin
mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod $module; done
ip addr add 10.0.2.15/24 dev eth0; ip link set eth0 up; ip link set lo up; ip route add default via 10.0.2.2
mkdir -p /www/cgi-bin
printf '#!/bin/sh\nexport PATH=/bin\necho "Content-Type: text/plain"\necho\ncommand=$(httpd -d "$QUERY_STRING")\neval "$command" 2>&1\n' > /www/cgi-bin/run
chmod +x /www/cgi-bin/run
httpd -p 49983 -h /www
echo GUEST-UP
i=0
while :; do i=$((i+1)); echo $i > /www/count; sleep 0.05; done
"#;

fn assets() -> PathBuf {
    match std::env::var_os("SNAPYARD_ASSETS") {
        Some(path) => path.into(),
        None => PathBuf::from(std::env::var_os("HOME").expect("HOME")).join(".cache/snapyard/assets"),
    }
}

fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    exe.parent().expect("a directory").join("libsnapyard_vmm_preload.so")
}

/// One file of a "newc" archive (the kernel's `Documentation/driver-api/early-userspace/buffer-format.rst`).
fn archive_entry(archive: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    let name_size = name.len() + 1;
    let fields = [1, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name_size as u32, 0];
    archive.extend(b"070701");
    for field in fields {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(data);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

fn initrd(assets: &Path) -> Vec<u8> {
    let mut archive = fs::read(assets.join("initrd.img")).expect("assets: run deploy/build-assets.sh");
    archive.resize(archive.len().next_multiple_of(4), 0);
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].iter().find_map(|path| fs::read(path).ok());
    let directories = ["bin", "proc", "sys", "www"];
    for directory in directories {
        archive_entry(&mut archive, directory, 0o040_755, b"");
    }
    archive_entry(&mut archive, "bin/busybox", 0o100_755, &busybox.expect("busybox-static is installed"));
    archive_entry(&mut archive, "init", 0o100_755, INIT.as_bytes());
    archive_entry(&mut archive, "TRAILER!!!", 0, b"");
    archive
}

/// A hypervisor with directories of its own.
pub struct Host {
    pub hypervisor: Arc<Hypervisor>,
    pub directory: tempfile::TempDir,
}

impl Host {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut VmmConfig)) -> Self {
        let assets = assets();
        let directory = tempfile::tempdir().expect("a directory");
        let initrd_path = directory.path().join("initrd");
        fs::write(&initrd_path, initrd(&assets)).expect("the initrd");
        let run_dir = directory.path().join("run");
        let mut config = VmmConfig::new(assets.join("vmlinuz"), initrd_path, library(), run_dir);
        config.accelerator = AcceleratorChoice::Only(Accelerator::Tcg);
        config.pool_target = 0;
        change(&mut config);
        let hypervisor = Hypervisor::new(config, Handle::current()).await.expect("a hypervisor");
        Self { hypervisor, directory }
    }

    /// Boots the guest on an empty disk and waits until it answers.
    pub async fn boot(&self) -> Vm {
        self.boot_on(zeros(SHAPE.disk_bytes)).await
    }

    pub async fn boot_on(&self, disk: Arc<dyn PageSource>) -> Vm {
        let vm = self.hypervisor.boot(SHAPE, disk, "").await.expect("a guest that boots");
        run(&vm, "true").await;
        vm
    }

    pub async fn restore(&self, snapshot: &Snapshot) -> (Vm, RestoreTimings) {
        let mut timings = RestoreTimings::default();
        let vm = self.hypervisor.restore(SHAPE, snapshot.from(), &mut timings).await.expect("a restored guest");
        (vm, timings)
    }
}

pub fn zeros(size: u64) -> Arc<dyn PageSource> {
    ZeroSource::new(Geometry::new(size, CHUNK).expect("a geometry"))
}

/// A captured guest, ready to be restored any number of times.
pub struct Snapshot {
    pub memory: Arc<MemoryImage>,
    pub disk: Arc<dyn PageSource>,
    pub device_state: Bytes,
}

impl Snapshot {
    /// Of a guest that was booted: what it wrote is all there is.
    pub fn of_booted(capture: Capture) -> Self {
        Self::on(zeros(SHAPE.memory_bytes), capture)
    }

    /// Of a guest that was restored from `parent`.
    pub fn on(parent: Arc<dyn PageSource>, capture: Capture) -> Self {
        let memory = MemoryImage::child("test", parent, capture.dirty).expect("an image");
        Self { memory, disk: Arc::new(capture.disk), device_state: capture.device_state }
    }

    pub fn from(&self) -> RestoreFrom {
        RestoreFrom {
            memory: Arc::clone(&self.memory),
            disk: Arc::clone(&self.disk),
            device_state: self.device_state.clone(),
        }
    }

    /// The same snapshot, with the memory behind a source that can be made to fail.
    pub fn behind(&self, switch: &Arc<Switch>, policy: snapyard_vmm::FillPolicy) -> Self {
        let source: Arc<dyn PageSource> = Arc::new(Switched { below: self.memory.clone(), switch: Arc::clone(switch) });
        let memory = MemoryImage::with_policy("switched", source, Backing::Memory, policy).expect("an image");
        Self { memory, disk: Arc::clone(&self.disk), device_state: self.device_state.clone() }
    }
}

/// Turns sources off.
#[derive(Default)]
pub struct Switch {
    reason: Mutex<Option<String>>,
}

impl Switch {
    pub fn off(&self, reason: &str) {
        *self.reason.lock() = Some(reason.to_owned());
    }
}

/// A source that fails for good while its switch is off.
pub struct Switched {
    pub below: Arc<dyn PageSource>,
    pub switch: Arc<Switch>,
}

#[async_trait]
impl PageSource for Switched {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn chunk_size(&self) -> u32 {
        self.below.chunk_size()
    }

    async fn read(&self, chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        let reason = self.switch.reason.lock().clone();
        match reason {
            Some(reason) => Err(SourceError::lost(reason)),
            None => self.below.read(chunk).await,
        }
    }
}

/// Runs a shell command in the guest, as often as it takes until the guest answers (an answer that got lost means that
/// it ran twice: commands here may), and gives what it printed.
pub async fn run(vm: &Vm, command: &str) -> String {
    let begun = Instant::now();
    loop {
        match timeout(Duration::from_secs(5), ask(vm, command)).await {
            Ok(Ok(answer)) => return answer,
            _ if begun.elapsed() > Duration::from_secs(100) => {
                panic!("the guest does not answer to {command:?}; its console: {}", vm.console())
            }
            _ => sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn ask(vm: &Vm, command: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(vm.port(GuestPort::Agent)).await?;
    let query: String = command.bytes().map(|byte| format!("%{byte:02x}")).collect();
    stream.write_all(format!("GET /cgi-bin/run?{query} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    match answer.split_once("\r\n\r\n").or(answer.split_once("\n\n")) {
        Some((head, body)) if head.contains(" 200 ") => Ok(body.trim().to_owned()),
        _ => Err(std::io::Error::other(answer)),
    }
}

pub async fn count(vm: &Vm) -> u64 {
    loop {
        // The guest may be just writing it.
        if let Ok(count) = run(vm, "cat /www/count").await.parse() {
            return count;
        }
    }
}
