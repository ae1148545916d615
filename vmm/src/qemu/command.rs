//! QEMU's command line.

use std::os::fd::RawFd;

use crate::facts::Accelerator;
use crate::shape::{GuestPort, Shape};

/// What a guest boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boot {
    /// Descriptor of the kernel.
    pub kernel: RawFd,
    /// Descriptor of the initial RAM disk.
    pub initrd: RawFd,
    /// The kernel's command line.
    pub cmdline: String,
}

/// All that the command line depends on. Descriptors are numbers in the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The machine's sizes.
    pub shape: Shape,
    /// How instructions are executed.
    pub accelerator: Accelerator,
    /// QEMU's name of the CPU model.
    pub cpu: &'static str,
    /// Size of the buffer of translated code.
    pub tcg_buffer_mib: u32,
    /// Whether the guest reaches the outside.
    pub egress: bool,
    /// What to boot; without it the machine waits for a state.
    pub boot: Option<Boot>,
    /// The placeholder of guest memory.
    pub memory: RawFd,
    /// The socket of the control channel.
    pub control: RawFd,
    /// The socket of the serial port.
    pub console: RawFd,
    /// The socket of the disk server.
    pub disk: RawFd,
}

impl Launch {
    /// The arguments.
    ///
    /// - `acpi=on`: the cloud kernel finds virtio devices only through ACPI.
    /// - `share=on`: only memory that QEMU takes for shared is left out of the saved state.
    /// - `-S`: the node says when a guest runs.
    /// - `cyls`, `heads`, `secs`: without them QEMU reads the disk to guess them, when a waiting machine has none yet.
    /// - `werror`, `rerror`: the guest is told of a failed disk request, instead of stopping without a word.
    /// - `hostfwd` to port 0: the kernel picks a free port; QEMU is asked for it afterwards.
    /// - `guest_announce=off`: a restored guest has no switch to tell where it is now.
    /// - `restrict=on`: nothing but the forwarded ports; `ipv6=off`: nor a second way in or out.
    /// - `spawn=deny` and the like: a QEMU that a guest took over can start nothing.
    pub fn arguments(&self) -> Vec<String> {
        let Self { shape, cpu, memory, control, console, disk, .. } = self;
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("-M", "microvm,acpi=on,memory-backend=mem".into());
        add(
            "-accel",
            match self.accelerator {
                Accelerator::Tcg => format!("tcg,thread=multi,tb-size={}", self.tcg_buffer_mib),
                Accelerator::Kvm => "kvm".into(),
            },
        );
        add("-cpu", (*cpu).into());
        add("-smp", shape.vcpus.to_string());
        add("-m", format!("{}M", shape.memory_bytes >> 20));
        add(
            "-object",
            format!("memory-backend-file,id=mem,size={},mem-path=/proc/self/fd/{memory},share=on", shape.memory_bytes),
        );
        add("-display", "none".into());
        add("-chardev", format!("socket,id=console,fd={console}"));
        add("-serial", "chardev:console".into());
        add("-chardev", format!("socket,id=control,fd={control}"));
        add("-mon", "chardev=control,mode=control".into());
        add("-blockdev", format!("driver=nbd,node-name=disk,server.type=fd,server.str={disk},discard=unmap"));
        add(
            "-device",
            format!(
                "virtio-blk-device,drive=disk,cyls={},heads=16,secs=63,werror=report,rerror=report",
                cylinders(shape.disk_bytes)
            ),
        );
        add("-netdev", self.network());
        add("-device", "virtio-net-device,netdev=net,mac=52:54:00:12:34:56,guest_announce=off".into());
        add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".into());
        match &self.boot {
            Some(Boot { kernel, initrd, cmdline }) => {
                add("-kernel", format!("/proc/self/fd/{kernel}"));
                add("-initrd", format!("/proc/self/fd/{initrd}"));
                add("-append", cmdline.clone());
            }
            None => add("-incoming", "defer".into()),
        }
        arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot", "-S"].map(String::from));
        arguments
    }

    fn network(&self) -> String {
        let restrict = if self.egress { "off" } else { "on" };
        let mut network = format!("user,id=net,ipv6=off,restrict={restrict}");
        for port in GuestPort::ALL {
            network.push_str(&format!(",hostfwd=tcp:127.0.0.1:0-:{}", port.number()));
        }
        network
    }
}

/// Cylinders of 16 heads and 63 sectors, as many as QEMU allows. No guest of today looks at them.
fn cylinders(disk_bytes: u64) -> u64 {
    (disk_bytes / 512 / (16 * 63)).clamp(1, 16383)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(boot: Option<Boot>) -> Launch {
        Launch {
            shape: Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 1 << 30 },
            accelerator: Accelerator::Tcg,
            cpu: "max",
            tcg_buffer_mib: 64,
            egress: false,
            boot,
            memory: 10,
            control: 11,
            console: 12,
            disk: 13,
        }
    }

    fn value<'a>(arguments: &'a [String], option: &str) -> Option<&'a str> {
        let at = arguments.iter().position(|argument| argument == option)?;
        arguments.get(at + 1).map(String::as_str)
    }

    #[test]
    fn a_waiting_machine_differs_from_a_booting_one_only_in_what_it_starts_from() {
        let boot = Boot { kernel: 14, initrd: 15, cmdline: "quiet a=b,c".into() };
        let (booting, waiting) = (launch(Some(boot)).arguments(), launch(None).arguments());
        assert_eq!(value(&booting, "-append"), Some("quiet a=b,c"));
        assert_eq!(value(&booting, "-kernel"), Some("/proc/self/fd/14"));
        assert_eq!(value(&waiting, "-incoming"), Some("defer"));
        let without = |arguments: &[String], options: &[&str]| {
            let mut rest = arguments.to_vec();
            for option in options {
                let at = rest.iter().position(|argument| argument == option).expect("the option is there");
                rest.drain(at..at + 2);
            }
            rest
        };
        // The devices must be the same, or the state does not fit.
        assert_eq!(without(&booting, &["-kernel", "-initrd", "-append"]), without(&waiting, &["-incoming"]));
    }

    #[test]
    fn guests_are_shut_in_unless_egress_is_allowed() {
        let shut = launch(None);
        let open = Launch { egress: true, ..shut.clone() };
        assert!(value(&shut.arguments(), "-netdev").expect("a network").contains("restrict=on"));
        assert!(value(&open.arguments(), "-netdev").expect("a network").contains("restrict=off"));
        assert!(value(&shut.arguments(), "-sandbox").expect("a sandbox").contains("spawn=deny"));
    }

    #[test]
    fn cylinders_stay_within_what_qemu_accepts() {
        assert_eq!(cylinders(4096), 1);
        assert_eq!(cylinders(1 << 50), 16383);
    }
}
