//! A decorator for tests: fails, stalls or records operations as a script says.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::{BlobEntry, BlobError, BlobOp, BlobStore, PutMode, PutOutcome};

type Script = Box<dyn Fn(BlobOp, &str) -> Option<BlobError> + Send + Sync>;

/// A blob store with a script in front.
pub(crate) struct Faulty {
    inner: Arc<dyn BlobStore>,
    script: Mutex<Script>,
    log: Mutex<Vec<(BlobOp, String)>>,
    /// Reads wait for a permit here.
    gate: Semaphore,
}

impl Faulty {
    pub(crate) fn new(inner: Arc<dyn BlobStore>) -> Self {
        Self {
            inner,
            script: Mutex::new(Box::new(|_, _| None)),
            log: Mutex::new(Vec::new()),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
        }
    }

    /// From now on an operation fails with what `script` returns for it.
    pub(crate) fn fail(&self, script: impl Fn(BlobOp, &str) -> Option<BlobError> + Send + Sync + 'static) {
        *self.script.lock() = Box::new(script);
    }

    /// Lets no further read through until [`Faulty::open_gate`].
    pub(crate) fn close_gate(&self) {
        self.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub(crate) fn open_gate(&self) {
        self.gate.add_permits(Semaphore::MAX_PERMITS);
    }

    /// The operations so far, and starts anew.
    pub(crate) fn take_log(&self) -> Vec<(BlobOp, String)> {
        std::mem::take(&mut self.log.lock())
    }

    /// How many operations there were since then.
    pub(crate) fn log_len(&self) -> usize {
        self.log.lock().len()
    }

    fn enter(&self, op: BlobOp, key: &str) -> Result<(), BlobError> {
        self.log.lock().push((op, key.into()));
        match (self.script.lock())(op, key) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl BlobStore for Faulty {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        self.enter(BlobOp::Put, key)?;
        self.inner.put(key, bytes, mode).await
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        self.enter(BlobOp::Get, key)?;
        let _permit = self.gate.acquire().await.expect("the gate is never closed for good");
        self.inner.get(key, max_len).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        self.enter(BlobOp::Get, key)?;
        let _permit = self.gate.acquire().await.expect("the gate is never closed for good");
        self.inner.get_range(key, range).await
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        self.enter(BlobOp::Head, key)?;
        self.inner.head(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError> {
        self.enter(BlobOp::List, prefix)?;
        self.inner.list(prefix, after, limit).await
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.enter(BlobOp::Delete, key)?;
        self.inner.delete(key).await
    }
}
