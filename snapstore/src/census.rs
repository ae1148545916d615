//! What every chunk is needed by: the whole index of every snapshot, walked once.
//!
//! ```text
//!   manifest ─▶ roots ─▶ index pages ─▶ chunks          each page at most twice, however many snapshots share it
//!   footers  ─▶ frames ─▶ chunks                        each stored chunk: needed by one snapshot, by several, by none
//! ```
//!
//! For people ([`Census::snapshots`]), for rewriting packs that are mostly dead ([`Census::packs`]), and for checking what is
//! stored. Reads every index page that this node has not cached from the blob store, and takes 40 bytes of memory for each
//! reachable chunk. It is not one state: what is committed meanwhile may be missing, so nothing is deleted on its word.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::blocking::blocking;
use crate::catalog::{Catalog, CatalogError, ManifestSeen};
use crate::error::{ReadError, StoreError};
use crate::fetch::{FooterError, Scope};
use crate::ids::{ChunkId, DomainKey, PackId, ShortId, SnapshotId, TeamId};
use crate::manifest::{Manifest, ManifestError};
use crate::pack::{PackError, PackFrame, PackRef};
use crate::reader::SnapshotReader;
use crate::store::Store;

/// Why there is no census.
#[derive(Debug, thiserror::Error)]
pub enum CensusError {
    /// The catalog did not answer.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The store did not.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A manifest that does not decode.
    #[error("the manifest of snapshot {snapshot} cannot be read: {source}")]
    Manifest {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The cause.
        source: ManifestError,
    },
    /// Something could not be asked for just now.
    #[error("{what} cannot be read now: {reason}")]
    Unavailable {
        /// What.
        what: String,
        /// The cause.
        reason: String,
    },
}

/// An index node without a good copy: what lies below it is not counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostNode {
    /// The node.
    pub chunk: ChunkId,
    /// A snapshot that needs it.
    pub snapshot: SnapshotId,
}

/// What a snapshot takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotUsage {
    /// Which.
    pub id: SnapshotId,
    /// Whose.
    pub team: TeamId,
    /// Bytes of its images that are not zero, in whole chunks.
    pub data_bytes: u64,
    /// Compressed bytes that nobody else needs: what deleting it frees, once its packs are rewritten.
    pub exclusive_bytes: u64,
}

/// What a pack holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackUsage {
    /// Which.
    pub pack: PackRef,
    /// Bytes of frames that a snapshot needs, by the share of their content that it needs.
    pub live_bytes: u64,
    /// Chunks in it.
    pub chunks: u64,
    /// Chunks in it that no snapshot needs.
    pub dead_chunks: u64,
}

/// Who needs a chunk or a page.
type Owner = u32;
const SEVERAL: Owner = u32::MAX;

struct Page {
    owner: Owner,
    /// Chunks in it that are not zero.
    chunks: u64,
}

/// What is reachable, and from where.
#[derive(Default)]
struct Reach {
    chunks: HashMap<ShortId, Owner>,
    pages: HashMap<ChunkId, Page>,
}

impl Reach {
    fn chunk(&mut self, id: ChunkId, snapshot: Owner) {
        let owner = self.chunks.entry(id.short()).or_insert(snapshot);
        if *owner != snapshot {
            *owner = SEVERAL;
        }
    }

    /// Whether the page's chunks have to be gone through on behalf of this snapshot.
    fn is_news(&mut self, page: ChunkId, snapshot: Owner) -> bool {
        match self.pages.get_mut(&page) {
            None => true,
            Some(known) if known.owner == snapshot || known.owner == SEVERAL => false,
            Some(known) => {
                known.owner = SEVERAL;
                true
            }
        }
    }

    fn page(&mut self, page: ChunkId, chunks: &[ChunkId], snapshot: Owner) {
        let mut count = 0;
        for id in chunks.iter().filter(|id| !id.is_zero()) {
            self.chunk(*id, snapshot);
            count += 1;
        }
        self.pages.entry(page).or_insert(Page { owner: snapshot, chunks: count });
    }
}

