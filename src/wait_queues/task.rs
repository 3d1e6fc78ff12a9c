//! The task of a line. It asks the store, and answers the waiters.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::line::{Line, Waiter};
use super::permit::Permit;
use super::{Answer, LineRef, Refusal};
use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{ChargedAt, Check, Decision, Mode, Policies};
use crate::settle::Reserved;
use crate::store::{Listener, Wake};
use crate::util::{instant, lock, random};

/// While it exists, so does its line. If its runtime drops it, or the store panics, the waiters fail.
pub(super) struct Task {
    line: LineRef,
    wake: Arc<Wake>,
    /// By checks: wakes the task when capacity is freed in this process.
    listener: Option<Listener>,
    pending: FuturesUnordered<Pin<Box<dyn Future<Output = Event> + Send>>>,
    is_in_flight: bool,
    /// Whether turns are requested for all waiters. Otherwise the line is served by checks.
    by_turns: bool,
    /// The time of the last request.
    sent_at: Instant,
    /// The time of the last reply.
    replied_at: Instant,
    /// By checks: the time of the next check.
    next: Instant,
    /// The cost of the last check if it was denied, otherwise 0.
    denied_cost: u32,
    /// Capacity left after the last check. For requests in flight, or the number of slots released in this process since,
    /// if greater.
    room: u32,
    /// Number of consecutive failures.
    failures: u32,
    /// Whether the line has been removed.
    has_ended: bool,
}

/// A check for some waiters.
struct Request {
    /// The first and the last one of them. The check has the cost of the first one, or is [`Check::up_to`] the number of
    /// waiters, which have cost 1.
    numbers: (u64, u64),
    deadline: Option<Instant>,
    sent_at: Instant,
    check: Check,
}

struct Reply {
    request: Request,
    answer: Result<Decision, StoreError>,
    slot: Option<Slot>,
}

enum Event {
    /// The replies to requests that were sent together.
    Replied(Vec<Reply>),
    /// The reply to the refund of a turn: the turn, if it was rejected.
    Refunded(Option<Permit>),
}

