//! The waiters of a line, and the turns that none of them has yet. All methods run under the lock of the lines.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Answer;
use super::permit::Permit;
use crate::limit::Decision;
use crate::store::Wake;
use crate::util::instant;

/// Joins and leaves change the waiters; only the line's [task](super::task) serves or refuses them.
#[derive(Default)]
pub(super) struct Line {
    /// By number, oldest first.
    pub(super) waiters: BTreeMap<u64, Waiter>,
    /// The deadlines of the waiters that have one.
    deadlines: BTreeSet<(Instant, u64)>,
    /// The granted permits that no waiter has yet, by due time and order of arrival. The n-th waiter gets the n-th turn.
    pub(super) turns: BTreeMap<(Instant, u64), Permit>,
    /// The number of the last turn.
    last_turn: u64,
    /// The waiters whose requests to the store have no reply yet. Some of the waiters may have left.
    pub(super) requested: BTreeSet<u64>,
    /// The last decision of the store, and its time.
    last_decision: Option<(Decision, Instant)>,
    /// After a denial: no capacity is expected before this time for those without a turn.
    free_at: Option<Instant>,
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

impl Line {
    pub(super) fn join(&mut self, number: u64, waiter: Waiter) {
        let deadline = waiter.deadline.map(|deadline| (deadline, number));
        self.deadlines.extend(deadline);
        self.waiters.insert(number, waiter);
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        if let Some(deadline) = waiter.deadline {
            self.deadlines.remove(&(deadline, number));
        }
        Some(waiter)
    }

    pub(super) fn add_turn(&mut self, turn: Permit) {
        self.last_turn += 1;
        self.turns.insert((turn.due(), self.last_turn), turn);
    }

    /// Whether a turn of this cost can serve the first waiter.
    pub(super) fn has_use_for(&self, cost: u32) -> bool {
        let first = self.waiters.values().next();
        first.is_some_and(|first| first.cost == cost)
    }

    /// Removes the due turns, each with the waiter that gets it. While a reply for the first waiter is pending, turns of
    /// other costs stay.
    pub(super) fn due_turns(&mut self, now: Instant) -> Vec<(Permit, Option<Waiter>)> {
        let mut due = vec![];
        loop {
            let mut turns = self.turns.range(..=(now, u64::MAX));
            let fitting = turns
                .clone()
                .find(|(_, turn)| self.has_use_for(turn.cost()));
            let first = self.waiters.keys().next().copied();
            let (next, number) = match fitting {
                Some(turn) => (Some(turn), first),
                None if first.is_some_and(|first| self.requested.contains(&first)) => break,
                None => (turns.next(), None),
            };
            let next = next.map(|(key, _)| *key);
            let Some(turn) = next.and_then(|next| self.turns.remove(&next)) else {
                break;
            };
            due.push((turn, number.and_then(|number| self.remove(number))));
        }
        due
    }

    /// Removes the last turns, as far as there are more than waiters. Waits for all replies, since they may be denials.
    pub(super) fn superfluous_turns(&mut self) -> Vec<Permit> {
        let mut superfluous = vec![];
        while self.requested.is_empty()
            && self.turns.len() > self.waiters.len()
            && let Some(last) = self.turns.last_entry()
            && !last.get().refund_was_rejected()
        {
            superfluous.push(last.remove());
        }
        superfluous
    }

    /// The waiters for which there is neither a turn nor a request: the first `most` of them.
    pub(super) fn lacking(&self, most: usize) -> Vec<(&u64, &Waiter)> {
        let Some((first, _)) = self.without_turn().next() else {
            return vec![];
        };
        // The other requests are for the first of them: their waiters have left or got an earlier turn.
        let requested = self.requested.range(first..);
        let requested = requested.filter(|number| self.waiters.contains_key(number));
        let others = self.requested.len() - requested.count();
        let lacking = self.without_turn();
        let lacking = lacking.filter(|(number, _)| !self.requested.contains(number));
        lacking.skip(others).take(most).collect()
    }

