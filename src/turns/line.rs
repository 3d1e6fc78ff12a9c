use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::{Permit, Refusal, Wanted};
use crate::limit::{Decision, Policies, Policy};

/// Those of one runtime who wait for one caller's count.
pub(super) struct Line {
    number: u64,
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiter>,
    came: u64,
    /// What was decided last.
    known: Option<Decision>,
    /// No permit comes before that.
    next_at: Option<Instant>,
    /// How many of those who wait have a permit that is due at `next_at`.
    served: usize,
    /// Wakes the clerk.
    pub(super) wake: Arc<Notify>,
    /// When the clerk looks at the line again by itself.
    pub(super) wakes_at: Option<Instant>,
}

pub(super) struct Waiter {
    pub(super) wanted: Wanted,
    answer: oneshot::Sender<Answer>,
}

pub(super) type Answer = Result<Permit, Refusal>;

/// What the clerk asks for next: for so many of the first in the line, who all want the same.
#[derive(Debug)]
pub(super) struct Ask {
    /// The first of them.
    pub(super) first: u64,
    pub(super) count: u32,
    pub(super) policies: Policies,
    pub(super) cost: u32,
    /// The earliest of theirs.
    pub(super) deadline: Option<Instant>,
}

impl Waiter {
    pub(super) fn new(wanted: Wanted) -> (Self, oneshot::Receiver<Answer>) {
        let (sender, answer) = oneshot::channel();
        (Self { wanted, answer: sender }, answer)
    }

    /// Tells the answer. Returns the permit if nobody waits for it any more.
    pub(super) fn tell(self, answer: Answer) -> Option<Permit> {
        self.answer.send(answer).err()?.ok()
    }
}

impl Line {
    /// A line whose first caller has just been `denied`, if it has asked.
    pub(super) fn new(number: u64, denied: Option<Decision>, now: Instant) -> Self {
        let next_at = denied.as_ref().and_then(Decision::retry_after).and_then(|wait| now.checked_add(wait));
        Self {
            number,
            waiting: BTreeMap::new(),
            came: 0,
            known: denied,
            next_at,
            served: 0,
            wake: Arc::new(Notify::new()),
            wakes_at: None,
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// When a denial has to be over before it helps to ask again.
    pub(super) fn denied_until(&self) -> Option<Instant> {
        self.next_at.filter(|_| self.known.as_ref().is_some_and(|known| known.retry_after().is_some()))
    }

    /// Why one more may not join: too many wait, or it is certain that the turn would come too late.
    pub(super) fn refusal(&self, wanted: &Wanted, is_full: bool, now: Instant) -> Option<Decision> {
        let earliest = self.earliest(&wanted.policies);
        let is_late = wanted.deadline.zip(earliest).is_some_and(|(deadline, earliest)| earliest > deadline);
        // Before anything is known nobody is refused: there is nothing to tell.
        (is_full || is_late).then(|| self.denial(earliest, now)).flatten()
    }

    /// What is known, as a denial until then.
    fn denial(&self, until: Option<Instant>, now: Instant) -> Option<Decision> {
        let wait = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        self.known.clone().map(|known| known.denied_for(wait))
    }

    /// No turn of one who comes now is before that.
    fn earliest(&self, policies: &Policies) -> Option<Instant> {
        let next_at = self.next_at?;
        let has_room = self.known.as_ref().is_some_and(|known| known.remaining() > 0);
        if has_room || !policies.iter().all(|policy| policy.strategy().is_steady()) {
            return Some(next_at);
        }
        // A unit at a time flows back; those who are served have theirs.
        let units: u64 = self.waiting.values().skip(self.served).map(|waiter| u64::from(waiter.wanted.cost)).sum();
        let spacing = policies.iter().map(spacing).max().unwrap_or_default();
        let wait = spacing.checked_mul(u32::try_from(units).unwrap_or(u32::MAX)).unwrap_or(Duration::MAX);
        next_at.checked_add(wait).or(Some(next_at))
    }

    /// Lines up at the end. Returns the number there.
    pub(super) fn push(&mut self, waiter: Waiter) -> u64 {
        let deadline = waiter.wanted.deadline;
        if deadline.is_some_and(|deadline| self.wakes_at.is_none_or(|wakes_at| deadline < wakes_at)) {
            self.wake.notify_one();
        }
        let number = self.came;
        self.came += 1;
        self.waiting.insert(number, waiter);
        number
    }

    /// Takes out the one who has this number.
    pub(super) fn leave(&mut self, number: u64) -> Option<Waiter> {
        let left = self.waiting.remove(&number);
        if left.is_some() && self.waiting.is_empty() {
            self.wake.notify_one();
        }
        left
    }

    /// Takes out the first, if a permit of this cost under these policies is what it wants.
    pub(super) fn pop(&mut self, policies: &Policies, cost: u32) -> Option<Waiter> {
        let first = self.waiting.first_entry()?;
        let Wanted { policies: wanted, cost: wants, .. } = &first.get().wanted;
        if *wants != cost || !wanted.is(policies) {
            return None;
        }
        self.served = self.served.saturating_sub(1);
        let waiter = first.remove();
        if self.waiting.is_empty() {
            self.wake.notify_one();
        }
        Some(waiter)
    }

    /// Takes out all.
    pub(super) fn clear(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.waiting).into_values().collect()
    }

    /// Takes out those whose time is up, with what they are told. Nobody is before anything is known.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(Waiter, Decision)> {
        let Some(denial) = self.denial(self.next_at, now) else { return Vec::new() };
        let is_late = |waiter: &Waiter| waiter.wanted.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<u64> = self.waiting.iter().filter(|(_, waiter)| is_late(waiter)).map(|(n, _)| *n).collect();
        late.iter().filter_map(|number| Some((self.waiting.remove(number)?, denial.clone()))).collect()
    }

    /// The earliest deadline of those who wait.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.waiting.values().filter_map(|waiter| waiter.wanted.deadline).min()
    }

    /// What to ask for next, if the store has room for so much.
    pub(super) fn ask(&self, room: u32) -> Option<Ask> {
        let (number, Waiter { wanted, .. }) = self.waiting.first_key_value()?;
        let Wanted { policies, cost, .. } = wanted;
        let alike = |waiter: &&Waiter| waiter.wanted.cost == *cost && waiter.wanted.policies.is(policies);
        let most = (room / (*cost).max(1)).max(1);
        let first = self.waiting.values().take_while(alike).take(most as usize);
        let (count, deadline) = first.fold((0, None), |(count, earliest), waiter| {
            let deadline = waiter.wanted.deadline;
            (count + 1, [earliest, deadline].into_iter().flatten().min())
        });
        Some(Ask { first: *number, count, policies: policies.clone(), cost: *cost, deadline })
    }

    /// Learns what the store has decided, and how many permits that gives and when.
    pub(super) fn learn(&mut self, decision: &Decision, next_at: Instant, served: u32) {
        self.known = Some(decision.clone());
        self.next_at = Some(next_at);
        self.served = served as usize;
    }
}

/// How long a unit takes to flow back.
fn spacing(policy: &Policy) -> Duration {
    policy.quota().period() / policy.quota().limit().max(1)
}
