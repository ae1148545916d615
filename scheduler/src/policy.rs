//! Where a guest goes: a pure function of what is known about the nodes.
//!
//! Filters first: alive, host facts that match, memory left, room for one more guest. Of the nodes that pass, the one
//! with the fewest guests wins; nodes within one guest of it count as equal, and the caller's random number chooses
//! among them, so that several schedulers do not all send to the same node.

use snapyard_proto::v1::{HostFacts, NodeReport};
use thiserror::Error;

/// How many guests more than the emptiest node still count as equal.
const NEAR_TIE_GUESTS: u32 = 1;

/// One node, as the registry sees it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// What it last reported.
    pub report: &'a NodeReport,
    /// Whether its lease stands.
    pub alive: bool,
    /// Places taken: running, starting and reserved guests, each once.
    pub taken: u32,
}

/// Why no node can take a guest. The reason nearest to success is given: one that is full rather than one that is
/// incompatible, an incompatible one rather than a dead one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NoPlace {
    /// No node has ever registered.
    #[error("no node is registered; start one with `snapyard node` or `snapyard up`")]
    NoNodes,
    /// All known nodes have lost their lease.
    #[error("none of the {known} known nodes is alive")]
    NoneAlive {
        /// Nodes that once registered.
        known: usize,
    },
    /// Some are alive; none matches. Names the first mismatch of the last node looked at.
    #[error("no node is compatible: {fact} must be `{needed}`, but node {node} has `{found}`")]
    Incompatible {
        /// The fact's name.
        fact: &'static str,
        /// What the snapshot was taken on.
        needed: String,
        /// What the node has.
        found: String,
        /// The node.
        node: String,
    },
    /// Compatible nodes are alive; none has room.
    #[error("all {nodes} compatible nodes are full ({taken} guests running, starting or reserved)")]
    Full {
        /// Compatible nodes that are alive.
        nodes: usize,
        /// Places taken on them.
        taken: u64,
    },
}

/// Chooses a node: its index in `candidates`. `random` breaks near ties.
pub fn choose(candidates: &[Candidate<'_>], needs: &HostFacts, random: u64) -> Result<usize, NoPlace> {
    let alive: Vec<usize> = (0..candidates.len()).filter(|&i| candidates[i].alive).collect();
    let mut mismatch = None;
    let compatible: Vec<usize> = alive
        .iter()
        .copied()
        .filter(|&i| match first_mismatch(needs, candidates[i].report) {
            Some(found) => {
                mismatch = Some(found);
                false
            }
            None => true,
        })
        .collect();
    let with_room: Vec<usize> = compatible.iter().copied().filter(|&i| has_room(&candidates[i])).collect();

    let Some(fewest) = with_room.iter().map(|&i| candidates[i].taken).min() else {
        return Err(if !compatible.is_empty() {
            NoPlace::Full {
                nodes: compatible.len(),
                taken: compatible.iter().map(|&i| u64::from(candidates[i].taken)).sum(),
            }
        } else if let Some(mismatch) = mismatch {
            mismatch
        } else if candidates.is_empty() {
            NoPlace::NoNodes
        } else {
            NoPlace::NoneAlive { known: candidates.len() }
        });
    };
    let tied: Vec<usize> =
        with_room.into_iter().filter(|&i| candidates[i].taken <= fewest.saturating_add(NEAR_TIE_GUESTS)).collect();
    let pick = random % tied.len() as u64;
    Ok(tied[pick as usize])
}

/// Room for one more guest. The count is the promise that is kept; memory only refuses a node that has none left,
/// since what a guest will dirty is not known beforehand and its snapshot's memory is shared with its siblings.
fn has_room(node: &Candidate<'_>) -> bool {
    let memory_known = node.report.memory_total_bytes > 0;
    let memory_left = node.report.memory_used_bytes < node.report.memory_total_bytes;
    node.taken < node.report.max_sandboxes && (!memory_known || memory_left)
}

fn first_mismatch(needs: &HostFacts, report: &NodeReport) -> Option<NoPlace> {
    let none = HostFacts::default();
    let has = report.facts.as_ref().unwrap_or(&none);
    let facts = [
        ("vmm_version", &needs.vmm_version, &has.vmm_version),
        ("machine", &needs.machine, &has.machine),
        ("accelerator", &needs.accelerator, &has.accelerator),
        ("cpu_model", &needs.cpu_model, &has.cpu_model),
        ("kernel", &needs.kernel, &has.kernel),
    ];
    facts.into_iter().find(|(_, needed, found)| !needed.is_empty() && needed != found).map(|(fact, needed, found)| {
        NoPlace::Incompatible { fact, needed: needed.clone(), found: found.clone(), node: report.node_id.clone() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(id: &str, max: u32) -> NodeReport {
        NodeReport {
            node_id: id.into(),
            max_sandboxes: max,
            facts: Some(HostFacts { machine: "microvm".into(), accelerator: "tcg".into(), ..HostFacts::default() }),
            ..NodeReport::default()
        }
    }

    fn candidate(report: &NodeReport, taken: u32) -> Candidate<'_> {
        Candidate { report, alive: true, taken }
    }

    #[test]
    fn the_emptiest_wins_and_near_ties_are_spread() {
        let nodes = [report("a", 10), report("b", 10), report("c", 10)];
        let candidates = [candidate(&nodes[0], 5), candidate(&nodes[1], 1), candidate(&nodes[2], 2)];
        let any = HostFacts::default();
        assert_eq!(choose(&candidates, &any, 0), Ok(1));
        assert_eq!(choose(&candidates, &any, 1), Ok(2));
        assert_eq!(choose(&candidates, &any, 2), Ok(1));
    }

    #[test]
    fn full_exhausted_and_dead_nodes_are_passed_over() {
        let full = report("full", 3);
        let exhausted = NodeReport { memory_total_bytes: 10, memory_used_bytes: 10, ..report("exhausted", 10) };
        let dead = report("dead", 10);
        let good = report("good", 10);
        let candidates = [
            candidate(&full, 3),
            candidate(&exhausted, 0),
            Candidate { alive: false, ..candidate(&dead, 0) },
            candidate(&good, 9),
        ];
        for random in 0..8 {
            assert_eq!(choose(&candidates, &HostFacts::default(), random), Ok(3));
        }
    }

    #[test]
    fn a_refusal_says_why() {
        let any = HostFacts::default();
        assert_eq!(choose(&[], &any, 0), Err(NoPlace::NoNodes));

        let node = report("n", 2);
        let dead = Candidate { alive: false, ..candidate(&node, 0) };
        assert_eq!(choose(&[dead], &any, 0), Err(NoPlace::NoneAlive { known: 1 }));
        assert_eq!(choose(&[candidate(&node, 2)], &any, 0), Err(NoPlace::Full { nodes: 1, taken: 2 }));

        let needs = HostFacts { accelerator: "kvm".into(), ..HostFacts::default() };
        let refusal = choose(&[candidate(&node, 0)], &needs, 0).expect_err("incompatible");
        assert_eq!(refusal.to_string(), "no node is compatible: accelerator must be `kvm`, but node n has `tcg`");
    }

    #[test]
    fn an_unstated_fact_matches_any_host() {
        let node = report("n", 2);
        let needs = HostFacts { machine: "microvm".into(), ..HostFacts::default() };
        assert_eq!(choose(&[candidate(&node, 0)], &needs, 7), Ok(0));
    }
}
