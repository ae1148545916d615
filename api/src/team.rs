//! Who is calling. The one place where a key becomes a team.

use http::HeaderMap;

use crate::errors::ApiError;

/// A team's name, as the catalog knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Team(String);

impl Team {
    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// For a gRPC message.
    pub(crate) fn to_field(&self) -> String {
        self.0.clone()
    }
}

/// The team of a request. There is one team and no authentication: any key, and none, is the team `default`. Hence
/// the server listens on loopback unless told otherwise.
pub(crate) fn team_of(_headers: &HeaderMap) -> Result<Team, ApiError> {
    Ok(only_team())
}

/// The team that owns every sandbox which the data plane can reach.
pub(crate) fn only_team() -> Team {
    Team("default".into())
}
