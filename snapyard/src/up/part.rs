//! One tier inside the process: a named task that serves until it is told to stop, and is then waited for.
//!
//! ```text
//! spawn ──> serving ──stop──> draining ──> ended
//!              └──────────────────────────> ended by itself: the server must end too
//! ```

use std::future::Future;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::failure::{Failure, Kind, with_causes};

/// Completes when the part shall stop; also when its owner is gone.
pub struct Stopped(oneshot::Receiver<()>);

impl Stopped {
    /// Waits for the word.
    pub async fn wait(self) {
        // An error means that the sender is gone, which is a word too.
        let _ = self.0.await;
    }
}

/// A running tier.
pub struct Part {
    name: &'static str,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), String>>,
}

impl Part {
    /// Starts a tier: `serve` runs until it is told to stop, or fails.
    pub fn spawn<F, E>(name: &'static str, serve: impl FnOnce(Stopped) -> F) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: std::error::Error,
    {
        let (stop, stopped) = oneshot::channel();
        let serving = serve(Stopped(stopped));
        let task = tokio::spawn(async move { serving.await.map_err(|error| with_causes(&error)) });
        Self { name, stop, task }
    }

    /// Completes when the tier ends by itself, which it must not; says why.
    pub async fn failed(&mut self) -> Failure {
        let why = outcome((&mut self.task).await).err().unwrap_or_else(|| "it stopped serving".into());
        Failure::new(Kind::Refused, format!("the {} failed: {why}", self.name))
    }

    /// Tells it to stop and waits, at most for `deadline`; then it is aborted.
    pub async fn stop(mut self, deadline: Duration) {
        let _ = self.stop.send(()); // an error means that it has ended already
        match tokio::time::timeout(deadline, &mut self.task).await {
            Ok(ended) => {
                if let Err(why) = outcome(ended) {
                    tracing::warn!(part = self.name, why, "ended with an error");
                }
            }
            Err(_) => {
                tracing::warn!(part = self.name, ?deadline, "did not end in time and is cut off");
                self.task.abort();
            }
        }
    }
}

/// The two ways in which a task can fail as one text.
fn outcome(ended: Result<Result<(), String>, tokio::task::JoinError>) -> Result<(), String> {
    match ended {
        Ok(outcome) => outcome,
        Err(panic) => Err(panic.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[tokio::test]
    async fn a_part_serves_until_told_to_stop() {
        let (ended, mut has_ended) = oneshot::channel();
        let part = Part::spawn("test", |stopped| async move {
            stopped.wait().await;
            ended.send(()).expect("the test listens");
            Ok::<_, io::Error>(())
        });
        assert!(has_ended.try_recv().is_err(), "it serves");
        part.stop(Duration::from_secs(60)).await;
        assert!(has_ended.try_recv().is_ok(), "it ended in order");
    }

    #[tokio::test]
    async fn a_part_that_ends_by_itself_is_a_failure_with_its_reason() {
        let mut part = Part::spawn("disk", |_stopped| async { Err(io::Error::other("full")) });
        assert_eq!(part.failed().await.to_string(), "the disk failed: full");
        let mut part = Part::spawn("disk", |_stopped| async { Ok::<_, io::Error>(()) });
        assert_eq!(part.failed().await.to_string(), "the disk failed: it stopped serving");
    }

    #[tokio::test]
    async fn a_part_that_does_not_stop_is_cut_off() {
        let (held, mut dropped) = oneshot::channel::<()>();
        let part = Part::spawn("test", |_stopped| async move {
            let _held = held;
            std::future::pending::<io::Result<()>>().await
        });
        part.stop(Duration::from_millis(1)).await;
        // The task is dropped soon after it was aborted, and what it held with it.
        assert!((&mut dropped).await.is_err());
    }
}
