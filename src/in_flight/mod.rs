//! The slots of this process's requests in flight. How a store counts them is in `src/limit/in_flight.rs`.
//!
//! A request under a policy of [requests in flight](crate::Policy::in_flight) has a [`Slot`] for as long as it runs,
//! which is renewed every third of its time to live and released when it is dropped. To take, to renew and to release
//! a slot changes nothing the second time, so no reply is needed to know what a store counts:
//!
//! - A release is sent until it is answered, or the slot has expired.
//! - A take or a renewal whose reply has not come may be decided after the release, since checks use several
//!   connections. Then the release is repeated half a second later.
//! - A renewal takes the slot again if the store has lost it. So after an outage or a `FLUSHALL`, all is counted again
//!   within a third of the time to live.

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

/// The slots of a layer or a [`Limiter`](crate::Limiter) in its store. Clones share them.
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
    /// No slot is due before.
    due_at: Option<Instant>,
}

struct Entry {
    key: Key,
    /// The policies that count requests in flight.
    policies: Policies,
    /// When to renew it. `None` until the request passes.
    due_at: Option<Instant>,
    /// Whether a take or a renewal was sent whose reply has not come.
    is_unsure: bool,
}

/// The slot of a request, which is released when this is dropped.
#[must_use]
pub(crate) struct Slot {
    tracker: InFlightTracker,
    id: SlotId,
}

/// How often the task checks which slots are due.
const TICK: Duration = Duration::from_millis(250);

impl InFlightTracker {
    /// The slots in `store`. `observer` is notified of each that could not be released.
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

    /// The slot that this check takes, before it is sent. `None` if no policy counts requests in flight.
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
        // For operations that an ended runtime has left behind.
        self.0.ops.wake();
        Some(Slot {
            tracker: self.clone(),
            id,
        })
    }
}

impl Slot {
    /// Handles the store's reply: a granted slot is renewed, a denied one was not taken.
    pub(crate) fn answered(&mut self, answer: Result<&Decision, &StoreError>) {
        let slots = &mut *lock(&self.tracker.0.slots);
        match answer {
            Ok(decision) if decision.is_allowed() => slots.pass(self.id, false),
            Ok(_) => drop(slots.each.remove(&self.id)),
            Err(error) => {
                if let Some(entry) = slots.each.get_mut(&self.id) {
                    entry.is_unsure = !error.is_unsent();
                }
            }
        }
    }

    /// Keeps the slot of a request that passes after an error. The next renewal takes it.
    pub(crate) fn passed(self) -> Self {
        lock(&self.tracker.0.slots).pass(self.id, true);
        self
    }

    /// Leaves the slot to expire, for a request without a known end.
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
    /// Begins to renew a slot. If it `stays` unsure, its reply has not come.
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

    /// The checks that renew all slots which are due before the next tick.
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
    /// From one renewal to the next.
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
    /// Starts the task that renews. Outside of a runtime the caller does its work.
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
                if let (Ok(_), Some(tracker), Some(slot)) = (answer, tracker.upgrade(), slot) {
                    lock(&tracker.slots).pass(slot, false);
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
