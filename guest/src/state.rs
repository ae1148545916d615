//! What the three ports share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::Options;
use crate::cgroup::UserCgroup;
use crate::http::Connections;
use crate::interpreter::Interpreter;
use crate::keep::Keep;
use crate::process::Table;
use crate::users::Accounts;
use crate::warm::Shell;

/// What the node gave this guest at its last start or restore.
#[derive(Clone, Debug, Default)]
pub struct Session {
    /// The sandbox's id; empty before the first `/init`.
    pub sandbox_id: String,
    /// What `X-Access-Token` must say; `None` lets everybody in.
    pub access_token: Option<String>,
    /// Environment of every process and context.
    pub env: BTreeMap<String, String>,
    /// Counts `/init` calls. An interpreter that has seen a lower one must seed its generators anew.
    pub generation: u64,
}

/// The agent.
pub struct Agent {
    /// All connections of all ports.
    pub connections: Connections,
    /// The user's cgroup.
    pub cgroup: Arc<UserCgroup>,
    /// Running processes.
    pub processes: Table,
    /// Interpreter contexts.
    pub interpreter: Interpreter,
    /// Users and groups of the root file system.
    pub accounts: Accounts,
    /// Who a request without a user means.
    pub default_user: String,
    /// Whether clock, randomness and host name of this machine are ours to set.
    pub guest: bool,
    /// What outlives this agent, and what it tells programs.
    pub keep: Keep,
    /// Directory for files of this run, in memory.
    pub runtime: PathBuf,
    /// The login shell that the template was captured with; in an agent that was started again, that of the next snapshot.
    pub shell: OnceLock<Shell>,
    /// Whether what is started now is for practice, while the user's processes are frozen.
    pub rehearsing: AtomicBool,
    session: RwLock<Arc<Session>>,
}

impl Agent {
    /// An agent that has not been given an identity yet.
    pub fn new(options: &Options, cgroup: UserCgroup, keep: Keep, accounts: Accounts, default_user: &str) -> Self {
        let cgroup = Arc::new(cgroup);
        Self {
            connections: Connections::default(),
            processes: Table::default(),
            interpreter: Interpreter::new(cgroup.clone()),
            cgroup,
            accounts,
            default_user: default_user.to_owned(),
            guest: options.guest,
            keep,
            runtime: options.runtime.clone(),
            shell: OnceLock::new(),
            rehearsing: AtomicBool::new(false),
            session: RwLock::new(Arc::new(Session::default())),
        }
    }

    /// The current session.
    pub fn session(&self) -> Arc<Session> {
        self.session.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the session; the generation counts on.
    pub fn set_session(&self, mut session: Session) {
        let mut current = self.session.write().unwrap_or_else(PoisonError::into_inner);
        session.generation = current.generation + 1;
        *current = Arc::new(session);
    }
}
