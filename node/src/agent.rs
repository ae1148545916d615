//! The node's clients inside a guest: the control port (identity after a restore, freeze and thaw around a snapshot), and
//! the process service, for the commands of a template's recipe.
//!
//! One connection per call: a call is rare (one at a restore, two at a snapshot), and a connection that was open
//! when the guest was captured is dead in its copy, so keeping one would only add a case.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::error::NodeError;

/// How long an agent may take for one request. Generous: an emulated guest under full load answers late, and a
/// guest that does not answer at all is found by the caller's own deadline or by its virtual machine's end.
const DEADLINE: Duration = Duration::from_secs(20);

/// Bytes of fresh randomness that a restored guest gets.
pub const ENTROPY_BYTES: usize = 64;

/// The body of `/init`: what makes a restored guest itself.
#[derive(Debug, Serialize)]
pub struct Identity {
    /// The sandbox's id.
    pub sandbox_id: String,
    /// Host name inside the guest.
    pub hostname: String,
    /// Wall clock, nanoseconds since 1970.
    pub unix_ns: i64,
    /// Fresh randomness, base64.
    pub entropy: String,
    /// Token that data-plane requests must carry; empty: none.
    pub access_token: String,
    /// Environment of every process that the agent starts.
    pub env: std::collections::BTreeMap<String, String>,
}

/// The control port of one guest.
#[derive(Clone, Debug)]
pub struct Agent {
    address: SocketAddr,
    sandbox: String,
}

impl Agent {
    /// The agent reachable at `address` (a forwarded port on loopback); `sandbox` is for messages.
    pub fn new(address: SocketAddr, sandbox: &str) -> Self {
        Self { address, sandbox: sandbox.to_owned() }
    }

    /// Gives a restored guest its identity, clock and randomness, and lets its processes go on.
    pub async fn init(&self, identity: &Identity) -> Result<(), NodeError> {
        self.identify("/init", identity).await
    }

    /// The same for practice: the user's processes stay frozen until [`Agent::init`]. Refused by a guest whose login shell
    /// was changed.
    pub async fn rehearse(&self, identity: &Identity) -> Result<(), NodeError> {
        self.identify("/rehearse", identity).await
    }

    async fn identify(&self, path: &'static str, identity: &Identity) -> Result<(), NodeError> {
        let body = serde_json::to_vec(identity).map_err(|error| self.error(path, error.to_string()))?;
        self.call(Method::POST, path, Bytes::from(body), DEADLINE).await
    }

    /// Stops every user process inside the guest. Idempotent.
    pub async fn freeze(&self) -> Result<(), NodeError> {
        self.call(Method::POST, "/freeze", Bytes::new(), DEADLINE).await
    }

    /// Lets user processes go on. Idempotent.
    pub async fn thaw(&self) -> Result<(), NodeError> {
        self.call(Method::POST, "/thaw", Bytes::new(), DEADLINE).await
    }

    /// Starts the interpreter and touches what first commands touch, before a template is captured.
    pub async fn warm(&self) -> Result<(), NodeError> {
        self.call(Method::POST, "/warm", Bytes::new(), Duration::from_secs(180)).await
    }

    /// Waits until the agent answers at all, as after a boot.
    pub async fn wait_healthy(&self, deadline: Duration) -> Result<(), NodeError> {
        let started = tokio::time::Instant::now();
        loop {
            let last = match self.call(Method::GET, "/health", Bytes::new(), Duration::from_secs(2)).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if started.elapsed() > deadline {
                return Err(last);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn call(&self, method: Method, path: &'static str, body: Bytes, deadline: Duration) -> Result<(), NodeError> {
        match tokio::time::timeout(deadline, self.exchange(method, path, body)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(cause)) => Err(self.error(path, cause)),
            Err(_) => Err(self.error(path, format!("no answer within {} s", deadline.as_secs()))),
        }
    }

    async fn exchange(&self, method: Method, path: &'static str, body: Bytes) -> Result<(), String> {
        let stream = TcpStream::connect(self.address).await.map_err(|error| error.to_string())?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "agent")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let driver = tokio::spawn(connection);
        let answered = async {
            let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
            let status = response.status();
            if status.is_success() {
                return Ok(());
            }
            let body = read(response.into_body()).await?;
            Err(format!("{status}: {}", String::from_utf8_lossy(&body)))
        }
        .await;
        driver.abort();
        answered
    }

    fn error(&self, what: &'static str, cause: String) -> NodeError {
        NodeError::Agent { sandbox: self.sandbox.clone(), what, cause }
    }
}

/// Most bytes of an answer: a guest is not trusted, and those that are waited for are short.
const ANSWER_MAX: usize = 1 << 20;

async fn read(body: hyper::body::Incoming) -> Result<Bytes, String> {
    let body = http_body_util::Limited::new(body, ANSWER_MAX);
    Ok(body.collect().await.map_err(|error| error.to_string())?.to_bytes())
}

/// A home directory that nobody can make: in the process file system.
const NO_HOME: &str = "/proc/no-home";

/// How long a recipe's command may take.
const COMMAND_DEADLINE: Duration = Duration::from_secs(300);

/// The process service of the agent's public port, as far as template builds and rehearsals need it: Connect protocol,
/// JSON, streams of frames (flags, big-endian length, message).
pub struct Processes {
    address: SocketAddr,
    whose: String,
}

impl Processes {
    /// The service at `address`; `whose` guest it is, is for messages.
    pub fn new(address: SocketAddr, whose: &str) -> Self {
        Self { address, whose: whose.to_owned() }
    }

