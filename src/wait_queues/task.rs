//! The task of a line: it sends checks to the store, and answers the waiters.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::line::{Line, Waiter};
use super::permit::Permit;
use super::{Answer, LineRef, Refusal};
use crate::background::panicked;
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Charge, ChargedAt, Check, Decision, Mode, Outcome, Policies};
use crate::store::{Listener, Wake};
use crate::util::{contain, instant, lock, random};

/// While it exists, so does its line. If its runtime drops it, the waiters fail.
pub(super) struct Task {
    line: LineRef,
    wake: Arc<Wake>,
    /// By checks: wakes the task when capacity is freed in this process.
    listener: Option<Listener>,
    pending: FuturesUnordered<Pin<Box<dyn Future<Output = Event> + Send>>>,
    /// Whether a turn is requested for each waiter. Otherwise the line is served by checks.
    by_turns: bool,
    /// By checks: the time of the next check.
    next: Instant,
    /// By checks: the last waiter for which there is a check.
    covered: u64,
    /// The cost of the last check if it was denied, otherwise 0.
    denied_cost: u32,
    /// Units left after the last check, under policies that charge units.
    room: u32,
    /// Slots left after the last check. [`u32::MAX`] without requests in flight.
    slots: u32,
    replied_at: Instant,
    /// Number of consecutive failures.
    failures: u32,
    /// Whether the line has been removed.
    has_ended: bool,
}

struct Request {
    /// The waiter for which it is sent; [`Check::up_to`] some units also for the next ones, which have cost 1.
    number: u64,
    deadline: Option<Instant>,
    sent_at: Instant,
    check: Check,
}

enum Event {
    Replied(Request, Result<Decision, StoreError>, Option<Slot>),
    /// The reply to the refund of a turn: the turn, if it was rejected.
    Refunded(Option<Permit>),
}

impl Request {
    fn new(number: u64, waiter: &Waiter, sent_at: Instant, check: Check) -> Self {
        let deadline = waiter.deadline;
        Self {
            number,
            deadline,
            sent_at,
            check,
        }
    }

    /// The cost of each of its waiters.
    fn cost(&self) -> u32 {
        match self.check.mode() {
            Mode::UpTo => 1,
            _ => self.check.cost(),
        }
    }
}

/// The next step of a task.
enum Step {
    /// Sends these after it has released the lock.
    Act {
        answers: Vec<(Waiter, Answer)>,
        refunds: Vec<Permit>,
        requests: Vec<Request>,
    },
    /// Waits for an event until this time.
    Wait(Option<Instant>),
    /// The line has been removed.
    End,
}

/// Maximum jitter of a check, equal for all instances, so that no instance is favored. Also the minimum interval of
/// checks, if capacity is freed in this process.
const JITTER: Duration = Duration::from_millis(20);
/// Interval of checks for slots that other instances release, and of failing checks.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);
const CHECKS_PER_WAIT: u32 = 16;
/// Maximum number of requests without a reply.
const MAX_REQUESTS: usize = 128;
/// Number of consecutive failures at which all waiters fail.
const MAX_FAILURES: u32 = 3;
/// An empty line is kept for this time after a failure: requests that try again wait for one check together.
const EMPTY_LINE_TTL: Duration = Duration::from_secs(1);

