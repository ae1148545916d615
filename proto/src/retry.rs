//! Whether a failed call may be sent again: a refusal before anything happened says yes, an outcome that is not
//! known says no. Travels as metadata of the [`Status`]; the API tier turns it into `Should-Retry`.

use tonic::Status;
use tonic::metadata::MetadataValue;

const KEY: &str = "x-snapyard-should-retry";

/// What a failure says about a repetition of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShouldRetry {
    /// Nothing has happened; the same call may succeed a little later.
    Yes,
    /// It may have happened; look before calling again.
    No,
}

/// Marks a status. `Status` has no builder for metadata, hence a function.
pub fn mark(mut status: Status, should_retry: ShouldRetry) -> Status {
    let value = match should_retry {
        ShouldRetry::Yes => "true",
        ShouldRetry::No => "false",
    };
    status.metadata_mut().insert(KEY, MetadataValue::from_static(value));
    status
}

/// The mark on a status, if it carries one.
pub fn marked(status: &Status) -> Option<ShouldRetry> {
    match status.metadata().get(KEY)?.as_encoded_bytes() {
        b"true" => Some(ShouldRetry::Yes),
        b"false" => Some(ShouldRetry::No),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_back() {
        assert_eq!(marked(&Status::aborted("busy")), None);
        assert_eq!(marked(&mark(Status::aborted("busy"), ShouldRetry::Yes)), Some(ShouldRetry::Yes));
        assert_eq!(marked(&mark(Status::aborted("busy"), ShouldRetry::No)), Some(ShouldRetry::No));
    }
}
