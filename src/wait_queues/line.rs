//! Who waits for one caller, in which order, and the turns that are reserved for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::permit::Charge;
use super::{Answer, MAX_FAILURES, PAUSE, Refusal};
use crate::error::StoreError;
use crate::limit::Decision;
use crate::store::Wake;
use crate::util::instant;

pub(super) struct Line {
    /// By number, in the order in which they came.
    waiters: BTreeMap<u64, Waiter>,
    /// By when they are due, and the waiter for whom each was reserved.
    turns: BTreeMap<(Instant, u64), Turn>,
    /// Number of turns of which a refund is under way.
    pub(super) refunding: usize,
    /// What was decided last, and when.
    known: Option<(Decision, Instant)>,
    /// A line that asks: nothing is free before.
    pub(super) free_at: Option<Instant>,
    /// The calls that have failed since the last that has not.
    failures: Option<Failures>,
    /// Wakes the task.
    pub(super) wake: Arc<Wake>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// Until when it waits.
    pub(super) deadline: Option<Instant>,
    answer: oneshot::Sender<Answer>,
}

/// Calls that have failed in a row.
pub(super) struct Failures {
    count: u32,
    last: StoreError,
    /// Until when all waits are refused, if they are [`MAX_FAILURES`].
    until: Instant,
}

/// A turn that is reserved.
pub(super) struct Turn {
    pub(super) charge: Charge,
    /// Whether the store has refused to refund it, since a later turn stands on it.
    pub(super) stays: bool,
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

    pub(super) fn is_in_time(&self, at: Instant) -> bool {
        self.deadline.is_none_or(|deadline| at <= deadline)
    }

    /// Sends the answer. A permit for which nobody waits is dropped, and so handed on: not under the lock of the lines.
    pub(super) fn answer(self, answer: Answer) {
        drop(self.answer.send(answer));
    }
}

impl Line {
    /// A line whose first waiter was `denied` just now, if the store was asked.
    pub(super) fn new(denied: Option<Decision>) -> Self {
        let now = instant();
        let wait = denied.as_ref().and_then(Decision::retry_after);
        Self {
            waiters: BTreeMap::new(),
            turns: BTreeMap::new(),
            refunding: 0,
            known: denied.map(|denied| (denied, now)),
            free_at: wait.and_then(|wait| now.checked_add(wait)),
            failures: None,
            wake: Arc::default(),
        }
    }

    /// Number of waiters.
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether who comes has to join it: others wait, or a turn is left.
    pub(super) fn is_used(&self) -> bool {
        !self.waiters.is_empty() || !self.turns.is_empty()
    }

