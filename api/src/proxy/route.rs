//! Whether a request is for a sandbox, and for which port of which. Pure.
//!
//! Two ways to name a sandbox: the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, or the host name
//! `<port>-<id>.<domain>`. The headers win. Any domain will do: a client may have been told another one than this
//! server's, and no control-plane host begins with a number, a dash and an id.

use http::{HeaderMap, header};

use crate::errors::ApiError;
use crate::names::is_sandbox_id;

/// The port of the agent.
pub(crate) const AGENT_PORT: u16 = 49983;

/// The port of the code interpreter.
pub(crate) const INTERPRETER_PORT: u16 = 49999;

/// The port by which the node drives the agent (identity, freeze, thaw). Never reachable from outside.
pub(crate) const CONTROL_PORT: u16 = 49982;

/// A TCP port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    pub(crate) sandbox_id: String,
    pub(crate) port: u16,
}

/// The target of a request; `None` for a request to the control plane. `authority` is that of an absolute URI, which
/// outweighs the header `Host`.
pub(crate) fn target(headers: &HeaderMap, authority: Option<&str>) -> Result<Option<Target>, ApiError> {
    if let Some(id) = headers.get("e2b-sandbox-id") {
        return by_headers(id.as_bytes(), headers).map(Some);
    }
    let host = authority.or_else(|| headers.get(header::HOST)?.to_str().ok());
    Ok(host.and_then(by_host))
}

fn by_headers(id: &[u8], headers: &HeaderMap) -> Result<Target, ApiError> {
    let id = std::str::from_utf8(id).ok().filter(|id| is_sandbox_id(id));
    let Some(sandbox_id) = id.map(str::to_owned) else {
        return Err(ApiError::invalid("the header E2b-Sandbox-Id is not a sandbox id (a-z, 0-9)"));
    };
    let port = headers.get("e2b-sandbox-port").and_then(|port| port.to_str().ok()).and_then(port);
    let Some(port) = port else {
        return Err(ApiError::invalid("the header E2b-Sandbox-Port must be a port number from 1 to 65535"));
    };
    Ok(Target { sandbox_id, port })
}

fn by_host(host: &str) -> Option<Target> {
    let (label, domain) = host.split_once('.')?;
    let (number, id) = label.split_once('-')?;
    let sandbox_id = id.to_ascii_lowercase();
    let target = Target { port: port(number)?, sandbox_id };
    (!domain.is_empty() && is_sandbox_id(&target.sandbox_id)).then_some(target)
}

fn port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse::<u16>().ok().filter(|port| digits && *port != 0)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().expect("name"), value.parse().expect("value"))).collect()
    }

    fn to(sandbox_id: &str, port: u16) -> Target {
        Target { sandbox_id: sandbox_id.into(), port }
    }

    #[test]
    fn by_host_name_under_any_domain() {
        for host in ["49999-abc1.cube.app", "49999-ABC1.Cube.App", "49999-abc1.cube.app:3000", "49999-abc1.x"] {
            assert_eq!(target(&headers(&[("host", host)]), None), Ok(Some(to("abc1", 49999))), "{host}");
        }
        let other = headers(&[("host", "127.0.0.1:3000")]);
        assert_eq!(target(&other, Some("80-abc.cube.app")), Ok(Some(to("abc", 80))), "an absolute URI");
    }

    #[test]
    fn other_hosts_are_the_control_plane() {
        for host in [
            "127.0.0.1:3000",
            "localhost",
            "[::1]:3000",
            "api.cube.app",
            "a-b.cube.app",
            "0-abc.cube.app",
            "65536-abc.cube.app",
            "+80-abc.cube.app",
            "80-a-b.cube.app",
            "80-.cube.app",
            "80-abc",
            "80-abc.",
            "-abc.x",
            "192-168.example.org-",
        ] {
            let routed = target(&headers(&[("host", host)]), None);
            assert!(matches!(routed, Ok(None)) || host.starts_with("192"), "{host}: {routed:?}");
        }
        assert_eq!(target(&HeaderMap::new(), None), Ok(None));
    }

    #[test]
    fn by_headers_and_they_win() {
        let both = headers(&[("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "80"), ("host", "90-def.cube.app")]);
        assert_eq!(target(&both, None), Ok(Some(to("abc", 80))));
        for bad in [
            headers(&[("e2b-sandbox-id", "A/b"), ("e2b-sandbox-port", "80")]),
            headers(&[("e2b-sandbox-id", "abc")]),
            headers(&[("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "0")]),
            headers(&[("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "http")]),
            headers(&[("e2b-sandbox-id", ""), ("e2b-sandbox-port", "80")]),
        ] {
            assert_eq!(target(&bad, None).expect_err("refused").status(), 400, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn every_target_has_a_host_name_that_leads_to_it(id in "[a-z0-9]{1,57}", port in 1..=u16::MAX) {
            let host = format!("{port}-{id}.cube.app");
            prop_assert_eq!(target(&headers(&[("host", &host)]), None), Ok(Some(to(&id, port))));
        }

        #[test]
        fn odd_headers_never_panic(host: Vec<u8>, id: Vec<u8>, port: Vec<u8>) {
            let mut headers = HeaderMap::new();
            for (name, bytes) in [("host", host), ("e2b-sandbox-id", id), ("e2b-sandbox-port", port)] {
                if let Ok(value) = HeaderValue::from_bytes(&bytes) {
                    headers.insert(name, value);
                }
            }
            if let Ok(Some(found)) = target(&headers, None) {
                prop_assert!(is_sandbox_id(&found.sandbox_id) && found.port != 0);
            }
        }
    }
}
