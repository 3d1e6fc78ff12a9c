//! Slots of this process's requests in flight. The store's side is in `src/limit/in_flight.rs`.
//!
//! A request under a policy of [requests in flight](crate::Policy::in_flight) owns a [`Slot`] while
//! it runs. The slot is renewed every third of its TTL, and released when it is dropped. Taking,
//! renewing and releasing a slot are idempotent, so the store's count can be corrected without
//! knowing the reply to any of them:
//!
//! - A release is sent until it has a reply, or the slot has expired. A full queue drops it, and then
//!   the slot expires.
//! - A take or a renewal without a reply may be decided after the release, since checks use several
//!   connections. So the release is repeated half a second and a second later, unless the store has
//!   replied to a later renewal. A check that arrives even later takes a slot that expires.
//! - A renewal takes the slot again if the store has lost it. So after an outage or a `FLUSHALL`,
//!   the count is complete again within a third of the TTL.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use crate::background::{OpQueue, PendingOp, Task, TaskOwner};
use crate::error::StoreError;
use crate::limit::{Check, Decision, JointCheck, JointDecision, Key, MadeBy, Policies, SlotId};
use crate::observe::Observer;
use crate::store::{Store, op_queue};
use crate::util::{RandomState, instant, lock};

/// The slots of a layer or a [`Limiter`](crate::Limiter) in its store. Clones share the slots.
#[derive(Clone)]
pub(crate) struct InFlightTracker(Arc<SharedSlots>);

struct SharedSlots {
    ops: OpQueue,
    slots: Mutex<TrackedSlots>,
    renewer: TaskOwner,
}

#[derive(Default)]
struct TrackedSlots {
    by_number: HashMap<u64, TrackedSlot, RandomState>,
    /// Number of slots that were ever tracked: the number of the next slot. A check over several keys has one slot id for
    /// all keys.
    tracked: u64,
    /// The next renewal of each admitted request, by time.
    renewals: BTreeSet<(Instant, u64)>,
    /// Whether some slots have expired, since the queue had no room for their renewals in time.
    are_late: bool,
}

struct TrackedSlot {
    id: SlotId,
    key: Key,
    /// The policies that limit requests in flight.
    policies: Policies,
    /// Time of the next renewal, also in `renewals`. `None` until the request is admitted.
    renew_at: Option<Instant>,
    /// Whether a take or a renewal has no reply yet.
    is_unanswered: bool,
    /// Whether the next renewal is sent soon after the take, which may still be on its way.
    is_renewed_early: bool,
}

/// The slot of a request. Dropping it releases the slot.
#[must_use]
pub(crate) struct Slot {
    tracker: InFlightTracker,
    number: u64,
}

/// The slots of a request over several keys: one for each key with a policy of requests in flight.
#[must_use]
#[derive(Default)]
pub(crate) struct JointSlots(SmallVec<[JointSlot; 1]>);

struct JointSlot {
    slot: Slot,
    /// Index of its part of the check.
    part: usize,
}

/// Interval at which the task renews the slots that are due. Shorter than a third of any TTL.
const TICK: Duration = Duration::from_millis(250);
/// Interval of ticks while the queue has no room for all of them.
const BUSY_TICK: Duration = Duration::from_millis(5);

impl InFlightTracker {
    /// Creates a tracker of slots in `store`. `observer` is notified of operations that its queue gives
    /// up: see [`OpQueue`].
    pub(crate) fn new(store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        Self(Arc::new(SharedSlots {
            ops: op_queue(store.clone(), observer),
            slots: Mutex::default(),
            renewer: TaskOwner::new(),
        }))
    }

    /// The queue of the store's background operations.
    pub(crate) fn ops(&self) -> &OpQueue {
        &self.0.ops
    }

    /// Creates the slot that this check takes, before the check is sent. `None` if no policy limits
    /// requests in flight.
    pub(crate) fn track(&self, check: &Check) -> Option<Slot> {
        let policies = check.policies().in_flight()?;
        let id = check.slot()?;
        let tracked = TrackedSlot {
            id,
            key: *check.key(),
            policies: policies.clone(),
            renew_at: None,
            is_unanswered: true,
            is_renewed_early: false,
        };
        let number = lock(&self.0.slots).add(tracked);
        // Exact, since the task ends under the same lock.
        if !self.0.renewer.is_running() {
            self.0.ensure_renewer();
        }
        // Resend operations left over by a runtime that has shut down.
        self.0.ops.wake();
        Some(Slot {
            tracker: self.clone(),
            number,
        })
    }
}

