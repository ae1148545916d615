//! What becomes of a pack: a pure function of its row, of whether a mark found it used, and of the time.
//!
//! ```text
//!                     used            unused
//!   live              keep            condemn
//!   condemned         restore         doom, if condemned for the grace period before the mark began; else keep
//!   doomed            alarm           delete
//!   gone              alarm           purge, if gone for the tombstone's time; else keep
//! ```

use crate::catalog::{PackRow, PackState};

/// Times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// A pack is condemned at least this long before it is doomed; an object without a snapshot is left alone this long.
    pub grace_ms: i64,
    /// A tombstone stays this long: longer than any request can be under way.
    pub tombstone_ms: i64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { grace_ms: 3600 * 1000, tombstone_ms: 7 * 24 * 3600 * 1000 }
    }
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Keep,
    /// Live to condemned.
    Condemn,
    /// Condemned to live.
    Restore,
    /// Condemned to doomed.
    Doom,
    /// Delete the object of what is doomed.
    Delete,
    /// Remove the row of what is gone.
    Purge,
    /// Touch nothing, and say so: a snapshot names what must not be named any more.
    Alarm,
}

impl Policy {
    /// `row`: as it was read before the mark began at `mark_unix_ms`. `used`: whether the mark found it in a manifest.
    pub fn judge(&self, row: &PackRow, used: bool, mark_unix_ms: i64) -> Verdict {
        let for_ms = mark_unix_ms.saturating_sub(row.since_unix_ms);
        match (row.state, used) {
            (PackState::Live, true) => Verdict::Keep,
            (PackState::Live, false) => Verdict::Condemn,
            (PackState::Condemned, true) => Verdict::Restore,
            (PackState::Condemned, false) if for_ms > 0 && for_ms >= self.grace_ms => Verdict::Doom,
            (PackState::Doomed, false) => Verdict::Delete,
            (PackState::Gone, false) if for_ms >= self.tombstone_ms => Verdict::Purge,
            (PackState::Doomed | PackState::Gone, true) => Verdict::Alarm,
            (PackState::Condemned | PackState::Gone, false) => Verdict::Keep,
        }
    }

    /// Whether an object first seen without a snapshot at `first_seen_unix_ms` may be deleted.
    pub fn orphan_is_over(&self, first_seen_unix_ms: i64, now_unix_ms: i64) -> bool {
        now_unix_ms.saturating_sub(first_seen_unix_ms) >= self.grace_ms
    }

    /// Whether the mark of an object that was not seen again is of no use any more.
    pub fn mark_is_stale(&self, first_seen_unix_ms: i64, now_unix_ms: i64) -> bool {
        now_unix_ms.saturating_sub(first_seen_unix_ms) >= self.tombstone_ms.max(self.grace_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::PackId;

    fn row(state: PackState, since_unix_ms: i64) -> PackRow {
        PackRow { id: PackId([1; 32]), size_bytes: 1, chunks: 1, state, created_unix_ms: 0, since_unix_ms }
    }

    fn state() -> impl Strategy<Value = PackState> {
        prop::sample::select(vec![PackState::Live, PackState::Condemned, PackState::Doomed, PackState::Gone])
    }

    fn next(state: PackState, verdict: Verdict) -> PackState {
        match verdict {
            Verdict::Condemn => PackState::Condemned,
            Verdict::Restore => PackState::Live,
            Verdict::Doom => PackState::Doomed,
            Verdict::Delete => PackState::Gone,
            Verdict::Keep | Verdict::Purge | Verdict::Alarm => state,
        }
    }

    proptest! {
        #[test]
        fn what_is_used_never_comes_nearer_to_its_end(
            state in state(), since in any::<i64>(), at in any::<i64>(), grace_ms in 0..10_000i64, tombstone_ms in 0..10_000i64
        ) {
            let verdict = Policy { grace_ms, tombstone_ms }.judge(&row(state, since), true, at);
            prop_assert!(matches!(verdict, Verdict::Keep | Verdict::Restore | Verdict::Alarm), "{verdict:?}");
        }

        #[test]
        fn what_was_condemned_by_a_mark_is_not_doomed_by_it_nor_before_the_grace_period(
            at in 0..i64::MAX / 2, later in -10_000..10_000i64, grace_ms in 0..5_000i64
        ) {
            let policy = Policy { grace_ms, tombstone_ms: 0 };
            // Condemned while, or after, the mark of `at` was read: its row's time is not before that.
            prop_assert_eq!(policy.judge(&row(PackState::Condemned, at), false, at), Verdict::Keep);
            let verdict = policy.judge(&row(PackState::Condemned, at), false, at + later);
            prop_assert_eq!(verdict == Verdict::Doom, later > 0 && later >= grace_ms);
        }

        #[test]
        fn a_pack_that_nobody_uses_ends_within_a_few_cycles_and_one_that_somebody_uses_does_not(
            uses in prop::collection::vec(any::<bool>(), 0..20), grace_ms in 0..5_000i64, cycle_ms in 1..5_000i64
        ) {
            let policy = Policy { grace_ms, tombstone_ms: 10_000 };
            let mut pack = row(PackState::Live, 0);
            let mut now = 0;
            let step = |pack: &mut PackRow, used, now| {
                let verdict = policy.judge(pack, used, now);
                let state = next(pack.state, verdict);
                if state != pack.state {
                    *pack = row(state, now);
                }
                verdict
            };
            for used in uses {
                now += cycle_ms;
                let before = pack.state;
                // The rules of commits: what is not live gets no new use.
                let used = used && before == PackState::Live;
                step(&mut pack, used, now);
                if used {
                    prop_assert_eq!(pack.state, PackState::Live);
                }
            }
            let enough = 4 + (grace_ms + 10_000) / cycle_ms + 2;
            let purged = (0..enough).any(|_| {
                now += cycle_ms;
                step(&mut pack, false, now) == Verdict::Purge
            });
            prop_assert!(purged, "{pack:?}");
        }
    }

    #[test]
    fn a_clock_that_went_back_dooms_and_purges_nothing() {
        let policy = Policy { grace_ms: 0, tombstone_ms: 0 };
        assert_eq!(policy.judge(&row(PackState::Condemned, 100), false, 99), Verdict::Keep);
        assert_eq!(policy.judge(&row(PackState::Gone, 100), false, 99), Verdict::Keep);
        assert!(!policy.orphan_is_over(100, 99));
    }
}
