//! Single flight: many callers who want the same thing at once share one piece of work.
//!
//! ```text
//!   join(key) ── nothing in the air ──> starts the work, others may join it
//!        └────── in the air ──────────> shares the work already going on
//! ```
//!
//! Invariants:
//! - at any instant there is at most one live piece of work per key;
//! - the work is driven by whoever waits for it: it goes on while one caller is left, and is dropped with the last. Nothing
//!   is spawned, so nothing can be left behind;
//! - an entry is in the map only while its work is live.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared, WeakShared};
use parking_lot::Mutex;

/// A piece of shared work.
pub(crate) type Flight<V> = Shared<BoxFuture<'static, V>>;

struct Air<K, V> {
    flights: HashMap<K, (u64, WeakShared<BoxFuture<'static, V>>)>,
    next: u64,
}

/// The pieces of work going on, by key.
pub(crate) struct Flights<K: Eq + Hash + Clone, V: Clone>(Arc<Mutex<Air<K, V>>>);

impl<K, V> Default for Flights<K, V>
where
    K: Eq + Hash + Clone + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Air { flights: HashMap::new(), next: 0 })))
    }
}

impl<K, V> Flights<K, V>
where
    K: Eq + Hash + Clone + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// The work going on for `key`, or `start`'s. The second value says whether it is this caller's.
    pub(crate) fn join<F>(&self, key: K, start: impl FnOnce() -> F) -> (Flight<V>, bool)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut air = self.0.lock();
        if let Some(flight) = air.flights.get(&key).and_then(|(_, flight)| flight.upgrade()) {
            return (flight, false);
        }
        let number = air.next;
        air.next += 1;
        let landing = Landing { flights: Arc::clone(&self.0), key: key.clone(), number };
        let work = start();
        let flight = async move {
            let _landing = landing;
            work.await
        };
        let flight = flight.boxed().shared();
        let weak = flight.downgrade().expect("a flight that was never polled is not over");
        air.flights.insert(key, (number, weak));
        (flight, true)
    }

    /// Whether work for `key` is going on at this instant.
    pub(crate) fn contains(&self, key: &K) -> bool {
        self.0.lock().flights.contains_key(key)
    }

    /// How many pieces of work are going on.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.lock().flights.len()
    }
}

/// Takes its flight off the map, however it ends.
struct Landing<K: Eq + Hash + Clone, V: Clone> {
    flights: Arc<Mutex<Air<K, V>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash + Clone, V: Clone> Drop for Landing<K, V> {
    fn drop(&mut self) {
        let mut air = self.flights.lock();
        if air.flights.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            air.flights.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn callers_at_once_share_one_run_and_a_later_one_starts_anew() {
        let flights = Flights::<u8, u32>::default();
        let runs = Arc::new(AtomicU32::new(0));
        let go = Arc::new(Notify::new());
        let start = || {
            let (runs, go) = (Arc::clone(&runs), Arc::clone(&go));
            async move {
                go.notified().await;
                runs.fetch_add(1, Ordering::SeqCst) + 1
            }
        };
        let (first, mine) = flights.join(7, start);
        let (second, also_mine) = flights.join(7, start);
        assert!(mine && !also_mine);
        go.notify_one();
        assert_eq!(futures::join!(first, second), (1, 1));
        assert_eq!(flights.len(), 0);
        let (third, mine) = flights.join(7, start);
        assert!(mine);
        go.notify_one();
        assert_eq!(third.await, 2);
    }

    #[tokio::test]
    async fn work_outlives_its_first_caller_but_not_its_last() {
        let flights = Flights::<u8, u32>::default();
        let (first, _) = flights.join(1, || async { 5 });
        let (second, _) = flights.join(1, || async { 6 });
        drop(first);
        assert_eq!(second.await, 5);
        let (only, _) = flights.join(1, || async { 7 });
        assert_eq!(flights.len(), 1);
        drop(only);
        assert_eq!(flights.len(), 0);
    }
}
