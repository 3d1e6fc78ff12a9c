use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;

use crate::background::{OpQueue, PendingOp};
use crate::error::StoreError;
use crate::held_slots::Slot;
use crate::limit::{Charge, Check, Decision, JointCheck, JointDecision};
use crate::observe::mistakes::UPGRADE_WITHOUT_COST;
use crate::store::SettledCost;
use crate::util::{instant, lock};

/// The charges and the slots of one request. Dropping it settles and releases them.
pub(crate) struct RequestCharges {
    ops: OpQueue,
    /// The cost reserved under the layer's policies, enforced or in a dry run.
    reserved: AtomicU32,
    /// The part of `reserved` that the handler has added. The layer's decision does not include it.
    /// Written under the lock.
    extra: AtomicU32,
    /// The cost counted by the handles, or [`UNUSED`].
    units: AtomicU64,
    bytes: AtomicU64,
    state: Mutex<ChargesState>,
    /// The charges of the request under the next outer layer that settles, which count the same cost.
    outer: OnceLock<Arc<RequestCharges>>,
}

struct ChargesState {
    unsettled: Unsettled,
    settlement: Settlement,
    /// The slots under policies of requests in flight.
    in_flight: SmallVec<[Slot; 1]>,
}

/// The charges that are not settled yet.
#[derive(Default)]
struct Unsettled {
    /// One per key and list of policies: first the enforced ones, if any. Dry runs and shadows add theirs
    /// after their replies.
    reserved: SmallVec<[Charge; 1]>,
    /// Number of the first of `reserved` that are under policies that the layer enforces: one for each key.
    enforced: usize,
    /// The handler's additions to the enforced ones, without `expired`.
    extra: Vec<Addition>,
    /// The cost of the additions that can no longer be refunded.
    expired: u32,
}

/// An addition to what is reserved: a charge for each key.
pub(super) type Addition = SmallVec<[Charge; 1]>;

/// How a reservation is settled. A rule of
/// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) returns this when it receives the head
/// of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Settlement {
    /// Keeps the reservation: the request costs the reserved amount.
    Keep,
    /// Refunds the reservation: the request costs nothing.
    Refund,
    /// The request costs this amount: the rest of the reservation is refunded, or the missing part
    /// is [charged](crate::check::Check::charge) even beyond the limit.
    Cost(u32),
    /// The request costs the amount that its [`RequestCost`](crate::settle::RequestCost) has counted when the
    /// response body has ended or was dropped and every clone of the `RequestCost` is dropped. If
    /// nothing was counted, the reservation is kept.
    AtEnd,
    /// The request costs one per `per` bytes of the body that were sent, rounded up, when the body
    /// has ended or was dropped and every clone of the [`RequestCost`](crate::settle::RequestCost) is
    /// dropped. The response to a `HEAD` has no body, and costs nothing.
    Bytes {
        /// The number of bytes that cost one.
        per: NonZeroU32,
    },
}

/// The amounts counted by the end of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CountedAmounts {
    /// The cost that the handles have counted, if any.
    pub(super) units: Option<u64>,
    pub(super) bytes: u64,
}

impl Settlement {
    /// Returns the cost of a request, if the rule determines it without the counted amounts.
    pub(super) fn cost_at_head(self, reserved: u32) -> Option<u32> {
        match self {
            Self::Keep => Some(reserved),
            Self::Refund => Some(0),
            Self::Cost(cost) => Some(cost),
            Self::AtEnd | Self::Bytes { .. } => None,
        }
    }

    /// Returns the cost of a request, given the counted amounts.
    pub(super) fn cost(self, reserved: u32, counted: CountedAmounts) -> u32 {
        let units = match self {
            Self::AtEnd => counted.units.unwrap_or(reserved.into()),
            Self::Bytes { per } => counted.bytes.div_ceil(per.get().into()),
            Self::Keep | Self::Refund | Self::Cost(_) => {
                self.cost_at_head(reserved).unwrap_or(reserved).into()
            }
        };
        u32::try_from(units).unwrap_or(u32::MAX)
    }
}

