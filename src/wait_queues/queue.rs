//! The waiters of a queue, and its turns. All methods run under the lock of the queues.
//!
//! Turns are interchangeable, so no waiter owns one before it is due. The n-th waiter has the n-th turn:
//!
//! ```text
//! waiters     3     5     6     8     9      by number, oldest first
//! turns      1 s   2 s   3 s                 by due time
//! requested                     8            its reply is pending
//! ```
//!
//! Here 8 is the first without a turn, and 9 the first that needs a request. If 5 leaves, 6 has the turn at 2 s and 8
//! the one at 3 s. Then 9 is the first without a turn, and needs no request, since the pending one will serve it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Answer;
use super::permit::Permit;
use crate::limit::{Decision, LONGEST, Policies, Verdict, micros};
use crate::util::instant;
use crate::waiters::Wake;

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
    /// The waiters whose requests to the store have no reply yet. Some of the waiters may have left. A check for several
    /// is listed for the first only: by checks, one batch at a time is pending.
    pub(super) requested: BTreeSet<u64>,
    /// The last decision of the store, and its time.
    last_decision: Option<(Decision, Instant)>,
    /// `None` if the last decision left capacity.
    scarcity: Option<Scarcity>,
    /// Wakes the task.
    pub(super) wake: Arc<Wake>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// `None` if it may wait forever.
    pub(super) deadline: Option<Instant>,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// After a denial: before this time, no capacity is expected for this cost or a larger one, except turns.
#[derive(Clone, Copy)]
struct Scarcity {
    until: Instant,
    cost: u32,
}

impl Waiter {
    /// Sends the answer. If the waiter has left, a permit is dropped here, so do not call this under the lock.
    pub(super) fn answer(self, answer: Answer) {
        drop(self.answer.send(answer));
    }

    /// Returns `true` if the store has denied its check, and no capacity is expected before its deadline.
    pub(super) fn is_late_after(&self, denied: Option<&Decision>, now: Instant) -> bool {
        if let Some(denied) = denied
            && let Some(deadline) = self.deadline
            && let Some(free_at) = capacity_time(denied, now)
        {
            deadline < free_at
        } else {
            false
        }
    }
}

