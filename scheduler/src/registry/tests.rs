//! The registry against a model of nodes whose reports are late.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_secs(60);

fn report(node_id: &str, max: u32, sandboxes: &[&str]) -> NodeReport {
    NodeReport {
        node_id: node_id.into(),
        url: format!("http://{node_id}"),
        max_sandboxes: max,
        sandboxes: u32::try_from(sandboxes.len()).expect("few"),
        sandbox_ids: sandboxes.iter().map(|id| (*id).to_owned()).collect(),
        ..NodeReport::default()
    }
}

fn place(registry: &mut Registry, sandbox: &str, now: Instant) -> Result<Placement, NoPlace> {
    registry.place(sandbox, &HostFacts::default(), format!("r-{sandbox}"), 0, now)
}

#[test]
fn a_place_is_reserved_until_released_and_reported() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    let lease = registry.register(report("n", 1, &[]));
    let placement = place(&mut registry, "a", now).expect("room");
    assert_eq!((placement.node_id.as_str(), placement.url.as_str()), ("n", "http://n"));
    assert_eq!(place(&mut registry, "b", now), Err(NoPlace::Full { nodes: 1, taken: 1 }));

    registry.release("r-a");
    assert!(place(&mut registry, "b", now).is_err(), "the guest of `a` may run without having been reported");
    assert!(registry.report(&lease, report("n", 1, &[])));
    assert!(place(&mut registry, "b", now).is_err(), "this report may be older than the guest");
    assert!(registry.report(&lease, report("n", 1, &[])));
    place(&mut registry, "b", now).expect("two reports without `a`: its create failed, or it is gone");
}

#[test]
fn a_sandbox_that_is_reserved_and_reported_is_counted_once() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    let lease = registry.register(report("n", 2, &[]));
    place(&mut registry, "a", now).expect("room");
    registry.report(&lease, report("n", 2, &["a"]));
    assert_eq!(registry.list(now)[0].reserved, 0);
    place(&mut registry, "b", now).expect("one place is left");
    assert!(place(&mut registry, "c", now).is_err());
}

#[test]
fn a_node_that_names_no_sandboxes_is_counted_as_reported_plus_reserved() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    let unnamed = NodeReport { sandboxes: 1, ..report("n", 3, &[]) };
    registry.register(unnamed);
    place(&mut registry, "a", now).expect("room");
    place(&mut registry, "b", now).expect("room");
    assert!(place(&mut registry, "c", now).is_err());
}

#[test]
fn an_abandoned_reservation_expires() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    registry.register(report("n", 1, &[]));
    place(&mut registry, "a", now).expect("room");
    assert!(place(&mut registry, "b", now + TTL - Duration::from_millis(1)).is_err());
    place(&mut registry, "b", now + TTL).expect("expired");
}

#[test]
fn the_end_of_an_older_stream_does_not_unregister_a_node_that_came_back() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    let old = registry.register(report("n", 1, &[]));
    let new = registry.register(report("n", 1, &[]));
    registry.leave(&old, now);
    assert!(!registry.report(&old, report("n", 0, &[])));
    assert!(registry.list(now)[0].alive);
    registry.leave(&new, now);
    assert!(!registry.list(now)[0].alive);
    assert_eq!(place(&mut registry, "a", now), Err(NoPlace::NoneAlive { known: 1 }));
    assert!(registry.list(now + FORGET_DEAD_AFTER).is_empty());
}

#[test]
fn releasing_twice_or_the_unknown_changes_nothing() {
    let now = Instant::now();
    let mut registry = Registry::new(TTL);
    let lease = registry.register(report("n", 1, &[]));
    registry.release("r-never");
    place(&mut registry, "a", now).expect("room");
    registry.release("r-a");
    registry.report(&lease, report("n", 1, &[]));
    registry.release("r-a");
    registry.report(&lease, report("n", 1, &[]));
    place(&mut registry, "b", now).expect("the second release did not prolong the hold");
}

