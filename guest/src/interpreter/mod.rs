//! Port 49999: code cells in long-lived interpreters.
//!
//! ```text
//! POST /execute ─► context ─► queue ─► kernel process (IPython)
//!      ◄── lines of JSON ◄── events, stdout, stderr
//! ```
//!
//! A context is a task that owns one kernel ([`context`]); cells of one context run one after the other, contexts beside
//! each other. The default context is made by the first cell that names none. A client that hangs up loses the rest of
//! its answer and nothing else: its cell goes on.

mod context;
mod kernel;

use std::collections::BTreeMap;
use std::io;
use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::cgroup::UserCgroup;
use crate::http::{Answer, BodyError, Scope, collect, empty, error, json};
use crate::process::null_is_default;
use crate::service::find_user;
use crate::state::Agent;
use crate::users::resolve_path;
use context::{Context, Job};

/// Largest request.
const BODY_MAX: usize = 64 << 20;
/// The user that kernels run as: a cell may do everything in its sandbox.
const KERNEL_USER: &str = "root";
const PYTHON: &str = "/usr/bin/python3";
/// What a kernel runs.
const SOURCE: &str = include_str!("../../interpreter/kernel.py");
/// Most contexts at once.
const CONTEXTS_MAX: usize = 64;

/// All contexts.
pub struct Interpreter {
    cgroup: Arc<UserCgroup>,
    contexts: Mutex<Contexts>,
}

#[derive(Default)]
struct Contexts {
    by_id: BTreeMap<String, Arc<Context>>,
    default: Option<String>,
}

/// A context as clients see it.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    id: &'a str,
    language: &'a str,
    cwd: &'a str,
}

