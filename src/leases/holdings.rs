use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::Place;
use super::entry::Entry;
use super::keeper::Watch;
use crate::store::instant;

/// What this process has [in flight](crate::Strategy::InFlight) in one store, for all who ask it. See
/// [`Store::holdings`](crate::Store::holdings). Clones are the same.
#[derive(Clone)]
pub struct Holdings(pub(super) Arc<Shelf>);

/// The books of a store.
pub(super) struct Shelf {
    books: Box<[Mutex<HashMap<Place, Entry>>]>,
    /// How many entries there are.
    pub(super) len: AtomicUsize,
    /// Whether the last answers did not come from where the count is kept.
    pub(super) away: AtomicBool,
    /// Whether it may have lost counts, since it was away.
    pub(super) forgot: AtomicBool,
    /// Whether an entry is in doubt.
    pub(super) doubt: AtomicBool,
    pub(super) watch: Watch,
}

const SHARDS: usize = 16;

impl Holdings {
    /// Of a store in which nothing is in flight.
    pub fn new() -> Self {
        let books = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (len, away, forgot, doubt) = Default::default();
        Self(Arc::new(Shelf { books, len, away, forgot, doubt, watch: Watch::new(instant()) }))
    }
}

impl Shelf {
    pub(super) fn books(&self) -> &[Mutex<HashMap<Place, Entry>>] {
        &self.books
    }

    pub(super) fn book(&self, place: &Place) -> &Mutex<HashMap<Place, Entry>> {
        let bytes = place.key.as_bytes();
        let sum = bytes.iter().fold(place.count, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte));
        &self.books[(sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % SHARDS]
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }
}

impl Default for Holdings {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holdings").field("entries", &self.0.len()).finish_non_exhaustive()
    }
}
