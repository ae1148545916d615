//! Manifests: what a snapshot consists of.
//!
//! ```text
//!   0            8         12        16                48
//!   +------------+---------+---------+-----------------+------------------------+
//!   | "SYMANIF"0 | version | length  | BLAKE3 of the   | protobuf message       |
//!   |            | u32 LE  | u32 LE  | payload         | (`wire::Manifest`)     |
//!   +------------+---------+---------+-----------------+------------------------+
//! ```
//!
//! Invariants:
//! - a manifest that decodes is complete and consistent: sizes can be indexed, packs are within the caps, ids have their
//!   lengths. Nobody above has to check again;
//! - the manifest is written last; what it names was durable before;
//! - `packs` may name more packs than needed, never fewer.
//!
//! Adding a field: give it a new tag, and a meaning for its absence. A change that an old reader must not overlook takes the
//! next version number; old readers refuse it.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message as _;

use crate::chunk::MAX_PLAIN_BYTES;
use crate::ids::{ChunkId, PackId, SnapshotId};
use crate::index::{Geometry, IndexError};
use crate::pack::{self, PackError, PackRef};

/// The most bytes of an encoded manifest.
pub const MAX_MANIFEST_BYTES: usize = 64 * 1024 * 1024;

/// The version that this program writes, and the only one it reads.
pub const MANIFEST_VERSION: u32 = 2;

/// The most bytes of a small blob such as the device state.
pub const MAX_BLOB_BYTES: u64 = 256 * 1024 * 1024;

/// Small blobs are cut into pieces of this many bytes, each a chunk.
pub const BLOB_PIECE_BYTES: usize = 256 * 1024;

const MAGIC: &[u8; 8] = b"SYMANIF\0";
const HEADER_BYTES: usize = 48;

/// Bytes that are not a good manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Too short, or another magic.
    #[error("not a manifest")]
    NotAManifest,
    /// Written by a later version of this program.
    #[error("manifest version {0} is not known")]
    Version(u32),
    /// Over [`MAX_MANIFEST_BYTES`], or not as long as it says.
    #[error("manifest length is wrong: {0} bytes")]
    Length(u64),
    /// The checksum does not match.
    #[error("manifest is damaged")]
    Checksum,
    /// The checksum matches, but a field is missing or impossible.
    #[error("manifest is impossible: {field}: {reason}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl ManifestError {
    fn field(field: &'static str, reason: impl ToString) -> Self {
        Self::Field { field, reason: reason.to_string() }
    }
}

/// A stored image: its size, its chunking, and the root of its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRef {
    /// Size, bytes.
    pub size_bytes: u64,
    /// Bytes per chunk.
    pub chunk_size: u32,
    /// The root of the chunk index; [`ChunkId::ZERO`] for an image of nothing but zeros.
    pub root: ChunkId,
}

impl ImageRef {
    /// Size and chunking, checked.
    pub fn geometry(&self) -> Result<Geometry, IndexError> {
        Geometry::new(self.size_bytes, self.chunk_size)
    }
}

/// A stored small blob: the concatenation of its pieces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlobRef {
    /// Length of the whole, bytes.
    pub size_bytes: u64,
    /// Its pieces, [`BLOB_PIECE_BYTES`] each, the last one shorter; [`ChunkId::ZERO`] for a piece of zeros.
    pub pieces: Vec<ChunkId>,
}

/// The virtual hardware that the snapshot was taken on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shape {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
    /// Disk, bytes.
    pub disk_bytes: u64,
}

/// What a host must offer for the snapshot to run on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostFacts {
    /// The VMM and its version, e.g. `qemu 7.2.22`.
    pub vmm_version: String,
    /// The machine type, e.g. `microvm`.
    pub machine: String,
    /// `tcg` or `kvm`.
    pub accelerator: String,
    /// The CPU model that the guest saw.
    pub cpu_model: String,
    /// The guest kernel.
    pub kernel: String,
}

/// Everything there is to know about a snapshot's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Version of the format, [`MANIFEST_VERSION`].
    pub version: u32,
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// Guest memory.
    pub memory: ImageRef,
    /// The disk.
    pub disk: ImageRef,
    /// Device state, opaque here.
    pub device_state: BlobRef,
    /// The virtual hardware.
    pub shape: Shape,
    /// What a host must match.
    pub facts: HostFacts,
    /// What the source had been restored from.
    pub parent: Option<SnapshotId>,
    /// Every pack that may hold a chunk of this snapshot.
    pub packs: Vec<PackRef>,
    /// Numbers of the memory chunks that a resumed guest touches first, in order; may be empty.
    pub working_set: Vec<u64>,
    /// When the snapshot was taken, milliseconds since the Unix epoch.
    pub created_unix_ms: i64,
}

