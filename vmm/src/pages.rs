//! Sets of pages of an image: which pages a guest wrote.
//!
//! A [`PageSet`] is a bit per page of an image of known size; it is built once and then only read. Pages are counted
//! from the start of the image, [`PAGE_SIZE`] bytes each.

use crate::source::PAGE_SIZE;

/// A run of pages: `first`, `first + 1`, … `count` of them, counted from the start of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    /// Number of the first page.
    pub first: u64,
    /// How many pages.
    pub count: u64,
}

impl PageRange {
    /// Where the run begins in the image, in bytes.
    pub fn offset(&self) -> u64 {
        self.first * PAGE_SIZE
    }

    /// How many bytes it has.
    pub fn len_bytes(&self) -> u64 {
        self.count * PAGE_SIZE
    }
}

/// A set of pages of one image.
#[derive(Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
    members: u64,
}

impl std::fmt::Debug for PageSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageSet({} of {} pages)", self.members, self.pages)
    }
}

impl PageSet {
    /// The empty set over an image of `pages` pages.
    pub fn new(pages: u64) -> Self {
        Self {
            words: vec![0; usize::try_from(pages.div_ceil(64)).expect("a bit per page fits in memory")],
            pages,
            members: 0,
        }
    }

    /// Adds a run of pages, which lies inside the image.
    pub fn insert(&mut self, range: PageRange) {
        assert!(range.first + range.count <= self.pages, "{range:?} lies outside an image of {} pages", self.pages);
        for page in range.first..range.first + range.count {
            let word = &mut self.words[(page / 64) as usize];
            let bit = 1 << (page % 64);
            self.members += u64::from(*word & bit == 0);
            *word |= bit;
        }
    }

    /// Whether the page belongs to the set.
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / 64) as usize] & (1 << (page % 64)) != 0
    }

    /// How many pages belong to the set.
    pub fn len(&self) -> u64 {
        self.members
    }

    /// Whether no page belongs to the set.
    pub fn is_empty(&self) -> bool {
        self.members == 0
    }

    /// How many pages of `range` belong to the set.
    pub fn count_in(&self, range: PageRange) -> u64 {
        (range.first..range.first + range.count).filter(|page| self.contains(*page)).count() as u64
    }

    /// The longest runs inside `within` whose pages all belong (`member`) or all do not belong to the set, in order.
    pub fn runs(&self, within: PageRange, member: bool) -> Vec<PageRange> {
        let mut runs: Vec<PageRange> = Vec::new();
        for page in within.first..within.first + within.count {
            if self.contains(page) != member {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.first + run.count == page => run.count += 1,
                _ => runs.push(PageRange { first: page, count: 1 }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_page_set_agrees_with_a_set_of_numbers(
            inserted in prop::collection::vec((0u64..200, 0u64..20), 0..20),
            (first, count) in (0u64..200, 0u64..100),
        ) {
            let mut set = PageSet::new(300);
            let mut model = BTreeSet::new();
            for (first, count) in inserted {
                set.insert(PageRange { first, count });
                model.extend(first..first + count);
            }
            prop_assert_eq!(set.len(), model.len() as u64);
            let within = PageRange { first, count };
            prop_assert_eq!(set.count_in(within), model.range(first..first + count).count() as u64);
            for member in [true, false] {
                let runs = set.runs(within, member);
                let covered: Vec<u64> = runs.iter().flat_map(|run| run.first..run.first + run.count).collect();
                let wanted: Vec<u64> = (first..first + count).filter(|page| model.contains(page) == member).collect();
                prop_assert_eq!(covered, wanted, "the runs hold the pages, each once, in order");
                for pair in runs.windows(2) {
                    prop_assert!(pair[0].first + pair[0].count < pair[1].first, "runs are as long as can be");
                }
            }
        }
    }
}
