//! Saving and loading device state: a migration without memory, through a memfd.
//!
//! ```text
//!   save: getfd ─▶ migrate fd: ─▶ MIGRATION completed ─▶ read the memfd           (failed: the reason from query-migrate)
//!   load: memfd ─▶ getfd ─▶ migrate-incoming fd: ─▶ MIGRATION completed           (failed: QEMU exits)
//! ```

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use bytes::Bytes;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep, timeout};

use crate::driver::DriverError;
use crate::qmp::{Qmp, QmpError};

/// Device state is tens of kilobytes; more than this is not device state.
const MAX_STATE: u64 = 64 << 20;
/// How long saving or loading may take. It does not wait for pages or blocks of the guest, but may touch guest memory.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the status is asked for when no event comes, as a second way to learn of it.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How often a machine is asked whether it can be resumed. The guest stands still meanwhile.
const ASK_SETTLED_EVERY: Duration = Duration::from_micros(200);

const SAVE: &str = "save the device state";
const LOAD: &str = "load the device state";

/// Sets a fresh QEMU up for both directions.
pub async fn prepare(qmp: &Qmp) -> Result<(), QmpError> {
    let on = |capability: &str| json!({ "capability": capability, "state": true });
    let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
    qmp.execute("migrate-set-capabilities", capabilities).await.map(drop)
}

/// The device state of a stopped guest.
pub async fn save(qmp: &Qmp) -> Result<Bytes, DriverError> {
    let mut file = state_file().map_err(|cause| DriverError::new(SAVE, cause))?;
    save_to(qmp, file.as_fd()).await?;
    read_state(&mut file).map_err(|cause| DriverError::new(SAVE, cause))
}

/// Saves into `sink`. After a failure the guest can be resumed and saved again.
pub async fn save_to(qmp: &Qmp, sink: BorrowedFd<'_>) -> Result<(), DriverError> {
    let failed = |cause: QmpError| DriverError::new(SAVE, cause);
    qmp.give_fd("state-out", sink).await.map_err(failed)?;
    let result = match migrate(qmp, "migrate", "fd:state-out", SAVE).await {
        Ok(()) => settle(qmp).await,
        failed => failed,
    };
    if result.is_err() {
        // QEMU drops the descriptor when a migration takes it, not before.
        let _ = qmp.execute("migrate_cancel", Value::Null).await;
        let _ = qmp.execute("closefd", json!({ "fdname": "state-out" })).await;
    }
    result
}

/// Waits until a machine whose state was saved can be resumed. QEMU reports completion from the migration's thread, and
/// leaves `finish-migrate`, in which it refuses to, a moment later in its main loop.
async fn settle(qmp: &Qmp) -> Result<(), DriverError> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let status = qmp.execute("query-status", Value::Null).await.map_err(|cause| DriverError::new(SAVE, cause))?;
        if status["status"] != "finish-migrate" {
            return Ok(());
        }
        sleep(ASK_SETTLED_EVERY).await;
    }
    Err(DriverError::new(SAVE, format!("the machine is not settled within {PATIENCE:?}")))
}

/// Gives a waiting machine its state.
pub async fn load(qmp: &Qmp, state: &Bytes) -> Result<(), DriverError> {
    let write = || {
        let file = state_file()?;
        file.write_all_at(state, 0)?;
        Ok(file)
    };
    let file = write().map_err(|cause: io::Error| DriverError::new(LOAD, cause))?;
    qmp.give_fd("state-in", file.as_fd()).await.map_err(|cause| DriverError::new(LOAD, cause))?;
    migrate(qmp, "migrate-incoming", "fd:state-in", LOAD).await
}

async fn migrate(qmp: &Qmp, command: &str, uri: &str, step: &'static str) -> Result<(), DriverError> {
    let failed = |cause: QmpError| DriverError::new(step, cause);
    let mut events = qmp.events();
    qmp.execute(command, json!({ "uri": uri })).await.map_err(failed)?;
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let mut status = match timeout(ASK_EVERY, events.recv()).await {
            Ok(Ok(event)) if event.name == "MIGRATION" => event.data,
            Ok(Ok(_)) => continue,
            Err(_) | Ok(Err(RecvError::Lagged(_) | RecvError::Closed)) => {
                qmp.execute("query-migrate", Value::Null).await.map_err(failed)?
            }
        };
        let state = status["status"].take();
        match state.as_str().unwrap_or_default() {
            "completed" => return Ok(()),
            "failed" | "cancelled" => {
                let report = qmp.execute("query-migrate", Value::Null).await.map_err(failed)?;
                let reason = report["error-desc"].as_str().unwrap_or("QEMU gives no reason");
                return Err(DriverError::new(step, reason));
            }
            _ => {}
        }
    }
    Err(DriverError::new(step, format!("not done within {PATIENCE:?}")))
}

fn state_file() -> io::Result<File> {
    Ok(File::from(memfd_create("snapyard-state", MFdFlags::MFD_CLOEXEC)?))
}

fn read_state(file: &mut File) -> io::Result<Bytes> {
    let len = file.metadata()?.len();
    if len == 0 || len > MAX_STATE {
        return Err(io::Error::other(format!("a device state of {len} bytes")));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes.into())
}
