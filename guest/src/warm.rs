//! Warming a template before it is captured: everything that a first request touches is touched once, so that it is in
//! memory, resolved and translated in every sandbox that starts from the template.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics;
use crate::process::{Config, Request, start};
use crate::service::find_user;
use crate::state::Agent;

/// Longest time for one command.
const LIMIT: Duration = Duration::from_secs(120);

/// Warms interpreter, shells and files.
pub async fn warm(agent: &Arc<Agent>) -> io::Result<()> {
    agent.interpreter.warm(agent).await?;
    for name in [agent.default_user.as_str(), "root"] {
        let user = find_user(agent, Some(name)).map_err(io::Error::other)?;
        for stdin in [false, true] {
            let config = Config {
                cmd: "/bin/bash".to_owned(),
                args: ["-l", "-c", "echo warm; ls / >/dev/null; true"].map(str::to_owned).to_vec(),
                ..Config::default()
            };
            let request = Request { config, tag: None, stdin, deadline: Some(LIMIT) };
            let mut messages = start(agent, &user, request).await.map_err(io::Error::other)?;
            while messages.recv().await.is_some() {}
        }
    }
    metrics::read().await?;
    // What was written on the way is in the disk's image, not only in memory.
    tokio::task::spawn_blocking(nix::unistd::sync).await.map_err(io::Error::other)
}
