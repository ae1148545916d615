//! Which blocks a layer of a disk holds: two bits per block, kept only where something was written.

use std::ops::Range;

/// Bytes in a block of a disk: the unit in which layers hold data.
pub const BLOCK_SIZE: u64 = 4096;

const GROUP_BLOCKS: u64 = 4096;
const WORDS: usize = (GROUP_BLOCKS / 64) as usize;

/// What a layer knows of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// Nothing: the layer below knows.
    Absent,
    /// Its bytes are in the layer's file.
    Data,
    /// It is all zeros.
    Zero,
}

#[derive(Debug, Clone)]
struct Group {
    data: [u64; WORDS],
    zero: [u64; WORDS],
}

/// The state of each block of one layer. Empty regions of 16 MiB cost a pointer each.
#[derive(Debug, Clone)]
pub struct BlockMap {
    groups: Vec<Option<Box<Group>>>,
    blocks: u64,
    data_blocks: u64,
    zero_blocks: u64,
}

impl BlockMap {
    /// A map of `blocks` absent blocks.
    pub fn new(blocks: u64) -> Self {
        let groups = blocks.div_ceil(GROUP_BLOCKS) as usize;
        Self { groups: vec![None; groups], blocks, data_blocks: 0, zero_blocks: 0 }
    }

    /// How many blocks have bytes in the file.
    pub fn data_blocks(&self) -> u64 {
        self.data_blocks
    }

    /// Whether the layer knows nothing at all.
    pub fn is_empty(&self) -> bool {
        self.data_blocks == 0 && self.zero_blocks == 0
    }

    /// The state of one block.
    pub fn get(&self, block: u64) -> BlockState {
        let Some(Some(group)) = self.groups.get((block / GROUP_BLOCKS) as usize) else { return BlockState::Absent };
        let (word, bit) = position(block);
        match (group.data[word] & bit != 0, group.zero[word] & bit != 0) {
            (true, _) => BlockState::Data,
            (_, true) => BlockState::Zero,
            _ => BlockState::Absent,
        }
    }

    /// Notes that blocks hold data, or are zeros.
    pub fn set(&mut self, blocks: Range<u64>, state: BlockState) {
        for block in blocks.start..blocks.end.min(self.blocks) {
            match self.get(block) {
                BlockState::Absent => {}
                BlockState::Data => self.data_blocks -= 1,
                BlockState::Zero => self.zero_blocks -= 1,
            }
            let slot = &mut self.groups[(block / GROUP_BLOCKS) as usize];
            let group = slot.get_or_insert_with(|| Box::new(Group { data: [0; WORDS], zero: [0; WORDS] }));
            let (word, bit) = position(block);
            group.data[word] &= !bit;
            group.zero[word] &= !bit;
            match state {
                BlockState::Absent => {}
                BlockState::Data => {
                    group.data[word] |= bit;
                    self.data_blocks += 1;
                }
                BlockState::Zero => {
                    group.zero[word] |= bit;
                    self.zero_blocks += 1;
                }
            }
        }
    }

    /// The runs of blocks that the layer knows, in order, each with its state.
    pub fn known_runs(&self) -> Vec<(Range<u64>, BlockState)> {
        let mut runs: Vec<(Range<u64>, BlockState)> = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            if group.is_none() {
                continue;
            }
            let first = number as u64 * GROUP_BLOCKS;
            for block in first..(first + GROUP_BLOCKS).min(self.blocks) {
                let state = self.get(block);
                match runs.last_mut() {
                    _ if state == BlockState::Absent => {}
                    Some((run, same)) if *same == state && run.end == block => run.end = block + 1,
                    _ => runs.push((block..block + 1, state)),
                }
            }
        }
        runs
    }

    /// This map with all that `upper` knows on top of it.
    pub fn merged_with(&self, upper: &Self) -> Self {
        let mut merged = self.clone();
        for (run, state) in upper.known_runs() {
            merged.set(run, state);
        }
        merged
    }
}

fn position(block: u64) -> (usize, u64) {
    let within = block % GROUP_BLOCKS;
    ((within / 64) as usize, 1 << (within % 64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_map_equals_a_plain_vector(
            steps in prop::collection::vec((0u64..9000, 1u64..400, 0u8..3), 0..40),
            split in 0usize..40,
        ) {
            let blocks = 9000;
            let states = [BlockState::Absent, BlockState::Data, BlockState::Zero];
            let mut model = vec![BlockState::Absent; blocks as usize];
            let (mut lower, mut upper) = (BlockMap::new(blocks), BlockMap::new(blocks));
            for (number, (first, count, state)) in steps.into_iter().enumerate() {
                let state = states[state as usize];
                let range = first..(first + count).min(blocks);
                // The upper layer never forgets a block: absence there means "as below".
                if number >= split && state == BlockState::Absent {
                    continue;
                }
                model[range.start as usize..range.end as usize].fill(state);
                if number < split { lower.set(range, state) } else { upper.set(range, state) }
            }
            let merged = lower.merged_with(&upper);
            for (block, expected) in model.iter().enumerate() {
                prop_assert_eq!(merged.get(block as u64), *expected);
            }
            let count = |state| model.iter().filter(|s| **s == state).count() as u64;
            prop_assert_eq!(merged.data_blocks(), count(BlockState::Data));
            prop_assert_eq!(merged.is_empty(), model.iter().all(|s| *s == BlockState::Absent));
            let known: u64 = merged.known_runs().iter().map(|(run, _)| run.end - run.start).sum();
            prop_assert_eq!(known, count(BlockState::Data) + count(BlockState::Zero));
        }
    }
}
