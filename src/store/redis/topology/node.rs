use std::num::NonZeroU32;

/// The number of a server that has a part of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(NonZeroU32);

impl Node {
    /// The only node, without a cluster.
    pub(super) const ONLY: Self = Self(NonZeroU32::MIN);

    pub(crate) fn new(index: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index))
    }

    pub(super) fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}
