//! The waiters of a line, and their reserved turns. All methods run under the lock of the lines.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
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
    /// By number, oldest first.
    waiters: BTreeMap<u64, Waiter>,
    /// Deadlines of the waiters that have one.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Total cost of the waiters.
    demand: u64,
    /// By the due time, and the number of the waiter that each was reserved for.
    turns: BTreeMap<(Instant, u64), Turn>,
    /// Total units of the turns.
    reserved: u64,
    /// Due units, too few for the first waiter.
    part: Option<Charge>,
    /// Number of checks without a reply, by the time when they were sent.
    sent: BTreeMap<Instant, u32>,
    /// Number of turns whose refund is in flight.
    pub(super) refunding: usize,
    /// The last decision of the store, and its time.
    known: Option<(Decision, Instant)>,
    /// For a [`Questions`](super::Questions) line: the time before which no capacity is expected.
    pub(super) free_at: Option<Instant>,
    /// Calls that have failed since the last success.
    failures: Option<Failures>,
    /// Wakes the task.
    pub(super) wake: Arc<Wake>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// Deadline of the waiter; `None` if it may wait forever.
    pub(super) deadline: Option<Instant>,
    /// Whether no turn was requested for it yet.
    is_new: bool,
    /// Number of checks that were sent for it and have no reply yet, and when the last one was sent.
    pending: u32,
    sent_at: Option<Instant>,
    answer: oneshot::Sender<Answer>,
}

/// Consecutive failed calls.
pub(super) struct Failures {
    count: u32,
    last: StoreError,
    /// Until this time new waiters fail, if `count` has reached [`MAX_FAILURES`].
    until: Instant,
}

/// Units to reserve for a waiter.
pub(super) struct Missing {
    pub(super) number: u64,
    pub(super) units: u32,
    pub(super) deadline: Option<Instant>,
}

/// Due units: the waiters that get them, and the rest if no waiter is left.
pub(super) struct Given {
    pub(super) to: Vec<(Waiter, Charge)>,
    pub(super) left: Option<Charge>,
}

/// A reserved turn.
pub(super) struct Turn {
    pub(super) charge: Charge,
    /// Whether the store has rejected its refund, because a later turn depends on it.
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
            is_new: true,
            pending: 0,
            sent_at: None,
            answer,
        }
    }

    pub(super) fn is_in_time(&self, at: Instant) -> bool {
        self.deadline.is_none_or(|deadline| at <= deadline)
    }

    /// Sends the answer. A permit whose waiter has left is dropped, and so passes to the next waiter; do not call this
    /// under the lock.
    pub(super) fn answer(self, answer: Answer) {
        drop(self.answer.send(answer));
    }
}

impl Line {
    /// Creates a line. `denied` is the fresh denial of its first waiter, if that was checked.
    pub(super) fn new(denied: Option<Decision>) -> Self {
        let now = instant();
        let wait = denied.as_ref().and_then(Decision::retry_after);
        Self {
            waiters: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            demand: 0,
            turns: BTreeMap::new(),
            reserved: 0,
            part: None,
            sent: BTreeMap::new(),
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

    /// Returns `true` if a new request must join: others wait, or a turn is left.
    pub(super) fn is_used(&self) -> bool {
        !self.waiters.is_empty() || !self.turns.is_empty()
    }

    /// Returns `true` if the task has nothing left to do.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        let remembers = self.remembers_until().is_some_and(|until| now < until);
        !self.is_used() && self.part.is_none() && self.refunding == 0 && !remembers
    }

    /// The failures, if they have reached [`MAX_FAILURES`].
    fn too_many(&self) -> Option<&Failures> {
        let failures = self.failures.as_ref()?;
        (failures.count >= MAX_FAILURES).then_some(failures)
    }

    /// The time until which an unused line is kept after failures, so that after the pause one waiter at a time tries
    /// the store.
    pub(super) fn remembers_until(&self) -> Option<Instant> {
        Some(self.too_many()?.until + PAUSE)
    }

    pub(super) fn push(&mut self, number: u64, waiter: Waiter) {
        self.demand += u64::from(waiter.cost);
        self.deadlines
            .extend(waiter.deadline.map(|deadline| (deadline, number)));
        self.waiters.insert(number, waiter);
        self.wake.notify.notify_one();
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        self.demand -= u64::from(waiter.cost);
        if let Some(deadline) = waiter.deadline {
            self.deadlines.remove(&(deadline, number));
        }
        self.wake.notify.notify_one();
        Some(waiter)
    }

    /// Removes the first waiter if it has exactly this cost.
    pub(super) fn pop(&mut self, cost: u32) -> Option<Waiter> {
        let (first, _) = self.first().filter(|(_, first)| *first == cost)?;
        self.remove(first)
    }

    /// Removes the first waiter if its cost is at most `units`.
    pub(super) fn pop_up_to(&mut self, units: u32) -> Option<Waiter> {
        let (first, _) = self.first().filter(|(_, cost)| *cost <= units)?;
        self.remove(first)
    }

    /// The number and the cost of the first waiter.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        self.waiters()
            .next()
            .map(|(number, waiter)| (number, waiter.cost))
    }

