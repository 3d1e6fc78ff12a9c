//! The task of a line that asks when something may be free.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, timeout};

use super::permit::Charge;
use super::{FAILURE_PAUSE, Permit, Place, Refusal, TICK};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Check, Decision, Mode};
use crate::store::{Listener, Wake};
use crate::util::{instant, random};

pub(super) struct Questions {
    place: Place,
    wake: Arc<Wake>,
    _listener: Option<Listener>,
    /// For how much more there was room after the last grant; of requests in flight, or how many have ended here since.
    room: u32,
    /// The first in line when it was denied last, and its cost.
    denied: Option<(u64, u32)>,
    /// Whether that was when there should have been room for it: smaller costs of other instances take all that is freed.
    /// Then it takes part by part.
    starves: bool,
    /// Whether the whole wait of the last denial is over when it is asked again.
    sat_out: bool,
    /// What it has taken so far.
    part: Option<Permit>,
    /// The largest part so far, and the number of questions in a row that have not enlarged it.
    largest: u32,
    stuck: u32,
}

/// The reply to a check that was made for some of the first in line.
struct Answered {
    /// The first of them.
    number: u64,
    mode: Mode,
    /// What the check costs.
    units: u32,
    answer: Result<Decision, StoreError>,
    slot: Option<Slot>,
}

/// The denial of such a check.
struct Denied {
    number: u64,
    mode: Mode,
    units: u32,
    decision: Decision,
}

/// Maximum jitter of a question, the same for all instances, so that none of them is always the first.
const JITTER: Duration = Duration::from_millis(20);
/// Minimum interval between questions because something was freed in this process.
const GAP: Duration = Duration::from_millis(10);
/// Interval of questions for slots in flight that other instances release.
const POLL: Duration = Duration::from_millis(100);
/// As many questions in a row that add nothing to a part show that it may be held against another one.
const STUCK: u32 = 4;
/// Maximum interval of questions, or a part of a longer wait: other instances may refund.
const LOOK: Duration = Duration::from_secs(30);
const LOOKS: u32 = 16;

impl Questions {
    pub(super) fn new(place: Place) -> Self {
        let wake = place
            .with(|line| Arc::clone(&line.wake))
            .unwrap_or_default();
        let waiters = place.line.shared.store.waiters();
        let (key, policies) = (place.line.id.key, place.policies.clone());
        let listener = waiters.map(|waiters| waiters.listen(key, policies, Arc::clone(&wake)));
        Self {
            place,
            wake,
            _listener: listener,
            room: 0,
            denied: None,
            starves: false,
            sat_out: false,
            part: None,
            largest: 0,
            stuck: 0,
        }
    }

    pub(super) async fn run(mut self) {
        let mut asked_at = instant();
        let mut answered_at = asked_at;
        // The denial that the line begins with.
        let free_at = self.place.with(|line| line.free_at).flatten();
        let mut next = free_at.map(|free_at| {
            let wait = free_at.saturating_duration_since(asked_at);
            self.next(look(wait), asked_at)
        });
        if free_at.is_some() {
            self.denied = self.place.with(|line| line.first()).flatten();
        }
        loop {
            if let Some(next) = next {
                self.rest(next, asked_at).await;
            }
            // What was freed until it is asked, it sees.
            let freed = self.wake.take_freed();
            if self.is_in_flight() {
                self.room = self.room.max(freed);
            }
            let (checks, last) = self.checks();
            if let Some(last) = last {
                // Their time was up when the store replied, and it had no room for them.
                self.refuse_late(answered_at, last);
            }
            asked_at = instant();
            next = if !checks.is_empty() {
                let next = self.ask(checks, asked_at).await;
                answered_at = instant();
                next
            } else if self.place.ends() {
                return;
            } else {
                self.place.with(|line| line.remembers_until()).flatten()
            };
        }
    }

    fn is_in_flight(&self) -> bool {
        self.place.policies.in_flight().is_some()
    }

