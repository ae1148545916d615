//! Port 49983: the routes of the public SDKs' agent.

use std::sync::Arc;

use http::{HeaderMap, Request, StatusCode};
use hyper::body::Incoming;

use crate::auth;
use crate::connect::{CallError, Code, basic_user, unary};
use crate::http::{Answer, Scope, empty, error, json};
use crate::state::Agent;
use crate::users::User;
use crate::{files, filesystem, metrics, process};

/// The version that this agent says to be: of the reference agent with the same features. Commands with stdin, closing
/// it, uploads as octet-stream and gzip are in; metadata of files (0.6.2) and watching are not.
pub const AGENT_VERSION: &str = "0.5.7";

/// Answers one request.
pub async fn handle(agent: Arc<Agent>, request: Request<Incoming>, _scope: Scope) -> Answer {
    let path = request.uri().path();
    if path == "/health" {
        return empty(StatusCode::NO_CONTENT);
    }
    let session = agent.session();
    let trusted = auth::has_token(&session, request.headers());
    if path == "/files" {
        return files::handle(&agent, request, trusted).await;
    }
    if let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/'))
        && service.contains('.')
    {
        if !trusted {
            return unary::<()>(Err(CallError::new(Code::Unauthenticated, "X-Access-Token is missing or wrong")));
        }
        let (service, method) = (service.to_owned(), method.to_owned());
        let (parts, body) = request.into_parts();
        return match service.as_str() {
            "process.Process" => process::service::handle(&agent, &method, &parts.headers, body).await,
            "filesystem.Filesystem" => filesystem::handle(&agent, &method, &parts.headers, body).await,
            _ => unary::<()>(Err(CallError::new(Code::Unimplemented, format!("there is no service {service}")))),
        };
    }
    if !trusted {
        return error(StatusCode::UNAUTHORIZED, "X-Access-Token is missing or wrong");
    }
    match (request.method().as_str(), path) {
        ("GET", "/metrics") => match metrics::read().await {
            Ok(metrics) => json(StatusCode::OK, &metrics),
            Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("metrics: {cause}")),
        },
        ("GET", "/envs") => json(StatusCode::OK, &session.env),
        (method, path) => error(StatusCode::NOT_FOUND, &format!("no route for {method} {path}")),
    }
}

/// The user that a call names, or the default one.
pub fn requested_user(agent: &Agent, headers: &HeaderMap) -> Result<User, CallError> {
    find_user(agent, basic_user(headers)?.as_deref())
}

/// The user called `name`, or the default one.
pub fn find_user(agent: &Agent, name: Option<&str>) -> Result<User, CallError> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or(&agent.default_user);
    let found = agent.accounts.user(name).map_err(|error| CallError::of_io(&error, "/etc/passwd"))?;
    found.ok_or_else(|| CallError::new(Code::InvalidArgument, format!("user {name} does not exist in this sandbox")))
}
