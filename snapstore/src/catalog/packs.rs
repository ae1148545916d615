//! Packs: one small row for each that a committed snapshot uses, so that collecting garbage can be conditional.
//!
//! ```text
//!   (absent) ──commit that names it──▶ live ──(collector)──▶ condemned ──▶ (absent)
//! ```
//!
//! A commit requires each of its packs to be live, or absent and then makes the row: in the same transaction as the
//! manifest, so no snapshot ever names a pack that was already on its way out.

use std::collections::HashSet;

use crate::ids::PackId;
use crate::pack::PackRef;

use super::error::CatalogError;
use super::{Catalog, Draft, PackRow, PackState, keys, wire};

impl Catalog {
    /// Requires every pack to be live, and makes the rows of those that are new.
    pub(super) async fn use_packs(&self, draft: &mut Draft, packs: &[PackRef]) -> Result<(), CatalogError> {
        let now = self.now();
        let mut seen = HashSet::new();
        let packs: Vec<&PackRef> = packs.iter().filter(|pack| seen.insert(pack.id)).collect();
        let found = self.kv.get_many(packs.iter().map(|pack| keys::pack(&pack.id)).collect()).await?;
        for (pack, entry) in packs.into_iter().zip(found) {
            match entry {
                Some(entry) => {
                    let row: PackRow = wire::decode(&entry)?;
                    if row.state != PackState::Live {
                        return Err(CatalogError::PackCondemned { pack: pack.id });
                    }
                    draft.require_unchanged(&entry);
                }
                None => {
                    let row = PackRow {
                        id: pack.id,
                        size_bytes: pack.size_bytes,
                        chunks: pack.chunks,
                        state: PackState::Live,
                        created_unix_ms: now,
                    };
                    draft.require_absent(keys::pack(&pack.id));
                    draft.put_row(keys::pack(&pack.id), &row)?;
                }
            }
        }
        Ok(())
    }

    /// The row of a pack, if any snapshot ever used it.
    pub async fn pack(&self, id: &PackId) -> Result<Option<PackRow>, CatalogError> {
        Ok(self.row::<PackRow>(keys::pack(id)).await?.map(|(row, _)| row))
    }

    /// Every pack that a committed snapshot has used. What is staged on a node and not among these is an orphan, unless
    /// its snapshot is still being committed.
    pub async fn pack_ids(&self) -> Result<HashSet<PackId>, CatalogError> {
        let entries = self.scan(keys::under(keys::PACKS)).await?;
        entries.iter().map(|entry| wire::id_of_key(&entry.key)).collect()
    }
}
