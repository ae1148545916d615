//! Chunk size, grouping and dictionaries compared on images of real guests: the table behind docs/decisions/0004.
//!
//! The store's own steps (zero test, keyed BLAKE3, deduplication, zstd, index pages of 256 ids) in memory, without disk
//! and RocksDB, so that only the format differs. For each variant: bytes after each image, index and footer bytes in
//! them, speed of the first image on one and two threads, and what the recorded working set costs to fetch.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::images::{Images, RESTORED, Snapshot};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Id = [u8; 32];

const KEY: [u8; 32] = [7; 32];
/// Unit of work of a thread.
const SEGMENT: usize = 4 << 20;
/// Ids of an index page, and bytes of each.
const FANOUT: usize = 256;
const ID_BYTES: u64 = 32;
/// A pack's footer entry of a chunk, and of a frame when frames hold several.
const FOOTER_BYTES: u64 = 44;
const PACK_BYTES: u64 = 16 << 20;
/// A hole between two wanted frames that is cheaper to read than to ask again.
const GAP: u64 = 64 << 10;
const MIB: f64 = (1 << 20) as f64;

#[derive(Clone, Copy)]
struct Variant {
    chunk: usize,
    /// Plain bytes of new chunks that are compressed together.
    group: usize,
    level: i32,
    dictionary: bool,
}

/// Where a chunk's frame lies: offset and length in the stream of all packs.
type Places = HashMap<Id, (u64, u64)>;

/// Everything stored so far.
#[derive(Default)]
struct Stored {
    places: Places,
    frame_bytes: u64,
    index_pages: HashSet<Id>,
    index_bytes: u64,
    footer_bytes: u64,
}

impl Stored {
    fn total(&self) -> u64 {
        self.frame_bytes + self.index_bytes + self.footer_bytes
    }
}

/// One segment's new chunks, framed: ids, and the frames with how many of the ids each holds.
struct Framed {
    ids: Vec<Id>,
    new: Vec<Id>,
    frames: Vec<(usize, u64)>,
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks_exact(16).all(|word| word == [0; 16])
}

fn segment(
    bytes: &[u8],
    variant: Variant,
    known: &Mutex<HashSet<Id>>,
    coder: &mut zstd::bulk::Compressor<'_>,
) -> Framed {
    let mut framed = Framed { ids: Vec::new(), new: Vec::new(), frames: Vec::new() };
    let mut group = Vec::with_capacity(variant.group);
    let mut members = 0;
    let mut close = |group: &mut Vec<u8>, members: &mut usize, frames: &mut Vec<(usize, u64)>| {
        if *members > 0 {
            let len = coder.compress(group).map_or(group.len(), |frame| frame.len().min(group.len()));
            frames.push((*members, len as u64 + 8));
            group.clear();
            *members = 0;
        }
    };
    for chunk in bytes.chunks(variant.chunk) {
        if is_zero(chunk) {
            framed.ids.push([0; 32]);
            continue;
        }
        let id = *blake3::keyed_hash(&KEY, chunk).as_bytes();
        framed.ids.push(id);
        if known.lock().expect("no panic").insert(id) {
            if group.len() + chunk.len() > variant.group {
                close(&mut group, &mut members, &mut framed.frames);
            }
            group.extend_from_slice(chunk);
            members += 1;
            framed.new.push(id);
        }
    }
    close(&mut group, &mut members, &mut framed.frames);
    framed
}

/// Stores one snapshot; answers how long hashing and compressing took, seconds.
fn store(snapshot: &Snapshot, variant: Variant, threads: usize, dictionary: &[u8], stored: &mut Stored) -> f64 {
    let segments: Vec<&[u8]> = snapshot.parts().iter().flat_map(|part| part.chunks(SEGMENT)).collect();
    let known = Mutex::new(stored.places.keys().copied().collect::<HashSet<Id>>());
    let next = AtomicUsize::new(0);
    let done = Mutex::new(BTreeMap::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut coder = match variant.dictionary {
                    true => zstd::bulk::Compressor::with_dictionary(variant.level, dictionary),
                    false => zstd::bulk::Compressor::new(variant.level),
                }
                .expect("zstd works");
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(bytes) = segments.get(number) else { break };
                    let framed = segment(bytes, variant, &known, &mut coder);
                    done.lock().expect("no panic").insert(number, framed);
                }
            });
        }
    });
    let took = began.elapsed().as_secs_f64();
    let mut ids = Vec::new();
    for framed in done.into_inner().expect("no panic").into_values() {
        let mut new = framed.new.iter();
        for (members, len) in &framed.frames {
            for id in new.by_ref().take(*members) {
                stored.places.insert(*id, (stored.frame_bytes, *len));
            }
            stored.frame_bytes += len;
            // Several chunks in a frame: one entry for the frame, 34 bytes for each chunk.
            stored.footer_bytes += match *members {
                1 => FOOTER_BYTES,
                members => 12 + 34 * members as u64,
            };
        }
        ids.extend(framed.ids);
    }
    for page in ids.chunks(FANOUT) {
        let bytes: Vec<u8> = page.concat();
        if !is_zero(&bytes) && stored.index_pages.insert(*blake3::hash(&bytes).as_bytes()) {
            stored.index_bytes += page.len() as u64 * ID_BYTES + FOOTER_BYTES;
        }
    }
    took
}