/// Every snapshot and every pack, and what they hold.
pub struct Census {
    /// The snapshots, those of templates included, in the order of their ids.
    pub snapshots: Vec<SnapshotUsage>,
    /// Every pack that a snapshot names, in the order of their ids.
    pub packs: Vec<PackUsage>,
    /// Index nodes without a good copy.
    pub lost_nodes: Vec<LostNode>,
    /// Packs whose footer cannot be read, and why.
    pub lost_packs: Vec<(PackId, String)>,
    /// Bytes of all packs.
    pub stored_bytes: u64,
    reach: Reach,
    keys: HashMap<PackId, DomainKey>,
    named_by: HashMap<PackId, Vec<SnapshotId>>,
}

impl Census {
    fn empty() -> Self {
        Self {
            snapshots: Vec::new(),
            packs: Vec::new(),
            lost_nodes: Vec::new(),
            lost_packs: Vec::new(),
            stored_bytes: 0,
            reach: Reach::default(),
            keys: HashMap::new(),
            named_by: HashMap::new(),
        }
    }

    /// Takes it. `progress` is told after each snapshot how many are done, and how many there are.
    pub async fn take(
        store: &Arc<Store>,
        catalog: &Arc<Catalog>,
        progress: impl Fn(u64, u64),
    ) -> Result<Self, CensusError> {
        let mut ids = Vec::new();
        let note = |seen: ManifestSeen| {
            ids.push((seen.row.id, seen.row.team));
            Ok::<_, CatalogError>(())
        };
        catalog.each_manifest(note).await?;
        let mut census = Self::empty();
        let mut packs = BTreeMap::new();
        let total = ids.len() as u64;
        for (done, (id, team)) in (1..).zip(ids) {
            let Some(reader) = open(store, catalog, &id, &team).await? else { continue };
            for pack in &reader.manifest().packs {
                packs.insert(pack.id, *pack);
                census.keys.insert(pack.id, reader.key());
                census.named_by.entry(pack.id).or_default().push(id);
            }
            census.walk(&reader, id, team).await?;
            progress(done, total);
        }
        census.weigh(store, packs.into_values().collect()).await?;
        Ok(census)
    }

    async fn walk(&mut self, reader: &SnapshotReader, id: SnapshotId, team: TeamId) -> Result<(), CensusError> {
        let owner = Owner::try_from(self.snapshots.len()).expect("fewer than 4 billion snapshots");
        let manifest = reader.manifest();
        let mut data_bytes = 0;
        for image in [&manifest.memory, &manifest.disk] {
            if image.root.is_zero() {
                continue;
            }
            self.reach.chunk(image.root, owner);
            let index = reader.image(image);
            let Some(root) = self.unless_lost(id, image.root, index.root().await)? else { continue };
            for (number, page) in root.iter().enumerate().filter(|(_, page)| !page.is_zero()) {
                self.reach.chunk(*page, owner);
                if self.reach.is_news(*page, owner) {
                    let Some(chunks) = self.unless_lost(id, *page, index.page(number).await)? else { continue };
                    self.reach.page(*page, chunks.as_deref().unwrap_or_default(), owner);
                }
                data_bytes += self.reach.pages[page].chunks * u64::from(image.chunk_size);
            }
        }
        for piece in manifest.device_state.pieces.iter().filter(|piece| !piece.is_zero()) {
            self.reach.chunk(*piece, owner);
        }
        self.snapshots.push(SnapshotUsage { id, team, data_bytes, exclusive_bytes: 0 });
        Ok(())
    }

    /// What was read of the index; `None`, and noted, when it is lost.
    fn unless_lost<T>(
        &mut self,
        snapshot: SnapshotId,
        chunk: ChunkId,
        read: Result<T, ReadError>,
    ) -> Result<Option<T>, CensusError> {
        let read = unless_lost(snapshot, read)?;
        if read.is_none() {
            self.lost_nodes.push(LostNode { chunk, snapshot });
        }
        Ok(read)
    }

