//! Where everything lies in the catalog's key space. The only place that spells a key.
//!
//! ```text
//!   team/<team>                                   Team
//!   snapshot/<uuid>                               SnapshotRow
//!   manifest/<uuid>                               the manifest's bytes
//!   working-set/<uuid>                            WorkingSetRow: what restores touched first
//!   name/<team>/<short>/<tag>                     SnapshotId: the one holder of the name
//!   listing/<team>/<time>/<uuid>                  (empty) snapshots that are listed, by creation
//!   taken/<sandbox>/<time>/<uuid>                 (empty) snapshots by their source
//!   expiry/<time>/<uuid>                          (empty) snapshots that expire, by when
//!   upload/<uuid>                                 snapshots not wholly in the object store: who uploads, if not the origin
//!   condemned/<uuid>                              (empty) snapshots to be removed when nothing occupies them
//!   occupancy/<uuid>/<sandbox>                    (empty) who was restored from a snapshot
//!   pack/<pack>                                   PackRow
//!   tombstone/<time>/<pack>                       (empty) packs that are gone, by when
//!   orphan/<uuid>                                 OrphanRow: a manifest object that no snapshot row goes with
//!   lease/<name>                                  LeaseRow
//!   writer/<node>/<holder>                        LeaseRow of a process that writes snapshots
//!   deployment                                    DeploymentRow
//!   sandbox/<sandbox>                             SandboxRow
//!   sandboxes/<team>/<time>/<sandbox>             (empty) by start
//!   node/<node>/<sandbox>                         (empty) by node
//!   template/<template>                           TemplateRow
//!   templates/<team>/<time>/<template>            (empty) by creation
//!   alias/<team>/<alias>                          TemplateId
//!   idempotency/<team>/<hash of the key>          what a request with that key made
//!   idempotent-since/<time>/<team>/<hash>         (empty) the same, by age
//! ```
//!
//! `<time>` is milliseconds since the epoch as 16 hex digits, so that byte order is time order. Ids and names hold no
//! slash (their types see to that); an idempotency key, which may hold anything, is hashed. Sandbox ids are unique over
//! all teams, since host names are made of them.

use crate::ids::{NodeId, PackId, SandboxId, SnapshotId, TeamId, TemplateId};

use super::kv::{Key, KeyRange};
use super::names::SnapshotName;
use super::upkeep_rows::LeaseHolder;

/// Milliseconds since the epoch as sortable text; before the epoch counts as the epoch.
pub(super) fn time(unix_ms: i64) -> String {
    format!("{:016x}", u64::try_from(unix_ms).unwrap_or(0))
}

/// The range of all keys that begin with `prefix`.
pub(super) fn under(prefix: &str) -> KeyRange {
    KeyRange::prefix(prefix.as_bytes())
}

/// The text after the last slash.
pub(super) fn tail(key: &[u8]) -> &[u8] {
    key.rsplit(|b| *b == b'/').next().unwrap_or(key)
}

pub(super) fn team(id: &TeamId) -> Key {
    format!("team/{id}").into_bytes()
}

pub(super) fn snapshot(id: &SnapshotId) -> Key {
    format!("snapshot/{id}").into_bytes()
}

pub(super) const SNAPSHOTS: &str = "snapshot/";

pub(super) fn manifest(id: &SnapshotId) -> Key {
    format!("manifest/{id}").into_bytes()
}

pub(super) fn working_set(id: &SnapshotId) -> Key {
    format!("working-set/{id}").into_bytes()
}

pub(super) fn name(team: &TeamId, name: &SnapshotName) -> Key {
    format!("{}{}", tags(team, name.short()), name.tag()).into_bytes()
}

pub(super) fn tags(team: &TeamId, short: &str) -> String {
    format!("name/{team}/{short}/")
}

pub(super) fn listing(team: &TeamId) -> String {
    format!("listing/{team}/")
}

pub(super) fn taken(sandbox: &SandboxId) -> String {
    format!("taken/{sandbox}/")
}

/// An entry of an index by time.
pub(super) fn timed(index: &str, unix_ms: i64, id: &impl std::fmt::Display) -> Key {
    format!("{index}{}/{id}", time(unix_ms)).into_bytes()
}

pub(super) const EXPIRY: &str = "expiry/";

pub(super) const UPLOADS: &str = "upload/";

pub(super) fn upload(id: &SnapshotId) -> Key {
    format!("{UPLOADS}{id}").into_bytes()
}