    /// The cost of a waiter.
    pub(super) fn cost_of(&self, number: u64) -> Option<u32> {
        self.waiters.get(&number).map(|waiter| waiter.cost)
    }

    /// The waiters, oldest first.
    pub(super) fn waiters(&self) -> impl DoubleEndedIterator<Item = (u64, &Waiter)> {
        self.waiters
            .iter()
            .map(|(number, waiter)| (*number, waiter))
    }

    /// Records a decision. Returns the previous failures, because the user's error in them must not be dropped under
    /// the lock.
    pub(super) fn learn(&mut self, decision: &Decision, now: Instant) -> Option<Failures> {
        self.known = Some((decision.clone(), now));
        self.failures.take()
    }

    /// The denial for a new request. Its wait is the time until the last turn is due, or until capacity is expected.
    pub(super) fn denial(&self, now: Instant) -> Option<Decision> {
        let (decision, at) = self.known.clone()?;
        let last = self.turns.last_key_value().map(|((due, _), _)| *due);
        let wait = last
            .max(self.free_at)
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }

    /// The reason why a waiter must not join: the store is failing, or its turn would be too late.
    pub(super) fn refusal(&self, waiter: &Waiter, now: Instant) -> Option<Refusal> {
        if let Some(failures) = self.too_many().filter(|failures| now < failures.until) {
            return Some(Refusal::Failed(failures.last.clone()));
        }
        let left = self.surplus() >= u64::from(waiter.cost.max(1));
        let left = self.turns.last_key_value().filter(|_| left);
        let starts_at = left.map(|((due, _), _)| *due).or(self.free_at)?;
        let is_late = starts_at > now && !waiter.is_in_time(starts_at);
        is_late
            .then(|| self.denial(now).map(Refusal::Denied))
            .flatten()
    }

