//! Blobs in memory: for tests, and for trying things out. Nothing outlives the process.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::{BlobEntry, BlobError, BlobStore, PutMode, PutOutcome};

/// A blob store in a map.
#[derive(Debug, Default)]
pub struct MemoryBlobs {
    objects: Mutex<BTreeMap<String, Bytes>>,
}

impl MemoryBlobs {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is such an object.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_ok()
    }

    /// All keys, in order.
    pub fn keys(&self) -> Vec<String> {
        self.objects.lock().keys().cloned().collect()
    }

    /// Changes an object's bytes behind everybody's back, as a lying store or a bad disk would. False when there is none.
    pub fn tamper(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut objects = self.objects.lock();
        let Some(object) = objects.get_mut(key) else { return false };
        let mut bytes = object.to_vec();
        change(&mut bytes);
        *object = Bytes::from(bytes);
        true
    }

    fn find(&self, key: &str) -> Result<Bytes, BlobError> {
        self.objects.lock().get(key).cloned().ok_or_else(|| BlobError::NotFound { key: key.into() })
    }
}

#[async_trait]
impl BlobStore for MemoryBlobs {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        let mut objects = self.objects.lock();
        if mode == PutMode::IfAbsent && objects.contains_key(key) {
            return Ok(PutOutcome::AlreadyThere);
        }
        objects.insert(key.into(), bytes);
        Ok(PutOutcome::Written)
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        let bytes = self.find(key)?;
        if bytes.len() as u64 > max_len {
            return Err(BlobError::BadAnswer {
                key: key.into(),
                reason: format!("{} bytes, cap {max_len}", bytes.len()),
            });
        }
        Ok(bytes)
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        let bytes = self.find(key)?;
        let len = bytes.len() as u64;
        if range.is_empty() || range.end > len {
            return Err(BlobError::BadAnswer { key: key.into(), reason: format!("range {range:?} of {len} bytes") });
        }
        let at = |n: u64| usize::try_from(n).expect("not beyond the length, which is a usize");
        Ok(bytes.slice(at(range.start)..at(range.end)))
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        self.find(key).map(|bytes| bytes.len() as u64)
    }

    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError> {
        let objects = self.objects.lock();
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        Ok(objects
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
            .take(usize::from(limit))
            .map(|(key, bytes)| BlobEntry { key: key.clone(), len: bytes.len() as u64 })
            .collect())
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.objects.lock().remove(key);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn memory_conforms() {
        super::super::conformance::run(&MemoryBlobs::new()).await;
    }
}
