//! What create and rollback share: a snapshot becomes a running guest with an identity of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use snapyard_snapstore as store;
use snapyard_vmm as vmm;
use snapyard_vmm::{GuestPort, PageSource, RestoreFrom, RestoreTimings, VmFailure};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, ENTROPY_BYTES, Identity};
use crate::error::NodeError;
use crate::node::State;
use crate::residency::Resident;
use crate::sandbox::{Endpoints, Facts, Guest};

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

/// Restores `resident` and gives the guest the identity in `facts`. On an error nothing is left.
pub async fn restore(
    node: &State,
    facts: &Facts,
    resident: Arc<Resident>,
    started: Instant,
) -> Result<(Guest, Endpoints, Timings), NodeError> {
    let sandbox = facts.id.as_str();
    check_host(&resident.manifest.facts, node.hypervisor.facts()).map_err(|(what, snapshot, here)| {
        NodeError::Mismatch(format!(
            "snapshot {} needs {what} {snapshot:?}, this node has {here:?}; start it on a node that matches",
            resident.id
        ))
    })?;
    let mut timings = Timings { opened: started.elapsed(), ..Timings::default() };
    let from = RestoreFrom {
        memory: Arc::clone(&resident.memory),
        disk: Arc::clone(&resident.disk) as Arc<dyn PageSource>,
        device_state: resident.device_state.clone(),
    };
    let mut phases = RestoreTimings::default();
    let restored = node.hypervisor.restore(resident.shape(), from, &mut phases).await;
    let vm = restored.map_err(|cause| NodeError::Vm { sandbox: sandbox.to_owned(), cause })?;
    timings.vmm_ready = timings.opened + phases.take;
    timings.attached = timings.vmm_ready + phases.attach;
    timings.loaded = timings.attached + phases.load;
    timings.running = started.elapsed();
    timings.filled_at_running = resident.memory.filled_bytes();

    let endpoints = Endpoints {
        control: vm.port(GuestPort::Control),
        agent: vm.port(GuestPort::Agent),
        interpreter: vm.port(GuestPort::Interpreter),
        cut: CancellationToken::new(),
    };
    let agent = Agent::new(endpoints.control, sandbox);
    let identified = tokio::select! {
        identified = identify(node, facts, &agent) => identified,
        reason = failure(vm.failed()) => {
            let reason = reason.unwrap_or_else(|| "it was killed".to_owned());
            Err(NodeError::Lost { sandbox: sandbox.to_owned(), reason })
        }
    };
    if let Err(error) = identified {
        vm.kill().await;
        return Err(error);
    }
    timings.ready = started.elapsed();
    timings.filled_at_ready = resident.memory.filled_bytes();
    Ok((Guest { vm, resident }, endpoints, timings))
}

/// The first fact that differs between the host that a snapshot was taken on and this one: device state and the CPU that
/// the guest saw mean something only where these agree. The kernel is in the guest's memory, so this node's is no matter.
fn check_host<'a>(
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

async fn identify(node: &State, facts: &Facts, agent: &Agent) -> Result<(), NodeError> {
    let mut entropy = [0; ENTROPY_BYTES];
    getrandom::fill(&mut entropy).map_err(|error| NodeError::Internal(format!("no randomness: {error}")))?;
    let identity = Identity {
        sandbox_id: facts.id.to_string(),
        hostname: facts.id.to_string(),
        unix_ns: node.clock.now_unix_ms().saturating_mul(1_000_000),
        entropy: base64::engine::general_purpose::STANDARD.encode(entropy),
        access_token: facts.access_token.clone(),
        env: facts.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
    };
    agent.init(&identity).await
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
