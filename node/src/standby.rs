//! Guests restored ahead of need: for snapshots that are started from again and again, one that waits.
//!
//! ```text
//! restore ─► rehearse ─► pause ─────────────────────────────► resume ─► /init ─► a sandbox's
//! (the node is idle)      │  waits: no CPU, its clock stands    (taken by a create or a rollback)
//!                         └─► killed: its snapshot was deleted, or nobody starts from it any more
//! ```
//!
//! The user's processes stay frozen in it until the `/init` that makes it a sandbox's: a rehearsal goes through the agent and
//! a shell of its own. What it gains is what a restored guest lacks: the pages of a
//! first request are mapped and, under an emulator, the code of it is translated.
//!
//! It is a cache and nothing else. A standby is known to no catalog, so a node that dies leaves none behind (its VMMs die
//! with it), and one that fails is killed, and the restore goes the ordinary way. Standbys are made one at a time, and
//! only while no operation is under way and the pool of VMMs is full: a burst beyond them is as fast as without.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use snapyard_snapstore::ids::{SnapshotId, TeamId};
use snapyard_vmm::RestoreTimings;
use tokio::sync::Notify;

use crate::error::NodeError;
use crate::node::State;
use crate::ops::restore;
use crate::sandbox::Guest;

/// A snapshot is in frequent use from its second start on, until this long after the last one.
const HOT_FOR: Duration = Duration::from_secs(300);
/// How long no operation must have been under way before a standby is made: the first requests of what was restored
/// come first.
const QUIET: Duration = Duration::from_secs(1);
/// How long a standby stays though others were started from later, if its own snapshot was not.
const HELD_FOR: Duration = Duration::from_secs(60);
/// How many standbys of a snapshot may die while they wait before no more are made.
const LOST_MAX: u32 = 4;
/// How long the pool is waited for.
const POOL_WAIT: Duration = Duration::from_secs(10);
/// How often the worker looks without being told to.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Which snapshots deserve standbys. Pure: time is passed in.
#[derive(Default)]
struct Policy {
    uses: HashMap<SnapshotId, Use>,
}

struct Use {
    team: TeamId,
    starts: u32,
    last: Instant,
    /// Standbys of it that died while they waited.
    lost: u32,
    /// None is made any more while it is in use: the last could not be, or too many died.
    refused: bool,
}

impl Policy {
    /// A sandbox was started from `id`, or rolled back to it.
    fn started(&mut self, team: &TeamId, id: SnapshotId, now: Instant) {
        self.uses.retain(|_, one| now.duration_since(one.last) < HOT_FOR);
        let one = self.uses.entry(id).or_insert_with(|| Use {
            team: team.clone(),
            starts: 0,
            last: now,
            lost: 0,
            refused: false,
        });
        one.starts = one.starts.saturating_add(1);
        one.last = now;
    }

    fn forget(&mut self, id: &SnapshotId) {
        self.uses.remove(id);
    }

    fn refuse(&mut self, id: &SnapshotId) {
        if let Some(one) = self.uses.get_mut(id) {
            one.refused = true;
        }
    }

    fn lost(&mut self, id: &SnapshotId) {
        if let Some(one) = self.uses.get_mut(id) {
            one.lost += 1;
            one.refused |= one.lost >= LOST_MAX;
        }
    }

    /// How many standbys of which snapshots there should be, `max` in all: one for each in frequent use, and for the one
    /// started from last what is left. Among too many those come first that have one (`held`) and were started from within
    /// [`HELD_FOR`], since a standby is not made for nothing; then those started from last.
    fn plan(&self, max: usize, held: &HashSet<SnapshotId>, now: Instant) -> Vec<(TeamId, SnapshotId, usize)> {
        let age = |one: &Use| now.duration_since(one.last);
        let mut hot: Vec<_> =
            self.uses.iter().filter(|(_, one)| one.starts >= 2 && !one.refused && age(one) < HOT_FOR).collect();
        hot.sort_by_key(|(id, one)| (!(held.contains(id) && age(one) < HELD_FOR), age(one), **id));
        hot.truncate(max);
        let spare = max - hot.len();
        hot.sort_by_key(|(id, one)| (age(one), **id));
        let each = hot.into_iter().enumerate();
        each.map(|(rank, (id, one))| (one.team.clone(), *id, if rank == 0 { 1 + spare } else { 1 })).collect()
    }
}

