//! From the kernel's first program to a running agent. See `main.rs` for the picture.
//!
//! A boot happens once per template; every sandbox starts from a snapshot taken afterwards. So nothing here is tuned,
//! and everything that fails stops the boot with a line on the console, where the template builder reads it.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::{chdir, chroot, execv, sethostname};

use crate::sys;

/// Where stage one leaves this binary.
pub const BINARY: &str = "/run/snapyard/guest";
/// The cgroup of everything that belongs to the user; frozen around a snapshot.
pub const USER_CGROUP: &str = "/sys/fs/cgroup/user";

/// And the one of programs that a guest on standby starts for practice.
pub const REHEARSAL_CGROUP: &str = "/sys/fs/cgroup/rehearsal";

const DISK: &str = "/dev/vda";
const DISK_WAIT: Duration = Duration::from_secs(10);
/// Addresses of QEMU's user networking (`-netdev user`): the same in every guest, so nothing changes on restore.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Stage one: in the initial RAM disk. Returns only if it failed.
pub fn initrd() -> ExitCode {
    report("initrd", enter_root())
}

/// Stage two: PID 1 of the real root. Returns only if it failed.
pub fn init() -> ExitCode {
    report("init", set_up().map(|()| supervise()))
}

fn report(stage: &str, result: io::Result<()>) -> ExitCode {
    if let Err(error) = result {
        eprintln!("snapyard-guest: {stage}: {error}");
    }
    // PID 1 must not end at once: the kernel's panic would push the line above off the console.
    sleep(Duration::from_secs(1));
    ExitCode::FAILURE
}

fn enter_root() -> io::Result<()> {
    attach("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, "mode=0755")?;
    let mut modules: Vec<_> =
        fs::read_dir("/modules")?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    modules.sort();
    for module in &modules {
        let inserted = File::open(module).and_then(|file| sys::modules::insert(&file));
        inserted.map_err(|error| io::Error::other(format!("{}: {error}", module.display())))?;
    }
    let deadline = Instant::now() + DISK_WAIT;
    while !Path::new(DISK).exists() {
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("{DISK} did not appear")));
        }
        sleep(Duration::from_millis(5));
    }
    attach(DISK, "/mnt", "ext4", MsFlags::MS_NOATIME, "")?;
    attach("tmpfs", "/mnt/run", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=0755")?;
    fs::create_dir_all("/mnt/run/snapyard")?;
    fs::copy("/init", format!("/mnt{BINARY}"))?;
    step("move /dev", mount(Some("/dev"), "/mnt/dev", None::<&str>, MsFlags::MS_MOVE, None::<&str>))?;
    // The RAM disk is memory, and memory is what a snapshot stores.
    fs::remove_file("/init")?;
    fs::remove_dir_all("/modules")?;
    step("chdir", chdir("/mnt"))?;
    step("move root", mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>))?;
    step("chroot", chroot("."))?;
    step("chdir", chdir("/"))?;
    let program = CString::new(BINARY)?;
    step("exec", execv(&program, &[c"init".to_owned(), c"init".to_owned()]).map(|_| ()))
}

fn set_up() -> io::Result<()> {
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    attach("proc", "/proc", "proc", quiet, "")?;
    attach("sysfs", "/sys", "sysfs", quiet, "")?;
    fs::create_dir_all("/dev/pts")?;
    fs::create_dir_all("/dev/shm")?;
    attach("devpts", "/dev/pts", "devpts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "gid=5,mode=620,ptmxmode=666")?;
    attach("tmpfs", "/dev/shm", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=1777")?;
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        std::os::unix::fs::symlink(target, format!("/dev/{link}")).or_else(already_there)?;
    }
    // An emulator keeps its translation of a program by virtual address. With randomised addresses it translates every
    // program anew each time that it is started: measured, a login shell took four times as long.
    if sys::cpu::is_emulated() {
        fs::write("/proc/sys/kernel/randomize_va_space", "0")?;
    }
    attach("cgroup2", "/sys/fs/cgroup", "cgroup2", quiet, "")?;
    fs::create_dir_all(USER_CGROUP)?;
    fs::create_dir_all(REHEARSAL_CGROUP)?;
    sys::net::configure("lo", Ipv4Addr::LOCALHOST, 8)?;
    // Without this the kernel would solicit IPv6 routers for ever, into every snapshot.
    let _ = fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
    sys::net::configure("eth0", ADDRESS, 24)?;
    sys::net::default_route(GATEWAY)?;
    step("hostname", sethostname("sandbox"))
}

/// Keeps an agent running, and collects whatever was orphaned.
fn supervise() {
    loop {
        let agent = match Command::new(BINARY).args(["agent", "--guest"]).spawn() {
            Ok(agent) => i32::try_from(agent.id()).expect("a process id fits"),
            Err(error) => {
                eprintln!("snapyard-guest: agent: {error}");
                sleep(Duration::from_secs(1));
                continue;
            }
        };
        loop {
            match wait() {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) if pid.as_raw() == agent => break,
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        eprintln!("snapyard-guest: the agent ended; starting it again");
        sleep(Duration::from_millis(100));
    }
}

fn attach(source: &str, target: &str, kind: &str, flags: MsFlags, options: &str) -> io::Result<()> {
    let options = Some(options).filter(|options| !options.is_empty());
    mount(Some(source), target, Some(kind), flags, options)
        .map_err(|error| io::Error::other(format!("mount {source} on {target}: {error}")))
}

fn step(what: &str, result: nix::Result<()>) -> io::Result<()> {
    result.map_err(|error| io::Error::other(format!("{what}: {error}")))
}

fn already_there(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}
