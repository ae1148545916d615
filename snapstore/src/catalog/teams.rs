//! Teams: owners, and dedup domains.
//!
//! A team's key decides the ids of all its chunks, so it is made once, in the transaction that makes the team, and never
//! changes. Two nodes that see a new team at once agree on the key of whoever was first.

use crate::ids::{DomainKey, TeamId};

use super::error::CatalogError;
use super::names::{SnapshotName, TeamName};
use super::{Catalog, Draft, Team, keys, until_settled};

impl Catalog {
    /// The team, made with a fresh key if it is new. Its name is its id, when that can be one.
    pub async fn ensure_team(&self, id: &TeamId) -> Result<Team, CatalogError> {
        until_settled!(format_args!("team {id}"), {
            if let Some((team, _)) = self.row::<Team>(keys::team(id)).await? {
                break Ok(team);
            }
            let name = TeamName::parse(id.as_str()).ok().filter(|name| name.as_str() == id.as_str());
            let team = Team {
                id: id.clone(),
                name,
                dedup_key: DomainKey(crate::random::bytes()),
                created_unix_ms: self.now(),
            };
            let mut draft = Draft::default();
            draft.require_absent(keys::team(id));
            draft.put_row(keys::team(id), &team)?;
            if self.send(draft).await? {
                break Ok(team);
            }
        })
    }

    /// The team, if it was ever made.
    pub async fn team(&self, id: &TeamId) -> Result<Team, CatalogError> {
        let found = self.row::<Team>(keys::team(id)).await?;
        found.map(|(team, _)| team).ok_or_else(|| CatalogError::not_found("team", id))
    }

    /// Reads the name that a client gives a new snapshot (`short[:tag]`, or with the own team in front) and makes sure
    /// that it is free at this moment. The commit decides; this is to refuse before anything is done to the sandbox.
    pub async fn check_name(&self, team: &TeamId, text: &str) -> Result<SnapshotName, CatalogError> {
        let name = SnapshotName::parse_own(text, self.team(team).await?.name.as_ref())?;
        match self.name_holder(team, &name).await? {
            Some((holder, _)) if holder.is_usable(self.now()) => {
                Err(CatalogError::NameTaken { name: name.to_string(), holder: holder.id })
            }
            _ => Ok(name),
        }
    }
}
