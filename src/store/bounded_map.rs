//! A map of bounded size that drops expired entries gradually.

use std::mem;

use super::shards::Digest;

/// A map of bounded size, whose entries expire.
///
/// When the map is full, each new key replaces the lowest-[ranked](Ranked::rank) of a few
/// candidates: some old entries, which take turns, and some *newcomers*, which were inserted into
/// the full map, or just before it was full. So a flood of new keys replaces its own entries. Example: the map is full of
/// callers that have used up their limits. New callers with little usage replace each other in a
/// few places, where a newcomer with more usage than the others usually stays.
///
/// With many keys, cache misses dominate the cost of a lookup. The [`Chunk`]s are small enough to stay in the cache, so
/// a lookup has one miss, for its place. The map grows by an eighth: doubling would leave up to half of its memory
/// unused.
#[derive(Debug)]
pub(super) struct BoundedMap<V> {
    chunks: Vec<Chunk>,
    /// [`Chunk::PLACES`] for each chunk.
    places: Vec<Option<Place<V>>>,
    len: usize,
    max: usize,
    /// The place at which the next search for an old entry to drop starts.
    hand: usize,
    /// The index into `newcomers` at which the next search among them starts.
    newcomers_hand: usize,
    /// The places of newcomers. If an entry was removed and another one took its place, that one
    /// counts as a newcomer.
    newcomers: Vec<u32>,
}

/// Aligned to a cache line if it fits into one.
#[derive(Debug)]
#[repr(align(64))]
struct Place<V> {
    key: Digest,
    slot: Slot<V>,
}

/// A summary of 7 places. Each of the low 7 bytes describes one place: 0 if it is free, or else a byte of its key's
/// hash, so that a search rarely reads the place of another key. The highest byte is the number of keys that belong to
/// this chunk but are in a later one, because all places were taken. At 255 it stops counting.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk(u64);

#[derive(Debug)]
pub(super) struct Slot<V> {
    pub(super) value: V,
    pub(super) hold: Hold,
}

/// The rank of an entry: its worth and, in the low bits, its expiry in microseconds. One integer,
/// to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hold(u64);

/// The order in which a full map drops entries.
pub(super) trait Ranked {
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
    pub(super) fn new(worth: u8, expires_at: i64) -> Self {
        Self(u64::from(worth) << Self::BITS | expires_at.clamp(0, (1 << Self::BITS) - 1) as u64)
    }

    fn worth(self) -> u8 {
        (self.0 >> Self::BITS) as u8
    }

    pub(super) fn expires_at(self) -> i64 {
        (self.0 & ((1 << Self::BITS) - 1)) as i64
    }
}

impl Chunk {
    const PLACES: usize = 7;
    /// The lowest bit of each byte that is for a place.
    const LOW: u64 = (u64::MAX / 255) >> 8;
    const HIGH: u64 = Self::LOW << 7;
    const OVERFLOW: u32 = 8 * Self::PLACES as u32;

    /// Returns the byte for a key, which is not 0.
    fn tag(key: Digest) -> u8 {
        (key.hash() as u8).max(1)
    }

    /// Returns the places whose byte is `tag`: the highest bit of each such byte.
    #[inline]
    fn with_tag(self, tag: u8) -> u64 {
        let other = self.0 ^ (Self::LOW * u64::from(tag));
        let low_bits = (other & !Self::HIGH & (u64::MAX >> 8)) + (Self::HIGH - Self::LOW);
        !(low_bits | other) & Self::HIGH
    }

    fn free(self) -> Option<usize> {
        let free = self.with_tag(0);
        (free != 0).then(|| free.trailing_zeros() as usize / 8)
    }

    fn is_free(self, place: usize) -> bool {
        self.0 >> (8 * place) & 0xff == 0
    }

    fn set(&mut self, place: usize, tag: u8) {
        self.0 = self.0 & !(0xff << (8 * place)) | u64::from(tag) << (8 * place);
    }

    fn overflow(self) -> u64 {
        self.0 >> Self::OVERFLOW
    }

    /// Counts another key that is in a later chunk.
    fn pass(&mut self) {
        if self.overflow() < 255 {
            self.0 += 1 << Self::OVERFLOW;
        }
    }

    /// Uncounts a key that was in a later chunk.
    fn unpass(&mut self) {
        if (1..255).contains(&self.overflow()) {
            self.0 -= 1 << Self::OVERFLOW;
        }
    }
}

