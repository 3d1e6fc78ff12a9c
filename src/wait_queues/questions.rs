//! The task of a line that repeats checks until capacity is free.

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
    /// Capacity left after the last grant. For requests in flight, or the number of slots released in this process
    /// since, if greater.
    room: u32,
    /// Number and cost of the first waiter when it was last denied.
    denied: Option<(u64, u32)>,
    /// Whether it was denied although its wait had ended: smaller costs of other instances take all the freed capacity.
    /// Then the task collects its cost in parts.
    starves: bool,
    /// Whether the next check waits for the full `retry_after` of the last denial.
    sat_out: bool,
    /// The part that was collected so far.
    part: Option<Permit>,
    /// The largest part so far, and the number of questions in a row that have not enlarged it.
    largest: u32,
    stuck: u32,
}

/// The reply to a check for some of the first waiters.
struct Answered {
    /// The first of these waiters.
    number: u64,
    mode: Mode,
    /// The cost of the check.
    units: u32,
    answer: Result<Decision, StoreError>,
    slot: Option<Slot>,
}

/// A denied check.
struct Denied {
    number: u64,
    mode: Mode,
    units: u32,
    decision: Decision,
}

/// Maximum jitter of a check, equal for all instances, so that no instance is favored.
const JITTER: Duration = Duration::from_millis(20);
/// Minimum interval between checks caused by capacity freed in this process.
const GAP: Duration = Duration::from_millis(10);
/// Interval of checks for slots that other instances release.
const POLL: Duration = Duration::from_millis(100);
/// Number of consecutive checks that did not enlarge a part, after which it is given up at random.
const STUCK: u32 = 4;
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
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
        // The denial with which the line was created.
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
            // Clear `freed` first: the check sees all capacity freed before it.
            let freed = self.wake.take_freed();
            if self.is_in_flight() {
                self.room = self.room.max(freed);
            }
            let (checks, last) = self.checks();
            if let Some(last) = last {
                // When the store last replied, it had no capacity for these waiters, and their deadlines have passed.
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

    /// Builds the next checks, each with the first waiter that it is for. Also returns the last waiter that they cover.
    /// Empty if the line is.
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
        // Add waiters while there is capacity for them.
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
            // One check grants all of these equal waiters that fit.
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

    /// Sends the checks and handles the replies. Returns the time of the next checks, or `None` for immediately.
    async fn ask(&mut self, checks: Vec<(u64, Check)>, asked_at: Instant) -> Option<Instant> {
        // Exchange the collected part for a larger one: refund it and take again in one call.
        let mut replies =
            FuturesUnordered::<Pin<Box<dyn Future<Output = Option<Answered>> + Send>>>::new();
        if let Some(part) = self.part.take().and_then(Permit::into_refund) {
            let refund = self.place.line.shared.store.ask(part);
            // A part whose refund fails expires.
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

    /// Sends permits for the granted units to the first waiters.
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
            // Replies arrive in any order, so give each slot to the first waiter.
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
            // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
            self.room = match self.wake.take_freed() {
                0 => free,
                freed => freed + free.min(1),
            };
            return (self.room == 0).then(|| now + POLL);
        }
        self.room = decision.remaining();
        // The reply does not say when more is freed. It is unlikely before the quota refills a unit.
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
            // Less capacity is left than the last reply reported.
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

    /// Returns the time of a check that arrives after `wait`, which the reply has just reported.
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

    /// Waits until `until`, or until capacity is freed in this process, and denies waiters whose deadlines pass.
    /// Returns early if the line is empty.
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
            // Another waiter is first now, with a smaller cost.
            let first = self.place.with(|line| line.first()).flatten();
            if let (Some((_, denied)), Some((_, cost))) = (self.denied, first)
                && cost < denied
            {
                return;
            }
            // Do not deny a waiter because of jitter.
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

    /// Denies the waiters after `behind` whose deadline is before `at`.
    fn refuse_late(&self, at: Instant, behind: u64) {
        let now = instant();
        let late = self.place.with(|line| {
            let late = line.late(at, behind);
            (late, line.late_refusal(now))
        });
        if let Some((late, Some(refusal))) = late {
            for waiter in late {
                waiter.answer(Err(refusal.clone()));
            }
        }
    }
}

/// The part of a wait after which the task checks again.
fn look(wait: Duration) -> Duration {
    wait.min(LOOK.max(wait / LOOKS))
}
