//! A client of QMP, QEMU's control protocol: JSON lines over a socket that QEMU inherited.
//!
//! ```text
//!   execute ──▶ line (+ descriptors) ──▶ QEMU
//!      ▲                                  │ one reader task
//!      └── answer by id ◀─────────────────┼──▶ events, to every subscriber
//!                                         └──▶ end of stream: every waiter gets `Gone`, for ever
//! ```
//!
//! Protocol: QEMU's `docs/interop/qmp-spec.txt`. Commands may run side by side; ids keep answers apart. An answer whose
//! asker has gone away is dropped. Nothing here waits without end: each command has a deadline.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::sync::{Mutex as AsyncMutex, broadcast, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The longest line that QEMU may send. Its longest answers (of introspection) are not asked for.
const MAX_LINE: u64 = 4 << 20;
const EVENTS_KEPT: usize = 256;

/// A command that did not succeed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QmpError {
    /// The connection is over: QEMU died, or closed it.
    #[error("{command}: QEMU is gone")]
    Gone {
        /// The command.
        command: String,
    },
    /// QEMU refused. Nothing happened.
    #[error("{command}: QEMU refused: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// What QEMU says.
        reason: String,
    },
    /// QEMU did not answer in time. The command may still take effect.
    #[error("{command}: no answer within {waited:?}")]
    Late {
        /// The command.
        command: String,
        /// The deadline.
        waited: Duration,
    },
    /// The socket failed, or carried what is not QMP.
    #[error("{command}: {cause}")]
    Channel {
        /// The command.
        command: String,
        /// Why.
        #[source]
        cause: Arc<io::Error>,
    },
}

/// Something that QEMU announced by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct QmpEvent {
    /// Its name, such as `STOP` or `MIGRATION`.
    pub name: String,
    /// Its data; `Null` if it has none.
    pub data: Value,
}

type Answer = Result<Value, String>;

#[derive(Debug, Default)]
struct Waiting {
    closed: bool,
    answers: HashMap<u64, oneshot::Sender<Answer>>,
}

/// The connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    socket: Arc<UnixStream>,
    sending: AsyncMutex<()>,
    waiting: Arc<Mutex<Waiting>>,
    events: broadcast::Sender<QmpEvent>,
    shutdown: Arc<Mutex<Option<String>>>,
    next_id: AtomicU64,
    patience: Duration,
    reader: JoinHandle<()>,
}

impl Qmp {
    /// Takes over our end of the socket, waits for QEMU's greeting and negotiates. Each command from then on may take
    /// as long as `patience`.
    pub async fn connect(socket: StdUnixStream, patience: Duration) -> Result<Self, QmpError> {
        let channel = |cause: io::Error| QmpError::Channel { command: "greeting".into(), cause: Arc::new(cause) };
        socket.set_nonblocking(true).map_err(channel)?;
        let reading = socket.try_clone().map_err(channel)?;
        let socket = Arc::new(UnixStream::from_std(socket).map_err(channel)?);
        let mut lines = BufReader::new(UnixStream::from_std(reading).map_err(channel)?);
        let greeting = async {
            let line = next_line(&mut lines).await.map_err(channel)?;
            match line {
                Some(line) if line.get("QMP").is_some() => Ok(()),
                Some(line) => Err(channel(io::Error::other(format!("not a greeting: {line}")))),
                None => Err(QmpError::Gone { command: "greeting".into() }),
            }
        };
        timeout(patience, greeting)
            .await
            .map_err(|_| QmpError::Late { command: "greeting".into(), waited: patience })??;
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let shutdown = Arc::new(Mutex::new(None));
        let reader = tokio::spawn(read_all(lines, Arc::clone(&waiting), events.clone(), Arc::clone(&shutdown)));
        let qmp = Self {
            socket,
            sending: AsyncMutex::new(()),
            waiting,
            events,
            shutdown,
            next_id: AtomicU64::new(1),
            patience,
            reader,
        };
        qmp.execute("qmp_capabilities", Value::Null).await?;
        Ok(qmp)
    }

