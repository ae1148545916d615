//! VMM processes: started by one thread, watched by one task each, reaped always.
//!
//! ```text
//!   Spawner thread ──fork──▶ VMM ──exit──▶ supervisor task: reap, remove cgroup, publish the exit
//!                             ▲                  ▲
//!                             └──── SIGKILL ─────┘ kill(), or the last handle dropped
//! ```
//!
//! Invariants:
//! - A process is signalled only by its supervisor, which is also who reaps it: never a stranger with a reused number.
//! - When an exit is published, the process is reaped and its cgroup is gone.
//! - VMMs that are to die with the node ask the kernel for it (`PR_SET_PDEATHSIG`). The kernel takes the *thread* that
//!   forked for the parent, hence the one thread that lives as long as anybody needs it.
//! - Privileges are dropped before exec, in this order: groups, gid, uid, no_new_privs, death signal (a change of uid
//!   clears it).

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Pid, Uid, getpid, getppid, setgid, setgroups, setuid};
use tokio::process::Child;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::task::TaskTracker;

use crate::cgroup::VmCgroup;
use crate::tail::Tail;

const STDERR_KEPT: usize = 8 << 10;

struct Job {
    command: Command,
    answer: oneshot::Sender<io::Result<Child>>,
}

/// The thread that starts VMMs. When the last handle is dropped, VMMs that die with the node die.
#[derive(Debug, Clone)]
pub struct Spawner {
    jobs: mpsc::Sender<Job>,
    /// The tasks that reap.
    supervisors: TaskTracker,
}

impl Spawner {
    /// Starts the thread. Processes are watched on `runtime`.
    pub fn new(runtime: Handle) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new().name("vmm-spawner".into()).spawn(move || {
            let _entered = runtime.enter();
            for Job { command, answer } in queue {
                let mut command = tokio::process::Command::from(command);
                let started = command.kill_on_drop(true).spawn();
                // Our copies of what the child inherits.
                drop(command);
                // A caller that went away drops the child, which kills it.
                let _ = answer.send(started);
            }
        })?;
        Ok(Self { jobs, supervisors: TaskTracker::new() })
    }

    /// Returns when of every VMM that was told to end, by a kill or a drop, nothing is left. Nothing must be started
    /// meanwhile, and none must go on running.
    pub async fn all_ended(&self) {
        self.supervisors.close();
        self.supervisors.wait().await;
    }

    async fn spawn(&self, command: Command) -> io::Result<Child> {
        let (answer, started) = oneshot::channel();
        let ended = || io::Error::other("the spawner thread has ended");
        self.jobs.send(Job { command, answer }).map_err(|_| ended())?;
        started.await.map_err(|_| ended())?
    }
}

/// As whom a VMM runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id; the only group.
    pub gid: u32,
}

/// How a VMM process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmmExit {
    /// Status or signal, for people.
    pub status: String,
    /// The end of what it wrote to its standard error.
    pub stderr: String,
}

impl std::fmt::Display for VmmExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.status)?;
        if !self.stderr.is_empty() {
            write!(f, " ({})", self.stderr.trim_end().replace('\n', "; "))?;
        }
        Ok(())
    }
}

/// A running VMM. Dropping it kills the process.
#[derive(Debug)]
pub struct VmmProcess {
    pid: u32,
    kill: Arc<Notify>,
    exit: watch::Receiver<Option<VmmExit>>,
    _spawner: Spawner,
}

impl VmmProcess {
    /// Starts `command`, which already has its arguments and inherited descriptors.
    pub async fn start(
        spawner: &Spawner,
        mut command: Command,
        identity: Option<Identity>,
        die_with_node: bool,
        cgroup: Option<VmCgroup>,
    ) -> io::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        prepare(&mut command, identity, die_with_node);
        let mut child = spawner.spawn(command).await?;
        let pid = child.id().ok_or_else(|| io::Error::other("the VMM is reaped already"))?;
        if let Some(cgroup) = &cgroup {
            cgroup.enter(pid);
        }
        let stderr = child.stderr.take().map(|stderr| Tail::follow(stderr, STDERR_KEPT));
        let kill = Arc::new(Notify::new());
        let (published, exit) = watch::channel(None);
        let asked = Arc::clone(&kill);
        spawner.supervisors.spawn(async move {
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status,
                    () = asked.notified() => {
                        if let Err(cause) = child.start_kill() {
                            tracing::debug!(pid, %cause, "VMM not killed, it may have ended");
                        }
                    }
                }
            };
            let stderr = match stderr {
                Some(tail) => tail.finish().await,
                None => String::new(),
            };
            if let Some(cgroup) = cgroup {
                // A runtime that is shutting down removes it in the drop of the closure.
                let _ = tokio::task::spawn_blocking(move || drop(cgroup)).await;
            }
            published.send_replace(Some(VmmExit { status: describe(status), stderr }));
        });
        Ok(Self { pid, kill, exit, _spawner: spawner.clone() })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Becomes `Some` when the process is reaped.
    pub fn exit(&self) -> watch::Receiver<Option<VmmExit>> {
        self.exit.clone()
    }

    /// Whether the process is reaped.
    pub fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Kills the process and waits until it is reaped. May be called again.
    pub async fn kill(&self) -> VmmExit {
        self.kill.notify_one();
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.clone().expect("waited for it"),
            Err(_) => VmmExit { status: "killed with the runtime".into(), stderr: String::new() },
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        self.kill.notify_one();
    }
}

