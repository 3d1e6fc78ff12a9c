//! The waiters of a queue, and its turns. All methods run under the lock of the queues.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Answer;
use super::permit::Permit;
use crate::limit::{Decision, Policies};
use crate::store::Wake;
use crate::util::instant;

/// Joins and leaves change the waiters; only the queue's [task](super::task) serves or refuses them.
#[derive(Default)]
pub(super) struct Queue {
    /// By number, oldest first.
    pub(super) waiters: BTreeMap<u64, Waiter>,
    /// The deadlines of the waiters that have one.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Turns: the granted permits that no waiter has yet, by due time and order of arrival. The n-th waiter gets the n-th
    /// turn.
    pub(super) turns: BTreeMap<(Instant, u64), Permit>,
    /// The number of the last turn.
    last_turn: u64,
    /// The waiters whose requests to the store have no reply yet. Some of the waiters may have left.
    pub(super) requested: BTreeSet<u64>,
    /// The last decision of the store, and its time.
    last_decision: Option<(Decision, Instant)>,
    /// After a denial: before this time no capacity is expected for this cost or a larger one, except turns.
    no_capacity_before: Option<(Instant, u32)>,
    /// Wakes the task.
    pub(super) wake: Arc<Wake>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// `None` if it may wait forever.
    pub(super) deadline: Option<Instant>,
    pub(super) answer: oneshot::Sender<Answer>,
}

impl Waiter {
    /// Sends the answer. If the waiter has left, a permit is dropped here, so do not call this under the lock.
    pub(super) fn answer(self, answer: Answer) {
        drop(self.answer.send(answer));
    }
}

impl Queue {
    pub(super) fn add(&mut self, number: u64, waiter: Waiter) {
        let deadline = waiter.deadline.map(|deadline| (deadline, number));
        self.deadlines.extend(deadline);
        self.waiters.insert(number, waiter);
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        if let Some(deadline) = waiter.deadline {
            self.deadlines.remove(&(deadline, number));
        }
        if let Some((next, first)) = self.waiters.first_key_value()
            && number < *next
            && first.cost < waiter.cost
        {
            // The smaller cost may fit.
            self.wake.freed();
        }
        Some(waiter)
    }

    /// Extends the wait of a waiter by the time of its store call, which does not count.
    pub(super) fn extend_wait(&mut self, number: u64, by: Duration) {
        let waiter = self.waiters.get_mut(&number);
        let deadline = waiter.and_then(|waiter| waiter.deadline.as_mut());
        if let Some(deadline) = deadline
            && let Some(later) = deadline.checked_add(by)
        {
            self.deadlines.remove(&(*deadline, number));
            self.deadlines.insert((later, number));
            *deadline = later;
        }
    }

    pub(super) fn add_turn(&mut self, turn: Permit) {
        self.last_turn += 1;
        self.turns.insert((turn.due(), self.last_turn), turn);
    }

    /// Whether the first waiter has this cost, so that a turn of this cost can serve it.
    pub(super) fn first_costs(&self, cost: u32) -> bool {
        let first = self.waiters.values().next();
        first.is_some_and(|first| first.cost == cost)
    }

