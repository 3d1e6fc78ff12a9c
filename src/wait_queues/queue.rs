//! Who waits for one caller, in order, and whether one more may.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Permit, Refusal, TICK, WaitRequest};
use crate::error::StoreError;
use crate::limit::{Decision, Policies, Policy, Verdict};
use crate::store::Wake;

/// Those of one runtime who wait for one caller under the same policies.
pub(super) struct WaitQueue {
    number: u64,
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiter>,
    /// By which each wants to have its turn.
    deadlines: BTreeSet<(Instant, u64)>,
    /// What all of them cost.
    units: u64,
    came: u64,
    /// What was decided last.
    known: Option<Known>,
    /// Why the store could not decide, if it could not when it was asked last.
    trouble: Option<StoreError>,
    /// Whether that was so often that nobody may wait now.
    has_failed: bool,
    /// No permit comes before that, as far as is known.
    next_at: Option<Instant>,
    /// How many of those who wait have a permit that is due at `next_at`.
    served: usize,
    /// Wakes the dispatcher.
    pub(super) wake: Arc<Wake>,
    /// When the dispatcher looks at the queue again by itself.
    pub(super) wakes_at: Option<Instant>,
}

/// A decision of the store.
struct Known {
    decision: Decision,
    at: Instant,
    /// For each of those whom it was asked for.
    cost: u32,
}

pub(super) struct Waiter {
    pub(super) wanted: WaitRequest,
    answer: oneshot::Sender<Answer>,
}

pub(super) type Answer = Result<Permit, Refusal>;

/// A check that the dispatcher makes next, for some of the first in the queue.
#[derive(Debug)]
pub(super) struct Ask {
    /// The first of them, and the last.
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) policies: Policies,
    /// What each of them wants, in their order.
    pub(super) costs: SmallVec<[u32; 4]>,
    /// The earliest of theirs.
    pub(super) deadline: Option<Instant>,
}

impl Ask {
    /// What the first wants.
    pub(super) fn cost(&self) -> u32 {
        self.costs[0]
    }

    /// What all of them want.
    pub(super) fn total(&self) -> u32 {
        self.costs
            .iter()
            .fold(0, |total, cost| total.saturating_add(*cost))
    }
}

/// For how much there was room after an answer of the store.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Room {
    /// Under the policies that count costs.
    pub(super) units: u32,
    /// Under those that count requests in flight.
    pub(super) places: u32,
}

impl Room {
    pub(super) fn after(decision: &Decision) -> Self {
        let least = |in_flight: bool| {
            let verdicts = decision.verdicts();
            let verdicts = verdicts.filter(|(policy, _)| policy.is_in_flight() == in_flight);
            let remaining = verdicts
                .map(|(_, verdict)| u32::try_from(verdict.remaining.max(0)).unwrap_or(u32::MAX));
            remaining.min().unwrap_or(u32::MAX)
        };
        Self {
            units: least(false),
            places: least(true),
        }
    }
}

impl Waiter {
    pub(super) fn new(wanted: WaitRequest) -> (Self, oneshot::Receiver<Answer>) {
        let (sender, answer) = oneshot::channel();
        (
            Self {
                wanted,
                answer: sender,
            },
            answer,
        )
    }

    /// Sends the answer. Returns the permit if nobody waits for it any more.
    pub(super) fn answer(self, answer: Answer) -> Option<Permit> {
        self.answer.send(answer).err()?.ok()
    }
}