impl Queue {
    pub(super) fn add(&mut self, number: u64, waiter: Waiter) {
        if let Some(deadline) = waiter.deadline {
            self.deadlines.insert((deadline, number));
        }
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

    /// Removes a waiter that has left, and wakes the task.
    pub(super) fn leave(&mut self, number: u64) -> Option<Waiter> {
        let left = self.remove(number)?;
        self.wake.notify.notify_one();
        Some(left)
    }

    /// Extends the wait of a waiter by the time of its store call, which does not count.
    pub(super) fn extend_wait(&mut self, number: u64, by: Duration) {
        if let Some(waiter) = self.waiters.get_mut(&number)
            && let Some(deadline) = &mut waiter.deadline
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
        match self.waiters.first_key_value() {
            Some((_, first)) => first.cost == cost,
            None => false,
        }
    }

    /// Removes the due turns, each with the waiter that gets it. While replies are pending, turns of other costs stay.
    pub(super) fn remove_due(&mut self, now: Instant) -> Vec<(Permit, Option<Waiter>)> {
        let mut due = vec![];
        loop {
            if let Some((turn, waiter)) = self.remove_served(now) {
                due.push((turn, Some(waiter)));
            } else if let Some(turn) = self.remove_unneeded(now) {
                due.push((turn, None));
            } else {
                return due;
            }
        }
    }

    /// Removes the first waiter, and the first due turn of its cost.
    fn remove_served(&mut self, now: Instant) -> Option<(Permit, Waiter)> {
        let (&number, first) = self.waiters.first_key_value()?;
        let mut due = self.turns.range(..=(now, u64::MAX));
        let (&key, _) = due.find(|(_, turn)| turn.cost() == first.cost)?;
        let turn = self.turns.remove(&key)?;
        let waiter = self.remove(number)?;
        Some((turn, waiter))
    }

    /// Removes the first turn if it is due and no waiter needs it. Waits for all replies: a waiter that is denied then
    /// leaves the turn to the next one, which may have its cost.
    fn remove_unneeded(&mut self, now: Instant) -> Option<Permit> {
        if !self.requested.is_empty() {
            return None;
        }
        let first = self.turns.first_entry()?;
        if first.key().0 > now {
            return None;
        }
        Some(first.remove())
    }

    /// Removes the last turns, as far as there are more than waiters. Waits for all replies, since they may be denials.
    pub(super) fn remove_surplus(&mut self) -> Vec<Permit> {
        // From the last: the store rejects the refund of a turn with a later one.
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

    /// The waiters without a turn, with or without a pending request.
    pub(super) fn without_turn(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        self.waiters.range(self.end_of_turns()..)
    }

    /// The number from which waiters have no turn.
    fn end_of_turns(&self) -> u64 {
        self.first_without_turn().unwrap_or(u64::MAX)
    }

    /// The n-th waiter has the n-th turn, so the number of turns is the place of this one. Searches it from the nearer end.
    pub(super) fn first_without_turn(&self) -> Option<u64> {
        let turns = self.turns.len();
        let later = self.waiters.len().checked_sub(turns + 1)?;
        let mut numbers = self.waiters.keys();
        let first = if later < turns {
            numbers.nth_back(later)
        } else {
            numbers.nth(turns)
        };
        first.copied()
    }

    /// The waiters that need a request, oldest first.
    pub(super) fn to_request(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        // Turns go to the first waiters, whichever request brings them. So a request whose waiter has left or has a turn
        // serves a later waiter, and the last ones need a request.
        let mut for_others = self.requested.len();
        for number in self.requested.range(self.end_of_turns()..) {
            for_others -= usize::from(self.waiters.contains_key(number));
        }
        let without_request = self
            .without_turn()
            .filter(|(number, _)| !self.requested.contains(number));
        without_request.skip(for_others)
    }

    /// The waiters that are too late, unless they `may_be_served`: the deadline has passed; or they have no turn, and no
    /// capacity is expected for their cost before the deadline.
    pub(super) fn late(
        &self,
        now: Instant,
        may_be_served: impl Fn(Instant, u64) -> bool,
    ) -> Vec<u64> {
        let end_of_turns = match self.scarcity {
            Some(scarcity) if scarcity.until > now => self.end_of_turns(),
            _ => u64::MAX,
        };
        let mut late = vec![];
        for &(deadline, number) in &self.deadlines {
            let is_late = if deadline <= now {
                true
            } else if let Some(scarcity) = self.scarcity
                && deadline < scarcity.until
            {
                end_of_turns <= number && self.costs_at_least(number, scarcity.cost)
            } else {
                // By time: all further deadlines are later than both.
                break;
            };
            if is_late && !may_be_served(deadline, number) {
                late.push(number);
            }
        }
        late
    }

    fn costs_at_least(&self, number: u64, cost: u32) -> bool {
        match self.waiters.get(&number) {
            Some(waiter) => waiter.cost >= cost,
            None => false,
        }
    }

    /// The first deadline after this time, or of all.
    pub(super) fn deadline_after(&self, time: Option<Instant>) -> Option<Instant> {
        let mut after = match time {
            // After all waiters with this deadline.
            Some(time) => self.deadlines.range((time, u64::MAX)..),
            None => self.deadlines.range(..),
        };
        Some(after.next()?.0)
    }

    /// The next time after this one at which a turn is due.
    pub(super) fn next_due(&self, time: Instant) -> Option<Instant> {
        let mut after = self.turns.range((time, u64::MAX)..);
        let (next, _) = after.next()?;
        Some(next.0)
    }

    /// Records the last decision, on a check of this cost, or of each unit up to some, sent at this time.
    pub(super) fn record_decision(&mut self, decision: &Decision, cost: u32, sent_at: Instant) {
        self.last_decision = Some((decision.clone(), instant()));
        self.scarcity = capacity_time(decision, sent_at).map(|until| Scarcity { until, cost });
    }

    /// The denial for a waiter of this cost. Its wait is the time until it fits after the last turn, or until capacity is
    /// expected for it; otherwise the time of a unit. `None` before the first reply.
    pub(super) fn denial(&self, cost: u32, now: Instant) -> Option<Decision> {
        let (decision, at) = self.last_decision.clone()?;
        let free_at = match self.turns.last_key_value() {
            Some(((due, _), _)) => Some(*due + time_for(decision.policies(), cost)),
            None => match self.scarcity {
                Some(scarcity) if cost == scarcity.cost => Some(scarcity.until),
                Some(scarcity) if cost > scarcity.cost => {
                    Some(at + wait_of_larger(&decision, cost))
                }
                _ => None,
            },
        };
        let wait = match free_at {
            Some(free_at) if free_at > now => free_at - now,
            _ => time_for_unit(&decision),
        };
        Some(denied_for(
            decision,
            wait,
            now.saturating_duration_since(at),
        ))
    }
}

/// Returns the wait of a larger cost than the decided one.
fn wait_of_larger(decision: &Decision, cost: u32) -> Duration {
    let mut longest = 0;
    for (verdict, policy) in decision.verdicts().each.iter().zip(decision.policies()) {
        longest = longest.max(verdict.wait_of_larger(policy, cost));
    }
    Duration::from_micros(longest.max(0) as u64)
}

/// Turns a decision, made `age` ago, into a denial for `wait`.
fn denied_for(decision: Decision, wait: Duration, age: Duration) -> Decision {
    let age = i64::try_from(age.as_micros()).unwrap_or(LONGEST);
    let mut verdicts = decision.verdicts().later(age);
    verdicts.granted = 0;
    // No wait helps a cost above the capacity.
    if let Some(decider) = verdicts.each.get_mut(decision.decider())
        && decider.wait != Verdict::NEVER
    {
        decider.wait = micros(wait).max(1);
        decider.reset = decider.reset.max(decider.wait);
    }
    decision.with_verdicts(verdicts)
}

/// The time in which policies that refill gradually refill a cost.
fn time_for(policies: &Policies, cost: u32) -> Duration {
    let mut longest = Duration::ZERO;
    for policy in policies {
        if policy.frees().is_gradual() {
            longest = longest.max(policy.quota().time_for(cost.into()));
        }
    }
    longest
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
fn capacity_time(denied: &Decision, sent_at: Instant) -> Option<Instant> {
    if denied.policies().in_flight().is_some() {
        return None;
    }
    Some(sent_at + denied.retry_after()?)
}
