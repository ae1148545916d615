//! The Connect protocol with JSON (<https://connectrpc.com/docs/protocol>), as far as the SDKs use it: unary calls,
//! server streams, client streams; no compression.
//!
//! ```text
//! stream message   flags u8 │ length u32 big-endian │ JSON
//! last message     0x02     │ length                │ {} or {"error":{"code","message"}}
//! ```
//!
//! The HTTP status of a stream is always 200; its error is in its last message.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::{Answer, Body, BodyError, collect, json};

/// Largest request message. Files go through `/files`, which has no limit.
pub const MESSAGE_MAX: usize = 16 << 20;
const PREFIX: usize = 5;
const END_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;

/// The codes that we answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The request makes no sense, whatever the state.
    InvalidArgument,
    /// The deadline of the request or process has passed.
    DeadlineExceeded,
    /// No such process, file or directory.
    NotFound,
    /// It is there already.
    AlreadyExists,
    /// The system refused.
    PermissionDenied,
    /// Too large, or no space left.
    ResourceExhausted,
    /// It cannot be done in this state.
    FailedPrecondition,
    /// Not offered.
    Unimplemented,
    /// The system failed.
    Internal,
    /// The access token is missing or wrong.
    Unauthenticated,
}

impl Code {
    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    /// Its HTTP status in a unary answer.
    pub fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// An error of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct CallError {
    /// Its kind.
    pub code: Code,
    /// What went wrong, with the name of the thing.
    pub message: String,
}

impl CallError {
    /// An error of kind `code`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Kind and text for a failure of the system's at `path`.
    pub fn of_io(error: &std::io::Error, path: &str) -> Self {
        use std::io::ErrorKind as Kind;
        let (code, what) = match error.kind() {
            Kind::NotFound => (Code::NotFound, "no such file or directory"),
            Kind::AlreadyExists => (Code::AlreadyExists, "exists already"),
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem => (Code::PermissionDenied, "not permitted"),
            Kind::NotADirectory => (Code::InvalidArgument, "a part of the path is not a directory"),
            Kind::IsADirectory => (Code::InvalidArgument, "is a directory"),
            Kind::InvalidFilename | Kind::InvalidInput => (Code::InvalidArgument, "not a valid path"),
            Kind::DirectoryNotEmpty => (Code::FailedPrecondition, "directory is not empty"),
            Kind::StorageFull | Kind::QuotaExceeded => (Code::ResourceExhausted, "no space left on the disk"),
            _ => return Self::new(Code::Internal, format!("{path}: {error}")),
        };
        Self::new(code, format!("{path}: {what}"))
    }
}

impl From<BodyError> for CallError {
    fn from(error: BodyError) -> Self {
        let code = match error {
            BodyError::TooLarge(_) => Code::ResourceExhausted,
            BodyError::Broken(_) => Code::InvalidArgument,
        };
        Self::new(code, error.to_string())
    }
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: &'static str,
    message: &'a str,
}

/// Answers a unary call.
pub fn unary<T: Serialize>(result: Result<T, CallError>) -> Answer {
    match result {
        Ok(message) => json(StatusCode::OK, &message),
        Err(error) => json(error.code.status(), &ErrorBody { code: error.code.name(), message: &error.message }),
    }
}

/// Reads the message of a unary call.
pub async fn read_unary<T: DeserializeOwned>(body: Incoming) -> Result<T, CallError> {
    parse(&collect(body, MESSAGE_MAX).await?)
}

/// Reads the one message of a server-stream call.
pub async fn read_single<T: DeserializeOwned>(body: Incoming) -> Result<T, CallError> {
    let mut frames = FrameDecoder::default();
    frames.feed(&collect(body, MESSAGE_MAX + PREFIX).await?);
    match (frames.next()?, frames.is_empty()) {
        (Some(message), true) => parse(&message),
        (Some(_), false) => Err(CallError::new(Code::InvalidArgument, "this call takes exactly one message")),
        (None, _) => Err(CallError::new(Code::InvalidArgument, "the request ends inside a message")),
    }
}

/// Parses one JSON message.
pub fn parse<T: DeserializeOwned>(message: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(message)
        .map_err(|error| CallError::new(Code::InvalidArgument, format!("malformed message: {error}")))
}

/// Cuts a byte stream into messages.
#[derive(Default)]
pub struct FrameDecoder {
    buffer: BytesMut,
}

