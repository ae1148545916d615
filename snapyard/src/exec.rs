//! `sandbox exec`: one process in a guest, its streams here.
//!
//! ```text
//! Start ──> start{pid} ──> data… ──> end{code} ──> exit with the code
//!              │
//!              ├─ with --stdin: our standard input ──SendInput──> process, at its end CloseStdin
//!              └─ Ctrl-C: SIGTERM to the process; again: SIGKILL
//! ```
//!
//! If the connection breaks the process goes on in the guest (the agent does not kill it), which the message says. If
//! our own output is closed (`| head`), the process is told to end.

use std::io::{self, Read as _, Write};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::ExecArgs;
use crate::connect::{self, Decoder, Frame, ProcessEvent};
use crate::failure::{Failure, Kind};
use crate::rest::{Api, segment};

/// What `exec` says for a failure of its own, like `docker` and `env`, so that it cannot be taken for the command's.
pub const OWN_FAILURE: u8 = 125;
/// Bytes of standard input per message.
const STDIN_PIECE: usize = 32 << 10;
/// The agent sends an empty event when nothing else was said for this long, seconds.
const KEEPALIVE_S: &str = "50";

/// Runs the command to its end and gives back its exit code.
pub async fn run(api: &Api, args: ExecArgs) -> Result<u8, Failure> {
    let sandbox = api.call(Method::GET, &format!("/sandboxes/{}", segment(&args.sandbox)), None).await?.body;
    let token = sandbox.get("envdAccessToken").and_then(Value::as_str).unwrap_or_default();
    let agent = Agent { api: api.clone(), sandbox: args.sandbox.clone(), headers: headers(&args.user, token)? };
    let events = agent.start(&start_request(&args), args.timeout).await?;
    Run { agent, stdin: args.stdin, silent: false, pid: None, interrupts: 0 }.follow(events).await
}

/// Runs a line of shell in a sandbox that asks for no token, without its streams; answers its exit code.
pub async fn quietly(api: &Api, sandbox: &str, user: &str, line: &str) -> Result<u8, Failure> {
    let agent = Agent { api: api.clone(), sandbox: sandbox.to_owned(), headers: headers(user, "")? };
    let request = json!({"process": {"cmd": "/bin/bash", "args": ["-c", line]}, "stdin": false});
    let events = agent.start(&request, None).await?;
    Run { agent, stdin: false, silent: true, pid: None, interrupts: 0 }.follow(events).await
}

/// The body of `process.Process/Start`.
fn start_request(args: &ExecArgs) -> Value {
    let (program, arguments) = match args.command.as_slice() {
        [line] => ("/bin/bash", vec!["-l", "-c", line.as_str()]),
        [program, arguments @ ..] => (program.as_str(), arguments.iter().map(String::as_str).collect()),
        [] => unreachable!("the command line requires a command"),
    };
    let envs: serde_json::Map<String, Value> = args.env.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
    let mut process = json!({"cmd": program, "args": arguments, "envs": envs});
    if let Some(cwd) = &args.cwd {
        process["cwd"] = json!(cwd);
    }
    json!({"process": process, "stdin": args.stdin})
}

/// Headers of every call to the agent.
fn headers(user: &str, access_token: &str) -> Result<HeaderMap, Failure> {
    let value = |text: String| {
        HeaderValue::try_from(text).map_err(|_| Failure::new(Kind::Refused, "user name or token cannot be sent"))
    };
    let mut headers = HeaderMap::new();
    headers.insert("connect-protocol-version", HeaderValue::from_static("1"));
    headers.insert("authorization", value(format!("Basic {}", connect::encode_bytes(format!("{user}:").as_bytes())))?);
    if !access_token.is_empty() {
        headers.insert("x-access-token", value(access_token.to_owned())?);
    }
    Ok(headers)
}

/// The agent of one sandbox.
#[derive(Debug, Clone)]
struct Agent {
    api: Api,
    sandbox: String,
    headers: HeaderMap,
}

impl Agent {
    /// Starts a process that is killed after `timeout`, if one is said; answers the stream of its events.
    async fn start(&self, request: &Value, timeout: Option<Duration>) -> Result<Incoming, Failure> {
        let mut headers = self.headers.clone();
        headers.insert("content-type", HeaderValue::from_static("application/connect+json"));
        headers.insert("keepalive-ping-interval", HeaderValue::from_static(KEEPALIVE_S));
        if let Some(timeout) = timeout {
            let milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            headers.insert("connect-timeout-ms", HeaderValue::from(milliseconds));
        }
        let body = connect::encode(request.to_string().as_bytes());
        Ok(self.api.agent(&self.sandbox, "/process.Process/Start", headers, body).await?.into_body())
    }

    /// A unary call of the process service about process `pid`, with `extra` beside the selector.
    async fn about(&self, method: &str, pid: u32, extra: Value) -> Result<(), Failure> {
        let mut body = json!({"process": {"pid": pid}});
        if let (Value::Object(body), Value::Object(extra)) = (&mut body, extra) {
            body.extend(extra);
        }
        let mut headers = self.headers.clone();
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        let path = format!("/process.Process/{method}");
        let response = self.api.agent(&self.sandbox, &path, headers, body.to_string().into_bytes()).await?;
        // Read to the end, so that the connection can be used again.
        response.into_body().collect().await.map_err(|error| Failure::new(Kind::Unreachable, error.to_string()))?;
        Ok(())
    }