impl Task {
    /// Starts the task of a new line. `denied` is the denial of the store, if the first waiter was checked. It is checked
    /// again, since capacity freed after the denial may not have woken the line. The task is polled once now: if the
    /// store replies immediately, callers that poll only once get their permit.
    pub(super) fn start(line: LineRef, denied: Option<&Decision>) {
        let now = instant();
        let mut task = Self {
            wake: line.with(|line| Arc::clone(&line.wake)).unwrap_or_default(),
            listener: None,
            pending: FuturesUnordered::new(),
            by_turns: line.id.cost.is_some(),
            next: now,
            covered: 0,
            denied_cost: 0,
            room: 0,
            slots: 0,
            replied_at: now,
            failures: 0,
            has_ended: false,
            line,
        };
        if let Some(denied) = denied {
            if !task.by_turns {
                task.line.with(|line| line.record_decision(denied, now));
            }
            task.left_after(denied);
        }
        let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task.run());
        let mut context = Context::from_waker(Waker::noop());
        if task.as_mut().poll(&mut context).is_pending() {
            tokio::spawn(task);
        }
    }

    async fn run(mut self) {
        loop {
            // Replies that have come already need no timers of the runtime.
            while let Some(Some(event)) = self.pending.next().now_or_never() {
                self.handle(event);
            }
            self.listen();
            match self.step(instant()) {
                Step::Act {
                    answers,
                    refunds,
                    requests,
                } => {
                    for (waiter, answer) in answers {
                        waiter.answer(answer);
                    }
                    for turn in refunds {
                        self.refund(turn);
                    }
                    self.send(requests);
                }
                Step::Wait(until) => self.wait(until).await,
                Step::End => return,
            }
        }
    }

    /// By checks, listens for freed capacity, before the checks are sent that might miss it.
    fn listen(&mut self) {
        let (shared, id) = (&self.line.queues.shared, self.line.id);
        match &shared.waiters {
            _ if self.by_turns => self.listener = None,
            Some(waiters) if self.listener.is_none() => {
                let (policies, wake) = (self.line.policies.clone(), Arc::clone(&self.wake));
                self.listener = Some(waiters.clone().listen(id.key, policies, wake));
            }
            _ => {}
        }
    }

    /// Waits for a reply, a waiter that joins or leaves, or freed capacity.
    async fn wait(&mut self, until: Option<Instant>) {
        let wake = Arc::clone(&self.wake);
        let mut woken = pin!(wake.notify.notified());
        let pending = &mut self.pending;
        let event = poll_fn(|cx| match pending.poll_next_unpin(cx) {
            Poll::Ready(Some(event)) => Poll::Ready(Some(event)),
            _ => woken.as_mut().poll(cx).map(|()| None),
        });
        let event = match until {
            Some(until) => timeout_at(until, event).await.ok().flatten(),
            None => event.await,
        };
        if let Some(event) = event {
            self.handle(event);
        }
    }

    fn step(&mut self, now: Instant) -> Step {
        let shared = Arc::clone(&self.line.queues.shared);
        let lines = &mut *lock(&shared.lines);
        let here = lines.each.entry(self.line.id).or_default();
        let (mut answers, mut refunds) = (vec![], vec![]);
        for (turn, waiter) in here.due_turns(now) {
            match waiter {
                Some(waiter) => answers.push((waiter, Ok(turn.reopen()))),
                None => refunds.push(turn),
            }
        }
        refunds.extend(here.superfluous_turns());
        let was_pending = !here.requested.is_empty();
        let requests = self.requests(here, now);
        let numbers = requests.iter().map(|request| request.number);
        here.requested.extend(numbers);
        let first = here.requested.first().copied();
        // A denial after its deadline ends its wait, although a new check is sent.
        let is_open = |deadline| self.denied_cost == 0 || deadline > self.replied_at;
        let late = here.late(now, |deadline, number| match self.by_turns {
            // The turn of this or an earlier one has no reply yet.
            true => first.is_some_and(|first| first <= number),
            // The reply decides whether there is a check for it.
            false => was_pending || number <= self.covered && is_open(deadline),
        });
        for waiter in late {
            let denial = self.line.denial(Some(here), waiter.cost, now);
            answers.push((waiter, Err(Refusal::Denied(denial))));
        }
        if !(answers.is_empty() && refunds.is_empty() && requests.is_empty()) {
            return Step::Act {
                answers,
                refunds,
                requests,
            };
        }
        if here.waiters.is_empty() && here.turns.is_empty() && self.pending.is_empty() {
            let kept_until = (self.failures > 0).then(|| self.replied_at + EMPTY_LINE_TTL);
            if kept_until.is_none_or(|until| until <= now) {
                lines.each.remove(&self.line.id);
                self.has_ended = true;
                return Step::End;
            }
            return Step::Wait(kept_until);
        }
        let times = [
            here.next_due(now),
            here.deadline_after(now),
            self.next_check(here, now),
        ];
        Step::Wait(times.into_iter().flatten().min())
    }

    /// The time of the next check. `None` by turns, while a reply is pending, and if no waiter lacks a turn.
    fn next_check(&self, line: &Line, now: Instant) -> Option<Instant> {
        if self.by_turns || !line.requested.is_empty() {
            return None;
        }
        let (_, first) = line.without_turn().next()?;
        let has_late = line
            .deadline_after(self.replied_at)
            .is_some_and(|at| at <= now);
        Some(if self.failures > 0 {
            self.next
        } else if first.cost < self.denied_cost || has_late {
            // A waiter has left, or a deadline has passed since the last reply.
            now
        } else if !self.wake.is_freed() {
            self.next
        } else if self.is_in_flight() {
            now
        } else {
            self.next.min(self.replied_at + JITTER)
        })
    }

    /// The requests to send now: by turns, for all waiters that lack a turn; by checks, when the next one is due.
    fn requests(&mut self, line: &Line, now: Instant) -> Vec<Request> {
        self.covered = 0;
        let is_due = self.next_check(line, now).is_some_and(|at| at <= now);
        if self.by_turns {
            let most = MAX_REQUESTS.saturating_sub(line.requested.len());
            self.turns(line, most, now)
        } else if !is_due {
            vec![]
        } else if let Some(cost) = self.line.id.cost {
            self.wake.take_freed();
            let most = (self.room / cost.max(1)) as usize;
            let requests = self.turns(line, most.clamp(1, MAX_REQUESTS), now);
            self.covered = requests.last().map_or(0, |request| request.number);
            requests
        } else {
            self.checks(line, now)
        }
    }

    /// Takes turns ahead, for the first waiters that lack one.
    fn turns(&self, line: &Line, most: usize, now: Instant) -> Vec<Request> {
        let lacking = line.lacking(most).into_iter();
        let requests = lacking.map(|(number, waiter)| {
            let within = waiter.deadline.map(|at| at.saturating_duration_since(now));
            let within = within.unwrap_or(Duration::MAX);
            let (key, policies) = (self.line.id.key, &self.line.policies);
            let check = Check::take_ahead(key, policies, waiter.cost, within);
            Request::new(*number, waiter, now, check)
        });
        requests.collect()
    }

    /// Checks for the first waiters for which there may be capacity, at least for one: a single check if their cost is 1.
    fn checks(&mut self, line: &Line, now: Instant) -> Vec<Request> {
        let is_in_flight = self.is_in_flight();
        // Before the checks are sent: they see all capacity that was freed before.
        let slots = match self.wake.take_freed() {
            // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
            freed if is_in_flight && freed > 0 => freed + self.slots.min(1),
            _ => self.slots,
        };
        let (mut sum, costs) = (0, line.waiters.values().map(|waiter| waiter.cost));
        let most = MAX_REQUESTS.min(slots as usize);
        let fitting = costs.clone().take(most).take_while(|cost| {
            sum += u64::from(*cost);
            sum <= u64::from(self.room)
        });
        let fitting = fitting.count().max(1);
        let ones = costs.take_while(|cost| *cost == 1 && !is_in_flight);
        let ones = ones.count();
        let (covered, requests) = match ones >= fitting {
            true => (ones, 1),
            false => (fitting, fitting),
        };
        let last = line.waiters.keys().nth(covered - 1);
        self.covered = last.copied().unwrap_or(0);
        let (key, policies) = (self.line.id.key, &self.line.policies);
        let requests = line.waiters.iter().take(requests);
        let requests = requests.map(|(number, waiter)| {
            let check = match ones >= fitting {
                // Grants the part of them that fits.
                true => Check::up_to(key, policies, ones as u32),
                false => Check::take(key, policies, waiter.cost),
            };
            Request::new(*number, waiter, now, check)
        });
        requests.collect()
    }

    fn send(&mut self, requests: Vec<Request>) {
        for request in requests {
            let in_flight = self.line.queues.in_flight.as_ref();
            let mut slot = in_flight.and_then(|in_flight| in_flight.track(&request.check));
            let answer = contain(|| (self.line.queues.shared.send)(request.check.clone()));
            self.pending.push(Box::pin(async move {
                let answer = async { Some(answer?.await) };
                let answer = AssertUnwindSafe(answer).catch_unwind().await;
                let answer = answer.ok().flatten().unwrap_or_else(|| Err(panicked()));
                if let Some(slot) = &mut slot {
                    slot.on_reply(answer.as_ref());
                }
                Event::Replied(request, answer, slot)
            }));
        }
    }

    /// Refunds a turn that no waiter needs. If the store rejects that, a later turn of another instance depends on it: it
    /// serves the next waiter that joins before it is due, or expires.
    fn refund(&mut self, mut turn: Permit) {
        let due = turn.due();
        if turn.refund_was_rejected() || due <= instant() {
            // Its drop refunds it, unless that was rejected.
            return;
        }
        let (sender, receiver) = oneshot::channel();
        self.line.queues.ops.put(turn.refund().then(move |answer| {
            let _ = sender.send(answer.is_ok_and(|decision| decision.granted() == 0));
        }));
        self.pending.push(Box::pin(async move {
            let is_rejected = timeout_at(due, receiver).await == Ok(Ok(true));
            Event::Refunded(is_rejected.then_some(turn))
        }));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Replied(request, answer, slot) => {
                self.replied_at = instant();
                self.line
                    .with(|line| line.requested.remove(&request.number));
                match answer {
                    Ok(decision) => self.decided(&request, &decision, slot),
                    Err(error) => self.failed(&request, &error),
                }
            }
            Event::Refunded(Some(turn)) if turn.due() > instant() => {
                self.line.with(|line| line.add_turn(turn));
            }
            Event::Refunded(_) => {}
        }
    }

    /// Adds what was granted. Sets the way in which the line is served, and by checks the time of the next one.
    fn decided(&mut self, request: &Request, decision: &Decision, slot: Option<Slot>) {
        let sent_at = request.sent_at;
        (self.failures, self.denied_cost) = (0, 0);
        self.next = self.replied_at;
        self.left_after(decision);
        let is_late = |wait| {
            request
                .deadline
                .is_some_and(|deadline| deadline < sent_at + wait)
        };
        let is_refused = match decision.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => {
                self.granted(request, decision, slot);
                false
            }
            // Its turn would be due too late.
            Outcome::Denied { retry_after } => self.by_turns && is_late(retry_after),
            Outcome::ExceedsCapacity => true,
        };
        if is_refused {
            let refused = self.line.with(|line| {
                // An earlier waiter may have left it a turn.
                let is_late = decision.retry_after().is_some();
                let keeps = is_late && !line.lacks_turn(request.number);
                (!keeps).then(|| line.remove(request.number)).flatten()
            });
            let refused = refused.flatten();
            if let Some(waiter) = refused {
                waiter.answer(Err(Refusal::Denied(decision.clone())));
            }
            return;
        }
        self.line
            .with(|line| line.record_decision(decision, sent_at));
        let is_denied = decision.retry_after().is_some();
        let is_reserved = self.line.id.cost.is_some() && decision.due_in().is_some();
        self.by_turns = !is_denied && (self.by_turns || is_reserved);
        if is_denied {
            self.check_after(decision, request.cost(), sent_at);
        } else if self.is_in_flight() {
            if self.slots == 0 {
                self.next += RETRY_INTERVAL;
            }
        } else if decision.granted() < request.check.cost() {
            // The reply does not say when more is freed. It is unlikely before a unit is refilled or the window ends.
            let unit = decision
                .policy()
                .quota()
                .time_for(1)
                .min(decision.reset_after());
            self.next = retry_at(&self.line.policies, sent_at, unit, decision);
        }
    }

    /// Adds the turn of a waiter, or several.
    fn granted(&self, request: &Request, decision: &Decision, mut slot: Option<Slot>) {
        let due = self.replied_at + decision.due_in().unwrap_or_default();
        let (cost, count) = (
            request.cost(),
            match request.check.mode() {
                Mode::UpTo => decision.granted(),
                _ => 1,
            },
        );
        let turn = |_| {
            let charge = Charge::new(self.line.id.key, decision.clone(), cost, request.sent_at);
            Permit::new(self.line.clone(), charge, due, slot.take())
        };
        let turns: Vec<_> = (0..count).map(turn).collect();
        self.line
            .with(|line| turns.into_iter().for_each(|turn| line.add_turn(turn)));
    }

    /// Sets the capacity left after a decision.
    fn left_after(&mut self, decision: &Decision) {
        let least = |is_in_flight| {
            let each = decision.verdicts();
            let each = each.filter(|(policy, _)| policy.is_in_flight() == is_in_flight);
            let least = each.map(|(_, verdict)| verdict.remaining.max(0)).min();
            least.map_or(u32::MAX, |least| u32::try_from(least).unwrap_or(u32::MAX))
        };
        (self.room, self.slots) = (least(false), least(true));
    }

    /// Sets the time of the next check after a denial of this cost.
    fn check_after(&mut self, denied: &Decision, cost: u32, sent_at: Instant) {
        if let Some(wait) = denied.retry_after() {
            self.denied_cost = cost;
            self.next = retry_at(&self.line.policies, sent_at, wait, denied);
        }
    }

    fn is_in_flight(&self) -> bool {
        self.line.policies.in_flight().is_some()
    }

    /// Fails the first waiter of a request. After several failures in a row, fails each waiter without a turn.
    fn failed(&mut self, request: &Request, error: &StoreError) {
        // Requests that were sent before the last failure count as the same failure.
        if self.failures == 0 || request.sent_at >= self.next {
            self.failures += 1;
            self.next = self.replied_at + RETRY_INTERVAL;
        }
        (self.by_turns, self.room) = (false, 0);
        let all = self.failures >= MAX_FAILURES;
        let failed = self.line.with(|line| {
            let numbers: Vec<u64> = if all {
                line.without_turn().map(|(number, _)| *number).collect()
            } else {
                vec![request.number]
            };
            let failed = numbers.into_iter().filter_map(|number| line.remove(number));
            failed.collect::<Vec<_>>()
        });
        for waiter in failed.into_iter().flatten() {
            waiter.answer(Err(Refusal::Failed(error.clone())));
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if !self.has_ended {
            let ended = lock(&self.line.queues.shared.lines)
                .each
                .remove(&self.line.id);
            drop(ended);
        }
    }
}

/// The time of the next check after one at `sent_at` whose reply promised capacity `wait` later: when that is free, or
/// earlier, since other instances may refund, plus a jitter. A fallback decides for this instance only, without a jitter.
fn retry_at(policies: &Policies, sent_at: Instant, wait: Duration, decision: &Decision) -> Instant {
    let wait = wait.min(MAX_CHECK_INTERVAL.max(wait / CHECKS_PER_WAIT));
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
