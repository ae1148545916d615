//! Sealed packs that are not in the blob store yet: the unit of durability on this node.
//!
//! ```text
//!   staging/tmp-<n>            being written, or written and synced but not published: nobody refers to it
//!   staging/<pack id>.pack     published: whole, durable, may be referred to
//!
//!   create ──> write frames ──> finish: tail, fsync ──> publish: rename all, fsync directory ──> upload ──> remove
//!     └──────────── dropped: the file is removed ───────┘
//! ```
//!
//! Invariants:
//! - a `.pack` file is complete and on disk: it gets its name only after its content was synced;
//! - whoever refers to a staged pack that another ingest wrote *borrows* it first, under the same lock that decides about
//!   dropping; a borrowed pack is never dropped as unreferenced in the life of this process, so a reference that is not
//!   committed yet cannot lose its pack.
//!
//! Crash before publish: temporary files are removed at the next open. Crash after publish but before the catalog's commit:
//! the pack is an orphan; [`Staging::drop_unreferenced`] removes those, of the packs that were there at open.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::ids::PackId;
use crate::pack::{self, Content, FramePlace, PackBuilder, PackError, PackFrame, PackRef};

const SUFFIX: &str = ".pack";
const TEMPORARY: &str = "tmp-";

/// A staging file operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The file system said no.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The frame does not go into a pack, or the file is none.
    #[error("{path}: {source}")]
    Pack {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: PackError,
    },
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StagingError {
    let path = path.to_owned();
    move |source| StagingError::Io { what, path, source }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    found_at_open: bool,
    borrowed: bool,
}

/// The staging directory. Every method but [`Staging::borrow`] and the lookups blocks: call it on a blocking thread.
pub struct Staging {
    dir: PathBuf,
    packs: Mutex<HashMap<PackId, Entry>>,
    next_temporary: AtomicU64,
}

