//! `filesystem.Filesystem` of the SDKs: Stat, ListDir, MakeDir, Move, Remove.
//!
//! The user of a call says whose home a relative path starts at, and who owns what is made; like the reference agent,
//! we act as root ourselves. It is no boundary inside a sandbox: any client may call itself root.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::Path;

use http::HeaderMap;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use crate::connect::{CallError, Code, read_unary, stream_error, unary};
use crate::http::Answer;
use crate::service::requested_user;
use crate::state::Agent;
use crate::users::{Names, User, resolve_path};

/// Deepest listing.
const DEPTH_MAX: u32 = 64;
/// Most entries in one listing; its message must stay below what the SDKs read.
const ENTRIES_MAX: usize = 100_000;

#[derive(Deserialize)]
struct PathRequest {
    #[serde(default)]
    path: String,
    #[serde(default)]
    depth: Option<u32>,
}

#[derive(Deserialize)]
struct MoveRequest {
    #[serde(default)]
    source: String,
    #[serde(default)]
    destination: String,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct One {
    entry: Entry,
}

#[derive(Serialize)]
struct Many {
    entries: Vec<Entry>,
}

/// `filesystem.EntryInfo` as protocol buffers' JSON has it: 64-bit numbers are strings.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    name: String,
    r#type: &'static str,
    path: String,
    size: String,
    mode: u32,
    permissions: String,
    owner: String,
    group: String,
    modified_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    symlink_target: Option<String>,
}

/// Calls `method`.
pub async fn handle(agent: &Agent, method: &str, headers: &HeaderMap, body: Incoming) -> Answer {
    match method {
        "Stat" => unary(one(agent, headers, body, stat).await),
        "MakeDir" => unary(one(agent, headers, body, make_dir).await),
        "ListDir" => unary(list(agent, headers, body).await),
        "Remove" => unary(remove(agent, headers, body).await),
        "Move" => unary(rename(agent, headers, body).await),
        "WatchDir" => stream_error(&no_watching()),
        "CreateWatcher" | "GetWatcherEvents" | "RemoveWatcher" => unary::<Empty>(Err(no_watching())),
        _ => unary::<Empty>(Err(CallError::new(Code::Unimplemented, format!("filesystem.Filesystem has no {method}")))),
    }
}

fn no_watching() -> CallError {
    CallError::new(Code::Unimplemented, "watching directories is not supported by this sandbox; list them instead")
}

/// Runs `work` where it may block.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => Err(CallError::new(Code::Internal, format!("the agent failed: {failed}"))),
    }
}

async fn one(
    agent: &Agent,
    headers: &HeaderMap,
    body: Incoming,
    work: fn(&str, &User, &Names) -> Result<Entry, CallError>,
) -> Result<One, CallError> {
    let request: PathRequest = read_unary(body).await?;
    let user = requested_user(agent, headers)?;
    let accounts = agent.accounts.clone();
    blocking(move || {
        let path = resolve_path(&request.path, &user);
        work(&path, &user, &accounts.names()).map(|entry| One { entry })
    })
    .await
}

async fn list(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Many, CallError> {
    let request: PathRequest = read_unary(body).await?;
    let user = requested_user(agent, headers)?;
    let accounts = agent.accounts.clone();
    blocking(move || {
        let path = resolve_path(&request.path, &user);
        let depth = request.depth.unwrap_or(1).clamp(1, DEPTH_MAX);
        let metadata = fs::metadata(&path).map_err(|error| CallError::of_io(&error, &path))?;
        if !metadata.is_dir() {
            return Err(CallError::new(Code::InvalidArgument, format!("{path}: is not a directory")));
        }
        let mut entries = Vec::new();
        walk(&path, depth, &accounts.names(), &mut entries)?;
        Ok(Many { entries })
    })
    .await
}

async fn remove(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Empty, CallError> {
    let request: PathRequest = read_unary(body).await?;
    let user = requested_user(agent, headers)?;
    blocking(move || {
        let path = resolve_path(&request.path, &user);
        if path == "/" {
            return Err(CallError::new(Code::InvalidArgument, "the root directory cannot be removed"));
        }
        let removed = match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
            Err(error) => Err(error),
        };
        match removed {
            // What is not there need not be removed: the reference agent says the same.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Empty {}),
            other => other.map(|()| Empty {}).map_err(|error| CallError::of_io(&error, &path)),
        }
    })
    .await
}

async fn rename(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<One, CallError> {
    let request: MoveRequest = read_unary(body).await?;
    let user = requested_user(agent, headers)?;
    let accounts = agent.accounts.clone();
    blocking(move || {
        let source = resolve_path(&request.source, &user);
        let destination = resolve_path(&request.destination, &user);
        fs::symlink_metadata(&source).map_err(|error| CallError::of_io(&error, &source))?;
        make_parents(&destination, &user).map_err(|error| CallError::of_io(&error, &destination))?;
        fs::rename(&source, &destination).map_err(|error| CallError::of_io(&error, &destination))?;
        entry(&destination, &accounts.names()).map(|entry| One { entry })
    })
    .await
}

fn stat(path: &str, _user: &User, names: &Names) -> Result<Entry, CallError> {
    entry(path, names)
}

fn make_dir(path: &str, user: &User, names: &Names) -> Result<Entry, CallError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(CallError::new(Code::AlreadyExists, format!("{path}: the directory exists already")));
        }
        Ok(_) => return Err(CallError::new(Code::InvalidArgument, format!("{path}: is there, and is no directory"))),
        Err(_) => {}
    }
    make_parents(path, user)
        .and_then(|()| make_owned(Path::new(path), user))
        .map_err(|error| CallError::of_io(&error, path))?;
    entry(path, names)
}

