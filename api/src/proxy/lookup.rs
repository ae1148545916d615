//! Which gateway leads to a sandbox: asked of the catalog, remembered for a second or until it proves wrong.
//!
//! Only good answers are remembered. One that is stale does no harm: the gateway itself refuses a sandbox that is
//! not (or no longer) there, and then the catalog is asked again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use snapyard_proto::v1::SandboxState;

use crate::clients::Clients;
use crate::errors::ApiError;
use crate::team::only_team;

const FRESH: Duration = Duration::from_secs(1);

/// Remembered answers above which the old ones are thrown out.
const MANY: usize = 4096;

#[derive(Debug)]
pub(super) struct Lookup {
    clients: Arc<Clients>,
    known: Mutex<HashMap<String, (String, Instant)>>,
}

/// A gateway's address.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) gateway: String,
    /// From memory: the catalog may say otherwise by now.
    pub(super) remembered: bool,
}

impl Lookup {
    pub(super) fn new(clients: Arc<Clients>) -> Self {
        Self { clients, known: Mutex::new(HashMap::new()) }
    }

    /// The gateway of a sandbox that can be reached; 404 for one that cannot.
    pub(super) async fn find(&self, sandbox_id: &str) -> Result<Found, ApiError> {
        let now = Instant::now();
        if let Some((gateway, since)) = self.known.lock().get(sandbox_id)
            && now.saturating_duration_since(*since) < FRESH
        {
            return Ok(Found { gateway: gateway.clone(), remembered: true });
        }
        let sandbox = self.clients.usable_sandbox(&only_team(), sandbox_id).await?;
        if matches!(sandbox.state(), SandboxState::Paused | SandboxState::Pausing) {
            return Err(ApiError::unimplemented(&format!("waking the paused sandbox {sandbox_id}")));
        }
        let mut known = self.known.lock();
        if known.len() >= MANY {
            known.retain(|_, (_, since)| now.saturating_duration_since(*since) < FRESH);
        }
        known.insert(sandbox_id.to_owned(), (sandbox.gateway.clone(), now));
        Ok(Found { gateway: sandbox.gateway, remembered: false })
    }

    pub(super) fn forget(&self, sandbox_id: &str) {
        self.known.lock().remove(sandbox_id);
    }
}
