//! The `snapyard` program: the service (`up`), and the operator's commands against a running one.
//!
//! `main` parses, runs one command, and turns its outcome into an exit code; everything else is in the modules:
//!
//! | module | concern |
//! | --- | --- |
//! | [`cli`] | what may be said on the command line |
//! | [`context`], [`cluster`] | where the server is |
//! | [`rest`], [`grpc`], [`connect`] | talking to it: REST, the tiers behind, the agent in a guest |
//! | [`sandbox`], [`exec`], [`snapshot`], [`template`], [`store`], [`bench`](mod@bench) | the commands |
//! | [`output`], [`progress`], [`failure`] | what is printed, and the exit codes |
//! | [`up`] | the whole service in one process |

mod bench;
mod cli;
mod cluster;
mod connect;
mod context;
mod exec;
mod failure;
mod grpc;
mod output;
mod progress;
mod rest;
mod sandbox;
mod snapshot;
mod store;
mod template;
mod up;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::cli::{Cli, Command, SandboxCommand, SnapshotCommand, StoreCommand, TemplateCommand};
use crate::context::Context;
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.global.json;
    init_logging(&cli.command);
    let is_exec = matches!(cli.command, Command::Sandbox(SandboxCommand::Exec(_)));
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(run(cli));
    // Writing to a full pipe cannot be interrupted; do not wait for it.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if json {
                eprintln!("{}", failure.json());
            } else {
                eprintln!("error: {failure}");
            }
            ExitCode::from(if is_exec { exec::OWN_FAILURE } else { failure.kind.exit_code() })
        }
    }
}

async fn run(cli: Cli) -> Result<u8, Failure> {
    let context = Context::new(cli.global)?;
    match cli.command {
        Command::Up(args) => up::run(&context, *args).await?,
        Command::Sandbox(SandboxCommand::Create(args)) => sandbox::create(&context, args).await?,
        Command::Sandbox(SandboxCommand::Ls(args)) => sandbox::ls(&context, args).await?,
        Command::Sandbox(SandboxCommand::Exec(args)) => return exec::run(&context.api()?, args).await,
        Command::Sandbox(SandboxCommand::Pause(args)) => sandbox::pause(&context, args).await?,
        Command::Sandbox(SandboxCommand::Resume(args)) => sandbox::resume(&context, args).await?,
        Command::Sandbox(SandboxCommand::Fork(args)) => sandbox::fork(&context, args).await?,
        Command::Sandbox(SandboxCommand::Kill(args)) => sandbox::kill(&context, args).await?,
        Command::Snapshot(SnapshotCommand::Create(args)) => snapshot::create(&context, args).await?,
        Command::Snapshot(SnapshotCommand::Ls(args)) => snapshot::ls(&context, args).await?,
        Command::Snapshot(SnapshotCommand::Info(args)) => snapshot::info(&context, args).await?,
        Command::Snapshot(SnapshotCommand::Rm(args)) => snapshot::rm(&context, args).await?,
        Command::Rollback(args) => sandbox::rollback(&context, args).await?,
        Command::Template(TemplateCommand::Build(args)) => template::build(&context, args).await?,
        Command::Template(TemplateCommand::Ls) => template::ls(&context).await?,
        Command::Store(StoreCommand::Stats(args)) => store::stats(&context, args.snapshots).await?,
        Command::Store(StoreCommand::Gc(args)) => store::gc(&context, args.dry_run).await?,
        Command::Bench(args) => bench::run(&context, args).await?,
        Command::Store(StoreCommand::Fsck(args)) => store::fsck(&context, args.repair).await?,
    }
    Ok(0)
}

/// Logs go to standard error, filtered by `SNAPYARD_LOG` (the syntax of `tracing-subscriber`'s `EnvFilter`). The server
/// tells its news by default, a command only what it was asked for.
fn init_logging(command: &Command) {
    let default = if matches!(command, Command::Up(_)) { "warn,snapyard=info" } else { "error" };
    let filter = EnvFilter::try_from_env("SNAPYARD_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).init();
}
