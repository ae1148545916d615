//! Requests that clients may send twice: what the first one made, by the client's key.
//!
//! The row is written in the transaction that makes the object, so of two copies of a request in flight at once one makes
//! the object and the other finds it. A row counts for [`IDEMPOTENCY_MS`]; nothing sweeps them, instead each new row has a
//! few removed that are over age, so their number stays bounded by what a day brings.

use crate::ids::{SandboxId, SnapshotId, TeamId};

use super::error::CatalogError;
use super::kv::Order;
use super::wire::IdempotencyRow;
use super::{Catalog, Draft, Idempotency, keys};

/// How long a key is remembered: a day.
pub const IDEMPOTENCY_MS: i64 = 24 * 60 * 60 * 1000;

/// Rows over age that go for each new one.
const FORGOTTEN_AT_ONCE: usize = 3;

const MAX_KEY_LEN: usize = 255;

/// What a request made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Made {
    /// A sandbox.
    Sandbox(SandboxId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

impl std::fmt::Display for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sandbox(id) => write!(f, "sandbox {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
        }
    }
}

fn cut(key: &str) -> String {
    key.chars().take(80).collect()
}

pub(super) fn gone(request: &Idempotency, object: &Made) -> CatalogError {
    CatalogError::IdempotencyGone { key: cut(&request.key), object: object.to_string() }
}

pub(super) fn mismatch(request: &Idempotency) -> CatalogError {
    CatalogError::IdempotencyMismatch { key: cut(&request.key) }
}

impl Catalog {
    /// What an earlier copy of this request made, if there was one: to be asked before any work is done.
    ///
    /// The same key with another digest is [`CatalogError::IdempotencyMismatch`].
    pub async fn made_by(&self, team: &TeamId, request: &Idempotency) -> Result<Option<Made>, CatalogError> {
        let found = self.row::<IdempotencyRow>(keys::idempotency(team, &request.key)).await?;
        match found {
            Some((row, _)) if !self.is_over_age(&row) => {
                if row.digest == request.digest {
                    Ok(Some(row.object))
                } else {
                    Err(mismatch(request))
                }
            }
            _ => Ok(None),
        }
    }

    fn is_over_age(&self, row: &IdempotencyRow) -> bool {
        row.created_unix_ms.saturating_add(IDEMPOTENCY_MS) <= self.now()
    }

    /// Adds the request's row to the transaction that makes `object`; or answers what an earlier copy made.
    pub(super) async fn remember(
        &self,
        draft: &mut Draft,
        team: &TeamId,
        request: &Idempotency,
        object: Made,
    ) -> Result<Option<Made>, CatalogError> {
        if request.key.is_empty() || request.key.len() > MAX_KEY_LEN {
            return Err(CatalogError::invalid("Idempotency-Key", format!("must have 1 to {MAX_KEY_LEN} bytes")));
        }
        let key = keys::idempotency(team, &request.key);
        let found = self.row::<IdempotencyRow>(key.clone()).await?;
        if let Some((row, _)) = &found
            && !self.is_over_age(row)
        {
            return if row.digest == request.digest { Ok(Some(row.object.clone())) } else { Err(mismatch(request)) };
        }
        let now = self.now();
        draft.require_as_read(key.clone(), found.as_ref().map(|(_, entry)| entry));
        draft.put_row(key, &IdempotencyRow { digest: request.digest.clone(), object, created_unix_ms: now })?;
        let since = keys::idempotent_since(now, team, &request.key);
        draft.mark(since.clone());
        let old_since = found.map(|(row, _)| keys::idempotent_since(row.created_unix_ms, team, &request.key));
        if let Some(old) = old_since.filter(|old| *old != since) {
            draft.delete(old);
        }
        Ok(None)
    }

    /// Removes a few rows over age. In a transaction of its own, after the one that made a row, so that requests do not
    /// contend for the same old rows; if it loses a race or fails, the next request's turn comes.
    pub(super) async fn forget_over_age(&self) {
        if let Err(error) = self.try_forget_over_age().await {
            tracing::warn!(%error, "old idempotency rows stay for now");
        }
    }

    async fn try_forget_over_age(&self) -> Result<(), CatalogError> {
        let mut over_age = keys::under(keys::IDEMPOTENT_SINCE);
        let limit = self.now().saturating_sub(IDEMPOTENCY_MS);
        over_age.end = format!("{}{}", keys::IDEMPOTENT_SINCE, keys::time(limit)).into_bytes();
        let entries = self.kv.range(over_age, FORGOTTEN_AT_ONCE, Order::Ascending).await?;
        if entries.is_empty() {
            return Ok(());
        }
        let mut draft = Draft::default();
        for entry in entries {
            draft.require_unchanged(&entry);
            let key = keys::idempotency_of_since(&entry.key);
            if let Some((row, row_entry)) = self.row::<IdempotencyRow>(key.clone()).await?
                && self.is_over_age(&row)
            {
                draft.require_unchanged(&row_entry);
                draft.delete(key);
            }
            draft.delete(entry.key);
        }
        self.send(draft).await?;
        Ok(())
    }
}