impl Staging {
    /// Opens the directory, creating it if need be, and removes what was never published.
    pub fn open(dir: &Path) -> Result<Self, StagingError> {
        fs::create_dir_all(dir).map_err(failed("create", dir))?;
        let mut packs = HashMap::new();
        for file in fs::read_dir(dir).map_err(failed("list", dir))? {
            let path = file.map_err(failed("list", dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(TEMPORARY) {
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            } else if let Some(pack) = name.strip_suffix(SUFFIX).and_then(|id| id.parse().ok()) {
                packs.insert(pack, Entry { found_at_open: true, borrowed: false });
            } else {
                tracing::warn!(path = %path.display(), "not a staged pack: left alone");
            }
        }
        // The directory itself may be new: make its own name durable.
        if let Some(parent) = dir.parent() {
            sync_dir(parent)?;
        }
        Ok(Self { dir: dir.into(), packs: Mutex::new(packs), next_temporary: AtomicU64::new(0) })
    }

    fn path(&self, pack: &PackId) -> PathBuf {
        self.dir.join(format!("{pack}{SUFFIX}"))
    }

    /// All published packs.
    pub fn packs(&self) -> Vec<PackId> {
        self.packs.lock().keys().copied().collect()
    }

    /// How many packs are published.
    pub fn len(&self) -> u64 {
        self.packs.lock().len() as u64
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.packs.lock().is_empty()
    }

    /// Whether the pack is published here.
    pub fn contains(&self, pack: &PackId) -> bool {
        self.packs.lock().contains_key(pack)
    }

    /// Announces a reference to a published pack; false when it is not (or no longer) here.
    pub fn borrow(&self, pack: &PackId) -> bool {
        match self.packs.lock().get_mut(pack) {
            Some(entry) => {
                entry.borrowed = true;
                true
            }
            None => false,
        }
    }

    /// Starts a pack. `nonce` must be random.
    pub fn create(&self, nonce: [u8; 16]) -> Result<StagedPackWriter, StagingError> {
        let path = self.dir.join(format!("{TEMPORARY}{}", self.next_temporary.fetch_add(1, Ordering::Relaxed)));
        let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed("create", &path))?;
        let temporary = Temporary(path);
        let builder = PackBuilder::new(nonce);
        let header = builder.header().to_vec();
        let mut writer = StagedPackWriter { file, temporary, builder };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Gives finished packs their names, durably. After an error some may have theirs: orphans, dropped at a later start.
    pub fn publish(&self, finished: &mut Vec<FinishedPack>) -> Result<(), StagingError> {
        if finished.is_empty() {
            return Ok(());
        }
        for pack in finished.iter() {
            let (from, to) = (&pack.temporary.0, self.path(&pack.pack.id));
            fs::rename(from, &to).map_err(failed("rename", from))?;
        }
        sync_dir(&self.dir)?;
        let mut packs = self.packs.lock();
        for pack in finished.drain(..) {
            // The same content was staged before: whoever staged it may refer to it.
            let known = packs.contains_key(&pack.pack.id);
            packs.insert(pack.pack.id, Entry { found_at_open: false, borrowed: known });
        }
        Ok(())
    }

    /// A frame of a published pack; `None` when the pack is not here.
    pub fn read(&self, place: &FramePlace) -> Result<Option<Bytes>, StagingError> {
        let path = self.path(&place.pack);
        let Some(file) = self.open_pack(&path, &place.pack)? else { return Ok(None) };
        let mut bytes = vec![0; place.len as usize];
        file.read_exact_at(&mut bytes, place.offset).map_err(failed("read", &path))?;
        Ok(Some(bytes.into()))
    }

    /// A whole published pack; `None` when it is not here.
    pub fn read_all(&self, pack: &PackId) -> Result<Option<Bytes>, StagingError> {
        let path = self.path(pack);
        let Some(file) = self.open_pack(&path, pack)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(pack::MAX_PACK_BYTES + 1).read_to_end(&mut bytes).map_err(failed("read", &path))?;
        Ok(Some(bytes.into()))
    }

    /// Name and footer of a published pack; `None` when it is not here.
    pub fn footer(&self, pack: &PackId) -> Result<Option<(PackRef, Vec<PackFrame>)>, StagingError> {
        let path = self.path(pack);
        let Some(file) = self.open_pack(&path, pack)? else { return Ok(None) };
        let bad = |source| StagingError::Pack { path: path.clone(), source };
        let size = file.metadata().map_err(failed("stat", &path))?.len();
        let mut end = [0; pack::PEEK_BYTES as usize];
        let start = size.checked_sub(pack::PEEK_BYTES).ok_or_else(|| bad(PackError::NotAPack))?;
        file.read_exact_at(&mut end, start).map_err(failed("read", &path))?;
        let named = pack::peek(*pack, &end).map_err(bad)?;
        if named.size_bytes != size {
            return Err(bad(PackError::Layout("the file has another length")));
        }
        let tail_len = pack::tail_len(&named);
        let mut tail = vec![0; usize::try_from(tail_len).expect("peek caps the count")];
        file.read_exact_at(&mut tail, size - tail_len).map_err(failed("read", &path))?;
        let frames = pack::parse_tail(&named, &tail).map_err(bad)?;
        Ok(Some((named, frames)))
    }

    fn open_pack(&self, path: &Path, pack: &PackId) -> Result<Option<File>, StagingError> {
        if !self.contains(pack) {
            return Ok(None);
        }
        match File::open(path) {
            Ok(file) => Ok(Some(file)),
            // Uploaded and removed since we looked.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("open", path)(error)),
        }
    }

    /// Removes a pack that is in the blob store now. Safe to repeat.
    pub fn remove(&self, pack: &PackId) -> Result<(), StagingError> {
        self.packs.lock().remove(pack);
        self.unlink(pack)
    }

    fn unlink(&self, pack: &PackId) -> Result<(), StagingError> {
        let path = self.path(pack);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Removes the packs that an earlier process published and nobody refers to: not in `keep`, not borrowed since.
    /// `forget` is told of each pack after it can no longer be borrowed and before its file goes. Returns how many went.
    pub fn drop_unreferenced(&self, keep: &HashSet<PackId>, forget: impl Fn(&PackId)) -> Result<u64, StagingError> {
        let unreferenced = |id: &PackId, entry: &Entry| entry.found_at_open && !entry.borrowed && !keep.contains(id);
        self.drop_where(unreferenced, forget)
    }

    /// Removes packs of an ingest whose snapshot was not committed, unless somebody borrowed them since.
    pub fn discard(&self, packs: &[PackId], forget: impl Fn(&PackId)) -> Result<u64, StagingError> {
        self.drop_where(|id, entry| !entry.found_at_open && !entry.borrowed && packs.contains(id), forget)
    }

    fn drop_where(
        &self,
        condemned: impl Fn(&PackId, &Entry) -> bool,
        forget: impl Fn(&PackId),
    ) -> Result<u64, StagingError> {
        let gone: Vec<PackId> =
            self.packs.lock().extract_if(|id, entry| condemned(id, entry)).map(|(id, _)| id).collect();
        for pack in &gone {
            forget(pack);
            self.unlink(pack)?;
        }
        Ok(gone.len() as u64)
    }

    /// Changes a published pack's bytes, as a bad disk would.
    #[cfg(test)]
    pub(crate) fn tamper(&self, pack: &PackId, change: impl FnOnce(&mut Vec<u8>)) {
        let path = self.path(pack);
        let mut bytes = fs::read(&path).expect("tampering with a pack that is staged");
        change(&mut bytes);
        fs::write(path, bytes).expect("write");
    }
}

fn sync_dir(dir: &Path) -> Result<(), StagingError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed("sync", dir))
}

/// A file that is removed unless it was renamed away.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %self.0.display(), %error, "a temporary pack stays until the next start");
            }
            _ => {}
        }
    }
}

