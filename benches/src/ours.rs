//! The store as a user of it: snapshots put, uploaded, read back; each command a process of its own, like the peers.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use snapyard_snapstore::blob::{BlobStore, MemoryBlobs, S3Blobs, S3Config};
use snapyard_snapstore::ids::DomainKey;
use snapyard_snapstore::manifest::MANIFEST_VERSION;
use snapyard_snapstore::{
    BlobRef, ChunkNo, DEFAULT_CHUNK_BYTES, HostFacts, ImageReader, ImageRef, ImageSpec, Ingest, Manifest, Shape,
    SnapshotId, Store, StoreConfig, SystemClock,
};

use crate::images::{Images, Wanted};

pub type Error = Box<dyn std::error::Error + Send + Sync>;

const KEY: DomainKey = DomainKey([7; 32]);
/// Bytes of a put.
const RUN: u64 = 1 << 20;
/// What a changed part is listed in: what a guest's capture knows of.
pub const UNIT: u64 = 64 << 10;

/// An object store.
#[derive(Args)]
pub struct S3 {
    /// Endpoint URL.
    #[arg(long)]
    endpoint: String,
    /// Bucket.
    #[arg(long)]
    bucket: String,
    /// Access key.
    #[arg(long, env = "AWS_ACCESS_KEY_ID")]
    access_key: String,
    /// Secret key.
    #[arg(long, env = "AWS_SECRET_ACCESS_KEY")]
    secret_key: String,
    /// Region.
    #[arg(long, default_value = "us-east-1")]
    region: String,
}

impl S3 {
    fn connect(&self) -> Arc<dyn BlobStore> {
        let endpoint = Some(self.endpoint.clone());
        let config = S3Config::new(endpoint, &self.region, &self.bucket, &self.access_key, &self.secret_key);
        Arc::new(S3Blobs::new(config))
    }
}

async fn open(dir: &Path, blobs: Arc<dyn BlobStore>) -> Result<Arc<Store>, Error> {
    Ok(Store::open(StoreConfig::new(dir), blobs, Arc::new(SystemClock)).await?)
}

fn read_manifest(path: &Path) -> Result<Arc<Manifest>, Error> {
    Ok(Arc::new(Manifest::decode(&std::fs::read(path)?)?))
}

/// The parts of a file that are not holes.
fn data_ranges(file: &File, size: u64) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let seek = |from: u64, what| {
            let from = i64::try_from(from).expect("files are smaller");
            // SAFETY: the descriptor is open for as long as `file` lives, and lseek touches no memory.
            u64::try_from(unsafe { libc::lseek(file.as_raw_fd(), from, what) }).ok()
        };
        let Some(start) = seek(at, libc::SEEK_DATA) else { break };
        let end = seek(start, libc::SEEK_HOLE).unwrap_or(size);
        // A unit that is partly a hole is read whole.
        let (start, end) = (start / UNIT * UNIT, end.next_multiple_of(UNIT).min(size));
        match ranges.last_mut() {
            Some((_, last)) if *last >= start => *last = end.max(*last),
            _ => ranges.push((start, end)),
        }
        at = end;
    }
    ranges
}

/// Runs of units, from a list of unit numbers.
fn unit_ranges(units: &[u64], size: u64) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for unit in units {
        let (start, end) = (unit * UNIT, ((unit + 1) * UNIT).min(size));
        match ranges.last_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

async fn put_file(
    ingest: &Ingest,
    path: &Path,
    changed: Option<&[u64]>,
    parent: Option<ImageReader>,
) -> Result<ImageRef, Error> {
    let file = Arc::new(File::open(path)?);
    let size_bytes = file.metadata()?.len();
    let writer = ingest.image(ImageSpec { size_bytes, chunk_size: DEFAULT_CHUNK_BYTES }, parent);
    let ranges = match changed {
        Some(units) => unit_ranges(units, size_bytes),
        None => data_ranges(&file, size_bytes),
    };
    for (start, end) in ranges {
        let mut at = start;
        while at < end {
            let len = RUN.min(end - at);
            let file = Arc::clone(&file);
            let read = tokio::task::spawn_blocking(move || {
                let mut bytes = vec![0; usize::try_from(len).expect("a run fits in memory")];
                file.read_exact_at(&mut bytes, at).map(|()| bytes)
            });
            writer.put(ChunkNo(at / u64::from(DEFAULT_CHUNK_BYTES)), read.await??.into()).await?;
            at += len;
        }
    }
    Ok(writer.finish().await?)
}

/// Stores one snapshot and writes its manifest.
pub async fn put(
    dir: &Path,
    image: &Path,
    out: &Path,
    parent: Option<&Path>,
    changed: Option<&Path>,
) -> Result<(), Error> {
    let began = Instant::now();
    let store = open(dir, Arc::new(MemoryBlobs::new())).await?;
    let parent = parent.map(read_manifest).transpose()?;
    let changed: Option<[Vec<u64>; 2]> =
        changed.map(|path| Ok::<_, Error>(serde_json::from_slice(&std::fs::read(path)?)?)).transpose()?;
    let reader = match &parent {
        Some(parent) => Some(store.open_snapshot(KEY, Arc::clone(parent)).await?),
        None => None,
    };
    let inherited = |image: fn(&Manifest) -> ImageRef| {
        reader.as_ref().zip(parent.as_ref()).map(|(reader, parent)| reader.image(&image(parent)))
    };
    let ingest = store.begin(KEY, parent.as_deref()).await?;
    let memory_changed = changed.as_ref().map(|changed| changed[0].as_slice());
    let memory = put_file(&ingest, &image.join("memory.img"), memory_changed, inherited(|m| m.memory)).await?;
    let disk_changed = changed.as_ref().map(|changed| changed[1].as_slice());
    let disk = put_file(&ingest, &image.join("disk.img"), disk_changed, inherited(|m| m.disk)).await?;
    let sealed = ingest.seal().await?;
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        snapshot_id: SnapshotId::random(),
        memory,
        disk,
        device_state: BlobRef::default(),
        shape: Shape::default(),
        facts: HostFacts::default(),
        parent: parent.map(|parent| parent.snapshot_id),
        packs: sealed.packs,
        working_set: Vec::new(),
        created_unix_ms: 0,
    };
    std::fs::write(out, manifest.encode())?;
    let took = began.elapsed();
    println!(
        "{}",
        json!({
            "seconds_inside": took.as_secs_f64(),
            "bytes_new": sealed.bytes_new,
            "packs_new": sealed.new_packs.len(),
            "chunks_new": sealed.chunks_new,
            "chunks_deduplicated": sealed.chunks_deduplicated,
            "peak_rss_kib": peak_rss_kib()?,
        })
    );
    Ok(())
}

