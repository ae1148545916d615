//! Listings: newest first, in pages.
//!
//! A page ends at an object (its time and id), and the next begins after it in the same order. So a walk sees every object
//! that was there from its beginning to its end exactly once, whatever is made or removed meanwhile: what is newer than the
//! walk's beginning lies before it. The token holds that place and nothing else, and means nothing to clients.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use crate::ids::{InvalidId, SandboxId, SnapshotId, TeamId};

use super::error::CatalogError;
use super::kv::{Key, KeyRange, Order};
use super::names::NameFilter;
use super::wire::Row;
use super::{Catalog, SandboxRow, SandboxState, SnapshotRow, keys, wire};

/// The most objects on a page, and how many there are when nothing is said.
pub const MAX_PAGE: usize = 100;

/// Index entries looked at in one read.
const BATCH: usize = MAX_PAGE + 1;

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The objects, newest first.
    pub items: Vec<T>,
    /// What asks for the next page; none on the last.
    pub next: Option<String>,
}

/// What a listing of snapshots is narrowed to.
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    /// Only those taken of this sandbox.
    pub sandbox_id: Option<String>,
    /// Only those with this name: `short` (every tag) or `short:tag`.
    pub name: Option<String>,
}

/// What a listing of sandboxes is narrowed to.
#[derive(Debug, Clone, Default)]
pub struct SandboxFilter {
    /// Every pair must be among the sandbox's metadata.
    pub metadata: BTreeMap<String, String>,
    /// One of these; none said: those that run or are paused, or are on the way from one to the other.
    pub states: Vec<SandboxState>,
}

/// The place after which a page begins.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    time: String,
    id: String,
}

impl Place {
    fn parse<I: FromStr<Err = InvalidId> + Display>(token: &str) -> Result<Self, CatalogError> {
        let invalid = || CatalogError::invalid("page token", "not one that a listing gave out");
        let (time, id) = token.split_once('_').ok_or_else(invalid)?;
        let is_time = time.len() == 16 && time.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let id: I = id.parse().map_err(|_| invalid())?;
        if is_time { Ok(Self { time: time.to_owned(), id: id.to_string() }) } else { Err(invalid()) }
    }

    fn token(time_unix_ms: i64, id: &impl Display) -> String {
        format!("{}_{id}", keys::time(time_unix_ms))
    }
}

fn page_size(limit: u32) -> Result<usize, CatalogError> {
    match usize::try_from(limit) {
        Ok(0) => Ok(MAX_PAGE),
        Ok(limit) if limit <= MAX_PAGE => Ok(limit),
        _ => Err(CatalogError::invalid("limit", format!("must be 1 to {MAX_PAGE}, not {limit}"))),
    }
}

/// A row that is listed by a time.
trait Listed: Row {
    type Id: FromStr<Err = InvalidId> + Display;
    fn key(id: &Self::Id) -> Key;
    fn id(&self) -> &Self::Id;
    fn time_unix_ms(&self) -> i64;
}

impl Listed for SnapshotRow {
    type Id = SnapshotId;
    fn key(id: &SnapshotId) -> Key {
        keys::snapshot(id)
    }
    fn id(&self) -> &SnapshotId {
        &self.id
    }
    fn time_unix_ms(&self) -> i64 {
        self.created_unix_ms
    }
}

impl Listed for SandboxRow {
    type Id = SandboxId;
    fn key(id: &SandboxId) -> Key {
        keys::sandbox(id)
    }
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn time_unix_ms(&self) -> i64 {
        self.started_unix_ms
    }
}

impl Catalog {
    /// A page of the team's snapshots that it can see. `limit`: 1 to 100, 0 = 100. A filter that nothing can match (a text
    /// that is no name, another team's, an unknown sandbox) finds nothing.
    pub async fn list_snapshots(
        &self,
        team: &TeamId,
        filter: &SnapshotFilter,
        limit: u32,
        token: Option<&str>,
    ) -> Result<Page<SnapshotRow>, CatalogError> {
        let limit = page_size(limit)?;
        let after = token.map(Place::parse::<SnapshotId>).transpose()?;
        let now = self.now();
        let sandbox = match filter.sandbox_id.as_deref().map(SandboxId::from_str) {
            None => None,
            Some(Ok(id)) => Some(id),
            Some(Err(_)) => return Ok(Page { items: Vec::new(), next: None }),
        };
        let wanted = |row: &SnapshotRow| {
            row.team == *team
                && row.is_visible(now)
                && sandbox.as_ref().is_none_or(|sandbox| row.sandbox_id.as_ref() == Some(sandbox))
        };
        if let Some(text) = &filter.name {
            let name = match self.team(team).await {
                Ok(own) => NameFilter::parse(text, own.name.as_ref()).ok(),
                Err(CatalogError::NotFound { .. }) => None,
                Err(error) => return Err(error),
            };
            let rows = match name {
                Some(name) => self.named(team, &name).await?,
                None => Vec::new(),
            };
            return Ok(page_of(rows.into_iter().filter(wanted).collect(), after, limit));
        }
        let index = match &sandbox {
            Some(sandbox) => keys::taken(sandbox),
            None => keys::listing(team),
        };
        self.walk(&index, after, limit, wanted).await
    }

