//! A map that holds no more than it may, and drops what has lapsed little by little.

use std::hash::BuildHasherDefault;

use indexmap::IndexMap;

use super::digest::{AsItIs, Digest};

/// A map of so many entries at most, each of which lapses at its time.
#[derive(Debug)]
pub(super) struct Bounded<V> {
    slots: IndexMap<Digest, Slot<V>, BuildHasherDefault<AsItIs>>,
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

impl<V> Bounded<V> {
    pub(super) fn new(most: usize) -> Self {
        Self { slots: IndexMap::default(), most, hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn get(&self, key: Digest) -> Option<&Slot<V>> {
        self.slots.get(&key)
    }

    /// Where a key is, until something is put or removed.
    pub(super) fn find(&self, key: Digest) -> Option<usize> {
        self.slots.get_index_of(&key)
    }

    /// What is at a place.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot<V>> {
        self.slots.get_index_mut(place).map(|(_, slot)| slot)
    }

    pub(super) fn remove(&mut self, key: Digest) {
        self.slots.swap_remove(&key);
    }

    pub(super) fn remove_at(&mut self, place: usize) {
        self.slots.swap_remove_index(place);
    }

    /// Holds a value until it lapses. One that has lapsed already only takes the place of what was held.
    pub(super) fn put(&mut self, key: Digest, value: V, lapses: i64, now: i64) {
        if lapses <= now {
            self.remove(key);
        } else if let Some(slot) = self.slots.get_mut(&key) {
            *slot = Slot { value, lapses };
        } else {
            self.make_room(now);
            if self.slots.len() == self.slots.capacity() {
                // By an eighth, since doubling would leave up to half of the memory unused.
                self.slots.reserve_exact(self.slots.len() / 8 + 4);
            }
            self.slots.insert(key, Slot { value, lapses });
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
