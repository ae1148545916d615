//! The operations: which requests are timed, what comes before them and what undoes them.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};

use crate::cli::{BenchArgs, BenchOperation};
use crate::exec;
use crate::failure::{Failure, Kind};
use crate::rest::{Answer, Api, segment};
use crate::sandbox::{server_timing, text};

/// Life of what is made, seconds: should this program be killed, it goes by itself.
const LIFE_S: u32 = 3600;

/// One timed thing.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Which of the operation's requests, or what the server says of it.
    pub series: &'static str,
    /// How long it took.
    pub took: Duration,
}

/// What a worker works on.
#[derive(Debug, Default)]
pub struct Subject {
    sandbox: String,
    snapshot: String,
}

/// The operation, and everything that was made for it and is there still.
pub struct Work {
    api: Api,
    operation: BenchOperation,
    from: String,
    dirty_mib: u32,
    sandboxes: Mutex<BTreeSet<String>>,
    snapshots: Mutex<BTreeSet<String>>,
}

impl Work {
    /// Nothing is made yet.
    pub fn new(api: Api, args: &BenchArgs) -> Self {
        Self {
            api,
            operation: args.operation,
            from: args.from.clone(),
            dirty_mib: args.dirty_mib,
            sandboxes: Mutex::default(),
            snapshots: Mutex::default(),
        }
    }

    /// What one worker needs for all its operations.
    pub async fn prepare(&self) -> Result<Subject, Failure> {
        let mut subject = Subject::default();
        if self.operation != BenchOperation::Create {
            subject.sandbox = self.create(&self.from).await?.0;
        }
        if self.operation == BenchOperation::Rollback {
            subject.snapshot = self.snapshot(&subject.sandbox).await?.0;
        }
        Ok(subject)
    }

    /// The operation once.
    pub async fn once(&self, subject: &Subject) -> Result<Vec<Sample>, Failure> {
        self.dirty(subject).await?;
        let mut samples = Vec::new();
        match self.operation {
            BenchOperation::Create => {
                let (sandbox, took, running) = self.create(&self.from).await?;
                samples.push(Sample { series: "create", took });
                samples.extend(running);
                self.kill(&sandbox).await?;
            }
            BenchOperation::Snapshot => {
                let (snapshot, took) = self.snapshot(&subject.sandbox).await?;
                samples.push(Sample { series: "snapshot", took });
                self.delete(&snapshot).await?;
            }
            BenchOperation::Clone => {
                let (snapshot, snapshot_took) = self.snapshot(&subject.sandbox).await?;
                let (clone, create_took, running) = self.create(&snapshot).await?;
                samples.push(Sample { series: "clone", took: snapshot_took + create_took });
                samples.push(Sample { series: "its snapshot", took: snapshot_took });
                samples.push(Sample { series: "its create", took: create_took });
                samples.extend(running);
                self.kill(&clone).await?;
                self.delete(&snapshot).await?;
            }
            BenchOperation::Rollback => {
                let body = json!({"snapshotID": subject.snapshot});
                let (answer, took) = self.about(&subject.sandbox, "rollback", &body).await?;
                samples.push(Sample { series: "rollback", took });
                samples.extend(running(&answer));
            }
            BenchOperation::Pause => {
                let (_, took) = self.about(&subject.sandbox, "pause", &json!({})).await?;
                samples.push(Sample { series: "pause", took });
                let (answer, took) = self.about(&subject.sandbox, "resume", &json!({"timeout": LIFE_S})).await?;
                samples.push(Sample { series: "resume", took });
                samples.extend(running(&answer));
            }
        }
        Ok(samples)
    }

    /// Takes away what is there still; answers what could not be.
    pub async fn clean_up(&self) -> Vec<String> {
        let sandboxes = std::mem::take(&mut *lock(&self.sandboxes));
        let snapshots = std::mem::take(&mut *lock(&self.snapshots));
        let paths = sandboxes.iter().map(|id| ("sandboxes", id)).chain(snapshots.iter().map(|id| ("templates", id)));
        let mut left = Vec::new();
        for (kind, id) in paths {
            let gone = self.api.call(Method::DELETE, &format!("/{kind}/{}", segment(id)), None).await;
            if gone.is_err_and(|failure| failure.kind != Kind::NotFound) {
                left.push(id.clone());
            }
        }
        left
    }

    /// Fills memory of the guest with bytes that it did not have.
    async fn dirty(&self, subject: &Subject) -> Result<(), Failure> {
        if self.dirty_mib == 0 || subject.sandbox.is_empty() {
            return Ok(());
        }
        let command = format!("head -c {}M /dev/urandom > /dev/shm/snapyard-bench", self.dirty_mib);
        match exec::quietly(&self.api, &subject.sandbox, "root", &command).await? {
            0 => Ok(()),
            code => Err(Failure::new(
                Kind::Refused,
                format!("{} MiB could not be made dirty in the guest (exit code {code})", self.dirty_mib),
            )
            .hint("its /dev/shm takes half of its memory at most")),
        }
    }

    async fn create(&self, from: &str) -> Result<(String, Duration, Option<Sample>), Failure> {
        let body = json!({"templateID": from, "timeout": LIFE_S, "secure": false});
        let (answer, took) = self.timed("/v2/sandboxes", &body).await?;
        let id = text(&answer.body, "sandboxID")?.to_owned();
        lock(&self.sandboxes).insert(id.clone());
        let running = running(&answer);
        Ok((id, took, running))
    }

    async fn snapshot(&self, sandbox: &str) -> Result<(String, Duration), Failure> {
        let (answer, took) = self.about(sandbox, "snapshots", &json!({})).await?;
        let id = text(&answer.body, "snapshotID")?.to_owned();
        lock(&self.snapshots).insert(id.clone());
        Ok((id, took))
    }

    async fn kill(&self, sandbox: &str) -> Result<(), Failure> {
        self.api.call(Method::DELETE, &format!("/sandboxes/{}", segment(sandbox)), None).await?;
        lock(&self.sandboxes).remove(sandbox);
        Ok(())
    }

    async fn delete(&self, snapshot: &str) -> Result<(), Failure> {
        self.api.call(Method::DELETE, &format!("/templates/{}", segment(snapshot)), None).await?;
        lock(&self.snapshots).remove(snapshot);
        Ok(())
    }

    async fn about(&self, sandbox: &str, action: &str, body: &Value) -> Result<(Answer, Duration), Failure> {
        self.timed(&format!("/sandboxes/{}/{action}", segment(sandbox)), body).await
    }

    async fn timed(&self, path: &str, body: &Value) -> Result<(Answer, Duration), Failure> {
        let began = Instant::now();
        let answer = self.api.call(Method::POST, path, Some(body)).await?;
        Ok((answer, began.elapsed()))
    }
}

/// When the guest ran, by the server's own account, if it gives one.
fn running(answer: &Answer) -> Option<Sample> {
    let took = *server_timing(&answer.headers).get("running")?;
    Some(Sample { series: "until it runs (server)", took: Duration::try_from_secs_f64(took / 1000.0).ok()? })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What is behind it is whole even if a holder panicked.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