    /// The next checks, each with the first waiter that it is for, and the last waiter that they are for; none if nobody
    /// waits.
    fn checks(&mut self) -> (Vec<(u64, Check)>, Option<u64>) {
        let (key, policies) = (self.place.line.id.key, &self.place.policies);
        let waiters = self.place.with(|line| {
            let each = line.waiters().map(|(number, waiter)| (number, waiter.cost));
            each.collect::<Vec<_>>()
        });
        let waiters = waiters.unwrap_or_default();
        let Some(&(first, cost)) = waiters.first() else {
            return (vec![], None);
        };
        if self.denied.is_some_and(|(denied, _)| denied != first) {
            (self.denied, self.starves, self.part) = (None, false, None);
            (self.largest, self.stuck) = (0, 0);
        }
        let last = |count: usize| waiters.get(count.max(1) - 1).map(|(number, _)| *number);
        if self.is_in_flight() {
            let count = waiters.len().min(self.room.max(1) as usize);
            let check = |&(number, cost): &_| (number, Check::take(key, policies, cost));
            return (waiters[..count].iter().map(check).collect(), last(count));
        }
        // The first ones for whom there is room.
        let (mut units, mut count) = (cost, 1);
        while let Some((_, more)) = waiters.get(count)
            && let Some(more) = units.checked_add(*more).filter(|more| *more <= self.room)
        {
            (units, count) = (more, count + 1);
        }
        let alike = waiters
            .iter()
            .take_while(|(_, other)| *other == cost)
            .count();
        if self.starves {
            return (
                vec![(first, Check::up_to(key, policies, cost))],
                Some(first),
            );
        }
        if cost <= 1 && alike >= count {
            // As many of them pass as there is room for.
            let most = policies
                .iter()
                .map(|policy| policy.quota().capacity())
                .min();
            let count = alike.min(most.unwrap_or(1) as usize);
            let check = Check::up_to(key, policies, cost * count as u32);
            return (vec![(first, check)], last(count));
        }
        (
            vec![(first, Check::take(key, policies, units))],
            last(count),
        )
    }

    /// Asks, and does what the replies say. Returns when to ask again: `None` for now.
    async fn ask(&mut self, checks: Vec<(u64, Check)>, asked_at: Instant) -> Option<Instant> {
        // What was taken before is taken again, as of now: both are in one call of the store.
        let mut replies =
            FuturesUnordered::<Pin<Box<dyn Future<Output = Option<Answered>> + Send>>>::new();
        if let Some(part) = self.part.take().and_then(Permit::into_refund) {
            let refund = self.place.line.shared.store.ask(part);
            // A part of which the refund fails expires.
            replies.push(Box::pin(refund.map(|_| None)));
        }
        for (number, check) in checks {
            replies.push(Box::pin(self.send(number, check).map(Some)));
        }
        let (mut granted, mut denied, mut failed) = (None, None, None);
        while let Some(reply) = replies.next().await {
            let Some(reply) = reply else { continue };
            match reply.answer {
                Ok(decision) if decision.is_allowed() => {
                    granted = Some((reply.units, decision.clone()));
                    self.give(reply.number, decision, reply.units, reply.slot, asked_at);
                }
                Ok(decision) => {
                    let Answered {
                        number,
                        mode,
                        units,
                        ..
                    } = reply;
                    denied = Some(Denied {
                        number,
                        mode,
                        units,
                        decision,
                    });
                }
                Err(error) => failed = Some((reply.number, error)),
            }
        }
        if let Some((number, error)) = failed {
            self.place.fail(number, &error);
            Some(instant() + FAILURE_PAUSE)
        } else if let Some(denied) = denied {
            self.denied(denied, asked_at)
        } else {
            let (units, decision) = granted?;
            self.granted(units, &decision, asked_at)
        }
    }

    fn send(&self, number: u64, check: Check) -> impl Future<Output = Answered> + use<> {
        let (mode, units) = (check.mode(), check.cost());
        let in_flight = self.place.queues.in_flight.as_ref();
        let mut slot = in_flight.and_then(|in_flight| in_flight.hold(&check));
        let answer = self.place.line.shared.store.ask(check);
        async move {
            let answer = answer.await;
            if let Some(slot) = &mut slot {
                slot.answered(answer.as_ref());
            }
            Answered {
                number,
                mode,
                units,
                answer,
                slot,
            }
        }
    }

    /// Gives permits to the first in line, for as much as was granted.
    fn give(
        &mut self,
        number: u64,
        decision: Decision,
        units: u32,
        slot: Option<Slot>,
        asked_at: Instant,
    ) {
        let place = &self.place;
        let permit = |cost, slot| {
            let charge = Charge::new(place, decision.clone(), cost, asked_at, instant());
            Permit::new(place.line.clone(), charge, slot)
        };
        if self.is_in_flight() {
            // The replies come in any order.
            let waiter = place.with(|line| line.pop(units).or_else(|| line.remove(number)));
            let permit = permit(units, slot);
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
            self.part = Some(permit(left, None)).filter(|_| self.starves);
        }
    }

