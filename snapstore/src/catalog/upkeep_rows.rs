//! Rows of the catalog's upkeep: leases, marks of objects without a row, the deployment's id. Values and their bytes.

use prost::Message;

use super::wire::Row;

/// Who holds a lease: random, so that no two holders are ever mistaken for one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseHolder(pub [u8; 16]);

impl LeaseHolder {
    /// A fresh one.
    pub fn random() -> Self {
        Self(crate::random::bytes())
    }
}

impl std::fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for LeaseHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LeaseHolder({self})")
    }
}

/// A lease: something that one process may do until a time, or that it is alive until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeaseRow {
    pub(super) holder: LeaseHolder,
    pub(super) expires_unix_ms: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseWire {
    #[prost(bytes = "vec", tag = "1")]
    holder: Vec<u8>,
    #[prost(int64, tag = "2")]
    expires_unix_ms: i64,
}

impl Row for LeaseRow {
    const KIND: u8 = 7;
    type Wire = LeaseWire;
}

impl From<&LeaseRow> for LeaseWire {
    fn from(row: &LeaseRow) -> Self {
        Self { holder: row.holder.0.to_vec(), expires_unix_ms: row.expires_unix_ms }
    }
}

impl TryFrom<LeaseWire> for LeaseRow {
    type Error = String;

    fn try_from(wire: LeaseWire) -> Result<Self, String> {
        let holder = wire.holder.try_into().map_err(|_| "its holder is not 16 bytes")?;
        Ok(Self { holder: LeaseHolder(holder), expires_unix_ms: wire.expires_unix_ms })
    }
}

/// An object whose row does not exist, as a sweep first saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OrphanRow {
    pub(super) first_seen_unix_ms: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct OrphanWire {
    #[prost(int64, tag = "1")]
    first_seen_unix_ms: i64,
}

impl Row for OrphanRow {
    const KIND: u8 = 8;
    type Wire = OrphanWire;
}

impl From<&OrphanRow> for OrphanWire {
    fn from(row: &OrphanRow) -> Self {
        Self { first_seen_unix_ms: row.first_seen_unix_ms }
    }
}

impl TryFrom<OrphanWire> for OrphanRow {
    type Error = String;

    fn try_from(wire: OrphanWire) -> Result<Self, String> {
        Ok(Self { first_seen_unix_ms: wire.first_seen_unix_ms })
    }
}

/// The catalog's own identity: whoever has another one has other snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeploymentRow {
    pub(super) id: [u8; 16],
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeploymentWire {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
}

impl Row for DeploymentRow {
    const KIND: u8 = 9;
    type Wire = DeploymentWire;
}

impl From<&DeploymentRow> for DeploymentWire {
    fn from(row: &DeploymentRow) -> Self {
        Self { id: row.id.to_vec() }
    }
}

impl TryFrom<DeploymentWire> for DeploymentRow {
    type Error = String;

    fn try_from(wire: DeploymentWire) -> Result<Self, String> {
        Ok(Self { id: wire.id.try_into().map_err(|_| "its id is not 16 bytes")? })
    }
}
