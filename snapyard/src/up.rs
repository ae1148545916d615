//! `snapyard up`: the whole service in one process, on loopback.
//!
//! ```text
//! lock data dir ─> bind API port ─> object store ─> scheduler ─> node ─> API ─> cluster.json, "ready"
//!                                                                                 │ (base template meanwhile)
//! exit <─ object store <─ scheduler <─ node: guests end <─ API drains <─ Ctrl-C, SIGTERM, or a tier that fails
//! ```
//!
//! The tiers know each other by URL only, as they would on several machines; this module picks the ports. A tier that
//! ends by itself ends the server with its reason: half a service would look like a whole one.
//!
//! Crash points: nothing is kept here but the node's name. Whatever a killed server leaves, the node clears up at the
//! next start; a stale `cluster.json` is replaced.

mod announce;
mod part;
mod prepare;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use snapyard_api::ApiConfig;
use snapyard_node::config::S3Config;
use snapyard_node::{Node, NodeConfig};
use snapyard_proto::auth::ClusterToken;
use snapyard_scheduler::SchedulerConfig;
use snapyard_snapstore::blob::{self, S3Blobs};
use snapyard_snapstore::ids::TeamId;
use snapyard_snapstore::s3d;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use self::part::Part;
use self::prepare::DataDir;
use crate::cli::{S3Args, UpArgs};
use crate::cluster::{self, ClusterFile};
use crate::context::Context;
use crate::failure::{Failure, Kind, with_causes};
use crate::grpc::{Backend, TEAM};
use crate::output;
use crate::progress::Progress;
use crate::template;

/// A free port of this machine.
const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// How long each tier may take to stop; the node has guests to end, and a deadline of its own below this one.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Bucket of the object store that the server runs itself.
const OWN_BUCKET: &str = "snapyard";

/// Runs until a signal or a failure.
pub async fn run(context: &Context, args: UpArgs) -> Result<(), Failure> {
    let data = DataDir::open(context.data_dir())?;
    let assets_dir = prepare::assets(cluster::assets_dir(args.assets.as_deref())?)?;
    let preload_so = prepare::preload(args.preload.clone())?;
    let listener = TcpListener::bind(args.listen).await.map_err(|error| {
        Failure::new(Kind::Conflict, format!("cannot listen on {}: {error}", args.listen))
            .hint("say another address with --listen; port 0 takes a free one")
    })?;
    let api_addr = listener.local_addr()?;
    let mut signals = Signals::install()?;
    let token = prepare::cluster_token()?;

    let (s3, object_store) = object_store(&args.s3, &data.path).await?;
    let scheduler_listener = TcpListener::bind(ANY_PORT).await?;
    let scheduler_url = announce::url(scheduler_listener.local_addr()?);
    let config = SchedulerConfig::new(token.clone());
    let scheduler =
        Part::spawn("scheduler", |stopped| snapyard_scheduler::serve(scheduler_listener, config, stopped.wait()));

    let config = node_config(&args, &data, assets_dir, preload_so, &scheduler_url, &token, s3)?;
    let node = Node::start(config)
        .await
        .map_err(|error| Failure::new(Kind::Refused, format!("the node does not start: {}", with_causes(&error))))?;

    if !args.no_base {
        // Before anybody can ask for it: one from before an upgrade is being built, not there and of no use.
        let team = TeamId::new(TEAM).expect("a valid name");
        node.drop_misfit(&team, template::BASE_ALIAS)
            .await
            .map_err(|error| Failure::new(Kind::Refused, format!("the template base: {}", with_causes(&error))))?;
    }

    let config = api_config(&args, node.url(), &scheduler_url, &token);
    let api = Part::spawn("API", |stopped| snapyard_api::serve(listener, config, stopped.wait()));

    let file =
        ClusterFile::new(announce::url(api_addr), node.url().to_owned(), scheduler_url, token.expose().to_owned());
    let cluster_file = file.write(&data.path)?;
    if context.json {
        output::print_json(&announce::json(api_addr, &data.path))?;
    } else {
        print!("{}", announce::text(api_addr, &data.path));
    }
    let base = (!args.no_base).then(|| tokio::spawn(build_base(node.url().to_owned(), token.expose().to_owned())));

    let mut tiers = Tiers { api, node, scheduler, object_store };
    let outcome = tokio::select! {
        name = signals.next() => {
            eprintln!("{name}: stopping; once more to stop at once");
            Ok(())
        }
        failure = tiers.failed() => Err(failure),
    };
    if let Some(base) = base {
        base.abort();
    }
    let _ = std::fs::remove_file(&cluster_file); // nobody can use it any more
    tokio::select! {
        () = tiers.stop() => outcome,
        name = signals.next() => Err(Failure::new(Kind::Refused, format!("{name} again: stopped at once"))),
    }
}

/// Everything that runs.
struct Tiers {
    api: Part,
    node: Node,
    scheduler: Part,
    /// `None` when the object store is somebody else's.
    object_store: Option<Part>,
}

