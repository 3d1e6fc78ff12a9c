//! Lines by checks.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use tokio::time::{Instant, timeout_at};

use super::line::{Line, Waiter};
use super::permit::Permit;
use super::{LineRef, Lines, Refusal, spawn, turns};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Charge, ChargedAt, Check, Decision, Mode, Outcome, Policies};
use crate::store::Wake;
use crate::util::{instant, random};

/// The state that a line shares with its task.
pub(super) struct Checks {
    wake: Arc<Wake>,
    /// Time of the next check.
    pub(super) next: Instant,
    /// No check is sent before this time, since the last one failed.
    pub(super) paused: Instant,
    /// After a denial: the time before which no capacity is expected, and the denied cost. Slots in flight may be free at
    /// any time.
    pub(super) denied: Option<(Instant, u32)>,
}

/// The task of a line.
struct Task {
    line: LineRef,
    wake: Arc<Wake>,
    is_in_flight: bool,
    /// Whether the store may reserve turns again.
    reserves: bool,
    sent_at: Instant,
    replied_at: Instant,
    /// Capacity left after the last grant. For requests in flight, or the number of slots released in this process
    /// since, if greater.
    room: u32,
    /// Number of consecutive failures.
    failures: u32,
}

/// A check for the waiter with this number; [`Check::up_to`] some units also for the next waiters, which have cost 1.
struct Request {
    number: u64,
    check: Check,
}

/// Maximum jitter of a check, equal for all instances, so that no instance is favored. Also the minimum interval of
/// checks, if capacity is freed in this process.
const JITTER: Duration = Duration::from_millis(20);
/// Interval of checks for slots that other instances release, and of failing checks.
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
const LOOK: Duration = Duration::from_secs(30);
const LOOKS: u32 = 16;
/// Maximum number of checks sent together.
const MAX_CHECKS: usize = 128;
/// Number of consecutive failures at which all waiters fail.
const MAX_FAILURES: u32 = 3;
/// An empty line is kept for this time after a failure: requests that try again wait for one check together.
const KEPT: Duration = Duration::from_secs(1);

/// Adds a waiter to a line, or after the failure of a turn no waiter. `denied` is the fresh denial of the store, if the
/// waiter was checked. Returns `true` if the task must [`start`].
pub(super) fn add(
    lines: &mut Lines,
    to: &LineRef,
    waiter: Option<(u64, Waiter)>,
    denied: Option<&Decision>,
) -> bool {
    let line = lines.each.entry(to.id).or_default();
    let (is_new, now) = (line.checks.is_none(), instant());
    let wait = denied.and_then(Decision::retry_after);
    let first = match denied.zip(wait) {
        Some((denied, wait)) => next_check(&to.policies, now, wait, denied),
        None if waiter.is_some() => now,
        None => now + INTERVAL,
    };
    let cost = waiter.as_ref().map(|(_, waiter)| waiter.cost);
    let checks = line.checks.get_or_insert_with(|| Checks {
        wake: Arc::default(),
        next: first,
        paused: if waiter.is_some() { now } else { first },
        denied: wait
            .filter(|_| to.policies.in_flight().is_none())
            .map(|wait| now + wait)
            .zip(cost),
    });
    checks.wake.notify.notify_one();
    line.waiters.extend(waiter);
    if let Some(denied) = denied.filter(|_| is_new) {
        line.learn(denied, now);
    }
    is_new
}

/// Starts the task of a new line, after this number of failures.
pub(super) fn start(line: LineRef, failures: u32) {
    let wake = line.with(|line| Some(Arc::clone(&line.checks.as_ref()?.wake)));
    let now = instant();
    let task = Task {
        wake: wake.unwrap_or_default(),
        is_in_flight: line.policies.in_flight().is_some(),
        reserves: line.id.cost.is_none() && turns::are_reserved(&line.policies),
        line: line.clone(),
        sent_at: now,
        replied_at: now,
        room: 0,
        failures,
    };
    spawn(line, task.run());
}