impl InFlightTracker {
    /// Creates the slots that this check takes, before the check is sent.
    pub(crate) fn track_all(&self, joint: &JointCheck) -> JointSlots {
        let mut slots = SmallVec::new();
        for (part, check) in joint.parts().iter().enumerate() {
            if let Some(slot) = self.track(check) {
                slots.push(JointSlot { slot, part });
            }
        }
        JointSlots(slots)
    }
}

impl JointSlots {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Handles the store's reply, like [`Slot::on_reply`]: all slots are taken, or none.
    pub(crate) fn on_reply(&mut self, reply: Result<&JointDecision, &StoreError>) {
        for JointSlot { slot, part } in &mut self.0 {
            slot.on_reply(reply.map(|decided| {
                let whole = decided.decision();
                match decided.parts().get(*part) {
                    Some(Some(own)) if whole.is_allowed() || own.made_by() == MadeBy::Unsure => own,
                    // The store has released the slot, or never took it.
                    _ => whole,
                }
            }));
        }
    }

    /// See [`Slot::admitted_after_error`].
    pub(crate) fn admitted_after_error(self) -> Self {
        for JointSlot { slot, .. } in &self.0 {
            slot.tracker.0.renew_now(slot.number);
        }
        self
    }
}

impl IntoIterator for JointSlots {
    type Item = Slot;
    type IntoIter = std::vec::IntoIter<Slot>;

    fn into_iter(self) -> Self::IntoIter {
        let slots: Vec<Slot> = self.0.into_iter().map(|joint| joint.slot).collect();
        slots.into_iter()
    }
}

impl Slot {
    /// Handles the store's reply to the take: a granted slot will be renewed, a denied one was not taken.
    pub(crate) fn on_reply(&mut self, reply: Result<&Decision, &StoreError>) {
        let shared = &self.tracker.0;
        match reply {
            Ok(decision) if decision.is_allowed() => {
                shared.keep_renewed(self.number, decision.made_by() != MadeBy::Unsure)
            }
            // The shared store may have granted the slot: keep it, so that `drop` releases it.
            Ok(decision) if decision.made_by() == MadeBy::Unsure => {}
            Ok(_) => drop(shared.remove(self.number)),
            Err(error) => {
                if let Some(tracked) = lock(&shared.slots).by_number.get_mut(&self.number) {
                    tracked.is_unanswered = !error.is_not_sent();
                }
            }
        }
    }

    /// Keeps the slot of a request that is admitted after an error. The next tick takes the slot in the store, or if that
    /// fails too, a later renewal.
    pub(crate) fn admitted_after_error(self) -> Self {
        self.tracker.0.renew_now(self.number);
        self
    }

    /// Lets the slot expire instead of releasing it, for a request whose end cannot be seen.
    pub(crate) fn leave_counted(self) {
        drop(self.tracker.0.remove(self.number));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(tracked) = self.tracker.0.remove(self.number) else {
            return;
        };
        if !tracked.is_unanswered && tracked.renew_at.is_none() {
            // The take was denied, or never sent.
            return;
        }
        let check = Check::release(tracked.key, &tracked.policies, tracked.id);
        let release = PendingOp::of_check(check);
        self.tracker.0.ops.put(if tracked.is_unanswered {
            release.repeated()
        } else {
            release
        });
    }
}

/// A renewal of a slot, to be sent.
struct Renewal {
    number: u64,
    /// Whether an earlier check of the slot has no reply yet.
    was_unanswered: bool,
    /// Whether such a check may still be on its way.
    is_early: bool,
    check: Check,
}

impl TrackedSlot {
    /// A third of the shortest TTL, so that a slot outlives a lost renewal.
    fn renewal_interval(&self) -> Duration {
        let mut ttl = Duration::MAX;
        for policy in &self.policies {
            ttl = ttl.min(policy.quota().period());
        }
        ttl / 3
    }
}

impl TrackedSlots {
    /// Adds a slot. Returns its number.
    fn add(&mut self, tracked: TrackedSlot) -> u64 {
        let number = self.tracked;
        self.tracked += 1;
        self.by_number.insert(number, tracked);
        number
    }

    /// Schedules the next renewal of a slot, an interval after `now`.
    fn schedule(&mut self, number: u64, now: Instant) -> Option<&mut TrackedSlot> {
        let interval = self.by_number.get(&number)?.renewal_interval();
        self.schedule_at(number, now + interval)
    }

    fn schedule_at(&mut self, number: u64, at: Instant) -> Option<&mut TrackedSlot> {
        let tracked = self.by_number.get_mut(&number)?;
        if let Some(last) = tracked.renew_at.replace(at) {
            self.renewals.remove(&(last, number));
        }
        self.renewals.insert((at, number));
        Some(tracked)
    }