/// The standbys of a node.
pub struct Standbys {
    max: usize,
    inner: Mutex<Inner>,
    /// Operations under way that guests or their users wait for, and when the last one ended.
    busy: AtomicUsize,
    quiet_since: Mutex<Instant>,
    changed: Notify,
}

#[derive(Default)]
struct Inner {
    policy: Policy,
    ready: Vec<Guest>,
}

/// An operation on a sandbox is under way: no standby is begun meanwhile.
pub struct Busy<'a>(&'a Standbys);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.quiet_since.lock() = Instant::now();
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

impl Standbys {
    /// Nobody yet, and `max` at most; 0: none ever.
    pub fn new(max: usize) -> Self {
        Self {
            max,
            inner: Mutex::default(),
            busy: AtomicUsize::new(0),
            quiet_since: Mutex::new(Instant::now()),
            changed: Notify::new(),
        }
    }

    /// Holds standbys back, which cost a core for a second each.
    pub fn busy(&self) -> Busy<'_> {
        self.busy.fetch_add(1, Ordering::SeqCst);
        Busy(self)
    }

    /// A sandbox is being started from `id`, or rolled back to it.
    pub fn started(&self, team: &TeamId, id: SnapshotId) {
        self.inner.lock().policy.started(team, id, Instant::now());
    }

    /// A paused guest of `id` that was alive a moment ago, if one waits.
    pub fn take(&self, id: &SnapshotId) -> Option<Guest> {
        let mut inner = self.inner.lock();
        let at = inner.ready.iter().position(|guest| guest.resident.id == *id && alive(guest))?;
        Some(inner.ready.swap_remove(at))
    }

    /// The snapshot is deleted: its standbys go.
    pub fn forget(&self, id: &SnapshotId) {
        self.inner.lock().policy.forget(id);
        self.changed.notify_one();
    }

    /// The process of each that waits.
    pub fn pids(&self) -> Vec<u32> {
        self.inner.lock().ready.iter().map(|guest| guest.vm.pid()).collect()
    }

    fn add(&self, id: SnapshotId, made: Result<Option<Guest>, NodeError>) {
        let mut inner = self.inner.lock();
        match made {
            Ok(guest) => inner.ready.extend(guest),
            Err(error) => {
                tracing::info!(snapshot = %id, %error, "no standby for this snapshot");
                inner.policy.refuse(&id);
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.busy.load(Ordering::SeqCst) == 0 && self.quiet_since.lock().elapsed() >= QUIET
    }

    /// Takes out what is dead or no longer planned, and names a snapshot that lacks a standby.
    fn reconcile(&self) -> (Vec<Guest>, Option<(TeamId, SnapshotId)>) {
        let mut inner = self.inner.lock();
        let ready = std::mem::take(&mut inner.ready);
        for guest in ready.iter().filter(|guest| !alive(guest)) {
            inner.policy.lost(&guest.resident.id);
        }
        let held = ready.iter().map(|guest| guest.resident.id).collect();
        let mut plan = inner.policy.plan(self.max, &held, Instant::now());
        let (mut kept, mut gone) = (Vec::new(), Vec::new());
        for guest in ready {
            match plan.iter_mut().find(|(_, id, count)| *id == guest.resident.id && *count > 0) {
                Some((_, _, count)) if alive(&guest) => {
                    *count -= 1;
                    kept.push(guest);
                }
                _ => gone.push(guest),
            }
        }
        inner.ready = kept;
        let lacking = plan.into_iter().find(|(_, _, count)| *count > 0);
        (gone, lacking.map(|(team, id, _)| (team, id)))
    }
}

fn alive(guest: &Guest) -> bool {
    guest.vm.failed().borrow().is_none()
}

/// Makes and ends standbys until the node stops; then ends all.
pub async fn run(node: Arc<State>) {
    let standbys = &node.standbys;
    while !node.shutdown.is_cancelled() {
        let (gone, lacking) = standbys.reconcile();
        for guest in gone {
            guest.vm.kill().await;
        }
        let pause = match lacking {
            Some((team, id)) if standbys.is_quiet() => {
                tokio::select! {
                    () = node.shutdown.cancelled() => break,
                    made = prepare(&node, &team, &id) => standbys.add(id, made),
                }
                continue;
            }
            Some(_) => QUIET / 4,
            None => LOOK_EVERY,
        };
        tokio::select! {
            () = node.shutdown.cancelled() => {}
            () = standbys.changed.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    let all = std::mem::take(&mut standbys.inner.lock().ready);
    for guest in all {
        guest.vm.kill().await;
    }
}

/// One more guest of the snapshot, rehearsed and paused; `None`: not now. On an error, or when dropped, nothing is left.
async fn prepare(node: &Arc<State>, team: &TeamId, id: &SnapshotId) -> Result<Option<Guest>, NodeError> {
    let resident = node.residency.open(team, id).await?;
    let pool = tokio::time::timeout(POOL_WAIT, node.hypervisor.warmed(resident.shape())).await;
    if pool.is_err() || !node.standbys.is_quiet() {
        return Ok(None);
    }
    let vm = restore::start(node, "a standby", &resident, &mut RestoreTimings::default()).await?;
    let guest = Guest { vm, resident };
    let prepared = async {
        restore::rehearse(node, &guest.vm).await?;
        guest.vm.pause().await.map_err(|cause| NodeError::Vm { sandbox: "a standby".to_owned(), cause })
    };
    match prepared.await {
        Ok(()) => {
            tracing::debug!(snapshot = %id, pid = guest.vm.pid(), "a standby waits");
            Ok(Some(guest))
        }
        Err(error) => {
            guest.vm.kill().await;
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn snapshot(n: u8) -> SnapshotId {
        SnapshotId::from_random([n; 16])
    }

    fn team() -> TeamId {
        TeamId::new("default").expect("a team")
    }

    proptest! {
        /// Never more than allowed, all of it as soon as anything is hot, and only for what was started from twice and
        /// lately.
        #[test]
        fn a_plan_is_bounded_and_for_hot_snapshots_only(
            starts in prop::collection::vec((0u8..6, 0u64..200), 0..60),
            held in prop::collection::hash_set(0u8..6, 0..4),
            refused in prop::collection::hash_set(0u8..6, 0..2),
            max in 0usize..5,
            idle in 0u64..700,
        ) {
            let begun = Instant::now();
            let mut policy = Policy::default();
            let mut seen: HashMap<SnapshotId, Vec<u64>> = HashMap::new();
            let mut now = 0;
            for (which, later) in starts {
                now += later;
                policy.started(&team(), snapshot(which), begun + Duration::from_secs(now));
                seen.entry(snapshot(which)).or_default().push(now);
            }
            let refused: Vec<SnapshotId> = refused.into_iter().map(snapshot).collect();
            for id in &refused {
                policy.refuse(id);
            }
            now += idle;
            let held: HashSet<SnapshotId> = held.into_iter().map(snapshot).collect();
            let plan = policy.plan(max, &held, begun + Duration::from_secs(now));
            let total: usize = plan.iter().map(|(_, _, count)| count).sum();
            prop_assert_eq!(total, if plan.is_empty() { 0 } else { max });
            for (_, id, count) in &plan {
                prop_assert!(*count > 0 && !refused.contains(id));
                let times = &seen[id];
                prop_assert!(times.len() >= 2 && now - times.last().expect("not empty") < HOT_FOR.as_secs());
            }
        }
    }

    #[test]
    fn three_snapshots_in_turn_do_not_take_each_other_s_standbys() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut policy = Policy::default();
        for (second, which) in [1, 2, 3, 1, 2, 3].into_iter().enumerate() {
            policy.started(&team(), snapshot(which), at(second as u64));
        }
        let ids = |held: [u8; 2], now| {
            let held = held.into_iter().map(snapshot).collect();
            let mut ids: Vec<_> = policy.plan(2, &held, now).into_iter().map(|(_, id, _)| id).collect();
            ids.sort();
            ids
        };
        let pair = |one, other| {
            let mut ids = [snapshot(one), snapshot(other)];
            ids.sort();
            ids
        };
        assert_eq!(ids([1, 2], at(6)), pair(1, 2), "what is there stays");
        assert_eq!(ids([1, 2], at(3 + 60)), pair(2, 3), "until nobody has come for it for a while");
    }

    #[test]
    fn a_deleted_snapshot_is_planned_for_no_more() {
        let now = Instant::now();
        let mut policy = Policy::default();
        for _ in 0..2 {
            policy.started(&team(), snapshot(1), now);
        }
        assert_eq!(policy.plan(2, &HashSet::new(), now), [(team(), snapshot(1), 2)]);
        policy.forget(&snapshot(1));
        assert!(policy.plan(2, &HashSet::new(), now).is_empty());
    }
}
