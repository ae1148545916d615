//! The agent inside every guest: processes, files and a code interpreter for the public SDKs, identity and freezing for
//! the node.
//!
//! | port | for | module |
//! | --- | --- | --- |
//! | 49982 | the node alone | [`control`] |
//! | 49983 | SDKs: Connect protocol with JSON, `/files` | `service`, `process`, `filesystem`, `files` |
//! | 49999 | SDKs: `/execute`, `/contexts` | `interpreter` |
//!
//! One thread serves all three: its working set is what every restore pages in, and under emulation a hand-over between
//! threads costs more than most requests. Work that can block on a disk goes to the runtime's blocking threads.
//!
//! Invariants: nothing of the user's runs between the restore and [`control`]'s `/init`; all of it is in one cgroup (the
//! shell of a rehearsal, which is nobody's, in another); a client that hangs up harms neither its process nor its interpreter.

use std::process::ExitCode;

pub mod auth;
pub mod boot;
pub mod cgroup;
pub mod connect;
pub mod control;
pub mod files;
pub mod filesystem;
pub mod http;
pub mod interpreter;
pub mod keep;
pub mod metrics;
pub mod process;
pub mod service;
pub mod state;
pub mod sys;
pub mod users;
pub mod warm;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::cgroup::UserCgroup;
use crate::http::{Peers, serve};
use crate::keep::Keep;
use crate::state::Agent;
use crate::users::Accounts;

/// How long an idle blocking thread stays: longer than any sandbox, so that a warmed one is there after each restore.
const BLOCKING_KEEP: Duration = Duration::from_secs(365 * 24 * 3600);
/// Blocking threads at most.
const BLOCKING_MAX: usize = 8;

/// Where an agent listens, and what it takes care of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether this is a guest, with its cgroup, clock and names, or a program on some machine (tests).
    pub guest: bool,
    /// The node's port.
    pub control: SocketAddr,
    /// The SDKs' port.
    pub agent: SocketAddr,
    /// The code interpreter's port.
    pub interpreter: SocketAddr,
    /// Directory for files of this run.
    pub runtime: PathBuf,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let port = |port| SocketAddr::from(([0, 0, 0, 0], port));
        let mut options = Self {
            guest: false,
            control: port(49982),
            agent: port(49983),
            interpreter: port(49999),
            runtime: std::env::temp_dir(),
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            let address = |text: String| text.parse().map_err(|_| format!("{text} is no address"));
            match arg.as_str() {
                "--guest" => {
                    options.guest = true;
                    options.runtime = PathBuf::from("/run/snapyard");
                }
                "--control" => options.control = address(value()?)?,
                "--agent" => options.agent = address(value()?)?,
                "--interpreter" => options.interpreter = address(value()?)?,
                "--runtime" => options.runtime = PathBuf::from(value()?),
                other => return Err(format!("unknown option {other}")),
            }
        }
        Ok(options)
    }
}

/// Runs the agent until it is killed.
pub fn agent(args: impl Iterator<Item = String>) -> ExitCode {
    let result = Options::parse(args).map_err(io::Error::other).and_then(|options| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_MAX)
            .thread_keep_alive(BLOCKING_KEEP)
            .build()?;
        runtime.block_on(async { listen(&options).await?.run().await })
    });
    if let Err(error) = result {
        eprintln!("snapyard-guest: agent: {error}");
    }
    ExitCode::FAILURE
}

/// An agent whose ports are open.
pub struct Running {
    /// The agent.
    pub agent: Arc<Agent>,
    /// The addresses of its ports: control, agent, interpreter.
    pub addresses: [SocketAddr; 3],
    listeners: [TcpListener; 3],
    peers: Peers,
}

/// Opens the ports.
pub async fn listen(options: &Options) -> io::Result<Running> {
    let cgroup =
        UserCgroup::open(options.guest.then(|| (Path::new(boot::USER_CGROUP), Path::new(boot::REHEARSAL_CGROUP))))?;
    // In a test the accounts are the machine's.
    let accounts = Accounts::below(Path::new("/"));
    let default_user = if accounts.user("user")?.is_some() { "user" } else { "root" };
    let keep = Keep::open(&options.runtime, options.guest.then(|| Path::new("/etc/machine-id")))?;
    let agent = Agent::new(options, cgroup, keep, accounts, default_user);
    control::recall(&agent)?;
    let listeners = [
        TcpListener::bind(options.control).await?,
        TcpListener::bind(options.agent).await?,
        TcpListener::bind(options.interpreter).await?,
    ];
    let addresses = [listeners[0].local_addr()?, listeners[1].local_addr()?, listeners[2].local_addr()?];
    let peers = if options.guest { Peers::OutsideOnly } else { Peers::All };
    Ok(Running { agent: Arc::new(agent), addresses, listeners, peers })
}

impl Running {
    /// Serves all three ports for ever.
    pub async fn run(self) -> io::Result<()> {
        let Self { agent, listeners: [control, main, interpreter], peers, .. } = self;
        let connections = agent.connections.clone();
        let (first, second, third) = (agent.clone(), agent.clone(), agent);
        tokio::join!(
            serve(control, connections.clone(), peers, move |request, scope| {
                control::handle(first.clone(), request, scope)
            }),
            serve(main, connections.clone(), Peers::All, move |request, scope| {
                service::handle(second.clone(), request, scope)
            }),
            serve(interpreter, connections, Peers::All, move |request, scope| {
                interpreter::handle(third.clone(), request, scope)
            }),
        );
        Ok(())
    }
}
