//! Time-outs: when a sandbox ends by itself.

use std::sync::Arc;
use std::time::Duration;

use snapyard_snapstore::catalog::SandboxRow;
use snapyard_snapstore::ids::{SandboxId, TeamId};

use crate::error::NodeError;
use crate::node::State;
use crate::ops::kill::kill;
use crate::ops::pause::pause;
use crate::sandbox::{Link, Sandbox};

/// The pause before a sandbox whose time is over, but which is busy, is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// The pause before a pause that failed is tried again: killing it would lose what it is to keep.
const FAILED_PAUSE: Duration = Duration::from_secs(5);

/// Ends or pauses `sandbox` when its time is over; returns when it has ended, by this or otherwise.
pub async fn watch(node: &Arc<State>, sandbox: &Sandbox) {
    let mut deadline = sandbox.deadline.subscribe();
    let mut link = sandbox.link.subscribe();
    loop {
        let ends = *deadline.borrow_and_update();
        let left = ends.map(|ends| ends.saturating_sub(node.clock.now_unix_ms()).max(0).unsigned_abs());
        if left == Some(0) {
            let (team, id) = (&sandbox.facts.team, &sandbox.facts.id);
            let ended = if sandbox.facts.auto_pause {
                pause(node, team, id).await.map(drop)
            } else {
                kill(node, team, id).await
            };
            match ended {
                Err(NodeError::Busy { .. }) => tokio::time::sleep(BUSY_PAUSE).await,
                Err(error) if sandbox.facts.auto_pause && !matches!(error, NodeError::NoSandbox(_)) => {
                    tracing::error!(sandbox = %id, %error, "its time is over, but it cannot be paused; trying again");
                    tokio::select! {
                        () = node.shutdown.cancelled() => return,
                        () = tokio::time::sleep(FAILED_PAUSE) => {}
                    }
                }
                Err(error) if !matches!(error, NodeError::NoSandbox(_)) => {
                    tracing::error!(sandbox = %sandbox.facts.id, %error, "its time is over, but it did not end cleanly");
                    return;
                }
                _ => return,
            }
            continue;
        }
        tokio::select! {
            _ = deadline.changed() => {}
            _ = link.wait_for(|link| matches!(link, Link::Gone(_))) => return,
            () = sleep_for(left) => {}
        }
    }
}

/// Sleeps for so many milliseconds; `None`: for ever.
async fn sleep_for(left_ms: Option<u64>) {
    match left_ms {
        Some(left) => tokio::time::sleep(Duration::from_millis(left)).await,
        None => std::future::pending().await,
    }
}

/// Sets when a sandbox ends: `timeout_ms` from now, `None` never. `never_shorten`: an earlier end than now planned is
/// ignored. Zero ends it at once.
pub async fn set_timeout(
    node: &State,
    team: &TeamId,
    id: &SandboxId,
    timeout_ms: Option<i64>,
    never_shorten: bool,
) -> Result<SandboxRow, NodeError> {
    let sandbox = node.sandboxes.get(team, id)?;
    let wanted = timeout_ms.map(|timeout| node.clock.now_unix_ms().saturating_add(timeout));
    let planned = *sandbox.deadline.borrow();
    let ends = if never_shorten { later(planned, wanted) } else { wanted };
    let change = |row: &mut SandboxRow| {
        row.ends_unix_ms = ends;
        Ok(())
    };
    let row = node.catalog.update_sandbox(team, id, change).await?;
    sandbox.deadline.send_replace(ends);
    Ok(row)
}

/// The later of two ends; `None` is never.
fn later(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a.zip(b).map(|(a, b)| a.max(b))
}

#[cfg(test)]
mod tests {
    use super::later;

    #[test]
    fn never_is_later_than_any_time() {
        assert_eq!(later(Some(1), Some(2)), Some(2));
        assert_eq!(later(Some(3), Some(2)), Some(3));
        assert_eq!(later(None, Some(2)), None);
        assert_eq!(later(Some(1), None), None);
    }
}
