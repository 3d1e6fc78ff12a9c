mod block;
mod deploy;
mod load;
mod requests;
mod stalls;

use super::caller::Caller;
use super::inner::Inner;
use crate::store::Store;
use crate::util::lock;

impl<S: Store> Inner<S> {
    /// Number of busy callers.
    pub(super) fn callers(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Units left in all blocks.
    pub(super) fn left(&self) -> u64 {
        let left = |caller: &Caller| caller.left();
        self.shards
            .iter()
            .map(|shard| lock(shard).values().map(left).sum::<u64>())
            .sum()
    }
}
