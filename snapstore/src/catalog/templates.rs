//! Templates, and the snapshots inside them.
//!
//! ```text
//!   create ─▶ building ─┬─ complete (with a snapshot) ─▶ ready ─▶ … rebuilt: complete again, the old snapshot condemned
//!                       └─ update: error
//!   delete: row and alias gone, its snapshot condemned; that goes when the last sandbox restored from it has
//! ```
//!
//! A template's snapshot is a snapshot like any other but for its `internal` flag: not listed, without a name, never
//! expiring by itself. Snapshots taken of the template's sandboxes have their own rows, manifests and packs, so deleting the
//! template leaves them alone.

use crate::ids::{SnapshotId, TeamId, TemplateId};

use super::error::CatalogError;
use super::kv::{Entry, Order};
use super::snapshots::SnapshotCommit;
use super::{BuildStatus, Catalog, Draft, TemplateRow, keys, until_settled, wire};

/// The most characters of an alias.
const MAX_ALIAS_LEN: usize = 128;

/// Templates read at a time when all are listed.
const BATCH: usize = 100;

fn check_alias(alias: &str) -> Result<(), CatalogError> {
    let fits = (1..=MAX_ALIAS_LEN).contains(&alias.len())
        && alias.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-' | b'.'))
        && !alias.starts_with("tpl-");
    if fits {
        return Ok(());
    }
    let shown: String = alias.chars().take(80).collect();
    let expected = format!("expected 1 to {MAX_ALIAS_LEN} of a-z, 0-9, '_', '-' and '.', not beginning with tpl-");
    Err(CatalogError::invalid("alias", format!("{shown:?} is not a template's name: {expected}")))
}

impl Catalog {
    /// Makes a template exist, without a snapshot as yet. Its id and alias must be free.
    pub async fn create_template(&self, row: &TemplateRow) -> Result<(), CatalogError> {
        if row.snapshot_id.is_some() || row.build_status == BuildStatus::Ready {
            return Err(CatalogError::invalid("template", "gets its snapshot when its build is complete"));
        }
        until_settled!(format_args!("creating template {}", row.id), {
            let mut draft = Draft::default();
            if let Some(alias) = &row.alias {
                check_alias(alias)?;
                let key = keys::alias(&row.team, alias);
                if let Some(entry) = self.kv.get(key.clone()).await? {
                    return Err(CatalogError::AliasTaken { alias: alias.clone(), holder: wire::decode_id(&entry)? });
                }
                draft.require_absent(key.clone());
                draft.put(key, row.id.to_string());
            }
            let key = keys::template(&row.id);
            if self.kv.get(key.clone()).await?.is_some() {
                return Err(CatalogError::AliasTaken { alias: row.id.to_string(), holder: row.id.clone() });
            }
            draft.require_absent(key.clone());
            draft.put_row(key, row)?;
            draft.mark(keys::timed(&keys::templates(&row.team), row.created_unix_ms, &row.id));
            if self.send(draft).await? {
                break Ok(());
            }
        })
    }

    async fn template_entry(&self, team: &TeamId, reference: &str) -> Result<(TemplateRow, Entry), CatalogError> {
        let text = reference.trim();
        let id = match text.parse::<TemplateId>() {
            Ok(id) => Some(id),
            Err(_) if check_alias(text).is_ok() => {
                let entry = self.kv.get(keys::alias(team, text)).await?;
                entry.as_ref().map(wire::decode_id).transpose()?
            }
            Err(_) => None,
        };
        let found = match id {
            Some(id) => self.row::<TemplateRow>(keys::template(&id)).await?,
            None => None,
        };
        found.filter(|(row, _)| row.team == *team).ok_or_else(|| CatalogError::not_found("template", reference))
    }

    /// The team's template, by id or alias.
    pub async fn get_template(&self, team: &TeamId, reference: &str) -> Result<TemplateRow, CatalogError> {
        self.template_entry(team, reference).await.map(|(row, _)| row)
    }