    /// Copies our standard input to the process. A process that no longer reads ends the copying, not the command.
    async fn feed_stdin(self, pid: u32) {
        let mut pieces = stdin_pieces();
        while let Some(piece) = pieces.recv().await {
            let input = json!({"input": {"stdin": connect::encode_bytes(&piece)}});
            if let Err(failure) = self.about("SendInput", pid, input).await {
                tracing::debug!(%failure, "the process takes no more input");
                return;
            }
        }
        if let Err(failure) = self.about("CloseStdin", pid, json!({})).await {
            tracing::debug!(%failure, "the process's standard input could not be closed");
        }
    }
}

/// Standard input, piece by piece; the channel closes at its end. A thread of its own reads it, since such a read
/// cannot be interrupted: the process ends without waiting for it.
fn stdin_pieces() -> mpsc::Receiver<Vec<u8>> {
    let (send, pieces) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut piece = vec![0; STDIN_PIECE];
        while let Ok(count @ 1..) = stdin.read(&mut piece) {
            if send.blocking_send(piece[..count].to_vec()).is_err() {
                break; // nobody wants more
            }
        }
    });
    pieces
}

/// Writes to one of our own streams, which may be a pipe that is full: not on an async thread.
async fn write_out(mut stream: impl Write + Send + 'static, bytes: Vec<u8>) -> io::Result<()> {
    let written = tokio::task::spawn_blocking(move || {
        stream.write_all(&bytes)?;
        stream.flush()
    });
    written.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// A process while it runs.
struct Run {
    agent: Agent,
    stdin: bool,
    /// What it writes is thrown away.
    silent: bool,
    pid: Option<u32>,
    interrupts: u32,
}

impl Run {
    async fn follow(mut self, mut body: Incoming) -> Result<u8, Failure> {
        let mut decoder = Decoder::default();
        let mut code = None;
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                _ = tokio::signal::ctrl_c() => {
                    self.interrupted().await?;
                    continue;
                }
            };
            let piece: Bytes = match frame {
                None => break,
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(error)) => return Err(self.broken(&error.to_string())),
            };
            decoder.push(&piece);
            while let Some(frame) = decoder.next_frame().map_err(|error| self.broken(&error.to_string()))? {
                match frame {
                    Frame::Message(payload) => {
                        let event = connect::parse_process_event(&payload)
                            .map_err(|error| Failure::new(Kind::Refused, error.to_string()))?;
                        code = self.apply(event).await?.or(code);
                    }
                    Frame::End(Some(error)) => {
                        let kind = if error.code == "not_found" { Kind::NotFound } else { Kind::Refused };
                        return Err(Failure::new(kind, format!("{} ({})", error.message, error.code)));
                    }
                    Frame::End(None) => {}
                }
            }
        }
        decoder.finish().map_err(|error| self.broken(&error.to_string()))?;
        code.ok_or_else(|| self.broken("the stream ended before the command did"))
    }

    /// One event; the exit code if it was the last.
    async fn apply(&mut self, event: ProcessEvent) -> Result<Option<u8>, Failure> {
        match event {
            ProcessEvent::Start { pid } => {
                self.pid = Some(pid);
                if self.stdin {
                    // Ends with the process of ours: what the guest's process does not read is nobody's.
                    tokio::spawn(self.agent.clone().feed_stdin(pid));
                }
            }
            ProcessEvent::Stdout(_) | ProcessEvent::Stderr(_) if self.silent => {}
            ProcessEvent::Stdout(bytes) => {
                if let Err(error) = write_out(io::stdout(), bytes).await {
                    self.signal("SIGNAL_SIGTERM").await?;
                    return Err(Failure::new(Kind::Refused, format!("standard output is closed: {error}")));
                }
            }
            ProcessEvent::Stderr(bytes) => {
                // Nobody to tell if standard error is closed.
                let _ = write_out(io::stderr(), bytes).await;
            }
            ProcessEvent::End { code } => return Ok(Some(code)),
            ProcessEvent::KeepAlive => {}
        }
        Ok(None)
    }

    /// Ctrl-C: asks, then insists.
    async fn interrupted(&mut self) -> Result<(), Failure> {
        self.interrupts += 1;
        let signal = if self.interrupts == 1 { "SIGNAL_SIGTERM" } else { "SIGNAL_SIGKILL" };
        self.signal(signal).await
    }

    async fn signal(&self, signal: &str) -> Result<(), Failure> {
        match self.pid {
            Some(pid) => self.agent.about("SendSignal", pid, json!({"signal": signal})).await,
            None => Err(Failure::new(Kind::Refused, "interrupted before the command had started")),
        }
    }

    fn broken(&self, why: &str) -> Failure {
        let failure = Failure::new(Kind::Unreachable, format!("lost the command in {}: {why}", self.agent.sandbox));
        match self.pid {
            Some(pid) => failure.hint(format!("it goes on in the guest as process {pid}, if the guest does")),
            None => failure,
        }
    }
}

#[cfg(test)]
mod tests;