    /// Handles a failed call for a waiter. Returns the waiters that fail, and the previous failures, as
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
        if count < MAX_FAILURES {
            return (self.remove(number).into_iter().collect(), before);
        }
        self.demand = 0;
        self.deadlines.clear();
        let all = mem::take(&mut self.waiters);
        (all.into_values().collect(), before)
    }

    /// Removes the waiters after `behind` whose deadline is before `at`.
    pub(super) fn late(&mut self, at: Instant, behind: u64) -> Vec<Waiter> {
        let late = self
            .waiters()
            .filter(|(number, waiter)| *number > behind && !waiter.is_in_time(at));
        let late: Vec<u64> = late.map(|(number, _)| number).collect();
        late.into_iter()
            .filter_map(|number| self.remove(number))
            .collect()
    }

    /// The earliest deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The first deadline that is not over.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let mut later = self.deadlines.range((now, 0)..);
        later.next().map(|(deadline, _)| *deadline)
    }

    /// Takes out the waiters whose deadline is over and for whom no pending check can be in time, and returns
    /// why they are refused: all turns that are still reserved come too late for them.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<(Vec<Waiter>, Refusal)> {
        // A reply goes to the first in line, so a waiter may need the reply to another one's check.
        let oldest = self.sent.first_key_value().map(|(at, _)| *at);
        let is_hopeless = |number| {
            let waiter = self.waiters.get(number)?;
            let last = waiter.deadline.max(waiter.sent_at);
            Some(waiter.pending == 0 && oldest.is_none_or(|oldest| last < Some(oldest)))
        };
        let over = self
            .deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline < now)
            .filter(|(_, number)| is_hopeless(number) == Some(true));
        let over: Vec<u64> = over.map(|(_, number)| *number).collect();
        if over.is_empty() {
            return None;
        }
        let refusal = self.late_refusal(now)?;
        let over = over.into_iter().filter_map(|number| self.remove(number));
        Some((over.collect(), refusal))
    }

    /// Why waiters whose deadline has passed are refused. `None` before the first reply.
    pub(super) fn late_refusal(&self, now: Instant) -> Option<Refusal> {
        let failure = || {
            let failures = self.failures.as_ref()?;
            Some(Refusal::Failed(failures.last.clone()))
        };
        self.denial(now).map(Refusal::Denied).or_else(failure)
    }

    /// Records that a check was sent for this waiter.
    pub(super) fn sent(&mut self, number: u64, at: Instant) {
        *self.sent.entry(at).or_default() += 1;
        if let Some(waiter) = self.waiters.get_mut(&number) {
            (waiter.pending, waiter.sent_at) = (waiter.pending + 1, Some(at));
        }
    }

    /// Records the reply to a check that was sent for this waiter at this time.
    pub(super) fn replied(&mut self, number: u64, at: Instant) {
        if let Some(count) = self.sent.get_mut(&at) {
            *count -= 1;
            if *count == 0 {
                self.sent.remove(&at);
            }
        }
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.pending -= 1;
        }
    }

    /// Units reserved beyond the cost of the waiters.
    fn surplus(&self) -> u64 {
        self.there().saturating_sub(self.demand)
    }

    /// All reserved units, due or not.
    fn there(&self) -> u64 {
        self.reserved + self.part.as_ref().map_or(0, |part| u64::from(part.cost))
    }

    /// The units to reserve in addition to the `asked` ones, each with the waiter that needs them. While the store is
    /// failing, at most one at a time.
    pub(super) fn missing(&mut self, asked: u64) -> Vec<Missing> {
        if self.too_many().is_some() && asked > 0 {
            return vec![];
        }
        let last = self.turns.last_key_value().map(|((due, _), _)| *due);
        let mut units = self.demand.saturating_sub(self.there() + asked);
        let mut missing = vec![];
        for (number, waiter) in self.waiters.iter_mut().rev() {
            if units == 0 && !waiter.is_new {
                break;
            }
            let mut lacks = u32::try_from(units).unwrap_or(u32::MAX).min(waiter.cost);
            units -= u64::from(lacks);
            // The turn that is left would be too late for this waiter.
            if lacks == 0 && last.is_some_and(|last| !waiter.is_in_time(last)) {
                lacks = waiter.cost;
            }
            waiter.is_new = false;
            if lacks > 0 {
                missing.push(Missing {
                    number: *number,
                    units: lacks,
                    deadline: waiter.deadline,
                });
            }
        }
        missing.reverse();
        if self.too_many().is_some() {
            missing.truncate(1);
        }
        missing
    }

    /// Adds a turn that was reserved for this waiter.
    pub(super) fn add_turn(&mut self, number: u64, turn: Turn) {
        self.reserved += u64::from(turn.charge.cost);
        self.turns.insert((turn.charge.due, number), turn);
        self.wake.notify.notify_one();
    }

    /// The time at which the next turn is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.turns.first_key_value().map(|((due, _), _)| *due)
    }

    /// Takes a due turn, and the first waiter, which gets it. Replies arrive in any order; so if the next turn is too
    /// late for the waiter that reserved this one, but not for the first waiter, this turn goes to the first of the
    /// waiters for which the next one is too late.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<Given> {
        let is_due = |due: Instant| due <= now;
        let Some(((_, number), turn)) = self
            .due()
            .filter(|due| is_due(*due))
            .and_then(|_| self.turns.pop_first())
        else {
            // A waiter that needed more units may have left.
            let part = self.part.take()?;
            let is_enough = self.first().is_none_or(|(_, cost)| cost <= part.cost);
            if is_enough {
                return Some(self.give(part));
            }
            self.part = Some(part);
            return None;
        };
        let charge = turn.charge;
        self.reserved -= u64::from(charge.cost);
        let next = self.due();
        let is_late = |waiter: &Waiter| next.is_some_and(|next| !waiter.is_in_time(next));
        let is_urgent = |waiter: &Waiter| is_late(waiter) && waiter.cost == charge.cost;
        let first_waits = self
            .waiters
            .values()
            .next()
            .is_some_and(|first| !is_late(first));
        if first_waits && self.waiters.get(&number).is_some_and(is_urgent) {
            let urgent = self.waiters().find(|(_, waiter)| is_urgent(waiter));
            let urgent = urgent.map(|(number, _)| number);
            if let Some(urgent) = urgent.and_then(|urgent| self.remove(urgent)) {
                return Some(Given {
                    to: vec![(urgent, charge)],
                    left: None,
                });
            }
        }
        Some(self.give(charge))
    }

    /// Gives due units to the first waiters that they suffice for.
    fn give(&mut self, charge: Charge) -> Given {
        let mut units = charge.cost + self.part.take().map_or(0, |part| part.cost);
        let mut to = vec![];
        while let Some(waiter) = self.pop_up_to(units) {
            units -= waiter.cost;
            let part = charge.part(waiter.cost);
            to.push((waiter, part));
        }
        let mut left = (units > 0).then(|| charge.part(units));
        if !self.waiters.is_empty() {
            self.part = left.take();
        }
        Given { to, left }
    }

    /// Takes the waiters that get an unused permit, or returns `None` without waiters.
    pub(super) fn hand_on(&mut self, charge: &Charge, reserves: bool) -> Option<Given> {
        if reserves {
            return (self.len() > 0).then(|| self.give(charge.clone()));
        }
        let waiter = self.pop(charge.cost)?;
        Some(Given {
            to: vec![(waiter, charge.clone())],
            left: None,
        })
    }

    /// Handles the reply to a refund: the store has refunded the turn, or it `stays`.
    pub(super) fn refunded(&mut self, number: u64, charge: Charge, stays: bool) {
        self.refunding -= 1;
        self.wake.notify.notify_one();
        if stays && charge.due > instant() {
            self.add_turn(number, Turn { charge, stays });
        }
    }

    /// Takes the last turn for a refund, if the waiters do not need it.
    pub(super) fn superfluous(&mut self) -> Option<(u64, Charge)> {
        let surplus = self.surplus();
        let is_more = |turn: &Turn| !turn.stays && u64::from(turn.charge.cost) <= surplus;
        let last = self.turns.last_entry().filter(|last| is_more(last.get()))?;
        let ((_, number), Turn { charge, .. }) = last.remove_entry();
        self.reserved -= u64::from(charge.cost);
        self.refunding += 1;
        Some((number, charge))
    }
}
