//! Who may talk to the agent: the access token, and signed `/files` addresses.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::HeaderMap;
use sha2::{Digest, Sha256};

use crate::state::Session;

/// SHA-256 of `data`.
pub fn sha256(data: &[u8]) -> [u8; 32] {
    Sha256::digest(data).into()
}

/// Whether the request carries the session's token, or the session has none.
pub fn has_token(session: &Session, headers: &HeaderMap) -> bool {
    let Some(expected) = &session.access_token else { return true };
    headers.get("x-access-token").is_some_and(|given| equal(given.as_bytes(), expected.as_bytes()))
}

/// What a signed address of `/files` says.
#[derive(Debug, Default)]
pub struct Signed<'a> {
    /// Path as in the query.
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    /// User as in the query; empty for the default user.
    pub user: &'a str,
    /// `v1_` and the base64 of the digest, without padding.
    pub signature: &'a str,
    /// When it ends, Unix seconds.
    pub expiration: Option<&'a str>,
}

/// Checks a signature: SHA-256 of `path:operation:user:token[:expiration]`, as the E2B SDK makes it.
pub fn check_signature(session: &Session, signed: &Signed<'_>, now_unix: u64) -> Result<(), &'static str> {
    let Some(token) = &session.access_token else { return Ok(()) };
    let mut text = format!("{}:{}:{}:{token}", signed.path, signed.operation, signed.user);
    if let Some(expiration) = signed.expiration {
        text.push(':');
        text.push_str(expiration);
    }
    let expected = format!("v1_{}", STANDARD_NO_PAD.encode(sha256(text.as_bytes())));
    if !equal(expected.as_bytes(), signed.signature.as_bytes()) {
        return Err("the signature does not match");
    }
    match signed.expiration.map(str::parse::<u64>) {
        None => Ok(()),
        Some(Ok(end)) if now_unix <= end => Ok(()),
        Some(Ok(_)) => Err("the signature has expired"),
        Some(Err(_)) => Err("the expiration is not a number"),
    }
}

/// Compares without telling by its duration where the difference is.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session { access_token: Some("secret".to_owned()), ..Session::default() }
    }

    /// Made with `e2b.sandbox.signature.get_signature("/a b.txt", "read", None, "secret")`.
    const PLAIN: &str = "v1_lOhIAlkOCK8IqgkxnAFuMgoamvaGI6KxjI5Z+IDqkgs";
    /// The same with user `root`, operation `write`, and the expiration 1700000060.
    const EXPIRING: &str = "v1_8vFv7pF+p2Nt2qLCUqHBr/JSzMEPIInd+FrGuEYduc8";

    #[test]
    fn the_sdk_s_signatures_are_accepted() {
        let plain = Signed { path: "/a b.txt", operation: "read", signature: PLAIN, ..Signed::default() };
        assert_eq!(check_signature(&session(), &plain, 1), Ok(()));
        let expiring = Signed {
            path: "/a b.txt",
            operation: "write",
            user: "root",
            signature: EXPIRING,
            expiration: Some("1700000060"),
        };
        assert_eq!(check_signature(&session(), &expiring, 1_700_000_060), Ok(()));
        assert_eq!(check_signature(&session(), &expiring, 1_700_000_061), Err("the signature has expired"));
    }

    #[test]
    fn a_signature_is_for_one_path_and_operation() {
        let other_path = Signed { path: "/b.txt", operation: "read", signature: PLAIN, ..Signed::default() };
        assert!(check_signature(&session(), &other_path, 1).is_err());
        let other_operation = Signed { path: "/a b.txt", operation: "write", signature: PLAIN, ..Signed::default() };
        assert!(check_signature(&session(), &other_operation, 1).is_err());
        let longer_life = Signed {
            path: "/a b.txt",
            operation: "read",
            signature: PLAIN,
            expiration: Some("9"),
            ..Signed::default()
        };
        assert!(check_signature(&session(), &longer_life, 1).is_err());
    }

    #[test]
    fn without_a_token_everybody_is_let_in() {
        assert!(has_token(&Session::default(), &HeaderMap::new()));
        assert!(!has_token(&session(), &HeaderMap::new()));
    }
}
