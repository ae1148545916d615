//! Whose bucket it is.
//!
//! ```text
//!   owner     "snapyard-owner 1 <deployment id, 32 hex> <checksum, 16 hex>\n"
//! ```
//!
//! A collector deletes what its own catalog does not know. With two catalogs on one bucket, each would delete the other's
//! snapshots. So the bucket says whose it is; a catalog has a random id, and whoever finds another's refuses.
//!
//! `checksum` is the first 8 bytes of the BLAKE3 of the id. Crash: the object is there or not; who comes next claims it or
//! finds it. Two that claim at once: one object stays, both read it back, one of them refuses.

use bytes::Bytes;

use super::GcError;
use crate::blob::{BlobError, BlobStore, PutMode};
use crate::catalog::Catalog;

/// The key of the object.
pub const OWNER_KEY: &str = "owner";

const MAGIC: &str = "snapyard-owner";
const VERSION: &str = "1";
const MAX_BYTES: u64 = 1024;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encode(id: &str) -> Bytes {
    format!("{MAGIC} {VERSION} {id} {}\n", checksum(id)).into()
}

fn checksum(id: &str) -> String {
    hex(&blake3::hash(id.as_bytes()).as_bytes()[..8])
}

fn decode(bytes: &[u8]) -> Result<String, GcError> {
    let unreadable = |reason: &str| GcError::OwnerUnreadable { key: OWNER_KEY, reason: reason.into() };
    let text = std::str::from_utf8(bytes).map_err(|_| unreadable("it is not text"))?;
    let line = text.strip_suffix('\n').ok_or_else(|| unreadable("it is cut"))?;
    let fields: Vec<&str> = line.split(' ').collect();
    let [MAGIC, version, id, sum] = fields[..] else {
        return Err(unreadable("it is another program's"));
    };
    if version != VERSION {
        return Err(unreadable("it was written by a later version"));
    }
    if sum != checksum(id) {
        return Err(unreadable("its checksum does not match"));
    }
    Ok(id.to_owned())
}

/// Whether the bucket is this catalog's. `false`: it is nobody's. Writes nothing.
pub async fn is_ours(catalog: &Catalog, blobs: &dyn BlobStore) -> Result<bool, GcError> {
    match blobs.get(OWNER_KEY, MAX_BYTES).await {
        Ok(bytes) => {
            let found = decode(&bytes)?;
            // Asked for after the object: whoever claimed the bucket for this catalog had given it its id before.
            let own = catalog.known_deployment_id().await?.map(|id| hex(&id));
            match own {
                Some(own) if own == found => Ok(true),
                own => Err(GcError::ForeignBucket { own: own.unwrap_or_else(|| "a new one".into()), found }),
            }
        }
        Err(BlobError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes the bucket this catalog's, unless it is somebody else's. To be done before anything is uploaded to it.
pub async fn claim(catalog: &Catalog, blobs: &dyn BlobStore) -> Result<(), GcError> {
    if is_ours(catalog, blobs).await? {
        return Ok(());
    }
    let own = hex(&catalog.deployment_id().await?);
    match blobs.put(OWNER_KEY, encode(&own), PutMode::IfAbsent).await {
        Ok(_) => {}
        Err(error) if error.may_have_happened() => {}
        Err(error) => return Err(error.into()),
    }
    // A store that cannot put conditionally may have overwritten: what counts is what is there now.
    if is_ours(catalog, blobs).await? { Ok(()) } else { Err(BlobError::NotFound { key: OWNER_KEY.into() }.into()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::blob::MemoryBlobs;
    use crate::catalog::memory::MemoryKv;
    use crate::clock::ManualClock;

    async fn catalog() -> Arc<Catalog> {
        Catalog::open(Arc::new(MemoryKv::new()), Arc::new(ManualClock::new(1))).await.expect("opens")
    }

    #[tokio::test]
    async fn a_bucket_has_one_owner() {
        let (blobs, ours, theirs) = (MemoryBlobs::new(), catalog().await, catalog().await);
        assert!(!is_ours(&ours, &blobs).await.expect("reads"));
        claim(&ours, &blobs).await.expect("claims");
        claim(&ours, &blobs).await.expect("has it");
        for refused in
            [claim(&theirs, &blobs).await.expect_err("taken"), is_ours(&theirs, &blobs).await.expect_err("taken")]
        {
            assert!(matches!(refused, GcError::ForeignBucket { .. }), "{refused}");
        }
        assert!(is_ours(&ours, &blobs).await.expect("untouched"));
    }

    #[tokio::test]
    async fn damage_is_not_taken_for_somebody_else() {
        let (blobs, ours) = (MemoryBlobs::new(), catalog().await);
        claim(&ours, &blobs).await.expect("claims");
        let whole = blobs.get(OWNER_KEY, MAX_BYTES).await.expect("there");
        for at in 0..whole.len() {
            let mut damaged = whole.to_vec();
            damaged[at] ^= 1;
            for bytes in [damaged, whole[..at].to_vec()] {
                blobs.put(OWNER_KEY, bytes.into(), PutMode::Overwrite).await.expect("put");
                let error = claim(&ours, &blobs).await.expect_err("damaged");
                assert!(matches!(error, GcError::OwnerUnreadable { .. }), "byte {at}: {error}");
            }
        }
    }

    /// The stored form is a promise to every bucket there is.
    #[test]
    fn golden_owner() {
        let id = "000102030405060708090a0b0c0d0e0f";
        assert_eq!(encode(id), format!("snapyard-owner 1 {id} {}\n", checksum(id)));
        assert_eq!(decode(&encode(id)).expect("reads"), id);
    }
}
