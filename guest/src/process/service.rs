//! `process.Process` of the SDKs.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::{Config, Process, ProcessId, Request, events, not_found, start};
use crate::connect::{
    CallError, Code, FrameDecoder, keepalive, parse, read_single, read_unary, stream_error, stream_of, stream_single,
    timeout, unary,
};
use crate::http::Answer;
use crate::service::requested_user;
use crate::state::Agent;

#[derive(Deserialize)]
struct StartRequest {
    #[serde(default)]
    process: Option<Config>,
    #[serde(default)]
    pty: Option<serde_json::Value>,
    #[serde(default)]
    tag: Option<String>,
    #[serde(default)]
    stdin: Option<bool>,
}

#[derive(Deserialize)]
struct Selector {
    #[serde(default)]
    pid: Option<ProcessId>,
    #[serde(default)]
    tag: Option<String>,
}

#[derive(Deserialize)]
struct Selected {
    #[serde(default)]
    process: Option<Selector>,
}

#[derive(Deserialize)]
struct Input {
    #[serde(default)]
    stdin: Option<String>,
    #[serde(default)]
    pty: Option<String>,
}

#[derive(Deserialize)]
struct SendInput {
    #[serde(default)]
    process: Option<Selector>,
    #[serde(default)]
    input: Option<Input>,
}

#[derive(Deserialize)]
struct SendSignal {
    #[serde(default)]
    process: Option<Selector>,
    #[serde(default)]
    signal: serde_json::Value,
}

#[derive(Deserialize)]
struct StreamInput {
    #[serde(default)]
    start: Option<Selected>,
    #[serde(default)]
    data: Option<StreamData>,
}

#[derive(Deserialize)]
struct StreamData {
    #[serde(default)]
    input: Option<Input>,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct Info<'a> {
    pid: ProcessId,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
    config: &'a Config,
}

#[derive(Serialize)]
struct List<'a> {
    processes: Vec<Info<'a>>,
}

/// Calls `method`.
pub async fn handle(agent: &Agent, method: &str, headers: &HeaderMap, body: Incoming) -> Answer {
    match method {
        "Start" => stream(start_process(agent, headers, body).await),
        "Connect" => stream(connect(agent, headers, body).await),
        "List" => list(agent, body).await,
        "SendInput" => unary(send_input(agent, body).await.map(|()| Empty {})),
        "StreamInput" => stream_single(stream_input(agent, body).await),
        "SendSignal" => unary(send_signal(agent, body).await.map(|()| Empty {})),
        "CloseStdin" => unary(close_stdin(agent, body).await.map(|()| Empty {})),
        "Update" => unary::<Empty>(Err(no_pty())),
        _ => unary::<Empty>(Err(CallError::new(Code::Unimplemented, format!("process.Process has no {method}")))),
    }
}

fn no_pty() -> CallError {
    CallError::new(Code::Unimplemented, "pseudo terminals are not supported by this sandbox; run the command without")
}

fn stream(events: Result<Events, CallError>) -> Answer {
    match events {
        Ok(events) => stream_of(StreamBody::new(events).boxed_unsync()),
        Err(error) => stream_error(&error),
    }
}

