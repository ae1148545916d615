//! What processor this guest runs on.

use std::arch::x86_64::__cpuid;

/// "Hypervisor present" in the third word of CPUID leaf 1.
const HYPERVISOR: u32 = 1 << 31;
/// First leaf for hypervisors: its last three words are a name of twelve bytes.
const HYPERVISOR_NAME: u32 = 0x4000_0000;

/// Whether the processor is emulated by QEMU, not merely shared.
pub fn is_emulated() -> bool {
    let features = __cpuid(1);
    if features.ecx & HYPERVISOR == 0 {
        return false;
    }
    let name = __cpuid(HYPERVISOR_NAME);
    [name.ebx, name.ecx, name.edx].map(u32::to_le_bytes).concat() == b"TCGTCGTCGTCG"
}
