//! What a text means that names the source of a create, or the object of a delete.
//!
//! ```text
//!   has a slash   team/short[:tag]: a snapshot's full name, nothing else (not found: never a template of that name)
//!                 any other shape: invalid
//!   a UUID        a snapshot's id; if there is none, a template's name
//!   else          a template's id or alias
//! ```
//!
//! What belongs to another team does not exist.

use crate::ids::{SnapshotId, TeamId, TemplateId};

use super::error::CatalogError;
use super::names::Reference;
use super::{Catalog, Shape, SnapshotRow, TemplateRow};

/// What a create starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The snapshot to restore.
    pub snapshot_id: SnapshotId,
    /// The template's id, or the snapshot's when a snapshot was named.
    pub template_id: String,
    /// The template's alias; empty when there is none.
    pub alias: String,
    /// A snapshot was named: the restrictions on creates from snapshots apply.
    pub is_snapshot: bool,
    /// The hardware.
    pub shape: Shape,
}

/// What a delete removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deleted {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A template.
    Template(TemplateId),
}

fn from_snapshot(row: &SnapshotRow) -> Resolved {
    Resolved {
        snapshot_id: row.id,
        template_id: row.id.to_string(),
        alias: String::new(),
        is_snapshot: true,
        shape: row.shape,
    }
}

fn from_template(row: TemplateRow) -> Result<Resolved, CatalogError> {
    let Some(snapshot_id) = row.snapshot_id else {
        return Err(CatalogError::TemplateNotReady { id: row.id, status: row.build_status });
    };
    let alias = row.alias.unwrap_or_default();
    Ok(Resolved { snapshot_id, template_id: row.id.to_string(), alias, is_snapshot: false, shape: row.shape })
}

fn found<T>(outcome: Result<T, CatalogError>) -> Result<Option<T>, CatalogError> {
    match outcome {
        Ok(object) => Ok(Some(object)),
        Err(CatalogError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Catalog {
    /// Finds what a create starts from.
    pub async fn resolve(&self, team: &TeamId, reference: &str) -> Result<Resolved, CatalogError> {
        match Reference::parse(reference)? {
            Reference::Name(_) => Ok(from_snapshot(&self.get_snapshot(team, reference).await?)),
            Reference::Uuid(_, text) => match found(self.get_snapshot(team, &text).await)? {
                Some(row) => Ok(from_snapshot(&row)),
                None => self.resolve_template(team, &text).await,
            },
            Reference::Template(text) => self.resolve_template(team, &text).await,
        }
    }

    async fn resolve_template(&self, team: &TeamId, text: &str) -> Result<Resolved, CatalogError> {
        match found(self.get_template(team, text).await)? {
            Some(row) => from_template(row),
            None => Err(CatalogError::not_found("snapshot or template", text)),
        }
    }

    /// Deletes the snapshot or template that the text means. A snapshot that a sandbox occupies stays, and is the error.
    pub async fn delete(&self, team: &TeamId, reference: &str) -> Result<Deleted, CatalogError> {
        match Reference::parse(reference)? {
            Reference::Name(_) => self.delete_snapshot(team, reference).await.map(Deleted::Snapshot),
            Reference::Uuid(_, text) => match found(self.delete_snapshot(team, &text).await)? {
                Some(id) => Ok(Deleted::Snapshot(id)),
                None => self.delete_any_template(team, &text).await,
            },
            Reference::Template(text) => self.delete_any_template(team, &text).await,
        }
    }

    async fn delete_any_template(&self, team: &TeamId, text: &str) -> Result<Deleted, CatalogError> {
        match found(self.delete_template(team, text).await)? {
            Some(row) => Ok(Deleted::Template(row.id)),
            None => Err(CatalogError::not_found("snapshot or template", text)),
        }
    }
}