    /// Removes the due turns, each with the waiter that gets it. While replies are pending, turns of other costs stay.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<(Permit, Option<Waiter>)> {
        let mut due = vec![];
        loop {
            let mut turns = self.turns.range(..=(now, u64::MAX));
            let mut fitting = turns
                .clone()
                .filter(|(_, turn)| self.first_costs(turn.cost()));
            let (turn, first) = match fitting.next() {
                Some((turn, _)) => (Some(*turn), self.waiters.keys().next().copied()),
                None if self.requested.is_empty() => (turns.next().map(|(turn, _)| *turn), None),
                None => (None, None),
            };
            let Some(turn) = turn.and_then(|turn| self.turns.remove(&turn)) else {
                return due;
            };
            due.push((turn, first.and_then(|first| self.remove(first))));
        }
    }

    /// Removes the last turns, as far as there are more than waiters. Waits for all replies, since they may be denials.
    pub(super) fn take_surplus(&mut self) -> Vec<Permit> {
        let mut surplus = vec![];
        while self.requested.is_empty()
            && self.turns.len() > self.waiters.len()
            && let Some(last) = self.turns.last_entry()
            && last.get().is_refundable()
        {
            surplus.push(last.remove());
        }
        surplus
    }

    /// The waiters without a turn, with or without a pending request. Searches the first of them from the nearer end.
    pub(super) fn without_turn(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        let (mut numbers, turns) = (self.waiters.keys(), self.turns.len());
        let first = match self.waiters.len().checked_sub(turns + 1) {
            None => None,
            Some(later) if later < turns => numbers.nth_back(later),
            Some(_) => numbers.nth(turns),
        };
        let waiters = first.map(|first| self.waiters.range(first..));
        waiters.into_iter().flatten()
    }

    pub(super) fn first_without_turn(&self) -> Option<u64> {
        self.without_turn().next().map(|(number, _)| *number)
    }

    /// The waiters that need a request, oldest first. Turns go to the first waiters, whichever request brings them. So the
    /// last waiters without a request need one.
    pub(super) fn to_request(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        let first = self.first_without_turn().unwrap_or(u64::MAX);
        let own = self.requested.range(first..);
        let own = own.filter(|number| self.waiters.contains_key(number));
        let others = self.requested.len() - own.count();
        let waiters = self.without_turn();
        let waiters = waiters.filter(|(number, _)| !self.requested.contains(number));
        waiters.skip(others)
    }

    /// The waiters that are too late, unless they are `open`: the deadline has passed; or they have no turn, and no
    /// capacity is expected for their cost before the deadline.
    pub(super) fn late(&self, now: Instant, is_open: impl Fn(Instant, u64) -> bool) -> Vec<u64> {
        let denied = self.no_capacity_before.filter(|(at, _)| *at > now);
        let without_turn = denied.and_then(|_| self.first_without_turn());
        let late = self.deadlines.range(..=(now, u64::MAX));
        let hopeless = self.deadlines.range((now, u64::MAX)..);
        let hopeless =
            hopeless.take_while(|(deadline, _)| denied.is_some_and(|(at, _)| *deadline < at));
        let hopeless = hopeless.filter(|(_, number)| {
            let waiter = self.waiters.get(number);
            without_turn.is_some_and(|first| first <= *number)
                && waiter.is_some_and(|waiter| denied.is_some_and(|(_, cost)| waiter.cost >= cost))
        });
        let late = late.chain(hopeless);
        let late = late.filter(|(deadline, number)| !is_open(*deadline, *number));
        late.map(|(_, number)| *number).collect()
    }

    /// The first deadline after this time, or of all.
    pub(super) fn deadline_after(&self, time: Option<Instant>) -> Option<Instant> {
        let mut after = match time {
            Some(time) => self.deadlines.range((time, u64::MAX)..),
            None => self.deadlines.range(..),
        };
        after.next().map(|(deadline, _)| *deadline)
    }

    /// The next time after this one at which a turn is due.
    pub(super) fn next_due(&self, time: Instant) -> Option<Instant> {
        let mut after = self.turns.range((time, u64::MAX)..);
        after.next().map(|((due, _), _)| *due)
    }

    /// Records the last decision, on a check of this cost, or of each unit up to some, sent at this time.
    pub(super) fn record_decision(&mut self, decision: &Decision, cost: u32, sent_at: Instant) {
        self.last_decision = Some((decision.clone(), instant()));
        self.no_capacity_before = capacity_time(decision, sent_at).map(|at| (at, cost));
    }

    /// The denial for a waiter of this cost. Its wait is the time until it fits after the last turn, or until capacity is
    /// expected for it; otherwise the time of a unit. `None` before the first reply.
    pub(super) fn denial(&self, cost: u32, now: Instant) -> Option<Decision> {
        let (decision, at) = self.last_decision.clone()?;
        let last_turn = self.turns.keys().next_back();
        let last_turn = last_turn.map(|(due, _)| *due + time_for(decision.policies(), cost));
        let denied = self.no_capacity_before.and_then(|(free_at, denied)| {
            match cost.checked_sub(denied)? {
                0 => Some(free_at),
                _ => Some(at + decision.wait_of_larger(cost)),
            }
        });
        let free_at = last_turn.or(denied).filter(|free_at| *free_at > now);
        let wait = free_at.map_or_else(|| time_for_unit(&decision), |free_at| free_at - now);
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }
}

/// The time in which policies that refill gradually refill a cost.
fn time_for(policies: &Policies, cost: u32) -> Duration {
    let gradual = policies.iter().filter(|policy| policy.frees().is_gradual());
    let times = gradual.map(|policy| policy.quota().time_for(cost.into()));
    times.max().unwrap_or_default()
}

/// The time in which more is likely to be freed: until a unit is refilled or the window ends. Slots in flight may be free
/// at any time.
pub(super) fn time_for_unit(decision: &Decision) -> Duration {
    if decision.policies().in_flight().is_some() {
        return Duration::ZERO;
    }
    let unit = decision.policy().quota().time_for(1);
    unit.min(decision.reset_after())
}

/// After a denial of a check sent at this time: no capacity is expected before the returned time. Slots in flight may be
/// free at any time.
pub(super) fn capacity_time(denied: &Decision, sent_at: Instant) -> Option<Instant> {
    let wait = denied.retry_after();
    let wait = wait.filter(|_| denied.policies().in_flight().is_none());
    wait.map(|wait| sent_at + wait)
}