impl Manifest {
    /// The stored form.
    pub fn encode(&self) -> Bytes {
        let payload = wire::Manifest::from(self).encode_to_vec();
        let mut out = BytesMut::with_capacity(HEADER_BYTES + payload.len());
        out.put_slice(MAGIC);
        out.put_u32_le(self.version);
        out.put_u32_le(u32::try_from(payload.len()).unwrap_or(u32::MAX));
        out.put_slice(blake3::hash(&payload).as_bytes());
        out.put_slice(&payload);
        out.freeze()
    }

    /// Reads and checks a stored manifest.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(ManifestError::Length(bytes.len() as u64));
        }
        let Some((mut header, payload)) = bytes.split_at_checked(HEADER_BYTES) else {
            return Err(ManifestError::NotAManifest);
        };
        if !header.starts_with(MAGIC) {
            return Err(ManifestError::NotAManifest);
        }
        header.advance(MAGIC.len());
        let version = header.get_u32_le();
        if version != MANIFEST_VERSION {
            return Err(ManifestError::Version(version));
        }
        if header.get_u32_le() as usize != payload.len() {
            return Err(ManifestError::Length(bytes.len() as u64));
        }
        if blake3::hash(payload).as_bytes() != header {
            return Err(ManifestError::Checksum);
        }
        let message = wire::Manifest::decode(payload).map_err(|e| ManifestError::field("message", e))?;
        message.into_checked(version)
    }
}

