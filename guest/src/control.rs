//! Port 49982: what the node alone may ask. The proxy never routes to it, and connections from inside the guest are
//! refused ([`crate::http::Peers`]).
//!
//! ```text
//! template   GET /health … POST /warm, POST /freeze │ snapshot
//! restore    POST /init: clock → randomness → names → session → cut connections → reseed → thaw → 204
//! ahead      POST /rehearse: as /init up to the cut, then commands for practice; later POST /init
//! snapshot   POST /freeze │ snapshot │ POST /thaw (in the source; the copies get /init)
//! ports      CONNECT 127.0.0.1:PORT → 200, then bytes both ways
//! ```
//!
//! Invariant: between the restore and the thaw at the end of `/init` nothing of the user's runs, so nothing of it can
//! see the snapshot's clock or draw the snapshot's random numbers. `/init` may be repeated: each call is complete.
//! Should it fail half-way, the guest stays frozen and the node gives it up.
//!
//! A rehearsal makes a guest that waits for its user quick: what its first request runs, it has run before. The user's
//! processes stay frozen through it, no file of the user's home is read, and it is refused unless what a login shell runs is
//! what the template had ([`crate::warm::Shell`]). Whatever it may leave running is killed before the thaw.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::http::{Answer, Scope, Stream, collect, empty, error};
use crate::state::{Agent, Session};
use crate::sys::identity;
use crate::warm;

/// Largest body that this port takes.
const BODY_MAX: usize = 1 << 20;

/// What a guest is told at its start and after each restore.
#[derive(Debug, Deserialize)]
pub struct Init {
    /// Id of the sandbox.
    pub sandbox_id: String,
    /// Its host name.
    pub hostname: String,
    /// The wall clock, nanoseconds since 1970.
    pub unix_ns: u64,
    /// Random bytes for the kernel, base64; 64 are right.
    pub entropy: String,
    /// What `X-Access-Token` must say.
    #[serde(default)]
    pub access_token: Option<String>,
    /// Environment of all processes and contexts to come.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Answers one request.
pub async fn handle(agent: Arc<Agent>, request: Request<Incoming>, scope: Scope) -> Answer {
    if request.method() == Method::CONNECT {
        return connect(request, scope).await;
    }
    // A node that hangs up must not leave a step half done.
    let work = tokio::spawn(route(agent, request, scope));
    work.await.unwrap_or_else(|failed| error(StatusCode::INTERNAL_SERVER_ERROR, &format!("the agent failed: {failed}")))
}

async fn route(agent: Arc<Agent>, request: Request<Incoming>, scope: Scope) -> Answer {
    let path = request.uri().path().to_owned();
    match (request.method().as_str(), path.as_str()) {
        ("GET", "/health") => empty(StatusCode::NO_CONTENT),
        ("POST", "/init") => match init_of(request).await {
            Ok((init, wire)) => done("init", apply(&agent, init, &wire, &scope)),
            Err(why) => error(StatusCode::BAD_REQUEST, &why),
        },
        ("POST", "/rehearse") => match init_of(request).await {
            Ok(_) if !agent.shell.get().is_some_and(warm::Shell::is_unchanged) => {
                error(StatusCode::CONFLICT, "what a login shell runs is not what the template had")
            }
            Ok((init, wire)) => done("rehearse", rehearse(&agent, init, &wire, &scope)),
            Err(why) => error(StatusCode::BAD_REQUEST, &why),
        },
        ("POST", "/freeze") => done("freeze", freeze(&agent).await),
        ("POST", "/thaw") => done("thaw", agent.cgroup.thaw()),
        ("POST", "/warm") => done("warm", warm::warm(&agent).await),
        (method, path) => error(StatusCode::NOT_FOUND, &format!("no route for {method} {path}")),
    }
}

fn done(what: &str, result: io::Result<()>) -> Answer {
    match result {
        Ok(()) => empty(StatusCode::NO_CONTENT),
        Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("{what}: {cause}")),
    }
}

async fn init_of(request: Request<Incoming>) -> Result<(Init, Bytes), String> {
    let body = collect(request.into_body(), BODY_MAX).await.map_err(|broken| broken.to_string())?;
    let init = serde_json::from_slice(&body).map_err(|malformed| format!("malformed init: {malformed}"))?;
    Ok((init, body))
}