fn peak_rss_kib() -> Result<u64, Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// Uploads stored snapshots.
pub async fn upload(dir: &Path, s3: &S3, manifests: &[PathBuf]) -> Result<(), Error> {
    let store = open(dir, s3.connect()).await?;
    let began = Instant::now();
    for path in manifests {
        let manifest = read_manifest(path)?;
        store.upload(&manifest.snapshot_id, &manifest).await?;
    }
    let stats = store.stats();
    println!(
        "{}",
        json!({
            "seconds": began.elapsed().as_secs_f64(),
            "puts": stats.blob_puts,
            "bytes": stats.blob_bytes_written,
        })
    );
    Ok(())
}

/// Reads the working set of a snapshot that this node never saw.
pub async fn restore(dir: &Path, s3: &S3, manifest: &Path, images: &Path, share: f64) -> Result<(), Error> {
    let images = Images::open(images)?;
    let wanted = images.first_reads(share);
    let began = Instant::now();
    let store = open(dir, s3.connect()).await?;
    let manifest = read_manifest(manifest)?;
    let reader = store.open_snapshot(KEY, Arc::clone(&manifest)).await?;
    let parts = [reader.image(&manifest.memory), reader.image(&manifest.disk)];
    let chunks = |part: usize| {
        let of_part = wanted.iter().filter(move |wanted| wanted.part == part);
        let size = u64::from(DEFAULT_CHUNK_BYTES);
        let chunks = of_part.flat_map(move |Wanted { start, end, .. }| (start / size..end.div_ceil(size)).map(ChunkNo));
        chunks.collect::<Vec<ChunkNo>>()
    };
    let (memory, disk) = tokio::join!(parts[0].read_many(chunks(0)), parts[1].read_many(chunks(1)));
    let read = memory?.len() + disk?.len();
    let stats = store.stats();
    println!(
        "{}",
        json!({
            "seconds_inside": began.elapsed().as_secs_f64(),
            "chunks": read,
            "gets": stats.blob_gets,
            "bytes": stats.blob_bytes_read,
        })
    );
    Ok(())
}

/// Lists the units in which two snapshots' images differ.
pub fn changed(from: &Path, to: &Path, out: &Path) -> Result<(), Error> {
    let differing = |name: &str| -> Result<Vec<u64>, Error> {
        let (a, b) = (File::open(from.join(name))?, File::open(to.join(name))?);
        let size = b.metadata()?.len();
        let (mut left, mut right) = (vec![0; UNIT as usize], vec![0; UNIT as usize]);
        let mut units = Vec::new();
        let mut touched: Vec<u64> = [&a, &b]
            .into_iter()
            .flat_map(|file| data_ranges(file, size))
            .flat_map(|(start, end)| start / UNIT..end.div_ceil(UNIT))
            .collect();
        touched.sort_unstable();
        touched.dedup();
        for unit in touched {
            let len = usize::try_from(UNIT.min(size - unit * UNIT)).expect("a unit is small");
            a.read_exact_at(&mut left[..len], unit * UNIT)?;
            b.read_exact_at(&mut right[..len], unit * UNIT)?;
            if left[..len] != right[..len] {
                units.push(unit);
            }
        }
        Ok(units)
    };
    std::fs::write(out, serde_json::to_vec(&[differing("memory.img")?, differing("disk.img")?])?)?;
    Ok(())
}

