//! Slots of this process's requests in flight. The store's side is in `src/limit/in_flight.rs`.
//!
//! A request under a policy of [requests in flight](crate::Policy::in_flight) owns a [`Slot`] while
//! it runs. The slot is renewed every third of its TTL, and released when it is dropped. Taking,
//! renewing and releasing a slot are idempotent, so the store's count can be corrected without
//! knowing the reply to any of them:
//!
//! - A release is sent until it has a reply, or the slot has expired.
//! - A take or a renewal without a reply may be decided after the release, since checks use several
//!   connections. So the release is repeated half a second later.
//! - A renewal takes the slot again if the store has lost it. So after an outage or a `FLUSHALL`,
//!   the count is complete again within a third of the TTL.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::background::{OpQueue, PendingOp, Task, TaskOwner};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Policies, Policy, SlotId};
use crate::observe::Observer;
use crate::store::{Store, op_queue};
use crate::util::{instant, lock};

/// The slots of a layer or a [`Limiter`](crate::Limiter) in its store. Clones share the slots.
#[derive(Clone)]
pub(crate) struct InFlightTracker(Arc<Inner>);

struct Inner {
    ops: OpQueue,
    slots: Mutex<Slots>,
    renewer: TaskOwner,
}

#[derive(Default)]
struct Slots {
    each: BTreeMap<SlotId, Entry>,
    /// No slot has to be renewed before this time.
    due_at: Option<Instant>,
}

struct Entry {
    key: Key,
    /// The policies that limit requests in flight.
    policies: Policies,
    /// Time of the next renewal. `None` until the request is admitted.
    due_at: Option<Instant>,
    /// Whether a take or a renewal has no reply yet.
    is_unsure: bool,
}

/// The slot of a request. Dropping it releases the slot.
#[must_use]
pub(crate) struct Slot {
    tracker: InFlightTracker,
    id: SlotId,
}

/// Interval at which the task checks for due slots.
const TICK: Duration = Duration::from_millis(250);

impl InFlightTracker {
    /// Creates a tracker of slots in `store`. `observer` is notified of slots that could not be
    /// released.
    pub(crate) fn new(store: &impl Store, observer: Option<Arc<dyn Observer>>) -> Self {
        let ops = op_queue(store.clone(), observer);
        Self(Arc::new(Inner {
            ops,
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
    pub(crate) fn hold(&self, check: &Check) -> Option<Slot> {
        let (policies, id) = (check.policies().in_flight()?, check.slot()?);
        let entry = Entry {
            key: *check.key(),
            policies: policies.clone(),
            due_at: None,
            is_unsure: true,
        };
        lock(&self.0.slots).each.insert(id, entry);
        // The task ends under the same lock.
        if !self.0.renewer.is_running() {
            self.0.start();
        }
        // Resend operations left over by a runtime that has shut down.
        self.0.ops.wake();
        Some(Slot {
            tracker: self.clone(),
            id,
        })
    }
}

impl Slot {
    /// Handles the store's reply: a granted slot will be renewed, a denied one was not taken.
    pub(crate) fn answered(&mut self, answer: Result<&Decision, &StoreError>) {
        let slots = &mut *lock(&self.tracker.0.slots);
        match answer {
            Ok(decision) if decision.is_allowed() => slots.pass(self.id, decision.is_unsure()),
            // The shared store may have granted the slot: keep the entry, so that `drop` releases it.
            Ok(decision) if decision.is_unsure() => {}
            Ok(_) => drop(slots.each.remove(&self.id)),
            Err(error) => {
                if let Some(entry) = slots.each.get_mut(&self.id) {
                    entry.is_unsure = !error.is_not_sent();
                }
            }
        }
    }

    /// Keeps the slot of a request that is admitted after an error. The next renewal takes the slot in
    /// the store.
    pub(crate) fn passed(self) -> Self {
        lock(&self.tracker.0.slots).pass(self.id, true);
        self
    }

    /// Lets the slot expire instead of releasing it, for a request whose end cannot be seen.
    pub(crate) fn leave_counted(self) {
        let _entry = lock(&self.tracker.0.slots).each.remove(&self.id);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let entry = lock(&self.tracker.0.slots).each.remove(&self.id);
        let Some(Entry {
            key,
            policies,
            due_at,
            is_unsure,
        }) = entry
        else {
            return;
        };
        if is_unsure || due_at.is_some() {
            let release = PendingOp::of_check(Check::release(key, &policies, self.id));
            self.tracker.0.ops.put(if is_unsure {
                release.repeated()
            } else {
                release
            });
        }
    }
}

impl Slots {
    /// Starts renewing a slot, unless it is renewed already. `stays` is `true` if the store's reply to
    /// its take or renewal is still missing.
    fn pass(&mut self, id: SlotId, stays: bool) {
        let Some(entry) = self.each.get_mut(&id) else {
            return;
        };
        entry.is_unsure &= stays;
        if entry.due_at.is_none() {
            let due_at = instant() + entry.pause();
            entry.due_at = Some(due_at);
            self.due_at = Some(self.due_at.map_or(due_at, |first| first.min(due_at)));
        }
    }

    /// Returns the checks that renew all slots due before the next tick.
    fn renewals(&mut self, now: Instant) -> Vec<Check> {
        let mut due = Vec::new();
        if self.due_at.is_none_or(|first| first > now + TICK) {
            return due;
        }
        for (id, entry) in &mut self.each {
            if entry.due_at.is_some_and(|due_at| due_at <= now + TICK) {
                (entry.due_at, entry.is_unsure) = (Some(now + entry.pause()), true);
                due.push(Check::renew(entry.key, &entry.policies, *id));
            }
        }
        self.due_at = self.each.values().filter_map(|entry| entry.due_at).min();
        due
    }
}

impl Entry {
    /// Interval between two renewals.
    fn pause(&self) -> Duration {
        self.policies
            .iter()
            .map(|policy: &Policy| policy.quota().period())
            .min()
            .unwrap_or_default()
            / 3
    }
}

impl Inner {
    /// Starts the renewal task. Outside a runtime, does one tick of its work directly.
    fn start(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.renewer.spawn(None, |task| renew(this, task));
        if !self.renewer.is_running() {
            self.tick(instant());
        }
    }

    fn tick(self: &Arc<Self>, now: Instant) {
        let renewals = lock(&self.slots).renewals(now);
        for check in renewals {
            let (tracker, slot) = (Arc::downgrade(self), check.slot());
            self.ops.put(PendingOp::of_check(check).then(move |answer| {
                if let (Ok(decision), Some(tracker), Some(slot)) = (answer, tracker.upgrade(), slot)
                {
                    lock(&tracker.slots).pass(slot, decision.is_unsure());
                }
            }));
        }
    }
}

/// Renews slots for as long as there are any.
async fn renew(tracker: Weak<Inner>, task: Task) {
    loop {
        sleep(TICK).await;
        let Some(tracker) = tracker.upgrade() else {
            return;
        };
        {
            let slots = lock(&tracker.slots);
            if slots.each.is_empty() {
                return drop(task);
            }
        }
        tracker.tick(instant());
    }
}
