//! Idle connections to guest ports, kept for the next request. Plain data: the clock is passed in.
//!
//! Worth having because an emulated guest takes milliseconds to accept a connection. The most recently used
//! connection is taken first, so that the others grow old and go.
//!
//! A connection that is in use while its sandbox is forgotten must not come back afterwards. Hence the pool has an
//! epoch, which every forgetting ends: what was taken or opened in an earlier epoch is not kept. (That it is one
//! epoch for all sandboxes costs some connections that could have been kept, and a map of forgotten sandboxes less.)

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::route::Target;

/// How long an idle connection is kept. Servers in guests close theirs sooner or later; a closed one is noticed.
const IDLE: Duration = Duration::from_secs(30);

/// Most idle connections to one port.
const PER_TARGET: usize = 32;

/// See the module's head. `C` is a connection.
#[derive(Debug)]
pub(super) struct IdlePool<C> {
    idle: HashMap<Target, Vec<(C, Instant)>>,
    epoch: u64,
}

impl<C> IdlePool<C> {
    pub(super) fn new() -> Self {
        Self { idle: HashMap::new(), epoch: 0 }
    }

    /// To be noted before a connection is taken or opened, for its [`Self::put`].
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The youngest connection to `target` that is still usable. Those found to be unusable are dropped.
    pub(super) fn take(&mut self, target: &Target, now: Instant, usable: impl Fn(&C) -> bool) -> Option<C> {
        let connections = self.idle.get_mut(target)?;
        let mut found = None;
        while let Some((connection, since)) = connections.pop() {
            if now.saturating_duration_since(since) < IDLE && usable(&connection) {
                found = Some(connection);
                break;
            }
        }
        if connections.is_empty() {
            self.idle.remove(target);
        }
        found
    }

    /// Keeps a connection that has become idle, unless something was forgotten since `epoch`.
    pub(super) fn put(&mut self, target: Target, connection: C, epoch: u64, now: Instant) {
        if epoch != self.epoch {
            return;
        }
        let connections = self.idle.entry(target).or_default();
        if connections.len() == PER_TARGET {
            connections.remove(0);
        }
        connections.push((connection, now));
    }

    /// Drops all connections to a sandbox.
    pub(super) fn forget(&mut self, sandbox_id: &str) {
        self.epoch += 1;
        self.idle.retain(|target, _| target.sandbox_id != sandbox_id);
    }

    /// Drops all connections to all sandboxes.
    pub(super) fn clear(&mut self) {
        self.epoch += 1;
        self.idle.clear();
    }

    /// Drops what has been idle for too long, or has been closed from the other end.
    pub(super) fn sweep(&mut self, now: Instant, usable: impl Fn(&C) -> bool) {
        self.idle.retain(|_, connections| {
            connections
                .retain(|(connection, since)| now.saturating_duration_since(*since) < IDLE && usable(connection));
            !connections.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(sandbox_id: &str, port: u16) -> Target {
        Target { sandbox_id: sandbox_id.into(), port }
    }

    fn any(_: &u32) -> bool {
        true
    }

    #[test]
    fn the_youngest_usable_one_is_taken_once() {
        let now = Instant::now();
        let mut pool = IdlePool::new();
        for number in 1..=3_u32 {
            pool.put(to("a", 80), number, pool.epoch(), now);
        }
        assert_eq!(pool.take(&to("a", 81), now, any), None);
        assert_eq!(pool.take(&to("b", 80), now, any), None);
        assert_eq!(pool.take(&to("a", 80), now, |number| *number != 3), Some(2));
        assert_eq!(pool.take(&to("a", 80), now, any), Some(1));
        assert_eq!(pool.take(&to("a", 80), now, any), None);
        assert!(pool.idle.is_empty());
    }

    #[test]
    fn the_old_the_closed_and_the_forgotten_go() {
        let now = Instant::now();
        let mut pool = IdlePool::new();
        pool.put(to("a", 80), 1_u32, pool.epoch(), now);
        pool.put(to("a", 81), 2, pool.epoch(), now);
        pool.put(to("b", 80), 3, pool.epoch(), now);
        pool.forget("a");
        assert_eq!(pool.take(&to("a", 80), now, any), None);
        assert_eq!(pool.take(&to("b", 80), now + IDLE, any), None, "too old");

        let before = pool.epoch();
        pool.forget("x");
        pool.put(to("a", 80), 9, before, now);
        assert_eq!(pool.take(&to("a", 80), now, any), None, "in use while something was forgotten");

        pool.put(to("c", 80), 4, pool.epoch(), now);
        pool.put(to("c", 80), 5, pool.epoch(), now + IDLE / 2);
        pool.sweep(now + IDLE, any);
        assert_eq!(pool.take(&to("c", 80), now + IDLE, any), Some(5));
        pool.put(to("d", 80), 6, pool.epoch(), now);
        pool.sweep(now, |_| false);
        assert!(pool.idle.is_empty());
    }

    #[test]
    fn one_target_does_not_hoard() {
        let now = Instant::now();
        let mut pool = IdlePool::new();
        for number in 0..100_u32 {
            pool.put(to("a", 80), number, pool.epoch(), now);
        }
        let kept: Vec<u32> = std::iter::from_fn(|| pool.take(&to("a", 80), now, any)).collect();
        assert_eq!(kept, (100 - PER_TARGET as u32..100).rev().collect::<Vec<_>>());
    }
}
