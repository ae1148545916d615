//! One sandbox on this node: its phases, its guest, and the link that the proxy reaches it by.
//!
//! ```text
//!            ┌──────────────► Snapshotting ─┐
//! Creating ─►│ Running ◄────────────────────┤        Killing ─► (gone, or paused: a row, and no guest)
//!            ├──────────────► RollingBack ──┤           ▲
//!            └──────────────► Pausing ──────┴───────────┤
//!                 └─────────────────────────────────────┘
//! ```
//!
//! An operation enters its phase from `Running` or is refused with "busy"; nothing waits for a phase to end, so two
//! operations on one sandbox cannot dead-lock. A [`PhaseGuard`] that is dropped, by an error or by a panic, puts the
//! sandbox back to `Running`: a failed operation leaves what it found.
//!
//! A guardian task owns the deadline and the guest's end: it kills a sandbox whose time is over, and buries one whose
//! virtual machine died, whatever else is going on.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use snapyard_snapstore::catalog::SandboxRow;
use snapyard_snapstore::ids::{SandboxId, TeamId};
use snapyard_vmm::Vm;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::NodeError;
use crate::residency::Resident;

/// What a sandbox is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its guest is being restored.
    Creating,
    /// Its guest runs and no operation is in progress.
    Running,
    /// A snapshot of it is being taken.
    Snapshotting,
    /// It is being put back to a snapshot.
    RollingBack,
    /// Its state is being stored, after which its guest goes.
    Pausing,
    /// It is being ended.
    Killing,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Running => "running",
            Self::Snapshotting => "being snapshotted",
            Self::RollingBack => "being rolled back",
            Self::Pausing => "being paused",
            Self::Killing => "being killed",
        }
    }
}

/// Where a guest's ports are, and the token that cuts every connection to them at once.
#[derive(Clone, Debug)]
pub struct Endpoints {
    /// The agent's control port (node only).
    pub control: SocketAddr,
    /// The agent's public port.
    pub agent: SocketAddr,
    /// The code interpreter.
    pub interpreter: SocketAddr,
    /// Cancelled when this guest stops being the sandbox's.
    pub cut: CancellationToken,
}

/// How the gateway reaches the guest.
#[derive(Clone, Debug)]
pub enum Link {
    /// A new guest is on its way: wait.
    Held,
    /// Through these ports.
    Open(Endpoints),
    /// Never again, and why, if there is more to say than that it was killed.
    Gone(Option<Arc<str>>),
}

/// The virtual machine behind a sandbox and the snapshot that its untouched pages come from.
pub struct Guest {
    /// The virtual machine.
    pub vm: Vm,
    /// What it was restored from; held so that its images stay.
    pub resident: Arc<Resident>,
}

/// What does not change in a sandbox's life.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The sandbox.
    pub id: SandboxId,
    /// Its owner.
    pub team: TeamId,
    /// What the create named, resolved: a template's or a snapshot's id.
    pub template_id: String,
    /// Token of its data plane, or empty.
    pub access_token: String,
    /// Environment of its processes.
    pub env: BTreeMap<String, String>,
    /// Paused, not killed, when its time is over.
    pub auto_pause: bool,
}

impl Facts {
    /// Those of a row.
    pub fn of(row: &SandboxRow) -> Self {
        Self {
            id: row.id.clone(),
            team: row.team.clone(),
            template_id: row.template_id.clone(),
            access_token: row.access_token.clone(),
            env: row.env.clone(),
            auto_pause: row.auto_pause,
        }
    }
}

/// One sandbox of this node.
pub struct Sandbox {
    /// What does not change.
    pub facts: Facts,
    phase: Mutex<Phase>,
    /// When it ends, milliseconds since 1970; `None`: never.
    pub deadline: watch::Sender<Option<i64>>,
    /// How the gateway reaches it.
    pub link: watch::Sender<Link>,
    /// Cancelled when nothing is left of it.
    pub ended: CancellationToken,
    /// Its guest; `None` before the restore and after the end.
    pub guest: tokio::sync::Mutex<Option<Guest>>,
}

