//! A map of bounded size that drops expired entries gradually.
//!
//! # Eviction
//!
//! Two known parts, combined: **sampled eviction** with a clock hand, and a small **admission window**.
//!
//! - A full map compares 8 entries, and drops the one with the lowest [rank](Ranked::rank), as Redis does with
//!   `maxmemory-samples`. Its samples are random; here a hand goes round, as in the CLOCK algorithm (Corbató, 1968), so that
//!   each entry is compared once per round.
//! - Where [`OLD_STAYS`](Ranked::OLD_STAYS), the keys that were inserted into the full map, the *newcomers*, are dropped
//!   first: the lowest-ranked of 4 of them, unless all 4 are worth more than the old entry that the hand found. Then that
//!   one is dropped, and the highest-ranked of the 4 becomes an old entry. Like the window of W-TinyLFU (Einziger,
//!   Friedman and Manes, 2017), this keeps keys that are used once from displacing others. Unlike it, nothing is counted of a
//!   dropped key.
//!
//! **Bounds.** At most `max` entries. A new key costs at most 12 comparisons, and drops at most one entry. A sixteenth of the
//! entries are newcomers, at least 4 and at most 32. An old entry is dropped only while there are fewer, or if it is worth
//! less than each of 4 newcomers. So a flood of keys of the lowest worth replaces itself. In a full map, at most `max / 8`
//! entries that still count are dropped before a given expired one is; otherwise all expired ones are dropped before the
//! number of entries has doubled.

use hashbrown::HashTable;

use super::shards::Digest;

/// A map of bounded size, whose entries expire.
///
/// A flood of new keys replaces its own entries. Example: the map is full of callers that have used
/// up their limits. New callers with little usage replace each other in a few places, where a
/// newcomer with more usage than the others usually stays.
#[derive(Debug)]
pub(crate) struct BoundedMap<V> {
    places: Vec<Place<V>>,
    /// The index into `places` of each key: small, so that it stays in the cache of a processor.
    index: HashTable<u16>,
    max: usize,
    /// The place at which the next search for an old entry to drop starts.
    hand: u32,
    /// The index into `newcomers` at which the next search among them starts.
    newcomers_hand: u32,
    /// The places of newcomers. If an entry was removed and another one moved to its place, that
    /// one counts as a newcomer.
    newcomers: Vec<u32>,
}

/// Aligned to a cache line if it fits into one: with many keys, the cache miss dominates the cost
/// of a lookup.
#[derive(Debug)]
#[repr(align(64))]
struct Place<V> {
    key: Digest,
    slot: MapSlot<V>,
}

#[derive(Debug)]
pub(crate) struct MapSlot<V> {
    pub(crate) value: V,
    pub(crate) hold: Hold,
}

/// The rank of an entry: its worth and, in the low bits, its expiry in microseconds. One integer,
/// to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hold(u64);

/// The order in which a full map drops entries.
pub(crate) trait Ranked {
    /// Whether an old entry is kept rather than a newcomer of equal worth.
    const OLD_STAYS: bool;

    /// The rank for replacement; the lowest is replaced. Defaults to the rank at insertion.
    fn rank(&self, hold: Hold) -> Hold {
        hold
    }

    /// Called when a full map has considered this entry as an old one.
    fn age(&mut self) {}
}

impl Hold {
    const BITS: u32 = 56;

    /// `expires_at` is in microseconds since the Unix epoch, up to the year 4253.
    pub(crate) fn new(worth: u8, expires_at: i64) -> Self {
        Self(u64::from(worth) << Self::BITS | expires_at.clamp(0, (1 << Self::BITS) - 1) as u64)
    }

    fn worth(self) -> u8 {
        (self.0 >> Self::BITS) as u8
    }

    pub(crate) fn expires_at(self) -> i64 {
        (self.0 & ((1 << Self::BITS) - 1)) as i64
    }
}

/// Number of old entries that a full map compares for a new key.
const OLD_LOOKS: usize = 8;
/// Number of newcomers that it compares.
const NEWCOMER_LOOKS: usize = 4;
/// The most entries of a map.
const MOST: usize = 1 << u16::BITS;

