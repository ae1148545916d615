//! `snapyard bench`: load on a deployment, over REST only, and what each request took.
//!
//! ```text
//! workers (--concurrency), each with a sandbox of its own where the operation needs one
//!   └─ take a number ─► make memory dirty ─► the timed requests ─► undo      until all numbers are taken
//! ```
//!
//! The first `--warm-up` operations run like all others and are not counted. Everything that was made is taken away at the
//! end, after Ctrl-C too. Only the requests are timed, not what prepares and undoes them.

mod report;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cli::BenchArgs;
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::output;
use crate::progress::Progress;

use report::Report;
use work::{Sample, Work};

/// Messages of failures that are shown; the others are only counted.
const SHOWN: usize = 5;

/// What a worker says after one operation.
struct Done {
    counts: bool,
    outcome: Result<Vec<Sample>, Failure>,
    began: Instant,
}

/// Runs the load and prints what it measured. Fails if any operation did.
pub async fn run(context: &Context, args: BenchArgs) -> Result<(), Failure> {
    let work = Arc::new(Work::new(context.api()?, &args));
    let warm_up = args.warm_up.unwrap_or(args.concurrency);
    let total = warm_up + args.count;
    let (next, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (say, mut heard) = mpsc::channel(64);
    let mut workers = JoinSet::new();
    for _ in 0..args.concurrency.min(total) {
        let (work, next, stop, say) = (Arc::clone(&work), Arc::clone(&next), Arc::clone(&stop), say.clone());
        workers.spawn(async move {
            let subject = work.prepare().await?;
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= total {
                    break;
                }
                let began = Instant::now();
                let outcome = work.once(&subject).await;
                // Nobody listens any more: the run is over.
                let _ = say.send(Done { counts: number >= warm_up, outcome, began }).await;
            }
            Ok::<(), Failure>(())
        });
    }
    drop(say);

    let mut progress = Progress::start(args.operation.name());
    let mut report = Report::new(args.operation.name(), args.concurrency, args.dirty_mib);
    let mut done = 0;
    loop {
        let said = tokio::select! {
            said = heard.recv() => said,
            _ = tokio::signal::ctrl_c(), if !stop.load(Ordering::Relaxed) => {
                stop.store(true, Ordering::Relaxed);
                continue;
            }
        };
        let Some(Done { counts, outcome, began }) = said else { break };
        done += 1;
        progress.update(if counts { "measuring" } else { "warming up" }, done * 100 / total);
        if counts {
            report.add(outcome, began, Instant::now());
        }
    }
    let mut broken = None;
    while let Some(worker) = workers.join_next().await {
        if let Err(failure) = worker.unwrap_or_else(|panic| Err(Failure::new(Kind::Refused, panic.to_string()))) {
            broken = Some(failure);
        }
    }
    let left = work.clean_up().await;
    progress.finish(if stop.load(Ordering::Relaxed) { "interrupted" } else { "done" });
    if let Some(failure) = broken {
        return Err(failure.hint("the load could not be prepared; nothing was measured with it"));
    }
    for failure in report.failures().iter().take(SHOWN) {
        eprintln!("error: {failure}");
    }
    if context.json {
        output::print_json(&report.json())?;
    } else {
        output::print_line(report.text().trim_end())?;
    }
    if !left.is_empty() {
        let text = format!("could not be taken away, and stay until their time is over: {}", left.join(", "));
        return Err(Failure::new(Kind::Refused, text));
    }
    match report.failures() {
        [] => Ok(()),
        failures => Err(Failure::new(Kind::Refused, format!("{} operations failed", failures.len()))),
    }
}