async fn start_process(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Events, CallError> {
    let request: StartRequest = read_single(body).await?;
    if request.pty.is_some_and(|pty| !pty.is_null()) {
        return Err(no_pty());
    }
    let config = request.process.ok_or_else(|| CallError::new(Code::InvalidArgument, "the request has no process"))?;
    let user = requested_user(agent, headers)?;
    let request =
        Request { config, tag: request.tag, stdin: request.stdin.unwrap_or(true), deadline: timeout(headers)? };
    Ok(Events::new(start(agent, &user, request).await?, keepalive(headers), None))
}

async fn connect(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Events, CallError> {
    let request: Selected = read_single(body).await?;
    let process = select(agent, request.process)?;
    let receiver = process.connect().ok_or_else(|| not_found(&process.pid.to_string()))?;
    Ok(Events::new(receiver, keepalive(headers), timeout(headers)?))
}

async fn list(agent: &Agent, body: Incoming) -> Answer {
    if let Err(error) = read_unary::<serde_json::Value>(body).await {
        return unary::<Empty>(Err(error));
    }
    let processes = agent.processes.list();
    let processes = processes
        .iter()
        .map(|process| Info { pid: process.pid, tag: process.tag.as_deref(), config: &process.config })
        .collect();
    unary(Ok(List { processes }))
}

async fn send_input(agent: &Agent, body: Incoming) -> Result<(), CallError> {
    let request: SendInput = read_unary(body).await?;
    let process = select(agent, request.process)?;
    process.write_stdin(&decode(request.input)?).await
}

async fn stream_input(agent: &Agent, mut body: Incoming) -> Result<(), CallError> {
    let mut frames = FrameDecoder::default();
    let mut process: Option<Arc<Process>> = None;
    while let Some(part) = body.frame().await {
        let part = part.map_err(|error| CallError::new(Code::InvalidArgument, error.to_string()))?;
        let Ok(data) = part.into_data() else { continue };
        frames.feed(&data);
        while let Some(message) = frames.next()? {
            let message: StreamInput = parse(&message)?;
            if let Some(start) = message.start {
                process = Some(select(agent, start.process)?);
            } else if let Some(data) = message.data {
                let none = || CallError::new(Code::InvalidArgument, "the first message must name the process");
                process.as_ref().ok_or_else(none)?.write_stdin(&decode(data.input)?).await?;
            }
        }
    }
    if frames.is_empty() {
        Ok(())
    } else {
        Err(CallError::new(Code::InvalidArgument, "the stream ends inside a message"))
    }
}

async fn send_signal(agent: &Agent, body: Incoming) -> Result<(), CallError> {
    let request: SendSignal = read_unary(body).await?;
    let process = select(agent, request.process)?;
    let signal = match (request.signal.as_str(), request.signal.as_i64()) {
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Signal::SIGTERM,
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Signal::SIGKILL,
        _ => {
            let message = format!("signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL, not {}", request.signal);
            return Err(CallError::new(Code::InvalidArgument, message));
        }
    };
    process.signal(signal)
}

async fn close_stdin(agent: &Agent, body: Incoming) -> Result<(), CallError> {
    let request: Selected = read_unary(body).await?;
    select(agent, request.process)?.close_stdin().await;
    Ok(())
}

fn select(agent: &Agent, selector: Option<Selector>) -> Result<Arc<Process>, CallError> {
    match selector {
        Some(Selector { pid: Some(pid), .. }) => agent.processes.by_pid(pid).ok_or_else(|| not_found(&pid.to_string())),
        Some(Selector { tag: Some(tag), .. }) => agent.processes.by_tag(&tag).ok_or_else(|| not_found(&tag)),
        _ => Err(CallError::new(Code::InvalidArgument, "the request names no process, neither by pid nor by tag")),
    }
}

fn decode(input: Option<Input>) -> Result<Vec<u8>, CallError> {
    let input = input.ok_or_else(|| CallError::new(Code::InvalidArgument, "the request has no input"))?;
    if input.pty.is_some() {
        return Err(no_pty());
    }
    BASE64
        .decode(input.stdin.unwrap_or_default())
        .map_err(|error| CallError::new(Code::InvalidArgument, format!("stdin is not base64: {error}")))
}

/// The messages of one client: what its process says, keepalives in between, and the end of its own deadline.
struct Events {
    messages: mpsc::Receiver<Bytes>,
    every: Option<Duration>,
    silence: Option<Pin<Box<Sleep>>>,
    deadline: Option<Pin<Box<Sleep>>>,
    over: bool,
}

impl Events {
    fn new(messages: mpsc::Receiver<Bytes>, every: Option<Duration>, deadline: Option<Duration>) -> Self {
        let deadline = deadline.map(|after| Box::pin(sleep(after)));
        Self { messages, every, silence: None, deadline, over: false }
    }
}

impl futures::Stream for Events {
    type Item = Result<Frame<Bytes>, std::io::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(message) = self.messages.poll_recv(cx) {
            let every = self.every;
            if let (Some(silence), Some(every)) = (&mut self.silence, every) {
                silence.as_mut().reset(Instant::now() + every);
            }
            return Poll::Ready(message.map(|message| Ok(Frame::data(message))));
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            self.over = true;
            let end = events::deadline("the time-out of this connection has passed; the process goes on");
            return Poll::Ready(Some(Ok(Frame::data(end))));
        }
        if let Some(every) = self.every {
            let silence = self.silence.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + every)));
            if silence.as_mut().poll(cx).is_ready() {
                silence.as_mut().reset(Instant::now() + every);
                // Registers the timer anew.
                let _ = silence.as_mut().poll(cx);
                return Poll::Ready(Some(Ok(Frame::data(events::keepalive()))));
            }
        }
        Poll::Pending
    }
}
