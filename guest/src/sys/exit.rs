//! Waiting for the end of a child through its pid descriptor.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

use super::spawn::{Exit, try_wait};

/// Watches one child. Nobody else may take its status.
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// Watches the child behind `pidfd`.
    pub fn new(pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` always gives the same open descriptor, until the `AsyncFd` that owns it drops it.
        Ok(Self(unsafe { AsyncFd::register(pidfd) }?))
    }

    /// Waits for the end, and takes the status: it can be had once.
    pub async fn exited(&self) -> Exit {
        loop {
            let status = self.0.readable().await.and_then(|mut ready| {
                let status = try_wait(self.0.get_ref())?;
                if status.is_none() {
                    ready.clear_ready();
                }
                Ok(status)
            });
            match status {
                Ok(Some(status)) => return status,
                Ok(None) => {}
                // Somebody else took it, which nobody should; there is nothing left to wait for.
                Err(_) => return Exit::Code(255),
            }
        }
    }

    /// Waits for the end without taking the status.
    pub async fn ended(&self) {
        // An error shows again when the status is taken.
        drop(self.0.readable().await);
    }
}