impl<V: Ranked> BoundedMap<V> {
    pub(super) fn new(max: usize) -> Self {
        Self {
            chunks: Vec::new(),
            places: Vec::new(),
            len: 0,
            max,
            hand: 0,
            newcomers_hand: 0,
            newcomers: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, key: Digest) -> Option<&Slot<V>> {
        let place = self.places.get(self.find(key)?)?;
        place.as_ref().map(|place| &place.slot)
    }

    pub(super) fn get_mut(&mut self, key: Digest) -> Option<&mut Slot<V>> {
        self.at(self.find(key)?)
    }

    /// Returns the place of a key, valid until the next insertion or removal.
    #[inline]
    pub(super) fn find(&self, key: Digest) -> Option<usize> {
        let (mut number, tag) = (self.home(key), Chunk::tag(key));
        for _ in 0..self.chunks.len() {
            let chunk = *self.chunks.get(number)?;
            let mut likely = chunk.with_tag(tag);
            while likely != 0 {
                let place = number * Chunk::PLACES + likely.trailing_zeros() as usize / 8;
                let there = self.places.get(place)?;
                if there.as_ref().is_some_and(|there| there.key == key) {
                    return Some(place);
                }
                likely &= likely - 1;
            }
            if chunk.overflow() == 0 {
                return None;
            }
            number = self.next(number);
        }
        None
    }

    /// Returns the entry at a place.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot<V>> {
        let place = self.places.get_mut(place)?;
        place.as_mut().map(|place| &mut place.slot)
    }

    pub(super) fn remove(&mut self, key: Digest) -> Option<V> {
        self.remove_at(self.find(key)?)
    }

    /// Inserts a value. If it has already expired, only removes the key. Returns the value that was
    /// replaced or dropped.
    pub(super) fn put(&mut self, key: Digest, value: V, hold: Hold, now: i64) -> Option<V> {
        if hold.expires_at() <= now {
            return self.remove(key);
        }
        if let Some(slot) = self.get_mut(key) {
            return Some(mem::replace(slot, Slot { value, hold }).value);
        }
        let (gone, newcomer) = self.make_room(now);
        if self.len >= Self::fitting(self.chunks.len()) {
            self.grow();
        }
        let place = self.insert(Place {
            key,
            slot: Slot { value, hold },
        });
        // At most a sixteenth of all entries are newcomers. The first ones are the last entries before the map is full.
        let most = (self.max / 16).clamp(4, 32);
        if let Some(index) = newcomer {
            self.newcomers[index] = place as u32;
        } else if V::OLD_STAYS && self.newcomers.len() < most && self.len + most > self.max {
            self.newcomers.push(place as u32);
        }
        gone
    }

    /// Returns how many entries this number of chunks holds before it grows: 15 of 16 of the places.
    fn fitting(chunks: usize) -> usize {
        let places = chunks * Chunk::PLACES;
        places - places / 16
    }

    /// Returns the chunk that a key belongs into.
    fn home(&self, key: Digest) -> usize {
        (((key.hash() >> 32) * self.chunks.len() as u64) >> 32) as usize
    }

    fn next(&self, chunk: usize) -> usize {
        if chunk + 1 < self.chunks.len() {
            chunk + 1
        } else {
            0
        }
    }

    fn grow(&mut self) {
        let before = self.chunks.len();
        let enough = self.max.div_ceil(Chunk::PLACES) * 16 / 15 + 1;
        let chunks = (before + before / 8 + 1).min(enough).max(before + 1);
        self.chunks = vec![Chunk::default(); chunks];
        let places = (0..chunks * Chunk::PLACES).map(|_| None).collect();
        // The entries keep their order, roughly.
        self.hand = self.hand * chunks / before.max(1);
        self.len = 0;
        let newcomers = mem::take(&mut self.newcomers);
        let before = mem::replace(&mut self.places, places);
        for (number, place) in before.into_iter().enumerate() {
            let Some(place) = place else { continue };
            let place = self.insert(place);
            if newcomers.contains(&(number as u32)) {
                self.newcomers.push(place as u32);
            }
        }
    }

    /// Inserts an entry whose key is not in the map. There must be a free place. Returns its place.
    fn insert(&mut self, new: Place<V>) -> usize {
        let (mut number, tag) = (self.home(new.key), Chunk::tag(new.key));
        while let Some(chunk) = self.chunks.get_mut(number) {
            if let Some(free) = chunk.free() {
                chunk.set(free, tag);
                let place = number * Chunk::PLACES + free;
                if let Some(there) = self.places.get_mut(place) {
                    *there = Some(new);
                    self.len += 1;
                }
                return place;
            }
            chunk.pass();
            number = self.next(number);
        }
        0
    }

    fn remove_at(&mut self, place: usize) -> Option<V> {
        let gone = self.places.get_mut(place)?.take()?;
        let mut number = self.home(gone.key);
        while number != place / Chunk::PLACES {
            self.chunks.get_mut(number)?.unpass();
            number = self.next(number);
        }
        self.chunks.get_mut(number)?.set(place % Chunk::PLACES, 0);
        self.len -= 1;
        Some(gone.slot.value)
    }