fn describe(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(cause) => format!("unknown end: {cause}"),
    }
}

/// Makes the child inherit nothing but its standard streams and what [`crate::descriptors::inherit`] names after this:
/// the node's parent may have left descriptors open in it.
pub fn inherit_nothing(command: &mut Command) {
    let close = || {
        const CLOEXEC: nix::libc::c_uint = nix::libc::CLOSE_RANGE_CLOEXEC;
        // SAFETY: the call takes three numbers and only sets flags of this process's descriptors.
        let result = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, 3, nix::libc::c_uint::MAX, CLOEXEC) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes one system call.
    unsafe { command.pre_exec(close) };
}

fn prepare(command: &mut Command, identity: Option<Identity>, die_with_node: bool) {
    let node = getpid();
    let drop_privileges = move || enter_vmm(identity, die_with_node.then_some(node));
    // SAFETY: between fork and exec the closure only makes system calls; it takes no lock and allocates nothing.
    unsafe { command.pre_exec(drop_privileges) };
}

fn enter_vmm(identity: Option<Identity>, die_with: Option<Pid>) -> io::Result<()> {
    if let Some(Identity { uid, gid }) = identity {
        setgroups(&[])?;
        setgid(Gid::from_raw(gid))?;
        setuid(Uid::from_raw(uid))?;
    }
    prctl::set_no_new_privs()?;
    if let Some(node) = die_with {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The node may have died before the kernel was asked.
        if getppid() != node {
            return Err(io::ErrorKind::NotConnected.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn start(script: &str) -> VmmProcess {
        let spawner = Spawner::new(Handle::current()).expect("a spawner");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        VmmProcess::start(&spawner, command, None, true, None).await.expect("a process")
    }

    async fn end_of(exit: &mut watch::Receiver<Option<VmmExit>>) -> VmmExit {
        exit.wait_for(Option::is_some).await.expect("an exit").clone().expect("waited for it")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_exit_is_published_with_status_and_last_words() {
        let process = start("echo first >&2; echo last words >&2; exit 3").await;
        let exit = end_of(&mut process.exit()).await;
        assert_eq!(exit.to_string(), "exit status: 3 (first; last words)");
        assert!(process.has_exited());
        assert_eq!(process.kill().await, exit, "killing what is dead changes nothing");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn killing_waits_until_the_process_is_reaped() {
        let process = start("exec sleep 1000").await;
        let proc = std::path::PathBuf::from(format!("/proc/{}", process.pid()));
        assert!(proc.exists());
        assert!(process.kill().await.status.contains("SIGKILL"));
        assert!(!proc.exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn dropping_the_handle_kills() {
        let process = start("exec sleep 1000").await;
        let mut exit = process.exit();
        drop(process);
        assert!(end_of(&mut exit).await.status.contains("SIGKILL"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_program_that_is_not_there_is_an_error() {
        let spawner = Spawner::new(Handle::current()).expect("a spawner");
        let started = VmmProcess::start(&spawner, Command::new("/nonexistent"), None, true, None).await;
        assert_eq!(started.expect_err("no program").kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_process_runs_as_whom_it_should_with_its_own_process_group() {
        let identity = nix::unistd::geteuid().is_root().then_some(Identity { uid: 65534, gid: 65534 });
        let spawner = Spawner::new(Handle::current()).expect("a spawner");
        let mut command = Command::new("/bin/sh");
        inherit_nothing(&mut command);
        let script = "exec >&2
            grep -E '^(Uid|Groups|NoNewPrivs)' /proc/self/status
            test $(cut -d' ' -f5 /proc/$$/stat) = $$ && ls /proc/$$/fd";
        command.args(["-c", script]);
        let process = VmmProcess::start(&spawner, command, identity, true, None).await.expect("a process");
        let exit = end_of(&mut process.exit()).await;
        assert_eq!(exit.status, "exit status: 0", "a process group of its own");
        assert!(exit.stderr.contains("NoNewPrivs:\t1"), "{exit}");
        let open: Vec<i32> = exit.stderr.lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(open, [0, 1, 2], "no descriptor of this process");
        if identity.is_some() {
            assert!(exit.stderr.contains("Uid:\t65534\t65534\t65534\t65534"), "{exit}");
            assert!(exit.stderr.lines().any(|line| line.trim_end() == "Groups:"), "no other groups: {exit}");
        }
    }
}
