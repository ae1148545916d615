//! What a snapshot needs from a host: facts that must be equal where it was taken and where it is restored.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How guest instructions are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// QEMU's translator: works everywhere.
    Tcg,
    /// The host's virtualisation.
    Kvm,
}

impl Accelerator {
    /// As the VMM calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }
}

/// The facts. A device state is understood only where all but the kernel and the clock rate are the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The VMM and its full version.
    pub vmm_version: String,
    /// The machine model.
    pub machine: String,
    /// How instructions are executed.
    pub accelerator: Accelerator,
    /// The CPU model that guests see; with hardware virtualisation of the host's own model, that too.
    pub cpu_model: String,
    /// The kernel that guests boot: the first 16 hexadecimal digits of its BLAKE3 hash.
    pub kernel: String,
    /// Rate of the time stamp counter in kHz. A guest's monotonic clock goes wrong by the ratio of two hosts' rates.
    pub tsc_khz: u64,
}

/// The hash by which a kernel is told from another.
pub fn kernel_id(kernel: &Path) -> io::Result<String> {
    Ok(blake3::hash(&fs::read(kernel)?).to_hex()[..16].to_owned())
}

/// The host's CPU model, as `/proc/cpuinfo` names it.
pub fn host_cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name));
    name.unwrap_or("unknown").trim().to_owned()
}

/// Whether the CPU says that it can virtualise.
pub fn cpu_virtualises(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':').map(|(_, flags)| flags));
    flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "vmx" || flag == "svm"))
}

/// Measures the rate of the time stamp counter. Takes 50 ms; exact to some 20 ppm.
///
/// Guests have to be told: without hardware virtualisation a guest kernel can only calibrate its counter against an
/// emulated timer, which fails on a busy host, and on a machine without legacy interrupts it then hangs.
pub fn measure_tsc_khz() -> u64 {
    let (begin, begin_ticks) = moment();
    std::thread::sleep(Duration::from_millis(50));
    let (end, end_ticks) = moment();
    let nanos = (end - begin).as_nanos().max(1);
    (u128::from(end_ticks.wrapping_sub(begin_ticks)) * 1_000_000 / nanos) as u64
}

/// An instant and the counter at it: of several tries the one that nothing came between.
fn moment() -> (Instant, u64) {
    (0..16)
        .map(|_| {
            let before = ticks();
            let now = Instant::now();
            (ticks() - before, now, before)
        })
        .min_by_key(|(gap, ..)| *gap)
        .map(|(_, now, ticks)| (now, ticks))
        .expect("sixteen tries")
}

fn ticks() -> u64 {
    // SAFETY: the instruction exists on every x86-64 CPU, reads a counter and has no other effect.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualisation_is_a_whole_word_among_the_flags() {
        assert!(cpu_virtualises("processor\t: 0\nflags\t\t: fpu vmx sse\n"));
        assert!(cpu_virtualises("flags\t\t: fpu svm\n"));
        assert!(!cpu_virtualises("flags\t\t: fpu svm_lock vmxoff\n"));
        assert!(!cpu_virtualises("model name\t: vmx\n"));
        assert!(!cpu_virtualises(""));
    }

    #[test]
    fn the_counter_ticks_at_a_rate_that_a_cpu_can_have() {
        let khz = measure_tsc_khz();
        assert!((100_000..10_000_000).contains(&khz), "{khz} kHz");
    }
}