impl Sandbox {
    /// A sandbox whose guest is yet to be restored.
    pub fn new(facts: Facts, deadline: Option<i64>) -> Arc<Self> {
        Arc::new(Self {
            facts,
            phase: Mutex::new(Phase::Creating),
            deadline: watch::Sender::new(deadline),
            link: watch::Sender::new(Link::Held),
            ended: CancellationToken::new(),
            guest: tokio::sync::Mutex::new(None),
        })
    }

    /// What it is doing.
    pub fn phase(&self) -> Phase {
        *self.phase.lock()
    }

    /// Enters `phase` from `Running`, or says what the sandbox is busy with.
    pub fn enter(self: &Arc<Self>, phase: Phase) -> Result<PhaseGuard, NodeError> {
        let mut current = self.phase.lock();
        if *current != Phase::Running {
            return Err(NodeError::Busy { sandbox: self.facts.id.to_string(), phase: current.name() });
        }
        *current = phase;
        Ok(PhaseGuard { sandbox: Arc::clone(self) })
    }

    /// The create succeeded: `Creating` becomes `Running`.
    pub fn started(&self, endpoints: Endpoints) {
        self.link.send_replace(Link::Open(endpoints));
        *self.phase.lock() = Phase::Running;
    }

    /// Lets new connections wait; answers how the guest was reached, for [`Sandbox::release`].
    pub fn hold(&self) -> Link {
        self.link.send_replace(Link::Held)
    }

    /// Undoes [`Sandbox::hold`], unless the sandbox has ended meanwhile.
    pub fn release(&self, held: Link) {
        self.link.send_if_modified(|link| {
            let waiting = matches!(link, Link::Held);
            if waiting {
                *link = held;
            }
            waiting
        });
    }

    /// The guest died by itself: whatever phase it was in, the sandbox is being ended from now on.
    /// False when somebody else ends it already.
    pub fn doom(&self) -> bool {
        let mut current = self.phase.lock();
        let first = *current != Phase::Killing;
        *current = Phase::Killing;
        first
    }

    /// Cuts every connection and refuses new ones.
    pub fn close(&self, reason: Option<&str>) {
        if let Link::Open(endpoints) = self.link.send_replace(Link::Gone(reason.map(Arc::from))) {
            endpoints.cut.cancel();
        }
    }
}

/// Holds a phase; dropped, the sandbox is `Running` again, unless it was doomed meanwhile.
pub struct PhaseGuard {
    sandbox: Arc<Sandbox>,
}

impl PhaseGuard {
    /// The sandbox does not go back to `Running`: it has ended.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        let mut current = self.sandbox.phase.lock();
        if *current != Phase::Killing {
            *current = Phase::Running;
        }
    }
}

/// The sandboxes of this node, and why the last lost ones were lost.
#[derive(Default)]
pub struct Registry {
    live: Mutex<HashMap<SandboxId, Arc<Sandbox>>>,
    lost: Mutex<std::collections::VecDeque<(SandboxId, String)>>,
}

/// Reasons kept for sandboxes that were lost.
const LOST_KEPT: usize = 1024;

impl Registry {
    /// Adds a sandbox whose id is free, below the limit.
    pub fn insert(&self, sandbox: &Arc<Sandbox>, most: usize, node: &str) -> Result<(), NodeError> {
        let mut live = self.live.lock();
        if live.contains_key(&sandbox.facts.id) {
            return Err(NodeError::Exists(sandbox.facts.id.to_string()));
        }
        if live.len() >= most {
            return Err(NodeError::Full { node: node.to_owned(), most });
        }
        live.insert(sandbox.facts.id.clone(), Arc::clone(sandbox));
        Ok(())
    }

    /// Removes a sandbox that has ended.
    pub fn remove(&self, id: &SandboxId) {
        self.live.lock().remove(id);
    }

