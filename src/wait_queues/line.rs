//! The waiters of a line. All methods run under the lock of the lines.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Answer;
use super::checks::Checks;
use crate::limit::Decision;

/// The waiters of one runtime, caller and list of policies; by turns also of one cost.
#[derive(Default)]
pub(super) struct Line {
    /// By number, oldest first.
    pub(super) waiters: BTreeMap<u64, Waiter>,
    /// The last decision of the store, and its time.
    known: Option<(Decision, Instant)>,
    /// By turns: the turns without a reply. The number of a turn is that of the waiter for which it was requested.
    pub(super) requested: BTreeSet<u64>,
    /// By turns: the reserved turns by due time and number, with a channel that makes its task refund it. `None` if the
    /// store has rejected the refund.
    pub(super) held: BTreeMap<(Instant, u64), Option<oneshot::Sender<()>>>,
    /// By checks: `Some` while the task runs.
    pub(super) checks: Option<Checks>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// `None` if it may wait forever.
    pub(super) deadline: Option<Instant>,
    answer: oneshot::Sender<Answer>,
}

impl Waiter {
    pub(super) fn new(
        cost: u32,
        deadline: Option<Instant>,
        answer: oneshot::Sender<Answer>,
    ) -> Self {
        Self {
            cost,
            deadline,
            answer,
        }
    }

    /// Sends the answer. A permit whose waiter has left is dropped, and so passes to the next waiter; do not call this
    /// under the lock.
    pub(super) fn answer(self, answer: Answer) {
        drop(self.answer.send(answer));
    }
}

impl Line {
    /// Returns `true` if a new request must join: others wait, or a turn is left.
    pub(super) fn is_used(&self) -> bool {
        !self.waiters.is_empty() || !self.requested.is_empty() || !self.held.is_empty()
    }

    /// Returns `true` if there are fewer turns than waiters.
    pub(super) fn lacks_turn(&self) -> bool {
        self.requested.len() + self.held.len() < self.waiters.len()
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        self.refund_superfluous();
        if let Some(checks) = &mut self.checks {
            checks.left(self.waiters.values().next());
        }
        Some(waiter)
    }

    /// Removes the first waiter if it has this cost.
    pub(super) fn pop(&mut self, cost: u32) -> Option<Waiter> {
        let (number, first) = self.waiters.first_key_value()?;
        (first.cost == cost)
            .then_some(*number)
            .and_then(|number| self.remove(number))
    }

    /// If there are fewer turns than waiters, removes a waiter: the `refused` one, or else the last one, because a waiter
    /// that moves is overtaken by those behind it.
    pub(super) fn pop_lacking(&mut self, refused: Option<u64>) -> Option<(u64, Waiter)> {
        if !self.lacks_turn() {
            return None;
        }
        let refused = refused.and_then(|number| self.waiters.remove_entry(&number));
        refused.or_else(|| self.waiters.pop_last())
    }

    /// Removes the waiters after the first `skip` whose deadline `is_late`.
    pub(super) fn remove_late(
        &mut self,
        skip: usize,
        is_late: impl Fn(Instant) -> bool,
    ) -> Vec<Waiter> {
        let behind = self.waiters.iter().skip(skip);
        let late = behind.filter(|(_, waiter)| waiter.deadline.is_some_and(&is_late));
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        late.iter()
            .filter_map(|number| self.waiters.remove(number))
            .collect()
    }

    /// Refunds the last turns, as far as there are more than waiters. Waits for all replies, since they may be denials.
    pub(super) fn refund_superfluous(&mut self) {
        while self.requested.is_empty()
            && self.held.len() > self.waiters.len()
            && let Some(last) = self.held.last_entry()
            && last.get().is_some()
        {
            let _ = last.remove().map(|refund| refund.send(()));
        }
    }

    /// By checks: sets the time of the next check, and after a denial when capacity is expected for which cost.
    pub(super) fn check_at(&mut self, next: Instant, denied: Option<(Instant, u32)>) {
        if let Some(checks) = &mut self.checks {
            (checks.next, checks.denied) = (next, denied);
        }
    }

    pub(super) fn learn(&mut self, decision: &Decision, now: Instant) {
        self.known = Some((decision.clone(), now));
    }

    /// The denial for a waiter. Its wait is the time until the last turn is due, or until capacity is expected. `None`
    /// before the first reply.
    pub(super) fn denial(&self, now: Instant) -> Option<Decision> {
        let (decision, at) = self.known.clone()?;
        let last_due = self.held.keys().next_back().map(|(due, _)| *due);
        let wait = last_due.or_else(|| self.free_at());
        let wait = wait.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }

    /// In a line by checks, the time before which no capacity is expected.
    fn free_at(&self) -> Option<Instant> {
        let (free_at, _) = self.checks.as_ref()?.denied?;
        Some(free_at)
    }

    /// Returns `true` if a new waiter is certain to be too late: the turn that is left for it, and so each later one, is
    /// due after its deadline, or no capacity is expected before that.
    pub(super) fn is_late(&self, deadline: Option<Instant>, now: Instant) -> bool {
        let left = self.held.len().checked_sub(self.waiters.len() + 1);
        let at = left
            .and_then(|others| self.held.keys().nth_back(others))
            .map(|(due, _)| *due)
            .or_else(|| self.free_at());
        at.is_some_and(|at| at > now && deadline.is_some_and(|deadline| deadline < at))
    }

    /// Removes this waiter, whose deadline has passed, unless it may still be served in time: a turn is due, or the turn of
    /// this or an earlier waiter has no reply yet. In a line by checks, the reply to the next check decides, unless it is
    /// not sent since the last one failed.
    pub(super) fn expire(&mut self, number: u64, now: Instant) -> Option<Waiter> {
        if !self.waiters.contains_key(&number) {
            return None;
        }
        if let Some(checks) = &mut self.checks
            && checks.paused <= now
        {
            checks.hurry(now);
            return None;
        }
        let is_due = self.held.keys().next().is_some_and(|(due, _)| *due <= now);
        let may_come = is_due || self.requested.first().is_some_and(|first| *first <= number);
        (!may_come).then(|| self.remove(number)).flatten()
    }
}
