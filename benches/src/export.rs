//! Images out of a stopped server's data directory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use snapyard_snapstore::blob::MemoryBlobs;
use snapyard_snapstore::catalog::Catalog;
use snapyard_snapstore::catalog::rocks::RocksKv;
use snapyard_snapstore::{ChunkData, ChunkNo, ImageReader, Manifest, SnapshotId, Store, StoreConfig, SystemClock};

use crate::images::Names;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Writes each snapshot's memory and disk below `out`, holes where they are zero.
pub fn run(data_dir: &Path, out: &Path, snapshots: &[String]) -> Result<(), Error> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let clock = Arc::new(SystemClock);
        let catalog = Catalog::open(Arc::new(RocksKv::open(&data_dir.join("catalog"))?), clock.clone()).await?;
        // Everything that was captured here is in the cache; nothing is asked of the object store.
        let store = Store::open(StoreConfig::new(data_dir), Arc::new(MemoryBlobs::new()), clock).await?;
        let mut names = Vec::new();
        for (number, id) in snapshots.iter().enumerate() {
            let id: SnapshotId = id.parse()?;
            let row = catalog.snapshot_row(&id).await?.ok_or_else(|| format!("no snapshot {id}"))?;
            let manifest = Arc::new(Manifest::decode(&catalog.manifest(&id).await?)?);
            let key = catalog.ensure_team(&row.team).await?.dedup_key;
            let reader = store.open_snapshot(key, Arc::clone(&manifest)).await?;
            let dir = out.join((number + 1).to_string());
            fs::create_dir_all(&dir)?;
            write(&reader.image(&manifest.memory), &dir.join("memory.img")).await?;
            write(&reader.image(&manifest.disk), &dir.join("disk.img")).await?;
            names.push(Names {
                memory: manifest.memory.root.to_string(),
                disk: manifest.disk.root.to_string(),
                chunk_size: u64::from(manifest.memory.chunk_size),
            });
        }
        fs::write(out.join("names.json"), serde_json::to_vec(&names)?)?;
        Ok(())
    })
}

async fn write(image: &ImageReader, path: &Path) -> Result<(), Error> {
    let file = File::create(path)?;
    file.set_len(image.size_bytes())?;
    let size = u64::from(image.chunk_size());
    for chunk in 0..image.size_bytes().div_ceil(size) {
        if let ChunkData::Bytes(bytes) = image.read(ChunkNo(chunk)).await? {
            file.write_all_at(&bytes, chunk * size)?;
        }
    }
    Ok(())
}
