//! Which accelerator works here: found out by trying, never by the presence of `/dev/kvm`.
//!
//! There are hosts whose `/dev/kvm` is emulated without hardware support, on which ordinary guest kernels hang. So: the
//! CPU must say that it can virtualise, the device must open, and a guest kernel must come up on it within seconds.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::DriverError;
use crate::facts::{Accelerator, cpu_virtualises};

/// How the accelerator is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AcceleratorChoice {
    /// Hardware virtualisation if it works, else translation.
    #[default]
    Auto,
    /// This one.
    Only(Accelerator),
}

/// A kernel without anything to run panics, and `panic=-1` turns that into the end of the VMM.
const TRIAL: Duration = Duration::from_secs(10);

/// Chooses. Blocks for as long as a trial takes.
pub fn choose(choice: AcceleratorChoice, program: &Path, kernel: &Path) -> Result<Accelerator, DriverError> {
    let trial = || kvm_works(program, kernel);
    match choice {
        AcceleratorChoice::Only(Accelerator::Tcg) => Ok(Accelerator::Tcg),
        AcceleratorChoice::Only(Accelerator::Kvm) => match trial() {
            Ok(()) => Ok(Accelerator::Kvm),
            Err(reason) => Err(DriverError::new("use KVM", reason)),
        },
        AcceleratorChoice::Auto => Ok(match trial() {
            Ok(()) => Accelerator::Kvm,
            Err(reason) => {
                tracing::info!(%reason, "no hardware virtualisation");
                Accelerator::Tcg
            }
        }),
    }
}

fn kvm_works(program: &Path, kernel: &Path) -> Result<(), String> {
    if !cpu_virtualises(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()) {
        return Err("the CPU does not virtualise".into());
    }
    if let Err(cause) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Err(format!("/dev/kvm: {cause}"));
    }
    let mut child = Command::new(program)
        .args(["-M", "microvm,acpi=on", "-accel", "kvm", "-cpu", "host", "-m", "128M", "-no-reboot"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"])
        .args(["-append", "console=ttyS0 panic=-1 reboot=t", "-kernel"])
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|cause| format!("the trial did not start: {cause}"))?;
    let mut output = child.stdout.take().expect("it is piped");
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        // An error ends the text; what is there decides.
        let _ = output.read_to_end(&mut text);
        text
    });
    let begun = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if begun.elapsed() < TRIAL => thread::sleep(Duration::from_millis(20)),
            Ok(None) => break Err(format!("a guest kernel was not up within {TRIAL:?}")),
            Err(cause) => break Err(cause.to_string()),
        }
    };
    if ended.is_err() {
        // It may have ended just now.
        let _ = child.kill();
        let _ = child.wait();
    }
    let text = reader.join().unwrap_or_default();
    let status = ended?;
    let booted = text.windows(b"Linux version".len()).any(|window| window == b"Linux version");
    if status.success() && booted { Ok(()) } else { Err(format!("the trial guest ended with {status}")) }
}