    /// The sandbox of `team` with this id. Another team's is not found.
    pub fn get(&self, team: &TeamId, id: &SandboxId) -> Result<Arc<Sandbox>, NodeError> {
        if let Some(sandbox) = self.live.lock().get(id).filter(|sandbox| sandbox.facts.team == *team) {
            return Ok(Arc::clone(sandbox));
        }
        Err(NodeError::NoSandbox(id.to_string()))
    }

    /// The sandbox with this id, whoever's: for the gateway, whose caller has checked.
    pub fn find(&self, id: &str) -> Option<Arc<Sandbox>> {
        let id = SandboxId::new(id).ok()?;
        self.live.lock().get(&id).cloned()
    }

    /// Every sandbox.
    pub fn all(&self) -> Vec<Arc<Sandbox>> {
        self.live.lock().values().cloned().collect()
    }

    /// Remembers why a sandbox was lost.
    pub fn remember_lost(&self, id: &SandboxId, reason: &str) {
        let mut lost = self.lost.lock();
        if lost.len() >= LOST_KEPT {
            lost.pop_front();
        }
        lost.push_back((id.clone(), reason.to_owned()));
    }

    /// Why a sandbox was lost, if it was and not too long ago.
    pub fn lost_reason(&self, id: &str) -> Option<String> {
        self.lost.lock().iter().rev().find(|(lost, _)| lost.as_str() == id).map(|(_, reason)| reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox() -> Arc<Sandbox> {
        let facts = Facts {
            id: SandboxId::new("a1").expect("valid"),
            team: TeamId::new("default").expect("valid"),
            template_id: "base".to_owned(),
            access_token: String::new(),
            env: BTreeMap::new(),
            auto_pause: false,
        };
        Sandbox::new(facts, None)
    }

    fn endpoints() -> Endpoints {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        Endpoints { control: address, agent: address, interpreter: address, cut: CancellationToken::new() }
    }

    #[test]
    fn one_operation_at_a_time_and_a_failed_one_leaves_it_running() {
        let sandbox = sandbox();
        assert!(sandbox.enter(Phase::Snapshotting).is_err(), "still being created");
        sandbox.started(endpoints());
        let first = sandbox.enter(Phase::Snapshotting).expect("running");
        assert!(matches!(sandbox.enter(Phase::Killing), Err(NodeError::Busy { .. })));
        drop(first);
        assert_eq!(sandbox.phase(), Phase::Running);
    }

    #[test]
    fn a_doomed_sandbox_stays_doomed_when_its_operation_ends() {
        let sandbox = sandbox();
        sandbox.started(endpoints());
        let operation = sandbox.enter(Phase::Snapshotting).expect("running");
        assert!(sandbox.doom());
        assert!(!sandbox.doom(), "only one buries it");
        drop(operation);
        assert_eq!(sandbox.phase(), Phase::Killing);
    }

    #[test]
    fn closing_cuts_open_connections() {
        let sandbox = sandbox();
        let endpoints = endpoints();
        let cut = endpoints.cut.clone();
        sandbox.started(endpoints);
        sandbox.close(Some("killed"));
        assert!(cut.is_cancelled());
        assert!(matches!(&*sandbox.link.borrow(), Link::Gone(Some(_))));
    }

    #[test]
    fn ids_are_unique_and_the_limit_holds() {
        let registry = Registry::default();
        let one = sandbox();
        registry.insert(&one, 1, "n").expect("free");
        assert!(matches!(registry.insert(&one, 2, "n"), Err(NodeError::Exists(_))));
        let facts = Facts { id: SandboxId::new("b2").expect("valid"), ..one.facts.clone() };
        assert!(matches!(registry.insert(&Sandbox::new(facts, None), 1, "n"), Err(NodeError::Full { .. })));
        let stranger = TeamId::new("other").expect("valid");
        assert!(registry.get(&stranger, &one.facts.id).is_err(), "another team's sandbox is not found");
    }
}
