//! Nodes and reservations. One owner behind one lock; every method is one atomic step.
//!
//! # A place is counted once, and never too late
//!
//! ```text
//!   Place ──▶ reserved ──▶ (node starts the guest) ──▶ counted by a report of the node
//!                │
//!                ├─ Release ──▶ held until the node's reports must have counted the guest, if there is one
//!                └─ expiry  ──▶ gone (the caller died before it reached the node)
//! ```
//!
//! A node's report names its sandboxes, so one that is reserved and reported is one place. When the API releases a
//! reservation, the guest exists but the newest report may be older than it: the reservation is therefore held until
//! a report names its sandbox, or until two more reports have come. (The first of them can have been under way while
//! the guest was being created; the second was written after the first had been sent.) So a node is never promised
//! more guests than it has room for, as long as a create ends before its reservation expires.
//!
//! A node that registers again replaces its older self: each registration has a generation, and the end of an older
//! stream changes nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use snapyard_proto::v1::{HostFacts, NodeReport, NodeView};

use crate::policy::{Candidate, NoPlace, choose};

/// Reports after which a released reservation cannot be missing from the node's count any more.
const REPORTS_TO_OUTLIVE: u64 = 2;

/// How long a node that is gone stays in the list, for people to see.
const FORGET_DEAD_AFTER: Duration = Duration::from_secs(3600);

/// One registration of a node, for as long as its stream lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    node_id: String,
    generation: u64,
}

/// A place that was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Names the reservation in a later release.
    pub reservation_id: String,
    /// The node.
    pub node_id: String,
    /// Its gRPC endpoint.
    pub url: String,
}

#[derive(Debug)]
struct Node {
    report: NodeReport,
    /// `report.sandbox_ids`, when the node gave all of them.
    named: Option<HashSet<String>>,
    reports: u64,
    generation: u64,
    /// Since when the lease is gone; `None` while it stands.
    dead_since: Option<Instant>,
}

#[derive(Debug)]
struct Reservation {
    node_id: String,
    sandbox_id: String,
    expires: Instant,
    /// The node's count of reports at which the reservation falls away; set by the release.
    drop_at_report: Option<u64>,
}

/// What the scheduler knows. See the module's head.
#[derive(Debug)]
pub struct Registry {
    nodes: BTreeMap<String, Node>,
    reservations: HashMap<String, Reservation>,
    next_generation: u64,
    reservation_ttl: Duration,
}

impl Registry {
    /// An empty registry, whose reservations expire after `reservation_ttl`.
    pub fn new(reservation_ttl: Duration) -> Self {
        Self { nodes: BTreeMap::new(), reservations: HashMap::new(), next_generation: 0, reservation_ttl }
    }

    /// A node's first report on a new stream.
    pub fn register(&mut self, report: NodeReport) -> Lease {
        let generation = self.next_generation;
        self.next_generation += 1;
        let lease = Lease { node_id: report.node_id.clone(), generation };
        // The count of reports goes on, so that reservations held from before the reconnect still fall away.
        let reports = self.nodes.get(&report.node_id).map_or(0, |node| node.reports) + 1;
        let named = named_sandboxes(&report);
        self.nodes.insert(lease.node_id.clone(), Node { report, named, reports, generation, dead_since: None });
        self.settle(&lease.node_id);
        lease
    }

    /// A further report on the stream of `lease`. False when the node has registered anew since: the stream is stale.
    pub fn report(&mut self, lease: &Lease, report: NodeReport) -> bool {
        let Some(node) = self.nodes.get_mut(&lease.node_id).filter(|node| node.generation == lease.generation) else {
            return false;
        };
        node.named = named_sandboxes(&report);
        node.report = report;
        node.reports += 1;
        self.settle(&lease.node_id);
        true
    }

    /// The stream of `lease` ended. Its reservations stand: the node may be back before they are used.
    pub fn leave(&mut self, lease: &Lease, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&lease.node_id).filter(|node| node.generation == lease.generation) {
            node.dead_since = Some(now);
        }
    }

    /// Chooses a node and reserves a place on it, in one step. `reservation_id` must be new; `random` breaks ties.
    pub fn place(
        &mut self,
        sandbox_id: &str,
        needs: &HostFacts,
        reservation_id: String,
        random: u64,
        now: Instant,
    ) -> Result<Placement, NoPlace> {
        self.expire(now);
        let candidates: Vec<Candidate<'_>> = self
            .nodes
            .values()
            .map(|node| Candidate { report: &node.report, alive: node.dead_since.is_none(), taken: self.taken(node) })
            .collect();
        let chosen = candidates[choose(&candidates, needs, random)?].report;
        let placement = Placement { reservation_id, node_id: chosen.node_id.clone(), url: chosen.url.clone() };
        self.reservations.insert(
            placement.reservation_id.clone(),
            Reservation {
                node_id: placement.node_id.clone(),
                sandbox_id: sandbox_id.to_owned(),
                expires: now + self.reservation_ttl,
                drop_at_report: None,
            },
        );
        Ok(placement)
    }

    /// Gives a place back, or says that its create has ended. Unknown and repeated ids are fine.
    pub fn release(&mut self, reservation_id: &str) {
        let Some(reservation) = self.reservations.get_mut(reservation_id) else { return };
        let reports = self.nodes.get(&reservation.node_id).map_or(0, |node| node.reports);
        reservation.drop_at_report.get_or_insert(reports + REPORTS_TO_OUTLIVE);
    }

    /// All nodes, with the places that are reserved on each beyond what it has reported.
    pub fn list(&mut self, now: Instant) -> Vec<NodeView> {
        self.expire(now);
        self.nodes
            .values()
            .map(|node| NodeView {
                report: Some(node.report.clone()),
                reserved: self.taken(node) - node.report.sandboxes,
                alive: node.dead_since.is_none(),
            })
            .collect()
    }

    fn expire(&mut self, now: Instant) {
        self.reservations.retain(|_, reservation| reservation.expires > now);
        self.nodes.retain(|_, node| {
            node.dead_since.is_none_or(|since| now.saturating_duration_since(since) < FORGET_DEAD_AFTER)
        });
    }

    /// Drops the reservations that the newest report of a node has taken over.
    fn settle(&mut self, node_id: &str) {
        let Some(node) = self.nodes.get(node_id) else { return };
        self.reservations.retain(|_, reservation| {
            if reservation.node_id != node_id {
                return true;
            }
            let named = node.named.as_ref().is_some_and(|named| named.contains(&reservation.sandbox_id));
            let outlived = reservation.drop_at_report.is_some_and(|at| node.reports >= at);
            !(named || outlived)
        });
    }

    /// Places taken on a node: reported sandboxes and reservations, each sandbox once.
    fn taken(&self, node: &Node) -> u32 {
        let reserved: HashSet<&str> = self
            .reservations
            .values()
            .filter(|reservation| reservation.node_id == node.report.node_id)
            .map(|reservation| reservation.sandbox_id.as_str())
            .filter(|id| node.named.as_ref().is_none_or(|named| !named.contains(*id)))
            .collect();
        node.report.sandboxes.saturating_add(u32::try_from(reserved.len()).unwrap_or(u32::MAX))
    }
}

fn named_sandboxes(report: &NodeReport) -> Option<HashSet<String>> {
    (report.sandbox_ids.len() == report.sandboxes as usize).then(|| report.sandbox_ids.iter().cloned().collect())
}

#[cfg(test)]
mod tests;
