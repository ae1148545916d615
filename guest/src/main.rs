//! The one binary inside every guest, in one of three modes.
//!
//! ```text
//! kernel ─► /init (initrd)          modules, root file system, switch root
//!             └─exec─► `init`       PID 1: mounts, network, cgroup, reaps orphans
//!                        └─spawn─► `agent`   the three ports; started again if it dies
//! ```
//!
//! The root file system of a template does not contain this file: stage one copies it from the initial RAM disk to
//! `/run`, so a template never holds an old agent.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        // The kernel starts /init with whatever it did not understand of its command line.
        _ if std::process::id() == 1 && std::path::Path::new("/modules").is_dir() => snapyard_guest::boot::initrd(),
        Some("init") => snapyard_guest::boot::init(),
        Some("agent") => snapyard_guest::agent(args),
        _ => {
            eprintln!(
                "usage: snapyard-guest init | agent [--guest] [--control ADDR] [--agent ADDR] [--interpreter ADDR]"
            );
            ExitCode::from(2)
        }
    }
}
