//! Which gateway leads to a sandbox: asked of the catalog, remembered for a second or until it proves wrong. A paused
//! sandbox that is to wake by itself is resumed on the way.
//!
//! Only good answers are remembered. One that is stale does no harm: the gateway itself refuses a sandbox that is
//! not (or no longer) there, and then the catalog is asked again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use parking_lot::Mutex;
use snapyard_proto::v1::{Sandbox, SandboxState};

use crate::clients::Clients;
use crate::errors::ApiError;
use crate::resume::resume;
use crate::team::only_team;

const FRESH: Duration = Duration::from_secs(1);

/// How often a request tries to wake a sandbox that others are waking too, and the pause in between.
const WAKE_TRIES: u32 = 100;
const WAKE_PAUSE: Duration = Duration::from_millis(20);

/// Remembered answers above which the old ones are thrown out.
const MANY: usize = 4096;

#[derive(Debug)]
pub(super) struct Lookup {
    clients: Arc<Clients>,
    known: Mutex<HashMap<String, (String, Instant)>>,
    /// How long a sandbox lives that a request has woken.
    wake_ms: i64,
}

/// A gateway's address.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) gateway: String,
    /// From memory: the catalog may say otherwise by now.
    pub(super) remembered: bool,
}

impl Lookup {
    pub(super) fn new(clients: Arc<Clients>, wake_ms: i64) -> Self {
        Self { clients, known: Mutex::new(HashMap::new()), wake_ms }
    }

    /// The gateway of a sandbox that can be reached; 404 for one that cannot.
    pub(super) async fn find(&self, sandbox_id: &str) -> Result<Found, ApiError> {
        let now = Instant::now();
        if let Some((gateway, since)) = self.known.lock().get(sandbox_id)
            && now.saturating_duration_since(*since) < FRESH
        {
            return Ok(Found { gateway: gateway.clone(), remembered: true });
        }
        let mut sandbox = self.clients.usable_sandbox(&only_team(), sandbox_id).await?;
        match sandbox.state() {
            SandboxState::Paused if sandbox.lifecycle_auto_resume => sandbox = self.wake(sandbox).await?,
            SandboxState::Paused => return Err(asleep(sandbox_id)),
            // The gateway holds the request until the pause has ended, and refuses it then: to be looked up again.
            SandboxState::Pausing => return Ok(Found { gateway: sandbox.gateway, remembered: true }),
            // Or until it has been resumed.
            _ => {}
        }
        let mut known = self.known.lock();
        if known.len() >= MANY {
            known.retain(|_, (_, since)| now.saturating_duration_since(*since) < FRESH);
        }
        known.insert(sandbox_id.to_owned(), (sandbox.gateway.clone(), now));
        Ok(Found { gateway: sandbox.gateway, remembered: false })
    }

    /// Resumes a sandbox, or finds that another request is doing that.
    async fn wake(&self, mut sandbox: Sandbox) -> Result<Sandbox, ApiError> {
        for _ in 0..WAKE_TRIES {
            match resume(&self.clients, &only_team(), &sandbox, self.wake_ms).await {
                Ok(resumed) => return resumed.sandbox.ok_or_else(|| asleep(&sandbox.id)),
                Err(error) if error.status() == StatusCode::CONFLICT => {}
                Err(error) => return Err(error),
            }
            sandbox = self.clients.usable_sandbox(&only_team(), &sandbox.id).await?;
            if sandbox.state() != SandboxState::Paused {
                return Ok(sandbox);
            }
            // The other has begun, and its row does not say so yet; or it has failed, and this one tries.
            tokio::time::sleep(WAKE_PAUSE).await;
        }
        Err(asleep(&sandbox.id))
    }

    pub(super) fn forget(&self, sandbox_id: &str) {
        self.known.lock().remove(sandbox_id);
    }
}

/// A sandbox that cannot be reached because it is paused: for the data plane as good as not there, with what to do.
fn asleep(sandbox_id: &str) -> ApiError {
    ApiError::not_found(format!("sandbox {sandbox_id} was not found running: it is paused; connect to it to resume it"))
}