    /// All of the team's templates, newest first.
    pub async fn list_templates(&self, team: &TeamId) -> Result<Vec<TemplateRow>, CatalogError> {
        let mut rows = Vec::new();
        let mut range = keys::under(&keys::templates(team));
        loop {
            let entries = self.kv.range(range.clone(), BATCH, Order::Descending).await?;
            let ids =
                entries.iter().map(|entry| wire::id_of_key(&entry.key)).collect::<Result<Vec<TemplateId>, _>>()?;
            for entry in self.kv.get_many(ids.iter().map(keys::template).collect()).await?.into_iter().flatten() {
                rows.push(wire::decode(&entry)?);
            }
            match entries.last().filter(|_| entries.len() == BATCH) {
                Some(last) => range.end = last.key.clone(),
                None => return Ok(rows),
            }
        }
    }

    /// Says how a build goes. A template that has a snapshot keeps it, whatever becomes of a rebuild.
    pub async fn set_build_status(
        &self,
        team: &TeamId,
        id: &TemplateId,
        status: BuildStatus,
        message: &str,
    ) -> Result<TemplateRow, CatalogError> {
        until_settled!(format_args!("the build status of template {id}"), {
            let (mut row, entry) = self.template_entry(team, id.as_str()).await?;
            if status == BuildStatus::Ready && row.snapshot_id.is_none() {
                return Err(CatalogError::invalid("build status", "a template without a snapshot is not ready"));
            }
            row.build_status = status;
            message.clone_into(&mut row.build_message);
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if self.send(draft).await? {
                break Ok(row);
            }
        })
    }

    /// Commits the snapshot that a build made and makes the template ready with it, in one transaction. `commit.row` must
    /// be internal. A snapshot that the template had before is condemned.
    pub async fn complete_template(
        &self,
        team: &TeamId,
        id: &TemplateId,
        commit: &SnapshotCommit,
    ) -> Result<TemplateRow, CatalogError> {
        let snapshot = &commit.row;
        if !snapshot.internal || snapshot.condemned || snapshot.name.is_some() || snapshot.team != *team {
            return Err(CatalogError::invalid(
                "snapshot",
                "must be internal, without a name, and of the template's team",
            ));
        }
        let (row, old) = until_settled!(format_args!("completing template {id}"), {
            let (mut row, entry) = self.template_entry(team, id.as_str()).await?;
            if row.snapshot_id == Some(snapshot.id) {
                break (row, None);
            }
            let mut draft = Draft::default();
            if self.draft_commit(&mut draft, commit).await?.is_some() {
                return Err(CatalogError::invalid(
                    "snapshot id",
                    format!("{} exists and is not the template's", snapshot.id),
                ));
            }
            let old = row.snapshot_id.replace(snapshot.id);
            row.shape = snapshot.shape;
            row.build_status = BuildStatus::Ready;
            row.build_message.clear();
            draft.require_unchanged(&entry);
            draft.put_row(entry.key, &row)?;
            if let Some(old) = &old {
                self.draft_condemnation(&mut draft, old).await?;
            }
            if self.send(draft).await? {
                break (row, old);
            }
        });
        self.collect(old.as_ref()).await?;
        Ok(row)
    }

    /// Deletes the team's template, by id or alias. Sandboxes of it run on, snapshots of those stay.
    pub async fn delete_template(&self, team: &TeamId, reference: &str) -> Result<TemplateRow, CatalogError> {
        let row = until_settled!(format_args!("deleting template {reference}"), {
            let (row, entry) = self.template_entry(team, reference).await?;
            let mut draft = Draft::default();
            draft.require_unchanged(&entry);
            draft.delete(entry.key);
            draft.delete(keys::timed(&keys::templates(team), row.created_unix_ms, &row.id));
            if let Some(alias) = &row.alias {
                draft.delete(keys::alias(team, alias));
            }
            if let Some(snapshot) = &row.snapshot_id {
                self.draft_condemnation(&mut draft, snapshot).await?;
            }
            if self.send(draft).await? {
                break row;
            }
        });
        self.collect(row.snapshot_id.as_ref()).await?;
        Ok(row)
    }

    async fn collect(&self, snapshot: Option<&SnapshotId>) -> Result<(), CatalogError> {
        match snapshot {
            Some(id) => self.collect_condemned(id).await.map(drop),
            None => Ok(()),
        }
    }
}