/// A pack being written. Dropped, it leaves nothing.
pub struct StagedPackWriter {
    file: File,
    temporary: Temporary,
    builder: PackBuilder,
}

impl StagedPackWriter {
    /// Writes a frame that holds this. After an error the pack must be dropped.
    pub fn append(&mut self, frame: &[u8], content: Content) -> Result<(), StagingError> {
        let bad = |source| StagingError::Pack { path: self.temporary.0.clone(), source };
        self.builder.append(frame, content).map_err(bad)?;
        self.write(frame)
    }

    /// Bytes so far.
    pub fn len(&self) -> u64 {
        self.builder.len()
    }

    /// Whether no frame is in it.
    pub fn is_empty(&self) -> bool {
        self.builder.is_empty()
    }

    /// Whether one more frame of this length, with so many chunks, fits.
    pub fn has_room(&self, frame_bytes: usize, chunks: usize) -> bool {
        self.builder.has_room(frame_bytes, chunks)
    }

    /// Completes the pack and syncs its content.
    pub fn finish(mut self) -> Result<FinishedPack, StagingError> {
        let (pack, frames, tail) = self.builder.finish();
        self.file.write_all(&tail).map_err(failed("write", &self.temporary.0))?;
        self.file.sync_data().map_err(failed("sync", &self.temporary.0))?;
        Ok(FinishedPack { pack, frames, temporary: self.temporary })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StagingError> {
        self.file.write_all(bytes).map_err(failed("write", &self.temporary.0))
    }
}

/// A complete pack on disk that nobody knows yet. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct FinishedPack {
    /// Its name.
    pub pack: PackRef,
    /// Where its chunks lie.
    pub frames: Vec<PackFrame>,
    temporary: Temporary,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ShortId;

    fn staged(staging: &Staging, content: &[u8]) -> FinishedPack {
        let mut writer = staging.create([1; 16]).expect("create");
        writer.append(content, Content::single(ShortId([1; 16]), 1)).expect("append");
        writer.finish().expect("finish")
    }

    fn files(dir: &Path) -> usize {
        fs::read_dir(dir).expect("list").count()
    }

