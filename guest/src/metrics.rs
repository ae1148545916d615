//! `/metrics`: what this guest uses of its machine.

use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// One reading. Sizes are bytes.
#[derive(Debug, Serialize)]
pub struct Metrics {
    /// Unix seconds.
    pub ts: u64,
    /// Processors.
    pub cpu_count: usize,
    /// Their use since the reading before this one (the first: since boot), percent of all of them.
    pub cpu_used_pct: f64,
    /// All memory.
    pub mem_total: u64,
    /// Memory that cannot be had back.
    pub mem_used: u64,
    /// Page cache.
    pub mem_cache: u64,
    /// Root file system: all.
    pub disk_total: u64,
    /// Root file system: used.
    pub disk_used: u64,
}

/// Busy and total ticks at the last reading.
static LAST: Mutex<(u64, u64)> = Mutex::new((0, 0));

/// Reads them now.
pub async fn read() -> io::Result<Metrics> {
    let stat = tokio::fs::read_to_string("/proc/stat").await?;
    let memory = tokio::fs::read_to_string("/proc/meminfo").await?;
    let disk = nix::sys::statvfs::statvfs("/")?;
    let (busy, total) = ticks(&stat);
    let (busy_before, total_before) = {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *last, (busy, total))
    };
    let span = total.saturating_sub(total_before);
    let used = busy.saturating_sub(busy_before);
    let field = |name: &str| kib(&memory, name) * 1024;
    let block = disk.fragment_size();
    Ok(Metrics {
        ts: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        cpu_count: std::thread::available_parallelism()?.get(),
        cpu_used_pct: if span == 0 { 0.0 } else { (used as f64 * 10_000.0 / span as f64).round() / 100.0 },
        mem_total: field("MemTotal:"),
        mem_used: field("MemTotal:").saturating_sub(field("MemAvailable:")),
        mem_cache: field("Cached:"),
        disk_total: disk.blocks() * block,
        disk_used: (disk.blocks() - disk.blocks_free()) * block,
    })
}

/// Busy and all ticks of the line `cpu` of `/proc/stat` (`proc(5)`): user, nice, system, idle, iowait, …
fn ticks(stat: &str) -> (u64, u64) {
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|tick| tick.parse().ok()).collect();
    let total = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    (total - idle, total)
}

/// A line of `/proc/meminfo`, in KiB.
fn kib(memory: &str, name: &str) -> u64 {
    let line = memory.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()).and_then(|value| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_waiting_are_not_use() {
        assert_eq!(ticks("cpu  10 1 5 80 4 0 0 0 7 0\ncpu0 1 1 1 1\n"), (16, 100));
    }

    #[test]
    fn memory_lines_are_found_by_whole_name() {
        let text = "MemTotal:  1000 kB\nSwapCached: 7 kB\nCached:  300 kB\n";
        assert_eq!((kib(text, "Cached:"), kib(text, "MemAvailable:")), (300, 0));
    }
}