/// Marks a request for which no handle has counted a cost.
const UNUSED: u64 = u64::MAX;

impl RequestCharges {
    /// Suspects that an upgraded connection is not counted, since nothing else keeps these charges.
    #[cold]
    pub(crate) fn upgraded_alone(&self) {
        if !lock(&self.state).in_flight.is_empty() {
            self.ops.suspect(&format!(
                "an upgraded connection, such as a WebSocket, is not counted in flight, since its task keeps no `RequestCost`: take one \
                 in the handler and move it into the task{UPGRADE_WITHOUT_COST}"
            ));
        }
    }

    /// Creates the charges of a request, one for each key, which may have reserved nothing. By default the handles
    /// determine the cost.
    pub(crate) fn new(
        ops: OpQueue,
        reserved: impl IntoIterator<Item = Charge>,
        slots: impl IntoIterator<Item = Slot>,
    ) -> Self {
        let in_flight = slots.into_iter().collect();
        let reserved: SmallVec<[Charge; 1]> = reserved.into_iter().collect();
        let cost = reserved.first().map_or(0, Charge::cost);
        let unsettled = Unsettled {
            enforced: reserved.len(),
            reserved,
            ..Unsettled::default()
        };
        let state = ChargesState {
            unsettled,
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
    pub(super) fn count_for(&self, outer: Arc<Self>) {
        // Called once per request.
        let _ = self.outer.set(outer);
    }

    /// Sets the reserved cost when a dry run sends its check. The grant is [added](Self::add) after
    /// the reply.
    pub(crate) fn set_reserved(&self, cost: u32) {
        self.reserved.store(cost, Relaxed);
    }

    /// Adds the reservation and the slot of a dry run or a shadow. If the head of the response has
    /// already determined the cost, settles the reservation.
    pub(crate) fn add(&self, reserved: Charge, slot: Option<Slot>) {
        let mut state = lock(&self.state);
        state.in_flight.extend(slot);
        let Some(cost) = state.settlement.cost_at_head(reserved.cost()) else {
            state.unsettled.reserved.push(reserved);
            return;
        };
        drop(state);
        settle(&reserved, cost, &self.ops);
    }

    /// Holds slots until the call ends.
    pub(crate) fn hold(&self, slots: impl IntoIterator<Item = Slot>) {
        lock(&self.state).in_flight.extend(slots);
    }

    /// Applies the layer's rule, which has seen the head of the response. Either settles
    /// immediately, or stores how to settle at the end. Returns the cost under the layer's policies,
    /// if the rule determines it and something is reserved there. After an immediate settlement, a
    /// second rule settles nothing.
    pub(crate) fn apply_rule(&self, settlement: Settlement) -> Option<SettledCost> {
        let mut state = lock(&self.state);
        state.settlement = settlement;
        let reserved = self.reserved();
        let cost = settlement.cost_at_head(reserved)?;
        // Taken, since the drop of the charges would settle them again. The default that is left enforces nothing, so the
        // handler cannot reserve more.
        let unsettled = std::mem::take(&mut state.unsettled);
        let extra = self.extra.swap(0, Relaxed);
        // A local store settles in this call, and notifies the user's observer.
        drop(state);
        let is_enforced = unsettled.enforced > 0;
        unsettled.settle(
            |reserved| settlement.cost(reserved, CountedAmounts::default()),
            &self.ops,
        );
        if !is_enforced {
            return None;
        }
        Some(SettledCost {
            // The decision that is updated by this does not include the additions.
            reserved: reserved.saturating_sub(extra),
            cost,
        })
    }

    /// Returns the checks that reserve more under the layer's policies, one for each key. Empty if nothing is
    /// reserved there, or if it is already settled.
    pub(super) fn extra_checks(&self, units: u32) -> SmallVec<[Check; 1]> {
        let mut checks = SmallVec::new();
        let unsettled = &lock(&self.state).unsettled;
        for reserved in &unsettled.reserved[..unsettled.enforced] {
            let policies = reserved.decision().policies().whole();
            if let Some(policies) = policies.without_in_flight() {
                let check = Check::take(*reserved.key(), policies, units);
                checks.push(check.without_block());
            }
        }
        checks
    }

    /// Adds the grant of [`extra_checks`](Self::extra_checks).
    pub(super) fn add_extra(&self, addition: Addition) {
        let units = cost_of(&addition);
        let mut state = lock(&self.state);
        if state.settlement.cost_at_head(units).is_none() {
            state.unsettled.add_extra(addition);
            for sum in [&self.reserved, &self.extra] {
                sum.store(sum.load(Relaxed).saturating_add(units), Relaxed);
            }
            return;
        }
        let settlement = state.settlement;
        drop(state);
        // The rule was applied before the reply. If it determined the cost, that is already
        // charged.
        let kept = if settlement == Settlement::Keep {
            units
        } else {
            0
        };
        settle_each(&addition, kept, &self.ops);
    }

    /// Refunds the newest addition of `units`, because an outer layer has not reserved its own.
    pub(super) fn refund_extra(&self, units: u32) {
        let mut state = lock(&self.state);
        let extra = &mut state.unsettled.extra;
        // Not necessarily its own: equal additions are interchangeable.
        let Some(at) = extra
            .iter()
            .rposition(|addition| cost_of(addition) == units)
        else {
            return;
        };
        let given = extra.remove(at);
        self.reserved.fetch_sub(units, Relaxed);
        self.extra.fetch_sub(units, Relaxed);
        drop(state);
        settle_each(&given, 0, &self.ops);
    }

    /// Adds the later reservations to the layer's decision.
    pub(crate) fn update(&self, decision: Decision) -> Decision {
        match self.extra.load(Relaxed) {
            0 => decision,
            extra => {
                let cost = self.reserved();
                let reserved = cost.saturating_sub(extra);
                SettledCost { reserved, cost }.update(decision)
            }
        }
    }

    /// Releases the slots when the call has ended, even if its cost is not settled yet.
    pub(crate) fn end(&self) {
        // Released after the lock: a release is sent to the store in this call.
        let _ended = std::mem::take(&mut lock(&self.state).in_flight);
    }

    /// Sends an operation immediately. Its callback gets the result.
    pub(super) fn send(&self, op: PendingOp) {
        self.ops.send_now(op);
    }

    /// Sends a check of several keys immediately. The callback gets the result.
    pub(super) fn send_all(
        &self,
        joint: JointCheck,
        callback: impl FnOnce(Result<JointDecision, StoreError>) + Send + 'static,
    ) {
        self.ops.send_all_now(joint, callback);
    }

    /// Returns the charges of the outer layer.
    pub(super) fn outer(&self) -> Option<&Arc<Self>> {
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
        match self.units.load(Relaxed) {
            UNUSED => None,
            units => Some(units),
        }
    }

    /// Counts for this layer and for the outer ones.
    pub(super) fn count(&self, count: impl Fn(u64) -> u64 + Copy) {
        let _ = self.units.fetch_update(Relaxed, Relaxed, |units| {
            let before = if units == UNUSED { 0 } else { units };
            // Below `UNUSED`, which is no count.
            Some(count(before).min(UNUSED - 1))
        });
        if let Some(outer) = self.outer.get() {
            outer.count(count);
        }
    }
}

impl Drop for RequestCharges {
    fn drop(&mut self) {
        let counted = CountedAmounts {
            units: self.counted(),
            bytes: *self.bytes.get_mut(),
        };
        let state = self
            .state
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let settlement = state.settlement;
        if settlement == Settlement::AtEnd
            && let Some(first) = state.unsettled.reserved.first()
            && first.decision().policies().without_in_flight().is_some()
        {
            self.ops
                .ended(*self.reserved.get_mut() > 0 || counted.units.is_some());
        }
        std::mem::take(&mut state.unsettled)
            .settle(|reserved| settlement.cost(reserved, counted), &self.ops);
    }
}

impl Unsettled {
    /// Adds an addition. Before the list grows, folds the additions that can no longer be refunded into one number, so
    /// that a long stream keeps the additions of about one period.
    fn add_extra(&mut self, addition: Addition) {
        if self.extra.len() == self.extra.capacity() {
            let now = instant();
            let expired = self.extra.extract_if(.., |addition| {
                let mut charges = addition.iter();
                charges.all(|charge| charge.refund(charge.cost(), now).is_none())
            });
            for addition in expired {
                self.expired = self.expired.saturating_add(cost_of(&addition));
            }
            // Room for twice the rest, so that a search costs a constant time per addition.
            self.extra.reserve(self.extra.len());
        }
        self.extra.push(addition);
    }

    /// Settles each reservation. `cost` returns the cost of the request, given the reserved cost.
    fn settle(self, cost: impl Fn(u32) -> u32, ops: &OpQueue) {
        let Self {
            reserved,
            enforced,
            extra,
            expired,
        } = self;
        let mut extra_cost = expired;
        for addition in &extra {
            extra_cost = extra_cost.saturating_add(cost_of(addition));
        }
        for (place, charge) in reserved.into_iter().enumerate() {
            let all = charge.cost().saturating_add(extra_cost);
            let cost = cost(all);
            if extra_cost == 0 || place >= enforced {
                settle(&charge, cost, ops);
                continue;
            }
            let additions = extra.iter().filter_map(|addition| addition.get(place));
            for (charge, cost) in split(charge, additions.cloned().collect(), expired, cost) {
                settle(&charge, cost, ops);
            }
        }
    }
}

/// Returns the cost of an addition, which is the same for each key.
fn cost_of(addition: &Addition) -> u32 {
    addition.first().map_or(0, Charge::cost)
}

/// Splits the cost of a request over its first reservation and the additions to it. `expired` is the cost of the additions
/// that can no longer be refunded. Returns the charges, newest first, each with the part of the cost that replaces it.
///
/// The newest are refunded first, since they are the last to drain or expire. A missing cost is charged with the newest.
fn split(first: Charge, extra: Vec<Charge>, expired: u32, cost: u32) -> Vec<(Charge, u32)> {
    let mut reserved = first.cost().saturating_add(expired);
    for charge in &extra {
        reserved = reserved.saturating_add(charge.cost());
    }
    let mut back = reserved.saturating_sub(cost);
    let missing = cost.saturating_sub(reserved);
    let mut parts = Vec::with_capacity(extra.len() + 1);
    for charge in extra.into_iter().rev() {
        let refunded = charge.cost().min(back);
        back -= refunded;
        let kept = charge.cost() - refunded;
        parts.push((charge, kept));
    }
    // Older than the additions, newer than the first: that part of the refund is lost.
    back = back.saturating_sub(expired);
    let kept = first.cost().saturating_sub(back);
    parts.push((first, kept));
    if let Some((_, newest)) = parts.first_mut() {
        *newest += missing;
    }
    parts
}

/// Charges each caller `cost` instead of an addition.
fn settle_each(addition: &Addition, cost: u32, ops: &OpQueue) {
    for charge in addition {
        settle(charge, cost, ops);
    }
}

/// Replaces one charge of a request by its part of the cost: refunds the rest, or charges the missing part.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;
    use crate::limit::{Key, Policy, Quota, Source, Strategy, Verdict};
    use crate::limiter::Limiter;
    use crate::settle::RequestCost;
    use crate::store::{LocalStore, op_queue};

    /// A stream adds 1 every 10 ms for 40 periods of the policy.
    #[tokio::test(start_paused = true)]
    async fn a_long_stream_keeps_the_additions_that_count() {
        for (cost, refunded) in [(3_951, 50), (4_001, 0), (4_006, -5), (0, 99)] {
            let policy = Policy::new("test", Strategy::SlidingLog, Quota::per_second(1_000));
            let (key, store) = (Key::GLOBAL, LocalStore::default());
            let limiter = Limiter::new(store.clone(), policy.unwrap());
            let first = limiter.take(key, 1).await.unwrap();
            let first = Charge::new(key, first, 1, instant(), instant());
            let stream = RequestCost::new(op_queue(store, None), Some(first), None);
            for _ in 0..4_000 {
                stream.reserve(1).await.unwrap();
                sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(stream.reserved(), 4_001);
            let kept = lock(&stream.charges().state).unsettled.extra.capacity();
            assert!(kept <= 400, "{kept} additions are kept");
            let remaining = async || limiter.peek(key, 0).await.unwrap().remaining();
            let before = remaining().await;
            stream.set(cost);
            drop(stream);
            let after = remaining().await;
            assert_eq!(
                i64::from(after) - i64::from(before),
                refunded,
                "costs {cost}"
            );
        }
    }

    /// A first reservation of 10, then 2 that have expired, then 3 and 5.
    #[test]
    fn the_newest_charges_are_refunded_first() {
        let policies = Policy::new("test", Strategy::Gcra, Quota::per_second(1_000));
        let policies = policies.unwrap().into();
        let charge = |cost| {
            let take = Check::take(Key::GLOBAL, &policies, cost);
            let decision = take.decided(Source::Local, cost, |_| Verdict::allowed());
            Charge::new(Key::GLOBAL, decision, cost, instant(), instant())
        };
        for (extra, cost, parts) in [
            (&[3, 5][..], 23, &[(5, 8), (3, 3), (10, 10)][..]),
            (&[3, 5], 20, &[(5, 5), (3, 3), (10, 10)]),
            (&[3, 5], 17, &[(5, 2), (3, 3), (10, 10)]),
            (&[3, 5], 13, &[(5, 0), (3, 1), (10, 10)]),
            // The expired part cannot be refunded.
            (&[3, 5], 11, &[(5, 0), (3, 0), (10, 10)]),
            (&[3, 5], 9, &[(5, 0), (3, 0), (10, 9)]),
            (&[3, 5], 0, &[(5, 0), (3, 0), (10, 0)]),
            (&[], 15, &[(10, 13)]),
            (&[], 11, &[(10, 10)]),
            (&[], 4, &[(10, 4)]),
        ] {
            let extra_charges = extra.iter().map(|cost| charge(*cost)).collect();
            let split = split(charge(10), extra_charges, 2, cost);
            let split: Vec<_> = split
                .iter()
                .map(|(part, cost)| (part.cost(), *cost))
                .collect();
            assert_eq!(split, parts, "{cost} for {extra:?}");
        }
    }

    #[test]
    fn each_rule_determines_the_cost() {
        let per = NonZeroU32::new(1_000).unwrap();
        let counted = |units, bytes| CountedAmounts { units, bytes };
        for (settlement, counted, at_head, cost) in [
            (Settlement::Keep, counted(Some(3), 9), Some(7), 7),
            (Settlement::Refund, counted(Some(3), 9), Some(0), 0),
            (Settlement::Cost(9), counted(Some(3), 9), Some(9), 9),
            (Settlement::AtEnd, counted(None, 9), None, 7),
            (Settlement::AtEnd, counted(Some(0), 9), None, 0),
            (
                Settlement::AtEnd,
                counted(Some(u64::MAX), 9),
                None,
                u32::MAX,
            ),
            (Settlement::Bytes { per }, counted(Some(3), 0), None, 0),
            (Settlement::Bytes { per }, counted(None, 1), None, 1),
            (Settlement::Bytes { per }, counted(None, 2_000), None, 2),
            (
                Settlement::Bytes { per },
                counted(None, u64::MAX),
                None,
                u32::MAX,
            ),
        ] {
            assert_eq!(settlement.cost_at_head(7), at_head, "{settlement:?}");
            assert_eq!(
                settlement.cost(7, counted),
                cost,
                "{settlement:?} {counted:?}"
            );
        }
    }
}
