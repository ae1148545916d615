//! Blocking work on the threads that are there for it.
//!
//! Under simulation (tests only) the work runs where it is asked for, so that the order of events depends on nothing but
//! the seed.

/// Runs `work` on a blocking thread and waits for it. A panic in `work` goes on in the caller.
///
/// Dropping the future does not stop `work` once it has started.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    #[cfg(test)]
    if inline::is_on() {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down and never ran it: the caller is about to be dropped, too.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
pub(crate) mod inline {
    use std::cell::Cell;

    thread_local! {
        static ON: Cell<bool> = const { Cell::new(false) };
    }

    pub(crate) fn is_on() -> bool {
        ON.get()
    }

    /// From now on this thread does its blocking work itself.
    pub(crate) fn turn_on() {
        ON.set(true);
    }
}
