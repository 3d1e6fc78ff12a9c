use super::digest::{Digest, Digester};
use crate::limit::Key;

/// The state of a store, in shards with separate locks: `T` is a `Mutex` or an `RwLock`. One shard
/// has all the state of a caller.
pub(crate) struct Shards<T> {
    /// Their number is a power of two.
    shards: Box<[T]>,
    digester: Digester,
}

impl<T> Shards<T> {
    /// Creates at most `max` shards: the largest power of two up to `max`, at least one. `make`
    /// gets their number.
    pub(crate) fn new(max: usize, mut make: impl FnMut(usize) -> T) -> Self {
        let count = 1 << max.max(1).ilog2();
        Self {
            shards: (0..count).map(|_| make(count)).collect(),
            digester: Digester::new(),
        }
    }

    /// Returns the shard of a caller, and the caller's digest.
    pub(crate) fn of(&self, key: &Key) -> (&T, Digest) {
        let caller = self.digester.digest(key);
        (&self.shards[caller.part(self.shards.len())], caller)
    }

    /// Returns the shard of the caller with this digest.
    pub(crate) fn at(&self, caller: Digest) -> &T {
        &self.shards[caller.part(self.shards.len())]
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.shards.iter()
    }

    /// Makes the digests of all shards.
    pub(super) fn digester(&self) -> &Digester {
        &self.digester
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn shard_counts_are_powers_of_two() {
        for (max, count) in [(0, 1), (1, 1), (3, 2), (4, 4), (63, 32), (64, 64)] {
            let mut next = 0..;
            let shards = Shards::new(max, |_| next.next().unwrap());
            assert_eq!(shards.iter().len(), count);
            let mut callers = HashMap::new();
            for i in 0..1_000 * count {
                let key = Key::new(i.to_string());
                let (shard, caller) = shards.of(&key);
                assert_eq!(
                    (shard, caller),
                    shards.of(&key),
                    "a caller stays in its shard"
                );
                *callers.entry(*shard).or_insert(0) += 1;
            }
            assert!(
                callers.len() == count && callers.values().all(|n| (700..1_300).contains(n)),
                "{callers:?}"
            );
        }
    }
}