#[derive(Deserialize)]
struct Execute {
    code: String,
    #[serde(default)]
    context_id: Option<String>,
    #[serde(default)]
    language: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    env_vars: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
struct Create {
    #[serde(default)]
    language: Option<String>,
    #[serde(default)]
    cwd: Option<String>,
}

/// A refusal: its status and reason.
type Refused = (StatusCode, String);

impl Interpreter {
    /// No contexts yet.
    pub fn new(cgroup: Arc<UserCgroup>) -> Self {
        Self { cgroup, contexts: Mutex::default() }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Contexts) -> T) -> T {
        work(&mut self.contexts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes kernels that could draw a random number before their next request seed their generators anew. Called while
    /// they are frozen: the signal is the first thing that they see. A kernel that waits for a request, and has no
    /// other thread, is spared the work: the request's generation says the same.
    pub fn reseed(&self) -> io::Result<()> {
        let contexts: Vec<_> = self.with(|contexts| contexts.by_id.values().cloned().collect());
        contexts.iter().try_for_each(|context| context.reseed())
    }

    fn find(&self, id: &str) -> Result<Arc<Context>, Refused> {
        self.with(|contexts| contexts.by_id.get(id).cloned())
            .ok_or_else(|| (StatusCode::NOT_FOUND, format!("context {id} does not exist")))
    }

    fn add(&self, agent: &Agent, cwd: Option<&str>, default: bool) -> Result<Arc<Context>, Refused> {
        let failed = |what: String| (StatusCode::INTERNAL_SERVER_ERROR, what);
        let owner = find_user(agent, None).map_err(|error| failed(error.message))?;
        let cwd = resolve_path(cwd.unwrap_or_default(), &owner);
        if !std::path::Path::new(&cwd).is_dir() {
            return Err((StatusCode::BAD_REQUEST, format!("the working directory {cwd} does not exist")));
        }
        let user = find_user(agent, Some(KERNEL_USER)).map_err(|error| failed(error.message))?;
        let env = crate::process::environment(agent, &user, &BTreeMap::new());
        let source = agent.runtime.join("kernel.py");
        std::fs::write(&source, SOURCE).map_err(|error| failed(format!("{}: {error}", source.display())))?;
        let command = vec![PYTHON.to_owned(), source.to_string_lossy().into_owned()];
        let recipe = kernel::Recipe { user, env, cwd, command, cgroup: self.cgroup.clone() };
        self.with(|contexts| {
            if default && let Some(there) = contexts.default.as_ref().and_then(|id| contexts.by_id.get(id)) {
                return Ok(there.clone());
            }
            if contexts.by_id.len() >= CONTEXTS_MAX {
                let message = format!("there are {CONTEXTS_MAX} contexts already; remove one first");
                return Err((StatusCode::TOO_MANY_REQUESTS, message));
            }
            let id = new_id().map_err(|error| failed(error.to_string()))?;
            let context = Arc::new(Context::start(id.clone(), recipe));
            contexts.by_id.insert(id.clone(), context.clone());
            if default {
                contexts.default = Some(id);
            }
            Ok(context)
        })
    }

    /// The context of cells that name none.
    fn default_context(&self, agent: &Agent) -> Result<Arc<Context>, Refused> {
        let there = self.with(|contexts| contexts.default.as_ref().and_then(|id| contexts.by_id.get(id)).cloned());
        there.map_or_else(|| self.add(agent, None, true), Ok)
    }

    /// Starts the default context and walks through a cell's paths once.
    pub async fn warm(&self, agent: &Agent) -> io::Result<()> {
        let context = self.default_context(agent).map_err(|(_, why)| io::Error::other(why))?;
        let (sink, mut lines) = mpsc::channel(16);
        context.submit(Job { work: context::Work::Warm, session: agent.session(), sink }).await;
        // What it prints on the way is of no interest; that it could not start is.
        let mut last = Bytes::new();
        while let Some(line) = lines.recv().await {
            last = line;
        }
        if context.is_running() { Ok(()) } else { Err(io::Error::other(String::from_utf8_lossy(&last).into_owned())) }
    }
}

/// Answers one request.
pub async fn handle(agent: Arc<Agent>, request: Request<Incoming>, _scope: Scope) -> Answer {
    let path = request.uri().path().trim_end_matches('/').to_owned();
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let method = request.method().clone();
    let interpreter = &agent.interpreter;
    let result = match (method.as_str(), parts.as_slice()) {
        ("GET", ["health"]) => Ok(empty(StatusCode::NO_CONTENT)),
        ("POST", ["execute"]) => execute(&agent, request).await,
        ("GET", ["contexts"]) => Ok(list(interpreter)),
        ("POST", ["contexts"]) => create(&agent, request).await,
        ("DELETE", ["contexts", id]) => remove(interpreter, id).await,
        ("POST", ["contexts", id, "restart"]) => restart(interpreter, id).await,
        _ => Err((StatusCode::NOT_FOUND, format!("no route for {method} {path}"))),
    };
    result.unwrap_or_else(|(status, message)| error(status, &message))
}

async fn read<T: serde::de::DeserializeOwned>(request: Request<Incoming>) -> Result<T, Refused> {
    let body = collect(request.into_body(), BODY_MAX).await.map_err(|error| match error {
        BodyError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, error.to_string()),
        BodyError::Broken(_) => (StatusCode::BAD_REQUEST, error.to_string()),
    })?;
    serde_json::from_slice(&body).map_err(|error| (StatusCode::BAD_REQUEST, format!("malformed request: {error}")))
}

fn check_language(language: Option<&str>) -> Result<(), Refused> {
    match language.map(str::to_ascii_lowercase).as_deref() {
        None | Some("" | "python" | "python3") => Ok(()),
        Some(other) => {
            let message = format!("language {other} is not supported by this sandbox, only python");
            Err((StatusCode::BAD_REQUEST, message))
        }
    }
}

async fn execute(agent: &Agent, request: Request<Incoming>) -> Result<Answer, Refused> {
    let request: Execute = read(request).await?;
    let context = match request.context_id.as_deref().filter(|id| !id.is_empty()) {
        Some(_) if request.language.is_some() => {
            return Err((StatusCode::BAD_REQUEST, "name a context or a language, not both".to_owned()));
        }
        Some(id) => agent.interpreter.find(id)?,
        None => {
            check_language(request.language.as_deref())?;
            agent.interpreter.default_context(agent)?
        }
    };
    let (sink, lines) = mpsc::channel(16);
    let work = context::Work::Cell { code: request.code, env: request.env_vars };
    context.submit(Job { work, session: agent.session(), sink }).await;
    let lines = futures::stream::unfold(lines, |mut lines| async { lines.recv().await.map(|line| (line, lines)) });
    let body = StreamBody::new(lines.map(|line| Ok(Frame::data(line))));
    let mut response = Response::new(body.boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    Ok(response)
}

fn list(interpreter: &Interpreter) -> Answer {
    let contexts: Vec<_> = interpreter.with(|contexts| contexts.by_id.values().cloned().collect());
    let shown: Vec<_> = contexts.iter().map(|context| shown(context)).collect();
    json(StatusCode::OK, &shown)
}

fn shown(context: &Context) -> Shown<'_> {
    Shown { id: &context.id, language: "python", cwd: &context.cwd }
}

async fn create(agent: &Agent, request: Request<Incoming>) -> Result<Answer, Refused> {
    let request: Create = read(request).await?;
    check_language(request.language.as_deref())?;
    let context = agent.interpreter.add(agent, request.cwd.as_deref(), false)?;
    Ok(json(StatusCode::OK, &shown(&context)))
}

async fn remove(interpreter: &Interpreter, id: &str) -> Result<Answer, Refused> {
    let context = interpreter.find(id)?;
    interpreter.with(|contexts| {
        contexts.by_id.remove(id);
        if contexts.default.as_deref() == Some(id) {
            contexts.default = None;
        }
    });
    context.stop().await;
    Ok(empty(StatusCode::NO_CONTENT))
}

async fn restart(interpreter: &Interpreter, id: &str) -> Result<Answer, Refused> {
    let context = interpreter.find(id)?;
    context.stop().await;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// Random, in the shape of a UUID.
fn new_id() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
