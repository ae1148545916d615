//! From this node to the blob store: packs first, the manifest last.
//!
//! ```text
//!   for each pack of the manifest, a few at a time:
//!     known to be there ────────────────────────────────> nothing to do
//!     staged here ──> whole? ──> PUT ──> its frames into the cache, noted as there ──> staged file removed
//!     neither ──> HEAD: there ──> noted as there
//!                       not there ──> error, nothing else can be done
//!   then the manifest ──> PUT
//! ```
//!
//! Invariants:
//! - a manifest in the blob store names only packs that are there: it is written after all of them;
//! - a staged file is removed only after the store answered that it has the whole pack;
//! - a pack is checked against its id before it leaves;
//! - until then the staged file is the node's copy, which nothing evicts; afterwards the cache has one, which it may.
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
use crate::ids::SnapshotId;
use crate::manifest::Manifest;
use crate::pack::{self, PackRef};

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
pub(crate) enum Uploaded {
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

pub(crate) async fn upload_pack(fetcher: Arc<Fetcher>, pack: PackRef) -> Result<Uploaded, StoreError> {
    let look = Arc::clone(&fetcher);
    let staged = blocking(move || -> Result<Staged, StoreError> {
        if look.cache.is_remote(&pack.id) {
            // It may be staged still, when the last run ended between the two.
            look.staging.remove(&pack.id)?;
            return Ok(Staged::Away);
        }
        match look.staging.read_all(&pack.id)? {
            None => Ok(Staged::Nowhere),
            Some(bytes) if pack::is_whole(&pack.id, &bytes) => Ok(Staged::Here(bytes)),
            Some(_) => Err(StoreError::PackDamaged { pack: pack.id }),
        }
    });
    let key = pack_key(&pack.id);
    let (uploaded, bytes) = match staged.await? {
        Staged::Away => return Ok(Uploaded::Before),
        Staged::Here(bytes) => {
            fetcher.blobs.put(&key, bytes.clone(), PutMode::Overwrite).await?;
            (Uploaded::Now(bytes.len() as u64), Some(bytes))
        }
        Staged::Nowhere => match fetcher.blobs.head(&key).await {
            Ok(len) if len == pack.size_bytes => (Uploaded::Before, None),
            Ok(_) | Err(BlobError::NotFound { .. }) => return Err(StoreError::PackMissing { pack: pack.id }),
            Err(error) => return Err(error.into()),
        },
    };
    blocking(move || {
        if let Some(bytes) = bytes {
            keep(&fetcher, &pack, &bytes);
        }
        fetcher.cache.mark_remote(&pack.id);
        fetcher.staging.remove(&pack.id)
    })
    .await?;
    Ok(uploaded)
}

/// What this node has of a pack.
enum Staged {
    /// It is in the blob store.
    Away,
    /// The whole of it.
    Here(Bytes),
    Nowhere,
}

/// Puts a pack's frames into the cache. Blocks.
fn keep(fetcher: &Fetcher, pack: &PackRef, bytes: &Bytes) {
    let tail = bytes.len().saturating_sub(usize::try_from(pack::tail_len(pack)).unwrap_or(usize::MAX));
    match pack::parse_tail(pack, &bytes[tail..]) {
        Ok(frames) => {
            fetcher.cache.register_pack(pack, &frames);
            for frame in &frames {
                let start = usize::try_from(frame.offset).expect("a pack is in memory");
                fetcher.cache.put(&frame.place(&pack.id), &bytes[start..start + frame.len as usize]);
            }
        }
        // Its bytes are the right ones, so the manifest says something else about it; readers will find out.
        Err(error) => tracing::error!(pack = %pack.id, %error, "an uploaded pack is not as its manifest says"),
    }
}
