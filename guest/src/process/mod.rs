//! Processes that clients start: their life, and who listens to them.
//!
//! ```text
//! start ─► running ──────────────────────────► ended ─► out of the table
//!            │  stdout, stderr ─► listeners      ▲
//!            ├─ deadline: SIGKILL to the group ──┤
//!            └─ program exits ─► drain ──────────┘
//! ```
//!
//! One task per process ([`driver`]) reads its pipes and tells each listener; a listener is the bounded queue behind one
//! HTTP response. A slow client slows its process down; a client that hangs up is dropped from the list, and the process
//! goes on unheard. Without listeners the output is read and thrown away, so that no process blocks on a full pipe.
//!
//! Draining: when the program has exited, what it wrote is still in the pipes, and a child that it left behind may hold
//! them open. Output goes on until both pipes end, or until they have been quiet for a moment; a command like
//! `server & echo started` then ends for its client, while the server keeps its pipes.

mod driver;
pub mod events;
pub mod service;

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, pipe2};
use serde::{Deserialize, Serialize};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use crate::connect::{CallError, Code};
use crate::state::Agent;
use crate::sys::exit::Watch;
use crate::sys::spawn::{self, Ids, Plan, SpawnError, Stage};
use crate::users::{User, resolve_path};

/// Messages that may wait for one client.
const QUEUE: usize = 16;
/// Search path of programs and shells.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcessId(pub i32);

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What a client asked to run; also what `List` shows.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Config {
    /// Program: a path, or a name to look up in `PATH`.
    pub cmd: String,
    /// Its arguments.
    #[serde(deserialize_with = "null_is_default")]
    pub args: Vec<String>,
    /// Additional environment.
    #[serde(deserialize_with = "null_is_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory; the user's home when absent or empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// JSON of protocol buffers may say null for "not set".
pub(crate) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// What to start, and for whom.
pub struct Request {
    /// The program.
    pub config: Config,
    /// A name of the client's for it.
    pub tag: Option<String>,
    /// Whether it gets a standard input; otherwise `/dev/null`.
    pub stdin: bool,
    /// When it is killed.
    pub deadline: Option<Duration>,
}

/// A running process.
pub struct Process {
    /// Its id, which is also its process group.
    pub pid: ProcessId,
    /// The client's name for it.
    pub tag: Option<String>,
    /// What was asked for.
    pub config: Config,
    stdin: tokio::sync::Mutex<Option<pipe::Sender>>,
    listeners: Mutex<Listeners>,
}

#[derive(Default)]
struct Listeners {
    ended: bool,
    list: Vec<Listener>,
}

#[derive(Clone)]
struct Listener {
    queue: mpsc::Sender<Bytes>,
    /// Whoever started the process: learns that its deadline has passed.
    starter: bool,
}

impl Process {
    /// A queue of encoded messages, the `start` event first, the end of the stream last.
    fn listen(&self, starter: bool) -> Option<mpsc::Receiver<Bytes>> {
        let (queue, receiver) = mpsc::channel(QUEUE);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        if listeners.ended {
            return None;
        }
        queue.try_send(events::start(self.pid)).expect("a new queue has room");
        listeners.list.push(Listener { queue, starter });
        Some(receiver)
    }

    /// Messages from now on, for a client that comes later. `None` if it has ended meanwhile.
    pub fn connect(&self) -> Option<mpsc::Receiver<Bytes>> {
        self.listen(false)
    }

    /// Sends a signal to the whole group: a shell's children are what a client means by its command.
    pub fn signal(&self, signal: Signal) -> Result<(), CallError> {
        match killpg(Pid::from_raw(self.pid.0), signal) {
            Ok(()) => Ok(()),
            Err(nix::errno::Errno::ESRCH) => Err(not_found(&self.pid.to_string())),
            Err(error) => Err(CallError::new(Code::Internal, format!("process {}: {error}", self.pid))),
        }
    }

    /// Writes to its standard input.
    pub async fn write_stdin(&self, data: &[u8]) -> Result<(), CallError> {
        let mut stdin = self.stdin.lock().await;
        let closed = || {
            let message = format!("process {}: its stdin is closed, or was not asked for at its start", self.pid);
            CallError::new(Code::FailedPrecondition, message)
        };
        let pipe = stdin.as_mut().ok_or_else(closed)?;
        if tokio::io::AsyncWriteExt::write_all(pipe, data).await.is_err() {
            *stdin = None;
            return Err(closed());
        }
        Ok(())
    }

    /// Ends its standard input. Closing it twice is no error.
    pub async fn close_stdin(&self) {
        *self.stdin.lock().await = None;
    }
}

/// All running processes.
#[derive(Clone, Default)]
pub struct Table(Arc<Mutex<HashMap<ProcessId, Arc<Process>>>>);

impl Table {
    fn with<T>(&self, work: impl FnOnce(&mut HashMap<ProcessId, Arc<Process>>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The process with this id.
    pub fn by_pid(&self, pid: ProcessId) -> Option<Arc<Process>> {
        self.with(|table| table.get(&pid).cloned())
    }

    /// A process with this tag.
    pub fn by_tag(&self, tag: &str) -> Option<Arc<Process>> {
        self.with(|table| table.values().find(|process| process.tag.as_deref() == Some(tag)).cloned())
    }

    /// All of them, by id.
    pub fn list(&self) -> Vec<Arc<Process>> {
        let mut list: Vec<_> = self.with(|table| table.values().cloned().collect());
        list.sort_by_key(|process| process.pid);
        list
    }
}

/// The error for a process that is not there.
pub fn not_found(which: &str) -> CallError {
    CallError::new(Code::NotFound, format!("process {which} does not exist, or has ended"))
}

/// Starts a process for `user`. The receiver gets its messages from the first on.
pub async fn start(agent: &Agent, user: &User, request: Request) -> Result<mpsc::Receiver<Bytes>, CallError> {
    let Request { config, tag, stdin, deadline } = request;
    if config.cmd.is_empty() {
        return Err(CallError::new(Code::InvalidArgument, "process.cmd is empty"));
    }
    let cwd = resolve_path(config.cwd.as_deref().unwrap_or_default(), user);
    let env = environment(agent, user, &config.envs);
    let program = find_program(&config.cmd, &env, &cwd)
        .ok_or_else(|| CallError::new(Code::NotFound, format!("{}: no such program", config.cmd)))?;
    let groups = agent.accounts.groups_of(user).map_err(|error| CallError::of_io(&error, "/etc/group"))?;

    let system = |error: io::Error| CallError::new(Code::Internal, format!("pipes: {error}"));
    let (out_read, out_write) = pipe2(OFlag::O_CLOEXEC).map_err(|error| system(error.into()))?;
    let (err_read, err_write) = pipe2(OFlag::O_CLOEXEC).map_err(|error| system(error.into()))?;
    let (in_read, in_write) = if stdin {
        let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(|error| system(error.into()))?;
        (read, Some(write))
    } else {
        (std::fs::File::open("/dev/null").map_err(system)?.into(), None)
    };
    let text = |text: &str| {
        CString::new(text).map_err(|_| CallError::new(Code::InvalidArgument, "a NUL byte in program or environment"))
    };
    let args: Vec<CString> =
        [&config.cmd].into_iter().chain(&config.args).map(|arg| text(arg)).collect::<Result<_, _>>()?;
    let env: Vec<CString> =
        env.iter().map(|(name, value)| text(&format!("{name}={value}"))).collect::<Result<_, _>>()?;

    let cgroup = if agent.rehearsing.load(Ordering::SeqCst) {
        agent.cgroup.rehearsal()
    } else {
        agent.cgroup.thawed().await;
        agent.cgroup.target()
    };
    let ids = nix::unistd::geteuid().is_root().then_some(Ids { uid: user.uid, gid: user.gid, groups: &groups });
    let child = spawn::spawn(&Plan {
        program: &text(&program)?,
        args: &args,
        env: &env,
        cwd: &text(&cwd)?,
        ids,
        fds: &[in_read.as_fd(), out_write.as_fd(), err_write.as_fd()],
        cgroup,
    })
    .map_err(|error| explain(&error, &program, &cwd))?;
    drop((in_read, out_write, err_write));

    let process = Arc::new(Process {
        pid: ProcessId(child.pid),
        tag,
        config,
        stdin: tokio::sync::Mutex::new(in_write.map(pipe::Sender::from_owned_fd).transpose().map_err(system)?),
        listeners: Mutex::default(),
    });
    let receiver = process.listen(true).expect("it has just begun");
    let pipes = driver::Pipes {
        stdout: pipe::Receiver::from_owned_fd(out_read).map_err(system)?,
        stderr: pipe::Receiver::from_owned_fd(err_read).map_err(system)?,
        exit: Watch::new(child.pidfd).map_err(system)?,
    };
    agent.processes.with(|table| table.insert(process.pid, process.clone()));
    tokio::spawn(driver::drive(process, pipes, deadline, agent.processes.clone()));
    Ok(receiver)
}

fn explain(error: &SpawnError, program: &str, cwd: &str) -> CallError {
    match error.stage {
        Stage::Directory => match error.cause.kind() {
            io::ErrorKind::NotFound => {
                CallError::new(Code::InvalidArgument, format!("the working directory {cwd} does not exist"))
            }
            _ => CallError::of_io(&error.cause, cwd),
        },
        Stage::Exec => CallError::of_io(&error.cause, program),
        _ => CallError::new(Code::Internal, format!("{program} could not be started: {error}")),
    }
}

/// The environment of a program of `user`: the sandbox's own, below what the caller sets.
pub fn environment(agent: &Agent, user: &User, envs: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let session = agent.session();
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), PATH.to_owned()),
        ("HOME".to_owned(), user.home.clone()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("SHELL".to_owned(), user.shell.clone()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("E2B_SANDBOX".to_owned(), "true".to_owned()),
        ("E2B_SANDBOX_ID".to_owned(), session.sandbox_id.clone()),
    ]);
    env.extend(session.env.iter().chain(envs).map(|(name, value)| (name.clone(), value.clone())));
    env
}

/// Path of `cmd`, as a shell would find it.
fn find_program(cmd: &str, env: &BTreeMap<String, String>, cwd: &str) -> Option<String> {
    if cmd.contains('/') {
        let path = if cmd.starts_with('/') { cmd.to_owned() } else { format!("{cwd}/{cmd}") };
        return Some(path);
    }
    let directories = env.get("PATH").map_or(PATH, String::as_str);
    directories.split(':').map(|directory| format!("{directory}/{cmd}")).find(|path| Path::new(path).is_file())
}