/// The time of the next check after one at `sent_at` whose reply promised capacity `wait` later: when that is free, or
/// earlier, since other instances may refund, plus a jitter. A fallback decides for this instance only, without a jitter.
fn next_check(
    policies: &Policies,
    sent_at: Instant,
    wait: Duration,
    decision: &Decision,
) -> Instant {
    let wait = wait.min(LOOK.max(wait / LOOKS));
    let next = instant().max(sent_at + wait);
    if !is_shared(decision) {
        return next;
    }
    let periods = policies.iter().map(|policy| policy.quota().period());
    let jitter = periods.fold(JITTER, |jitter, period| jitter.min(period / 5));
    next + jitter.mul_f64(random())
}

/// Returns `false` for a decision of a fallback.
fn is_shared(decision: &Decision) -> bool {
    matches!(decision.charged_at(), ChargedAt::Redis(_))
}

impl Checks {
    /// Checks now.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.next = self.next.min(now);
        self.wake.notify.notify_one();
    }

    /// A waiter has left. A smaller cost than the denied one may be first now.
    pub(super) fn left(&mut self, first: Option<&Waiter>) {
        let may_fit =
            first.is_some_and(|first| self.denied.is_some_and(|(_, denied)| first.cost < denied));
        if may_fit {
            self.next = instant();
        }
        self.wake.notify.notify_one();
    }
}

impl Task {
    async fn run(mut self) {
        let (key, policies) = (self.line.id.key, self.line.policies.clone());
        let waiters = self.line.queues.shared.waiters.clone();
        let _listener =
            waiters.map(|waiters| waiters.listen(key, policies, Arc::clone(&self.wake)));
        while let Some(at) = self.line.with(|line| self.wakes_at(line, instant())) {
            if at > instant() {
                drop(timeout_at(at, self.wake.notify.notified()).await);
            } else if self.check().await {
                return;
            }
        }
    }

    /// Returns the time of the next check; without waiters, the time at which the line ends. `None` if it ends now.
    fn wakes_at(&self, line: &mut Line, now: Instant) -> Option<Instant> {
        let checks = line.checks.as_ref()?;
        let until = self.sent_at + KEPT;
        if !line.waiters.is_empty() {
            let next = match self.wake.is_freed() {
                true if self.is_in_flight => now,
                true => checks.next.min(self.sent_at + JITTER),
                false => checks.next,
            };
            return Some(next.max(checks.paused));
        }
        if self.failures > 0 && now < until {
            return Some(until);
        }
        line.checks = None;
        None
    }

    /// Returns the checks for the first waiters, for which there may be capacity: at least for the first one. Removes
    /// the waiters behind them whose deadline had passed at the last reply, which left no capacity for them.
    fn requests(&self, line: &mut Line) -> (Vec<Request>, Vec<Waiter>) {
        let (key, policies) = (self.line.id.key, &self.line.policies);
        let Some((&number, first)) = line.waiters.first_key_value() else {
            return Default::default();
        };
        let mut sum = 0;
        let fits = |waiter: &&Waiter| {
            let counts = if self.is_in_flight { 1 } else { waiter.cost };
            sum += u64::from(counts);
            sum <= u64::from(self.room)
        };
        let first_ones = line.waiters.values().take(MAX_CHECKS);
        let fitting = first_ones.take_while(fits).count().max(1);
        let capacities = policies.iter().map(|policy| policy.quota().capacity());
        let of_one = line.waiters.values();
        let of_one = of_one.take(capacities.min().unwrap_or(1) as usize);
        let of_one = of_one.take_while(|waiter| waiter.cost == 1).count();
        let (requests, count) = if self.reserves {
            let check = turns::check(&self.line, first.cost, first.deadline);
            (vec![Request { number, check }], 1)
        } else if of_one >= fitting && !self.is_in_flight {
            // Grants the part of these that fits.
            let check = Check::up_to(key, policies, of_one as u32);
            (vec![Request { number, check }], of_one)
        } else {
            let each = line.waiters.iter().take(fitting);
            let each = each.map(|(&number, waiter)| Request {
                number,
                check: Check::take(key, policies, waiter.cost),
            });
            (each.collect(), fitting)
        };
        let late = line.remove_late(count, |deadline| deadline < self.replied_at);
        (requests, late)
    }