impl FrameDecoder {
    /// Takes the next bytes of the stream.
    pub fn feed(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Whether nothing is left over.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The next whole message, if it is there.
    #[expect(clippy::should_implement_trait, reason = "an iterator would say that nothing more can come")]
    pub fn next(&mut self) -> Result<Option<Bytes>, CallError> {
        if self.buffer.len() < PREFIX {
            return Ok(None);
        }
        let flags = self.buffer[0];
        if flags & COMPRESSED != 0 {
            return Err(CallError::new(Code::Unimplemented, "compressed messages are not supported"));
        }
        let length = (&self.buffer[1..PREFIX]).get_u32() as usize;
        if length > MESSAGE_MAX {
            let message = format!("a message of {length} bytes is larger than {MESSAGE_MAX}");
            return Err(CallError::new(Code::ResourceExhausted, message));
        }
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

/// One stream message around `json`.
pub fn frame(json: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(PREFIX + json.len());
    put_frame(&mut out, 0, json);
    out.freeze()
}

/// Appends the last message of a stream to `out`.
pub fn put_end(out: &mut BytesMut, error: Option<&CallError>) {
    let json = error.map_or_else(
        || b"{}".to_vec(),
        |error| {
            let body = ErrorBody { code: error.code.name(), message: &error.message };
            serde_json::to_vec(&serde_json::json!({ "error": body })).expect("our own types serialise")
        },
    );
    put_frame(out, END_STREAM, &json);
}

/// Appends a message to `out`.
pub fn put_frame(out: &mut BytesMut, flags: u8, json: &[u8]) {
    out.put_u8(flags);
    out.put_u32(u32::try_from(json.len()).expect("our messages are small"));
    out.put_slice(json);
}

/// A stream that consists of an error.
pub fn stream_error(error: &CallError) -> Answer {
    let mut out = BytesMut::new();
    put_end(&mut out, Some(error));
    stream_of(Full::new(out.freeze()).map_err(|never| match never {}).boxed_unsync())
}

/// A client stream's answer: one message, then the end.
pub fn stream_single(result: Result<(), CallError>) -> Answer {
    let mut out = BytesMut::new();
    if result.is_ok() {
        put_frame(&mut out, 0, b"{}");
    }
    put_end(&mut out, result.as_ref().err());
    stream_of(Full::new(out.freeze()).map_err(|never| match never {}).boxed_unsync())
}

/// A stream answer around `body`.
pub fn stream_of(body: Body) -> Answer {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/connect+json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `Connect-Timeout-Ms`; the protocol allows at most ten digits.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, CallError> {
    let Some(value) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let text = value.to_str().unwrap_or("");
    let digits = (1..=10).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let millis = digits.then(|| text.parse().ok()).flatten();
    let millis = millis.ok_or_else(|| CallError::new(Code::InvalidArgument, "Connect-Timeout-Ms is not a number"))?;
    Ok(Some(Duration::from_millis(millis)))
}

/// `Keepalive-Ping-Interval`, in seconds; what makes no sense is ignored.
pub fn keepalive(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get("keepalive-ping-interval")?.to_str().ok()?.parse().ok()?;
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// The user of a Basic `Authorization` (its password is empty and not looked at).
pub fn basic_user(headers: &HeaderMap) -> Result<Option<String>, CallError> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    // Another scheme is a credential for somebody in between, not a user.
    let Some(encoded) = value.to_str().ok().and_then(|text| text.strip_prefix("Basic ")) else { return Ok(None) };
    let bad = || CallError::new(Code::InvalidArgument, "the Basic authorization is malformed");
    let decoded = BASE64.decode(encoded.trim()).map_err(|_| bad())?;
    let text = String::from_utf8(decoded).map_err(|_| bad())?;
    let user = text.split(':').next().unwrap_or_default();
    Ok((!user.is_empty()).then(|| user.to_owned()))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn message(flags: u8, json: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        put_frame(&mut out, flags, json);
        out.to_vec()
    }

    #[test]
    fn messages_are_found_whatever_the_pieces() {
        let wire = [message(0, b"{\"a\":1}"), message(0, b"{}"), message(0, b"")].concat();
        for size in 1..=wire.len() {
            let mut frames = FrameDecoder::default();
            let mut found = Vec::new();
            for piece in wire.chunks(size) {
                frames.feed(piece);
                while let Some(message) = frames.next().unwrap() {
                    found.push(message.to_vec());
                }
            }
            assert_eq!(found, [b"{\"a\":1}".to_vec(), b"{}".to_vec(), b"".to_vec()], "pieces of {size}");
            assert!(frames.is_empty());
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
        let mut frames = FrameDecoder::default();
        frames.feed(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(frames.next().unwrap_err().code, Code::ResourceExhausted);
    }

    #[test]
    fn compressed_messages_are_refused() {
        let mut frames = FrameDecoder::default();
        frames.feed(&message(COMPRESSED, b"{}"));
        assert_eq!(frames.next().unwrap_err().code, Code::Unimplemented);
    }

    #[test]
    fn the_end_carries_the_error() {
        let mut out = BytesMut::new();
        put_end(&mut out, Some(&CallError::new(Code::NotFound, "process 7 does not exist")));
        assert_eq!(out[0], END_STREAM);
        let json: serde_json::Value = serde_json::from_slice(&out[PREFIX..]).unwrap();
        assert_eq!(json, serde_json::json!({"error": {"code": "not_found", "message": "process 7 does not exist"}}));
    }

    #[test]
    fn timeouts_are_at_most_ten_digits() {
        let parsed = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("connect-timeout-ms", HeaderValue::from_static(text));
            timeout(&headers).ok().flatten()
        };
        assert_eq!(parsed("1500"), Some(Duration::from_millis(1500)));
        for bad in ["", "-1", "1e3", "12345678901", "+5"] {
            assert_eq!(parsed(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_user_is_what_stands_before_the_colon() {
        let user = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            basic_user(&headers)
        };
        assert_eq!(user(&format!("Basic {}", BASE64.encode("root:"))), Ok(Some("root".to_owned())));
        assert_eq!(user(&format!("Basic {}", BASE64.encode(":"))), Ok(None));
        assert_eq!(user("Bearer abc"), Ok(None));
        assert!(user("Basic !!!").is_err());
    }
}