    /// Returns the renewals of the slots that are due before the next tick: the `max` oldest. The others stay due.
    fn due(&mut self, now: Instant, max: usize) -> Vec<Renewal> {
        let next_tick = now + TICK;
        // Collected first: scheduling moves the renewals.
        let mut numbers = vec![];
        for (at, number) in self.renewals.iter().take(max) {
            if *at > next_tick {
                break;
            }
            numbers.push(*number);
        }
        let mut renewals = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(tracked) = self.schedule(number, now) else {
                continue;
            };
            renewals.push(Renewal {
                number,
                was_unanswered: mem::replace(&mut tracked.is_unanswered, true),
                is_early: mem::take(&mut tracked.is_renewed_early),
                check: Check::renew(tracked.key, &tracked.policies, tracked.id),
            });
        }
        renewals
    }

    /// Returns the caller of a slot that has expired because its renewal is late, unless one was returned at the last
    /// call.
    fn take_newly_late(&mut self, now: Instant) -> Option<Key> {
        let late = self.late_caller(now);
        let were_late = mem::replace(&mut self.are_late, late.is_some());
        if were_late { None } else { late }
    }

    fn late_caller(&self, now: Instant) -> Option<Key> {
        let (renew_at, number) = self.renewals.first()?;
        let tracked = self.by_number.get(number)?;
        // A slot lives for three intervals, and is due after one.
        let expires_at = *renew_at + 2 * tracked.renewal_interval();
        if now <= expires_at {
            return None;
        }
        Some(tracked.key)
    }
}

impl SharedSlots {
    fn remove(&self, number: u64) -> Option<TrackedSlot> {
        let mut slots = lock(&self.slots);
        let removed = slots.by_number.remove(&number)?;
        if let Some(at) = removed.renew_at {
            slots.renewals.remove(&(at, number));
        }
        Some(removed)
    }

    /// Starts the renewals of a slot, unless they are started. `is_answered` is `true` if the store has
    /// replied to its take or to a renewal, so that no earlier check is still on its way.
    fn keep_renewed(&self, number: u64, is_answered: bool) {
        let mut slots = lock(&self.slots);
        if let Some(tracked) = slots.by_number.get_mut(&number) {
            tracked.is_unanswered &= !is_answered;
            if tracked.renew_at.is_none() {
                slots.schedule(number, instant());
            }
        }
    }

    /// Renews a slot at the next tick.
    fn renew_now(&self, number: u64) {
        if let Some(tracked) = lock(&self.slots).schedule_at(number, instant()) {
            tracked.is_renewed_early = true;
        }
    }

    /// Starts the renewal task. Outside a runtime, does one tick of its work directly.
    fn ensure_renewer(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.renewer.spawn(None, |task| renew(this, task));
        if !self.renewer.is_running() {
            self.tick(instant());
        }
    }

    /// Renews the slots that are due. Returns the time until the next tick.
    fn tick(self: &Arc<Self>, now: Instant) -> Duration {
        let room = self.ops.renewal_room();
        let mut slots = lock(&self.slots);
        let renewals = slots.due(now, room);
        let late = slots.take_newly_late(now);
        // The rest notifies the observer, and sends checks: both run the user's code.
        drop(slots);
        let is_full = renewals.len() == room;
        if let Some(key) = late {
            self.ops.report_full(&key);
        }
        for renewal in renewals {
            let this = Arc::downgrade(self);
            let op = PendingOp::of_check(renewal.check).then(move |reply| {
                if let (Ok(decision), Some(this)) = (reply, this.upgrade()) {
                    let was_unanswered = renewal.was_unanswered;
                    this.on_renewed(renewal.number, was_unanswered, renewal.is_early, &decision);
                }
            });
            self.ops.put(op);
        }
        if is_full { BUSY_TICK } else { TICK }
    }

    fn on_renewed(&self, number: u64, was_unanswered: bool, is_early: bool, decision: &Decision) {
        // A fallback's renewal is no reply to earlier checks, and an early one may overtake them.
        let answers_earlier = decision.made_by() == MadeBy::There && !is_early;
        let is_unanswered =
            decision.made_by() == MadeBy::Unsure || was_unanswered && !answers_earlier;
        self.keep_renewed(number, !is_unanswered);
    }
}

/// Renews slots for as long as there are any.
async fn renew(shared: Weak<SharedSlots>, task: Task) {
    let mut next = TICK;
    loop {
        sleep(next).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        {
            let slots = lock(&shared.slots);
            // Ended under the lock: a slot that is tracked later finds no task, and starts one.
            if slots.by_number.is_empty() {
                return drop(task);
            }
        }
        next = shared.tick(instant());
    }
}
