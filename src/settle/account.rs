use std::cmp::Ordering;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use smallvec::SmallVec;

use super::settlement::Counted;
use super::{RequestCost, Settlement};
use crate::background::{OpQueue, PendingOp};
use crate::in_flight::Slot;
use crate::limit::{Charge, Check, Decision};
use crate::util::lock;

/// The reservations of one request. Dropping it settles them.
pub(crate) struct Account {
    ops: OpQueue,
    /// The cost reserved under the layer's policies, enforced or in a dry run.
    reserved: AtomicU32,
    /// The part of `reserved` that the handler has added. The layer's decision does not include it.
    /// Written under the lock.
    extra: AtomicU32,
    /// The cost counted by the handles, or [`UNUSED`].
    units: AtomicU64,
    bytes: AtomicU64,
    state: Mutex<AccountState>,
    /// The handle of the next outer layer that settles. It counts the same cost.
    outer: OnceLock<RequestCost>,
}

struct AccountState {
    open: Open,
    settlement: Settlement,
    /// The slots under policies of requests in flight.
    in_flight: SmallVec<[Slot; 1]>,
}

/// The charges that are not settled yet.
#[derive(Default)]
struct Open {
    /// One per list of policies: first the enforced one, if any. Dry runs and shadows add theirs
    /// after their replies.
    reserved: SmallVec<[Charge; 1]>,
    /// Whether the first of `reserved` is under policies that the layer enforces.
    enforced: bool,
    /// The handler's additions to the first of `reserved`.
    extra: Vec<Charge>,
}

/// The cost of a request, and the reserved cost that it replaces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    pub(crate) reserved: u32,
    pub(crate) cost: u32,
}

/// Marks a request for which no handle has counted a cost.
const UNUSED: u64 = u64::MAX;

impl Account {
    /// Creates the account of a request, which may have reserved nothing. By default the handles
    /// determine the cost.
    pub(crate) fn new(ops: OpQueue, reserved: Option<Charge>, slot: Option<Slot>) -> Self {
        let in_flight = slot.into_iter().collect();
        let cost = reserved.as_ref().map_or(0, Charge::cost);
        let enforced = reserved.is_some();
        let open = Open {
            reserved: reserved.into_iter().collect(),
            enforced,
            extra: Vec::new(),
        };
        let state = AccountState {
            open,
            settlement: Settlement::AtEnd,
            in_flight,
        };
        Self {
            ops,
            reserved: AtomicU32::new(cost),
            extra: AtomicU32::new(0),
            units: AtomicU64::new(UNUSED),
            bytes: AtomicU64::new(0),
            state: Mutex::new(state),
            outer: OnceLock::new(),
        }
    }

    /// Also counts for an outer layer.
    pub(super) fn count_for(&self, outer: RequestCost) {
        // Called once per request.
        let _ = self.outer.set(outer);
    }

    /// Sets the reserved cost when a dry run sends its check. The grant is [added](Self::add) after
    /// the reply.
    pub(crate) fn reserves(&self, cost: u32) {
        self.reserved.store(cost, Relaxed);
    }

    /// Adds the reservation and the slot of a dry run or a shadow. If the head of the response has
    /// already determined the cost, settles the reservation.
    pub(crate) fn add(&self, reserved: Charge, slot: Option<Slot>) {
        let cost = {
            let mut state = lock(&self.state);
            state.in_flight.extend(slot);
            match state.settlement.cost_at_head(reserved.cost()) {
                None => return state.open.reserved.push(reserved),
                Some(cost) => cost,
            }
        };
        settle(&reserved, cost, &self.ops);
    }

    /// Applies the layer's rule, which has seen the head of the response. Either settles
    /// immediately, or stores how to settle at the end. Returns the cost under the layer's policies,
    /// if the rule determines it and something is reserved there.
    pub(crate) fn settle(&self, settlement: Settlement) -> Option<Settled> {
        let (open, known, cost) = {
            let mut state = lock(&self.state);
            state.settlement = settlement;
            let reserved = self.reserved();
            let cost = settlement.cost_at_head(reserved)?;
            (
                std::mem::take(&mut state.open),
                reserved.saturating_sub(self.extra.swap(0, Relaxed)),
                cost,
            )
        };
        let settled = open.enforced.then_some(Settled {
            reserved: known,
            cost,
        });
        open.settle(
            |reserved| settlement.cost(reserved, Counted::default()),
            &self.ops,
        );
        settled
    }

    /// Returns the check that reserves more under the layer's policies. `None` if nothing is
    /// reserved there, or if it is already settled.
    pub(super) fn check_extra(&self, units: u32) -> Option<Check> {
        let state = lock(&self.state);
        let reserved = state.open.reserved.first();
        let reserved = reserved.filter(|_| state.open.enforced)?;
        let policies = reserved.decision().policies().whole();
        let check = Check::take(*reserved.key(), policies.without_in_flight()?, units);
        Some(check.reserving(true))
    }

