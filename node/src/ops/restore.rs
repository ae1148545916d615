//! What create and rollback share: a snapshot becomes a running guest with an identity of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use snapyard_snapstore as store;
use snapyard_vmm as vmm;
use snapyard_vmm::{GuestPort, PageSource, RestoreFrom, RestoreTimings, Vm, VmFailure};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, ENTROPY_BYTES, Identity, Processes};
use crate::error::NodeError;
use crate::node::State;
use crate::residency::Resident;
use crate::sandbox::{Endpoints, Facts, Guest};
use crate::working_set;

/// When each phase of a restore was over, from its beginning; and how much of the memory image was there then.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// The snapshot was open.
    pub opened: Duration,
    /// A VMM was at hand.
    pub vmm_ready: Duration,
    /// The memory image was attached to it.
    pub attached: Duration,
    /// Device state was loaded.
    pub loaded: Duration,
    /// The guest ran.
    pub running: Duration,
    /// Its agent had its new identity.
    pub ready: Duration,
    /// Bytes in the memory image when the guest ran.
    pub filled_at_running: u64,
    /// Bytes in it when the agent was ready.
    pub filled_at_ready: u64,
}

/// Makes a guest of `resident`, a standby or a new one, and gives it the identity in `facts`. On an error nothing is
/// left.
pub async fn restore(
    node: &Arc<State>,
    facts: &Facts,
    resident: Arc<Resident>,
    started: Instant,
) -> Result<(Guest, Endpoints, Timings), NodeError> {
    let _busy = node.standbys.busy();
    node.standbys.started(&facts.team, resident.id);
    let opened = started.elapsed();
    if let Some(guest) = node.standbys.take(&resident.id) {
        let at_once = Timings { opened, vmm_ready: opened, attached: opened, loaded: opened, ..Timings::default() };
        match guest.vm.resume().await {
            Ok(()) => return finish(node, facts, guest, started, at_once).await,
            Err(error) => {
                tracing::warn!(sandbox = %facts.id, %error, "a standby does not run; restoring another guest");
                guest.vm.kill().await;
            }
        }
    }
    let mut phases = RestoreTimings::default();
    let vm = start(node, facts.id.as_str(), &resident, &mut phases).await?;
    let vmm_ready = opened + phases.take;
    let attached = vmm_ready + phases.attach;
    let touches = vm.touches();
    let recorded = Arc::clone(&resident);
    let timings = Timings { opened, vmm_ready, attached, loaded: attached + phases.load, ..Timings::default() };
    let (guest, endpoints, timings) = finish(node, facts, Guest { vm, resident }, started, timings).await?;
    let recording = working_set::record(Arc::clone(node), recorded, touches, endpoints.cut.clone());
    node.tasks.spawn(recording);
    Ok((guest, endpoints, timings))
}

/// A new guest of `resident`, running, that has no identity yet. `whose` is for messages.
pub async fn start(
    node: &State,
    whose: &str,
    resident: &Arc<Resident>,
    phases: &mut RestoreTimings,
) -> Result<Vm, NodeError> {
    check_host(&resident.manifest.facts, node.hypervisor.facts()).map_err(|(what, snapshot, here)| {
        NodeError::Mismatch(format!(
            "snapshot {} needs {what} {snapshot:?}, this node has {here:?}; start it on a node that matches",
            resident.id
        ))
    })?;
    node.tasks.spawn(working_set::read_ahead(Arc::clone(resident), node.shutdown.clone()));
    let from = RestoreFrom {
        memory: Arc::clone(&resident.memory),
        disk: Arc::clone(&resident.disk) as Arc<dyn PageSource>,
        device_state: resident.device_state.clone(),
    };
    let restored = node.hypervisor.restore(resident.shape(), from, phases).await;
    restored.map_err(|cause| NodeError::Vm { sandbox: whose.to_owned(), cause })
}

/// From a running guest to one with an identity. Kills it on an error.
async fn finish(
    node: &State,
    facts: &Facts,
    guest: Guest,
    started: Instant,
    mut timings: Timings,
) -> Result<(Guest, Endpoints, Timings), NodeError> {
    timings.running = started.elapsed();
    timings.filled_at_running = guest.resident.memory.filled_bytes();
    let endpoints = Endpoints {
        control: guest.vm.port(GuestPort::Control),
        agent: guest.vm.port(GuestPort::Agent),
        interpreter: guest.vm.port(GuestPort::Interpreter),
        cut: CancellationToken::new(),
    };
    let agent = Agent::new(endpoints.control, facts.id.as_str());
    let identified = async { agent.init(&identity(node, facts)?).await };
    if let Err(error) = unless_lost(&guest.vm, facts.id.as_str(), identified).await {
        guest.vm.kill().await;
        return Err(error);
    }
    timings.ready = started.elapsed();
    timings.filled_at_ready = guest.resident.memory.filled_bytes();
    Ok((guest, endpoints, timings))
}