impl WaitQueue {
    /// A queue whose first caller has just been `denied` what it wants, if it has asked.
    pub(super) fn new(
        number: u64,
        wanted: &WaitRequest,
        denied: Option<Decision>,
        now: Instant,
    ) -> Self {
        let next_at = denied
            .as_ref()
            .and_then(Decision::retry_after)
            .and_then(|wait| now.checked_add(wait));
        Self {
            number,
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            units: 0,
            came: 0,
            known: denied.map(|decision| Known {
                decision,
                at: now,
                cost: wanted.cost,
            }),
            trouble: None,
            has_failed: false,
            next_at,
            served: 0,
            wake: Arc::default(),
            wakes_at: None,
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// A denial that is known, when it was made, and its wait.
    pub(super) fn denied(&self) -> Option<(Decision, Instant, Duration)> {
        let Known { decision, at, .. } = self.known.as_ref()?;
        Some((decision.clone(), *at, decision.retry_after()?))
    }

    /// Why one more may not join: too many wait, or the turn would come too late even if nobody left the queue.
    pub(super) fn refusal(
        &self,
        wanted: &WaitRequest,
        is_full: bool,
        now: Instant,
    ) -> Option<Decision> {
        if !is_full && wanted.deadline.is_none() {
            return None;
        }
        let earliest = self.earliest(wanted);
        let is_late = wanted
            .deadline
            .zip(earliest)
            .is_some_and(|(deadline, earliest)| earliest > deadline);
        (is_full || is_late).then(|| {
            self.denial(earliest, now)
                .unwrap_or_else(|| wanted.denial())
        })
    }

    /// Why nobody may wait now.
    pub(super) fn failed(&self) -> Option<&StoreError> {
        self.trouble.as_ref().filter(|_| self.has_failed)
    }

    /// What is known, as a denial until then.
    fn denial(&self, until: Option<Instant>, now: Instant) -> Option<Decision> {
        let wait = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        let Known { decision, at, .. } = self.known.as_ref()?;
        Some(
            decision
                .clone()
                .denied_for(wait, now.saturating_duration_since(*at)),
        )
    }

    /// No turn of one who comes now is before that, if those before it stay.
    fn earliest(&self, wanted: &WaitRequest) -> Option<Instant> {
        let (known, next_at) = (self.known.as_ref()?, self.next_at?);
        // What is counted by windows shows too little.
        if !wanted
            .policies
            .iter()
            .all(|policy| policy.frees().is_gradual())
        {
            return Some(next_at);
        }
        let units = self.units_before() + u64::from(wanted.cost);
        let verdicts = known.decision.verdicts();
        verdicts
            .map(|(policy, verdict)| known.earliest(policy, verdict, units))
            .fold(Some(next_at), Ord::max)
    }

    /// What those cost who wait, but for those who are served: they have theirs.
    fn units_before(&self) -> u64 {
        let served = self.waiting.values().take(self.served);
        self.units
            - served
                .map(|waiter| u64::from(waiter.wanted.cost))
                .sum::<u64>()
    }

    /// Queues up at the end. Returns the number there.
    pub(super) fn push(&mut self, waiter: Waiter) -> u64 {
        let number = self.came;
        self.units += u64::from(waiter.wanted.cost);
        if let Some(deadline) = waiter.wanted.deadline {
            self.deadlines.insert((deadline, number));
            if self.wakes_at.is_none_or(|wakes_at| deadline < wakes_at) {
                self.wake.notify.notify_one();
            }
        }
        self.came += 1;
        self.waiting.insert(number, waiter);
        number
    }

    fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiting.remove(&number)?;
        self.units -= u64::from(waiter.wanted.cost);
        if let Some(deadline) = waiter.wanted.deadline {
            self.deadlines.remove(&(deadline, number));
        }
        Some(waiter)
    }

    /// Takes out the one who has this number.
    pub(super) fn leave(&mut self, number: u64) -> Option<Waiter> {
        let left = self.remove(number)?;
        if self
            .waiting
            .first_key_value()
            .is_none_or(|(first, _)| *first > number)
        {
            self.wake_unless_first_wants(left.wanted.cost);
        }
        Some(left)
    }

    /// Takes out the first, if a permit of this cost is what it wants.
    pub(super) fn pop(&mut self, cost: u32) -> Option<Waiter> {
        if !self.first_wants(cost) {
            return None;
        }
        let (first, _) = self.waiting.first_key_value()?;
        let waiter = self.remove(*first)?;
        self.wake_unless_first_wants(cost);
        Some(waiter)
    }

    /// Whether the first wants a permit of this cost.
    fn first_wants(&self, cost: u32) -> bool {
        self.waiting
            .values()
            .next()
            .is_some_and(|first| first.wanted.cost == cost)
    }

    /// The dispatcher rests for what the first wanted, which has left.
    fn wake_unless_first_wants(&self, cost: u32) {
        if !self.first_wants(cost) {
            self.wake.notify.notify_one();
        }
    }

    /// Notes that the store could not decide, and is not asked again before then. Takes out who is refused: the one of
    /// this number, or all. Returns the trouble before, too: what a user's error does when it is dropped, it does without
    /// the lock.
    pub(super) fn fail(
        &mut self,
        error: &StoreError,
        only: Option<u64>,
        until: Instant,
    ) -> (Vec<Waiter>, Option<StoreError>) {
        let before = self.trouble.replace(error.clone());
        self.next_at = Some(until);
        self.served = 0;
        if let Some(first) = only {
            return (self.remove(first).into_iter().collect(), before);
        }
        self.has_failed = true;
        self.deadlines.clear();
        self.units = 0;
        (
            std::mem::take(&mut self.waiting).into_values().collect(),
            before,
        )
    }

    /// Notes that the store is asked again.
    pub(super) fn try_again(&mut self) {
        self.has_failed = false;
    }

    /// Takes out those whose time is up, with their refusals. Nobody is before anything is known, or after the time
    /// for which it was: then the store is asked.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(Waiter, Refusal)> {
        match self.next_at {
            Some(next_at) if next_at > now => self.take_out_late(now, None, now),
            _ => Vec::new(),
        }
    }

