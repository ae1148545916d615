//! Packs that leave: what a node does about those that the catalog no longer lets snapshots use.
//!
//! ```text
//!   commit refused because of a pack ──▶ avoided: new ingests write its chunks again ──▶ gone: dropped, forgotten
//!                                           └─────────────▶ live after all: allowed
//! ```
//!
//! A pack that is avoided is not forgotten: it may be condemned by mistake for as long as it takes to notice, and then
//! snapshots that are open here read from it. Only what is doomed or gone, which no snapshot names, loses its places.
//!
//! Crash: the set of avoided packs is empty after a restart; the next refusal fills it again.

use std::collections::HashSet;
use std::sync::Arc;

use super::Store;
use crate::blocking::blocking;
use crate::error::StoreError;
use crate::ids::PackId;
use crate::pack::PackRef;

impl Store {
    /// Which of these packs are sealed on this node's disk and were never uploaded: only those can be new to the catalog.
    pub async fn staged_among(&self, packs: &[PackRef]) -> HashSet<PackId> {
        let (fetcher, packs) = (Arc::clone(&self.fetcher), packs.to_vec());
        blocking(move || {
            let ids = packs.iter().map(|pack| pack.id);
            ids.filter(|pack| fetcher.staging.contains(pack) && !fetcher.cache.is_remote(pack)).collect()
        })
        .await
    }

    /// Every pack that is staged here.
    pub fn staged_packs(&self) -> HashSet<PackId> {
        self.fetcher.staging.packs().into_iter().collect()
    }

    /// From now on new ingests do not deduplicate against these packs.
    pub fn avoid_packs(&self, packs: &[PackId]) {
        self.ingest.avoided.write().extend(packs);
    }

    /// These packs are as good as any other again.
    pub fn allow_packs(&self, packs: &HashSet<PackId>) {
        self.ingest.avoided.write().retain(|pack| !packs.contains(pack));
    }

    /// What new ingests do not deduplicate against.
    pub fn avoided_packs(&self) -> HashSet<PackId> {
        self.ingest.avoided.read().clone()
    }

    /// Drops what this node has of packs that the catalog has deleted for good: staged copies, and where their chunks
    /// were. `gone` must hold only packs that no snapshot names or ever will. Returns of how many there was something.
    pub async fn drop_gone(&self, gone: &HashSet<PackId>) -> Result<u64, StoreError> {
        let (fetcher, packs) = (Arc::clone(&self.fetcher), gone.clone());
        let dropped = blocking(move || -> Result<u64, StoreError> {
            let mut dropped = 0;
            for pack in &packs {
                let staged = fetcher.staging.contains(pack);
                if staged || fetcher.cache.is_registered(pack) || fetcher.cache.is_remote(pack) {
                    // First what leads to it, so that nobody borrows it any more.
                    fetcher.cache.forget_pack(pack);
                    fetcher.staging.remove(pack)?;
                    dropped += 1;
                }
            }
            Ok(dropped)
        });
        let dropped = dropped.await?;
        self.allow_packs(gone);
        Ok(dropped)
    }
}
