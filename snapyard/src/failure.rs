//! What went wrong, for the person at the terminal and for the program that reads the exit code.
//!
//! Every failure carries what happened and, where we know it, what to do. The kind decides the exit code, so scripts
//! can tell "not there" from "busy" from "no server" without reading text.

use std::fmt;

use tonic::Code;

/// What kind of failure, by what the caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request itself is the problem, or something broke.
    Refused,
    /// What was named does not exist.
    NotFound,
    /// It exists, in a state that does not allow this now; or a name is taken.
    Conflict,
    /// No server, or one without room: the same call may work later.
    Unreachable,
}

impl Kind {
    /// The process's exit code; documented in `--help`.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Refused => 1,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::Unreachable => 5,
        }
    }

    /// The word that `--json` uses.
    fn word(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Unreachable => "unreachable",
        }
    }
}

/// A failed command.
#[derive(Debug)]
pub struct Failure {
    /// Decides the exit code.
    pub kind: Kind,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// A failure with its message: what happened, to what.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// Adds what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// A refusal of the REST API.
    pub fn from_http(status: u16, message: impl Into<String>) -> Self {
        let kind = match status {
            404 => Kind::NotFound,
            409 => Kind::Conflict,
            429 | 503 | 504 => Kind::Unreachable,
            _ => Kind::Refused,
        };
        Self::new(kind, message)
    }

    /// A refusal of a gRPC call.
    pub fn from_status(status: &tonic::Status) -> Self {
        let kind = match status.code() {
            Code::NotFound => Kind::NotFound,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => Kind::Conflict,
            Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => Kind::Unreachable,
            _ => Kind::Refused,
        };
        let failure = Self::new(kind, status.message());
        match status.code() {
            Code::Unauthenticated => failure.hint("cluster.json is of another server run; is --data-dir right?"),
            _ => failure,
        }
    }

    /// As JSON, for `--json`.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({"error": {"kind": self.kind.word(), "message": self.message, "hint": self.hint}})
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(Kind::Refused, error.to_string())
    }
}

/// An error and what caused it: the text of many errors alone does not say what happened.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Many errors repeat their cause in their own text.
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn exit_codes_tell_the_kinds_apart() {
        let codes: Vec<u8> =
            [404, 409, 503, 400, 500].into_iter().map(|s| Failure::from_http(s, "x").kind.exit_code()).collect();
        assert_eq!(codes, [3, 4, 5, 1, 1]);
        assert_eq!(Failure::from_status(&tonic::Status::aborted("busy")).kind, Kind::Conflict);
        assert_eq!(Failure::from_status(&tonic::Status::unavailable("full")).kind, Kind::Unreachable);
    }

    #[test]
    fn causes_are_told_once() {
        #[derive(Debug)]
        struct Outer(&'static str, io::Error);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.0)
            }
        }
        impl std::error::Error for Outer {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&self.1)
            }
        }
        assert_eq!(with_causes(&Outer("cannot write", io::Error::other("disk full"))), "cannot write: disk full");
        assert_eq!(with_causes(&Outer("no: disk full", io::Error::other("disk full"))), "no: disk full");
    }

    #[test]
    fn the_hint_is_on_a_line_of_its_own() {
        let failure = Failure::new(Kind::Unreachable, "no server").hint("start it");
        assert_eq!(failure.to_string(), "no server\n  start it");
        assert_eq!(failure.json()["error"]["kind"], "unreachable");
    }
}