/// Returns the number of shards whose maps can hold `max` entries: at least `least`. The shards of a large store hold
/// 16,384 to 32,768 entries each, because a shard is locked while its map grows.
pub(crate) fn shards(least: usize, max: usize) -> usize {
    least.max(max / (MOST / 4)).min(MOST)
}

impl<V: Ranked> BoundedMap<V> {
    /// Creates a map of at most `max` entries, and at most 65,536.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            places: Vec::new(),
            index: HashTable::new(),
            max: max.min(MOST),
            hand: 0,
            newcomers_hand: 0,
            newcomers: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn get(&self, key: Digest) -> Option<&MapSlot<V>> {
        Some(&self.places.get(self.find(key)?)?.slot)
    }

    pub(crate) fn get_mut(&mut self, key: Digest) -> Option<&mut MapSlot<V>> {
        self.at(self.find(key)?)
    }

    /// Returns the place of a key, valid until the next insertion or removal.
    pub(crate) fn find(&self, key: Digest) -> Option<usize> {
        let place = self
            .index
            .find(key.hash(), |place| self.key_at(*place) == Some(key))?;
        Some(usize::from(*place))
    }

    fn key_at(&self, place: u16) -> Option<Digest> {
        Some(self.places.get(usize::from(place))?.key)
    }

    /// Returns the entry at a place.
    pub(crate) fn at(&mut self, place: usize) -> Option<&mut MapSlot<V>> {
        Some(&mut self.places.get_mut(place)?.slot)
    }

    pub(crate) fn remove(&mut self, key: Digest) {
        if let Some(place) = self.find(key) {
            self.remove_at(place);
        }
    }

    /// Removes the entry at a place, if there is one. The last entry moves to that place.
    fn remove_at(&mut self, place: usize) {
        let (Some(gone), Some(last)) = (self.places.get(place), self.places.last()) else {
            return;
        };
        let hash = gone.key.hash();
        let last_hash = last.key.hash();
        if let Ok(entry) = self.index.find_entry(hash, |at| usize::from(*at) == place) {
            entry.remove();
        }
        self.places.swap_remove(place);
        let last = self.places.len();
        if let Some(at) = self
            .index
            .find_mut(last_hash, |at| usize::from(*at) == last)
        {
            *at = place as u16;
        }
    }

    /// Inserts a value, or replaces that of the key. If it has already expired, only removes the key.
    pub(crate) fn put(&mut self, key: Digest, value: V, hold: Hold, now: i64) {
        match self.find(key) {
            None => self.insert(key, value, hold, now),
            Some(place) if hold.expires_at() <= now => self.remove_at(place),
            Some(place) => {
                if let Some(slot) = self.at(place) {
                    *slot = MapSlot { value, hold };
                }
            }
        }
    }

    /// Inserts the value of a key that is not in the map, unless it has already expired.
    pub(crate) fn insert(&mut self, key: Digest, value: V, hold: Hold, now: i64) {
        if hold.expires_at() <= now {
            return;
        }
        self.make_room(self.places.len() >= self.max, now);
        if self.places.len() == self.places.capacity() {
            // By half, and never beyond the maximum: doubling would leave up to half of the memory unused.
            let more = self.places.len() / 2 + 4;
            self.places
                .reserve_exact(more.min(self.max - self.places.len()));
        }
        let place = self.places.len() as u16;
        self.index
            .insert_unique(key.hash(), place, |place| hash_at(&self.places, *place));
        self.places.push(Place {
            key,
            slot: MapSlot { value, hold },
        });
    }

