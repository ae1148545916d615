//! What snapshots refer to, for whoever decides what is not needed any more.
//!
//! A page is one state: a snapshot's row and its manifest are read together, so a row without a manifest is damage and
//! never a snapshot that was just deleted. Pages follow one another in the order of the ids: a snapshot that exists from
//! before the first page until after the last is on one of them.

use bytes::Bytes;

use crate::ids::SnapshotId;

use super::error::CatalogError;
use super::kv::Order;
use super::{Catalog, SCAN_BATCH, SnapshotRow, keys, wire};

/// Manifests read at a time: each may have a MiB.
const MANIFESTS_AT_ONCE: usize = 16;

/// A snapshot with what it was committed with.
#[derive(Debug, Clone)]
pub struct ManifestSeen {
    /// Its row, whether or not it is usable.
    pub row: SnapshotRow,
    /// Its manifest, encoded. `None`: it is missing, which must not be.
    pub manifest: Option<Bytes>,
}

impl Catalog {
    /// Hands every snapshot to `each`, a few at a time, until `each` or the store fails. A row that does not decode is an
    /// error: nobody may take it for one that refers to nothing.
    pub async fn each_manifest<E: From<CatalogError>>(
        &self,
        mut each: impl FnMut(ManifestSeen) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut range = keys::under(keys::SNAPSHOTS);
        loop {
            let page = self.kv.range(range.clone(), SCAN_BATCH, Order::Ascending).await.map_err(CatalogError::from)?;
            let ids = page.iter().map(|entry| wire::id_of_key(&entry.key)).collect::<Result<Vec<SnapshotId>, _>>()?;
            for some in ids.chunks(MANIFESTS_AT_ONCE) {
                let asked = some.iter().flat_map(|id| [keys::snapshot(id), keys::manifest(id)]).collect();
                let found = self.kv.get_many(asked).await.map_err(CatalogError::from)?;
                for pair in found.chunks(2) {
                    let [Some(row), manifest] = pair else { continue };
                    let manifest = manifest.as_ref().map(|entry| entry.value.clone());
                    each(ManifestSeen { row: wire::decode(row)?, manifest })?;
                }
            }
            match page.last().filter(|_| page.len() == SCAN_BATCH) {
                Some(last) => range = keys::following(range, last.key.clone()),
                None => return Ok(()),
            }
        }
    }
}