    /// The waiters without a turn. Searches the first of them from the nearer end.
    pub(super) fn without_turn(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        let (mut numbers, turns) = (self.waiters.keys(), self.turns.len());
        let first = match self.waiters.len().checked_sub(turns + 1) {
            Some(later) if later < turns => numbers.nth_back(later),
            _ => numbers.nth(turns),
        };
        let waiters = first.map(|first| self.waiters.range(first..));
        waiters.into_iter().flatten()
    }

    /// Returns `true` if there is no turn for this waiter.
    pub(super) fn lacks_turn(&self, number: u64) -> bool {
        let first = self.without_turn().next();
        first.is_some_and(|(first, _)| *first <= number)
    }

    /// Removes the waiters that are certain to be too late: their deadline has passed, and no pending reply may serve them
    /// (`is_pending`); or they have no turn, and no capacity is expected before the deadline.
    pub(super) fn late(
        &mut self,
        now: Instant,
        is_pending: impl Fn(Instant, u64) -> bool,
    ) -> Vec<Waiter> {
        let free_at = self.free_at.filter(|free_at| *free_at > now);
        let without_turn = free_at.and_then(|_| self.without_turn().next());
        let first = without_turn.map(|(number, _)| *number);
        let by = free_at.unwrap_or(now);
        let late = self.deadlines.iter();
        let late = late.take_while(|(deadline, _)| *deadline <= now || *deadline < by);
        let late = late.filter(|(deadline, number)| {
            let lacks = first.is_some_and(|first| first <= *number);
            (*deadline <= now || lacks) && !is_pending(*deadline, *number)
        });
        let late: Vec<u64> = late.map(|(_, number)| *number).collect();
        let late = late.into_iter();
        late.filter_map(|number| self.remove(number)).collect()
    }

    /// The first deadline after this time.
    pub(super) fn deadline_after(&self, time: Instant) -> Option<Instant> {
        let mut after = self.deadlines.range((time, u64::MAX)..);
        after.next().map(|(deadline, _)| *deadline)
    }

    /// The next time after this one at which a turn is due.
    pub(super) fn next_due(&self, time: Instant) -> Option<Instant> {
        let mut after = self.turns.range((time, u64::MAX)..);
        after.next().map(|((due, _), _)| *due)
    }

    /// Returns `true` if there may be a turn for a new waiter by this time.
    pub(super) fn has_spare_turn(&self, by: Instant) -> bool {
        if !self.requested.is_empty() {
            return self.turns.len() + self.requested.len() > self.waiters.len();
        }
        let later = self.turns.len().checked_sub(self.waiters.len() + 1);
        let spare = later.and_then(|later| self.turns.keys().nth_back(later));
        spare.is_some_and(|(due, _)| *due <= by)
    }

    /// Records the last decision, on a check sent at this time.
    pub(super) fn record_decision(&mut self, decision: &Decision, sent_at: Instant) {
        self.last_decision = Some((decision.clone(), instant()));
        self.free_at = free_at(decision, sent_at);
    }

    /// The denial for a waiter. Its wait is the time until the last turn is due, or until capacity is expected. `None`
    /// before the first reply.
    pub(super) fn denial(&self, now: Instant) -> Option<Decision> {
        let (decision, at) = self.last_decision.clone()?;
        let last_due = self.turns.keys().next_back().map(|(due, _)| *due);
        let wait = last_due.or(self.free_at);
        let wait = wait.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }
}

/// After a denial of a check sent at this time: no capacity is expected before the returned time. Slots in flight may be
/// free at any time.
pub(super) fn free_at(denied: &Decision, sent_at: Instant) -> Option<Instant> {
    let wait = denied.retry_after();
    let wait = wait.filter(|_| denied.policies().in_flight().is_none());
    wait.map(|wait| sent_at + wait)
}