async fn freeze(agent: &Agent) -> io::Result<()> {
    agent.cgroup.freeze().await?;
    agent.keep.mend()?;
    // The first time is the template's own, when its recipe has had its say.
    if agent.shell.get().is_none() {
        // Another request cannot have been faster: there is nothing to find then either.
        let _ = agent.shell.set(warm::Shell::now()?);
    }
    Ok(())
}

/// The order is the point: whatever runs after the thaw finds everything new.
fn apply(agent: &Agent, init: Init, wire: &[u8], scope: &Scope) -> io::Result<()> {
    become_new(agent, init, wire, scope)?;
    if agent.rehearsing.swap(false, Ordering::SeqCst) {
        agent.cgroup.end_rehearsal()?;
    }
    agent.interpreter.reseed()?;
    agent.cgroup.thaw()
}

/// The same, short of the user's processes.
fn rehearse(agent: &Agent, init: Init, wire: &[u8], scope: &Scope) -> io::Result<()> {
    become_new(agent, init, wire, scope)?;
    agent.rehearsing.store(true, Ordering::SeqCst);
    Ok(())
}

fn become_new(agent: &Agent, init: Init, wire: &[u8], scope: &Scope) -> io::Result<()> {
    let entropy = BASE64.decode(&init.entropy).map_err(|bad| io::Error::new(io::ErrorKind::InvalidInput, bad))?;
    if entropy.len() < 16 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "entropy must be at least 16 bytes"));
    }
    if agent.guest {
        identity::set_wall_clock(init.unix_ns)?;
        identity::add_entropy(&entropy)?;
        nix::unistd::sethostname(&init.hostname)?;
    }
    agent.keep.set_machine_id(&machine_id(&entropy))?;
    agent.keep.remember(wire)?;
    agent.set_session(session_of(init));
    agent.connections.cut_all_but(scope.id);
    Ok(())
}

fn session_of(init: Init) -> Session {
    let access_token = init.access_token.filter(|token| !token.is_empty());
    Session { sandbox_id: init.sandbox_id, access_token, env: init.env, generation: 0 }
}

/// Takes up the session of an agent that ran before this one in the same guest: it must ask for the same token.
pub fn recall(agent: &Agent) -> io::Result<()> {
    if let Some(wire) = agent.keep.recall()? {
        agent.set_session(session_of(serde_json::from_slice(&wire)?));
    }
    Ok(())
}

/// Not the bytes that go to the kernel's pool themselves: everybody may read a machine id.
fn machine_id(entropy: &[u8]) -> [u8; 16] {
    let digest = crate::auth::sha256(&[b"machine-id", entropy].concat());
    *digest.first_chunk().expect("a digest has 32 bytes")
}

/// Opens a tunnel to a port of this guest.
async fn connect(request: Request<Incoming>, scope: Scope) -> Answer {
    let target = request.uri().authority().and_then(|authority| {
        let local = matches!(authority.host(), "127.0.0.1" | "localhost");
        authority.port_u16().filter(|port| local && *port != 0)
    });
    let Some(port) = target else {
        return error(StatusCode::BAD_REQUEST, "CONNECT takes 127.0.0.1:PORT");
    };
    let Ok(inner) = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await else {
        return error(StatusCode::BAD_GATEWAY, "port is not open");
    };
    let _ = inner.set_nodelay(true);
    tokio::spawn(async move {
        if let Ok(outer) = hyper::upgrade::on(request).await {
            tunnel(outer, inner, scope).await;
        }
    });
    empty(StatusCode::OK)
}

async fn tunnel(outer: Upgraded, mut inner: TcpStream, mut scope: Scope) {
    let Ok(parts) = outer.downcast::<TokioIo<Stream>>() else { return };
    let mut outer = parts.io.into_inner();
    // What the client sent right behind its request.
    if !parts.read_buf.is_empty() && tokio::io::AsyncWriteExt::write_all(&mut inner, &parts.read_buf).await.is_err() {
        return;
    }
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut outer, &mut inner) => {}
        () = scope.cut() => {
            outer.reset_on_close();
            let _ = inner.set_zero_linger();
        }
    }
}
