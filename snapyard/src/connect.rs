//! The Connect protocol as the guest's agent speaks it: JSON messages in frames, and the events of a process.
//!
//! ```text
//! frame:   flags (u8) | length (u32, big endian) | length bytes of JSON
//! stream:  start{pid}  (data{stdout|stderr} | keepalive)*  end{exitCode,…}  [flags 0x02: {} or {"error":{…}}]
//! ```
//!
//! Pure: bytes in, events out. A stream may be cut anywhere, so the decoder takes pieces of any size. Source of the
//! format: <https://connectrpc.com/docs/protocol>, streaming RPCs.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;

/// Frame flag: the payload is compressed. We never ask for that.
const COMPRESSED: u8 = 0x01;
/// Frame flag: last frame of the stream; its payload says whether it succeeded.
const END_OF_STREAM: u8 = 0x02;
/// Bytes before a frame's payload.
const HEAD: usize = 5;
/// Larger frames are taken for garbage instead of being waited for.
const MAX_PAYLOAD: usize = 64 << 20;

/// Why a stream makes no sense.
#[derive(Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// A frame was compressed though no compression was offered.
    Compressed,
    /// A frame claims an absurd size, bytes.
    TooLarge(usize),
    /// A payload is not what the protocol says.
    Malformed(String),
    /// The stream stopped in the middle of a frame, with this many bytes of it.
    CutOff(usize),
}

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Compressed => f.write_str("the agent sent a compressed frame, which was not asked for"),
            Self::TooLarge(size) => write!(f, "the agent announced a frame of {size} bytes"),
            Self::Malformed(what) => write!(f, "the agent sent a message that cannot be read: {what}"),
            Self::CutOff(bytes) => write!(f, "the stream broke off {bytes} bytes into a frame"),
        }
    }
}

impl std::error::Error for ProtocolError {}

/// One frame around `payload`.
pub fn encode(payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a request of ours is far below 4 GiB");
    let mut frame = Vec::with_capacity(HEAD + payload.len());
    frame.push(0);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A whole frame of a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message(Vec<u8>),
    /// The end of the stream, and the error it ended with.
    End(Option<StreamError>),
}

/// The error that a stream or a unary call ended with.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct StreamError {
    /// Connect's code, e.g. `not_found`.
    pub code: String,
    /// For people.
    #[serde(default)]
    pub message: String,
}

/// Cuts a byte stream into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Takes the next piece of the stream.
    pub fn push(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    /// The next whole frame, `None` when more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let Some((head, _)) = self.buffer.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [flags, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_PAYLOAD {
            return Err(ProtocolError::TooLarge(length));
        }
        if flags & COMPRESSED != 0 {
            return Err(ProtocolError::Compressed);
        }
        if self.buffer.len() < HEAD + length {
            return Ok(None);
        }
        let payload = self.buffer[HEAD..HEAD + length].to_vec();
        self.buffer.drain(..HEAD + length);
        if flags & END_OF_STREAM == 0 {
            return Ok(Some(Frame::Message(payload)));
        }
        #[derive(Deserialize)]
        struct EndOfStream {
            error: Option<StreamError>,
        }
        if payload.is_empty() {
            return Ok(Some(Frame::End(None)));
        }
        let end: EndOfStream = parse(&payload)?;
        Ok(Some(Frame::End(end.error)))
    }

    /// To be called when the stream has ended: nothing may be left over.
    pub fn finish(&self) -> Result<(), ProtocolError> {
        match self.buffer.len() {
            0 => Ok(()),
            left => Err(ProtocolError::CutOff(left)),
        }
    }
}

/// What happened to a process.
#[derive(Debug, PartialEq, Eq)]
pub enum ProcessEvent {
    /// It runs.
    Start {
        /// Its id in the guest.
        pid: u32,
    },
    /// It wrote to its standard output.
    Stdout(Vec<u8>),
    /// It wrote to its standard error.
    Stderr(Vec<u8>),
    /// It is gone; the code as a shell would give it.
    End {
        /// 0..=255; 128 + signal when one ended it.
        code: u8,
    },
    /// Nothing; keeps the connection from looking dead.
    KeepAlive,
}

/// Reads one message of a `process.Process/Start` stream.
pub fn parse_process_event(payload: &[u8]) -> Result<ProcessEvent, ProtocolError> {
    #[derive(Deserialize)]
    struct Message {
        event: Event,
    }
    #[derive(Deserialize)]
    struct Event {
        start: Option<Start>,
        data: Option<Data>,
        end: Option<End>,
    }
    #[derive(Deserialize)]
    struct Start {
        pid: u32,
    }
    #[derive(Deserialize)]
    struct Data {
        stdout: Option<String>,
        stderr: Option<String>,
    }
    let event = parse::<Message>(payload)?.event;
    if let Some(start) = event.start {
        return Ok(ProcessEvent::Start { pid: start.pid });
    }
    if let Some(end) = event.end {
        return end.code().map(|code| ProcessEvent::End { code });
    }
    match event.data {
        Some(Data { stdout: Some(bytes), .. }) => decode_bytes(&bytes).map(ProcessEvent::Stdout),
        Some(Data { stderr: Some(bytes), .. }) => decode_bytes(&bytes).map(ProcessEvent::Stderr),
        _ => Ok(ProcessEvent::KeepAlive),
    }
}

/// The `end` event. ProtoJSON may leave out what is zero or false.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct End {
    exit_code: Option<i32>,
    #[serde(default)]
    status: String,
    error: Option<String>,
}

