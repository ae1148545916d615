//! The end of an endless stream: what a VMM or a guest console said last.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long the rest of a stream is waited for after its writer died: somebody may have inherited it.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Reads a stream as long as it lasts and keeps its last bytes.
#[derive(Debug)]
pub struct Tail {
    kept: Arc<Mutex<VecDeque<u8>>>,
    task: JoinHandle<()>,
}

impl Tail {
    /// Follows `stream`, keeping `limit` bytes. Must be called on a tokio runtime.
    pub fn follow(mut stream: impl AsyncRead + Unpin + Send + 'static, limit: usize) -> Self {
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let keep = Arc::clone(&kept);
        let task = tokio::spawn(async move {
            let mut buffer = vec![0; 4096];
            // An error ends the stream like its end does: the writer is gone.
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                let mut kept = keep.lock();
                kept.extend(&buffer[..count]);
                let surplus = kept.len().saturating_sub(limit);
                kept.drain(..surplus);
            }
        });
        Self { kept, task }
    }

    /// What is kept now.
    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.kept.lock().iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Reads to the end, which must be near, and gives what is kept.
    pub async fn finish(mut self) -> String {
        // Late or failed: what has been read is what there is.
        let _ = timeout(LAST_WORDS, &mut self.task).await;
        self.text()
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.task.abort();
    }
}
