//! What a virtual machine looks like from inside: its shape, and the ports at which it can be reached.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::source::PAGE_SIZE;

/// The sizes of a virtual machine. A snapshot can be restored only into a machine of the shape that it was taken of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in bytes, a multiple of 1 MiB.
    pub memory_bytes: u64,
    /// Size of the disk in bytes, a multiple of 4096.
    pub disk_bytes: u64,
}

const MIB: u64 = 1 << 20;

/// A shape that no machine can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{shape}: {reason}")]
pub struct ShapeError {
    /// The shape.
    pub shape: Shape,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl Shape {
    /// Checks that a machine can have this shape.
    pub fn check(self) -> Result<Self, ShapeError> {
        let reason = if !(1..=64).contains(&self.vcpus) {
            "1 to 64 virtual CPUs are possible"
        } else if self.memory_bytes < 64 * MIB || !self.memory_bytes.is_multiple_of(MIB) {
            "memory is at least 64 MiB, in whole MiB"
        } else if self.disk_bytes == 0 || !self.disk_bytes.is_multiple_of(PAGE_SIZE) || self.disk_bytes > 1 << 50 {
            "the disk is 4 KiB to 1 PiB, in whole pages"
        } else {
            return Ok(self);
        };
        Err(ShapeError { shape: self, reason })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vcpus, memory_bytes, disk_bytes } = self;
        write!(f, "{vcpus} CPUs, {} MiB memory, {} MiB disk", memory_bytes / MIB, disk_bytes / MIB)
    }
}

/// A TCP port inside the guest that can be reached from the host's loopback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GuestPort {
    /// The agent's control interface, for the node alone.
    Control,
    /// The agent, as the SDKs speak to it.
    Agent,
    /// The code interpreter.
    Interpreter,
}

impl GuestPort {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Control, Self::Agent, Self::Interpreter];

    /// The number inside the guest.
    pub fn number(self) -> u16 {
        match self {
            Self::Control => 49982,
            Self::Agent => 49983,
            Self::Interpreter => 49999,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_shapes_are_refused_with_a_reason() {
        let good = Shape { vcpus: 2, memory_bytes: 512 * MIB, disk_bytes: 1 << 30 };
        assert_eq!(good.check(), Ok(good));
        for (bad, word) in [
            (Shape { vcpus: 0, ..good }, "CPUs"),
            (Shape { vcpus: 65, ..good }, "CPUs"),
            (Shape { memory_bytes: 32 * MIB, ..good }, "memory"),
            (Shape { memory_bytes: 512 * MIB + 4096, ..good }, "memory"),
            (Shape { disk_bytes: 0, ..good }, "disk"),
            (Shape { disk_bytes: 4097, ..good }, "disk"),
        ] {
            let error = bad.check().expect_err("an impossible shape");
            assert!(error.reason.contains(word), "{error}");
        }
    }
}
