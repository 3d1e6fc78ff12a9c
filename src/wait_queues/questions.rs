//! The task of a line that repeats checks until capacity is free.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout_at};

use super::line::{Line, Then};
use super::permit::Charge;
use super::{Permit, Place, Refusal};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{ChargedAt, Check, Decision, Mode};
use crate::store::{Listener, Wake};
use crate::util::{instant, random};

struct Questions {
    place: Place,
    wake: Arc<Wake>,
    _listener: Option<Listener>,
    /// Capacity left after the last grant. For requests in flight, or the number of slots released in this process
    /// since, if greater.
    room: u32,
    asked_at: Instant,
}

/// A check for some of the first waiters, with the number and the cost of the first of these.
struct Question {
    number: u64,
    cost: u32,
    check: Check,
}

/// The reply to a check.
struct Answered {
    question: Question,
    answer: Result<Decision, StoreError>,
    slot: Option<Slot>,
}

/// Maximum jitter of a check, equal for all instances, so that no instance is favored. Also the minimum interval of
/// checks, if capacity is freed in this process.
const JITTER: Duration = Duration::from_millis(20);
/// Interval of checks for slots that other instances release, and pause after a failed check.
const POLL: Duration = Duration::from_millis(100);
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
const LOOK: Duration = Duration::from_secs(30);
const LOOKS: u32 = 16;

/// Runs until the line ends, or until it reserves turns again. Returns the place in the second case.
pub(super) async fn run(place: Place) -> Option<Place> {
    let wake = place.with(|line| Arc::clone(&line.wake));
    let wake = wake.unwrap_or_default();
    let waiters = place.line.queues.shared.store.waiters();
    let (key, policies) = (place.line.id.key, place.policies.clone());
    let listener = waiters.map(|waiters| waiters.listen(key, policies, Arc::clone(&wake)));
    let questions = Questions {
        place,
        wake,
        _listener: listener,
        room: 0,
        asked_at: instant(),
    };
    questions.run().await
}

impl Questions {
    async fn run(mut self) -> Option<Place> {
        let mut replied_at = self.asked_at;
        // The denial with which the line was created. A slot may be free at any other time.
        let in_flight = self.is_in_flight();
        let denied = |line: &mut Line| line.free_at.take_if(|_| in_flight).or(line.free_at);
        let free_at = self.place.with(denied).flatten();
        let mut next = free_at.map(|(free_at, _)| self.next(free_at - self.asked_at));
        loop {
            let until = match next {
                Some(_) if self.wake.is_freed() && self.is_in_flight() => None,
                Some(next) if self.wake.is_freed() => Some(next.min(self.asked_at + JITTER)),
                next => next,
            };
            let rest = self.place.with(|line| line.rest(instant(), until));
            let (late, then) = rest?;
            self.place.refuse_late(late);
            match then {
                Then::Sleep(None) => self.wake.notify.notified().await,
                Then::Sleep(Some(at)) => drop(timeout_at(at, self.wake.notify.notified()).await),
                Then::Check => {
                    next = self.ask(replied_at).await;
                    replied_at = instant();
                    if !self.place.with(|line| line.polls())? {
                        return Some(self.place);
                    }
                }
                Then::End if self.place.ends() => return None,
                Then::End => {}
            }
        }
    }

    fn is_in_flight(&self) -> bool {
        self.place.policies.in_flight().is_some()
    }

    /// Builds the checks for the first waiters, for which there may be capacity: at least for the first one. Also
    /// returns the last waiter that they cover. `None` if the line is empty.
    fn questions(&self) -> Option<(Vec<Question>, u64)> {
        let (key, policies) = (self.place.line.id.key, &self.place.policies);
        let waiters = self.place.with(|line| line.costs().collect::<Vec<_>>())?;
        let &(number, cost) = waiters.first()?;
        let last = |count: usize| waiters[count - 1].0;
        if self.is_in_flight() {
            let count = waiters.len().min(self.room.max(1) as usize);
            let each = waiters[..count].iter().map(|&(number, cost)| Question {
                number,
                cost,
                check: Check::take(key, policies, cost),
            });
            return Some((each.collect(), last(count)));
        }
        let (mut units, mut count) = (cost, 1);
        while let Some((_, more)) = waiters.get(count)
            && let Some(more) = units.checked_add(*more).filter(|more| *more <= self.room)
        {
            (units, count) = (more, count + 1);
        }
        let alike = waiters.iter().take_while(|(_, other)| *other == cost);
        let alike = alike.count();
        let check = if cost <= 1 && alike >= count {
            // Grants all of these waiters that fit.
            let capacities = policies.iter().map(|policy| policy.quota().capacity());
            count = alike.min(capacities.min().unwrap_or(1) as usize);
            Check::up_to(key, policies, cost * count as u32)
        } else {
            Check::take(key, policies, units)
        };
        let question = Question {
            number,
            cost,
            check,
        };
        Some((vec![question], last(count)))
    }

