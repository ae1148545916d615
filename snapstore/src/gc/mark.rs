//! Which packs are used: every pack row, then every manifest.
//!
//! The order is what makes a mark mean something; see the module's head. Memory: some 80 bytes for each pack row; manifests
//! are read a few at a time and dropped.

use super::GcError;
use crate::catalog::{Catalog, ManifestSeen, PackSeen};
use crate::ids::PackId;
use crate::manifest::Manifest;

/// Rows read at a time.
const PAGE: usize = 1000;

/// What a mark found.
pub(super) struct Mark {
    /// When it began, by the catalog's clock.
    pub(super) began_unix_ms: i64,
    /// Every pack that had a row then, in the order of the ids.
    pub(super) packs: Vec<PackSeen>,
    /// Which of them a snapshot uses.
    pub(super) used: Vec<bool>,
    /// Snapshots read.
    pub(super) snapshots: u64,
}

impl Mark {
    pub(super) async fn read(catalog: &Catalog) -> Result<Self, GcError> {
        let packs = read_packs(catalog).await?;
        // The time is taken between the two: whatever was condemned before it was read above.
        let began_unix_ms = catalog.now_unix_ms();
        let mut mark = Self { began_unix_ms, used: vec![false; packs.len()], packs, snapshots: 0 };
        catalog.each_manifest(|seen| mark.see(&seen)).await?;
        Ok(mark)
    }

    fn see(&mut self, seen: &ManifestSeen) -> Result<(), GcError> {
        let snapshot = seen.row.id;
        let bytes = seen.manifest.as_ref().ok_or(GcError::ManifestMissing { snapshot })?;
        let manifest = Manifest::decode(bytes).map_err(|source| GcError::Manifest { snapshot, source })?;
        if manifest.snapshot_id != snapshot {
            return Err(GcError::WrongManifest { snapshot, found: manifest.snapshot_id });
        }
        self.snapshots += 1;
        for pack in &manifest.packs {
            // One that has no row here was made later, with its row.
            if let Some(at) = self.find(&pack.id) {
                self.used[at] = true;
            }
        }
        Ok(())
    }

    fn find(&self, pack: &PackId) -> Option<usize> {
        self.packs.binary_search_by(|seen| seen.row.id.cmp(pack)).ok()
    }

    /// The pack's row as it was read.
    pub(super) fn row(&self, pack: &PackId) -> Option<&PackSeen> {
        self.find(pack).map(|at| &self.packs[at])
    }
}

async fn read_packs(catalog: &Catalog) -> Result<Vec<PackSeen>, GcError> {
    let mut packs: Vec<PackSeen> = Vec::new();
    loop {
        let page = catalog.pack_page(packs.last().map(|seen| &seen.row.id), PAGE).await?;
        let last = page.len() < PAGE;
        packs.extend(page);
        if last {
            return Ok(packs);
        }
    }
}
