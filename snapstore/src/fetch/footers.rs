//! Footers of packs: how a node that never saw a pack learns where its chunks lie.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt as _;

use super::{Fetcher, REMOTE_TRIES, Scope};
use crate::blob::{BlobError, pack_key};
use crate::blocking::blocking;
use crate::ids::PackId;
use crate::pack::{self, PackError, PackRef};

/// Footers read at the same time.
const FOOTERS_AT_ONCE: usize = 8;

/// Why a pack's footer could not be read.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum FooterError {
    #[error(transparent)]
    Blob(#[from] BlobError),
    #[error(transparent)]
    Pack(#[from] PackError),
}

impl Fetcher {
    /// Reads the footers of a scope's packs that this node has not read yet. Returns what failed.
    pub(crate) async fn load_footers(self: &Arc<Self>, scope: &Arc<Scope>) -> Vec<(PackId, FooterError)> {
        let packs = scope.packs();
        if packs.footers_known() {
            return Vec::new();
        }
        let (fetcher, named) = (Arc::clone(self), Arc::clone(&packs));
        let unknown = blocking(move || {
            let unknown = named.refs.iter().filter(|pack| !fetcher.cache.is_registered(&pack.id));
            unknown.copied().collect::<Vec<PackRef>>()
        })
        .await;
        let failures: Vec<(PackId, FooterError)> = futures::stream::iter(unknown)
            .map(|pack| {
                let fetcher = Arc::clone(self);
                let (flight, _) = self.footers.join(pack.id, || async move { fetcher.load_footer(pack).await });
                async move { flight.await.err().map(|error| (pack.id, error)) }
            })
            .buffer_unordered(FOOTERS_AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await;
        if failures.is_empty() {
            packs.note_footers_known();
        }
        failures
    }

    async fn load_footer(self: Arc<Self>, pack: PackRef) -> Result<(), FooterError> {
        let fetcher = Arc::clone(&self);
        let here = blocking(move || {
            if fetcher.cache.is_registered(&pack.id) {
                return true;
            }
            match fetcher.staging.footer(&pack.id) {
                Ok(Some((named, frames))) if named == pack => {
                    fetcher.cache.register_pack(&pack, &frames);
                    true
                }
                Ok(_) => false,
                Err(error) => {
                    tracing::warn!(pack = %pack.id, %error, "the footer of a staged pack cannot be read");
                    false
                }
            }
        });
        if here.await {
            return Ok(());
        }
        pack::check_sizes(&pack)?;
        let _slot = self.remote_slots.acquire().await.expect("never closed");
        let start = pack.size_bytes - pack::tail_len(&pack);
        let mut tries = 0;
        let frames = loop {
            let tail = self.blobs.get_range(&pack_key(&pack.id), start..pack.size_bytes).await?;
            tries += 1;
            match pack::parse_tail(&pack, &tail) {
                Ok(frames) => break frames,
                Err(error) => {
                    tracing::warn!(pack = %pack.id, %error, "the footer of a pack is no good");
                    self.counters.bad_copies.fetch_add(1, Ordering::Relaxed);
                    if tries >= REMOTE_TRIES {
                        return Err(error.into());
                    }
                }
            }
        };
        let fetcher = Arc::clone(&self);
        blocking(move || {
            fetcher.cache.register_pack(&pack, &frames);
            fetcher.cache.mark_remote(&pack.id);
        })
        .await;
        Ok(())
    }
}
