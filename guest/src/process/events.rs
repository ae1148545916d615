//! Encoded events of a process: the messages of `Start` and `Connect`, whose JSON is the same.
//!
//! Written by hand, since they are the hot path, and are the same for every listener.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::ProcessId;
use crate::connect::{CallError, Code, frame, put_end, put_frame};
use crate::sys::spawn::Exit;

/// Which output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The first event.
pub fn start(pid: ProcessId) -> Bytes {
    frame(format!("{{\"event\":{{\"start\":{{\"pid\":{pid}}}}}}}").as_bytes())
}

/// Some output.
pub fn data(output: Output, bytes: &[u8]) -> Bytes {
    let head: &[u8] = match output {
        Output::Stdout => b"{\"event\":{\"data\":{\"stdout\":\"",
        Output::Stderr => b"{\"event\":{\"data\":{\"stderr\":\"",
    };
    let tail: &[u8] = b"\"}}}";
    let encoded = bytes.len().div_ceil(3) * 4;
    let length = head.len() + encoded + tail.len();
    let mut out = BytesMut::with_capacity(5 + length);
    out.put_u8(0);
    out.put_u32(u32::try_from(length).expect("output comes in small pieces"));
    out.put_slice(head);
    let start = out.len();
    out.resize(start + encoded, 0);
    BASE64.encode_slice(bytes, &mut out[start..]).expect("the space is exact");
    out.put_slice(tail);
    out.freeze()
}

/// Nothing happened, and the connection lives.
pub fn keepalive() -> Bytes {
    frame(b"{\"event\":{\"keepalive\":{}}}")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct End<'a> {
    exit_code: i32,
    exited: bool,
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// The last event, and the end of the stream. A process that a signal ended has exit code -1, as in Go, whose names
/// the SDKs know.
pub fn end(exit: Exit) -> Bytes {
    let (exit_code, status) = match exit {
        Exit::Code(code) => (code, format!("exit status {code}")),
        Exit::Signal(signal) => (-1, format!("signal: {}", signal_name(signal))),
    };
    let exited = matches!(exit, Exit::Code(_));
    let error = (exit != Exit::Code(0)).then_some(status.as_str());
    let mut json = b"{\"event\":{\"end\":".to_vec();
    serde_json::to_writer(&mut json, &End { exit_code, exited, status: &status, error }).expect("a plain structure");
    let _ = json.write_all(b"}}");
    let mut out = BytesMut::with_capacity(json.len() + 16);
    put_frame(&mut out, 0, &json);
    put_end(&mut out, None);
    out.freeze()
}

/// The end of a stream whose deadline has passed.
pub fn deadline(what: &str) -> Bytes {
    let mut out = BytesMut::new();
    put_end(&mut out, Some(&CallError::new(Code::DeadlineExceeded, what)));
    out.freeze()
}

/// Names as Go's `syscall.Signal` has them.
fn signal_name(signal: i32) -> String {
    match signal {
        libc::SIGHUP => "hangup".to_owned(),
        libc::SIGINT => "interrupt".to_owned(),
        libc::SIGQUIT => "quit".to_owned(),
        libc::SIGABRT => "aborted".to_owned(),
        libc::SIGKILL => "killed".to_owned(),
        libc::SIGSEGV => "segmentation fault".to_owned(),
        libc::SIGPIPE => "broken pipe".to_owned(),
        libc::SIGTERM => "terminated".to_owned(),
        other => format!("signal {other}"),
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::connect::FrameDecoder;

    fn messages(wire: &[u8]) -> Vec<serde_json::Value> {
        let mut frames = FrameDecoder::default();
        frames.feed(wire);
        let mut found = Vec::new();
        while let Some(message) = frames.next().unwrap() {
            found.push(serde_json::from_slice(&message).unwrap());
        }
        assert!(frames.is_empty());
        found
    }

    #[test]
    fn output_of_any_length_is_one_message() {
        for length in [0, 1, 2, 3, 4, 65_536] {
            let bytes = vec![0xff; length];
            let found = messages(&data(Output::Stderr, &bytes));
            let text = found[0]["event"]["data"]["stderr"].as_str().unwrap();
            assert_eq!(BASE64.decode(text).unwrap(), bytes);
        }
    }

    #[test]
    fn an_end_says_how() {
        let ended = |exit| messages(&end(exit))[0]["event"]["end"].clone();
        let ok = serde_json::json!({"exitCode": 0, "exited": true, "status": "exit status 0"});
        assert_eq!(ended(Exit::Code(0)), ok);
        let failed =
            serde_json::json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
        assert_eq!(ended(Exit::Code(3)), failed);
        let killed =
            serde_json::json!({"exitCode": -1, "exited": false, "status": "signal: killed", "error": "signal: killed"});
        assert_eq!(ended(Exit::Signal(9)), killed);
    }
}
