//! The task behind one process: reads its output, waits for its end, enforces its deadline.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use nix::sys::signal::Signal;
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep};

use super::events::{self, Output};
use super::{Listener, Process, Table};
use crate::sys::exit::Watch;
use crate::sys::spawn::Exit;

/// Most output in one message.
const PIECE: usize = 32 * 1024;
/// How long both pipes must be quiet, after the program's exit, before its stream ends although a child that it left
/// behind holds them.
const QUIET: Duration = Duration::from_millis(100);
/// And how long such a child may go on talking.
const LINGER: Duration = Duration::from_secs(2);

thread_local! {
    /// One buffer for all processes of the thread: it is filled and emptied without a pause in between.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into_boxed_slice());
}

/// What a process is watched by.
pub struct Pipes {
    /// Its standard output.
    pub stdout: pipe::Receiver,
    /// Its standard error.
    pub stderr: pipe::Receiver,
    /// Readable once it has exited.
    pub exit: Watch,
}

/// What one look at a pipe found.
enum Read {
    Data(Bytes),
    Nothing,
    End,
}

/// Runs until the process has ended and its listeners know.
pub async fn drive(process: Arc<Process>, pipes: Pipes, deadline: Option<Duration>, table: Table) {
    let Pipes { stdout, stderr, exit } = pipes;
    let mut outputs = Outputs { stdout: Some(stdout), stderr: Some(stderr) };
    let mut late = false;
    let status = {
        let life = live(&process, &mut outputs, &exit);
        tokio::pin!(life);
        // The deadline holds also while `live` waits for a client that does not read.
        tokio::select! {
            biased;
            status = &mut life => status,
            () = passed(deadline) => {
                late = true;
                // It may have ended this very moment.
                let _ = process.signal(Signal::SIGKILL);
                life.await
            }
        }
    };
    table.with(|table| table.remove(&process.pid));
    process.close_stdin().await;
    let last = {
        let mut listeners = process.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.ended = true;
        std::mem::take(&mut listeners.list)
    };
    for Listener { queue, starter } in last {
        let message = match late && starter {
            true => events::deadline(&format!("process {} was killed: its time-out has passed", process.pid)),
            false => events::end(status),
        };
        // A client that does not read must not keep the others, nor this task.
        tokio::spawn(async move { queue.send(message).await });
    }
    // A child of it may hold the pipes, and must not die of SIGPIPE for that.
    while outputs.next().await.is_some() {}
}

/// From the start to the last output.
async fn live(process: &Process, outputs: &mut Outputs, exit: &Watch) -> Exit {
    let status = loop {
        tokio::select! {
            biased;
            status = exit.exited() => break status,
            Some(message) = outputs.next() => tell(process, &message).await,
        }
    };
    let end = Instant::now() + LINGER;
    while Instant::now() < end {
        // What is there comes without waiting; only an open and empty pipe lets time pass.
        tokio::select! {
            biased;
            message = outputs.next() => match message {
                Some(message) => tell(process, &message).await,
                None => break,
            },
            () = sleep(QUIET) => break,
        }
    }
    status
}

async fn passed(deadline: Option<Duration>) {
    match deadline {
        Some(after) => sleep(after).await,
        None => std::future::pending().await,
    }
}

/// Gives `message` to every listener, and forgets those that have gone.
async fn tell(process: &Process, message: &Bytes) {
    let list = process.listeners.lock().unwrap_or_else(PoisonError::into_inner).list.clone();
    let mut gone = false;
    for listener in &list {
        gone |= listener.queue.send(message.clone()).await.is_err();
    }
    if gone {
        let mut listeners = process.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.list.retain(|listener| !listener.queue.is_closed());
    }
}

struct Outputs {
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
}

impl Outputs {
    /// The next piece of output as a message; `None` once both pipes have ended.
    async fn next(&mut self) -> Option<Bytes> {
        while self.stdout.is_some() || self.stderr.is_some() {
            let from = tokio::select! {
                biased;
                () = readable(self.stdout.as_ref()) => Output::Stdout,
                () = readable(self.stderr.as_ref()) => Output::Stderr,
            };
            let pipe = match from {
                Output::Stdout => &mut self.stdout,
                Output::Stderr => &mut self.stderr,
            };
            match read(pipe.as_ref(), from) {
                Read::Data(message) => return Some(message),
                Read::Nothing => {}
                Read::End => *pipe = None,
            }
        }
        None
    }
}

async fn readable(pipe: Option<&pipe::Receiver>) {
    match pipe {
        // An error shows again at the read.
        Some(pipe) => drop(pipe.readable().await),
        None => std::future::pending().await,
    }
}

fn read(pipe: Option<&pipe::Receiver>, from: Output) -> Read {
    let Some(pipe) = pipe else { return Read::End };
    SCRATCH.with_borrow_mut(|scratch| match pipe.try_read(scratch) {
        Ok(0) => Read::End,
        Ok(length) => Read::Data(events::data(from, &scratch[..length])),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Read::Nothing,
        Err(_) => Read::End,
    })
}
