//! `/files`: downloads, and uploads of both forms.
//!
//! ```text
//! GET  ?path&username                 → 200 octet-stream
//! POST ?path&username  octet-stream   → one file; Content-Encoding: gzip is unpacked
//! POST [?path]&username  multipart    → field `file`; its file name is the path unless the query has one
//! ```
//!
//! An upload writes in place, as the reference agent does: owner, mode and links of a file that is there stay. A client
//! that hangs up half-way leaves what it has sent. Nothing is held in memory but the piece at hand.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use flate2::write::GzDecoder;
use futures::{Stream, TryStreamExt};
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_util::io::ReaderStream;

use crate::auth::{Signed, check_signature};
use crate::connect::{CallError, Code, basic_user};
use crate::filesystem::{blocking, make_parents, own};
use crate::http::{Answer, error, json};
use crate::service::find_user;
use crate::state::Agent;
use crate::users::{User, resolve_path};

/// Size of the pieces of a download.
const PIECE: usize = 64 * 1024;
/// Pieces of an upload that may wait for the disk.
const QUEUE: usize = 8;

#[derive(Debug, Default)]
struct Query {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    expiration: Option<String>,
}

/// One uploaded file.
#[derive(Serialize)]
struct Written {
    name: String,
    path: String,
    r#type: &'static str,
}

/// Answers one request. `trusted` says whether it carried the access token.
pub async fn handle(agent: &Agent, request: Request<Incoming>, trusted: bool) -> Answer {
    let query = match parse_query(request.uri().query().unwrap_or_default()) {
        Ok(query) => query,
        Err(bad) => return answer(&bad),
    };
    let operation = if request.method() == Method::GET { "read" } else { "write" };
    if !trusted && let Err(why) = signed(agent, &query, operation) {
        return error(StatusCode::UNAUTHORIZED, why);
    }
    let user = match basic_user(request.headers())
        .and_then(|basic| find_user(agent, query.username.as_deref().or(basic.as_deref())))
    {
        Ok(user) => user,
        Err(unknown) => return answer(&unknown),
    };
    let result = match request.method().as_str() {
        "GET" => download(query, &user).await,
        "POST" => upload(query, user, request).await.map(|written| json(StatusCode::OK, &written)),
        method => return error(StatusCode::METHOD_NOT_ALLOWED, &format!("/files takes GET and POST, not {method}")),
    };
    result.unwrap_or_else(|failed| answer(&failed))
}

fn signed(agent: &Agent, query: &Query, operation: &str) -> Result<(), &'static str> {
    let Some(signature) = &query.signature else { return Err("X-Access-Token is missing or wrong") };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let signed = Signed {
        path: query.path.as_deref().unwrap_or_default(),
        operation,
        user: query.username.as_deref().unwrap_or_default(),
        signature,
        expiration: query.expiration.as_deref(),
    };
    check_signature(&agent.session(), &signed, now)
}

/// A call's error as plain HTTP has it.
fn answer(failed: &CallError) -> Answer {
    let status = match failed.code {
        Code::ResourceExhausted => StatusCode::INSUFFICIENT_STORAGE,
        code => code.status(),
    };
    error(status, &failed.message)
}

async fn download(query: Query, user: &User) -> Result<Answer, CallError> {
    let path = resolve_path(required(query.path.as_deref())?, user);
    let shown = path.clone();
    let (file, size) = blocking(move || {
        let of_io = |error: io::Error| CallError::of_io(&error, &path);
        // Opening a pipe that nobody writes to would wait for ever.
        if fs::metadata(&path).map_err(of_io)?.file_type().is_fifo() {
            return Err(CallError::new(Code::InvalidArgument, format!("{path}: is a pipe, not a file")));
        }
        let file = fs::File::open(&path).map_err(of_io)?;
        let metadata = file.metadata().map_err(of_io)?;
        if metadata.is_dir() {
            return Err(CallError::new(Code::InvalidArgument, format!("{path}: is a directory")));
        }
        Ok((file, metadata.is_file().then_some(metadata.len())))
    })
    .await?;
    let pieces = ReaderStream::with_capacity(tokio::fs::File::from_std(file), PIECE);
    let mut response = http::Response::new(StreamBody::new(pieces.map_ok(Frame::data)).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    // Files of /proc say that they are empty, and are not.
    if let Some(size) = size.filter(|size| *size > 0 && !shown.starts_with("/proc/") && !shown.starts_with("/sys/")) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    }
    Ok(response)
}

fn required(path: Option<&str>) -> Result<&str, CallError> {
    path.filter(|path| !path.is_empty()).ok_or_else(|| CallError::new(Code::InvalidArgument, "the query has no path"))
}

async fn upload(query: Query, user: User, request: Request<Incoming>) -> Result<Vec<Written>, CallError> {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = header(header::CONTENT_TYPE).to_owned();
    let packed = match header(header::CONTENT_ENCODING) {
        "" | "identity" => false,
        "gzip" => true,
        other => {
            let message = format!("Content-Encoding {other} is not supported, only gzip");
            return Err(CallError::new(Code::InvalidArgument, message));
        }
    };
    let body = BodyDataStream::new(request.into_body()).map_err(|error| broken(&error));
    if let Ok(boundary) = multer::parse_boundary(&kind) {
        if packed {
            return Err(CallError::new(Code::InvalidArgument, "gzip goes with application/octet-stream only"));
        }
        return multipart(query.path.as_deref(), &user, multer::Multipart::new(body, boundary)).await;
    }
    let path = resolve_path(required(query.path.as_deref())?, &user);
    Ok(vec![write(path, user, packed, body).await?])
}

