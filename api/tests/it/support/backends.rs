//! Catalog, scheduler and node on one port, scripted: they keep a few rows, write down what they are asked, fail when
//! they are told to, and wait where they are told to.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use snapyard_proto::v1::catalog_server::{Catalog, CatalogServer};
use snapyard_proto::v1::node_server::{Node, NodeServer};
use snapyard_proto::v1::scheduler_server::{Scheduler, SchedulerServer};
use snapyard_proto::v1::*;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::token;

type Answer<T> = Result<Response<T>, Status>;

/// See the module's head. A handle.
#[derive(Clone)]
pub struct Backends {
    pub url: String,
    state: Arc<State>,
}

struct State {
    url: String,
    gateway: Mutex<String>,
    script: Mutex<Script>,
    /// Calls wait here, by name, when the script says so.
    gate: Semaphore,
}

#[derive(Default)]
struct Script {
    calls: Vec<(&'static str, String)>,
    failures: HashMap<&'static str, Status>,
    held: Vec<&'static str>,
    sandboxes: BTreeMap<String, Sandbox>,
    snapshots: Vec<Snapshot>,
    created: Vec<CreateSandboxRequest>,
    timeouts: Vec<SetTimeoutRequest>,
    resumed: Vec<ResumeSandboxRequest>,
    asked_to_snapshot: Vec<SnapshotSandboxRequest>,
    listed_sandboxes: Vec<ListSandboxesRequest>,
    listed_snapshots: Vec<ListSnapshotsRequest>,
}

pub const TIMINGS: RestoreTimings = RestoreTimings {
    snapshot_open_us: 1_000,
    vmm_ready_us: 2_000,
    memory_attached_us: 3_000,
    device_state_loaded_us: 4_000,
    running_us: 5_000,
    agent_ready_us: 6_000,
    filled_bytes_at_running: 4096,
    filled_bytes_at_ready: 8192,
};

const SHAPE: Shape = Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 2 << 30 };

/// The snapshot that every script knows.
pub const SNAPSHOT: &str = "11111111-1111-4111-8111-111111111111";

impl Backends {
    pub async fn start(gateway: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let state = Arc::new(State {
            url: url.clone(),
            gateway: Mutex::new(gateway.to_owned()),
            script: Mutex::new(Script::default()),
            gate: Semaphore::new(0),
        });
        let service = Service(state.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(CatalogServer::with_interceptor(service.clone(), token().require()))
                .add_service(SchedulerServer::with_interceptor(service.clone(), token().require()))
                .add_service(NodeServer::with_interceptor(service, token().require()))
                .serve_with_incoming(TcpIncoming::from(listener)),
        );
        Self { url, state }
    }