    /// A page of the team's sandboxes. `limit`: 1 to 100, 0 = 100.
    pub async fn list_sandboxes(
        &self,
        team: &TeamId,
        filter: &SandboxFilter,
        limit: u32,
        token: Option<&str>,
    ) -> Result<Page<SandboxRow>, CatalogError> {
        use SandboxState::{Paused, Pausing, Resuming, Running, Snapshotting};
        let limit = page_size(limit)?;
        let after = token.map(Place::parse::<SandboxId>).transpose()?;
        let states = match filter.states.as_slice() {
            [] => &[Running, Snapshotting, Pausing, Paused, Resuming],
            states => states,
        };
        let wanted = |row: &SandboxRow| {
            states.contains(&row.state)
                && filter.metadata.iter().all(|(key, value)| row.metadata.get(key) == Some(value))
        };
        self.walk(&keys::sandboxes(team), after, limit, wanted).await
    }

    /// The snapshots that hold a name which the filter means, in no order.
    async fn named(&self, team: &TeamId, filter: &NameFilter) -> Result<Vec<SnapshotRow>, CatalogError> {
        let entries = match filter {
            NameFilter::Short(short) => self.scan(keys::under(&keys::tags(team, short))).await?,
            NameFilter::Exact(name) => self.kv.get(keys::name(team, name)).await?.into_iter().collect(),
        };
        let mut rows = Vec::new();
        for batch in entries.chunks(BATCH) {
            let ids = batch.iter().map(wire::decode_id::<SnapshotId>).collect::<Result<Vec<_>, _>>()?;
            for entry in self.kv.get_many(ids.iter().map(keys::snapshot).collect()).await?.into_iter().flatten() {
                rows.push(wire::decode(&entry)?);
            }
        }
        Ok(rows)
    }

    /// A page of the rows that an index by time leads to.
    async fn walk<R: Listed>(
        &self,
        index: &str,
        after: Option<Place>,
        limit: usize,
        wanted: impl Fn(&R) -> bool,
    ) -> Result<Page<R>, CatalogError> {
        let KeyRange { start, mut end } = keys::under(index);
        if let Some(place) = after {
            end = format!("{index}{}/{}", place.time, place.id).into_bytes();
        }
        let mut items = Vec::new();
        loop {
            let range = KeyRange { start: start.clone(), end };
            let entries = self.kv.range(range, BATCH, Order::Descending).await?;
            let ids = entries.iter().map(|entry| wire::id_of_key(&entry.key)).collect::<Result<Vec<R::Id>, _>>()?;
            // A row that went between the two reads is simply not there any more.
            for entry in self.kv.get_many(ids.iter().map(R::key).collect()).await?.into_iter().flatten() {
                let row: R = wire::decode(&entry)?;
                if wanted(&row) {
                    items.push(row);
                    if items.len() > limit {
                        return Ok(cut(items, limit));
                    }
                }
            }
            match entries.last().filter(|_| entries.len() == BATCH) {
                Some(last) => end = last.key.clone(),
                None => return Ok(Page { items, next: None }),
            }
        }
    }
}

/// A page of rows that are all at hand.
fn page_of<R: Listed>(mut rows: Vec<R>, after: Option<Place>, limit: usize) -> Page<R> {
    let place = |row: &R| Place { time: keys::time(row.time_unix_ms()), id: row.id().to_string() };
    rows.sort_by_cached_key(|row| Reverse(place(row)));
    if let Some(after) = after {
        rows.retain(|row| place(row) < after);
    }
    cut(rows, limit)
}

/// The first `limit` rows, and a token if there are more.
fn cut<R: Listed>(mut items: Vec<R>, limit: usize) -> Page<R> {
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|last| Place::token(last.time_unix_ms(), last.id()));
    Page { items, next }
}