    /// Sends checks for the first waiters, and handles the replies. Returns the time of the next checks, or `None` for
    /// immediately.
    async fn ask(&mut self, replied_at: Instant) -> Option<Instant> {
        // Clear `freed` first: the checks see all capacity freed before them.
        let freed = self.wake.take_freed();
        if self.is_in_flight() {
            self.room = self.room.max(freed);
        }
        let (questions, last) = self.questions()?;
        let late = self.place.with(|line| line.late_behind(last, replied_at));
        self.place.refuse_late(late.flatten());
        self.asked_at = instant();
        let replies = questions.into_iter().map(|question| self.send(question));
        let mut replies: FuturesUnordered<_> = replies.collect();
        let (mut granted, mut denied, mut failed) = (None, None, None);
        while let Some(reply) = replies.next().await {
            let Answered {
                question,
                answer,
                slot,
            } = reply;
            match answer {
                Ok(decision) if decision.is_allowed() => {
                    self.give(&question, &decision, slot);
                    granted = Some((question, decision));
                }
                Ok(decision) => denied = Some((question, decision)),
                Err(error) => failed = Some((question, error)),
            }
        }
        if let Some((question, error)) = failed {
            if let Some((_, decision)) = granted.or(denied) {
                // The store works.
                let now = instant();
                drop(self.place.with(|line| line.learn(&decision, now)));
            }
            self.place.fail(question.number, &error);
            Some(instant() + POLL)
        } else if let Some((question, decision)) = denied {
            self.denied(&question, decision)
        } else {
            let (question, decision) = granted?;
            self.granted(&question, &decision)
        }
    }

    fn send(&self, question: Question) -> impl Future<Output = Answered> + use<> {
        let queues = &self.place.line.queues;
        let in_flight = queues.in_flight.as_ref();
        let mut slot = in_flight.and_then(|in_flight| in_flight.hold(&question.check));
        let answer = queues.shared.store.ask(question.check.clone());
        async move {
            let answer = answer.await;
            if let Some(slot) = &mut slot {
                slot.answered(answer.as_ref());
            }
            Answered {
                question,
                answer,
                slot,
            }
        }
    }

    /// Sends permits for the granted units to the first waiters.
    fn give(&self, question: &Question, decision: &Decision, slot: Option<Slot>) {
        let place = &self.place;
        let permit = |cost, slot| {
            let charge = Charge::new(place, decision.clone(), cost, self.asked_at, instant());
            Permit::new(place.line.clone(), charge, slot)
        };
        if self.is_in_flight() {
            // Replies arrive in any order, so give each slot to the first waiter.
            let &Question { number, cost, .. } = question;
            let waiter = place.with(|line| line.pop(cost).or_else(|| line.remove(number)));
            let permit = permit(cost, slot);
            if let Some(waiter) = waiter.flatten() {
                waiter.answer(Ok(permit));
            }
            return;
        }
        let mut left = decision.granted();
        while let Some(waiter) = place.with(|line| line.pop_up_to(left)).flatten() {
            left -= waiter.cost;
            let permit = permit(waiter.cost, None);
            waiter.answer(Ok(permit));
        }
        if left > 0 {
            // A waiter has left.
            drop(permit(left, None));
        }
    }

    fn granted(&mut self, question: &Question, decision: &Decision) -> Option<Instant> {
        let now = instant();
        let may_reserve =
            self.place.line.id.reserves && matches!(decision.charged_at(), ChargedAt::Redis(_));
        drop(self.place.with(|line| {
            line.granted(may_reserve);
            line.learn(decision, now)
        }));
        if self.is_in_flight() {
            let slots = decision
                .verdicts()
                .filter(|(policy, _)| policy.is_in_flight());
            let free = slots.map(|(_, verdict)| verdict.remaining).min();
            let free = u32::try_from(free.unwrap_or(0)).unwrap_or(0);
            // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
            self.room = match self.wake.take_freed() {
                0 => free,
                freed => freed + free.min(1),
            };
            return (self.room == 0).then(|| now + POLL);
        }
        self.room = decision.remaining();
        // The reply does not say when more is freed. It is unlikely before the quota refills a unit.
        let wait = decision.policy().quota().time_for(1);
        (decision.granted() < question.check.cost()).then(|| self.next(wait))
    }

    fn denied(&mut self, question: &Question, decision: Decision) -> Option<Instant> {
        let now = instant();
        drop(self.place.with(|line| line.learn(&decision, now)));
        self.room = 0;
        let &Question { number, cost, .. } = question;
        let units = question.check.cost();
        if question.check.mode() == Mode::Take && cost < units {
            // Less capacity is left than the last reply reported.
            self.room = decision.remaining().min(units - 1);
            return None;
        }
        let Some(wait) = decision.retry_after() else {
            let refusal = Refusal::Denied(decision);
            self.place.refuse(number, refusal);
            return None;
        };
        if self.is_in_flight() {
            return Some(self.next(wait));
        }
        let free_at = self.asked_at + wait;
        self.place.with(|line| line.free_at = Some((free_at, cost)));
        Some(self.next(wait))
    }

    /// Returns the time of the next check after a reply that promised capacity `wait` after the last check: when that is
    /// free, or earlier, since other instances may refund, plus a jitter.
    fn next(&self, wait: Duration) -> Instant {
        let wait = wait.min(LOOK.max(wait / LOOKS));
        let periods = self.place.policies.iter();
        let periods = periods.map(|policy| policy.quota().period());
        let jitter = periods.fold(JITTER, |jitter, period| jitter.min(period / 5));
        instant().max(self.asked_at + wait) + jitter.mul_f64(random())
    }
}