    /// Drops an expired entry if it finds one; in a `full` map, always drops an entry, the
    /// lowest-ranked of a few.
    ///
    /// Two looks per new key suffice to find all expired entries before the number of entries has
    /// doubled: n new keys look at 2 n places, and all are in the first 2 n.
    fn make_room(&mut self, full: bool, now: i64) {
        let mut old: Option<(Hold, u32)> = None;
        let looks = if full { OLD_LOOKS } else { 2 };
        for _ in 0..looks {
            if self.hand as usize >= self.places.len() {
                self.hand = 0;
            }
            let Some(Place { slot, .. }) = self.places.get_mut(self.hand as usize) else {
                return;
            };
            if slot.hold.expires_at() <= now {
                return self.remove_at(self.hand as usize);
            }
            if full {
                let rank = slot.value.rank(slot.hold);
                slot.value.age();
                if old.is_none_or(|(least, _)| rank < least) {
                    old = Some((rank, self.hand));
                }
            }
            self.hand += 1;
        }
        let Some((rank, old)) = old else {
            return;
        };
        let place = if V::OLD_STAYS {
            self.place_to_free(rank, old)
        } else {
            old
        };
        // The last entry moves to this place; it is usually the latest newcomer.
        self.remove_at(place as usize);
    }

    /// Returns the place of a newcomer, or `old`, the place of the lowest-ranked old entry, if
    /// every newcomer is worth more.
    fn place_to_free(&mut self, old_rank: Hold, old: u32) -> u32 {
        if self.newcomers.len() < self.max_newcomers() {
            self.newcomers.push(old);
            return old;
        }
        let mut least = self.look_at_newcomer(1);
        let mut highest = least;
        for step in 2..=NEWCOMER_LOOKS {
            let look = self.look_at_newcomer(step);
            // The first of equal ranks.
            if look.rank < least.rank {
                least = look;
            }
            if look.rank > highest.rank {
                highest = look;
            }
        }
        // By worth only: a later expiry alone does not protect a newcomer.
        if least.rank.worth() <= old_rank.worth() {
            self.newcomers_hand = least.index as u32;
            return self.newcomers[least.index];
        }
        self.newcomers_hand = highest.index as u32;
        if !self.newcomers.contains(&old) {
            // The newcomer with the highest rank becomes an old entry.
            self.newcomers[highest.index] = old;
        }
        old
    }

    fn max_newcomers(&self) -> usize {
        (self.max / 16).clamp(NEWCOMER_LOOKS, 32)
    }

    /// Looks at a newcomer, `step` places after the last chosen one.
    fn look_at_newcomer(&self, step: usize) -> Look {
        let index = (self.newcomers_hand as usize + step) % self.newcomers.len();
        let rank = match self.places.get(self.newcomers[index] as usize) {
            Some(Place { slot, .. }) => slot.value.rank(slot.hold),
            // Beyond the last entry: the highest rank, so that the place is reassigned to another newcomer.
            None => Hold(u64::MAX),
        };
        Look { rank, index }
    }
}

/// A newcomer that was considered.
#[derive(Clone, Copy)]
struct Look {
    rank: Hold,
    /// The index into `newcomers`.
    index: usize,
}

/// Returns the hash of the key at a place.
fn hash_at<V>(places: &[Place<V>], place: u16) -> u64 {
    match places.get(usize::from(place)) {
        Some(place) => place.key.hash(),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Key;
    use crate::util::shards::{Digester, Shards};

    impl Ranked for usize {
        const OLD_STAYS: bool = true;
    }

    #[test]
    fn the_shards_hold_as_many_as_wanted() {
        for max in [1, 100_000, 1 << 20, (1 << 21) - 1, 1 << 30, usize::MAX] {
            let count = Shards::new(shards(1, max), |_| ()).iter().len();
            assert!(max.min(1 << 32).div_ceil(count) <= MOST, "{max} in {count}");
            assert!(count <= MOST, "{count} shards of {max}");
        }
    }

    #[test]
    fn the_largest_map_finds_each_key() {
        let (digester, mut map) = (Digester::new(), BoundedMap::new(usize::MAX));
        let key = |i: usize| digester.digest(&Key::from(i));
        for i in 0..=MOST {
            map.put(key(i), i, Hold::new(0, 1), 0);
            assert_eq!(map.len(), (i + 1).min(MOST));
        }
        let found = (0..=MOST).filter(|i| map.get(key(*i)).is_some_and(|slot| slot.value == *i));
        assert_eq!(found.count(), MOST);
    }
}
