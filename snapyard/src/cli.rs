//! The command line: what may be said, and how words become values. Nothing here does anything.
//!
//! Parsers of values are pure functions that name what is wrong and what would be right, since their text is what a
//! person who mistyped gets to see.

#![allow(rustdoc::invalid_html_tags, rustdoc::broken_intra_doc_links, reason = "these comments are the text of --help")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// Exit codes, shown at the end of `--help`; [`crate::failure`] assigns them.
const EXIT_CODES: &str = "Exit codes:
  0    done
  1    the server refused, or something failed
  2    the command line is wrong
  3    no such sandbox, snapshot or template
  4    conflict: a name is taken, or the thing is busy or in use
  5    the server cannot be reached, or has no room now
  sandbox exec passes on the exit code of the command (128 + signal when one ended it), and says 125 for
  a failure of its own.

Files:
  DATA_DIR/cluster.json   written by a running `snapyard up`: where its tiers listen, and their secret. Commands find
                          the server through it when they run on the same machine as the same user.";

/// Snapshots of running Linux guests, and guests from snapshots.
#[derive(Debug, Parser)]
#[command(name = "snapyard", version, about, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Cli {
    /// What every command understands.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// The server's REST endpoint [default: what DATA_DIR/cluster.json says, else http://127.0.0.1:3000]
    #[arg(long, global = true, env = "SNAPYARD_URL", value_name = "URL")]
    pub url: Option<String>,
    /// The server's data directory [default: ~/.local/share/snapyard]
    #[arg(long, global = true, env = "SNAPYARD_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Print JSON for programs instead of tables for people
    #[arg(long, global = true)]
    pub json: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the whole service in the foreground: API, scheduler, one node, object store
    Up(Box<UpArgs>),
    /// Running guests
    #[command(subcommand)]
    Sandbox(SandboxCommand),
    /// Captured guests
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Set a sandbox back to a snapshot; its id, address and expiry stay
    Rollback(RollbackArgs),
    /// What sandboxes are created from
    #[command(subcommand)]
    Template(TemplateCommand),
    /// The node's storage
    #[command(subcommand)]
    Store(StoreCommand),
    /// Put load on a server over REST and print what each request took
    Bench(BenchArgs),
}

/// `snapyard up`
#[derive(Debug, Args)]
pub struct UpArgs {
    /// Address of the REST API and the proxy into sandboxes; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDR", value_parser = parse_loopback)]
    pub listen: SocketAddr,
    /// Guest kernel, initial RAM disk, and the cache of root file systems (made by deploy/build-assets.sh)
    /// [default: ~/.cache/snapyard/assets]
    #[arg(long, env = "SNAPYARD_ASSETS", value_name = "DIR")]
    pub assets: Option<PathBuf>,
    /// The library that VMMs load [default: libsnapyard_vmm_preload.so beside this program]
    #[arg(long, env = "SNAPYARD_PRELOAD", value_name = "FILE")]
    pub preload: Option<PathBuf>,
    /// Do not build the `base` template when it is missing
    #[arg(long)]
    pub no_base: bool,
    /// Guests at most
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_sandboxes: usize,
    /// VMMs that wait, started, for their guest
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub pool: usize,
    /// Guests kept restored and paused for snapshots that are started from again and again; 0 for none
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub standby: usize,
    /// How long a snapshot is kept, e.g. 90s, 12h, 7d
    #[arg(long, default_value = "7d", value_name = "DURATION", value_parser = parse_duration)]
    pub retention: Duration,
    /// How long a guest may wait for memory or disk that cannot be had before it is stopped
    #[arg(long, default_value = "30s", value_name = "DURATION", value_parser = parse_duration)]
    pub fault_deadline: Duration,
    /// Timeout of a sandbox whose create names none
    #[arg(long, default_value = "300s", value_name = "DURATION", value_parser = parse_duration)]
    pub default_timeout: Duration,
    /// Memory that snapshot images may occupy though no guest uses them, MiB
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    pub idle_images_mib: u64,
    /// Disk that the chunk cache may take, MiB; what is not uploaded yet is kept besides
    #[arg(long, default_value_t = 20_480, value_name = "MIB", value_parser = clap::value_parser!(u64).range(16..))]
    pub cache_mib: u64,
    /// How often what no snapshot needs is deleted from the object store; 0s: only by `snapyard store gc`
    #[arg(long, default_value = "1h", value_name = "DURATION", value_parser = parse_duration)]
    pub gc_interval: Duration,
    /// How long something must have been of no use before it is deleted
    #[arg(long, default_value = "1h", value_name = "DURATION", value_parser = parse_duration)]
    pub gc_grace: Duration,
    /// Domain of the host names <port>-<id>.DOMAIN that clients are told; the proxy answers under any
    #[arg(long, default_value = "snapyard.localhost", value_name = "DOMAIN")]
    pub domain: String,
    /// User id that VMMs run as when the server is root
    #[arg(long, default_value_t = 65534, value_name = "UID")]
    pub vmm_uid: u32,
    /// The object store; without an endpoint the server runs its own below the data directory.
    #[command(flatten)]
    pub s3: S3Args,
}

