//! One kernel process: its start, its pipes, and what comes out of them. `kernel.py` documents the other side.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe;

use crate::cgroup::UserCgroup;
use crate::process::ProcessId;
use crate::sys::exit::Watch;
use crate::sys::spawn::{self, Exit, Ids, Plan};
use crate::users::User;

const PIECE: usize = 32 * 1024;

/// How kernels of a context are started.
pub struct Recipe {
    /// As whom.
    pub user: User,
    /// With what environment.
    pub env: BTreeMap<String, String>,
    /// Where.
    pub cwd: String,
    /// The program, as an absolute path, and its arguments; the generation is added as the last.
    pub command: Vec<String>,
    /// The user's cgroup.
    pub cgroup: Arc<UserCgroup>,
}

/// What a kernel said or did.
#[derive(Debug)]
pub enum Heard {
    /// It waits for its first request.
    Ready,
    /// A whole line of JSON for the client.
    Event(Vec<u8>),
    /// The request is done.
    Done,
    /// It has ended.
    Ended(Exit),
}

/// A running kernel.
pub struct Kernel {
    /// Its process, which leads its group.
    pub pid: ProcessId,
    requests: pipe::Sender,
    replies: pipe::Receiver,
    stdout: Text,
    stderr: Text,
    exit: Watch,
    unread: Vec<u8>,
    /// Events that are ready to be handed out, in order.
    queue: std::collections::VecDeque<Heard>,
}

impl Kernel {
    /// Starts one. It is usable after [`Heard::Ready`].
    pub async fn start(recipe: &Recipe, generation: u64) -> io::Result<Self> {
        let (requests_read, requests) = pipe2(OFlag::O_CLOEXEC)?;
        let (replies, replies_write) = pipe2(OFlag::O_CLOEXEC)?;
        let (out, out_write) = pipe2(OFlag::O_CLOEXEC)?;
        let (err, err_write) = pipe2(OFlag::O_CLOEXEC)?;
        let null: OwnedFd = std::fs::File::open("/dev/null")?.into();
        let generation = generation.to_string();
        let args: Vec<CString> = recipe
            .command
            .iter()
            .chain([&generation])
            .map(|arg| CString::new(arg.as_str()))
            .collect::<Result<_, _>>()?;
        let env: Vec<CString> =
            recipe.env.iter().filter_map(|(name, value)| CString::new(format!("{name}={value}")).ok()).collect();
        // Only a process of root's can change its user.
        let groups = [recipe.user.gid];
        let ids = nix::unistd::geteuid().is_root().then_some(Ids {
            uid: recipe.user.uid,
            gid: recipe.user.gid,
            groups: &groups,
        });
        recipe.cgroup.thawed().await;
        let child = spawn::spawn(&Plan {
            program: &args[0],
            args: &args,
            env: &env,
            cwd: &CString::new(recipe.cwd.as_str())?,
            ids,
            fds: &[null.as_fd(), out_write.as_fd(), err_write.as_fd(), requests_read.as_fd(), replies_write.as_fd()],
            cgroup: recipe.cgroup.target(),
        })
        .map_err(|error| io::Error::other(format!("{}: {error}", args[0].to_string_lossy())))?;
        Ok(Self {
            pid: ProcessId(child.pid),
            requests: pipe::Sender::from_owned_fd(requests)?,
            replies: pipe::Receiver::from_owned_fd(replies)?,
            stdout: Text::new("stdout", out)?,
            stderr: Text::new("stderr", err)?,
            exit: Watch::new(child.pidfd)?,
            unread: Vec::new(),
            queue: std::collections::VecDeque::new(),
        })
    }

    /// Sends a request, one line of JSON.
    pub async fn request(&mut self, mut line: Vec<u8>) -> io::Result<()> {
        line.push(b'\n');
        self.requests.write_all(&line).await
    }

    /// Waits for the next thing. May be dropped and called again without losing any.
    pub async fn next(&mut self) -> Heard {
        loop {
            if let Some(heard) = self.queue.pop_front() {
                return heard;
            }
            // A child of the kernel's may hold the pipes after its end: hence the look at the process itself.
            let alive = tokio::select! {
                biased;
                () = self.stdout.readable() => { self.stdout.take(&mut self.queue); true }
                () = self.stderr.readable() => { self.stderr.take(&mut self.queue); true }
                ready = self.replies.readable() => ready.is_ok(),
                () = self.exit.ended() => false,
            };
            // The kernel flushed before it replied: what it printed comes first.
            self.stdout.drain(&mut self.queue);
            self.stderr.drain(&mut self.queue);
            if !self.read_replies() || !alive {
                let exit = self.wait().await;
                self.queue.push_back(Heard::Ended(exit));
            }
        }
    }

