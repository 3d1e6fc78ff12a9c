mod block;
mod deploy;
mod load;
mod requests;
mod stalls;

use super::Leased;
use super::caller::BusyCaller;
use crate::store::Store;
use crate::util::lock;

impl<S: Store> Leased<S> {
    /// Number of busy callers.
    pub(crate) fn callers(&self) -> usize {
        let shards = self.inner.shards.iter();
        shards.map(|shard| lock(shard).len()).sum()
    }

    /// Units left in all blocks.
    fn left(&self) -> u64 {
        let left = |caller: &BusyCaller| caller.left();
        let shards = self.inner.shards.iter();
        shards
            .map(|shard| lock(shard).values().map(left).sum::<u64>())
            .sum()
    }
}