/// What a task does next.
enum Step {
    /// What it does after it has released the lock.
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
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
const LOOK: Duration = Duration::from_secs(30);
const LOOKS: u32 = 16;
/// Maximum number of requests without a reply.
const MAX_REQUESTS: usize = 128;
/// Number of consecutive failures at which all waiters fail.
const MAX_FAILURES: u32 = 3;
/// An empty line is kept for this time after a failure: requests that try again wait for one check together.
const KEPT: Duration = Duration::from_secs(1);

impl Task {
    /// Starts the task of a new line. `denied` is the denial of the store, if the first waiter was checked. The task is
    /// polled once now: if the store replies immediately, callers that poll only once get their permit.
    pub(super) fn start(line: LineRef, cost: u32, denied: Option<&Decision>) {
        let now = instant();
        let mut task = Self {
            wake: line.with(|line| Arc::clone(&line.wake)).unwrap_or_default(),
            listener: None,
            pending: FuturesUnordered::new(),
            is_in_flight: line.policies.in_flight().is_some(),
            by_turns: line.id.cost.is_some(),
            sent_at: now,
            replied_at: now,
            next: now,
            denied_cost: 0,
            room: 0,
            failures: 0,
            has_ended: false,
            line,
        };
        if let Some(denied) = denied {
            task.line.with(|line| line.learn(denied, now));
            if let (false, Some(wait)) = (task.by_turns, denied.retry_after()) {
                task.check_after(now, wait, cost, denied);
            }
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
        let Some(here) = lines.each.get_mut(&self.line.id) else {
            return Step::End;
        };
        let (mut answers, mut refunds) = (vec![], vec![]);
        for (turn, waiter) in here.due_turns(now) {
            match waiter {
                Some(waiter) => answers.push((waiter, Ok(turn.unused()))),
                None => refunds.push(turn),
            }
        }
        refunds.extend(here.superfluous_turns());
        let was_pending = !here.requested.is_empty();
        let requests = self.requests(here, now);
        for Request {
            numbers: (first, last),
            ..
        } in &requests
        {
            here.requested.extend([*first, *last]);
        }
        let (first, last) = (
            here.requested.first().copied(),
            here.requested.last().copied(),
        );
        let late = here.late(now, |number| match self.by_turns {
            // The turn of this or an earlier one has no reply yet.
            true => first.is_some_and(|first| first <= number),
            // The reply decides whether there is a check for it.
            false => was_pending || last.is_some_and(|last| number <= last),
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
            let kept_until = (self.failures > 0).then(|| self.sent_at + KEPT);
            if kept_until.is_none_or(|until| until <= now) {
                lines.each.remove(&self.line.id);
                self.has_ended = true;
                return Step::End;
            }
            return Step::Wait(kept_until);
        }
        let times = [
            here.next_due(),
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
        Some(match self.wake.is_freed() {
            _ if self.failures > 0 => self.next,
            // A waiter may have left, or one must know now.
            _ if first.cost < self.denied_cost || has_late => now,
            true if self.is_in_flight => now,
            true => self.next.min(self.sent_at + JITTER),
            false => self.next,
        })
    }

    /// The requests to send now: by turns, for all waiters that lack one; by checks, when the next one is due.
    fn requests(&mut self, line: &Line, now: Instant) -> Vec<Request> {
        let is_due = self.next_check(line, now).is_some_and(|at| at <= now);
        if is_due {
            // Before the checks are sent: they see all capacity that was freed before.
            let freed = self.wake.take_freed();
            self.room = self.room.max(if self.is_in_flight { freed } else { 0 });
        }
        let (key, policies) = (self.line.id.key, &self.line.policies);
        let request = |numbers, deadline, check| Request {
            numbers,
            deadline,
            sent_at: now,
            check,
        };
        let ahead = |(number, waiter): (&u64, &Waiter)| {
            let deadline = waiter.deadline;
            let within = deadline.map(|deadline| deadline.saturating_duration_since(now));
            let check =
                Check::take_ahead(key, policies, waiter.cost, within.unwrap_or(Duration::MAX));
            request((*number, *number), deadline, check)
        };
        let requests: Vec<_> = if self.by_turns {
            let most = MAX_REQUESTS.saturating_sub(line.requested.len());
            line.lacking(most).into_iter().map(ahead).collect()
        } else if !is_due {
            vec![]
        } else if self.line.id.cost.is_some() {
            line.without_turn().take(1).map(ahead).collect()
        } else {
            let capacities = policies.iter().map(|policy| policy.quota().capacity());
            let ones = line
                .waiters
                .iter()
                .take(capacities.min().unwrap_or(1) as usize);
            let ones: Vec<u64> = ones
                .take_while(|(_, waiter)| waiter.cost == 1)
                .map(|(number, _)| *number)
                .collect();
            let mut sum = 0;
            let first_ones = line.waiters.values().take(MAX_REQUESTS);
            let fitting = first_ones.take_while(|waiter| {
                sum += u64::from(if self.is_in_flight { 1 } else { waiter.cost });
                sum <= u64::from(self.room)
            });
            let fitting = fitting.count().max(1);
            match (ones.first(), ones.last()) {
                // Grants the part of these that fits.
                (Some(first), Some(last)) if ones.len() >= fitting && !self.is_in_flight => {
                    let check = Check::up_to(key, policies, ones.len() as u32);
                    vec![request((*first, *last), None, check)]
                }
                _ => {
                    let each = line.waiters.iter().take(fitting);
                    let take = |(number, waiter): (&u64, &Waiter)| {
                        let check = Check::take(key, policies, waiter.cost);
                        request((*number, *number), waiter.deadline, check)
                    };
                    each.map(take).collect()
                }
            }
        };
        if !requests.is_empty() {
            self.sent_at = now;
        }
        requests
    }

    /// Sends requests. By checks, their replies are handled together and in order.
    fn send(&mut self, requests: Vec<Request>) {
        let reply = |request: Request| {
            let in_flight = self.line.queues.in_flight.as_ref();
            let mut slot = in_flight.and_then(|in_flight| in_flight.hold(&request.check));
            let answer = (self.line.queues.shared.send)(request.check.clone());
            async move {
                let answer = answer.await;
                if let Some(slot) = &mut slot {
                    slot.answered(answer.as_ref());
                }
                Reply {
                    request,
                    answer,
                    slot,
                }
            }
        };
        let together = if self.by_turns {
            1
        } else {
            requests.len().max(1)
        };
        let mut replies = requests.into_iter().map(reply).peekable();
        while replies.peek().is_some() {
            let replies = join_all(replies.by_ref().take(together));
            self.pending.push(Box::pin(replies.map(Event::Replied)));
        }
    }

    /// Refunds a turn that no waiter needs. If the store rejects that, a later turn of another instance depends on it: it
    /// serves the next waiter that joins before it is due, or expires.
    fn refund(&mut self, mut turn: Permit) {
        if turn.is_kept() {
            return;
        }
        let (sender, receiver) = oneshot::channel();
        self.line.queues.ops.put(turn.refund().then(move |answer| {
            let _ = sender.send(answer.is_ok_and(|decision| decision.granted() == 0));
        }));
        self.pending.push(Box::pin(async move {
            let is_rejected = receiver.await == Ok(true);
            Event::Refunded(is_rejected.then_some(turn))
        }));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Replied(replies) => self.replied(replies),
            Event::Refunded(Some(turn)) if turn.due() > instant() => {
                self.line.with(|line| line.add_turn(turn));
            }
            Event::Refunded(_) => {}
        }
    }

    fn replied(&mut self, replies: Vec<Reply>) {
        self.replied_at = instant();
        let (mut granted, mut denied, mut failed) = (None, None, vec![]);
        for Reply {
            request,
            answer,
            slot,
        } in replies
        {
            let (first, last) = request.numbers;
            self.line
                .with(|line| [first, last].map(|number| line.requested.remove(&number)));
            match answer {
                Ok(decision) if is_granted(&decision) => {
                    self.granted(&request, &decision, slot);
                    granted = Some((request, decision));
                }
                Ok(decision) => denied = denied.or(Some((request, decision))),
                Err(error) => failed.push((request, error)),
            }
        }
        if let Some((request, decision)) = denied.or(granted) {
            self.decided(&request, decision);
        }
        for (request, error) in failed {
            self.failed(&request, &error);
        }
    }

    /// Adds a turn, or one for each unit.
    fn granted(&self, request: &Request, decision: &Decision, mut slot: Option<Slot>) {
        let due = instant() + decision.due_in().unwrap_or_default();
        let (cost, count) = match request.check.mode() {
            Mode::UpTo => (1, decision.granted()),
            _ => (request.check.cost(), 1),
        };
        let turn = |_| {
            let part = decision.clone().of_charge(cost);
            let charge = Reserved::new(part, self.line.id.key, cost, request.sent_at);
            Permit::new(self.line.clone(), charge, due, slot.take())
        };
        let turns: Vec<_> = (0..count).map(turn).collect();
        self.line
            .with(|line| turns.into_iter().for_each(|turn| line.add_turn(turn)));
    }

    /// Handles the last decision: the way in which the line is served, the remaining capacity and the time of the next
    /// check.
    fn decided(&mut self, request: &Request, decision: Decision) {
        let &Request {
            numbers: (number, _),
            deadline,
            sent_at,
            ref check,
        } = request;
        let (now, wait) = (instant(), decision.retry_after());
        self.line.with(|line| {
            line.learn(&decision, now);
            line.free_at = None;
        });
        (self.failures, self.room, self.denied_cost) = (0, 0, 0);
        let is_late = |wait| deadline.is_some_and(|deadline| deadline < sent_at + wait);
        if !is_granted(&decision) && wait.is_none_or(|wait| self.by_turns && is_late(wait)) {
            // The turn would be due too late for it, or the cost never fits.
            let refused = self.line.with(|line| line.remove(number)).flatten();
            return refused
                .into_iter()
                .for_each(|it| it.answer(Err(Refusal::Denied(decision.clone()))));
        }
        let reserves = self.line.id.cost.is_some() && is_reserved(&decision);
        self.by_turns = is_granted(&decision) && (self.by_turns || reserves);
        if let Some(wait) = wait {
            let cost = if check.mode() == Mode::UpTo {
                1
            } else {
                check.cost()
            };
            return self.check_after(sent_at, wait, cost, &decision);
        }
        self.next = now;
        if self.is_in_flight {
            let each = decision.verdicts();
            let slots = each.filter(|(policy, _)| policy.is_in_flight());
            let free = slots.map(|(_, verdict)| verdict.remaining).min();
            let free = u32::try_from(free.unwrap_or(0)).unwrap_or(0);
            // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
            self.room = match self.wake.take_freed() {
                0 => free,
                freed => freed + free.min(1),
            };
            if self.room == 0 {
                self.next = now + INTERVAL;
            }
        } else if decision.granted() < check.cost() {
            // The reply does not say when more is freed. It is unlikely before a unit is refilled or the window ends.
            let unit = decision
                .policy()
                .quota()
                .time_for(1)
                .min(decision.reset_after());
            self.next = next_check(&self.line.policies, sent_at, unit, &decision);
        } else {
            self.room = decision.remaining();
        }
    }

    /// After a denial of this cost: expects no capacity before the end of its wait. Slots in flight may be free at any
    /// time.
    fn check_after(&mut self, sent_at: Instant, wait: Duration, cost: u32, denied: &Decision) {
        self.denied_cost = cost;
        self.next = next_check(&self.line.policies, sent_at, wait, denied);
        let free_at = (!self.is_in_flight).then(|| sent_at + wait);
        self.line.with(|line| line.free_at = free_at);
    }

    /// Fails the first waiter of a request, or after several failures in a row all that have no turn.
    fn failed(&mut self, request: &Request, error: &StoreError) {
        // Requests that were sent together fail together.
        if self.failures == 0 || request.sent_at >= self.next {
            self.failures += 1;
            self.next = instant() + INTERVAL;
        }
        self.by_turns = false;
        let all = self.failures >= MAX_FAILURES;
        let failed = self.line.with(|line| {
            line.free_at = None;
            let numbers: Vec<u64> = if all {
                line.without_turn().map(|(number, _)| *number).collect()
            } else {
                vec![request.numbers.0]
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

fn is_granted(decision: &Decision) -> bool {
    decision.is_allowed() || decision.due_in().is_some()
}

/// Returns `false` for a decision of a fallback.
fn is_shared(decision: &Decision) -> bool {
    matches!(decision.charged_at(), ChargedAt::Redis(_))
}

/// Returns `true` if the store reserves turns, at least as long as it has capacity. After a grant that leaves none, the
/// next check shows that, so that not all waiters get a turn that the store denies.
fn is_reserved(decision: &Decision) -> bool {
    let has_capacity = decision.is_allowed() && decision.remaining() > 0;
    decision.due_in().is_some() || has_capacity && is_shared(decision)
}