/// An object store that is already there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Object store (default: one of its own, below the data directory)")]
pub struct S3Args {
    /// Endpoint URL of an S3 service
    #[arg(long, env = "SNAPYARD_S3_ENDPOINT", value_name = "URL", requires_all = ["s3_access_key", "s3_secret_key"])]
    pub s3_endpoint: Option<String>,
    /// Region that requests are signed for
    #[arg(long, env = "SNAPYARD_S3_REGION", default_value = "us-east-1", value_name = "NAME")]
    pub s3_region: String,
    /// Bucket; must exist
    #[arg(long, env = "SNAPYARD_S3_BUCKET", default_value = "snapyard", value_name = "NAME")]
    pub s3_bucket: String,
    /// Access key id
    #[arg(long, env = "SNAPYARD_S3_ACCESS_KEY", value_name = "ID")]
    pub s3_access_key: Option<String>,
    /// Secret key; better given by environment than on the command line
    #[arg(long, env = "SNAPYARD_S3_SECRET_KEY", hide_env_values = true, value_name = "KEY")]
    pub s3_secret_key: Option<String>,
}

/// `snapyard sandbox …`
#[derive(Debug, Subcommand)]
pub enum SandboxCommand {
    /// Start a guest from a template or a snapshot; prints its id
    Create(CreateArgs),
    /// List sandboxes, with their true state
    #[command(visible_alias = "list")]
    Ls(SandboxLsArgs),
    /// Run a command in a sandbox
    Exec(ExecArgs),
    /// Keep sandboxes without a VM, until they are resumed
    Pause(SandboxIds),
    /// Give paused sandboxes a VM again
    Resume(ResumeArgs),
    /// Start more sandboxes from the state that one is in now; prints their ids
    Fork(ForkArgs),
    /// End sandboxes, running or paused; their snapshots stay
    #[command(visible_alias = "rm")]
    Kill(SandboxIds),
}

/// `snapyard sandbox create`
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Template (id or alias) or snapshot (id or team/name[:tag])
    #[arg(default_value = "base", value_name = "TEMPLATE|SNAPSHOT")]
    pub source: String,
    /// How long it lives: e.g. 90s, 2h; `never`
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    pub timeout: Option<Timeout>,
    /// Metadata, may be repeated
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
    /// Environment variable of everything started in it, may be repeated; not allowed when starting from a snapshot
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Require an access token to talk to its agent
    #[arg(long)]
    pub secure: bool,
}

/// `snapyard sandbox ls`
#[derive(Debug, Args)]
pub struct SandboxLsArgs {
    /// Only those with this metadata, may be repeated
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
    /// Only ids, one a line
    #[arg(long, short)]
    pub quiet: bool,
}

/// `snapyard sandbox exec`
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Sandbox id
    pub sandbox: String,
    /// User in the guest
    #[arg(long, short, default_value = "user", value_name = "NAME")]
    pub user: String,
    /// Working directory in the guest [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR")]
    pub cwd: Option<String>,
    /// Environment variable, may be repeated
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Send this command's standard input to it; without, it reads end of file
    #[arg(long = "stdin", short = 'i')]
    pub stdin: bool,
    /// Kill the command after this long
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// One word is given to `bash -l -c`; several are a program and its arguments, run as they are
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// `snapyard sandbox kill|pause`
#[derive(Debug, Args)]
pub struct SandboxIds {
    /// Sandbox ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

/// `snapyard sandbox resume`
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// How long they live from now: e.g. 90s, 2h; `never` [default: the server's]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    pub timeout: Option<Timeout>,
    /// Sandbox ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

/// `snapyard sandbox fork`
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// Sandbox id
    pub sandbox: String,
    /// How many, up to 100
    #[arg(long, short = 'n', default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub count: u32,
    /// How long each lives: e.g. 90s, 2h; `never` [default: the server's]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    pub timeout: Option<Timeout>,
}