    /// Goes through the packs' footers.
    async fn weigh(&mut self, store: &Arc<Store>, packs: Vec<PackRef>) -> Result<(), CensusError> {
        for pack in packs {
            self.stored_bytes += pack.size_bytes;
            let mut usage = PackUsage { pack, live_bytes: 0, chunks: 0, dead_chunks: 0 };
            let frames = match footer(store, pack).await {
                Ok(frames) => frames,
                Err(FooterError::Blob(error)) if error.is_transient() => {
                    let what = format!("the footer of pack {}", pack.id);
                    return Err(CensusError::Unavailable { what, reason: error.to_string() });
                }
                Err(error) => {
                    self.lost_packs.push((pack.id, error.to_string()));
                    continue;
                }
            };
            for (chunk, bytes) in frames.iter().flat_map(shares) {
                usage.chunks += 1;
                let Some(owner) = self.reach.chunks.get(&chunk) else {
                    usage.dead_chunks += 1;
                    continue;
                };
                usage.live_bytes += bytes;
                if let Some(snapshot) = self.snapshots.get_mut(*owner as usize) {
                    snapshot.exclusive_bytes += bytes;
                }
            }
            self.packs.push(usage);
        }
        Ok(())
    }

    /// Whether a snapshot needs the chunk.
    pub fn is_reachable(&self, chunk: &ShortId) -> bool {
        self.reach.chunks.contains_key(chunk)
    }

    /// Every reachable chunk, index nodes included, in no order.
    pub fn reachable(&self) -> impl ExactSizeIterator<Item = &ShortId> {
        self.reach.chunks.keys()
    }

    /// Which snapshots need which of these chunks: goes through every index once more.
    pub async fn needed_by(
        &self,
        store: &Arc<Store>,
        catalog: &Arc<Catalog>,
        chunks: &HashSet<ShortId>,
    ) -> Result<HashMap<ShortId, Vec<SnapshotId>>, CensusError> {
        let mut found = HashMap::<ShortId, Vec<SnapshotId>>::new();
        for usage in &self.snapshots {
            let Some(reader) = open(store, catalog, &usage.id, &usage.team).await? else { continue };
            let mut needed = HashSet::new();
            each_id(&reader, &mut HashSet::new(), |id| {
                needed.extend(Some(id.short()).filter(|id| chunks.contains(id)));
            })
            .await?;
            for id in needed {
                found.entry(id).or_default().push(usage.id);
            }
        }
        Ok(found)
    }

    /// Hands every id of a snapshot to `each`, with the key of its domain; none if it was deleted since.
    pub(crate) async fn each_id(
        &self,
        store: &Arc<Store>,
        catalog: &Arc<Catalog>,
        usage: &SnapshotUsage,
        mut each: impl FnMut(DomainKey, ChunkId),
    ) -> Result<(), CensusError> {
        let Some(reader) = open(store, catalog, &usage.id, &usage.team).await? else { return Ok(()) };
        each_id(&reader, &mut HashSet::new(), |id| each(reader.key(), id)).await
    }

    /// The whole ids of these chunks, as far as these snapshots need them and their indexes can be read.
    pub(crate) async fn ids(
        &self,
        store: &Arc<Store>,
        catalog: &Arc<Catalog>,
        snapshots: &HashSet<SnapshotId>,
        chunks: &HashSet<ShortId>,
    ) -> Result<HashMap<ShortId, ChunkId>, CensusError> {
        let (mut found, mut seen) = (HashMap::new(), HashSet::new());
        for usage in self.snapshots.iter().filter(|usage| snapshots.contains(&usage.id)) {
            let Some(reader) = open(store, catalog, &usage.id, &usage.team).await? else { continue };
            each_id(&reader, &mut seen, |id| {
                if chunks.contains(&id.short()) {
                    found.insert(id.short(), id);
                }
            })
            .await?;
        }
        Ok(found)
    }