    /// Runs a command and returns its answer. `arguments` is an object, or `Null` for none.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_with(command, arguments, None).await
    }

    /// Gives QEMU a descriptor under a name (`getfd`), for commands that take `fd:NAME`.
    pub async fn give_fd(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with("getfd", json!({ "fdname": name }), Some(fd)).await.map(drop)
    }

    /// Events from now on. Subscribe before the command whose event is awaited.
    pub fn events(&self) -> broadcast::Receiver<QmpEvent> {
        self.events.subscribe()
    }

    /// Why QEMU is about to exit or has exited, if it announced that (the `SHUTDOWN` event's reason).
    pub fn shutdown_reason(&self) -> Option<String> {
        self.shutdown.lock().clone()
    }

    async fn execute_with(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        let gone = || QmpError::Gone { command: command.into() };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let line = format!("{message}\n");
        let (sender, answer) = oneshot::channel();
        {
            let mut waiting = self.waiting.lock();
            if waiting.closed {
                return Err(gone());
            }
            waiting.answers.insert(id, sender);
        }
        let forget = Forget { waiting: &self.waiting, id };
        let exchange = async {
            self.send(line.as_bytes(), fd).await.map_err(|cause| match cause.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => gone(),
                _ => QmpError::Channel { command: command.into(), cause: Arc::new(cause) },
            })?;
            match answer.await {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(reason)) => Err(QmpError::Refused { command: command.into(), reason }),
                Err(_) => Err(gone()),
            }
        };
        let outcome = timeout(self.patience, exchange).await;
        drop(forget);
        outcome.map_err(|_| QmpError::Late { command: command.into(), waited: self.patience })?
    }

    /// Sends a line. A descriptor travels with its first byte.
    async fn send(&self, line: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        // A line that was cut by an abandoned caller would garble all that follow; lines fit the socket's buffer, so the
        // first write takes all of it, and the lock covers the odd case.
        let _sending = self.sending.lock().await;
        let mut rest = line;
        let mut fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        while !rest.is_empty() {
            let sent = self
                .socket
                .async_io(Interest::WRITABLE, || {
                    let attached = [ControlMessage::ScmRights(&fds)];
                    let control = if fds.is_empty() { &attached[..0] } else { &attached[..] };
                    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                    Ok(sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(rest)], control, flags, None)?)
                })
                .await?;
            fds.clear();
            rest = &rest[sent..];
        }
        Ok(())
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Takes a waiter off the table, however its command ends.
struct Forget<'a> {
    waiting: &'a Mutex<Waiting>,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.waiting.lock().answers.remove(&self.id);
    }
}

async fn next_line(lines: &mut BufReader<UnixStream>) -> io::Result<Option<Value>> {
    let mut line = Vec::new();
    let mut limited = lines.take(MAX_LINE);
    let count = match limited.read_until(b'\n', &mut line).await {
        Ok(count) => count,
        // QEMU died with something of ours unread.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
        Err(error) => return Err(error),
    };
    if count == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        return if count as u64 == MAX_LINE { Err(io::Error::other("a line without end")) } else { Ok(None) };
    }
    serde_json::from_slice(&line).map(Some).map_err(io::Error::other)
}

async fn read_all(
    mut lines: BufReader<UnixStream>,
    waiting: Arc<Mutex<Waiting>>,
    events: broadcast::Sender<QmpEvent>,
    shutdown: Arc<Mutex<Option<String>>>,
) {
    loop {
        let message = match next_line(&mut lines).await {
            Ok(Some(message)) => message,
            Ok(None) => break,
            Err(cause) => {
                tracing::warn!(%cause, "the control channel of a VMM is unusable");
                break;
            }
        };
        if let Some(name) = message.get("event").and_then(Value::as_str) {
            let data = message.get("data").cloned().unwrap_or(Value::Null);
            if name == "SHUTDOWN" || name == "GUEST_PANICKED" {
                let reason = data.get("reason").or(data.get("action")).and_then(Value::as_str).unwrap_or("unknown");
                *shutdown.lock() = Some(format!("{}: {reason}", name.to_lowercase().replace('_', " ")));
            }
            // Nobody may be listening.
            let _ = events.send(QmpEvent { name: name.to_owned(), data });
            continue;
        }
        let Some(id) = message.get("id").and_then(Value::as_u64) else {
            tracing::warn!(%message, "a VMM sent an answer to nobody");
            continue;
        };
        let answer = match (message.get("return"), message.get("error")) {
            (Some(value), _) => Ok(value.clone()),
            (None, Some(error)) => Err(error.get("desc").and_then(Value::as_str).unwrap_or("no reason").to_owned()),
            (None, None) => Err(format!("neither answer nor error: {message}")),
        };
        let asker = waiting.lock().answers.remove(&id);
        if let Some(asker) = asker {
            let _ = asker.send(answer);
        }
    }
    let mut waiting = waiting.lock();
    waiting.closed = true;
    waiting.answers.clear();
}

#[cfg(test)]
mod tests;