/// `snapyard snapshot …`
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Capture a running sandbox, memory and disk at one instant; prints the snapshot's id
    Create(SnapshotCreateArgs),
    /// List snapshots, newest first
    #[command(visible_alias = "list")]
    Ls(SnapshotLsArgs),
    /// Everything about one snapshot
    Info(SnapshotRef),
    /// Delete snapshots
    Rm(SnapshotRmArgs),
}

/// `snapyard snapshot create`
#[derive(Debug, Args)]
pub struct SnapshotCreateArgs {
    /// Sandbox id
    pub sandbox: String,
    /// Name, `short` or `short:tag`
    #[arg(long, short)]
    pub name: Option<String>,
}

/// `snapyard snapshot ls`
#[derive(Debug, Args)]
pub struct SnapshotLsArgs {
    /// Only those taken of this sandbox
    #[arg(long, value_name = "ID")]
    pub sandbox: Option<String>,
    /// Only `short` (every tag) or `short:tag`
    #[arg(long)]
    pub name: Option<String>,
    /// Only ids, one a line
    #[arg(long, short)]
    pub quiet: bool,
}

/// A snapshot.
#[derive(Debug, Args)]
pub struct SnapshotRef {
    /// Snapshot id or full name (team/name[:tag])
    pub snapshot: String,
}

/// `snapyard snapshot rm`
#[derive(Debug, Args)]
pub struct SnapshotRmArgs {
    /// Snapshot ids or full names
    #[arg(required = true, value_name = "SNAPSHOT")]
    pub snapshots: Vec<String>,
}

/// `snapyard rollback`
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Sandbox id
    pub sandbox: String,
    /// Snapshot id or full name
    pub snapshot: String,
}

/// `snapyard template …`
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Build a template from a recipe: root file system, boot, warm-up, capture
    Build(TemplateBuildArgs),
    /// List templates
    #[command(visible_alias = "list")]
    Ls,
}

/// `snapyard template build`
#[derive(Debug, Args)]
pub struct TemplateBuildArgs {
    /// Recipe file (TOML); `base` is the one that comes with the program
    #[arg(default_value = "base", value_name = "RECIPE")]
    pub recipe: PathBuf,
    /// Build even if a template with the recipe's alias is ready
    #[arg(long)]
    pub rebuild: bool,
}

/// `snapyard bench`
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What is done again and again
    #[arg(value_enum)]
    pub operation: BenchOperation,
    /// At the same time
    #[arg(long, short, default_value_t = 1, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub concurrency: u32,
    /// How often, in all, after the warm-up
    #[arg(long, short = 'n', default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub count: u32,
    /// Memory of the guest that gets new content before each; not for `create`
    #[arg(long, default_value_t = 0, value_name = "D")]
    pub dirty_mib: u32,
    /// How often before that, not counted [default: C]
    #[arg(long, value_name = "W", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub warm_up: Option<u32>,
    /// Template or snapshot that sandboxes are made from
    #[arg(long, default_value = "base", value_name = "TEMPLATE|SNAPSHOT")]
    pub from: String,
}

/// What `snapyard bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchOperation {
    /// Create a sandbox
    Create,
    /// Take a snapshot of a running sandbox
    Snapshot,
    /// Take a snapshot of a running sandbox and create another from it
    Clone,
    /// Set a sandbox back to a snapshot
    Rollback,
    /// Pause a sandbox, and resume it
    Pause,
}

impl BenchOperation {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Snapshot => "snapshot",
            Self::Clone => "clone",
            Self::Rollback => "rollback",
            Self::Pause => "pause",
        }
    }
}

/// `snapyard store …`
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Chunks, cache, object store, memory images and VMMs of the node
    Stats(StoreStatsArgs),
    /// Delete what no snapshot needs any more; a pack goes when it was of no use in two collections, `--gc-grace` apart
    Gc(StoreGcArgs),
    /// Read everything that a snapshot needs from where it is stored, and check it
    Fsck(StoreFsckArgs),
}

/// `snapyard store stats`
#[derive(Debug, Args)]
pub struct StoreStatsArgs {
    /// Also what each snapshot takes, and what deleting it would free; reads every snapshot's index
    #[arg(long)]
    pub snapshots: bool,
}

