//! What of a message's head is for the next hop only (RFC 9110, section 7.6.1), and is not passed on. Pure.

use http::header::{
    CONNECTION, EXPECT, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue};

use super::route::{AGENT_PORT, INTERPRETER_PORT};

/// Removes hop-by-hop headers, those that `Connection` names included. Framing (`Transfer-Encoding`) is made anew on
/// the other side, from the body itself.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
}

/// Makes a request's head fit for the guest's port.
///
/// `Expect` has been answered on this side. The control plane's key is not for guests; their own services may have
/// keys under the same name, so it is only kept from the two ports that are not theirs.
pub(super) fn prepare_request(headers: &mut HeaderMap, port: u16) {
    strip_hop_by_hop(headers);
    headers.remove(EXPECT);
    if port == AGENT_PORT || port == INTERPRETER_PORT {
        headers.remove("x-api-key");
    }
}

/// The protocol that a request wants to switch to, if it does. `h2c` is not one: a proxy speaks for itself only.
pub(super) fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let protocol = headers.get(UPGRADE)?;
    let connection = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let asked = connection.flat_map(|value| value.split(',')).any(|token| token.trim().eq_ignore_ascii_case("upgrade"));
    let h2c = protocol.as_bytes().eq_ignore_ascii_case(b"h2c");
    (asked && !h2c).then(|| protocol.clone())
}

/// Says that a message switches to `protocol`.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn hop_by_hop_headers_stay_on_their_hop() {
        let mut all = headers(&[
            ("connection", "close, X-Private"),
            ("connection", "keep-alive"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("proxy-connection", "close"),
            ("proxy-authorization", "x"),
            ("expect", "100-continue"),
            ("content-type", "text/plain"),
            ("content-length", "5"),
            ("x-api-key", "k"),
        ]);
        prepare_request(&mut all, 8000);
        let mut left: Vec<&str> = all.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-length", "content-type", "x-api-key"]);
        prepare_request(&mut all, AGENT_PORT);
        assert!(!all.contains_key("x-api-key"), "not for the agent");
    }

    #[test]
    fn an_upgrade_must_be_asked_for_in_both_headers() {
        let wanted = |pairs| wanted_upgrade(&headers(pairs)).map(|value| value.to_str().expect("ascii").to_owned());
        let websocket = wanted(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert_eq!(websocket.as_deref(), Some("websocket"));
        assert_eq!(wanted(&[("upgrade", "websocket")]), None);
        assert_eq!(wanted(&[("connection", "upgrade")]), None);
        assert_eq!(wanted(&[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")]), None);
    }
}