    /// Kills the kernel and all that it started in its group.
    pub fn kill(&self) {
        // It may be gone already.
        let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(self.pid.0), nix::sys::signal::Signal::SIGKILL);
    }

    /// False once the kernel has closed its end.
    fn read_replies(&mut self) -> bool {
        let mut piece = vec![0; PIECE];
        loop {
            match self.replies.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(length) => self.unread.extend_from_slice(&piece[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        let mut start = 0;
        while let Some(end) = self.unread[start..].iter().position(|byte| *byte == b'\n') {
            let line = &self.unread[start..start + end];
            start += end + 1;
            match line.split_first() {
                Some((b'R', _)) => self.queue.push_back(Heard::Ready),
                Some((b'D', _)) => {
                    self.stdout.flush(&mut self.queue);
                    self.stderr.flush(&mut self.queue);
                    self.queue.push_back(Heard::Done);
                }
                Some((b'E', json)) => self.queue.push_back(Heard::Event([json, b"\n"].concat())),
                // A cell that writes to our descriptor itself talks nonsense to nobody but itself.
                _ => {}
            }
        }
        self.unread.drain(..start);
        true
    }

    async fn wait(&self) -> Exit {
        // A cell that closed our descriptors cannot be talked to any more.
        self.kill();
        self.exit.exited().await
    }
}

/// One text output: bytes in, events out, never half a character.
struct Text {
    kind: &'static str,
    pipe: Option<pipe::Receiver>,
    /// The beginning of a character whose rest has not come.
    partial: Vec<u8>,
}

#[derive(Serialize)]
struct TextEvent<'a> {
    r#type: &'static str,
    text: &'a str,
    timestamp: u64,
}

type Queue = std::collections::VecDeque<Heard>;

impl Text {
    fn new(kind: &'static str, pipe: OwnedFd) -> io::Result<Self> {
        Ok(Self { kind, pipe: Some(pipe::Receiver::from_owned_fd(pipe)?), partial: Vec::new() })
    }

    async fn readable(&self) {
        match &self.pipe {
            // An error shows again at the read.
            Some(pipe) => drop(pipe.readable().await),
            None => std::future::pending().await,
        }
    }

    /// Reads one piece. False when there is none.
    fn take(&mut self, queue: &mut Queue) -> bool {
        let Some(pipe) = &self.pipe else { return false };
        let mut piece = vec![0; PIECE];
        match pipe.try_read(&mut piece) {
            Ok(0) => self.pipe = None,
            Ok(length) => {
                self.push(&piece[..length], queue);
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.pipe = None,
        }
        false
    }

    fn drain(&mut self, queue: &mut Queue) {
        while self.take(queue) {}
    }

    fn push(&mut self, bytes: &[u8], queue: &mut Queue) {
        self.partial.extend_from_slice(bytes);
        let whole = whole_characters(&self.partial);
        if whole > 0 {
            let text: Vec<u8> = self.partial.drain(..whole).collect();
            queue.push_back(Heard::Event(self.event(&text)));
        }
    }

    /// What is left will not be completed.
    fn flush(&mut self, queue: &mut Queue) {
        if !self.partial.is_empty() {
            let text = std::mem::take(&mut self.partial);
            queue.push_back(Heard::Event(self.event(&text)));
        }
    }

    fn event(&self, text: &[u8]) -> Vec<u8> {
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let event = TextEvent {
            r#type: self.kind,
            text: &String::from_utf8_lossy(text),
            timestamp: u64::try_from(timestamp).unwrap_or(0),
        };
        let mut line = ascii_json(&event);
        line.push(b'\n');
        line
    }
}

/// How many bytes at the front are whole characters, or can never become any.
fn whole_characters(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    for (index, byte) in bytes.iter().enumerate().skip(from).rev() {
        let needed = match byte {
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf7 => 4,
            _ => continue,
        };
        return if bytes.len() - index < needed { index } else { bytes.len() };
    }
    bytes.len()
}

/// JSON without a character beyond ASCII. A client that reads line by line may take U+0085, U+2028 and U+2029, which JSON
/// allows in strings, for the ends of lines (httpx does).
fn ascii_json(event: &impl Serialize) -> Vec<u8> {
    use std::fmt::Write as _;
    let mut line = String::new();
    for c in serde_json::to_string(event).expect("a plain structure").chars() {
        if c.is_ascii() {
            line.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string does not fail.
            let _ = write!(line, "\\u{unit:04x}");
        }
    }
    line.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_is_never_cut() {
        let text = "aé€😀".as_bytes();
        for (length, whole) in [(0, 0), (1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 6), (7, 6), (9, 6), (10, 10)] {
            assert_eq!(whole_characters(&text[..length]), whole, "{length}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_do_not_wait() {
        assert_eq!(whole_characters(&[0xff, 0x80, 0x80, 0x80]), 4);
        assert_eq!(whole_characters(b"plain"), 5);
    }
}
