//! The cluster token: a secret that every tier of one deployment shares, sent with every call, so that another
//! user of the machine who can reach a loopback port cannot drive the tiers behind the REST API.

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Metadata key that carries the token.
const KEY: &str = "x-snapyard-cluster-token";

/// A deployment's shared secret. Never printed.
#[derive(Clone)]
pub struct ClusterToken(MetadataValue<Ascii>);

impl std::fmt::Debug for ClusterToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterToken(..)")
    }
}

impl ClusterToken {
    /// A token from printable ASCII; `None` when `text` is empty or cannot be sent in a header.
    pub fn new(text: &str) -> Option<Self> {
        let value = MetadataValue::try_from(text).ok()?;
        (!text.is_empty()).then_some(Self(value))
    }

    /// The token's text, for the one place that is not gRPC: the guest gateway's handshake.
    pub fn expose(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    /// Whether `presented` is this token, in time that does not depend on where they differ.
    pub fn matches(&self, presented: &[u8]) -> bool {
        let own = self.0.as_encoded_bytes();
        own.len() == presented.len() && own.iter().zip(presented).fold(0, |acc, (a, b)| acc | (a ^ b)) == 0
    }

    /// Client side: adds the token to every call.
    pub fn attach(&self) -> AttachToken {
        AttachToken(self.clone())
    }

    /// Server side: refuses calls without the token (`UNAUTHENTICATED`).
    pub fn require(&self) -> RequireToken {
        RequireToken(self.clone())
    }
}

/// Interceptor of a client; see [`ClusterToken::attach`].
#[derive(Clone, Debug)]
pub struct AttachToken(ClusterToken);

impl Interceptor for AttachToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(KEY, self.0.0.clone());
        Ok(request)
    }
}

/// Interceptor of a server; see [`ClusterToken::require`].
#[derive(Clone, Debug)]
pub struct RequireToken(ClusterToken);

impl Interceptor for RequireToken {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        match request.metadata().get(KEY) {
            Some(value) if self.0.matches(value.as_encoded_bytes()) => Ok(request),
            _ => Err(Status::unauthenticated("the cluster token is missing or wrong")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_token_passes() {
        let token = ClusterToken::new("s3cret").expect("ascii");
        let mut require = token.require();
        let sent = token.attach().call(Request::new(())).expect("client side");
        assert!(require.call(sent).is_ok());
        assert!(require.call(Request::new(())).is_err());
        let other = ClusterToken::new("s3creT").expect("ascii").attach().call(Request::new(())).expect("client side");
        assert!(require.call(other).is_err());
    }
}
