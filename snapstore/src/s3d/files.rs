//! Objects as files. Everything here blocks.
//!
//! ```text
//!   <dir>/buckets/<bucket>/<path of the key>     an object's bytes, nothing else
//!   <dir>/tmp/<n>                                objects being written
//! ```
//!
//! A write goes to a temporary file, which is synced, then renamed (or, if nothing may be replaced, linked) to its place;
//! then the directory is synced, and every directory above it that this process has not yet seen to be durable. Only then
//! is it answered. So at any instant an object is there as a whole, in its old or its new form, or not at all. A crash
//! leaves at most temporary files, which the next opening removes. Objects are never changed in place: whoever has one open
//! reads it to the end whatever happens to its name.
//!
//! Directories are never removed, so nothing has to be made again under a writer's feet.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::paths;

/// A directory of objects.
#[derive(Debug)]
pub(super) struct Files {
    buckets: PathBuf,
    temporary: PathBuf,
    next_temporary: AtomicU64,
    /// Directories whose own entry in their parent is known to be on disk.
    durable: Mutex<HashSet<PathBuf>>,
}

/// What there is to know about an object besides its bytes.
#[derive(Debug, Clone)]
pub(super) struct Meta {
    pub(super) len: u64,
    pub(super) modified: SystemTime,
    pub(super) etag: String,
}

impl Meta {
    /// The file's identity, size and time of writing: different for every write of a key, the same until the next.
    fn new(stat: &fs::Metadata) -> io::Result<Self> {
        let etag = format!("{:x}-{:x}-{:x}{:08x}", stat.ino(), stat.len(), stat.mtime(), stat.mtime_nsec());
        Ok(Self { len: stat.len(), modified: stat.modified()?, etag })
    }
}

/// Why an object operation failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FilesError {
    #[error("no such bucket")]
    NoBucket,
    #[error("the object exists")]
    Exists,
    #[error("the key has a part of more than {} bytes", paths::MAX_PART_LEN)]
    KeyTooLong,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<paths::PartTooLong> for FilesError {
    fn from(_: paths::PartTooLong) -> Self {
        Self::KeyTooLong
    }
}

/// A file being written; removed when dropped.
#[derive(Debug)]
pub(super) struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.0.display(), %error, "a temporary object stays until the next start");
        }
    }
}

/// One step of a listing: an object, or a common prefix that stands for those below it.
#[derive(Debug)]
pub(super) enum Listed {
    Object(String, Meta),
    Prefix(String),
}

impl Listed {
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Object(key, _) | Self::Prefix(key) => key,
        }
    }
}

/// What to list.
#[derive(Debug, Clone, Default)]
pub(super) struct Query {
    pub(super) prefix: String,
    /// Only what comes after this in byte order.
    pub(super) after: String,
    /// Stand for everything under a further slash by one prefix.
    pub(super) by_directory: bool,
    /// How many steps at most.
    pub(super) limit: usize,
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn found<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(thing) => Ok(Some(thing)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl Files {
    /// Prepares the directory, and clears away what writes under way at a crash left.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let (buckets, temporary) = (dir.join("buckets"), dir.join("tmp"));
        fs::create_dir_all(&buckets)?;
        fs::create_dir_all(&temporary)?;
        for entry in fs::read_dir(&temporary)? {
            fs::remove_file(entry?.path())?;
        }
        sync_dir(dir)?;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_dir(parent)?;
        }
        let durable = Mutex::new(HashSet::from([buckets.clone()]));
        Ok(Self { buckets, temporary, next_temporary: AtomicU64::new(0), durable })
    }

