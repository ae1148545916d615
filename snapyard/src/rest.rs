//! Client of the REST API and of the proxy into sandboxes, over plaintext HTTP/1.1.
//!
//! A call that gets no answer has perhaps happened: nothing is repeated here, and the message says so.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use crate::failure::{Failure, Kind, with_causes};

/// Used when neither flag, environment nor `cluster.json` says where the server is.
pub const DEFAULT_URL: &str = "http://127.0.0.1:3000";
/// A server on loopback accepts at once or is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longer than any operation of a healthy server.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest answer of the control plane.
const MAX_ANSWER: usize = 16 << 20;
/// Port of the agent in every guest.
const AGENT_PORT: &str = "49983";

/// A successful answer.
#[derive(Debug)]
pub struct Answer {
    /// E.g. `Server-Timing`.
    pub headers: HeaderMap,
    /// `Null` when there was none.
    pub body: Value,
}

/// One server's REST API.
#[derive(Debug, Clone)]
pub struct Api {
    http: Client<HttpConnector, Full<Bytes>>,
    base: String,
}

impl Api {
    /// A client for the server at `url`; connects on the first call.
    pub fn new(url: &str) -> Result<Self, Failure> {
        let base = url.trim_end_matches('/');
        let wrong = |why: &str| {
            Failure::new(Kind::Refused, format!("`{url}` is no server's address: {why}"))
                .hint(format!("say for example {DEFAULT_URL} in --url or SNAPYARD_URL"))
        };
        let uri: Uri = base.parse().map_err(|_| wrong("not a URL"))?;
        if uri.scheme_str() != Some("http") || uri.authority().is_none() {
            return Err(wrong("it must begin with http://"));
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { http, base: base.to_owned() })
    }

    /// The server's address, without a slash at its end.
    #[cfg(test)]
    pub fn url(&self) -> &str {
        &self.base
    }

    /// One call of the control plane. `path` begins with a slash and is encoded already.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Answer, Failure> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        let payload = match body {
            Some(body) => {
                request = request.header("content-type", "application/json");
                Bytes::from(body.to_string())
            }
            None => Bytes::new(),
        };
        let request = request
            .body(Full::new(payload))
            .map_err(|error| Failure::new(Kind::Refused, format!("{path} makes no request: {error}")))?;
        match tokio::time::timeout(CALL_TIMEOUT, self.answer(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::new(
                Kind::Unreachable,
                format!("no answer from {} within {} s", self.base, CALL_TIMEOUT.as_secs()),
            )
            .hint("it may have happened all the same: look with `snapyard sandbox ls` or `snapyard snapshot ls`")),
        }
    }

    async fn answer(&self, request: Request<Full<Bytes>>) -> Result<Answer, Failure> {
        let (head, body) = self.send(request).await?.into_parts();
        let bytes = collect(body).await?;
        if !head.status.is_success() {
            return Err(refusal(head.status.as_u16(), &bytes));
        }
        let body = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes).map_err(|error| {
                Failure::new(Kind::Refused, format!("{} answered something that is not JSON: {error}", self.base))
            })?
        };
        Ok(Answer { headers: head.headers, body })
    }

    /// A request to the agent of a sandbox, through the proxy. Answers as soon as the head of the answer is there;
    /// a refusal is a [`Failure`].
    pub async fn agent(
        &self,
        sandbox: &str,
        path: &str,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}{path}", self.base))
            .header("e2b-sandbox-id", sandbox)
            .header("e2b-sandbox-port", AGENT_PORT)
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Failure::new(Kind::Refused, format!("`{sandbox}` makes no request: {error}")))?;
        request.headers_mut().extend(headers);
        let response = self.send(request).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let bytes = collect(response.into_body()).await?;
        Err(refusal(status, &bytes))
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failure> {
        self.http.request(request).await.map_err(|error| {
            let failure =
                Failure::new(Kind::Unreachable, format!("cannot talk to {}: {}", self.base, with_causes(&error)));
            if error.is_connect() {
                failure.hint("is `snapyard up` running, and is this its address? (--url, SNAPYARD_URL)")
            } else {
                failure
            }
        })
    }
}

/// The whole body, at most [`MAX_ANSWER`] bytes of it.
async fn collect(body: Incoming) -> Result<Bytes, Failure> {
    match Limited::new(body, MAX_ANSWER).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => Err(Failure::new(Kind::Unreachable, format!("the answer broke off: {error}"))),
    }
}

/// What a refusal says: `{"code","message"}` of the API and of the agent alike, or else its text.
fn refusal(status: u16, body: &[u8]) -> Failure {
    let message = serde_json::from_slice::<Value>(body)
        .ok()
        .and_then(|json| json.get("message").and_then(Value::as_str).map(str::to_owned))
        .unwrap_or_else(|| format!("HTTP status {status}: {}", String::from_utf8_lossy(body).trim()));
    // The proxy's word for a sandbox that is not there (its status is the SDKs' and says nothing).
    let status = if status == 502 && message.contains("was not found") { 404 } else { status };
    Failure::from_http(status, message)
}

/// One segment of a path: everything but RFC 3986's unreserved characters is percent-encoded, so that a full name
/// (`team/short:tag`) or whatever a person typed stays one segment.
pub fn segment(text: &str) -> String {
    use std::fmt::Write as _;
    let mut encoded = String::with_capacity(text.len());
    for &byte in text.as_bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").expect("writing to a String cannot fail");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_one_segment() {
        assert_eq!(segment("default/short:v1.2"), "default%2Fshort%3Av1.2");
        assert_eq!(segment("a b?ü"), "a%20b%3F%C3%BC");
    }

    #[test]
    fn only_plain_http_addresses_are_taken() {
        assert_eq!(Api::new("http://127.0.0.1:1/").expect("an address").url(), "http://127.0.0.1:1");
        for wrong in ["", "127.0.0.1:3000", "https://x", "http://", "ftp://x"] {
            assert!(Api::new(wrong).is_err(), "{wrong:?} is no address");
        }
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        let failure = refusal(409, br#"{"code":409,"message":"name taken"}"#);
        assert_eq!((failure.kind, failure.to_string().as_str()), (Kind::Conflict, "name taken"));
        let gone = refusal(502, br#"{"code":502,"message":"sandbox x was not found"}"#);
        assert_eq!(gone.kind, Kind::NotFound);
        assert_eq!(refusal(500, b"oops\n").to_string(), "HTTP status 500: oops");
    }

    #[tokio::test]
    async fn no_server_is_said_with_what_to_do() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let failure =
            Api::new(&url).expect("an address").call(Method::GET, "/health", None).await.expect_err("nobody there");
        assert_eq!(failure.kind, Kind::Unreachable);
        assert!(failure.to_string().contains("snapyard up"), "{failure}");
    }
}