    /// The snapshots that name a pack.
    pub fn named_by(&self, pack: &PackId) -> &[SnapshotId] {
        self.named_by.get(pack).map_or(&[], Vec::as_slice)
    }

    /// The dedup domain of a pack.
    pub fn key_of(&self, pack: &PackId) -> Option<DomainKey> {
        self.keys.get(pack).copied()
    }
}

/// The snapshot, unless it was deleted since it was counted.
async fn open(
    store: &Arc<Store>,
    catalog: &Arc<Catalog>,
    id: &SnapshotId,
    team: &TeamId,
) -> Result<Option<SnapshotReader>, CensusError> {
    let bytes = match catalog.manifest(id).await {
        Ok(bytes) => bytes,
        Err(CatalogError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let manifest = Manifest::decode(&bytes).map_err(|source| CensusError::Manifest { snapshot: *id, source })?;
    let key = catalog.ensure_team(team).await?.dedup_key;
    Ok(Some(store.open_snapshot(key, Arc::new(manifest)).await?.following(Arc::clone(catalog))))
}

/// Hands every id of a snapshot to `each`: roots, pages, chunks, pieces. What is below a page that was `seen`, or that is
/// lost, is left out.
async fn each_id(
    reader: &SnapshotReader,
    seen: &mut HashSet<ChunkId>,
    mut each: impl FnMut(ChunkId),
) -> Result<(), CensusError> {
    let manifest = reader.manifest();
    let snapshot = manifest.snapshot_id;
    for image in [&manifest.memory, &manifest.disk] {
        if image.root.is_zero() {
            continue;
        }
        each(image.root);
        let index = reader.image(image);
        let Some(root) = unless_lost(snapshot, index.root().await)? else { continue };
        for (number, page) in root.iter().enumerate().filter(|(_, page)| !page.is_zero()) {
            each(*page);
            if !seen.insert(*page) {
                continue;
            }
            let chunks = unless_lost(snapshot, index.page(number).await)?.flatten();
            chunks.iter().flat_map(|chunks| chunks.iter()).filter(|id| !id.is_zero()).for_each(|id| each(*id));
        }
    }
    manifest.device_state.pieces.iter().filter(|piece| !piece.is_zero()).for_each(|piece| each(*piece));
    Ok(())
}

/// What was read of an index; `None` when it is lost.
fn unless_lost<T>(snapshot: SnapshotId, read: Result<T, ReadError>) -> Result<Option<T>, CensusError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.is_transient() => Err(CensusError::Unavailable {
            what: format!("the index of snapshot {snapshot}"),
            reason: error.to_string(),
        }),
        Err(_) => Ok(None),
    }
}

/// A frame's bytes, divided among its chunks.
fn shares(frame: &PackFrame) -> impl Iterator<Item = (ShortId, u64)> + use<'_> {
    let (stored, plain) = (u64::from(frame.len), frame.content.plain_len());
    frame.content.places().map(move |(chunk, _, len)| (chunk, stored * u64::from(len) / plain))
}

/// Where a pack holds its chunks.
pub(crate) async fn footer(store: &Arc<Store>, pack: PackRef) -> Result<Vec<PackFrame>, FooterError> {
    let fetcher = store.fetcher();
    // The key is of no account for a footer.
    let scope = Scope::new(DomainKey([0; 32]), vec![pack]);
    if let Some((_, error)) = fetcher.load_footers(&scope).await.into_iter().next() {
        return Err(error);
    }
    let look = Arc::clone(fetcher);
    let found = blocking(move || look.cache.footer(&pack.id)).await;
    // Forgotten this instant: it is being deleted.
    found.map(|(_, frames)| frames).ok_or(FooterError::Pack(PackError::NotAPack))
}