    /// Runs a shell command to its end, which must be a success.
    pub async fn run(&self, user: &str, command: &str) -> Result<(), NodeError> {
        self.finish(&shell(command), user, "", command, COMMAND_DEADLINE).await
    }

    /// Runs a login shell that does nothing of note, and for which no home directory exists: no file of the user's.
    pub async fn rehearse(&self, token: &str) -> Result<(), NodeError> {
        let process = serde_json::json!({
            "cmd": "/bin/bash",
            "args": login_shell("echo rehearsed; (:)"),
            "envs": { "HOME": NO_HOME },
            "cwd": "/",
        });
        self.finish(&process, "", token, "a rehearsal", DEADLINE).await
    }

    /// Starts a shell command and leaves it running.
    pub async fn start(&self, user: &str, command: &str) -> Result<(), NodeError> {
        let started = tokio::time::timeout(COMMAND_DEADLINE, async {
            let mut body = self.open(&shell(command), user, "").await?;
            // The first frame says that it runs, or why not.
            match body.frame().await {
                Some(Ok(_)) => Ok(()),
                Some(Err(error)) => Err(error.to_string()),
                None => Err("no answer".to_owned()),
            }
        });
        self.judge(command, started.await.unwrap_or_else(|_| Err("it did not start in time".to_owned())))
    }

    async fn finish(
        &self,
        process: &Value,
        user: &str,
        token: &str,
        what: &str,
        deadline: Duration,
    ) -> Result<(), NodeError> {
        let ran =
            tokio::time::timeout(deadline, async { outcome(&read(self.open(process, user, token).await?).await?) });
        self.judge(what, ran.await.unwrap_or_else(|_| Err("it did not end in time".to_owned())))
    }

    async fn open(&self, process: &Value, user: &str, token: &str) -> Result<hyper::body::Incoming, String> {
        use base64::Engine as _;
        let message = serde_json::json!({ "process": process });
        let login = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
        let stream = TcpStream::connect(self.address).await.map_err(|error| error.to_string())?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
        // Ends when the answer has been read or dropped.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(Method::POST)
            .uri("/process.Process/Start")
            .header("host", "agent")
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("authorization", format!("Basic {login}"))
            .header("x-access-token", token)
            .body(Full::new(frame(&message.to_string())))
            .map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        match response.status() {
            status if status.is_success() => Ok(response.into_body()),
            status => Err(format!("the agent answered {status}")),
        }
    }

    fn judge(&self, command: &str, ran: Result<(), String>) -> Result<(), NodeError> {
        ran.map_err(|why| NodeError::Build { alias: self.whose.clone(), why: format!("{command:?}: {why}") })
    }
}

fn login_shell(command: &str) -> [&str; 3] {
    ["-l", "-c", command]
}

fn shell(command: &str) -> Value {
    serde_json::json!({ "cmd": "/bin/bash", "args": login_shell(command) })
}

/// One message of a stream.
fn frame(message: &str) -> Bytes {
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(message.as_bytes());
    Bytes::from(bytes)
}

/// What the frames of an ended process say.
fn outcome(mut frames: &[u8]) -> Result<(), String> {
    while let Some((head, rest)) = frames.split_at_checked(5) {
        let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let (message, rest) = rest.split_at_checked(len).ok_or("its answer is cut off")?;
        frames = rest;
        let message: Value = serde_json::from_slice(message).map_err(|error| error.to_string())?;
        if let Some(error) = message.get("error") {
            return Err(error.to_string());
        }
        if let Some(end) = message.pointer("/event/end") {
            let code = end.get("exitCode").and_then(Value::as_i64).unwrap_or(0);
            return if code == 0 { Ok(()) } else { Err(format!("it ended with {code}")) };
        }
    }
    Err("its answer has no end".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_found_among_its_frames() {
        let frames = |messages: &[&str]| messages.iter().flat_map(|message| frame(message)).collect::<Vec<u8>>();
        let start = r#"{"event":{"start":{"pid":7}}}"#;
        assert_eq!(outcome(&frames(&[start, r#"{"event":{"end":{"exited":true}}}"#])), Ok(()));
        assert!(outcome(&frames(&[start, r#"{"event":{"end":{"exitCode":3,"exited":true}}}"#])).is_err());
        assert!(outcome(&frames(&[start, r#"{"error":{"code":"not_found"}}"#])).is_err());
        assert!(outcome(&frames(&[start])).is_err(), "a stream that breaks off");
        let whole = frames(&[start]);
        assert!(outcome(&whole[..whole.len() - 1]).is_err());
        assert!(outcome(&[0, 255, 255, 255, 255, 1]).is_err());
    }
}
