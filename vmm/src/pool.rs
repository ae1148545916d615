//! Which VMMs wait, started, for a state: pure bookkeeping, no process in it.
//!
//! ```text
//!   want(shape, n) ─▶ target      to_start() ─▶ begin ─▶ finish ─▶ ready ─▶ take
//! ```
//!
//! Invariants: ready + starting ≤ target for every shape, save right after a target was lowered; at most `max_shapes`
//! shapes have a target, the ones taken from last; nothing becomes ready in a closed pool.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

#[derive(Debug)]
struct Slot<T> {
    ready: VecDeque<T>,
    starting: usize,
    target: usize,
    used: u64,
}

/// A pool of `T`s by `K`.
#[derive(Debug)]
pub struct Pool<K, T> {
    slots: HashMap<K, Slot<T>>,
    max_shapes: usize,
    uses: u64,
    closed: bool,
}

impl<K: Copy + Eq + Hash, T> Pool<K, T> {
    /// An empty pool that keeps at most `max_shapes` shapes warm.
    pub fn new(max_shapes: usize) -> Self {
        Self { slots: HashMap::new(), max_shapes: max_shapes.max(1), uses: 0, closed: false }
    }

    /// Sets how many of a shape should wait. Returns what there is too much of now, for the caller to get rid of.
    #[must_use]
    pub fn want(&mut self, shape: K, target: usize) -> Vec<T> {
        self.touch(shape).target = target;
        let mut surplus = self.evict();
        if let Some(slot) = self.slots.get_mut(&shape) {
            let keep = slot.ready.len().min(slot.target);
            surplus.extend(slot.ready.drain(keep..));
        }
        surplus
    }

    /// Whether somebody has said how many of this shape should wait.
    pub fn knows(&self, shape: K) -> bool {
        self.slots.contains_key(&shape)
    }

    /// Takes a waiting one: the one that waited longest.
    pub fn take(&mut self, shape: K) -> Option<T> {
        self.slots.get(&shape)?;
        self.touch(shape).ready.pop_front()
    }

    /// A shape of which one should be started now: the one that lacks most.
    pub fn to_start(&self) -> Option<K> {
        if self.closed {
            return None;
        }
        let lacking = |slot: &Slot<T>| slot.target.saturating_sub(slot.ready.len() + slot.starting);
        let candidates = self.slots.iter().filter(|(_, slot)| lacking(slot) > 0);
        candidates.max_by_key(|(_, slot)| (lacking(slot), slot.used)).map(|(shape, _)| *shape)
    }

    /// One of this shape is being started.
    pub fn begin(&mut self, shape: K) {
        if let Some(slot) = self.slots.get_mut(&shape) {
            slot.starting += 1;
        }
    }

    /// A start has ended, with something or nothing. Returns it if nobody wants it any more.
    #[must_use]
    pub fn finish(&mut self, shape: K, started: Option<T>) -> Option<T> {
        let closed = self.closed;
        let Some(slot) = self.slots.get_mut(&shape) else { return started };
        slot.starting = slot.starting.saturating_sub(1);
        match started {
            Some(one) if !closed && slot.ready.len() < slot.target => {
                slot.ready.push_back(one);
                None
            }
            other => other,
        }
    }

    /// How many wait.
    pub fn ready(&self, shape: K) -> usize {
        self.slots.get(&shape).map_or(0, |slot| slot.ready.len())
    }

    /// Those that wait.
    pub fn waiting(&self) -> impl Iterator<Item = &T> {
        self.slots.values().flat_map(|slot| &slot.ready)
    }

    /// Whether as many wait as should.
    pub fn is_warm(&self, shape: K) -> bool {
        self.slots.get(&shape).is_none_or(|slot| slot.ready.len() >= slot.target)
    }

    /// Ends the pool and hands out what waited in it.
    #[must_use]
    pub fn close(&mut self) -> Vec<T> {
        self.closed = true;
        self.slots.drain().flat_map(|(_, slot)| slot.ready).collect()
    }

    fn touch(&mut self, shape: K) -> &mut Slot<T> {
        self.uses += 1;
        let slot =
            self.slots.entry(shape).or_insert_with(|| Slot { ready: VecDeque::new(), starting: 0, target: 0, used: 0 });
        slot.used = self.uses;
        slot
    }

    /// Gives up the shapes that were used longest ago, if there are too many.
    fn evict(&mut self) -> Vec<T> {
        let mut surplus = Vec::new();
        while self.slots.len() > self.max_shapes {
            let oldest = self.slots.iter().min_by_key(|(_, slot)| slot.used).map(|(shape, _)| *shape);
            let slot = oldest.and_then(|shape| self.slots.remove(&shape)).expect("there are several");
            surplus.extend(slot.ready);
        }
        surplus
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Want(u8, usize),
        Take(u8),
        Start,
        Finish(usize, bool),
        Close,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..5, 0usize..4).prop_map(|(shape, target)| Step::Want(shape, target)),
            5 => (0u8..5).prop_map(Step::Take),
            8 => Just(Step::Start),
            8 => (0usize..8, any::<bool>()).prop_map(|(which, ok)| Step::Finish(which, ok)),
            1 => Just(Step::Close),
        ]
    }

    proptest! {
        /// Nothing is lost or handed out twice, and no more is started than wanted.
        #[test]
        fn everything_started_is_handed_out_exactly_once(steps in prop::collection::vec(step(), 0..120)) {
            let mut pool: Pool<u8, u32> = Pool::new(3);
            let (mut starting, mut next) = (Vec::new(), 0u32);
            let (mut made, mut out) = (Vec::new(), Vec::new());
            let mut closed = false;
            for step in steps {
                match step {
                    Step::Want(shape, target) if !closed => out.extend(pool.want(shape, target)),
                    Step::Take(shape) => out.extend(pool.take(shape)),
                    Step::Start => {
                        if let Some(shape) = pool.to_start() {
                            prop_assert!(!closed);
                            prop_assert!(!pool.is_warm(shape));
                            pool.begin(shape);
                            starting.push(shape);
                        }
                    }
                    Step::Finish(which, ok) if !starting.is_empty() => {
                        let shape = starting.remove(which % starting.len());
                        let one = ok.then(|| { next += 1; made.push(next); next });
                        out.extend(pool.finish(shape, one));
                    }
                    Step::Close => {
                        closed = true;
                        out.extend(pool.close());
                        prop_assert!(pool.to_start().is_none());
                    }
                    _ => {}
                }
                prop_assert!(pool.slots.len() <= 3);
                prop_assert!(pool.slots.values().all(|slot| slot.ready.len() <= slot.target));
            }
            out.extend(pool.close());
            out.sort_unstable();
            prop_assert_eq!(out, made);
        }
    }

    #[test]
    fn the_shape_used_last_stays_warm() {
        let mut pool: Pool<u8, u8> = Pool::new(2);
        assert!(pool.want(1, 1).is_empty());
        assert!(pool.want(2, 1).is_empty());
        pool.begin(1);
        assert_eq!(pool.finish(1, Some(11)), None);
        pool.begin(2);
        assert_eq!(pool.finish(2, Some(22)), None);
        assert_eq!(pool.take(1), Some(11));
        assert_eq!(pool.want(3, 1), vec![22], "shape 2 was used longest ago");
        assert!(pool.knows(1) && pool.knows(3) && !pool.knows(2));
    }
}