    /// Takes out those whose time was up when the store answered last, and who are not asked for next either: it had no
    /// room for them.
    pub(super) fn left_over(&mut self, asks: &[Ask], now: Instant) -> Vec<(Waiter, Refusal)> {
        match (&self.known, asks.last()) {
            (Some(known), Some(ask)) => self.take_out_late(known.at, Some(ask.last), now),
            _ => Vec::new(),
        }
    }

    /// Takes out those who wanted to have their turn by then, and are after this one.
    fn take_out_late(
        &mut self,
        by: Instant,
        after: Option<u64>,
        now: Instant,
    ) -> Vec<(Waiter, Refusal)> {
        let failed = self.trouble.clone().map(Refusal::Failed);
        let Some(refusal) = failed.or_else(|| self.denial(self.next_at, now).map(Refusal::Denied))
        else {
            return Vec::new();
        };
        let late = self
            .deadlines
            .range(..=(by, u64::MAX))
            .map(|(_, number)| *number);
        let late: Vec<u64> = late
            .filter(|number| after.is_none_or(|after| *number > after))
            .collect();
        late.into_iter()
            .filter_map(|number| Some((self.remove(number)?, refusal.clone())))
            .collect()
    }

    /// When a dispatcher that rests until then has to look again. None if it has to ask again now: the first does not
    /// want what was asked for, or somebody's time is up after the time for which the answer was.
    pub(super) fn rest(
        &mut self,
        until: Instant,
        ask: Option<&Ask>,
        now: Instant,
    ) -> Option<Instant> {
        if ask.is_some_and(|ask| !self.first_wants(ask.cost())) {
            self.next_at = None;
            self.served = 0;
            return None;
        }
        let next_at = self.next_at.unwrap_or(now);
        let first = self.deadlines.first().map(|(deadline, _)| *deadline);
        let looks_at = first.map(|first| {
            if first < next_at {
                first
            } else {
                first.max(next_at + TICK)
            }
        });
        let wakes_at = looks_at.map_or(until, |looks_at| looks_at.min(until));
        self.wakes_at = Some(wakes_at);
        Some(wakes_at).filter(|wakes_at| *wakes_at > now)
    }

    /// Notes that nobody who waits has a permit.
    pub(super) fn all_served(&mut self) {
        self.served = 0;
    }

    /// What to ask for next, if the store has room for so much: nothing if nobody waits. A check takes one for a
    /// request in flight, so that each of these has a check of its own.
    pub(super) fn ask(&self, room: Room) -> Vec<Ask> {
        let mut asks: Vec<Ask> = vec![];
        let mut units = room
            .units
            .max(
                self.waiting
                    .values()
                    .next()
                    .map_or(0, |first| first.wanted.cost),
            )
            .max(1);
        for (&number, Waiter { wanted, .. }) in
            self.waiting.iter().take(room.places.max(1) as usize)
        {
            let &WaitRequest {
                ref policies,
                cost,
                deadline,
                ..
            } = wanted;
            let Some(rest) = units.checked_sub(cost.max(1)) else {
                break;
            };
            units = rest;
            match asks.last_mut().filter(|_| policies.in_flight().is_none()) {
                Some(ask) => {
                    ask.last = number;
                    ask.costs.push(cost);
                    ask.deadline = [ask.deadline, deadline].into_iter().flatten().min();
                }
                None => {
                    let (policies, costs) = (policies.clone(), smallvec![cost]);
                    asks.push(Ask {
                        first: number,
                        last: number,
                        policies,
                        costs,
                        deadline,
                    });
                }
            }
        }
        asks
    }

    /// Learns what the store has decided, and how many permits that gives and when. Returns the trouble that is over, as
    /// [`fail`](Self::fail) does.
    pub(super) fn learn(
        &mut self,
        ask: &Ask,
        decision: &Decision,
        at: Instant,
        next_at: Instant,
        served: usize,
    ) -> Option<StoreError> {
        self.known = Some(Known {
            decision: decision.clone(),
            at,
            cost: ask.cost(),
        });
        self.next_at = Some(next_at);
        self.served = served;
        self.trouble.take()
    }

    /// Notes when what was taken is due after all.
    pub(super) fn is_due_at(&mut self, due_at: Instant) {
        self.next_at = Some(due_at);
    }
}

impl Known {
    /// When one policy lets so much pass at the earliest.
    fn earliest(&self, policy: &Policy, verdict: &Verdict, units: u64) -> Option<Instant> {
        let wait = Duration::from_micros(u64::try_from(verdict.wait).unwrap_or_default());
        // So much has room, and when. What remains is rounded down.
        let (room, from) = match verdict.wait {
            0 => (verdict.remaining + 1, self.at),
            _ if self.decision.granted() > 0 => (0, self.at + wait),
            _ => (i64::from(self.cost), self.at + wait),
        };
        let missing = units.checked_sub(u64::try_from(room).unwrap_or_default())?;
        from.checked_add(policy.quota().time_for(missing))
    }
}