async fn multipart(
    path: Option<&str>,
    user: &User,
    mut parts: multer::Multipart<'_>,
) -> Result<Vec<Written>, CallError> {
    let malformed = |error: &multer::Error| CallError::new(Code::InvalidArgument, format!("multipart: {error}"));
    let mut written: Vec<Written> = Vec::new();
    while let Some(field) = parts.next_field().await.map_err(|error| malformed(&error))? {
        if field.name() != Some("file") {
            continue;
        }
        let named = field.file_name().map(str::to_owned);
        if path.is_some() && !written.is_empty() {
            let message = "several files were sent with one path in the query; send it in their file names instead";
            return Err(CallError::new(Code::InvalidArgument, message));
        }
        let target = path.or(named.as_deref()).filter(|path| !path.is_empty());
        let none = || CallError::new(Code::InvalidArgument, "a file has no name, and the query no path");
        let target = resolve_path(target.ok_or_else(none)?, user);
        if written.iter().any(|other| other.path == target) {
            return Err(CallError::new(Code::InvalidArgument, format!("{target}: was sent twice")));
        }
        let body = field.map_err(|error| io::Error::other(error.to_string()));
        written.push(write(target, user.clone(), false, body).await?);
    }
    if written.is_empty() {
        return Err(CallError::new(Code::InvalidArgument, "the form has no field named file"));
    }
    Ok(written)
}

fn broken(error: &hyper::Error) -> io::Error {
    io::Error::other(format!("the upload broke off: {error}"))
}

/// Writes `body` to `path` on a blocking thread, which it feeds through a short queue.
async fn write(
    path: String,
    user: User,
    packed: bool,
    body: impl Stream<Item = io::Result<Bytes>>,
) -> Result<Written, CallError> {
    let (queue, pieces) = mpsc::channel(QUEUE);
    let target = path.clone();
    let writer = tokio::task::spawn_blocking(move || write_all(&target, &user, packed, pieces));
    let mut body = std::pin::pin!(body);
    let fed = loop {
        match body.try_next().await {
            Ok(Some(piece)) => {
                // The writer has failed, and says so below.
                if queue.send(piece).await.is_err() {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(CallError::new(Code::InvalidArgument, error.to_string())),
        }
    };
    drop(queue);
    let result = writer.await;
    fed?;
    match result {
        Ok(Ok(())) => {
            let name = Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned());
            Ok(Written { name: name.unwrap_or_default(), path, r#type: "file" })
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
            Err(CallError::new(Code::InvalidArgument, format!("{path}: the body is not valid gzip: {error}")))
        }
        Ok(Err(error)) => Err(CallError::of_io(&error, &path)),
        Err(failed) => Err(CallError::new(Code::Internal, format!("the agent failed: {failed}"))),
    }
}

fn write_all(path: &str, user: &User, packed: bool, mut pieces: mpsc::Receiver<Bytes>) -> io::Result<()> {
    make_parents(path, user)?;
    let target = PathBuf::from(path);
    let known = fs::metadata(&target).ok();
    if known.as_ref().is_some_and(fs::Metadata::is_dir) {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // Opening a pipe must not wait for its reader.
    let options = fs::File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NONBLOCK)
        .open(&target);
    let mut file = options?;
    if known.is_none() {
        own(&target, user)?;
    }
    if packed {
        let mut unpacker = GzDecoder::new(file);
        let mut any = false;
        while let Some(piece) = pieces.blocking_recv() {
            any = true;
            unpacker.write_all(&piece).map_err(invalid)?;
        }
        if any {
            unpacker.finish().map_err(invalid)?;
        }
        return Ok(());
    }
    while let Some(piece) = pieces.blocking_recv() {
        file.write_all(&piece)?;
    }
    Ok(())
}

/// The decoder's errors are about its input, unless the system gave them.
fn invalid(error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() { error } else { io::Error::new(io::ErrorKind::InvalidData, error) }
}

fn parse_query(query: &str) -> Result<Query, CallError> {
    let mut parsed = Query::default();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decode(value)
            .ok_or_else(|| CallError::new(Code::InvalidArgument, format!("the query's {name} is not valid text")))?;
        match name {
            "path" => parsed.path = Some(value),
            "username" => parsed.username = Some(value),
            "signature" => parsed.signature = Some(value),
            "signature_expiration" => parsed.expiration = Some(value),
            _ => {}
        }
    }
    Ok(parsed)
}

/// Undoes the encoding of a form's value: `+` is a blank, `%xy` a byte.
fn decode(value: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        match first {
            b'+' => bytes.push(b' '),
            b'%' => {
                let (digits, tail) = rest.split_at_checked(2)?;
                rest = tail;
                let high = char::from(digits[0]).to_digit(16)?;
                let low = char::from(digits[1]).to_digit(16)?;
                bytes.push(u8::try_from(high * 16 + low).ok()?);
            }
            other => bytes.push(*other),
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_values_are_decoded() {
        assert_eq!(decode("a%20b+c%2Fd%C3%A9"), Some("a b c/dé".to_owned()));
        for bad in ["%", "%4", "%zz", "%+1", "%ff"] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn unknown_names_are_ignored() {
        let query = parse_query("path=%2Ftmp%2Fx&username=root&other=1&&signature=v1_a%2Bb").expect("is valid");
        assert_eq!(query.path.as_deref(), Some("/tmp/x"));
        assert_eq!(query.username.as_deref(), Some("root"));
        assert_eq!(query.signature.as_deref(), Some("v1_a+b"));
    }
}
