//! Leases: who may do something at the moment, and who is alive.
//!
//! ```text
//!   (absent) ──acquire──▶ held ──renew──▶ held, longer ──release──▶ (absent)
//!                          └──its time is over, another acquires──▶ held by another: the first one's writes fail
//! ```
//!
//! Times decide only who may *take* a lease; nothing is safe because of a clock. What a holder writes carries a fence: the
//! lease's row as the holder last wrote it is a condition of the transaction. A holder that was frozen, or whose clock is
//! wrong, finds that its transactions conflict.
//!
//! - `lease/<name>`: at most one holder. Used by the collector.
//! - `writer/<node>/<holder>`: one row for each process that writes snapshots, until it ends or its time is over. A commit
//!   requires its writer's row, and removing the row fences whatever that process still has under way: it will not commit,
//!   however late its request arrives. A process that starts removes what its predecessors on the node left.
//!
//! Retries: each step finds what an earlier try of the same holder did, and goes on from there.

use crate::ids::NodeId;

use super::error::CatalogError;
use super::kv::{Compare, Entry, Key, Revision};
use super::upkeep_rows::{LeaseHolder, LeaseRow};
use super::{Catalog, Draft, keys, until_settled, wire};

/// A lease as its holder last wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    key: Key,
    holder: LeaseHolder,
    expires_unix_ms: i64,
    revision: Revision,
}

impl Lease {
    fn of(entry: &Entry, row: LeaseRow) -> Self {
        let LeaseRow { holder, expires_unix_ms } = row;
        Self { key: entry.key.clone(), holder, expires_unix_ms, revision: entry.revision }
    }

    /// Milliseconds until others may take it.
    pub fn left_ms(&self, now_unix_ms: i64) -> i64 {
        self.expires_unix_ms.saturating_sub(now_unix_ms)
    }
}

/// The registration of a process that writes snapshots. Every commit names one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterLease {
    key: Key,
    holder: LeaseHolder,
}

impl std::fmt::Display for WriterLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.key))
    }
}

fn lost(key: &[u8]) -> CatalogError {
    CatalogError::LeaseLost { lease: String::from_utf8_lossy(key).into_owned() }
}

impl Draft {
    /// The transaction happens only while the lease is as its holder knows it.
    pub(super) fn fence(&mut self, lease: &Lease) {
        self.compares.push(Compare::Revision(lease.key.clone(), lease.revision));
    }

    /// The transaction happens only while the writer is registered.
    pub(super) fn require_writer(&mut self, writer: &WriterLease) {
        self.compares.push(Compare::Present(writer.key.clone()));
    }
}

impl Catalog {
    /// Takes the lease `name` for `ttl_ms`, if it is free, its time is over, or `holder` has it. `None`: another has it.
    pub async fn acquire_lease(
        &self,
        name: &str,
        holder: LeaseHolder,
        ttl_ms: i64,
    ) -> Result<Option<Lease>, CatalogError> {
        let key = keys::lease(name);
        until_settled!(format_args!("taking the lease {name}"), {
            let found = self.row::<LeaseRow>(key.clone()).await?;
            if let Some((row, _)) = &found
                && row.holder != holder
                && row.expires_unix_ms > self.now()
            {
                break Ok(None);
            }
            let row = LeaseRow { holder, expires_unix_ms: self.now().saturating_add(ttl_ms) };
            let mut draft = Draft::default();
            draft.require_as_read(key.clone(), found.as_ref().map(|(_, entry)| entry));
            draft.put_row(key.clone(), &row)?;
            if let Some(revision) = self.send_for_revision(draft).await? {
                let expires_unix_ms = row.expires_unix_ms;
                break Ok(Some(Lease { key: key.clone(), holder, expires_unix_ms, revision }));
            }
        })
    }