impl Tiers {
    /// Completes when one of them ends by itself.
    async fn failed(&mut self) -> Failure {
        let Self { api, node, scheduler, object_store } = self;
        let object_store = async {
            match object_store {
                Some(part) => part.failed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            failure = api.failed() => failure,
            reason = node.failed() => Failure::new(Kind::Refused, reason),
            failure = scheduler.failed() => failure,
            failure = object_store => failure,
        }
    }

    /// Stops them, from the client's side inwards.
    async fn stop(self) {
        self.api.stop(STOP_DEADLINE).await;
        if tokio::time::timeout(STOP_DEADLINE, self.node.shutdown()).await.is_err() {
            tracing::warn!("the node did not stop in time and is cut off");
        }
        self.scheduler.stop(STOP_DEADLINE).await;
        if let Some(part) = self.object_store {
            part.stop(STOP_DEADLINE).await;
        }
    }
}

/// The configured object store, or one of our own below the data directory.
async fn object_store(args: &S3Args, data_dir: &Path) -> Result<(S3Config, Option<Part>), Failure> {
    if let Some(endpoint) = &args.s3_endpoint {
        let key = |key: &Option<String>| key.clone().expect("the command line requires the keys with the endpoint");
        let config = S3Config {
            endpoint: endpoint.clone(),
            region: args.s3_region.clone(),
            bucket: args.s3_bucket.clone(),
            access_key: key(&args.s3_access_key),
            secret_key: key(&args.s3_secret_key),
        };
        return Ok((config, None));
    }
    let listener = TcpListener::bind(ANY_PORT).await?;
    let keys = s3d::KeyPair::generate()?; // both ends are in this process: no run needs those of another
    let config = S3Config {
        endpoint: announce::url(listener.local_addr()?),
        region: args.s3_region.clone(),
        bucket: OWN_BUCKET.into(),
        access_key: keys.access_key.clone(),
        secret_key: keys.secret_key.clone(),
    };
    let root = data_dir.join("s3");
    let part =
        Part::spawn("object store", |stopped| async move { s3d::serve(listener, &root, &keys, stopped.wait()).await });
    make_bucket(&config).await?;
    Ok((config, Some(part)))
}

/// Makes the bucket of our own object store. Somebody else's must be there: its settings are not ours to choose.
async fn make_bucket(config: &S3Config) -> Result<(), Failure> {
    let endpoint = Some(config.endpoint.clone());
    let client = blob::S3Config::new(endpoint, &config.region, &config.bucket, &config.access_key, &config.secret_key);
    S3Blobs::new(client).ensure_bucket().await.map_err(|error| {
        Failure::new(Kind::Refused, format!("the object store does not start: {}", with_causes(&error)))
    })
}

fn node_config(
    args: &UpArgs,
    data: &DataDir,
    assets_dir: std::path::PathBuf,
    preload_so: std::path::PathBuf,
    scheduler_url: &str,
    token: &ClusterToken,
    s3: S3Config,
) -> Result<NodeConfig, Failure> {
    Ok(NodeConfig {
        node_id: data.node_id()?,
        data_dir: data.path.clone(),
        assets_dir,
        preload_so,
        rootfs_script: data.rootfs_script()?,
        listen: ANY_PORT,
        gateway_listen: ANY_PORT,
        scheduler_url: scheduler_url.to_owned(),
        cluster_token: token.clone(),
        s3,
        retention: args.retention,
        pool_target: args.pool,
        standbys: args.standby,
        max_sandboxes: args.max_sandboxes,
        fault_deadline: args.fault_deadline,
        idle_image_bytes: args.idle_images_mib << 20,
        cache_bytes: args.cache_mib << 20,
        gc_interval: (!args.gc_interval.is_zero()).then_some(args.gc_interval),
        gc_grace: args.gc_grace,
        vmm_uid: args.vmm_uid,
    })
}

fn api_config(args: &UpArgs, node_url: &str, scheduler_url: &str, token: &ClusterToken) -> ApiConfig {
    let mut config = ApiConfig::new(node_url, scheduler_url, token.clone());
    config.domain.clone_from(&args.domain);
    config.default_timeout_s = u32::try_from(args.default_timeout.as_secs()).unwrap_or(u32::MAX);
    config
}

/// Builds the `base` template unless it is ready. A failure is told and does not end the server: what was built before
/// works, and `snapyard template build` can be tried again.
async fn build_base(node_url: String, token: String) {
    let build = async {
        let backend = Backend::connect("node", &node_url, &token).await?;
        template::run_build(&backend, template::BASE_RECIPE.to_owned(), false, Progress::start("template base")).await
    };
    if let Err(failure) = build.await {
        eprintln!("template base: {failure}\n  `snapyard template build` tries again");
    }
}

/// The two signals that end the server.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn install() -> Result<Self, Failure> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The next one, by name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
