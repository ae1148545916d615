//! Random bytes for what must never be made twice.
//!
//! Under simulation (tests only) they come from the seed, so that keys sort the same way in every run of it.

/// Fresh random bytes from the system.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[cfg(test)]
    if seeded::fill(&mut bytes) {
        return bytes;
    }
    getrandom::fill(&mut bytes).expect("the system has randomness: without it nothing here has started");
    bytes
}

#[cfg(test)]
pub(crate) mod seeded {
    use std::cell::Cell;

    thread_local! {
        static STATE: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }

    /// From now on this thread's randomness depends on `seed` alone.
    pub(crate) fn start(seed: u64) {
        STATE.set(Some((seed, 0)));
    }

    pub(super) fn fill(bytes: &mut [u8]) -> bool {
        let Some((seed, count)) = STATE.get() else { return false };
        STATE.set(Some((seed, count + 1)));
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(&count.to_le_bytes()).finalize_xof().fill(bytes);
        true
    }
}