    /// Checks for the first waiters. Returns `true` if the line has ended, since its waiters get turns.
    async fn check(&mut self) -> bool {
        // Clear `freed` first: the checks see all capacity freed before them.
        let freed = self.wake.take_freed();
        if self.is_in_flight {
            self.room = self.room.max(freed);
        }
        self.sent_at = instant();
        let (requests, late, denial) = self.line.with(|line| {
            let (requests, late) = self.requests(line);
            (requests, late, line.denial(self.sent_at))
        });
        self.refuse(late, denial);
        let replies = requests.into_iter().map(|request| self.send(request));
        let mut replies: FuturesOrdered<_> = replies.collect();
        let (mut granted, mut denied, mut failed) = (None, None, None);
        while let Some((request, answer, slot)) = replies.next().await {
            match answer {
                Ok(decision) if self.reserves && is_reserved(&decision) => {
                    self.reserve(&request, decision);
                    return true;
                }
                Ok(decision) if decision.is_allowed() => {
                    self.give(&request.check, &decision, slot);
                    granted = Some((request, decision));
                }
                Ok(decision) => denied = Some((request, decision)),
                Err(error) => failed = Some((request, error)),
            }
        }
        self.replied_at = instant();
        if let Some((Request { number, check }, decision)) = denied.or(granted) {
            self.decided(number, &check, &decision);
        }
        if let Some((Request { number, .. }, error)) = failed {
            self.failed(number, &error);
        }
        false
    }

    fn send(
        &self,
        request: Request,
    ) -> impl Future<Output = (Request, Result<Decision, StoreError>, Option<Slot>)> + use<> {
        let in_flight = self.line.queues.in_flight.as_ref();
        let mut slot = in_flight.and_then(|in_flight| in_flight.track(&request.check));
        let answer = self.line.send(request.check.clone());
        async move {
            let answer = answer.await;
            if let Some(slot) = &mut slot {
                slot.on_reply(answer.as_ref());
            }
            (request, answer, slot)
        }
    }

    /// Gives permits for the granted units to the first waiters. Superfluous units are refunded.
    fn give(&self, check: &Check, decision: &Decision, mut slot: Option<Slot>) {
        let (key, now) = (self.line.id.key, instant());
        let (cost, count) = match check.mode() {
            Mode::UpTo => (1, decision.granted()),
            _ => (check.cost(), 1),
        };
        for _ in 0..count {
            let charge = Charge::new(key, decision.clone(), cost, self.sent_at);
            drop(Permit::new(self.line.clone(), charge, now, slot.take()));
        }
    }

    /// Ends the line: its waiters get turns. The first waiter gets the turn of this decision.
    fn reserve(&self, Request { number, check }: &Request, decision: Decision) {
        let id = self.line.id;
        let charge = Charge::new(id.key, decision, check.cost(), self.sent_at);
        let first = id.of_cost(check.cost());
        let requested = self.line.queues.with(&[], |lines| {
            let waiters = lines.each.remove(&id).map(|line| line.waiters);
            lines
                .each
                .entry(first)
                .or_default()
                .requested
                .insert(*number);
            let add = |(number, waiter): (u64, Waiter)| {
                let (id, deadline) = (id.of_cost(waiter.cost), waiter.deadline);
                let is_requested = lines.add(id, number, waiter);
                is_requested.then_some((id, number, deadline))
            };
            let waiters = waiters.unwrap_or_default().into_iter();
            waiters.filter_map(add).collect::<Vec<_>>()
        });
        turns::hold(self.line.of(first), *number, charge);
        for (id, number, deadline) in requested {
            turns::request(self.line.of(id), number, deadline);
        }
    }

