//! Copying chunks out of packs into new ones, for the snapshots that name those packs.
//!
//! ```text
//!   chunks ──read from wherever they are good──▶ new packs, sealed here ──▶ each snapshot's manifest names them, too
//! ```
//!
//! Used on packs that are mostly dead ([`crate::repack`]) and on damaged ones ([`crate::check`]). The snapshots' own data,
//! the index included, does not change: chunks keep their ids.
//!
//! Crash points: before the first manifest is amended, the new packs are staged and named by nobody, and dropped at the next
//! start; after some are, the others get theirs when it is done again, which finds the chunks stored already. Until then
//! they read from the old packs.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;

use crate::catalog::{Addition, Amended, Catalog, CatalogError, ErrorKind, WriterLease};
use crate::error::{ReadError, StoreError};
use crate::fetch::Scope;
use crate::ids::{ChunkId, DomainKey, NodeId, PackId, SnapshotId};
use crate::ingest::Sealed;
use crate::pack::PackRef;
use crate::publish::{Writer, discard};
use crate::store::Store;

/// Chunks read and written at a time: a MiB of guest pages.
const AT_ONCE: usize = 256;

/// Who writes.
#[derive(Clone, Copy)]
pub struct Rewriter<'a> {
    /// Where chunks are, and go.
    pub store: &'a Arc<Store>,
    /// Where snapshots are.
    pub catalog: &'a Arc<Catalog>,
    /// The registration of this process.
    pub writer: &'a Writer,
    /// The node that it is on.
    pub node: &'a NodeId,
}

/// What is to be copied, all of one dedup domain.
pub(crate) struct Copy {
    pub(crate) key: DomainKey,
    /// The packs it is to be copied out of.
    pub(crate) out_of: HashSet<PackId>,
    /// The chunks, in the order in which they are to lie.
    pub(crate) chunks: Vec<ChunkId>,
    /// Where copies may be: the packs of the snapshots.
    pub(crate) packs: Vec<PackRef>,
    /// The snapshots that need some of them.
    pub(crate) snapshots: Vec<SnapshotId>,
    /// The manifests need not name the old packs afterwards, if no chunk is lost: they are damaged.
    pub(crate) replace: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Copied {
    /// Chunks that are in good packs now.
    pub(crate) chunks: u64,
    /// Chunks without a good copy anywhere.
    pub(crate) lost: Vec<ChunkId>,
    /// Compressed bytes written.
    pub(crate) bytes_new: u64,
    /// Snapshots that name them now.
    pub(crate) amended: u64,
}

/// Why nothing came of it. What was done by then stays done.
#[derive(Debug, thiserror::Error)]
pub enum RewriteError {
    /// The catalog did not answer, or refused.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The store did.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A chunk cannot be had just now.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl Rewriter<'_> {
    pub(crate) async fn copy(&self, copy: Copy) -> Result<Copied, RewriteError> {
        let lease = self.writer.lease();
        let scope = Scope::new(copy.key, copy.packs.clone());
        let ingest = self.store.begin_copy(copy.key, &copy.out_of);
        let mut copied = Copied::default();
        for ids in copy.chunks.chunks(AT_ONCE) {
            let plain = self.read(&scope, ids, &mut copied.lost).await?;
            copied.chunks += plain.len() as u64;
            ingest.copy(plain).await?;
        }
        let sealed = ingest.seal().await?;
        copied.bytes_new = sealed.bytes_new;
        let replaces = match copy.replace && copied.lost.is_empty() {
            true => copy.out_of,
            false => HashSet::new(),
        };
        let staged = self.store.staged_among(&sealed.packs).await;
        let addition =
            Addition { packs: sealed.packs.clone(), staged, replaces, writer: lease.clone(), node: self.node.clone() };
        let mut named = false;
        for id in &copy.snapshots {
            match self.catalog.add_packs(id, &addition).await {
                Ok(Amended::Changed) => {
                    copied.amended += 1;
                    named = true;
                }
                Ok(Amended::Unchanged) => named = true,
                Ok(Amended::Gone) => {}
                Err(error) => {
                    named |= error.kind() == ErrorKind::Unknown;
                    self.give_up(sealed, named, &lease, &error).await?;
                    return Err(error.into());
                }
            }
        }
        if !named {
            discard(self.store, sealed).await;
        }
        Ok(copied)
    }

    /// Chunks that are good somewhere; the others are noted.
    async fn read(
        &self,
        scope: &Arc<Scope>,
        ids: &[ChunkId],
        lost: &mut Vec<ChunkId>,
    ) -> Result<Vec<Bytes>, RewriteError> {
        let fetcher = self.store.fetcher();
        match fetcher.fetch_run(scope, ids.to_vec()).await {
            Ok(plain) => return Ok(plain),
            Err(error) if error.is_transient() => return Err(error.into()),
            Err(_) => {}
        }
        // At least one of them is lost: which?
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            match fetcher.fetch(scope, *id).await {
                Ok(plain) => found.push(plain),
                Err(error) if error.is_transient() => return Err(error.into()),
                Err(_) => lost.push(*id),
            }
        }
        Ok(found)
    }

    async fn give_up(
        &self,
        sealed: Sealed,
        named: bool,
        lease: &WriterLease,
        error: &CatalogError,
    ) -> Result<(), CatalogError> {
        if !named {
            discard(self.store, sealed).await;
        }
        match error {
            CatalogError::PacksNotLive { packs } => self.store.avoid_packs(packs),
            CatalogError::LeaseLost { .. } => self.writer.replace(lease).await?,
            _ => {}
        }
        Ok(())
    }
}
