//! Shards of a store's state, found by a hash of the caller's key.

use std::hash::BuildHasher;

use siphasher::sip128::{Hash128, SipHasher13};

use super::RandomState;
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

    /// Returns the index of the shard of the caller with this digest.
    pub(crate) fn index(&self, caller: Digest) -> usize {
        caller.part(self.shards.len())
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.shards.iter()
    }

    /// Makes the digests of all shards.
    pub(crate) fn digester(&self) -> &Digester {
        &self.digester
    }
}

/// A 128-bit hash of a key. It takes less memory than the key, and a check hashes its key once for
/// all its lookups.
///
/// The hash is seeded with a secret, so callers cannot choose keys that share a digest or that
/// crowd one part of a map. The probability that any two of a million keys share a digest is 1 in
/// 10^27.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Digest([u64; 2]);

impl Digest {
    /// Derives the digest of one count of the caller with the digest `self`.
    pub(crate) fn of_count(self, count: u64) -> Self {
        let Self([first, second]) = self;
        Self([first ^ count, second])
    }

    /// Returns the caller's shard, of `parts` shards, a power of two. It uses the word that the
    /// maps do not hash: with the other word, all keys of a shard would share their low bits and
    /// collide in the shard's map.
    pub(crate) fn part(self, parts: usize) -> usize {
        self.0[1] as usize & (parts - 1)
    }

    /// The hash for a table.
    pub(crate) fn hash(self) -> u64 {
        self.0[0]
    }
}

/// Creates digests. Each digester has its own seed, which its clones share.
#[derive(Clone)]
pub(crate) struct Digester(SipHasher13);

impl Digester {
    pub(crate) fn new() -> Self {
        let random = RandomState::new();
        Self(SipHasher13::new_with_keys(
            random.hash_one(0),
            random.hash_one(1),
        ))
    }

    #[inline]
    pub(crate) fn digest(&self, key: &Key) -> Digest {
        let Hash128 { h1, h2 } = self.0.hash(key.as_bytes());
        Digest([h1, h2])
    }

    /// The digest of bytes that are no key of a caller alone.
    pub(crate) fn digest_of(&self, bytes: &[u8]) -> Digest {
        let Hash128 { h1, h2 } = self.0.hash(bytes);
        Digest([h1, h2])
    }

    /// The digest of two keys, in this order.
    pub(crate) fn pair(&self, first: &Key, second: &Key) -> Digest {
        // No key contains the byte 0xff, so `a, bc` and `ab, c` differ.
        let Hash128 { h1, h2 } = self
            .0
            .hash(&[first.as_bytes(), second.as_bytes()].join(&0xff));
        Digest([h1, h2])
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

    #[test]
    fn keys_counts_and_pairs_stay_apart() {
        let digester = Digester::new();
        let (a, ab, b, bc, c) = (
            Key::new("a"),
            Key::new("ab"),
            Key::new("b"),
            Key::new("bc"),
            Key::new("c"),
        );
        assert_eq!(digester.digest(&a), digester.clone().digest(&Key::new("a")));
        let digests = [
            digester.digest(&a),
            digester.digest(&b),
            digester.digest(&a).of_count(1),
            digester.digest(&a).of_count(2),
            digester.pair(&a, &b),
            digester.pair(&b, &a),
            digester.pair(&a, &bc),
            digester.pair(&ab, &c),
        ];
        for (i, digest) in digests.iter().enumerate() {
            assert_eq!(digests.iter().position(|other| other == digest), Some(i));
        }
    }

    #[test]
    fn digests_are_unpredictable() {
        let key = Key::new("a");
        assert_ne!(Digester::new().digest(&key), Digester::new().digest(&key));
    }
}