    #[test]
    fn a_published_pack_survives_and_an_unpublished_one_leaves_nothing() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let dir = dir.path().join("staging");
        let staging = Staging::open(&dir).expect("open");
        let finished = staged(&staging, b"published");
        let (pack, frames) = (finished.pack, finished.frames.clone());
        assert!(!staging.contains(&pack.id));
        staging.publish(&mut vec![finished]).expect("publish");
        let forgotten = staged(&staging, b"never published");
        std::mem::forget(forgotten); // as a crash would
        drop(staged(&staging, b"given up"));
        assert_eq!(files(&dir), 2);
        drop(staging);

        let staging = Staging::open(&dir).expect("open again");
        assert_eq!(staging.packs(), [pack.id]);
        assert_eq!(files(&dir), 1, "the temporary file is gone");
        assert_eq!(staging.footer(&pack.id).expect("footer"), Some((pack, frames.clone())));
        let read = staging.read(&frames[0].place(&pack.id)).expect("read");
        assert_eq!(read.as_deref(), Some(b"published".as_slice()));
        assert!(pack::is_whole(&pack.id, &staging.read_all(&pack.id).expect("read").expect("there")));
        staging.remove(&pack.id).expect("remove");
        staging.remove(&pack.id).expect("remove again");
        assert_eq!(staging.read(&frames[0].place(&pack.id)).expect("gone"), None);
        assert_eq!(files(&dir), 0);
    }

    #[test]
    fn only_old_unborrowed_unreferenced_packs_are_dropped() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let staging = Staging::open(dir.path()).expect("open");
        let mut packs: Vec<_> = [b"kept", b"lent", b"lost"].iter().map(|content| staged(&staging, *content)).collect();
        let ids: Vec<PackId> = packs.iter().map(|pack| pack.pack.id).collect();
        staging.publish(&mut packs).expect("publish");
        assert_eq!(staging.drop_unreferenced(&HashSet::new(), |_| {}).expect("drop"), 0, "all were made just now");
        drop(staging);

        let staging = Staging::open(dir.path()).expect("open again");
        let mut new = vec![staged(&staging, b"new")];
        staging.publish(&mut new).expect("publish");
        assert!(staging.borrow(&ids[1]));
        let forgotten = Mutex::new(Vec::new());
        let dropped = staging.drop_unreferenced(&HashSet::from([ids[0]]), |pack| forgotten.lock().push(*pack));
        assert_eq!(dropped.expect("drop"), 1);
        assert_eq!(*forgotten.lock(), [ids[2]]);
        assert_eq!(staging.len(), 3);
        assert!(!staging.borrow(&ids[2]));
    }

    #[test]
    fn discarding_spares_what_others_borrowed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let staging = Staging::open(dir.path()).expect("open");
        let mut packs: Vec<_> = [b"mine", b"lent"].iter().map(|content| staged(&staging, *content)).collect();
        let ids: Vec<PackId> = packs.iter().map(|pack| pack.pack.id).collect();
        staging.publish(&mut packs).expect("publish");
        assert!(staging.borrow(&ids[1]));
        assert_eq!(staging.discard(&ids, |_| {}).expect("discard"), 1);
        assert_eq!(staging.packs(), [ids[1]]);
        // The same content again: the earlier owner may still refer to it, so it counts as borrowed.
        let mut again = vec![staged(&staging, b"lent")];
        staging.publish(&mut again).expect("publish");
        assert_eq!(staging.discard(&ids, |_| {}).expect("discard"), 0);
    }

    #[test]
    fn a_file_that_is_no_pack_is_an_error_not_a_panic() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let staging = Staging::open(dir.path()).expect("open");
        let mut packs = vec![staged(&staging, b"content")];
        let id = packs[0].pack.id;
        staging.publish(&mut packs).expect("publish");
        for len in [0, 10, 100] {
            staging.tamper(&id, |bytes| bytes.truncate(len));
            assert!(staging.footer(&id).is_err(), "{len} bytes");
            assert!(staging.read(&FramePlace { pack: id, offset: 24, len: 100 }).is_err());
        }
    }
}