impl End {
    /// The shell's view of how it ended.
    fn code(&self) -> Result<u8, ProtocolError> {
        if let Some(name) = self.status.strip_prefix("signal: ") {
            return Ok(signal_number(name).map_or(255, |signal| 128 + signal));
        }
        match (u8::try_from(self.exit_code.unwrap_or(0)), &self.error) {
            (Ok(0), Some(error)) => Err(ProtocolError::Malformed(format!("the process failed: {error}"))),
            (Ok(code), _) => Ok(code),
            (Err(_), _) => Ok(255),
        }
    }
}

/// A signal by the name that the agent uses: those of Go's `syscall.Signal`, or `signal N`.
fn signal_number(name: &str) -> Option<u8> {
    const NAMES: [(&str, u8); 8] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("aborted", 6),
        ("killed", 9),
        ("segmentation fault", 11),
        ("broken pipe", 13),
        ("terminated", 15),
    ];
    if let Some((_, number)) = NAMES.into_iter().find(|(known, _)| *known == name) {
        return Some(number);
    }
    name.strip_prefix("signal ")?.parse().ok().filter(|number| *number < 128)
}

fn parse<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, ProtocolError> {
    serde_json::from_slice(payload).map_err(|error| ProtocolError::Malformed(error.to_string()))
}

fn decode_bytes(text: &str) -> Result<Vec<u8>, ProtocolError> {
    BASE64.decode(text).map_err(|error| ProtocolError::Malformed(format!("bad base64: {error}")))
}

/// Bytes as ProtoJSON carries them.
pub fn encode_bytes(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_frame(payload: &[u8]) -> Vec<u8> {
        let mut frame = encode(payload);
        frame[0] = END_OF_STREAM;
        frame
    }

    #[test]
    fn frames_survive_any_cut() {
        let mut stream = encode(br#"{"a":1}"#);
        stream.extend(encode(b""));
        stream.extend(end_frame(b"{}"));
        for size in 1..=stream.len() {
            let mut decoder = Decoder::default();
            let mut frames = Vec::new();
            for piece in stream.chunks(size) {
                decoder.push(piece);
                while let Some(frame) = decoder.next_frame().expect("well-formed") {
                    frames.push(frame);
                }
            }
            decoder.finish().expect("nothing left over");
            let expected = [Frame::Message(br#"{"a":1}"#.to_vec()), Frame::Message(Vec::new()), Frame::End(None)];
            assert_eq!(frames, expected, "pieces of {size}");
        }
    }

    #[test]
    fn a_stream_says_how_it_ended() {
        let mut decoder = Decoder::default();
        decoder.push(&end_frame(br#"{"error":{"code":"not_found","message":"no such file"}}"#));
        let error = StreamError { code: "not_found".into(), message: "no such file".into() };
        assert_eq!(decoder.next_frame(), Ok(Some(Frame::End(Some(error)))));
        decoder.push(&end_frame(b""));
        assert_eq!(decoder.next_frame(), Ok(Some(Frame::End(None))));
    }

    #[test]
    fn nonsense_is_refused() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(decoder.next_frame(), Err(ProtocolError::TooLarge(0xffff_ffff)));
        let mut decoder = Decoder::default();
        decoder.push(&[COMPRESSED, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(ProtocolError::Compressed));
        let mut decoder = Decoder::default();
        decoder.push(&encode(b"{}")[..6]);
        assert_eq!(decoder.next_frame(), Ok(None));
        assert_eq!(decoder.finish(), Err(ProtocolError::CutOff(6)));
        assert!(parse_process_event(b"[]").is_err());
        assert!(parse_process_event(br#"{"event":{"data":{"stdout":"*"}}}"#).is_err());
    }

    #[test]
    fn events_are_read() {
        let read = |json: &str| parse_process_event(json.as_bytes()).expect("well-formed");
        assert_eq!(read(r#"{"event":{"start":{"pid":7}}}"#), ProcessEvent::Start { pid: 7 });
        assert_eq!(read(r#"{"event":{"data":{"stdout":"aGk="}}}"#), ProcessEvent::Stdout(b"hi".to_vec()));
        assert_eq!(read(r#"{"event":{"data":{"stderr":"aGk="}}}"#), ProcessEvent::Stderr(b"hi".to_vec()));
        assert_eq!(read(r#"{"event":{"keepalive":{}}}"#), ProcessEvent::KeepAlive);
    }

    #[test]
    fn exit_codes_are_a_shells() {
        let code = |end: &str| match parse_process_event(format!(r#"{{"event":{{"end":{end}}}}}"#).as_bytes()) {
            Ok(ProcessEvent::End { code }) => code,
            other => panic!("{end}: {other:?}"),
        };
        assert_eq!(code(r#"{"exited":true,"status":"exit status 0"}"#), 0);
        assert_eq!(code(r#"{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}"#), 3);
        assert_eq!(code(r#"{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}"#), 137);
        assert_eq!(code(r#"{"exitCode":0,"status":"signal: terminated","error":"signal"}"#), 143);
        assert_eq!(code(r#"{"exitCode":-1,"status":"signal: signal 40"}"#), 168);
        assert_eq!(code(r#"{"exitCode":-1,"status":"signal: signal 400"}"#), 255);
        assert!(parse_process_event(br#"{"event":{"end":{"error":"no such program"}}}"#).is_err());
    }
}