    /// Drops an expired entry if it finds one; in a full map, always drops an entry, the
    /// lowest-ranked of a few. Returns it, and the index among the newcomers of the entry that will be inserted, if it
    /// is one.
    ///
    /// Two checks per new key suffice: all expired entries are found before the number of entries
    /// has doubled.
    fn make_room(&mut self, now: i64) -> (Option<V>, Option<usize>) {
        let is_full = self.len >= self.max;
        let mut old: Option<(Hold, usize)> = None;
        for _ in 0..if is_full { 8 } else { 2 } {
            let Some(place) = self.turn(is_full) else {
                break;
            };
            let Some(slot) = self.at(place) else { break };
            if slot.hold.expires_at() <= now {
                return (self.remove_at(place), None);
            }
            if is_full {
                let rank = slot.value.rank(slot.hold);
                slot.value.age();
                if old.is_none_or(|(least, _)| rank < least) {
                    old = Some((rank, place));
                }
            }
        }
        let Some((rank, old)) = old else {
            return (None, None);
        };
        let (place, newcomer) = if V::OLD_STAYS {
            self.place_to_free(rank, old)
        } else {
            (old, None)
        };
        (self.remove_at(place), newcomer)
    }

    /// Returns the place of the next old entry. If the map is not `full`, only if it is near: most places may be free.
    fn turn(&mut self, full: bool) -> Option<usize> {
        let most = if full { self.places.len() } else { 16 };
        for _ in 0..most {
            if self.hand >= self.places.len() {
                self.hand = 0;
            }
            let place = self.hand;
            self.hand += 1;
            let chunk = self.chunks.get(place / Chunk::PLACES)?;
            if !chunk.is_free(place % Chunk::PLACES) {
                return Some(place);
            }
        }
        None
    }

    /// Returns the place of a newcomer, or `old`, the place of the lowest-ranked old entry, if
    /// every newcomer is worth more; and the index among the newcomers of the next one.
    fn place_to_free(&mut self, old_rank: Hold, old: usize) -> (usize, Option<usize>) {
        if self.newcomers.is_empty() {
            return (old, None);
        }
        let looks = [1, 2, 3, 4].map(|look| {
            let index = (self.newcomers_hand + look) % self.newcomers.len();
            let place = self.places.get(self.newcomers[index] as usize);
            // A free place ranks highest, so it is reassigned to another newcomer.
            let rank = place
                .and_then(Option::as_ref)
                .map(|Place { slot, .. }| slot.value.rank(slot.hold));
            (rank.unwrap_or(Hold(u64::MAX)), index)
        });
        // Of equal ranks, the first one.
        let least = looks.into_iter().min_by_key(|(rank, _)| *rank);
        let highest = looks.into_iter().rev().max_by_key(|(rank, _)| *rank);
        match (least, highest) {
            (Some((rank, index)), _)
                if rank.worth() <= old_rank.worth() && rank < Hold(u64::MAX) =>
            {
                self.newcomers_hand = index;
                (self.newcomers[index] as usize, Some(index))
            }
            (_, Some((_, index))) => {
                self.newcomers_hand = index;
                // The newcomer with the highest rank becomes an old entry.
                let known = self
                    .newcomers
                    .iter()
                    .position(|place| *place as usize == old);
                (old, Some(known.unwrap_or(index)))
            }
            _ => (old, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use fastrand::Rng;

    use super::*;
    use crate::limit::Key;
    use crate::store::shards::Digester;

    impl Ranked for u32 {
        const OLD_STAYS: bool = true;
    }

    /// Compares the map with a `HashMap`, also while most places are taken, and after most were freed.
    #[test]
    fn holds_what_was_put() {
        let (mut rng, digester) = (Rng::with_seed(1), Digester::new());
        for max in [1, 7, 14, 15, 100, 1_000] {
            let (mut map, mut expected) = (BoundedMap::new(max), HashMap::new());
            let keys: Vec<_> = (0..max as u32)
                .map(|i| digester.digest(&Key::from(i)))
                .collect();
            for step in 0..30 * max as u32 {
                let key = keys[rng.usize(..max)];
                let removes = if step / max as u32 % 3 == 2 { 4 } else { 1 };
                if rng.u32(..5) < removes {
                    assert_eq!(map.remove(key), expected.remove(&key.hash()));
                } else {
                    let before = map.put(key, step, Hold::new(0, 100), 0);
                    assert_eq!(before, expected.insert(key.hash(), step));
                }
                assert_eq!(map.len(), expected.len());
                let key = keys[rng.usize(..max)];
                let found = map.get(key).map(|slot| slot.value);
                assert_eq!(found.as_ref(), expected.get(&key.hash()), "of {max}");
            }
            for key in &keys {
                let found = map.get(*key).map(|slot| slot.value);
                assert_eq!(found.as_ref(), expected.get(&key.hash()), "of {max}");
                map.remove(*key);
            }
            assert!(
                map.chunks.iter().all(|chunk| chunk.0 == 0),
                "an empty map of {max} has traces of keys"
            );
        }
    }

    /// A full map stays full.
    #[test]
    fn never_holds_more_than_its_size() {
        let digester = Digester::new();
        for max in [1, 6, 7, 8, 16, 500] {
            let mut map = BoundedMap::new(max);
            for i in 0..20 * max as u32 {
                let hold = Hold::new((i % 256) as u8, 100);
                map.put(digester.digest(&Key::from(i)), i, hold, 0);
                assert_eq!(map.len(), max.min(i as usize + 1));
            }
        }
    }
}
