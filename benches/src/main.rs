//! `store-bench`: the store measured on images of real guests, outside any server.
//!
//! ```text
//!   export   images out of a stopped server's data directory, as sparse files
//!   format   what a chunk size, grouping and a dictionary cost and save (docs/decisions/0004)
//!   changed, put, upload, restore, small-change, hits      the store itself, one process each, as `benches/store.py` runs them
//! ```

mod export;
mod format;
mod gc;
mod images;
mod ours;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about, version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write the images of snapshots as files.
    Export {
        /// Data directory of a server that does not run.
        #[arg(long)]
        data_dir: PathBuf,
        /// Where to: `<out>/<n>/memory.img` and `disk.img`, in the order of the snapshots.
        #[arg(long)]
        out: PathBuf,
        /// Ids of snapshots.
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
    /// Compare chunk sizes, grouping and dictionaries.
    Format {
        /// Images as `export` wrote them.
        #[arg(long)]
        images: PathBuf,
    },
    /// List the units of 64 KiB in which one snapshot's images differ from another's.
    Changed {
        /// Directory of the earlier one.
        #[arg(long)]
        from: PathBuf,
        /// Directory of the later one.
        #[arg(long)]
        to: PathBuf,
        /// The list.
        #[arg(long)]
        out: PathBuf,
    },
    /// Store one snapshot.
    Put {
        /// The store's directory.
        #[arg(long)]
        store: PathBuf,
        /// Directory of the snapshot's images.
        #[arg(long)]
        image: PathBuf,
        /// Where its manifest goes.
        #[arg(long)]
        manifest: PathBuf,
        /// Manifest of the snapshot that it inherits from.
        #[arg(long)]
        parent: Option<PathBuf>,
        /// Put only these units: a list made by `changed`.
        #[arg(long, requires = "parent")]
        changed: Option<PathBuf>,
    },
    /// Upload stored snapshots.
    Upload {
        /// The store's directory.
        #[arg(long)]
        store: PathBuf,
        #[command(flatten)]
        s3: ours::S3,
        /// Their manifests.
        manifests: Vec<PathBuf>,
    },
    /// Read a snapshot's working set from the object store.
    Restore {
        /// Directory of a store that has nothing yet.
        #[arg(long)]
        store: PathBuf,
        #[command(flatten)]
        s3: ours::S3,
        /// The snapshot's manifest.
        #[arg(long)]
        manifest: PathBuf,
        /// Images as `export` wrote them, with the working set.
        #[arg(long)]
        images: PathBuf,
        /// How much of the working set: this share of the memory.
        #[arg(long, default_value_t = 0.05)]
        share: f64,
    },
    /// What a snapshot costs in which 1 MiB has changed, for images of several sizes.
    SmallChange {
        /// Where the stores go.
        #[arg(long)]
        dir: PathBuf,
    },
    /// A collection among a million chunks and ten thousand snapshots, while others are being stored.
    Gc {
        /// Where store and catalog go.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Latency of reads that the cache answers.
    Hits {
        /// Directory of a store that has everything.
        #[arg(long)]
        store: PathBuf,
        #[command(flatten)]
        s3: ours::S3,
        /// A snapshot's manifest.
        #[arg(long)]
        manifest: PathBuf,
        /// Directory of its images.
        #[arg(long)]
        image: PathBuf,
    },
}

fn main() -> Result<(), ours::Error> {
    let command = Args::parse().command;
    match &command {
        Command::Export { data_dir, out, snapshots } => return export::run(data_dir, out, snapshots),
        Command::Format { images } => return format::run(images),
        Command::Changed { from, to, out } => return ours::changed(from, to, out),
        _ => {}
    }
    tokio::runtime::Runtime::new()?.block_on(async {
        match &command {
            Command::Put { store, image, manifest, parent, changed } => {
                ours::put(store, image, manifest, parent.as_deref(), changed.as_deref()).await
            }
            Command::Upload { store, s3, manifests } => ours::upload(store, s3, manifests).await,
            Command::Restore { store, s3, manifest, images, share } => {
                ours::restore(store, s3, manifest, images, *share).await
            }
            Command::SmallChange { dir } => ours::small_change(dir).await,
            Command::Gc { dir } => gc::run(dir).await,
            Command::Hits { store, s3, manifest, image } => ours::hits(store, s3, manifest, image).await,
            Command::Export { .. } | Command::Format { .. } | Command::Changed { .. } => unreachable!("done above"),
        }
    })
}
