use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use smallvec::SmallVec;

use super::settlement::Counted;
use super::{Charge, Reserved, Settlement};
use crate::background::{OpQueue, PendingOp};
use crate::in_flight::Slot;
use crate::limit::{Check, Decision};
use crate::util::lock;

/// What one request has reserved. The last one who drops it settles it.
pub(crate) struct Account {
    ops: OpQueue,
    /// How much is reserved under the layer's policies, also in a dry run.
    reserved: AtomicU32,
    /// How much of that the layer's decision does not know of. Written under the lock.
    later: AtomicU32,
    /// What was counted, or [`UNUSED`].
    units: AtomicU64,
    bytes: AtomicU64,
    book: Mutex<Book>,
    /// That of a layer around this one, which counts the same.
    outer: OnceLock<Charge>,
}

struct Book {
    open: Open,
    settlement: Settlement,
    /// Of the policies that count requests in flight: dropped with the account.
    in_flight: SmallVec<[Slot; 1]>,
}

/// What is not settled yet.
#[derive(Default)]
struct Open {
    /// Under the layer's policies, or those of a dry run and of shadows.
    reserved: SmallVec<[Reserved; 1]>,
    /// Whether the first one is under policies that the layer enforces.
    enforced: bool,
    /// What the handler has reserved beside the first one.
    later: Vec<Reserved>,
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
    pub(crate) fn new(ops: OpQueue, reserved: Option<Reserved>, slot: Option<Slot>) -> Self {
        let in_flight = slot.into_iter().collect();
        let cost = reserved.as_ref().map_or(0, Reserved::cost);
        let enforced = reserved.is_some();
        let open = Open {
            reserved: reserved.into_iter().collect(),
            enforced,
            later: Vec::new(),
        };
        let book = Book {
            open,
            settlement: Settlement::AtEnd,
            in_flight,
        };
        Self {
            ops,
            reserved: AtomicU32::new(cost),
            later: AtomicU32::new(0),
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
    pub(crate) fn add(&self, reserved: Reserved, slot: Option<Slot>) {
        let cost = {
            let mut book = lock(&self.book);
            book.in_flight.extend(slot);
            match book.settlement.cost_at_head(reserved.cost()) {
                None => return book.open.reserved.push(reserved),
                Some(cost) => cost,
            }
        };
        reserved.settle(cost, &self.ops);
    }

    /// Settles by what is known when the head of the response is there, or says how to do so in the end. The cost under the
    /// layer's policies, if that is known.
    pub(crate) fn settle(&self, settlement: Settlement) -> Option<Settled> {
        let (open, known, cost) = {
            let mut book = lock(&self.book);
            book.settlement = settlement;
            let reserved = self.reserved();
            let cost = settlement.cost_at_head(reserved)?;
            (
                std::mem::take(&mut book.open),
                reserved.saturating_sub(self.later.swap(0, Relaxed)),
                cost,
            )
        };
        open.settle(
            |reserved| settlement.cost(reserved, Counted::default()),
            &self.ops,
        );
        Some(Settled {
            reserved: known,
            cost,
        })
    }

    /// What asks for more under the layer's policies. `None` if nothing is reserved there, or all is settled.
    pub(super) fn ask_more(&self, units: u32) -> Option<Check> {
        let book = lock(&self.book);
        book.open
            .reserved
            .first()
            .filter(|_| book.open.enforced)?
            .ask_more(units)
    }

    /// Adds what was granted to that.
    pub(super) fn add_more(&self, reserved: Reserved) {
        let units = reserved.cost();
        let settlement = {
            let mut book = lock(&self.book);
            if book.settlement.cost_at_head(units).is_none() {
                book.open.later.push(reserved);
                for sum in [&self.reserved, &self.later] {
                    sum.store(sum.load(Relaxed).saturating_add(units), Relaxed);
                }
                return;
            }
            book.settlement
        };
        // The head came first: if it has told the cost, that is charged already.
        let kept = if settlement == Settlement::Keep {
            units
        } else {
            0
        };
        reserved.settle(kept, &self.ops);
    }

    /// Refunds what was reserved as so much more.
    pub(super) fn give_back(&self, units: u32) {
        let given = {
            let later = &mut lock(&self.book).open.later;
            let Some(at) = later.iter().rposition(|reserved| reserved.cost() == units) else {
                return;
            };
            self.reserved.fetch_sub(units, Relaxed);
            self.later.fetch_sub(units, Relaxed);
            later.swap_remove(at)
        };
        given.settle(0, &self.ops);
    }

    /// The layer's decision with what was reserved after it.
    pub(crate) fn update(&self, decision: Decision) -> Decision {
        match self.later.load(Relaxed) {
            0 => decision,
            later => decision.settled(self.reserved().saturating_sub(later), self.reserved()),
        }
    }

    /// The call has ended: nothing of it is in flight, even if what it costs is not settled yet.
    pub(crate) fn end(&self) {
        let _ended = std::mem::take(&mut lock(&self.book).in_flight);
    }

    /// Asks for the request.
    pub(super) async fn ask(&self, op: PendingOp) {
        self.ops.ask(op).await;
    }

    /// That of the layer around this one.
    pub(super) fn outer(&self) -> Option<&Charge> {
        self.outer.get()
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
        let counted = Counted {
            units: self.counted(),
            bytes: *self.bytes.get_mut(),
        };
        let book = self
            .book
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let settlement = book.settlement;
        std::mem::take(&mut book.open)
            .settle(|reserved| settlement.cost(reserved, counted), &self.ops);
    }
}

impl Open {
    /// Settles by what a request costs for which so much was reserved.
    fn settle(self, cost: impl Fn(u32) -> u32, ops: &OpQueue) {
        let Self {
            reserved, later, ..
        } = self;
        let more = later
            .iter()
            .map(Reserved::cost)
            .fold(0, u32::saturating_add);
        let mut reserved = reserved.into_iter();
        if !later.is_empty()
            && let Some(first) = reserved.next()
        {
            let all = first.cost().saturating_add(more);
            let cost = cost(all);
            let (mut back, mut missing) = (all.saturating_sub(cost), cost.saturating_sub(all));
            // What was reserved last is refunded first, since all of it counts still.
            for part in later.into_iter().rev().chain([first]) {
                let refunded = back.min(part.cost());
                back -= refunded;
                let cost = part.cost() - refunded + std::mem::take(&mut missing);
                part.settle(cost, ops);
            }
        }
        for tried in reserved {
            let cost = cost(tried.cost().saturating_add(more));
            tried.settle(cost, ops);
        }
    }
}