/// What can happen around one scheduler.
#[derive(Clone, Debug)]
enum Step {
    Place,
    /// The oldest placed create reaches its node.
    Start,
    /// A started create ends well (its guest runs on) or badly (its guest is gone), and is released.
    Finish {
        fails: bool,
        which: usize,
    },
    /// A placed create never starts; its caller releases it.
    GiveUp,
    Kill {
        which: usize,
    },
    /// The node writes a report, unless one is still under way.
    WriteReport {
        node: usize,
    },
    DeliverReport {
        node: usize,
    },
    Reconnect {
        node: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Place),
        3 => Just(Step::Start),
        3 => (any::<bool>(), any::<usize>()).prop_map(|(fails, which)| Step::Finish { fails, which }),
        1 => Just(Step::GiveUp),
        2 => any::<usize>().prop_map(|which| Step::Kill { which }),
        3 => (0..3_usize).prop_map(|node| Step::WriteReport { node }),
        3 => (0..3_usize).prop_map(|node| Step::DeliverReport { node }),
        1 => (0..3_usize).prop_map(|node| Step::Reconnect { node }),
    ];
    prop::collection::vec(step, 1..200)
}

/// The truth about one node.
struct Model {
    name: &'static str,
    max: u32,
    guests: BTreeSet<String>,
    under_way: Option<NodeReport>,
    lease: Lease,
}

impl Model {
    fn report(&self, named: bool) -> NodeReport {
        let ids: Vec<&str> = self.guests.iter().map(String::as_str).collect();
        let report = report(self.name, self.max, &ids);
        if named { report } else { NodeReport { sandbox_ids: Vec::new(), ..report } }
    }
}

proptest! {
    /// However placements, creates, kills and late reports interleave, no node is ever promised more guests than fit.
    #[test]
    fn a_node_is_never_oversold(steps in steps(), maxima in prop::array::uniform3(0..4_u32), named: bool, random: u64) {
        let now = Instant::now();
        let mut registry = Registry::new(TTL);
        let mut nodes: Vec<Model> = ["a", "b", "c"]
            .into_iter()
            .zip(maxima)
            .map(|(name, max)| Model {
                name,
                max,
                guests: BTreeSet::new(),
                under_way: None,
                lease: registry.register(report(name, max, &[])),
            })
            .collect();
        let mut placed: Vec<(usize, String)> = Vec::new();
        let mut started: Vec<(usize, String)> = Vec::new();
        let mut running: Vec<(usize, String)> = Vec::new();

        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Place => {
                    let sandbox = format!("s{number}");
                    let random = random.rotate_left(u32::try_from(number % 64).expect("small"));
                    let reservation = format!("r-{sandbox}");
                    if let Ok(placement) = registry.place(&sandbox, &HostFacts::default(), reservation, random, now) {
                        let node = nodes.iter().position(|node| node.name == placement.node_id).expect("known");
                        placed.push((node, sandbox));
                    }
                }
                Step::Start => if !placed.is_empty() {
                    let (node, sandbox) = placed.remove(0);
                    nodes[node].guests.insert(sandbox.clone());
                    started.push((node, sandbox));
                },
                Step::Finish { fails, which } => if !started.is_empty() {
                    let (node, sandbox) = started.remove(which % started.len());
                    registry.release(&format!("r-{sandbox}"));
                    if fails {
                        nodes[node].guests.remove(&sandbox);
                    } else {
                        running.push((node, sandbox));
                    }
                },
                Step::GiveUp => if let Some((_, sandbox)) = placed.pop() {
                    registry.release(&format!("r-{sandbox}"));
                },
                Step::Kill { which } => if !running.is_empty() {
                    let (node, sandbox) = running.remove(which % running.len());
                    nodes[node].guests.remove(&sandbox);
                },
                Step::WriteReport { node } => {
                    let written = nodes[node].report(named);
                    nodes[node].under_way.get_or_insert(written);
                }
                Step::DeliverReport { node } => if let Some(report) = nodes[node].under_way.take() {
                    prop_assert!(registry.report(&nodes[node].lease, report));
                },
                Step::Reconnect { node } => {
                    nodes[node].under_way = None;
                    registry.leave(&nodes[node].lease, now);
                    let report = nodes[node].report(named);
                    nodes[node].lease = registry.register(report);
                }
            }
            let mut promised: BTreeMap<usize, usize> = BTreeMap::new();
            for (node, _) in &placed {
                *promised.entry(*node).or_default() += 1;
            }
            for (index, node) in nodes.iter().enumerate() {
                let total = node.guests.len() + promised.get(&index).copied().unwrap_or(0);
                prop_assert!(
                    total <= node.max as usize,
                    "node {} of {} has {} guests and promised {:?} more",
                    node.name, node.max, node.guests.len(), promised.get(&index)
                );
            }
        }
    }
}
