//! Blocking work on the threads that are there for it.

/// Runs `work` on a blocking thread and waits for it. A panic in `work` goes on in the caller.
///
/// Dropping the future does not stop `work` once it has started.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down and never ran it: the caller is about to be dropped, too.
            Err(_) => std::future::pending().await,
        },
    }
}