/// Requests and bytes to fetch the working set from packs.
fn fetch(images: &Images, variant: Variant, stored: &Stored) -> (usize, u64) {
    let parts = images.snapshots[RESTORED].parts();
    let mut frames = HashSet::new();
    for wanted in images.first_reads(0.05) {
        let start = usize::try_from(wanted.start).expect("fits") / variant.chunk * variant.chunk;
        let end =
            usize::try_from(wanted.end).expect("fits").next_multiple_of(variant.chunk).min(parts[wanted.part].len());
        for chunk in parts[wanted.part][start..end].chunks(variant.chunk) {
            if !is_zero(chunk) {
                frames.extend(stored.places.get(blake3::keyed_hash(&KEY, chunk).as_bytes()).copied());
            }
        }
    }
    let mut frames: Vec<(u64, u64)> = frames.into_iter().collect();
    frames.sort_unstable();
    let (mut requests, mut bytes, mut end) = (0, 0, None::<u64>);
    for (offset, len) in frames {
        match end {
            Some(end) if offset - end <= GAP && offset / PACK_BYTES == end / PACK_BYTES => bytes += offset - end + len,
            _ => {
                requests += 1;
                bytes += len;
            }
        }
        end = Some(offset + len);
    }
    (requests, bytes)
}

fn train(snapshot: &Snapshot, chunk: usize) -> Result<Vec<u8>, Error> {
    let all = snapshot.parts().into_iter().flat_map(|part| part.chunks(chunk)).filter(|chunk| !is_zero(chunk));
    let samples: Vec<&[u8]> = all.step_by((16 * 1024 / chunk).max(1) * 7).take(4000).collect();
    Ok(zstd::dict::from_samples(&samples, 112 << 10)?)
}

/// Prints the table.
pub fn run(dir: &Path) -> Result<(), Error> {
    let images = Images::open(dir)?;
    const K: usize = 1 << 10;
    let variant = |chunk, group, level, dictionary| Variant { chunk: chunk * K, group: group * K, level, dictionary };
    let mut variants = Vec::new();
    for chunk in [4, 16, 64, 256, 1024] {
        variants.push(variant(chunk, chunk, 3, false));
        variants.push(variant(chunk, chunk, 3, true));
    }
    for (chunk, group) in [(4, 16), (4, 64), (4, 128), (4, 256), (16, 64), (16, 128), (16, 256), (64, 256)] {
        variants.push(variant(chunk, group, 3, false));
    }
    variants.push(variant(4, 64, 3, true));
    for level in [-5, -1, 1, 2, 5, 7] {
        variants.push(variant(4, 64, level, false));
        variants.push(variant(4, 128, level, false));
    }
    println!(
        "| chunk KiB | frame KiB | level | dict | MiB after 1 | 2 | 3 | 4 | index+footer MiB | MB/s 1 thread | 2 threads | set: MiB | requests |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let plain: usize =
        images.snapshots[0].parts().iter().flat_map(|part| part.chunks(4096)).filter(|page| !is_zero(page)).count()
            * 4096;
    println!(
        "<!-- image 1 has {:.1} MiB that are not zero; the working set {:.1} MiB -->",
        plain as f64 / MIB,
        images.first_reads(0.05).iter().map(|wanted| wanted.end - wanted.start).sum::<u64>() as f64 / MIB
    );
    for variant in variants {
        let dictionary = if variant.dictionary { train(&images.snapshots[0], variant.chunk)? } else { Vec::new() };
        let one = store(&images.snapshots[0], variant, 1, &dictionary, &mut Stored::default());
        let mut stored = Stored::default();
        let mut after = Vec::new();
        let mut two = 0.0;
        for (number, snapshot) in images.snapshots.iter().enumerate() {
            let took = store(snapshot, variant, 2, &dictionary, &mut stored);
            if number == 0 {
                two = took;
            }
            after.push(format!("{:.1}", stored.total() as f64 / MIB));
        }
        let (requests, bytes) = fetch(&images, variant, &stored);
        println!(
            "| {} | {} | {} | {} | {} | {:.1} | {:.0} | {:.0} | {:.1} | {requests} |",
            variant.chunk / K,
            variant.group / K,
            variant.level,
            if variant.dictionary { "yes" } else { "no" },
            after.join(" | "),
            (stored.index_bytes + stored.footer_bytes) as f64 / MIB,
            plain as f64 / 1e6 / one,
            plain as f64 / 1e6 / two,
            bytes as f64 / MIB,
        );
    }
    Ok(())
}