    /// Adds the grant of a check by [`check_extra`](Self::check_extra).
    pub(super) fn add_extra(&self, reserved: Charge) {
        let units = reserved.cost();
        let settlement = {
            let mut state = lock(&self.state);
            if state.settlement.cost_at_head(units).is_none() {
                state.open.extra.push(reserved);
                for sum in [&self.reserved, &self.extra] {
                    sum.store(sum.load(Relaxed).saturating_add(units), Relaxed);
                }
                return;
            }
            state.settlement
        };
        // The rule was applied before the reply. If it determined the cost, that is already
        // charged.
        let kept = if settlement == Settlement::Keep {
            units
        } else {
            0
        };
        settle(&reserved, kept, &self.ops);
    }

    /// Refunds the newest addition of `units`, because an outer layer has not reserved its own.
    pub(super) fn refund_extra(&self, units: u32) {
        let given = {
            let extra = &mut lock(&self.state).open.extra;
            let Some(at) = extra.iter().rposition(|reserved| reserved.cost() == units) else {
                return;
            };
            self.reserved.fetch_sub(units, Relaxed);
            self.extra.fetch_sub(units, Relaxed);
            extra.swap_remove(at)
        };
        settle(&given, 0, &self.ops);
    }

    /// Adds the later reservations to the layer's decision.
    pub(crate) fn update(&self, decision: Decision) -> Decision {
        match self.extra.load(Relaxed) {
            0 => decision,
            extra => decision.settled(self.reserved().saturating_sub(extra), self.reserved()),
        }
    }

    /// Releases the slots when the call has ended, even if its cost is not settled yet.
    pub(crate) fn end(&self) {
        let _ended = std::mem::take(&mut lock(&self.state).in_flight);
    }

    /// Sends an operation immediately. Its callback gets the result.
    pub(super) fn send(&self, op: PendingOp) {
        self.ops.send_now(op);
    }

    /// Returns the handle of the outer layer.
    pub(super) fn outer(&self) -> Option<&RequestCost> {
        self.outer.get()
    }

    /// Counts bytes of the body that were sent.
    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn reserved(&self) -> u32 {
        self.reserved.load(Relaxed)
    }

    /// Returns the counted cost, if a handle has counted any.
    pub(super) fn counted(&self) -> Option<u64> {
        Some(self.units.load(Relaxed)).filter(|units| *units != UNUSED)
    }

    /// Counts for this account and for the outer ones.
    pub(super) fn count(&self, count: impl Fn(u64) -> u64 + Copy) {
        // Stay below `UNUSED`.
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
        let state = self
            .state
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let settlement = state.settlement;
        std::mem::take(&mut state.open)
            .settle(|reserved| settlement.cost(reserved, counted), &self.ops);
    }
}

impl Open {
    /// Settles each reservation. `cost` returns the cost of the request, given the reserved cost.
    fn settle(self, cost: impl Fn(u32) -> u32, ops: &OpQueue) {
        let Self {
            reserved, extra, ..
        } = self;
        let extra_cost = extra.iter().map(Charge::cost).fold(0, u32::saturating_add);
        let mut reserved = reserved.into_iter();
        if !extra.is_empty()
            && let Some(first) = reserved.next()
        {
            let all = first.cost().saturating_add(extra_cost);
            let cost = cost(all);
            let (mut back, mut missing) = (all.saturating_sub(cost), cost.saturating_sub(all));
            // Refund the newest reservation first, since all of it still counts.
            for part in extra.into_iter().rev().chain([first]) {
                let refunded = back.min(part.cost());
                back -= refunded;
                let cost = part.cost() - refunded + std::mem::take(&mut missing);
                settle(&part, cost, ops);
            }
        }
        for tried in reserved {
            let cost = cost(tried.cost().saturating_add(extra_cost));
            settle(&tried, cost, ops);
        }
    }
}

/// Charges the caller `cost` instead of a charge: refunds the rest, or charges the missing part.
fn settle(charge: &Charge, cost: u32, ops: &OpQueue) {
    let reserved = charge.cost();
    match cost.cmp(&reserved) {
        Ordering::Less => ops.put(PendingOp::refund(charge.clone(), reserved - cost)),
        Ordering::Equal => {}
        Ordering::Greater => {
            // Policies of requests in flight count a request as one, regardless of its cost.
            let policies = charge.decision().policies().whole();
            if let Some(policies) = policies.without_in_flight() {
                ops.put(PendingOp::charge(*charge.key(), policies, cost - reserved));
            }
        }
    }
}
