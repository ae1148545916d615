//! What a reader may see: its domain's key, and the packs that hold its chunks.
//!
//! A snapshot's chunks may be copied into other packs while it is being read, and the packs that it was opened with
//! deleted some time after. A scope that follows the catalog asks it once a chunk is in none of the packs it knows.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::catalog::{Catalog, CatalogError};
use crate::ids::{DomainKey, PackId, SnapshotId};
use crate::manifest::Manifest;
use crate::pack::PackRef;

/// Packs, as they were named at one time.
pub(crate) struct Packs {
    pub(crate) refs: Vec<PackRef>,
    ids: HashSet<PackId>,
    /// Every footer was read.
    footers_known: AtomicBool,
}

impl Packs {
    fn new(refs: Vec<PackRef>) -> Arc<Self> {
        let ids = refs.iter().map(|pack| pack.id).collect();
        Arc::new(Self { refs, ids, footers_known: AtomicBool::new(false) })
    }

    pub(crate) fn has(&self, pack: &PackId) -> bool {
        self.ids.contains(pack)
    }

    pub(super) fn footers_known(&self) -> bool {
        self.footers_known.load(Ordering::Acquire)
    }

    pub(super) fn note_footers_known(&self) {
        self.footers_known.store(true, Ordering::Release);
    }
}

/// What a reader may see.
pub(crate) struct Scope {
    pub(crate) key: DomainKey,
    packs: RwLock<Arc<Packs>>,
    follows: Option<(Arc<Catalog>, SnapshotId)>,
}

impl Scope {
    /// These packs, for good.
    pub(crate) fn new(key: DomainKey, packs: Vec<PackRef>) -> Arc<Self> {
        Arc::new(Self { key, packs: RwLock::new(Packs::new(packs)), follows: None })
    }

    /// The packs of a snapshot, whatever they come to be.
    pub(crate) fn following(&self, catalog: Arc<Catalog>, snapshot: SnapshotId) -> Arc<Self> {
        Arc::new(Self {
            key: self.key,
            packs: RwLock::new(Packs::new(self.packs().refs.clone())),
            follows: Some((catalog, snapshot)),
        })
    }

    /// The packs as they are known.
    pub(crate) fn packs(&self) -> Arc<Packs> {
        Arc::clone(&self.packs.read())
    }

    /// Asks the catalog. Answers whether the packs are others now. A snapshot that is gone has those it had.
    pub(crate) async fn refresh(&self) -> Result<bool, CatalogError> {
        let Some((catalog, snapshot)) = &self.follows else { return Ok(false) };
        let encoded = match catalog.manifest(snapshot).await {
            Ok(encoded) => encoded,
            Err(CatalogError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let manifest = match Manifest::decode(&encoded) {
            Ok(manifest) => manifest,
            Err(error) => {
                tracing::error!(%snapshot, %error, "a manifest cannot be read any more");
                return Ok(false);
            }
        };
        let mut packs = self.packs.write();
        if packs.refs == manifest.packs {
            return Ok(false);
        }
        *packs = Packs::new(manifest.packs);
        Ok(true)
    }
}
