//! The seam under the catalog: ordered byte keys, conditional transactions over several of them, range reads.
//!
//! Shaped after etcd 3 (`Txn` with compares on version and mod revision, `Range` with limit and order), so that an engine
//! for it is a translation; the embedded engine is [`crate::catalog::rocks`]. What an engine promises:
//!
//! 1. A transaction is atomic and serialisable: all compares are judged on one state, and either all operations are
//!    applied to that very state or none is.
//! 2. `Committed` means durable: it survives `kill -9` and the loss of power.
//! 3. Every committed write gives the keys it puts a revision that no write ever had before, so that "unchanged since I
//!    read it" is a comparison of revisions, also for a key that was deleted and put again.
//! 4. Reads see everything that was committed before they were called. One call reads one state.
//!
//! `conformance` (tests only) checks these on any engine.

use async_trait::async_trait;
use bytes::Bytes;

/// A key: any bytes but a leading NUL (engines keep their own records there) and not empty.
pub type Key = Vec<u8>;

/// The number of the transaction that last wrote a key. Grows over the life of a store, across restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A key with its value, as one read found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Key,
    /// The value.
    pub value: Bytes,
    /// Which transaction put it.
    pub revision: Revision,
}

/// The keys from `start` (inclusive) to `end` (exclusive), in byte order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRange {
    /// First key inside.
    pub start: Key,
    /// First key outside.
    pub end: Key,
}

impl KeyRange {
    /// All keys that begin with `prefix`, which must not be empty nor consist of `0xff` only.
    pub fn prefix(prefix: &[u8]) -> Self {
        let mut end = prefix.to_vec();
        while end.last() == Some(&0xff) {
            end.pop();
        }
        *end.last_mut().expect("a prefix has a byte that can be counted up") += 1;
        Self { start: prefix.to_vec(), end }
    }

    /// Whether `key` lies inside.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.start.as_slice() <= key && key < self.end.as_slice()
    }
}

/// The order of a range read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Smallest key first.
    Ascending,
    /// Greatest key first.
    Descending,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// The key does not exist.
    Absent(Key),
    /// The key exists.
    Present(Key),
    /// The key exists and was last written by this transaction.
    Revision(Key, Revision),
    /// No key of the range exists (in etcd: version 0 compared over a range).
    Empty(KeyRange),
}

/// A write of a transaction. No key may occur twice in one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Sets the value, whether or not the key exists.
    Put(Key, Bytes),
    /// Removes the key; no error when it does not exist.
    Delete(Key),
}

impl Op {
    /// The key that is written.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Put(key, _) | Self::Delete(key) => key,
        }
    }
}

/// What became of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxnOutcome {
    /// Every compare held; every operation is applied and durable.
    Committed(Revision),
    /// A compare did not hold; nothing was written.
    Conflict,
}

/// Why an engine did not answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KvError {
    /// It did not happen, and would not if tried again unchanged.
    #[error("the catalog refused to {action}: {reason}")]
    Refused {
        /// What was asked.
        action: &'static str,
        /// Why not.
        reason: String,
    },
    /// It did not happen (for a read: gave no answer); the engine cannot be used just now.
    #[error("the catalog cannot {action} now: {reason}")]
    Unavailable {
        /// What was asked.
        action: &'static str,
        /// Why not.
        reason: String,
    },
    /// A write whose outcome is not known: it may have happened.
    #[error("the catalog does not know whether it did {action}: {reason}")]
    Unknown {
        /// What was asked.
        action: &'static str,
        /// Why not.
        reason: String,
    },
    /// What is stored cannot be read.
    #[error("the catalog's record {key:?} is damaged: {reason}")]
    Corrupt {
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// An ordered key-value store with conditional transactions. See the module for what it promises.
#[async_trait]
pub trait KeyValue: Send + Sync + 'static {
    /// Reads several keys from one state, in the order asked; `None` for a key that does not exist.
    async fn get_many(&self, keys: Vec<Key>) -> Result<Vec<Option<Entry>>, KvError>;

    /// At most `limit` entries of `range` from one state, from the end that `order` says.
    async fn range(&self, range: KeyRange, limit: usize, order: Order) -> Result<Vec<Entry>, KvError>;

    /// Applies `ops` if every one of `compares` holds. An `Unknown` error leaves open whether it did.
    async fn txn(&self, compares: Vec<Compare>, ops: Vec<Op>) -> Result<TxnOutcome, KvError>;

    /// Reads one key.
    async fn get(&self, key: Key) -> Result<Option<Entry>, KvError> {
        Ok(self.get_many(vec![key]).await?.pop().flatten())
    }
}

/// Refuses what cannot be a key, in any engine.
pub(super) fn check_key(key: &[u8]) -> Result<(), KvError> {
    match key.first() {
        None => Err(KvError::Refused { action: "take a key", reason: "it is empty".into() }),
        Some(0) => Err(KvError::Refused { action: "take a key", reason: "it begins with NUL".into() }),
        Some(_) => Ok(()),
    }
}

/// Refuses what cannot be a transaction, in any engine.
pub(super) fn check_txn(compares: &[Compare], ops: &[Op]) -> Result<(), KvError> {
    for compare in compares {
        match compare {
            Compare::Absent(key) | Compare::Present(key) | Compare::Revision(key, _) => check_key(key)?,
            Compare::Empty(range) => check_key(&range.start)?,
        }
    }
    let mut keys: Vec<&[u8]> = ops.iter().map(Op::key).collect();
    keys.sort_unstable();
    for (i, key) in keys.iter().enumerate() {
        check_key(key)?;
        if i > 0 && keys[i - 1] == *key {
            let reason = format!("key {:?} is written twice", String::from_utf8_lossy(key));
            return Err(KvError::Refused { action: "write", reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_covers_exactly_the_keys_that_begin_with_it() {
        let range = KeyRange::prefix(b"a/");
        assert!(range.contains(b"a/"));
        assert!(range.contains(b"a/\xff\xff"));
        assert!(!range.contains(b"a0"));
        assert!(!range.contains(b"a"));
        assert_eq!(KeyRange::prefix(b"a\xff").end, b"b");
    }
}