    /// Holds the lease for `ttl_ms` from now. [`CatalogError::LeaseLost`] when another has taken it.
    pub async fn renew_lease(&self, lease: &Lease, ttl_ms: i64) -> Result<Lease, CatalogError> {
        let mut lease = lease.clone();
        until_settled!(format_args!("renewing a lease"), {
            let row = LeaseRow { holder: lease.holder, expires_unix_ms: self.now().saturating_add(ttl_ms) };
            let mut draft = Draft::default();
            draft.fence(&lease);
            draft.put_row(lease.key.clone(), &row)?;
            if let Some(revision) = self.send_for_revision(draft).await? {
                break Ok(Lease { expires_unix_ms: row.expires_unix_ms, revision, ..lease });
            }
            // It may have been renewed by this holder, and the answer lost.
            lease = self.held(&lease).await?;
        })
    }

    /// The lease as it is now, if it is still this holder's.
    pub async fn held(&self, lease: &Lease) -> Result<Lease, CatalogError> {
        match self.row::<LeaseRow>(lease.key.clone()).await? {
            Some((row, entry)) if row.holder == lease.holder => Ok(Lease::of(&entry, row)),
            _ => Err(lost(&lease.key)),
        }
    }

    /// Gives the lease back. One that is lost is given back already.
    pub async fn release_lease(&self, lease: &Lease) -> Result<(), CatalogError> {
        until_settled!(format_args!("giving a lease back"), {
            let Ok(held) = self.held(lease).await else { break Ok(()) };
            let mut draft = Draft::default();
            draft.fence(&held);
            draft.delete(held.key);
            if self.send(draft).await? {
                break Ok(());
            }
        })
    }

    /// Registers a process of `node` that is about to write snapshots. `holder` is random, and new in each registration.
    pub async fn register_writer(
        &self,
        node: &NodeId,
        holder: LeaseHolder,
        ttl_ms: i64,
    ) -> Result<WriterLease, CatalogError> {
        let key = keys::writer(node, &holder);
        let mut draft = Draft::default();
        draft.put_row(key.clone(), &LeaseRow { holder, expires_unix_ms: self.now().saturating_add(ttl_ms) })?;
        self.send(draft).await?;
        Ok(WriterLease { key, holder })
    }

    /// Says that the writer is alive for `ttl_ms` from now. [`CatalogError::LeaseLost`] when it was counted as dead.
    pub async fn renew_writer(&self, writer: &WriterLease, ttl_ms: i64) -> Result<(), CatalogError> {
        let row = LeaseRow { holder: writer.holder, expires_unix_ms: self.now().saturating_add(ttl_ms) };
        let mut draft = Draft::default();
        draft.require_writer(writer);
        draft.put_row(writer.key.clone(), &row)?;
        if self.send(draft).await? { Ok(()) } else { Err(lost(&writer.key)) }
    }

    /// Ends the registrations that earlier processes of `node` left: nothing of them will be committed any more. To be
    /// called by the one process that has the node's data, before it decides what of that data is not needed.
    pub async fn fence_writers_of(&self, node: &NodeId) -> Result<(), CatalogError> {
        for entry in self.scan(keys::under(&keys::writers_of(node))).await? {
            let mut draft = Draft::default();
            draft.delete(entry.key);
            self.send(draft).await?;
        }
        Ok(())
    }

    /// Ends the registrations whose time is over. Returns how many.
    pub async fn fence_expired_writers(&self, fence: &Lease) -> Result<u64, CatalogError> {
        let mut ended = 0;
        for entry in self.scan(keys::under(keys::WRITERS)).await? {
            let row: LeaseRow = wire::decode(&entry)?;
            if row.expires_unix_ms > self.now() {
                continue;
            }
            let mut draft = Draft::default();
            draft.fence(fence);
            // Unless it has shown that it is alive since.
            draft.require_unchanged(&entry);
            draft.delete(entry.key);
            ended += u64::from(self.send(draft).await?);
        }
        Ok(ended)
    }

    /// Requires that the writer is registered, and says so when it is not.
    pub(super) async fn draft_writer(&self, draft: &mut Draft, writer: &WriterLease) -> Result<(), CatalogError> {
        if self.kv.get(writer.key.clone()).await?.is_none() {
            return Err(lost(&writer.key));
        }
        draft.require_writer(writer);
        Ok(())
    }
}
