//! The waiters of a line. All methods run under the lock of the lines.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::mem;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::permit::Charge;
use super::reserved::{Reserved, TurnId};
use super::{Answer, MAX_FAILURES, PAUSE, Refusal, TICK};
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
    reserved: Reserved,
    /// The newest waiter when turns were reserved last.
    newest: u64,
    /// Whether the line repeats checks, since its policies or its store reserve no turns.
    polls: bool,
    /// The last decision of the store, and its time.
    known: Option<(Decision, Instant)>,
    /// If the line polls: the time before which no capacity is expected, and the denied cost.
    pub(super) free_at: Option<(Instant, u32)>,
    /// Calls that have failed since the last success.
    failures: Option<Failures>,
    /// Wakes the task.
    pub(super) wake: Arc<Wake>,
}

pub(super) struct Waiter {
    pub(super) cost: u32,
    /// Deadline of the waiter; `None` if it may wait forever.
    pub(super) deadline: Option<Instant>,
    answer: oneshot::Sender<Answer>,
}

/// Consecutive failed calls.
pub(super) struct Failures {
    count: u32,
    last: StoreError,
    /// Until this time new waiters fail, if `count` has reached [`MAX_FAILURES`].
    until: Instant,
}

/// A turn to reserve for a waiter.
pub(super) struct Missing {
    pub(super) number: u64,
    pub(super) units: u32,
    pub(super) deadline: Option<Instant>,
}

/// The next actions of the task that reserves turns.
#[derive(Default)]
pub(super) struct Todo {
    pub(super) reserve: Vec<Missing>,
    pub(super) give: Vec<(Waiter, Charge)>,
    /// Superfluous due units.
    pub(super) refund: Vec<Charge>,
    /// Superfluous turns. Report the reply by [`Line::refunded`].
    pub(super) refund_turns: Vec<(TurnId, Charge)>,
    pub(super) refuse: Option<Late>,
    pub(super) then: Then,
}

/// Waiters whose deadline has passed, and why they are refused.
pub(super) type Late = (Vec<Waiter>, Refusal);

/// How the task continues.
#[derive(Default)]
pub(super) enum Then {
    /// Sleeps until this time, or until it is woken.
    Sleep(Option<Instant>),
    /// Sends checks for the first waiters.
    Check,
    #[default]
    End,
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