    /// Names of the calls so far, in order.
    pub fn calls(&self) -> Vec<&'static str> {
        self.state.script.lock().calls.iter().map(|(name, _)| *name).collect()
    }

    /// What the calls of one name were about.
    pub fn subjects(&self, name: &str) -> Vec<String> {
        let script = self.state.script.lock();
        script.calls.iter().filter(|(call, _)| *call == name).map(|(_, subject)| subject.clone()).collect()
    }

    /// Waits for a call of that name.
    pub async fn called(&self, name: &'static str) {
        super::soon(name, async {
            while !self.calls().contains(&name) {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    pub fn fail(&self, name: &'static str, status: Status) {
        self.state.script.lock().failures.insert(name, status);
    }

    /// Calls of that name wait until [`Self::open_gate`].
    pub fn hold(&self, name: &'static str) {
        self.state.script.lock().held.push(name);
    }

    pub fn open_gate(&self) {
        self.state.gate.add_permits(1_000);
    }

    pub fn add_sandbox(&self, id: &str) {
        let sandbox = self.state.sandbox(id);
        self.state.script.lock().sandboxes.insert(id.to_owned(), sandbox);
    }

    pub fn change_sandbox(&self, id: &str, change: impl FnOnce(&mut Sandbox)) {
        change(self.state.script.lock().sandboxes.get_mut(id).expect("known"));
    }

    pub fn move_gateway(&self, id: &str, gateway: &str) {
        self.change_sandbox(id, |sandbox| sandbox.gateway = gateway.to_owned());
    }

    pub fn sandbox_ids(&self) -> Vec<String> {
        self.state.script.lock().sandboxes.keys().cloned().collect()
    }

    pub fn add_snapshots(&self, count: usize) {
        let mut script = self.state.script.lock();
        for number in 0..count {
            script.snapshots.push(Snapshot { id: format!("snap-{number}"), ..Snapshot::default() });
        }
    }

    pub fn created(&self) -> Vec<CreateSandboxRequest> {
        self.state.script.lock().created.clone()
    }

    pub fn resumed(&self) -> Vec<ResumeSandboxRequest> {
        self.state.script.lock().resumed.clone()
    }

    pub fn timeouts(&self) -> Vec<SetTimeoutRequest> {
        self.state.script.lock().timeouts.clone()
    }

    pub fn asked_to_snapshot(&self) -> Vec<SnapshotSandboxRequest> {
        self.state.script.lock().asked_to_snapshot.clone()
    }

    pub fn listed_sandboxes(&self) -> Vec<ListSandboxesRequest> {
        self.state.script.lock().listed_sandboxes.clone()
    }

    pub fn listed_snapshots(&self) -> Vec<ListSnapshotsRequest> {
        self.state.script.lock().listed_snapshots.clone()
    }
}

impl State {
    fn sandbox(&self, id: &str) -> Sandbox {
        Sandbox {
            id: id.to_owned(),
            team: "default".into(),
            template_id: "tpl-1".into(),
            alias: "base".into(),
            snapshot_id: SNAPSHOT.into(),
            state: SandboxState::Running.into(),
            started_unix_ms: 1_700_000_000_000,
            ends_unix_ms: 1_700_000_300_000,
            shape: Some(SHAPE),
            node_id: "node1".into(),
            node_url: self.url.clone(),
            gateway: self.gateway.lock().clone(),
            agent_version: "0.5.7".into(),
            ..Sandbox::default()
        }
    }

    async fn enter(&self, name: &'static str, subject: &str) -> Result<(), Status> {
        let held = {
            let mut script = self.script.lock();
            script.calls.push((name, subject.to_owned()));
            script.held.contains(&name)
        };
        if held {
            self.gate.acquire().await.expect("never closed").forget();
        }
        self.script.lock().failures.get(name).map_or(Ok(()), |status| Err(status.clone()))
    }

    fn known(&self, id: &str) -> Result<Sandbox, Status> {
        self.script.lock().sandboxes.get(id).cloned().ok_or_else(|| Status::not_found(format!("no row {id}")))
    }
}

#[derive(Clone)]
struct Service(Arc<State>);

fn page<T: Clone>(all: &[T], limit: u32, token: &str) -> (Vec<T>, String) {
    let from: usize = if token.is_empty() { 0 } else { token.parse().expect("a token of ours") };
    let to = all.len().min(from + limit as usize);
    (all[from..to].to_vec(), if to < all.len() { to.to_string() } else { String::new() })
}

#[tonic::async_trait]
impl Catalog for Service {
    async fn resolve(&self, request: Request<ResolveRequest>) -> Answer<ResolveResponse> {
        let request = request.into_inner();
        self.0.enter("resolve", &request.reference).await?;
        let is_snapshot = request.reference == SNAPSHOT || request.reference == "default/short:tag";
        if !is_snapshot && request.reference != "base" {
            return Err(Status::not_found("no such thing"));
        }
        Ok(Response::new(ResolveResponse {
            snapshot_id: SNAPSHOT.into(),
            template_id: if is_snapshot { SNAPSHOT.into() } else { "tpl-1".into() },
            alias: if is_snapshot { String::new() } else { "base".into() },
            is_snapshot,
            shape: Some(SHAPE),
        }))
    }

    async fn get_snapshot(&self, _: Request<GetSnapshotRequest>) -> Answer<Snapshot> {
        Err(Status::unimplemented("not used by the API"))
    }

    async fn list_snapshots(&self, request: Request<ListSnapshotsRequest>) -> Answer<ListSnapshotsResponse> {
        let request = request.into_inner();
        self.0.enter("list_snapshots", &request.name).await?;
        let mut script = self.0.script.lock();
        let (snapshots, next_page_token) = page(&script.snapshots, request.limit, &request.page_token);
        script.listed_snapshots.push(request);
        Ok(Response::new(ListSnapshotsResponse { snapshots, next_page_token }))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Answer<DeleteResponse> {
        let reference = request.into_inner().reference;
        self.0.enter("delete", &reference).await?;
        if ["unknown", "unknown/x:y"].contains(&reference.as_str()) {
            return Err(Status::not_found("no such thing"));
        }
        Ok(Response::new(DeleteResponse {}))
    }

    async fn discard(&self, request: Request<DiscardRequest>) -> Answer<DiscardResponse> {
        self.0.enter("discard", &request.into_inner().snapshot_id).await?;
        Ok(Response::new(DiscardResponse {}))
    }

    async fn get_template(&self, request: Request<GetTemplateRequest>) -> Answer<Template> {
        let reference = request.into_inner().reference;
        self.0.enter("get_template", &reference).await?;
        if !["base", "tpl-1", "default/base"].contains(&reference.as_str()) {
            return Err(Status::not_found("no such thing"));
        }
        Ok(Response::new(template()))
    }

    async fn list_templates(&self, _: Request<ListTemplatesRequest>) -> Answer<ListTemplatesResponse> {
        self.0.enter("list_templates", "").await?;
        Ok(Response::new(ListTemplatesResponse { templates: vec![template()] }))
    }

    async fn get_sandbox(&self, request: Request<GetSandboxRequest>) -> Answer<Sandbox> {
        let id = request.into_inner().sandbox_id;
        self.0.enter("get_sandbox", &id).await?;
        self.0.known(&id).map(Response::new)
    }

    async fn list_sandboxes(&self, request: Request<ListSandboxesRequest>) -> Answer<ListSandboxesResponse> {
        let request = request.into_inner();
        self.0.enter("list_sandboxes", "").await?;
        let mut script = self.0.script.lock();
        let all: Vec<Sandbox> = script.sandboxes.values().cloned().collect();
        let (sandboxes, next_page_token) = page(&all, request.limit, &request.page_token);
        script.listed_sandboxes.push(request);
        Ok(Response::new(ListSandboxesResponse { sandboxes, next_page_token }))
    }
}

fn template() -> Template {
    Template {
        id: "tpl-1".into(),
        alias: "base".into(),
        team: "default".into(),
        snapshot_id: SNAPSHOT.into(),
        shape: Some(SHAPE),
        created_unix_ms: 1_700_000_000_000,
        build_status: "ready".into(),
        build_message: String::new(),
    }
}

#[tonic::async_trait]
impl Scheduler for Service {
    async fn register(&self, _: Request<Streaming<NodeReport>>) -> Answer<RegisterResponse> {
        Err(Status::unimplemented("not used by the API"))
    }

    async fn place(&self, request: Request<PlaceRequest>) -> Answer<PlaceResponse> {
        self.0.enter("place", &request.into_inner().sandbox_id).await?;
        let url = self.0.url.clone();
        Ok(Response::new(PlaceResponse { reservation_id: "r1".into(), node_id: "node1".into(), url }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Answer<ReleaseResponse> {
        self.0.enter("release", &request.into_inner().reservation_id).await?;
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn list_nodes(&self, _: Request<ListNodesRequest>) -> Answer<ListNodesResponse> {
        Err(Status::unimplemented("not used by the API"))
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn create_sandbox(&self, request: Request<CreateSandboxRequest>) -> Answer<CreateSandboxResponse> {
        let request = request.into_inner();
        self.0.enter("create_sandbox", &request.sandbox_id).await?;
        let sandbox = Sandbox {
            template_id: request.template_id.clone(),
            alias: request.alias.clone(),
            access_token: request.access_token.clone(),
            metadata: request.metadata.clone(),
            ..self.0.sandbox(&request.sandbox_id)
        };
        let mut script = self.0.script.lock();
        script.sandboxes.insert(request.sandbox_id.clone(), sandbox.clone());
        script.created.push(request);
        Ok(Response::new(CreateSandboxResponse { sandbox: Some(sandbox), timings: Some(TIMINGS) }))
    }

    async fn kill_sandbox(&self, request: Request<KillSandboxRequest>) -> Answer<KillSandboxResponse> {
        let id = request.into_inner().sandbox_id;
        self.0.enter("kill_sandbox", &id).await?;
        self.0.known(&id)?;
        self.0.script.lock().sandboxes.remove(&id);
        Ok(Response::new(KillSandboxResponse {}))
    }

    async fn pause_sandbox(&self, request: Request<PauseSandboxRequest>) -> Answer<Sandbox> {
        let id = request.into_inner().sandbox_id;
        self.0.enter("pause_sandbox", &id).await?;
        self.0.known(&id)?;
        let mut script = self.0.script.lock();
        let sandbox = script.sandboxes.get_mut(&id).expect("known");
        sandbox.set_state(SandboxState::Paused);
        Ok(Response::new(sandbox.clone()))
    }

    async fn resume_sandbox(&self, request: Request<ResumeSandboxRequest>) -> Answer<CreateSandboxResponse> {
        let request = request.into_inner();
        self.0.enter("resume_sandbox", &request.sandbox_id).await?;
        self.0.known(&request.sandbox_id)?;
        let mut script = self.0.script.lock();
        let sandbox = script.sandboxes.get_mut(&request.sandbox_id).expect("known");
        if sandbox.state() != SandboxState::Paused {
            return Err(Status::failed_precondition("it is not paused"));
        }
        sandbox.set_state(SandboxState::Running);
        let sandbox = sandbox.clone();
        script.resumed.push(request);
        Ok(Response::new(CreateSandboxResponse { sandbox: Some(sandbox), timings: Some(TIMINGS) }))
    }

    async fn set_timeout(&self, request: Request<SetTimeoutRequest>) -> Answer<Sandbox> {
        let request = request.into_inner();
        self.0.enter("set_timeout", &request.sandbox_id).await?;
        let sandbox = self.0.known(&request.sandbox_id)?;
        self.0.script.lock().timeouts.push(request);
        Ok(Response::new(sandbox))
    }

    async fn snapshot_sandbox(&self, request: Request<SnapshotSandboxRequest>) -> Answer<SnapshotSandboxResponse> {
        let request = request.into_inner();
        self.0.enter("snapshot_sandbox", &request.sandbox_id).await?;
        let names = if request.name.is_empty() { vec![] } else { vec![format!("default/{}", request.name)] };
        let snapshot = Snapshot { id: SNAPSHOT.into(), names, pause_us: 12_345, ..Snapshot::default() };
        self.0.script.lock().asked_to_snapshot.push(request);
        Ok(Response::new(SnapshotSandboxResponse { snapshot: Some(snapshot) }))
    }

    async fn rollback_sandbox(&self, request: Request<RollbackSandboxRequest>) -> Answer<RollbackSandboxResponse> {
        let request = request.into_inner();
        self.0.enter("rollback_sandbox", &request.snapshot_id).await?;
        Ok(Response::new(RollbackSandboxResponse {
            operation_id: "op1".into(),
            timings: Some(TIMINGS),
            snapshot: Some(Snapshot { id: SNAPSHOT.into(), ..Snapshot::default() }),
        }))
    }

    type BuildTemplateStream = tokio_stream::Empty<Result<BuildProgress, Status>>;

    async fn build_template(&self, _: Request<BuildTemplateRequest>) -> Answer<Self::BuildTemplateStream> {
        Err(Status::unimplemented("not used by the API"))
    }

    async fn get_stats(&self, _: Request<GetStatsRequest>) -> Answer<NodeStats> {
        Err(Status::unimplemented("not used by the API"))
    }
}