/// `snapyard store fsck`
#[derive(Debug, Args)]
pub struct StoreFsckArgs {
    /// Copy what is good anywhere (the cache included) into new packs, in place of the damaged ones
    #[arg(long)]
    pub repair: bool,
}

/// `snapyard store gc`
#[derive(Debug, Args)]
pub struct StoreGcArgs {
    /// Say what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// A sandbox's lifetime, as the API wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// Until killed.
    Never,
    /// This many seconds from now.
    Seconds(u64),
}

impl Timeout {
    /// The number that REST takes: seconds, or -1.
    pub fn wire(self) -> i64 {
        match self {
            Self::Never => -1,
            Self::Seconds(seconds) => i64::try_from(seconds).unwrap_or(i64::MAX),
        }
    }
}

/// A duration: a whole number and one unit of `ms`, `s`, `m`, `h`, `d`; no unit means seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a duration: say for example 90s, 15m, 12h or 7d");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let seconds = |factor: u64| number.checked_mul(factor).map(Duration::from_secs).ok_or_else(wrong);
    match unit {
        "ms" => Ok(Duration::from_millis(number)),
        "" | "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        "d" => seconds(86400),
        _ => Err(wrong()),
    }
}

/// A lifetime: [`parse_duration`] in whole seconds, or `never`.
fn parse_timeout(text: &str) -> Result<Timeout, String> {
    if text == "never" || text == "-1" {
        return Ok(Timeout::Never);
    }
    let duration = parse_duration(text)?;
    match duration.as_secs() {
        0 => Err(format!("`{text}`: a sandbox must live for at least a second")),
        seconds => Ok(Timeout::Seconds(seconds)),
    }
}

/// `KEY=VALUE`; the value may be empty and may hold further `=`.
fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not KEY=VALUE")),
    }
}

/// An address of this machine only: the API asks for no credentials yet.
fn parse_loopback(text: &str) -> Result<SocketAddr, String> {
    let addr: SocketAddr = text.parse().map_err(|_| format!("`{text}` is not ADDRESS:PORT, e.g. 127.0.0.1:3000"))?;
    if addr.ip().is_loopback() {
        Ok(addr)
    } else {
        Err(format!("{} is not a loopback address, and the API has no authentication yet: use 127.0.0.1", addr.ip()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_have_one_unit() {
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_secs(7 * 86400)));
        for wrong in ["", "s", "-1s", "1.5h", "1h30m", "18446744073709551615d", "3 s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?} is no duration");
        }
    }

    #[test]
    fn lifetimes_are_at_least_a_second_or_endless() {
        assert_eq!(parse_timeout("never").map(Timeout::wire), Ok(-1));
        assert_eq!(parse_timeout("2m").map(Timeout::wire), Ok(120));
        assert!(parse_timeout("0").is_err());
        assert!(parse_timeout("999ms").is_err());
    }

    #[test]
    fn pairs_split_at_the_first_equals_sign() {
        assert_eq!(parse_pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(parse_pair("a="), Ok(("a".into(), String::new())));
        assert!(parse_pair("a").is_err());
        assert!(parse_pair("=b").is_err());
    }

    #[test]
    fn only_loopback_may_be_listened_on() {
        assert!(parse_loopback("127.0.0.1:0").is_ok());
        assert!(parse_loopback("[::1]:3000").is_ok());
        assert!(parse_loopback("0.0.0.0:3000").is_err());
        assert!(parse_loopback("3000").is_err());
    }

    #[test]
    fn options_after_the_command_belong_to_the_command() {
        let cli = Cli::try_parse_from(["snapyard", "sandbox", "exec", "-e", "A=1", "abc", "ls", "-l", "--json"])
            .expect("valid command line");
        let Command::Sandbox(SandboxCommand::Exec(exec)) = cli.command else { panic!("exec was parsed") };
        assert_eq!(exec.command, ["ls", "-l", "--json"]);
        assert_eq!(exec.env, [("A".to_owned(), "1".to_owned())]);
        assert!(!cli.global.json);
    }

    #[test]
    fn an_object_store_needs_its_keys() {
        let endpoint = ["snapyard", "up", "--s3-endpoint", "http://127.0.0.1:9000"];
        assert!(Cli::try_parse_from(endpoint).is_err());
        let keys = ["--s3-access-key", "k", "--s3-secret-key", "s"];
        assert!(Cli::try_parse_from(endpoint.into_iter().chain(keys)).is_ok());
    }
}
