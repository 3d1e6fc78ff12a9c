use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;

use super::settlement::Counted;
use super::{Charge, Settlement};
use crate::in_flight::Lease;
use crate::refunds::{RefundQueue, Reserved};
use crate::util::lock;

/// What one request has reserved. The last one who drops it settles it.
pub(crate) struct Account {
    refunds: Arc<dyn RefundQueue>,
    /// How much is reserved under the layer's policies, also in a dry run.
    reserved: AtomicU32,
    /// What was counted, or [`UNUSED`].
    units: AtomicU64,
    bytes: AtomicU64,
    book: Mutex<Book>,
    /// That of a layer around this one, which counts the same.
    outer: OnceLock<Charge>,
}

struct Book {
    /// What is not settled yet: under the layer's policies, or those of a dry run and of shadows.
    open: SmallVec<[Reserved; 1]>,
    settlement: Settlement,
    /// Of the policies that count requests in flight: dropped with the account.
    in_flight: SmallVec<[Lease; 1]>,
}

/// What a request costs in the place of what it has reserved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    pub(crate) reserved: u32,
    pub(crate) cost: u32,
}

/// No handle has counted anything.
const UNUSED: u64 = u64::MAX;

impl Account {
    /// The account of a request that settles as the handles say. It may have reserved nothing.
    pub(crate) fn new(refunds: Arc<dyn RefundQueue>, reserved: Option<Reserved>, lease: Option<Lease>) -> Self {
        let in_flight = lease.into_iter().collect();
        let book = Book { open: reserved.into_iter().collect(), settlement: Settlement::AtEnd, in_flight };
        let reserved = AtomicU32::new(book.open.first().map_or(0, Reserved::cost));
        Self {
            refunds,
            reserved,
            units: AtomicU64::new(UNUSED),
            bytes: AtomicU64::new(0),
            book: Mutex::new(book),
            outer: OnceLock::new(),
        }
    }

    /// Counts for this one, too: that of a layer around.
    pub(super) fn count_for(&self, outer: Charge) {
        // A request is called with it once.
        let _ = self.outer.set(outer);
    }

    /// A dry run is about to reserve so much, in the place of the layer.
    pub(crate) fn reserves(&self, cost: u32) {
        self.reserved.store(cost, Relaxed);
    }

    /// Adds what was reserved in a dry run.
    pub(crate) fn add(&self, reserved: Reserved, lease: Option<Lease>) {
        let cost = {
            let mut book = lock(&self.book);
            book.in_flight.extend(lease);
            match book.settlement.cost_at_head(reserved.cost()) {
                None => return book.open.push(reserved),
                Some(cost) => cost,
            }
        };
        reserved.settle(cost, &*self.refunds);
    }

    /// Settles by what is known when the head of the response is there, or says how to do so in the end. The cost under the
    /// layer's policies, if that is known.
    pub(crate) fn settle(&self, settlement: Settlement) -> Option<Settled> {
        let reserved = self.reserved();
        let cost = settlement.cost_at_head(reserved);
        let open = {
            let mut book = lock(&self.book);
            book.settlement = settlement;
            if cost.is_some() { std::mem::take(&mut book.open) } else { SmallVec::new() }
        };
        for reserved in open {
            let cost = settlement.cost(reserved.cost(), Counted::default());
            reserved.settle(cost, &*self.refunds);
        }
        cost.map(|cost| Settled { reserved, cost })
    }

    /// So many bytes of the body were sent.
    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn reserved(&self) -> u32 {
        self.reserved.load(Relaxed)
    }

    /// What was counted, if anything was.
    pub(super) fn counted(&self) -> Option<u64> {
        Some(self.units.load(Relaxed)).filter(|units| *units != UNUSED)
    }

    /// Counts for this account, and for those around it.
    pub(super) fn count(&self, count: impl Fn(u64) -> u64 + Copy) {
        // The sum stays below what says that there is none.
        let next = |units| Some(count(if units == UNUSED { 0 } else { units }).min(UNUSED - 1));
        let _ = self.units.fetch_update(Relaxed, Relaxed, next);
        if let Some(outer) = self.outer.get() {
            outer.account().count(count);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let counted = Counted { units: self.counted(), bytes: *self.bytes.get_mut() };
        let book = self.book.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for reserved in std::mem::take(&mut book.open) {
            let cost = book.settlement.cost(reserved.cost(), counted);
            reserved.settle(cost, &*self.refunds);
        }
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("reserved", &self.reserved()).finish_non_exhaustive()
    }
}