/// Milliseconds and bytes to store a snapshot in which 1 MiB has changed, for images of several sizes.
pub async fn small_change(dir: &Path) -> Result<(), Error> {
    const PIECES: u64 = 16;
    let mut figures = serde_json::Map::new();
    for mib in [256_u64, 1024, 4096] {
        let dir = dir.join(mib.to_string());
        let store = open(&dir, Arc::new(MemoryBlobs::new())).await?;
        let spec = ImageSpec { size_bytes: mib << 20, chunk_size: DEFAULT_CHUNK_BYTES };
        let ingest = store.begin(KEY, None).await?;
        let writer = ingest.image(spec, None);
        for run in 0..mib {
            writer.put(ChunkNo(run * 256), pages(run * 256, 256, 0).into()).await?;
        }
        let image = writer.finish().await?;
        let mut manifest = Arc::new(of_image(image, ingest.seal().await?.packs));
        // At rest: the database is done with what the base brought.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let mut samples = Vec::new();
        for round in 1..=9_u64 {
            let began = Instant::now();
            let reader = store.open_snapshot(KEY, Arc::clone(&manifest)).await?;
            let ingest = store.begin(KEY, Some(&manifest)).await?;
            let writer = ingest.image(spec, Some(reader.image(&manifest.memory)));
            for piece in 0..PIECES {
                // Spread over the image, elsewhere in each round.
                let unit = (piece * (mib * 16 / PIECES) + round) % (mib * 16);
                writer.put(ChunkNo(unit * 16), noise(round * PIECES + piece, UNIT as usize).into()).await?;
            }
            let image = writer.finish().await?;
            let sealed = ingest.seal().await?;
            samples.push((began.elapsed().as_secs_f64() * 1000.0, sealed.bytes_new));
            manifest = Arc::new(of_image(image, sealed.packs));
        }
        samples.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (ms, bytes) = samples[samples.len() / 2];
        figures.insert(format!("{mib}mib"), json!({ "ms": ms, "bytes": bytes }));
    }
    println!("{}", serde_json::Value::Object(figures));
    Ok(())
}

pub fn of_image(image: ImageRef, packs: Vec<snapyard_snapstore::PackRef>) -> Manifest {
    Manifest {
        version: MANIFEST_VERSION,
        snapshot_id: SnapshotId::random(),
        memory: image,
        disk: image,
        device_state: BlobRef::default(),
        shape: Shape::default(),
        facts: HostFacts::default(),
        parent: None,
        packs,
        working_set: Vec::new(),
        created_unix_ms: 0,
    }
}

/// Pages that all differ, and compress to next to nothing.
pub fn pages(first: u64, count: u64, salt: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(count * 4096).expect("few pages")];
    for (number, page) in (first..).zip(bytes.chunks_mut(4096)) {
        page[..8].copy_from_slice(&(number + 1).to_le_bytes());
        page[8..16].copy_from_slice(&salt.to_le_bytes());
    }
    bytes
}

pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Latency of reads that the cache answers, beside a plain read of the same bytes from a file in the page cache.
pub async fn hits(dir: &Path, s3: &S3, manifest: &Path, images: &Path) -> Result<(), Error> {
    const SAMPLES: usize = 4000;
    let store = open(dir, s3.connect()).await?;
    let manifest = read_manifest(manifest)?;
    let reader = store.open_snapshot(KEY, Arc::clone(&manifest)).await?;
    let memory = reader.image(&manifest.memory);
    let file = File::open(images.join("memory.img"))?;
    let data = data_ranges(&file, memory.size_bytes());
    let units: Vec<u64> = data.iter().flat_map(|(start, end)| start / UNIT..end / UNIT).collect();
    let mut order = Vec::new();
    for number in 0..SAMPLES as u64 {
        let random = u64::from_le_bytes(noise(number, 8).try_into().expect("8 bytes"));
        order.push(units[usize::try_from(random % units.len() as u64).expect("small")]);
    }
    let (mut chunk_us, mut run_us, mut pread_us) = (Vec::new(), Vec::new(), Vec::new());
    for unit in &order {
        memory.chunk_id(ChunkNo(unit * 16)).await?; // index pages in memory, as in a restore that goes on
    }
    let before = store.stats();
    for unit in &order {
        let began = Instant::now();
        memory.read(ChunkNo(unit * 16)).await?;
        chunk_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    for unit in &order {
        let began = Instant::now();
        memory.read_range(unit * UNIT, UNIT as usize).await?;
        run_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    if store.stats().blob_gets != before.blob_gets {
        return Err("not everything was in the cache".into());
    }
    let mut page = [0; 4096];
    for unit in &order {
        let began = Instant::now();
        file.read_exact_at(&mut page, unit * UNIT)?;
        pread_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    let percentiles = |samples: &mut Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        json!({ "p50_us": samples[samples.len() / 2], "p99_us": samples[samples.len() * 99 / 100] })
    };
    println!(
        "{}",
        json!({
            "chunk": percentiles(&mut chunk_us),
            "unit_64kib": percentiles(&mut run_us),
            "pread": percentiles(&mut pread_us),
        })
    );
    Ok(())
}