/// The protobuf messages inside the envelope. Tags are never reused.
mod wire {
    use super::*;

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Manifest {
        #[prost(string, tag = "1")]
        snapshot_id: String,
        #[prost(message, optional, tag = "2")]
        memory: Option<Image>,
        #[prost(message, optional, tag = "3")]
        disk: Option<Image>,
        #[prost(message, optional, tag = "4")]
        device_state: Option<Blob>,
        #[prost(message, optional, tag = "5")]
        shape: Option<Shape>,
        #[prost(message, optional, tag = "6")]
        facts: Option<Facts>,
        #[prost(string, tag = "7")]
        parent: String,
        #[prost(message, repeated, tag = "8")]
        packs: Vec<Pack>,
        #[prost(uint64, repeated, tag = "9")]
        working_set: Vec<u64>,
        #[prost(int64, tag = "10")]
        created_unix_ms: i64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Image {
        #[prost(uint64, tag = "1")]
        size_bytes: u64,
        #[prost(uint32, tag = "2")]
        chunk_size: u32,
        #[prost(bytes = "vec", tag = "3")]
        root: Vec<u8>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Blob {
        #[prost(uint64, tag = "1")]
        size_bytes: u64,
        #[prost(bytes = "vec", repeated, tag = "2")]
        pieces: Vec<Vec<u8>>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Shape {
        #[prost(uint32, tag = "1")]
        vcpus: u32,
        #[prost(uint64, tag = "2")]
        memory_bytes: u64,
        #[prost(uint64, tag = "3")]
        disk_bytes: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Facts {
        #[prost(string, tag = "1")]
        vmm_version: String,
        #[prost(string, tag = "2")]
        machine: String,
        #[prost(string, tag = "3")]
        accelerator: String,
        #[prost(string, tag = "4")]
        cpu_model: String,
        #[prost(string, tag = "5")]
        kernel: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Pack {
        #[prost(bytes = "vec", tag = "1")]
        id: Vec<u8>,
        #[prost(uint64, tag = "2")]
        size_bytes: u64,
        #[prost(uint32, tag = "3")]
        chunks: u32,
        #[prost(uint32, tag = "4")]
        frames: u32,
    }

    impl From<&super::Manifest> for Manifest {
        fn from(m: &super::Manifest) -> Self {
            let image = |image: &ImageRef| {
                Some(Image {
                    size_bytes: image.size_bytes,
                    chunk_size: image.chunk_size,
                    root: image.root.as_bytes().to_vec(),
                })
            };
            Self {
                snapshot_id: m.snapshot_id.to_string(),
                memory: image(&m.memory),
                disk: image(&m.disk),
                device_state: Some(Blob {
                    size_bytes: m.device_state.size_bytes,
                    pieces: m.device_state.pieces.iter().map(|id| id.as_bytes().to_vec()).collect(),
                }),
                shape: Some(Shape {
                    vcpus: m.shape.vcpus,
                    memory_bytes: m.shape.memory_bytes,
                    disk_bytes: m.shape.disk_bytes,
                }),
                facts: Some(Facts {
                    vmm_version: m.facts.vmm_version.clone(),
                    machine: m.facts.machine.clone(),
                    accelerator: m.facts.accelerator.clone(),
                    cpu_model: m.facts.cpu_model.clone(),
                    kernel: m.facts.kernel.clone(),
                }),
                parent: m.parent.map(|id| id.to_string()).unwrap_or_default(),
                packs: m
                    .packs
                    .iter()
                    .map(|p| Pack {
                        id: p.id.as_bytes().to_vec(),
                        size_bytes: p.size_bytes,
                        chunks: p.chunks,
                        frames: p.frames,
                    })
                    .collect(),
                working_set: m.working_set.clone(),
                created_unix_ms: m.created_unix_ms,
            }
        }
    }

    impl Manifest {
        pub(super) fn into_checked(self, version: u32) -> Result<super::Manifest, ManifestError> {
            let snapshot_id = self.snapshot_id.parse().map_err(|e| ManifestError::field("snapshot_id", e))?;
            let parent = match self.parent.as_str() {
                "" => None,
                text => Some(text.parse().map_err(|e| ManifestError::field("parent", e))?),
            };
            let shape = self.shape.ok_or_else(|| ManifestError::field("shape", "missing"))?;
            let facts = self.facts.ok_or_else(|| ManifestError::field("facts", "missing"))?;
            Ok(super::Manifest {
                version,
                snapshot_id,
                memory: checked_image("memory", self.memory)?,
                disk: checked_image("disk", self.disk)?,
                device_state: checked_blob("device_state", self.device_state)?,
                shape: super::Shape {
                    vcpus: shape.vcpus,
                    memory_bytes: shape.memory_bytes,
                    disk_bytes: shape.disk_bytes,
                },
                facts: HostFacts {
                    vmm_version: facts.vmm_version,
                    machine: facts.machine,
                    accelerator: facts.accelerator,
                    cpu_model: facts.cpu_model,
                    kernel: facts.kernel,
                },
                parent,
                packs: self.packs.into_iter().map(checked_pack).collect::<Result<_, _>>()?,
                working_set: self.working_set,
                created_unix_ms: self.created_unix_ms,
            })
        }
    }

    fn checked_image(field: &'static str, image: Option<Image>) -> Result<ImageRef, ManifestError> {
        let image = image.ok_or_else(|| ManifestError::field(field, "missing"))?;
        let root = ChunkId::from_slice(&image.root).map_err(|e| ManifestError::field(field, e))?;
        let image = ImageRef { size_bytes: image.size_bytes, chunk_size: image.chunk_size, root };
        image.geometry().map_err(|e| ManifestError::field(field, e))?;
        Ok(image)
    }

    fn checked_blob(field: &'static str, blob: Option<Blob>) -> Result<BlobRef, ManifestError> {
        let blob = blob.ok_or_else(|| ManifestError::field(field, "missing"))?;
        if blob.size_bytes > MAX_BLOB_BYTES
            || blob.size_bytes.div_ceil(BLOB_PIECE_BYTES as u64) != blob.pieces.len() as u64
        {
            return Err(ManifestError::field(
                field,
                format!("{} pieces of {} bytes", blob.pieces.len(), blob.size_bytes),
            ));
        }
        let pieces = blob.pieces.iter().map(|id| ChunkId::from_slice(id)).collect::<Result<_, _>>();
        Ok(BlobRef { size_bytes: blob.size_bytes, pieces: pieces.map_err(|e| ManifestError::field(field, e))? })
    }

    fn checked_pack(pack: Pack) -> Result<PackRef, ManifestError> {
        let id = PackId::from_slice(&pack.id).map_err(|e| ManifestError::field("packs", e))?;
        let pack = PackRef { id, size_bytes: pack.size_bytes, frames: pack.frames, chunks: pack.chunks };
        pack::check_sizes(&pack).map_err(|e: PackError| ManifestError::field("packs", e))?;
        Ok(pack)
    }
}

const _: () = assert!(BLOB_PIECE_BYTES <= MAX_PLAIN_BYTES);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn sample() -> Manifest {
        Manifest {
            version: MANIFEST_VERSION,
            snapshot_id: SnapshotId::from_random([1; 16]),
            memory: ImageRef { size_bytes: 256 << 20, chunk_size: 65536, root: ChunkId([2; 32]) },
            disk: ImageRef { size_bytes: 1 << 30, chunk_size: 65536, root: ChunkId::ZERO },
            device_state: BlobRef { size_bytes: 300_000, pieces: vec![ChunkId([3; 32]), ChunkId([4; 32])] },
            shape: Shape { vcpus: 2, memory_bytes: 256 << 20, disk_bytes: 1 << 30 },
            facts: HostFacts {
                vmm_version: "qemu 7.2.22".into(),
                machine: "microvm".into(),
                accelerator: "tcg".into(),
                cpu_model: "max".into(),
                kernel: "6.1.0".into(),
            },
            parent: Some(SnapshotId::from_random([5; 16])),
            packs: vec![PackRef { id: PackId([6; 32]), size_bytes: 1000, frames: 3, chunks: 7 }],
            working_set: vec![3, 1, 2],
            created_unix_ms: 1_700_000_000_000,
        }
    }

    /// A manifest whose envelope is right and whose payload is anything.
    fn envelope(payload: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&MANIFEST_VERSION.to_le_bytes());
        out.extend_from_slice(&u32::try_from(payload.len()).expect("small").to_le_bytes());
        out.extend_from_slice(blake3::hash(payload).as_bytes());
        out.extend_from_slice(payload);
        out
    }

    #[test]
    fn manifests_round_trip() {
        let manifest = sample();
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest.clone()));
        let orphan = Manifest { parent: None, packs: vec![], working_set: vec![], ..manifest };
        assert_eq!(Manifest::decode(&orphan.encode()), Ok(orphan));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(payload in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Manifest::decode(&payload);
            let _ = Manifest::decode(&envelope(&payload));
        }

        #[test]
        fn a_flipped_bit_is_refused(at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = sample().encode().to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(Manifest::decode(&bytes).is_err());
        }

        #[test]
        fn a_damaged_payload_under_a_good_checksum_never_panics(at in any::<prop::sample::Index>(), with in any::<u8>()) {
            let mut payload = sample().encode()[HEADER_BYTES..].to_vec();
            let at = at.index(payload.len());
            payload[at] = with;
            let _ = Manifest::decode(&envelope(&payload));
        }
    }

    #[test]
    fn cut_long_and_later_manifests_are_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        let mut long = bytes.to_vec();
        long.push(0);
        assert!(matches!(Manifest::decode(&long), Err(ManifestError::Length(_))));
        let later = Manifest { version: 3, ..sample() };
        assert_eq!(Manifest::decode(&later.encode()), Err(ManifestError::Version(3)));
        assert!(matches!(Manifest::decode(&vec![0; MAX_MANIFEST_BYTES + 1]), Err(ManifestError::Length(_))));
    }

    #[test]
    fn impossible_fields_are_refused_by_name() {
        let named = |manifest: Manifest| match Manifest::decode(&manifest.encode()) {
            Err(ManifestError::Field { field, .. }) => field,
            other => panic!("expected a field error, got {other:?}"),
        };
        let mut bad = sample();
        bad.memory.chunk_size = 1000;
        assert_eq!(named(bad), "memory");
        let mut bad = sample();
        bad.disk.size_bytes = u64::MAX;
        assert_eq!(named(bad), "disk");
        let mut bad = sample();
        bad.device_state.size_bytes = u64::MAX;
        assert_eq!(named(bad), "device_state");
        let mut bad = sample();
        bad.packs[0].size_bytes = u64::MAX;
        assert_eq!(named(bad), "packs");
    }

    /// The stored form is a promise to every snapshot ever taken.
    #[test]
    fn golden_manifest() {
        let golden = include_bytes!("../testdata/manifest-v2.bin");
        assert_eq!(&sample().encode()[..], golden, "the manifest format has changed: that needs a new version");
        assert_eq!(Manifest::decode(golden), Ok(sample()));
    }
}