/// Lets a guest that is nobody's yet do for practice what a sandbox's first request makes it do.
pub async fn rehearse(node: &State, vm: &Vm) -> Result<(), NodeError> {
    let whose = "a standby";
    let token = STANDARD.encode(random()?);
    let identity = Identity {
        sandbox_id: "rehearsal".to_owned(),
        hostname: "rehearsal".to_owned(),
        unix_ns: node.clock.now_unix_ms().saturating_mul(1_000_000),
        entropy: STANDARD.encode(random()?),
        access_token: token.clone(),
        env: std::collections::BTreeMap::new(),
    };
    let agent = Agent::new(vm.port(GuestPort::Control), whose);
    let processes = Processes::new(vm.port(GuestPort::Agent), whose);
    unless_lost(vm, whose, async {
        agent.rehearse(&identity).await?;
        processes.rehearse(&token).await
    })
    .await
}

/// What `work` answers, unless the guest is lost before.
async fn unless_lost<T>(
    vm: &Vm,
    sandbox: &str,
    work: impl Future<Output = Result<T, NodeError>>,
) -> Result<T, NodeError> {
    tokio::select! {
        done = work => done,
        reason = failure(vm.failed()) => {
            let reason = reason.unwrap_or_else(|| "it was killed".to_owned());
            Err(NodeError::Lost { sandbox: sandbox.to_owned(), reason })
        }
    }
}

/// The first fact that differs between the host that a snapshot was taken on and this one: device state and the CPU that
/// the guest saw mean something only where these agree. The kernel is in the guest's memory, so this node's is no matter.
pub fn check_host<'a>(
    snapshot: &'a store::HostFacts,
    here: &'a vmm::HostFacts,
) -> Result<(), (&'static str, &'a str, &'a str)> {
    let facts = [
        ("VMM", &*snapshot.vmm_version, &*here.vmm_version),
        ("machine", &snapshot.machine, &here.machine),
        ("accelerator", &snapshot.accelerator, here.accelerator.name()),
        ("CPU model", &snapshot.cpu_model, &here.cpu_model),
    ];
    facts.into_iter().find(|(_, snapshot, here)| snapshot != here).map_or(Ok(()), Err)
}

/// Why a guest failed; waits until it does. `None`: its owner killed it.
pub async fn failure(mut failed: watch::Receiver<Option<VmFailure>>) -> Option<String> {
    let failure = failed.wait_for(Option::is_some).await.ok()?;
    failure.as_ref().map(ToString::to_string)
}

fn identity(node: &State, facts: &Facts) -> Result<Identity, NodeError> {
    Ok(Identity {
        sandbox_id: facts.id.to_string(),
        hostname: facts.id.to_string(),
        unix_ns: node.clock.now_unix_ms().saturating_mul(1_000_000),
        entropy: STANDARD.encode(random()?),
        access_token: facts.access_token.clone(),
        env: facts.env.clone(),
    })
}

fn random() -> Result<[u8; ENTROPY_BYTES], NodeError> {
    let mut bytes = [0; ENTROPY_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| NodeError::Internal(format!("no randomness: {error}")))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fact_that_differs_is_named() {
        let here = vmm::HostFacts {
            vmm_version: "QEMU 7.2".to_owned(),
            machine: "microvm".to_owned(),
            accelerator: vmm::Accelerator::Tcg,
            cpu_model: "max".to_owned(),
            kernel: "here".to_owned(),
            tsc_khz: 1,
        };
        let same = store::HostFacts {
            vmm_version: "QEMU 7.2".to_owned(),
            machine: "microvm".to_owned(),
            accelerator: here.accelerator.name().to_owned(),
            cpu_model: "max".to_owned(),
            kernel: "there".to_owned(),
        };
        assert_eq!(check_host(&same, &here), Ok(()));
        let other = store::HostFacts { vmm_version: "QEMU 9.0".to_owned(), ..same };
        assert_eq!(check_host(&other, &here), Err(("VMM", "QEMU 9.0", "QEMU 7.2")));
    }
}
