//! Who waits for one caller, in which order, and the turns that are reserved for them.

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
    /// By number, in the order in which they came.
    waiters: BTreeMap<u64, Waiter>,
    /// The deadlines of those that have one.
    deadlines: BTreeSet<(Instant, u64)>,
    /// What they cost.
    demand: u64,
    /// By when they are due, and the waiter for whom each was reserved.
    turns: BTreeMap<(Instant, u64), Turn>,
    /// The units of these turns.
    reserved: u64,
    /// What is due, and less than the first waiter costs.
    part: Option<Charge>,
    /// The checks without a reply: when they were sent, and how many at that time.
    sent: BTreeMap<Instant, u32>,
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
    /// Whether it may have no turn yet.
    is_new: bool,
    /// Number of checks that were sent for it and have no reply yet, and when the last one was sent.
    pending: u32,
    sent_at: Option<Instant>,
    answer: oneshot::Sender<Answer>,
}

/// Calls that have failed in a row.
pub(super) struct Failures {
    count: u32,
    last: StoreError,
    /// Until when all waits are refused, if they are [`MAX_FAILURES`].
    until: Instant,
}

/// Units that a waiter lacks.
pub(super) struct Missing {
    pub(super) number: u64,
    pub(super) units: u32,
    pub(super) deadline: Option<Instant>,
}

/// What was due, to whom it goes, and what is left if nobody waits any more.
pub(super) struct Given {
    pub(super) to: Vec<(Waiter, Charge)>,
    pub(super) left: Option<Charge>,
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
            is_new: true,
            pending: 0,
            sent_at: None,
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

    /// Takes out the first, if it has this cost.
    pub(super) fn pop(&mut self, cost: u32) -> Option<Waiter> {
        let (first, _) = self.first().filter(|(_, first)| *first == cost)?;
        self.remove(first)
    }

    /// Takes out the first, if it costs no more than this.
    pub(super) fn pop_up_to(&mut self, units: u32) -> Option<Waiter> {
        let (first, _) = self.first().filter(|(_, cost)| *cost <= units)?;
        self.remove(first)
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
        let left = self.surplus() >= u64::from(waiter.cost.max(1));
        let left = self.turns.last_key_value().filter(|_| left);
        let starts_at = left.map(|((due, _), _)| *due).or(self.free_at)?;
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
        if count < MAX_FAILURES {
            return (self.remove(number).into_iter().collect(), before);
        }
        self.demand = 0;
        self.deadlines.clear();
        let all = mem::take(&mut self.waiters);
        (all.into_values().collect(), before)
    }

    /// Takes out those whose time is up by then, of those behind a number.
    pub(super) fn late(&mut self, at: Instant, behind: u64) -> Vec<Waiter> {
        let late = self
            .waiters()
            .filter(|(number, waiter)| *number > behind && !waiter.is_in_time(at));
        let late: Vec<u64> = late.map(|(number, _)| number).collect();
        late.into_iter()
            .filter_map(|number| self.remove(number))
            .collect()
    }

    /// The first deadline.
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
        let failure = || {
            let failures = self.failures.as_ref()?;
            Some(Refusal::Failed(failures.last.clone()))
        };
        let refusal = self.denial(now).map(Refusal::Denied).or_else(failure)?;
        let over = over.into_iter().filter_map(|number| self.remove(number));
        Some((over.collect(), refusal))
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

    /// How many more units are reserved than the waiters cost.
    fn surplus(&self) -> u64 {
        self.there().saturating_sub(self.demand)
    }

    /// The units that are reserved, due or not.
    fn there(&self) -> u64 {
        self.reserved + self.part.as_ref().map_or(0, |part| u64::from(part.cost))
    }

    /// The units to reserve, besides those that are `asked` for, each with the waiter that lacks them: only for one of them at
    /// a time in a store that fails.
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
            // A turn that was left comes too late for this one.
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

    /// Adds a turn that was reserved for the waiter of this number.
    pub(super) fn add_turn(&mut self, number: u64, turn: Turn) {
        self.reserved += u64::from(turn.charge.cost);
        self.turns.insert((turn.charge.due, number), turn);
        self.wake.notify.notify_one();
    }

    /// When the next turn is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.turns.first_key_value().map(|((due, _), _)| *due)
    }

    /// Takes out what is due, and who gets it: the first in line. If the next turn is too late for the waiter
    /// of this one, and not for the first in line, the first of those for whom it is too late gets this one: replies
    /// come in any order.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<Given> {
        let is_due = |due: Instant| due <= now;
        let Some(((_, number), turn)) = self
            .due()
            .filter(|due| is_due(*due))
            .and_then(|_| self.turns.pop_first())
        else {
            // Somebody may have left who wanted more.
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

    /// Gives what is due to the first in line, for as many of them as it is enough.
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

    /// Who gets a permit that was not used: `None` if nobody does.
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

    /// The store has refunded a turn, or it `stays`.
    pub(super) fn refunded(&mut self, number: u64, charge: Charge, stays: bool) {
        self.refunding -= 1;
        self.wake.notify.notify_one();
        if stays && charge.due > instant() {
            self.add_turn(number, Turn { charge, stays });
        }
    }

    /// Takes out the last turn, to be refunded, if more is reserved than the waiters cost.
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