    fn granted(&mut self, units: u32, decision: &Decision, asked_at: Instant) -> Option<Instant> {
        let now = instant();
        drop(self.place.with(|line| {
            line.free_at = None;
            line.learn(decision, now)
        }));
        if self.is_in_flight() {
            let slots = decision
                .verdicts()
                .filter(|(policy, _)| policy.is_in_flight());
            let free = slots.map(|(_, verdict)| verdict.remaining).min();
            let free = u32::try_from(free.unwrap_or(0)).unwrap_or(0);
            // Where requests end all the time, most of what is free is asked for already, where they ended.
            self.room = match self.wake.take_freed() {
                0 => free,
                freed => freed + free.min(1),
            };
            return (self.room == 0).then(|| now + POLL);
        }
        self.room = decision.remaining();
        // Nothing says when more is freed, but that it hardly is before the quota gives as much.
        if decision.granted() >= units {
            return None;
        }
        if self.starves {
            if decision.granted() > self.largest {
                (self.largest, self.stuck) = (decision.granted(), 0);
            } else if self.gives_way() {
                return None;
            }
        }
        let wait = decision.policy().quota().time_for(1);
        Some(self.next(wait, asked_at))
    }

    /// After several questions that have not enlarged the part, gives it up at random: another instance may
    /// hold the rest, and wait for this part.
    fn gives_way(&mut self) -> bool {
        self.stuck += 1;
        let gives_way = self.stuck >= STUCK && random() < 0.5;
        if gives_way {
            (self.part, self.largest, self.stuck) = (None, 0, 0);
            (self.denied, self.starves, self.sat_out) = (None, false, false);
        }
        gives_way
    }

    fn denied(&mut self, denied: Denied, asked_at: Instant) -> Option<Instant> {
        let now = instant();
        let Denied {
            number,
            mode,
            units,
            decision,
        } = denied;
        drop(self.place.with(|line| line.learn(&decision, now)));
        let cost = self.place.with(|line| line.cost_of(number)).flatten();
        let cost = cost.unwrap_or(units);
        self.room = 0;
        if mode == Mode::Take && cost < units {
            // Less is left than after the last reply.
            self.room = decision.remaining().min(units - 1);
            return None;
        }
        let Some(wait) = decision.retry_after() else {
            self.place.refuse(number, Refusal::Denied(decision));
            return None;
        };
        if self.is_in_flight() {
            return Some(self.next(wait, asked_at));
        }
        if self.starves && self.gives_way() {
            return None;
        }
        let again = self.denied.is_some_and(|(denied, _)| denied == number);
        self.starves |= again && self.sat_out && cost > 1;
        self.denied = Some((number, cost));
        self.sat_out = look(wait) == wait;
        let free_at = (now + wait).checked_sub(now - asked_at).unwrap_or(now);
        self.place.with(|line| line.free_at = Some(free_at));
        Some(self.next(look(wait), asked_at))
    }

    /// When to ask so that the question arrives after this wait, which was told by the reply just now.
    fn next(&self, wait: Duration, asked_at: Instant) -> Instant {
        let now = instant();
        let periods = self
            .place
            .policies
            .iter()
            .map(|policy| policy.quota().period());
        let jitter = periods.fold(JITTER, |jitter, period| jitter.min(period / 5));
        now + wait.saturating_sub(now - asked_at) + jitter.mul_f64(random())
    }

    /// Waits until then, or until something is freed in this process, and refuses those whose time is up. Ends if nobody
    /// waits.
    async fn rest(&mut self, until: Instant, asked_at: Instant) {
        let gap = if self.is_in_flight() {
            Duration::ZERO
        } else {
            GAP
        };
        loop {
            let (now, mut until) = (instant(), until);
            if self.wake.is_freed() {
                until = until.min(asked_at + gap);
            }
            let Some((free_at, deadline, waiting)) = self
                .place
                .with(|line| (line.free_at, line.deadline(), line.len() > 0))
            else {
                return;
            };
            // Another one is first, and wants less.
            let first = self.place.with(|line| line.first()).flatten();
            if let (Some((_, denied)), Some((_, cost))) = (self.denied, first)
                && cost < denied
            {
                return;
            }
            // Jitter is no reason to refuse a waiter.
            if let (Some(free_at), Some(deadline)) = (free_at, deadline) {
                until = until.min(deadline.max(free_at));
            }
            if now >= until {
                return;
            }
            self.refuse_late(free_at.unwrap_or(now).max(now), 0);
            if !waiting
                && self
                    .place
                    .with(|line| line.remembers_until())
                    .flatten()
                    .is_none()
            {
                return;
            }
            let wakes_at = deadline.map_or(until, |deadline| until.min(deadline.max(now) + TICK));
            let _ = timeout(wakes_at - now, self.wake.notify.notified()).await;
        }
    }

    /// Refuses those whose time is up by then, of those behind a number.
    fn refuse_late(&self, at: Instant, behind: u64) {
        let now = instant();
        let late = self.place.with(|line| {
            let late = line.late(at, behind);
            (late, line.denial(now))
        });
        if let Some((late, Some(denial))) = late {
            for waiter in late {
                waiter.answer(Err(Refusal::Denied(denial.clone())));
            }
        }
    }
}

/// How much of a wait to sit out before it is asked again.
fn look(wait: Duration) -> Duration {
    wait.min(LOOK.max(wait / LOOKS))
}
