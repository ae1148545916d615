//! Request bodies: read into memory up to a cap, and read to their end even when the answer is no.
//!
//! A client that is still sending when the server closes the connection sees a reset instead of the answer. So a body
//! that is not wanted is read and thrown away in the background ([`discard`]), while the answer is already on its
//! way. That is bounded in bytes and time; past the bounds the connection is closed.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::errors::ApiError;

/// Most bytes that are thrown away for one request.
const DISCARD_BYTES: u64 = 1 << 30;

/// Longest that bytes are thrown away for one request, and longest wait for a REST body.
const PATIENCE: Duration = Duration::from_secs(60);

/// Reads a body of at most `cap` bytes; a longer one is 413, known from its announced length or when the cap is hit.
pub(crate) async fn collect(
    headers: &HeaderMap,
    mut body: Incoming,
    cap: usize,
    tasks: &TaskTracker,
) -> Result<Bytes, ApiError> {
    let too_large = || {
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {cap} bytes, the most accepted"))
    };
    if body.size_hint().lower() > cap as u64 {
        discard(headers, body, tasks);
        return Err(too_large());
    }
    let mut collected = BytesMut::new();
    let read = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| ApiError::invalid(format!("the body could not be read: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if collected.len() + data.len() > cap {
                return Err(too_large());
            }
            collected.extend_from_slice(&data);
        }
        Ok(())
    };
    let outcome = timeout(PATIENCE, read)
        .await
        .unwrap_or_else(|_| Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive within a minute")));
    match outcome {
        Ok(()) => Ok(collected.freeze()),
        Err(error) => {
            discard(headers, body, tasks);
            Err(error)
        }
    }
}

/// Reads the rest of a body in the background and throws it away. Not when the client waits to be told to send it.
pub(crate) fn discard(headers: &HeaderMap, mut body: Incoming, tasks: &TaskTracker) {
    if body.is_end_stream() || headers.contains_key(header::EXPECT) {
        return;
    }
    tasks.spawn(async move {
        let mut left = DISCARD_BYTES;
        let drain = async {
            while let Some(Ok(frame)) = body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
                if left == 0 {
                    break;
                }
            }
        };
        // The outcome is the same either way: the body is dropped here.
        let _ = timeout(PATIENCE, drain).await;
    });
}
