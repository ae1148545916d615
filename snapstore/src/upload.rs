//! From this node to the blob store: packs first, the manifest last.
//!
//! ```text
//!   for each pack of the manifest, a few at a time:
//!     known to be there ────────────────────────────────> nothing to do
//!     staged here ──> whole? ──> PUT ──> noted as there ──> staged file removed
//!     neither ──> HEAD: there ──> noted as there
//!                       not there ──> error, nothing else can be done
//!   then the manifest ──> PUT
//! ```
//!
//! Invariants:
//! - a manifest in the blob store names only packs that are there: it is written after all of them;
//! - a staged file is removed only after the store answered that it has the whole pack;
//! - a pack is checked against its id before it leaves, and repaired from the cache if it was damaged meanwhile: both hold
//!   the same frames, and the id says whether the repair is exact.
//!
//! Crash or failure at any point: run it again. Packs that are there are found there; a PUT that may have happened is
//! repeated, content and key being the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::StreamExt as _;

use crate::blob::{BlobError, PutMode, manifest_key, pack_key};
use crate::blocking::blocking;
use crate::error::StoreError;
use crate::fetch::Fetcher;
use crate::ids::{PackId, SnapshotId};
use crate::manifest::Manifest;
use crate::pack::{self, PackBuilder, PackRef};

/// Packs uploaded at the same time: bounds the memory to that many packs.
const PACKS_AT_ONCE: usize = 3;

/// What an upload did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UploadReport {
    /// Packs written now.
    pub packs_uploaded: u64,
    /// Packs that were there already.
    pub packs_already_there: u64,
    /// Bytes written now, the manifest included.
    pub bytes_written: u64,
}

/// What became of one pack; the number is the bytes written.
enum Uploaded {
    Now(u64),
    Before,
}

/// Uploads what is missing. The caller keeps two uploads from running at once.
pub(crate) async fn upload(
    fetcher: &Arc<Fetcher>,
    id: &SnapshotId,
    manifest: &Manifest,
) -> Result<UploadReport, StoreError> {
    let mut report = UploadReport::default();
    let mut failed = None;
    let stop = AtomicBool::new(false);
    let mut uploads = std::pin::pin!(
        futures::stream::iter(manifest.packs.clone())
            .take_while(|_| std::future::ready(!stop.load(Ordering::Relaxed)))
            .map(|pack| upload_pack(Arc::clone(fetcher), pack))
            .buffer_unordered(PACKS_AT_ONCE)
    );
    while let Some(uploaded) = uploads.next().await {
        match uploaded {
            Ok(Uploaded::Now(bytes)) => {
                report.packs_uploaded += 1;
                report.bytes_written += bytes;
            }
            Ok(Uploaded::Before) => report.packs_already_there += 1,
            // Start no more, but let those under way end: what they sent need not be sent again.
            Err(error) => {
                stop.store(true, Ordering::Relaxed);
                failed.get_or_insert(error);
            }
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let encoded = manifest.encode();
    report.bytes_written += encoded.len() as u64;
    fetcher.blobs.put(&manifest_key(id), encoded, PutMode::Overwrite).await?;
    Ok(report)
}

async fn upload_pack(fetcher: Arc<Fetcher>, pack: PackRef) -> Result<Uploaded, StoreError> {
    let look = Arc::clone(&fetcher);
    let staged = blocking(move || -> Result<Option<Option<Bytes>>, StoreError> {
        if look.cache.is_remote(&pack.id) {
            // It may be staged still, when the last run ended between the two.
            look.staging.remove(&pack.id)?;
            return Ok(Some(None));
        }
        match look.staging.read_all(&pack.id)? {
            None => Ok(None),
            Some(bytes) if pack::is_whole(&pack.id, &bytes) => Ok(Some(Some(bytes))),
            Some(bytes) => repair(&look, &pack.id, &bytes).map(|bytes| Some(Some(bytes))),
        }
    });
    let key = pack_key(&pack.id);
    let uploaded = match staged.await? {
        Some(None) => return Ok(Uploaded::Before),
        Some(Some(bytes)) => {
            let len = bytes.len() as u64;
            fetcher.blobs.put(&key, bytes, PutMode::Overwrite).await?;
            Uploaded::Now(len)
        }
        None => match fetcher.blobs.head(&key).await {
            Ok(len) if len == pack.size_bytes => Uploaded::Before,
            Ok(_) | Err(BlobError::NotFound { .. }) => return Err(StoreError::PackMissing { pack: pack.id }),
            Err(error) => return Err(error.into()),
        },
    };
    blocking(move || {
        fetcher.cache.mark_remote(&pack.id);
        fetcher.staging.remove(&pack.id)
    })
    .await?;
    Ok(uploaded)
}

/// Puts a damaged pack together again from the frames in the cache. Blocks.
fn repair(fetcher: &Fetcher, id: &PackId, damaged: &[u8]) -> Result<Bytes, StoreError> {
    let lost = || StoreError::PackDamaged { pack: *id };
    // Where the frames lie is known from the time when the pack was sealed.
    let (named, entries) = fetcher.cache.footer(id).ok_or_else(lost)?;
    let mut bytes = PackBuilder::HEADER.to_vec();
    let mut builder = PackBuilder::new();
    for entry in &entries {
        let start = usize::try_from(entry.offset).map_err(|_| lost())?;
        let staged = start.checked_add(entry.len as usize).and_then(|end| damaged.get(start..end));
        let frame = match fetcher.cache.get(&entry.chunk) {
            Some(frame) if frame.len() == entry.len as usize => frame,
            _ => Bytes::copy_from_slice(staged.ok_or_else(lost)?),
        };
        builder.append(entry.chunk, &frame).map_err(|_| lost())?;
        bytes.extend_from_slice(&frame);
    }
    let (pack, _, tail) = builder.finish();
    bytes.extend_from_slice(&tail);
    if pack.id != *id {
        return Err(lost());
    }
    tracing::warn!(pack = %id, chunks = named.chunks, "a damaged staged pack was repaired from the cache");
    fetcher.counters.bad_copies.fetch_add(1, Ordering::Relaxed);
    Ok(bytes.into())
}