    /// Whether its task has nothing left to do.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        let remembers = self.remembers_until().is_some_and(|until| now < until);
        !self.is_used() && self.refunding == 0 && !remembers
    }

    /// The failures, if they are too many.
    fn too_many(&self) -> Option<&Failures> {
        let failures = self.failures.as_ref()?;
        (failures.count >= MAX_FAILURES).then_some(failures)
    }

    /// How long a line that nobody uses stays, so that who comes after the pause asks alone.
    pub(super) fn remembers_until(&self) -> Option<Instant> {
        Some(self.too_many()?.until + PAUSE)
    }

    pub(super) fn push(&mut self, number: u64, waiter: Waiter) {
        self.waiters.insert(number, waiter);
        self.wake.notify.notify_one();
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        self.wake.notify.notify_one();
        Some(waiter)
    }

    /// Takes out the first, if it has this cost.
    pub(super) fn pop(&mut self, cost: u32) -> Option<Waiter> {
        let first = self.waiters.first_entry()?;
        (first.get().cost == cost).then(|| first.remove())
    }

    /// Takes out the first, if it costs no more than this.
    pub(super) fn pop_up_to(&mut self, units: u32) -> Option<Waiter> {
        let first = self.waiters.first_entry()?;
        (first.get().cost <= units).then(|| first.remove())
    }

    /// The first waiter and its cost.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        self.waiters()
            .next()
            .map(|(number, waiter)| (number, waiter.cost))
    }

    /// The cost of a waiter.
    pub(super) fn cost_of(&self, number: u64) -> Option<u32> {
        self.waiters.get(&number).map(|waiter| waiter.cost)
    }

    /// The waiters in their order.
    pub(super) fn waiters(&self) -> impl DoubleEndedIterator<Item = (u64, &Waiter)> {
        self.waiters
            .iter()
            .map(|(number, waiter)| (*number, waiter))
    }

    /// Records what the store has decided. Returns the failures before: a user's error must not be dropped under the lock.
    pub(super) fn learn(&mut self, decision: &Decision, now: Instant) -> Option<Failures> {
        self.known = Some((decision.clone(), now));
        self.failures.take()
    }

    /// The wait of one who comes now: until the last turn, or until something is free.
    pub(super) fn denial(&self, now: Instant) -> Option<Decision> {
        let (decision, at) = self.known.clone()?;
        let last = self.turns.last_key_value().map(|((due, _), _)| *due);
        let wait = last
            .max(self.free_at)
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }

    /// Why this one may not join: the store fails, or its turn comes too late.
    pub(super) fn refusal(&self, waiter: &Waiter, now: Instant) -> Option<Refusal> {
        if let Some(failures) = self.too_many().filter(|failures| now < failures.until) {
            return Some(Refusal::Failed(failures.last.clone()));
        }
        let left = self.turns.keys().nth(self.waiters.len());
        let starts_at = left.map(|(due, _)| *due).or(self.free_at)?;
        let is_late = starts_at > now && !waiter.is_in_time(starts_at);
        is_late
            .then(|| self.denial(now).map(Refusal::Denied))
            .flatten()
    }

    /// A call for this waiter has failed: takes out who is refused. Returns the failures before, as
    /// [`learn`](Self::learn) does.
    pub(super) fn fail(
        &mut self,
        number: u64,
        error: &StoreError,
        now: Instant,
    ) -> (Vec<Waiter>, Option<Failures>) {
        let count = self.failures.as_ref().map_or(0, |failures| failures.count) + 1;
        let before = self.failures.replace(Failures {
            count,
            last: error.clone(),
            until: now + PAUSE,
        });
        let refused = if count >= MAX_FAILURES {
            std::mem::take(&mut self.waiters).into_values().collect()
        } else {
            self.waiters.remove(&number).into_iter().collect()
        };
        (refused, before)
    }

    /// Takes out those who have no chance by then.
    pub(super) fn late(&mut self, at: Instant) -> Vec<Waiter> {
        let late = self.waiters().filter(|(_, waiter)| !waiter.is_in_time(at));
        let late: Vec<u64> = late.map(|(number, _)| number).collect();
        let late = late.iter().filter_map(|number| self.waiters.remove(number));
        late.collect()
    }

    /// The first deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiters
            .values()
            .filter_map(|waiter| waiter.deadline)
            .min()
    }

    /// For whom turns are missing, besides those that are `asked` for: one at a time of a store that fails.
    pub(super) fn without_turn(&self, asked: usize) -> Vec<(u64, Option<Instant>)> {
        let mut missing = self.len().saturating_sub(self.turns.len() + asked);
        if self.too_many().is_some() {
            missing = missing.min(1_usize.saturating_sub(asked));
        }
        let last = self.waiters().rev().take(missing);
        let mut last: Vec<_> = last
            .map(|(number, waiter)| (number, waiter.deadline))
            .collect();
        last.reverse();
        last
    }

    /// Adds a turn that was reserved for the waiter of this number.
    pub(super) fn add_turn(&mut self, number: u64, turn: Turn) {
        self.turns.insert((turn.charge.due, number), turn);
        self.wake.notify.notify_one();
    }

    /// When the next turn is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.turns.first_key_value().map(|((due, _), _)| *due)
    }

    /// Takes out the next turn that is due, and who gets it, if anybody waits: the first in line. But who asked for it gets
    /// it if the next turn comes too late for that one: replies come in any order.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<(Charge, Option<Waiter>)> {
        let first = self
            .turns
            .first_entry()
            .filter(|first| first.key().0 <= now)?;
        let ((_, number), turn) = first.remove_entry();
        let next = self.due();
        let is_last_chance = |waiter: &Waiter| next.is_some_and(|next| !waiter.is_in_time(next));
        let waiter = match self.waiters.get(&number) {
            Some(waiter) if is_last_chance(waiter) => self.waiters.remove(&number),
            _ => self.waiters.pop_first().map(|(_, waiter)| waiter),
        };
        Some((turn.charge, waiter))
    }

    /// Takes out the last turn, to be refunded, if more turns are reserved than are needed.
    pub(super) fn superfluous(&mut self) -> Option<(u64, Charge)> {
        let is_more = self.turns.len() > self.waiters.len();
        let last = self
            .turns
            .last_entry()
            .filter(|last| is_more && !last.get().stays)?;
        let ((_, number), turn) = last.remove_entry();
        self.refunding += 1;
        Some((number, turn.charge))
    }
}
