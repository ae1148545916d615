//! Seeing a snapshot through to its commit.
//!
//! ```text
//!   ingest ──▶ seal ──▶ commit ──▶ committed
//!     ▲                   │ packs are not live: avoid them, discard what was written ──┐
//!     │                   │ the writer was counted as dead: register anew, discard  ───┤
//!     │                   │ outcome unknown: send the same commit again                │
//!     │                   └ refused: discard what was written; the caller's error      │
//!     └────────────────────────────────────────────────────────── a few times ─────────┘
//! ```
//!
//! Invariants:
//! - what was sealed is discarded only if it is certain that no commit that names it happened, or can still happen;
//! - a refusal names every pack in the way, so one further ingest suffices unless yet another pack goes meanwhile.
//!
//! Crash anywhere: packs without a row in the catalog, dropped at the next start.

mod writer;

use std::time::Duration;

use crate::catalog::{CatalogError, ErrorKind, SnapshotCommit};
use crate::ingest::Sealed;
use crate::store::Store;

pub use writer::Writer;

/// Ingests of one snapshot, at most.
const INGESTS: u32 = 4;

/// How often one commit is sent, at most.
const SENDS: u32 = 6;

/// The pause before it is sent again, at first; doubled each time.
const RESEND: Duration = Duration::from_millis(50);

/// One ingest, sealed.
#[derive(Debug)]
pub struct Attempt<S> {
    /// What is to be committed. [`publish`] says which packs are staged, and who the writer is.
    pub commit: SnapshotCommit,
    /// What was written for it.
    pub sealed: Sealed,
    /// Whatever else the caller wants to have when it is committed.
    pub stored: S,
}

/// What a commit came to.
#[derive(Debug)]
pub enum Outcome<T> {
    /// The snapshot exists as it was written.
    Ours(T),
    /// Another copy of the request had made another one: what was written is not needed.
    Other(T),
}

/// Ingests and commits, again where that helps. `ingest` may be called several times and must write the same content each
/// time; `commit` may be sent several times and must recognise its own snapshot.
pub async fn publish<S, T, E, I, C>(
    store: &Store,
    writer: &Writer,
    ingest: impl Fn() -> I,
    commit: impl Fn(SnapshotCommit) -> C,
) -> Result<(S, Outcome<T>), E>
where
    E: From<CatalogError>,
    I: Future<Output = Result<Attempt<S>, E>>,
    C: Future<Output = Result<Outcome<T>, CatalogError>>,
{
    let mut ingests = 0;
    loop {
        let lease = writer.lease();
        let Attempt { commit: mut wanted, sealed, stored } = ingest().await?;
        ingests += 1;
        wanted.writer = Some(lease.clone());
        wanted.staged = store.staged_among(&wanted.packs).await;
        let Sent { outcome, certain } = send(&commit, &wanted).await;
        let error = match outcome {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Other(_)) && certain {
                    discard(store, sealed).await;
                }
                return Ok((stored, outcome));
            }
            Err(error) => error,
        };
        if certain {
            discard(store, sealed).await;
        }
        match error {
            CatalogError::PacksNotLive { packs } if ingests < INGESTS => {
                tracing::info!(snapshot = %wanted.row.id, packs = packs.len(), "written again: packs it used are leaving");
                store.avoid_packs(&packs);
            }
            CatalogError::LeaseLost { .. } if ingests < INGESTS => writer.replace(&lease).await?,
            error => return Err(error.into()),
        }
    }
}

struct Sent<T> {
    outcome: Result<Outcome<T>, CatalogError>,
    /// If the outcome is an error, or another's: no commit of this snapshot happened or will.
    certain: bool,
}

/// Sends a commit until its outcome is known, or patience is at an end.
async fn send<T, C>(commit: impl Fn(SnapshotCommit) -> C, wanted: &SnapshotCommit) -> Sent<T>
where
    C: Future<Output = Result<Outcome<T>, CatalogError>>,
{
    let mut certain = true;
    let mut pause = RESEND;
    let mut sends = 0;
    loop {
        let outcome = commit(wanted.clone()).await;
        sends += 1;
        let again = match &outcome {
            Err(CatalogError::PacksNotLive { .. } | CatalogError::LeaseLost { .. }) | Ok(_) => false,
            Err(error) => {
                certain &= error.kind() != ErrorKind::Unknown;
                matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable)
            }
        };
        if !again || sends == SENDS {
            return Sent { outcome, certain };
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

/// Drops sealed packs that no manifest names, or ever will.
pub(crate) async fn discard(store: &Store, sealed: Sealed) {
    if let Err(error) = store.discard(sealed).await {
        tracing::warn!(%error, "packs that nobody names stay until the next start");
    }
}

#[cfg(test)]
mod tests;