    fn is_in_time(&self, at: Instant) -> bool {
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
    pub(super) fn new(polls: bool, denied: Option<Decision>, cost: u32) -> Self {
        let now = instant();
        let wait = denied.as_ref().and_then(Decision::retry_after);
        let free_at = wait.and_then(|wait| now.checked_add(wait));
        Self {
            waiters: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            demand: 0,
            reserved: Reserved::default(),
            newest: 0,
            polls,
            known: denied.map(|denied| (denied, now)),
            free_at: free_at.filter(|_| polls).map(|at| (at, cost)),
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
        !self.waiters.is_empty() || !self.reserved.is_empty()
    }

    /// Returns `true` if the task has nothing left to do.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        // A line that polls does not keep a turn whose refund is rejected.
        let is_refunding = self.reserved.refunding_until(now).is_some() && !self.polls;
        let is_settled = self.reserved.is_settled() && !is_refunding;
        self.waiters.is_empty() && is_settled && self.remembers_until(now).is_none()
    }

    /// The failures, if they have reached [`MAX_FAILURES`].
    fn too_many(&self) -> Option<&Failures> {
        let failures = self.failures.as_ref()?;
        (failures.count >= MAX_FAILURES).then_some(failures)
    }

    /// The time until which an unused line is kept after failures, so that after the pause one waiter at a time tries
    /// the store.
    fn remembers_until(&self, now: Instant) -> Option<Instant> {
        let until = self.too_many()?.until + PAUSE;
        (now < until).then_some(until)
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
    fn first(&self) -> Option<(u64, u32)> {
        self.costs().next()
    }

    /// The numbers and costs of the waiters, oldest first.
    pub(super) fn costs(&self) -> impl Iterator<Item = (u64, u32)> {
        let each = self.waiters.iter();
        each.map(|(number, waiter)| (*number, waiter.cost))
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
        let wait = self
            .reserved
            .last_due()
            .max(self.free_at.map(|(at, _)| at))
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        Some(decision.denied_for(wait, now.saturating_duration_since(at)))
    }

    /// The reason why a waiter must not join: the store is failing, or no capacity is expected in time.
    pub(super) fn refusal(&self, waiter: &Waiter, now: Instant) -> Option<Refusal> {
        if let Some(failures) = self.too_many().filter(|failures| now < failures.until) {
            return Some(Refusal::Failed(failures.last.clone()));
        }
        let (free_at, _) = self.free_at?;
        let is_late = free_at > now && !waiter.is_in_time(free_at);
        let denial = || self.denial(now).map(Refusal::Denied);
        is_late.then(denial).flatten()
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

    /// Removes the waiters among `numbers` whose deadline is before `at`. `None` before the first reply.
    pub(super) fn late(
        &mut self,
        at: Instant,
        numbers: impl RangeBounds<u64>,
        now: Instant,
    ) -> Option<Late> {
        let over = self.deadlines.range(..(at, 0));
        let over = over.filter(|(_, number)| numbers.contains(number));
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
}

/// Lines that reserve turns.
impl Line {
    /// Returns what the task does next.
    pub(super) fn turn(&mut self, now: Instant) -> Todo {
        let mut todo = Todo::default();
        while let Some((number, cost)) = self.first()
            && let Some(charge) = self.reserved.take(cost, now, &mut todo.refund)
        {
            let waiter = self.remove(number);
            todo.give.extend(waiter.map(|waiter| (waiter, charge)));
        }
        // A due turn goes to the first waiter, so a waiter may need the reply to the check of an earlier one.
        let first_pending = self.reserved.first_pending().unwrap_or(u64::MAX);
        todo.refuse = self.late(now, ..first_pending, now);
        todo.reserve = self.missing();
        let superfluous = || self.reserved.superfluous(self.demand);
        todo.refund_turns.extend(iter::from_fn(superfluous));
        let must_poll = self.polls && self.reserved.is_empty() && !self.reserved.is_asked();
        if self.waiters.is_empty() || must_poll {
            let unused = || self.reserved.take_any(now);
            todo.refund.extend(iter::from_fn(unused));
        }
        todo.then = if self.is_idle(now) {
            Then::End
        } else if must_poll {
            Then::Check
        } else {
            let deadline = self.deadlines.range((now, 0)..).next();
            let deadline = deadline.map(|(deadline, _)| *deadline + TICK);
            let wakes = [
                self.reserved.first_due(),
                deadline,
                self.remembers_until(now),
                self.reserved.refunding_until(now),
            ];
            Then::Sleep(wakes.into_iter().flatten().min())
        };
        todo
    }

    /// The turns to reserve in addition to the requested ones. Each waiter needs one, unless enough units are left from
    /// waiters that have gone, and due in time. While the store is failing, at most one is requested at a time.
    fn missing(&mut self) -> Vec<Missing> {
        let is_failing = self.too_many().is_some();
        if self.polls || (is_failing && self.reserved.is_asked()) {
            return vec![];
        }
        let mut lacking = self.demand.saturating_sub(self.reserved.expected());
        let (mut position, mut missing) = (self.demand, vec![]);
        for (number, waiter) in self.waiters.iter().rev() {
            let is_new = *number > self.newest;
            if lacking == 0 && !is_new {
                break;
            }
            let is_late = || {
                let starts_at = self.reserved.starts_at(position);
                starts_at.is_some_and(|at| !waiter.is_in_time(at))
            };
            if lacking > 0 || is_late() {
                missing.push(Missing {
                    number: *number,
                    units: waiter.cost,
                    deadline: waiter.deadline,
                });
            }
            lacking = lacking.saturating_sub(waiter.cost.into());
            position -= u64::from(waiter.cost);
        }
        let newest = self.waiters.last_key_value();
        self.newest = newest.map_or(self.newest, |(number, _)| *number);
        missing.reverse();
        if is_failing {
            missing.truncate(1);
        }
        for Missing { number, units, .. } in &missing {
            self.reserved.ask(*number, *units);
        }
        missing
    }

    /// Records the reply to a check that was sent for this waiter.
    pub(super) fn replied(&mut self, missing: &Missing) {
        self.reserved.replied(missing.number, missing.units);
    }

    /// Adds the turn that a check has reserved.
    pub(super) fn add_turn(&mut self, charge: Charge) {
        self.reserved.add(charge, false);
        self.wake.notify.notify_one();
    }

    /// Records the reply to a refund of a superfluous turn. `kept` is the turn if the store has rejected the refund.
    pub(super) fn refunded(&mut self, turn: TurnId, kept: Option<Charge>) {
        self.reserved.refunded(turn, kept.filter(|_| !self.polls));
        self.wake.notify.notify_one();
    }

    /// The store has denied a turn for this waiter, although there would be capacity at `free_at`: it reserves none, or
    /// none so far ahead, as in an outage. Then the line polls until the shared store grants a check.
    pub(super) fn poll_instead(&mut self, missing: &Missing, free_at: Instant) {
        if self.waiters.contains_key(&missing.number) {
            self.polls = true;
            let earlier = self.free_at.filter(|(at, _)| *at < free_at);
            self.free_at = earlier.or(Some((free_at, missing.units)));
        }
    }
}

/// Lines that poll.
impl Line {
    pub(super) fn polls(&self) -> bool {
        self.polls
    }

    /// Records a grant. If the line `may_reserve`, it reserves turns again.
    pub(super) fn granted(&mut self, may_reserve: bool) {
        self.free_at = None;
        self.polls &= !may_reserve;
    }

    /// Returns how the task continues, whose next check is at `next`, and the waiters for which that is too late.
    pub(super) fn rest(&mut self, now: Instant, next: Option<Instant>) -> (Option<Late>, Then) {
        let Some((_, cost)) = self.first() else {
            let forgets = self.remembers_until(now);
            return (None, forgets.map_or(Then::End, |at| Then::Sleep(Some(at))));
        };
        let Some(mut until) = next else {
            return (None, Then::Check);
        };
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        if let (Some((free_at, _)), Some(deadline)) = (self.free_at, deadline) {
            // Do not deny a waiter because of jitter.
            until = until.min(deadline.max(free_at));
        }
        // A smaller cost than the denied one is first if waiters have left.
        let is_smaller = self.free_at.is_some_and(|(_, denied)| cost < denied);
        if now >= until || is_smaller {
            return (None, Then::Check);
        }
        let free_at = self.free_at.map_or(now, |(at, _)| at.max(now));
        let late = self.late(free_at, .., now);
        let deadline = deadline.map(|deadline| deadline.max(now) + TICK);
        let wakes_at = deadline.map_or(until, |deadline| until.min(deadline));
        (late, Then::Sleep(Some(wakes_at)))
    }

    /// Removes the waiters after `last` whose deadline had passed when the store replied, without capacity for them.
    pub(super) fn late_behind(&mut self, last: u64, replied_at: Instant) -> Option<Late> {
        let behind = (Bound::Excluded(last), Bound::Unbounded);
        self.late(replied_at, behind, instant())
    }
}
