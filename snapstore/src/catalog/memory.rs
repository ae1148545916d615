//! An engine in memory: for tests, and for trying things out. Nothing outlives the process.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::kv::{
    Compare, Entry, Key, KeyRange, KeyValue, KvError, Op, Order, Revision, TxnOutcome, check_key, check_txn,
};

#[derive(Debug, Default)]
struct State {
    rows: BTreeMap<Key, (Bytes, Revision)>,
    last: u64,
}

impl State {
    fn entry(&self, key: &[u8]) -> Option<Entry> {
        let (value, revision) = self.rows.get(key)?;
        Some(Entry { key: key.to_vec(), value: value.clone(), revision: *revision })
    }

    fn within(&self, range: &KeyRange) -> impl DoubleEndedIterator<Item = Entry> {
        // A map refuses a range that ends before it starts; here it is empty.
        let end = range.end.clone().max(range.start.clone());
        let rows = self.rows.range(range.start.clone()..end);
        rows.map(|(key, (value, revision))| Entry { key: key.clone(), value: value.clone(), revision: *revision })
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Absent(key) => !self.rows.contains_key(key),
            Compare::Present(key) => self.rows.contains_key(key),
            Compare::Revision(key, wanted) => self.rows.get(key).is_some_and(|(_, revision)| revision == wanted),
            Compare::Empty(range) => self.within(range).next().is_none(),
        }
    }
}

/// A store in a map.
#[derive(Debug, Default)]
pub struct MemoryKv(Mutex<State>);

impl MemoryKv {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything in `range`, from one state, in order: for those who judge the whole.
    pub fn entries(&self, range: &KeyRange) -> Vec<Entry> {
        self.0.lock().within(range).collect()
    }

    /// One entry.
    pub fn entry(&self, key: &[u8]) -> Option<Entry> {
        self.0.lock().entry(key)
    }
}

#[async_trait]
impl KeyValue for MemoryKv {
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let state = self.0.lock();
        Ok(keys.iter().map(|key| state.entry(key)).collect())
    }

    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError> {
        check_key(&range.start)?;
        let state = self.0.lock();
        Ok(match order {
            Order::Ascending => state.within(&range).take(limit).collect(),
            Order::Descending => state.within(&range).rev().take(limit).collect(),
        })
    }

    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError> {
        check_txn(&compares, &ops)?;
        let mut state = self.0.lock();
        if !compares.iter().all(|compare| state.holds(compare)) {
            return Ok(TxnOutcome::Conflict);
        }
        state.last += 1;
        let revision = Revision(state.last);
        for op in ops {
            match op {
                Op::Put(key, value) => drop(state.rows.insert(key, (value, revision))),
                Op::Delete(key) => drop(state.rows.remove(&key)),
            }
        }
        Ok(TxnOutcome::Committed(revision))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn memory_conforms() {
        super::super::conformance::check(Arc::new(MemoryKv::new())).await;
    }
}