/// Makes the directories above `path`, owned by `user`.
pub fn make_parents(path: &str, user: &User) -> io::Result<()> {
    let Some(parent) = Path::new(path).parent() else { return Ok(()) };
    let mut missing = Vec::new();
    for ancestor in parent.ancestors() {
        match fs::metadata(ancestor) {
            Ok(metadata) if metadata.is_dir() => break,
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(ancestor),
            Err(error) => return Err(error),
        }
    }
    missing.into_iter().rev().try_for_each(|directory| make_owned(directory, user))
}

fn make_owned(directory: &Path, user: &User) -> io::Result<()> {
    match fs::create_dir(directory) {
        Ok(()) => own(directory, user),
        // Somebody else made it just now.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Gives `path` to `user`; not possible, and not needed, when the agent is not root (tests).
pub fn own(path: &Path, user: &User) -> io::Result<()> {
    if nix::unistd::geteuid().is_root() { chown(path, Some(user.uid), Some(user.gid)) } else { Ok(()) }
}

/// Lists depth first, each directory in the order of names.
fn walk(directory: &str, depth: u32, names: &Names, entries: &mut Vec<Entry>) -> Result<(), CallError> {
    let mut found: Vec<_> = match fs::read_dir(directory) {
        Ok(list) => list.filter_map(Result::ok).map(|entry| entry.path()).collect(),
        // It went away while we listed its parent.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CallError::of_io(&error, directory)),
    };
    found.sort();
    for path in found {
        if entries.len() == ENTRIES_MAX {
            let message = format!("{directory}: more than {ENTRIES_MAX} entries; list with a lower depth");
            return Err(CallError::new(Code::ResourceExhausted, message));
        }
        let path = path.to_string_lossy().into_owned();
        // A file may go away at any time.
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let is_dir = metadata.is_dir();
        entries.push(describe(&path, &metadata, names));
        if is_dir && depth > 1 {
            walk(&path, depth - 1, names, entries)?;
        }
    }
    Ok(())
}

fn entry(path: &str, names: &Names) -> Result<Entry, CallError> {
    let metadata = fs::symlink_metadata(path).map_err(|error| CallError::of_io(&error, path))?;
    Ok(describe(path, &metadata, names))
}

fn describe(path: &str, metadata: &Metadata, names: &Names) -> Entry {
    let kind = metadata.file_type();
    let symlink_target = kind.is_symlink().then(|| fs::read_link(path).ok()).flatten();
    Entry {
        name: Path::new(path).file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned()),
        r#type: match () {
            () if kind.is_symlink() => "FILE_TYPE_SYMLINK",
            () if kind.is_dir() => "FILE_TYPE_DIRECTORY",
            () => "FILE_TYPE_FILE",
        },
        path: path.to_owned(),
        size: metadata.len().to_string(),
        mode: metadata.mode() & 0o7777,
        permissions: permissions(metadata),
        owner: names.user(metadata.uid()),
        group: names.group(metadata.gid()),
        modified_time: rfc3339(metadata.mtime(), metadata.mtime_nsec()),
        symlink_target: symlink_target.map(|target| target.to_string_lossy().into_owned()),
    }
}

/// As `ls -l` shows them.
fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let mode = metadata.mode();
    let mut text = String::with_capacity(10);
    text.push(match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 's',
        () if kind.is_block_device() => 'b',
        () if kind.is_char_device() => 'c',
        () => '-',
    });
    for (shift, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode & (1 << shift) == 0 { '-' } else { letter });
    }
    text
}

/// A Unix time as RFC 3339, in UTC. Days to date after Howard Hinnant's `civil_from_days`.
fn rfc3339(seconds: i64, nanos: i64) -> String {
    let days = seconds.div_euclid(86_400);
    let second = seconds.rem_euclid(86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000000005Z"),
            (951_827_696, "2000-02-29T12:34:56.000000005Z"),
            (4_102_444_799, "2099-12-31T23:59:59.000000005Z"),
            (-1, "1969-12-31T23:59:59.000000005Z"),
        ] {
            assert_eq!(rfc3339(seconds, 5), date);
        }
    }
}
