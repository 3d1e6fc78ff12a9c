//! A map that holds no more than it may, and drops what has lapsed little by little.

use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};

/// A map of so many entries at most, each of which lapses at its time.
///
/// Its keys come with their hashes, so that a caller's key is hashed once for all that is looked up by it.
#[derive(Debug)]
pub(super) struct Bounded<K, V> {
    slots: IndexMap<K, Slot<V>, ()>,
    most: usize,
    /// Where the search for what can go stands.
    hand: usize,
}

#[derive(Debug)]
pub(super) struct Slot<V> {
    pub(super) value: V,
    /// When it says nothing any more, in microseconds.
    pub(super) lapses: i64,
}

impl<K: Eq, V> Bounded<K, V> {
    pub(super) fn new(most: usize) -> Self {
        Self { slots: IndexMap::with_hasher(()), most, hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn get(&self, hash: u64, key: &K) -> Option<&Slot<V>> {
        self.slots.get_index(self.find(hash, key)?).map(|(_, slot)| slot)
    }

    /// Where a key is, until something is put or removed.
    pub(super) fn find(&self, hash: u64, key: &K) -> Option<usize> {
        self.slots.raw_entry_v1().index_from_hash(hash, |held| held == key)
    }

    /// What is at a place.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot<V>> {
        self.slots.get_index_mut(place).map(|(_, slot)| slot)
    }

    pub(super) fn remove(&mut self, hash: u64, key: &K) {
        if let Some(place) = self.find(hash, key) {
            self.slots.swap_remove_index(place);
        }
    }

    /// Holds a value until it lapses. One that has lapsed already only takes the place of what was held.
    pub(super) fn put(&mut self, hash: u64, key: K, value: V, lapses: i64, now: i64) {
        if lapses <= now {
            self.remove(hash, &key);
        } else if let Some(slot) = self.find(hash, &key).and_then(|place| self.at(place)) {
            *slot = Slot { value, lapses };
        } else {
            self.make_room(now);
            if self.slots.len() == self.slots.capacity() {
                // By an eighth, since doubling would leave up to half of the memory unused.
                self.slots.reserve_exact(self.slots.len() / 8 + 4);
            }
            if let RawEntryMut::Vacant(vacant) = self.slots.raw_entry_mut_v1().from_hash(hash, |held| *held == key) {
                vacant.insert_hashed_nocheck(hash, key, Slot { value, lapses });
            }
        }
    }

    /// Drops some of what says nothing any more, and when full always something: of a few slots the one that would
    /// have gone first.
    ///
    /// Two looks for every new key find all that has lapsed before as many new keys have come as there are old ones.
    fn make_room(&mut self, now: i64) {
        let full = self.slots.len() >= self.most;
        let mut first: Option<(i64, usize)> = None;
        for _ in 0..if full { 8 } else { 2 } {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let Some((_, slot)) = self.slots.get_index(self.hand) else { return };
            if slot.lapses <= now {
                self.slots.swap_remove_index(self.hand);
                return;
            }
            if first.is_none_or(|(lapses, _)| slot.lapses < lapses) {
                first = Some((slot.lapses, self.hand));
            }
            self.hand += 1;
        }
        if let (true, Some((_, index))) = (full, first) {
            self.slots.swap_remove_index(index);
        }
    }
}