pub(super) const CONDEMNED: &str = "condemned/";

pub(super) fn condemned(id: &SnapshotId) -> Key {
    format!("{CONDEMNED}{id}").into_bytes()
}

pub(super) const OCCUPANCIES: &str = "occupancy/";

pub(super) fn occupants(id: &SnapshotId) -> String {
    format!("{OCCUPANCIES}{id}/")
}

pub(super) fn occupancy(id: &SnapshotId, sandbox: &SandboxId) -> Key {
    format!("{}{sandbox}", occupants(id)).into_bytes()
}

pub(super) const PACKS: &str = "pack/";

pub(super) fn pack(id: &PackId) -> Key {
    format!("{PACKS}{id}").into_bytes()
}

pub(super) const TOMBSTONES: &str = "tombstone/";

pub(super) const ORPHANS: &str = "orphan/";

pub(super) fn orphan(id: &SnapshotId) -> Key {
    format!("{ORPHANS}{id}").into_bytes()
}

pub(super) fn lease(name: &str) -> Key {
    format!("lease/{name}").into_bytes()
}

pub(super) const WRITERS: &str = "writer/";

pub(super) fn writers_of(node: &NodeId) -> String {
    format!("{WRITERS}{node}/")
}

pub(super) fn writer(node: &NodeId, holder: &LeaseHolder) -> Key {
    format!("{}{holder}", writers_of(node)).into_bytes()
}

pub(super) const DEPLOYMENT: &str = "deployment";

/// What follows `after` in `range`.
pub(super) fn following(mut range: KeyRange, after: Key) -> KeyRange {
    range.start = after;
    range.start.push(0);
    range
}

pub(super) fn sandbox(id: &SandboxId) -> Key {
    format!("sandbox/{id}").into_bytes()
}

pub(super) fn sandboxes(team: &TeamId) -> String {
    format!("sandboxes/{team}/")
}

pub(super) fn of_node(node: &NodeId) -> String {
    format!("node/{node}/")
}

pub(super) fn on_node(node: &NodeId, sandbox: &SandboxId) -> Key {
    format!("{}{sandbox}", of_node(node)).into_bytes()
}

pub(super) fn template(id: &TemplateId) -> Key {
    format!("template/{id}").into_bytes()
}

pub(super) fn templates(team: &TeamId) -> String {
    format!("templates/{team}/")
}

pub(super) fn alias(team: &TeamId, alias: &str) -> Key {
    format!("alias/{team}/{alias}").into_bytes()
}

pub(super) fn idempotency(team: &TeamId, key: &str) -> Key {
    format!("idempotency/{team}/{}", blake3::hash(key.as_bytes()).to_hex()).into_bytes()
}

pub(super) const IDEMPOTENT_SINCE: &str = "idempotent-since/";

pub(super) fn idempotent_since(unix_ms: i64, team: &TeamId, key: &str) -> Key {
    format!("{IDEMPOTENT_SINCE}{}/{team}/{}", time(unix_ms), blake3::hash(key.as_bytes()).to_hex()).into_bytes()
}

/// The key of the row that an entry of `idempotent-since` is about.
pub(super) fn idempotency_of_since(since: &[u8]) -> Key {
    let after_time = IDEMPOTENT_SINCE.len() + time(0).len() + 1;
    [b"idempotency/", since.get(after_time..).unwrap_or_default()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_sort_as_text() {
        let times = [-5, 0, 1, 9, 10, 255, 1_900_000_000_000, i64::MAX];
        let texts: Vec<_> = times.iter().map(|t| time(*t)).collect();
        assert!(texts.is_sorted(), "{texts:?}");
        assert!(texts.iter().all(|text| text.len() == 16));
    }

    #[test]
    fn an_age_entry_leads_to_its_row() {
        let team = TeamId::new("a.b").expect("an id");
        assert_eq!(idempotency_of_since(&idempotent_since(77, &team, "k/ey")), idempotency(&team, "k/ey"));
    }

    #[test]
    fn one_team_is_never_under_another() {
        let team = |text: &str| TeamId::new(text).expect("an id");
        assert!(!under(&listing(&team("a"))).contains(&timed(&listing(&team("ab")), 1, &"x")));
        assert!(under(&listing(&team("a"))).contains(&timed(&listing(&team("a")), 1, &"x")));
        assert!(!under(SNAPSHOTS).contains(&sandbox(&SandboxId::new("a").expect("an id"))));
    }
}