    /// Makes a bucket. `false`: it was there.
    pub(super) fn create_bucket(&self, bucket: &str) -> io::Result<bool> {
        let dir = self.buckets.join(bucket);
        let new = match fs::create_dir(&dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        self.make_durable(&dir)?;
        Ok(new)
    }

    /// The bucket's directory.
    pub(super) fn bucket(&self, bucket: &str) -> Result<PathBuf, FilesError> {
        let dir = self.buckets.join(bucket);
        if dir.is_dir() { Ok(dir) } else { Err(FilesError::NoBucket) }
    }

    fn place(&self, bucket: &str, key: &str) -> Result<PathBuf, FilesError> {
        Ok(self.bucket(bucket)?.join(paths::path_of(key)?))
    }

    /// An empty temporary file to write an object into.
    pub(super) fn temporary(&self) -> io::Result<(File, Temporary)> {
        let path = self.temporary.join(self.next_temporary.fetch_add(1, Ordering::Relaxed).to_string());
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        Ok((file, Temporary(path)))
    }

    /// Puts a written file in the object's place, durably. With `only_new`, an object that is there stays and is the error.
    pub(super) fn commit(
        &self,
        file: &File,
        temporary: Temporary,
        bucket: &str,
        key: &str,
        only_new: bool,
    ) -> Result<Meta, FilesError> {
        file.sync_all()?;
        let place = self.place(bucket, key)?;
        let dir = place.parent().expect("an object lies in its bucket");
        self.make_durable(dir)?;
        if only_new {
            fs::hard_link(&temporary.0, &place).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => FilesError::Exists,
                _ => error.into(),
            })?;
        } else {
            fs::rename(&temporary.0, &place)?;
        }
        drop(temporary);
        sync_dir(dir)?;
        Ok(Meta::new(&file.metadata()?)?)
    }

    /// Makes `dir` if need be, and sees to it that it survives a crash: it and all above it, up to the buckets.
    fn make_durable(&self, dir: &Path) -> io::Result<()> {
        if self.durable.lock().contains(dir) {
            return Ok(());
        }
        let parent = dir.parent().expect("the buckets' directory is known to be durable");
        self.make_durable(parent)?;
        match fs::create_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        sync_dir(parent)?;
        self.durable.lock().insert(dir.to_owned());
        Ok(())
    }

    /// Opens an object; `None` if there is none.
    pub(super) fn read(&self, bucket: &str, key: &str) -> Result<Option<(File, Meta)>, FilesError> {
        let Some(file) = found(File::open(self.place(bucket, key)?))? else { return Ok(None) };
        let meta = Meta::new(&file.metadata()?)?;
        Ok(Some((file, meta)))
    }

    /// Removes an object, durably, if there is one.
    pub(super) fn delete(&self, bucket: &str, key: &str) -> Result<(), FilesError> {
        let place = self.place(bucket, key)?;
        let dir = place.parent().expect("an object lies in its bucket");
        match fs::remove_file(&place) {
            Ok(()) => {}
            // Also when gone already: whoever removed it may not have synced yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir.is_dir() => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        Ok(sync_dir(dir)?)
    }

    /// Steps through a bucket in the byte order of keys. The second answer: whether there is more.
    pub(super) fn list(&self, bucket: &str, query: &Query) -> Result<(Vec<Listed>, bool), FilesError> {
        let bucket = self.bucket(bucket)?;
        // A prefix with a part too long for a name is the prefix of no key.
        let Ok((below, part)) = paths::directory_of(&query.prefix) else { return Ok((Vec::new(), false)) };
        let mut walk = Walk { query, found: Vec::new() };
        let more = walk.directory(&bucket.join(below), part)?;
        Ok((walk.found, more))
    }
}

struct Walk<'a> {
    query: &'a Query,
    found: Vec<Listed>,
}

impl Walk<'_> {
    /// Adds what lies below `dir`, whose keys begin with `base`. `true`: stopped, there is more than may be listed.
    fn directory(&mut self, dir: &Path, base: &str) -> io::Result<bool> {
        let after = self.query.after.as_str();
        for (part, path) in sorted(dir)? {
            let key = format!("{base}{part}");
            if !part.ends_with('/') {
                if !key.starts_with(&self.query.prefix) || key.as_str() <= after {
                    continue;
                }
                let Some(stat) = found(fs::symlink_metadata(&path))? else { continue };
                if self.found.len() == self.query.limit {
                    return Ok(true);
                }
                self.found.push(Listed::Object(key, Meta::new(&stat)?));
            } else if !key.starts_with(&self.query.prefix) && !self.query.prefix.starts_with(&key) {
                continue;
            } else if self.query.by_directory && key.len() > self.query.prefix.len() {
                // A prefix that has been listed stands for all below it, and so does whatever begins the place after it.
                if key.as_str() <= after || !holds_an_object(&path)? {
                    continue;
                }
                if self.found.len() == self.query.limit {
                    return Ok(true);
                }
                self.found.push(Listed::Prefix(key));
            } else if key.as_str() <= after && !after.starts_with(&key) {
                continue;
            } else if self.directory(&path, &key)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The entries of a directory by what they add to a key, in the byte order of that: then a walk is in the order of keys,
/// since no part but a directory's last byte holds a slash.
fn sorted(dir: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut parts = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(part) = entry.file_name().to_str().and_then(paths::part_of) {
            parts.push((part, entry.path()));
        }
    }
    parts.sort_unstable();
    Ok(parts)
}

fn holds_an_object(dir: &Path) -> io::Result<bool> {
    for (part, path) in sorted(dir)? {
        if !part.ends_with('/') || holds_an_object(&path)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
