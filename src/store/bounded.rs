//! A map that holds no more than it may, and drops what has lapsed little by little.

use std::hash::Hash;

use indexmap::IndexMap;

/// A map of so many entries at most, each of which lapses at its time.
#[derive(Debug)]
pub(super) struct Bounded<K, V> {
    slots: IndexMap<K, Slot<V>>,
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

impl<K: Hash + Eq, V> Bounded<K, V> {
    pub(super) fn new(most: usize) -> Self {
        Self { slots: IndexMap::new(), most, hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn get(&self, key: &K) -> Option<&Slot<V>> {
        self.slots.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut Slot<V>> {
        self.slots.get_mut(key)
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.slots.swap_remove(key);
    }

    /// Holds a value until it lapses. One that has lapsed already only takes the place of what was held.
    pub(super) fn put(&mut self, key: K, value: V, lapses: i64, now: i64) {
        let slot = Slot { value, lapses };
        if lapses <= now {
            self.slots.swap_remove(&key);
        } else if let Some(held) = self.slots.get_mut(&key) {
            *held = slot;
        } else {
            self.make_room(now);
            self.slots.insert(key, slot);
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
