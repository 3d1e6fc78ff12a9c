//! Hashes of keys: the keys of the maps of this process.

use std::hash::BuildHasher;

use siphasher::sip128::{Hash128, SipHasher13};

use crate::limit::Key;
use crate::util::RandomState;

/// A key's hash of 128 bits. It takes less memory than the key, and a check hashes its key once for all its look-ups.
///
/// The hash is seeded with a secret, so that no caller can choose keys that share a digest or crowd one part of a map. By
/// chance, two of a million keys share one with a probability of 1 in 10^27.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Digest([u64; 2]);

impl Digest {
    /// The digest of one of the caller's counts, where the caller's own is `self`.
    pub(crate) fn of_count(self, count: u64) -> Self {
        let Self([first, second]) = self;
        Self([first ^ count, second])
    }

    /// Which of so many shards holds the caller; their number is a power of two. Uses the word that the maps don't hash:
    /// with the other one, the keys of a shard would share their low bits, and collide in the shard's map.
    pub(crate) fn part(self, parts: usize) -> usize {
        self.0[1] as usize & (parts - 1)
    }

    /// Its hash in a table.
    pub(super) fn hash(self) -> u64 {
        self.0[0]
    }
}

/// Makes digests. Each digester has its own seed, which its clones share.
#[derive(Clone)]
pub(super) struct Digester(SipHasher13);

impl Digester {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        Self(SipHasher13::new_with_keys(
            random.hash_one(0),
            random.hash_one(1),
        ))
    }

    pub(super) fn digest(&self, key: &Key) -> Digest {
        let Hash128 { h1, h2 } = self.0.hash(key.as_bytes());
        Digest([h1, h2])
    }

    /// The digest of two keys, in this order.
    pub(super) fn pair(&self, first: &Key, second: &Key) -> Digest {
        // No key contains this byte, so `a, bc` and `ab, c` stay apart.
        let Hash128 { h1, h2 } = self
            .0
            .hash(&[first.as_bytes(), second.as_bytes()].join(&0xff));
        Digest([h1, h2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
