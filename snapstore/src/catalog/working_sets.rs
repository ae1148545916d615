//! What restores of a snapshot touched first, so that later ones can read ahead of their faults.
//!
//! Hints: a recording that is lost or wrong makes a restore slower, never wrong. A few are kept for each snapshot and go
//! with it. Two nodes that record at the same time are both heard, up to the number kept.

use prost::Message;

use crate::ids::SnapshotId;

use super::error::CatalogError;
use super::wire::{self, Row};
use super::{Catalog, Draft, SnapshotRow, keys, until_settled};

/// Recordings kept for one snapshot: the sets of two restores are nearly the same, so a few say it all.
pub const RECORDINGS: usize = 3;

/// Chunks of a recording, memory and disk together, at most: 64 KiB apart, 1 GiB of guest.
const MAX_CHUNKS: usize = 16 << 10;

/// What one restore touched first: chunk numbers of each image, each once, in the order of the first touch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recording {
    /// Of the memory image.
    pub memory: Vec<u64>,
    /// Of the disk image.
    pub disk: Vec<u64>,
}

/// All recordings of one snapshot, the first one first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct WorkingSetRow {
    recordings: Vec<Recording>,
}

#[derive(Clone, PartialEq, Message)]
struct RecordingWire {
    #[prost(uint64, repeated, tag = "1")]
    memory: Vec<u64>,
    #[prost(uint64, repeated, tag = "2")]
    disk: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct WorkingSetWire {
    #[prost(message, repeated, tag = "1")]
    recordings: Vec<RecordingWire>,
}

impl Row for WorkingSetRow {
    const KIND: u8 = 10;
    type Wire = WorkingSetWire;
}

impl From<&WorkingSetRow> for WorkingSetWire {
    fn from(row: &WorkingSetRow) -> Self {
        let wire =
            |recording: &Recording| RecordingWire { memory: recording.memory.clone(), disk: recording.disk.clone() };
        Self { recordings: row.recordings.iter().map(wire).collect() }
    }
}

impl TryFrom<WorkingSetWire> for WorkingSetRow {
    type Error = String;

    fn try_from(wire: WorkingSetWire) -> Result<Self, String> {
        let recording = |RecordingWire { memory, disk }| Recording { memory, disk };
        Ok(Self { recordings: wire.recordings.into_iter().map(recording).collect() })
    }
}

impl Catalog {
    /// The recordings of a snapshot, if there are any.
    pub async fn recordings(&self, id: &SnapshotId) -> Result<Vec<Recording>, CatalogError> {
        let found = self.row::<WorkingSetRow>(keys::working_set(id)).await?;
        Ok(found.map(|(row, _)| row.recordings).unwrap_or_default())
    }

    /// Adds a recording, unless the snapshot has as many as are kept. Returns how many it has then. What is beyond the most
    /// of one recording is cut off: it was touched last.
    pub async fn add_recording(&self, id: &SnapshotId, mut recording: Recording) -> Result<usize, CatalogError> {
        recording.memory.truncate(MAX_CHUNKS);
        recording.disk.truncate(MAX_CHUNKS - recording.memory.len());
        until_settled!(format_args!("the working set of snapshot {id}"), {
            let key = keys::working_set(id);
            let found = self.kv.get_many(vec![keys::snapshot(id), key.clone()]).await?;
            let [Some(snapshot), known] = &found[..] else {
                return Err(CatalogError::not_found("snapshot", id));
            };
            wire::decode::<SnapshotRow>(snapshot)?;
            let mut row = known.as_ref().map(wire::decode::<WorkingSetRow>).transpose()?.unwrap_or_default();
            if row.recordings.len() >= RECORDINGS {
                break Ok(row.recordings.len());
            }
            row.recordings.push(recording.clone());
            let mut draft = Draft::default();
            draft.require_unchanged(snapshot);
            draft.require_as_read(key.clone(), known.as_ref());
            draft.put_row(key, &row)?;
            if self.send(draft).await? {
                break Ok(row.recordings.len());
            }
        })
    }
}
