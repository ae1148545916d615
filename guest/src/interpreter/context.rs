//! A context: the task that owns a kernel and gives it one cell after the other.
//!
//! ```text
//! no kernel ──first cell──► starting ──R──► idle ◄──D── busy
//!     ▲                        │              └──cell──────▲
//!     └──── ended, stopped ────┴──────────────┴────────────┘
//! ```
//!
//! A kernel that ends takes its state along; its cell is answered with an error that says so, and the next cell gets a
//! new one. Output that comes while no cell runs (a thread that goes on printing) has nobody to go to, and is dropped.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::{Notify, mpsc};

use super::kernel::{Heard, Kernel, Recipe};
use crate::state::Session;
use crate::sys::identity::{reseed_signal, send_signal};
use crate::sys::spawn::Exit;

/// Cells that may wait.
const QUEUE: usize = 64;

/// What a kernel is to do.
pub enum Work {
    /// Run code, with additional environment.
    Cell {
        /// The code.
        code: String,
        /// Its environment.
        env: BTreeMap<String, String>,
    },
    /// Walk through a cell's paths and forget it.
    Warm,
}

/// Work, and where its answer goes.
pub struct Job {
    /// What to do.
    pub work: Work,
    /// Who this guest is.
    pub session: Arc<Session>,
    /// Lines of JSON for the client; closed at the end.
    pub sink: mpsc::Sender<Bytes>,
}

/// What the context's task shows.
#[derive(Default)]
struct State {
    /// The kernel, from the moment that it obeys signals; 0 without one.
    pid: AtomicI32,
    busy: AtomicBool,
    stop: Notify,
    stopped: Notify,
}

/// A context.
pub struct Context {
    /// Its id.
    pub id: String,
    /// Where its kernels start.
    pub cwd: String,
    jobs: mpsc::Sender<Job>,
    state: Arc<State>,
}

#[derive(Serialize)]
struct Request<'a> {
    code: &'a str,
    env: &'a BTreeMap<String, String>,
    defaults: Option<&'a BTreeMap<String, String>>,
    generation: u64,
}

impl Context {
    /// A context without a kernel.
    pub fn start(id: String, recipe: Recipe) -> Self {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let state = Arc::new(State::default());
        let cwd = recipe.cwd.clone();
        tokio::spawn(Worker { recipe, state: state.clone(), kernel: None, told: 0 }.work(queue));
        Self { id, cwd, jobs, state }
    }

    /// Queues a job. Its sink is closed without a word if the context is gone.
    pub async fn submit(&self, job: Job) {
        let _ = self.jobs.send(job).await;
    }

    /// Whether it has a kernel.
    pub fn is_running(&self) -> bool {
        self.pid() != 0
    }

    /// The kernel's process id, or 0.
    pub fn pid(&self) -> i32 {
        self.state.pid.load(Ordering::SeqCst)
    }

    /// Ends the kernel, whatever it is doing, and returns when it is gone. The next cell gets a new one.
    pub async fn stop(&self) {
        let stopped = self.state.stopped.notified();
        self.state.stop.notify_one();
        stopped.await;
    }

    /// See [`super::Interpreter::reseed`].
    pub fn reseed(&self) -> io::Result<()> {
        let pid = self.pid();
        if pid == 0 {
            return Ok(());
        }
        // A directory's link count is two more than its subdirectories: one for each thread.
        let alone = std::fs::metadata(format!("/proc/{pid}/task")).is_ok_and(|task| task.nlink() <= 3);
        if alone && !self.state.busy.load(Ordering::SeqCst) {
            return Ok(());
        }
        send_signal(pid, reseed_signal())
    }
}

struct Worker {
    recipe: Recipe,
    state: Arc<State>,
    kernel: Option<Kernel>,
    /// The generation whose environment the kernel has.
    told: u64,
}

impl Worker {
    async fn work(mut self, mut queue: mpsc::Receiver<Job>) {
        let state = self.state.clone();
        loop {
            let heard = async {
                match &mut self.kernel {
                    Some(kernel) => kernel.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = state.stop.notified() => {
                    self.end().await;
                    state.stopped.notify_waiters();
                }
                job = queue.recv() => match job {
                    None => break,
                    Some(job) => {
                        state.busy.store(true, Ordering::SeqCst);
                        let stopped = tokio::select! {
                            biased;
                            () = state.stop.notified() => true,
                            () = self.run(&job) => false,
                        };
                        if stopped {
                            tell_end(&job, "the context was restarted or removed; its state is lost").await;
                            self.end().await;
                            state.stopped.notify_waiters();
                        }
                        state.busy.store(false, Ordering::SeqCst);
                    }
                },
                heard = heard => {
                    if let Heard::Ended(_) = heard {
                        self.forget();
                    }
                }
            }
        }
        self.end().await;
        state.stopped.notify_waiters();
    }

    fn forget(&mut self) {
        self.state.pid.store(0, Ordering::SeqCst);
        self.kernel = None;
    }

    /// Kills the kernel, if there is one, and takes its status.
    async fn end(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.kill();
            while !matches!(kernel.next().await, Heard::Ended(_)) {}
        }
        self.forget();
    }

    async fn run(&mut self, job: &Job) {
        if self.kernel.is_none() {
            match Kernel::start(&self.recipe, job.session.generation).await {
                Ok(kernel) => {
                    self.kernel = Some(kernel);
                    // Its process has the environment of the context's beginning only.
                    self.told = u64::MAX;
                }
                Err(error) => return tell_end(job, &format!("the interpreter could not be started: {error}")).await,
            }
            if !self.until(job, |heard| matches!(heard, Heard::Ready)).await {
                return;
            }
            let pid = self.kernel.as_ref().map_or(0, |kernel| kernel.pid.0);
            self.state.pid.store(pid, Ordering::SeqCst);
        }
        let generation = job.session.generation;
        let request = match &job.work {
            Work::Warm => b"{\"warm\":true}".to_vec(),
            Work::Cell { code, env } => {
                let defaults = (self.told != generation).then_some(&job.session.env);
                serde_json::to_vec(&Request { code, env, defaults, generation }).expect("a plain structure")
            }
        };
        self.told = generation;
        if let Some(kernel) = &mut self.kernel {
            // If it is gone, the next thing heard says so.
            let _ = kernel.request(request).await;
        }
        self.until(job, |heard| matches!(heard, Heard::Done)).await;
    }

    /// Passes events on until `last`. False if the kernel ended before, which the client has been told.
    async fn until(&mut self, job: &Job, last: fn(&Heard) -> bool) -> bool {
        loop {
            let Some(kernel) = &mut self.kernel else { return false };
            match kernel.next().await {
                heard if last(&heard) => return true,
                Heard::Event(line) => {
                    // A client that hung up has had enough; the cell goes on.
                    let _ = job.sink.send(Bytes::from(line)).await;
                }
                Heard::Ended(exit) => {
                    self.forget();
                    let how = match exit {
                        Exit::Code(code) => format!("exit code {code}"),
                        Exit::Signal(signal) => format!("signal {signal}"),
                    };
                    tell_end(job, &format!("the interpreter ended ({how}); its state is lost")).await;
                    return false;
                }
                Heard::Ready | Heard::Done => {}
            }
        }
    }
}

async fn tell_end(job: &Job, why: &str) {
    let event = serde_json::json!({ "type": "error", "name": "KernelDied", "value": why, "traceback": why });
    let _ = job.sink.send(Bytes::from(format!("{event}\n"))).await;
}
