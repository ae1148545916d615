//! Safeguards that a test can switch off, on its own thread, to see that their absence is noticed.

use std::cell::Cell;

/// A safeguard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A commit takes packs in whatever state.
    CommitAnyPack,
    /// A collection dooms what it has just condemned.
    OneMark,
    /// A chunk is not compared with its id.
    Unverified,
}

thread_local! {
    static OFF: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Whether the safeguard is off on this thread.
pub(crate) fn is_on(mutant: Mutant) -> bool {
    OFF.get() == Some(mutant)
}

/// Switches one safeguard off, or all on.
pub(crate) fn set(mutant: Option<Mutant>) {
    OFF.set(mutant);
}
