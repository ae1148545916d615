//! Where the time of a restore went, for the client: the `Server-Timing` header (W3C Server Timing; milliseconds) and
//! how much of the memory image had been filled.
//!
//! `running` and `ready` count from the moment the HTTP request had been received, so they include what this tier did
//! before it called the node. The other phases are the node's own, from its receipt of the call; `place` is this
//! tier's wait for the scheduler.

use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderValue};
use snapyard_proto::v1::RestoreTimings;

/// When the head of the HTTP request had been received. Travels as an extension of the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received(pub(crate) Instant);

/// Headers of an answer to a create or a rollback. `before_node`: from the request's receipt to the node call.
pub(crate) fn restore_headers(
    place: Option<Duration>,
    before_node: Duration,
    timings: Option<&RestoreTimings>,
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let Some(t) = timings else { return headers };
    let since_node = |us: u32| Duration::from_micros(u64::from(us));
    let since_request = |us: u32| before_node + since_node(us);
    let phases = [
        place.map(|place| ("place", place)),
        Some(("open", since_node(t.snapshot_open_us))),
        Some(("vmm", since_node(t.vmm_ready_us))),
        Some(("attach", since_node(t.memory_attached_us))),
        Some(("load", since_node(t.device_state_loaded_us))),
        Some(("running", since_request(t.running_us))),
        Some(("ready", since_request(t.agent_ready_us))),
    ];
    let phases: Vec<(&str, Duration)> = phases.into_iter().flatten().collect();
    headers.insert("server-timing", server_timing(&phases));
    headers.insert("x-snapyard-filled-at-running", HeaderValue::from(t.filled_bytes_at_running));
    headers.insert("x-snapyard-filled-at-ready", HeaderValue::from(t.filled_bytes_at_ready));
    headers
}

/// `name;dur=ms, …`
pub(crate) fn server_timing(phases: &[(&str, Duration)]) -> HeaderValue {
    let text: Vec<String> =
        phases.iter().map(|(name, time)| format!("{name};dur={:.3}", time.as_secs_f64() * 1e3)).collect();
    HeaderValue::try_from(text.join(", ")).expect("names of phases and digits are ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_and_ready_count_from_the_request() {
        let timings = RestoreTimings {
            snapshot_open_us: 100,
            vmm_ready_us: 200,
            memory_attached_us: 300,
            device_state_loaded_us: 5_000,
            running_us: 6_000,
            agent_ready_us: 150_000,
            filled_bytes_at_running: 4096,
            filled_bytes_at_ready: 8192,
        };
        let headers = restore_headers(Some(Duration::from_micros(500)), Duration::from_millis(2), Some(&timings));
        assert_eq!(
            headers["server-timing"],
            "place;dur=0.500, open;dur=0.100, vmm;dur=0.200, attach;dur=0.300, load;dur=5.000, running;dur=8.000, \
             ready;dur=152.000"
        );
        assert_eq!(headers["x-snapyard-filled-at-running"], "4096");
        assert_eq!(headers["x-snapyard-filled-at-ready"], "8192");
        assert!(restore_headers(None, Duration::ZERO, None).is_empty());
    }
}