    /// Fails a waiter, or after several failures all of them.
    fn failed(&mut self, number: u64, error: &StoreError) {
        self.failures += 1;
        let now = self.replied_at;
        let (failed, late, denial) = self.line.with(|line| {
            line.check_at(now + INTERVAL, None);
            if let Some(checks) = &mut line.checks {
                checks.paused = checks.next;
            }
            let failed: Vec<_> = if self.failures < MAX_FAILURES {
                line.remove(number).into_iter().collect()
            } else {
                mem::take(&mut line.waiters).into_values().collect()
            };
            let late = line.remove_late(0, |deadline| deadline <= now);
            (failed, late, line.denial(now))
        });
        self.refuse(late, denial);
        for waiter in failed {
            waiter.answer(Err(Refusal::Failed(error.clone())));
        }
    }

    /// Handles the last decision: sets the remaining capacity and the time of the next check, and refuses the waiters for
    /// which that is too late.
    fn decided(&mut self, number: u64, check: &Check, decision: &Decision) {
        let (sent_at, now, policies) = (self.sent_at, self.replied_at, &self.line.policies);
        self.failures = 0;
        self.room = 0;
        let (mut free_at, mut is_exhausted) = (None, false);
        let least = match check.mode() {
            Mode::UpTo => 1,
            _ => check.cost(),
        };
        let next = match decision.outcome() {
            Outcome::Denied { retry_after } => {
                is_exhausted = true;
                free_at = (!self.is_in_flight).then(|| sent_at + retry_after);
                next_check(policies, sent_at, retry_after, decision)
            }
            Outcome::Allowed if self.is_in_flight => {
                let each = decision.verdicts();
                let slots = each.filter(|(policy, _)| policy.is_in_flight());
                let free = slots.map(|(_, verdict)| verdict.remaining).min();
                let free = u32::try_from(free.unwrap_or(0)).unwrap_or(0);
                // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
                self.room = match self.wake.take_freed() {
                    0 => free,
                    freed => freed + free.min(1),
                };
                let pause = if self.room == 0 {
                    INTERVAL
                } else {
                    Duration::ZERO
                };
                now + pause
            }
            Outcome::Allowed if decision.granted() < check.cost() => {
                is_exhausted = true;
                // The reply does not say when more is freed. It is unlikely before a unit is refilled or the window ends.
                let unit = decision.policy().quota().time_for(1);
                next_check(
                    policies,
                    sent_at,
                    unit.min(decision.reset_after()),
                    decision,
                )
            }
            _ => {
                self.room = decision.remaining();
                now
            }
        };
        let (late, denial) = self.line.with(|line| {
            line.learn(decision, now);
            line.check_at(next, free_at.map(|at| (at, least)));
            let is_late = |deadline| deadline <= now || free_at.is_some_and(|at| deadline < at);
            let late = match decision.outcome() {
                Outcome::ExceedsCapacity => line.remove(number).into_iter().collect(),
                _ if is_exhausted => line.remove_late(0, is_late),
                _ => vec![],
            };
            (late, line.denial(now))
        });
        self.refuse(late, denial);
    }

    /// Refuses these waiters. `denial` is `None` before the first reply to their line.
    fn refuse(&self, late: Vec<Waiter>, denial: Option<Decision>) {
        for waiter in late {
            let unknown = || self.line.unknown(waiter.cost);
            let denial = denial.clone().unwrap_or_else(unknown);
            waiter.answer(Err(Refusal::Denied(denial)));
        }
    }
}

/// Returns `true` if the store reserves turns, at least as long as it has capacity. After a grant that leaves none, the
/// next check shows that, so that not all waiters get a turn that the store denies.
fn is_reserved(decision: &Decision) -> bool {
    let has_capacity = decision.is_allowed() && decision.remaining() > 0;
    decision.due_in().is_some() || has_capacity && is_shared(decision)
}
