//! The task of a queue: it sends checks to the store, and answers the waiters.

use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::permit::Permit;
use super::queue::{Queue, Waiter, time_for_unit};
use super::{Answer, NoPermit, QueueRef, Takes};
use crate::background::panicked;
use crate::error::StoreError;
use crate::held_slots::Slot;
use crate::limit::{Charge, Check, Decision, MadeBy, Mode, Outcome, Policies};
use crate::util::{contain, instant, lock, random};
use crate::waiters::{Listener, Wake};

/// While it exists, so does its queue. If its runtime drops it, the waiters fail.
pub(super) struct QueueTask {
    queue_ref: QueueRef,
    wake: Arc<Wake>,
    /// Wakes the task when capacity is freed in this process. By turns, that changes nothing.
    _listener: Option<Listener>,
    pending: FuturesUnordered<Pin<Box<dyn Future<Output = QueueEvent> + Send>>>,
    /// Whether a turn is requested for each waiter immediately. Otherwise the queue is served by checks, whose grants become
    /// turns too.
    by_turns: bool,
    schedule: CheckSchedule,
    /// Number of consecutive failures.
    failures: u32,
    /// Whether the queue has been removed.
    has_ended: bool,
}

/// When and how many checks are sent. Not used by turns.
struct CheckSchedule {
    /// The time of the next one.
    next: Instant,
    /// The time at which the last one was sent that was denied, or granted in part.
    denied_at: Option<Instant>,
    /// Units left after the last one, under policies that charge units.
    units: u32,
    /// Slots left after the last one. [`u32::MAX`] without requests in flight.
    slots: u32,
}

struct QueueRequest {
    /// The waiter for which it is sent.
    first: u64,
    /// The last waiter for which it is sent: another one if it takes [up to](Check::up_to) some units.
    last: u64,
    sent_at: Instant,
    check: Check,
}

/// The part of a step that runs without the lock.
#[derive(Default)]
struct StepWork {
    answers: Vec<(Waiter, Answer)>,
    refunds: Vec<Permit>,
    requests: Vec<QueueRequest>,
}

/// Waiters of cost 1.
#[derive(Default)]
struct Ones {
    count: u32,
    /// The number of the last one.
    last: u64,
}

enum QueueEvent {
    Replied(QueueRequest, Result<Decision, StoreError>, Option<Slot>),
    /// The reply to the refund of a turn: the turn, if it was rejected.
    Refunded(Option<Permit>),
}

/// Maximum jitter of a check, equal for all instances, so that no instance is favored.
const JITTER: Duration = Duration::from_millis(20);
/// Interval of checks for slots that other instances release, and of failing checks.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval of checks; for long waits, a fraction of the wait. Other instances may refund at any time.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);
const CHECKS_PER_WAIT: u32 = 16;
/// Maximum number of requests without a reply.
const MAX_REQUESTS: usize = 128;
/// Time after a failure for which an empty queue stays: longer than the pause of a throttle, so that throttles that pause
/// together share checks again.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// Number of consecutive failures at which all waiters fail.
const MAX_FAILURES: u32 = 3;

impl QueueTask {
    /// Starts the task of a new queue. The task is polled once here: if the store replies immediately, callers that poll
    /// only once get their permit.
    pub(super) fn start(queue_ref: QueueRef) {
        let now = instant();
        let wake = queue_ref
            .with(|queue| Arc::clone(&queue.wake))
            .unwrap_or_default();
        // Before the first check is sent, which might miss what is freed.
        let listener = match queue_ref.queues.shared.waiters.clone() {
            Some(waiters) => {
                let policies = queue_ref.policies.clone();
                Some(waiters.listen(queue_ref.id.key, policies, Arc::clone(&wake)))
            }
            None => None,
        };
        let task = Self {
            _listener: listener,
            wake,
            pending: FuturesUnordered::new(),
            by_turns: queue_ref.id.takes != Takes::Now,
            schedule: CheckSchedule {
                next: now,
                denied_at: None,
                units: 0,
                slots: 0,
            },
            failures: 0,
            has_ended: false,
            queue_ref,
        };
        let mut run: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task.run());
        // A noop waker is enough: `spawn` polls it again, with the task's own.
        let mut context = Context::from_waker(Waker::noop());
        if run.as_mut().poll(&mut context).is_pending() {
            tokio::spawn(run);
        }
    }

    async fn run(mut self) {
        loop {
            // Replies that have come already need no timers of the runtime.
            while let Some(Some(event)) = self.pending.next().now_or_never() {
                self.handle(event);
            }
            match self.step(instant()) {
                ControlFlow::Continue(Some(until)) if until <= instant() => {}
                ControlFlow::Continue(until) => self.wait(until).await,
                ControlFlow::Break(()) => return,
            }
        }
    }

    /// Waits for a reply, a waiter that joins or leaves, or freed capacity.
    async fn wait(&mut self, until: Option<Instant>) {
        let wake = Arc::clone(&self.wake);
        let mut woken = pin!(wake.notify.notified());
        let pending = &mut self.pending;
        let next = poll_fn(|cx| {
            // Without pending replies, the stream is at its end, which is ready: wait for the wake only.
            if let Poll::Ready(Some(event)) = pending.poll_next_unpin(cx) {
                return Poll::Ready(Some(event));
            }
            ready!(woken.as_mut().poll(cx));
            Poll::Ready(None)
        });
        let event = match until {
            Some(until) => timeout_at(until, next).await.unwrap_or(None),
            None => next.await,
        };
        if let Some(event) = event {
            self.handle(event);
        }
    }

    /// Serves and refuses waiters, and sends requests. Returns the time of the next step, which replies and wakes make
    /// earlier, or breaks when it has removed the queue.
    fn step(&mut self, now: Instant) -> ControlFlow<(), Option<Instant>> {
        let shared = Arc::clone(&self.queue_ref.queues.shared);
        let mut queues = lock(&shared.queues);
        let queue = queues.by_id.entry(self.queue_ref.id).or_default();
        let mut work = StepWork::default();
        let next_check = self.plan(queue, now, &mut work);
        let next = if !work.is_empty() {
            // Plan again: the refunds and requests may have replies already.
            ControlFlow::Continue(Some(now))
        } else if !self.is_idle(queue) {
            let times = [
                queue.next_due(now),
                queue.deadline_after(Some(now)),
                next_check,
            ];
            ControlFlow::Continue(times.into_iter().flatten().min())
        } else if self.failures > 0 && now < self.schedule.next + FAILURE_TTL {
            ControlFlow::Continue(Some(self.schedule.next + FAILURE_TTL))
        } else {
            // Removed under the same lock: a request that joins later finds no queue, and starts a task.
            queues.by_id.remove(&self.queue_ref.id);
            self.has_ended = true;
            ControlFlow::Break(())
        };
        // The rest calls the store's code, and drops permits, whose drop takes the lock.
        drop(queues);
        for (waiter, answer) in work.answers {
            waiter.answer(answer);
        }
        for turn in work.refunds {
            self.refund(turn);
        }
        for request in work.requests {
            self.send(request);
        }
        next
    }

    /// Adds the part without the lock to `work`. Returns the time of the next check.
    fn plan(&self, queue: &mut Queue, now: Instant, work: &mut StepWork) -> Option<Instant> {
        for (turn, waiter) in queue.remove_due(now) {
            match waiter {
                Some(waiter) => work.answers.push((waiter, Ok(turn.for_waiter()))),
                None => work.refunds.push(turn),
            }
        }
        work.refunds.extend(queue.remove_surplus());
        // Before the requests of this step are added, which `late` treats separately.
        let awaits_reply = !queue.requested.is_empty();
        let next_check = self.next_check(queue, now);
        if self.by_turns {
            let most = MAX_REQUESTS.saturating_sub(queue.requested.len());
            work.requests = self.take_each(queue, most, now);
        } else if let Some(at) = next_check
            && at <= now
        {
            work.requests = self.check_requests(queue, now);
        }
        for request in &work.requests {
            queue.requested.insert(request.first);
        }
        for number in self.late(queue, &work.requests, awaits_reply, now) {
            if let Some(waiter) = queue.remove(number) {
                let denial = self.queue_ref.denial(Some(queue), waiter.cost, now);
                work.answers.push((waiter, Err(NoPermit::Denied(denial))));
            }
        }
        next_check
    }

    /// The waiters that are too late for these requests, and for those before that await a reply.
    fn late(
        &self,
        queue: &Queue,
        requests: &[QueueRequest],
        awaits_reply: bool,
        now: Instant,
    ) -> Vec<u64> {
        if self.by_turns {
            // A reply may bring a turn to each waiter from the first request on.
            let first = match queue.requested.first() {
                Some(first) => *first,
                None => u64::MAX,
            };
            return queue.late(now, |_, number| first <= number);
        }
        let last = match requests.last() {
            Some(request) => request.last,
            None => 0,
        };
        // The last check of a waiter is sent at or after its deadline.
        let had_last_check = |deadline| self.schedule.denied_at.is_some_and(|at| deadline <= at);
        queue.late(now, |deadline, number| {
            // A pending reply decides whether another check is sent for it.
            awaits_reply || number <= last && !had_last_check(deadline)
        })
    }

    /// Returns `true` if the queue has no waiter, no turn and no pending reply.
    fn is_idle(&self, queue: &Queue) -> bool {
        // A refund is pending too: if the store rejects it, the queue gets the turn back.
        queue.waiters.is_empty() && queue.turns.is_empty() && self.pending.is_empty()
    }

    /// The time of the next check. `None` by turns, while a reply is pending, and if no waiter lacks a turn.
    fn next_check(&self, queue: &Queue, now: Instant) -> Option<Instant> {
        if self.by_turns || !queue.requested.is_empty() {
            return None;
        }
        queue.first_without_turn()?;
        if self.failures > 0 {
            Some(self.schedule.next)
        } else if self.wake.is_freed() {
            Some(now)
        } else {
            // The last check of a waiter is sent at its deadline.
            match queue.deadline_after(self.schedule.denied_at) {
                Some(deadline) => Some(deadline.min(self.schedule.next)),
                None => Some(self.schedule.next),
            }
        }
    }

    /// Checks for the first waiters for which there may be capacity, at least for one: a single check if their cost is 1.
    fn check_requests(&self, queue: &Queue, now: Instant) -> Vec<QueueRequest> {
        let fitting = self.fitting(queue);
        let ones = self.ones(queue);
        if (ones.count as usize) < fitting {
            return self.take_each(queue, fitting, now);
        }
        let Some(first) = queue.first_without_turn() else {
            return vec![];
        };
        vec![QueueRequest {
            first,
            last: ones.last,
            sent_at: now,
            // Grants the part of them that fits.
            check: Check::up_to(self.queue_ref.id.key, &self.queue_ref.policies, ones.count),
        }]
    }

    /// The number of the first waiters for which there may be capacity, at least 1. Resets the count of freed capacity.
    fn fitting(&self, queue: &Queue) -> usize {
        let mut slots = self.schedule.slots;
        // Before the checks are sent: they see all capacity that was freed before.
        let freed = self.wake.take_freed();
        if freed > 0 && self.is_in_flight() {
            // With steady traffic, requests that ended elsewhere have checks in flight for most of the free slots.
            slots = freed + slots.min(1);
        }
        let mut units = u64::from(self.schedule.units);
        let mut fitting = 0;
        for (_, waiter) in queue.without_turn().take(MAX_REQUESTS.min(slots as usize)) {
            // Free requests too are checked one by one while no unit is left.
            match units.checked_sub(waiter.cost.max(1).into()) {
                Some(left) => units = left,
                None => break,
            }
            fitting += 1;
        }
        fitting.max(1)
    }

    /// The first waiters of cost 1 that a single check can serve, at most the capacity of the policies.
    fn ones(&self, queue: &Queue) -> Ones {
        let mut ones = Ones::default();
        if self.queue_ref.id.takes != Takes::Now || self.is_in_flight() {
            return ones;
        }
        let mut most = u32::MAX;
        for policy in &self.queue_ref.policies {
            most = most.min(policy.quota().capacity());
        }
        for (number, waiter) in queue.without_turn().take(most as usize) {
            if waiter.cost != 1 {
                break;
            }
            ones.count += 1;
            ones.last = *number;
        }
        ones
    }

    /// Takes for the first waiters that need a request.
    fn take_each(&self, queue: &Queue, most: usize, now: Instant) -> Vec<QueueRequest> {
        let mut requests = vec![];
        for (number, waiter) in queue.to_request().take(most) {
            requests.push(QueueRequest {
                first: *number,
                last: *number,
                sent_at: now,
                check: self.take(waiter, now),
            });
        }
        requests
    }

    /// The take of a waiter.
    fn take(&self, waiter: &Waiter, now: Instant) -> Check {
        let key = self.queue_ref.id.key;
        let policies = &self.queue_ref.policies;
        match self.queue_ref.id.takes {
            Takes::Ahead { cost } => {
                let within = match waiter.deadline {
                    Some(deadline) => deadline.saturating_duration_since(now),
                    None => Duration::MAX,
                };
                Check::take_ahead(key, policies, cost, within)
            }
            Takes::Now => Check::take(key, policies, waiter.cost),
        }
    }

    fn send(&mut self, request: QueueRequest) {
        let queues = &self.queue_ref.queues;
        let mut slot = match &queues.in_flight {
            Some(in_flight) => in_flight.track(&request.check),
            None => None,
        };
        // A panic of the store's own code would end the task, and fail all waiters: it fails this request only.
        let mut reply = contain(|| (queues.shared.send)(request.check.clone()));
        self.pending.push(Box::pin(async move {
            let answer = poll_fn(|cx| {
                let polled = match &mut reply {
                    Some(reply) => contain(|| reply.as_mut().poll(cx)),
                    None => None,
                };
                match polled {
                    Some(answer) => answer,
                    None => Poll::Ready(Err(panicked())),
                }
            })
            .await;
            if let Some(slot) = &mut slot {
                slot.on_reply(answer.as_ref());
            }
            QueueEvent::Replied(request, answer, slot)
        }));
    }

    /// Refunds a turn that no waiter needs. If the store rejects that, there is a later one: it
    /// serves the next waiter that joins before it is due, or expires.
    fn refund(&mut self, mut turn: Permit) {
        let due = turn.due();
        if !turn.is_refundable() || due <= instant() {
            // Its drop refunds it, unless that was rejected.
            return;
        }
        let (sender, receiver) = oneshot::channel();
        let refund = turn.refund().then(move |answer| {
            let is_rejected = matches!(answer, Ok(decision) if decision.granted() == 0);
            let _ = sender.send(is_rejected);
        });
        self.queue_ref.queues.ops.put(refund);
        self.pending.push(Box::pin(async move {
            // Without a reply until the turn is due, it serves no waiter, since it may have been refunded.
            match timeout_at(due, receiver).await {
                Ok(Ok(true)) => QueueEvent::Refunded(Some(turn)),
                _ => QueueEvent::Refunded(None),
            }
        }));
    }

    fn handle(&mut self, event: QueueEvent) {
        match event {
            QueueEvent::Replied(request, answer, slot) => {
                self.queue_ref
                    .with(|queue| queue.requested.remove(&request.first));
                match answer {
                    Ok(decision) => self.decided(&request, &decision, slot),
                    Err(error) => self.failed(&request, &error),
                }
            }
            QueueEvent::Refunded(Some(turn)) if turn.due() > instant() => {
                self.queue_ref.with(|queue| queue.add_turn(turn));
            }
            QueueEvent::Refunded(_) => {}
        }
    }

    /// Adds what was granted, or refuses the waiter. Otherwise sets the way in which the queue is served.
    fn decided(&mut self, request: &QueueRequest, decision: &Decision, slot: Option<Slot>) {
        self.failures = 0;
        self.schedule.record_decision(decision);
        match decision.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => self.granted(request, decision, slot),
            Outcome::Denied { retry_after } => {
                let within = u64::try_from(request.check.within()).unwrap_or_default();
                // Its turn would be due too late.
                if self.by_turns && Duration::from_micros(within) < retry_after {
                    self.refuse(request, decision);
                    return;
                }
            }
            Outcome::ExceedsCapacity => {
                self.refuse(request, decision);
                return;
            }
        }
        let cost = request.cost_of_each();
        self.queue_ref
            .with(|queue| queue.record_decision(decision, cost, request.sent_at));
        // A denied take ahead shows that the store reserves no turns at present, a turn that it does.
        let is_denied = decision.retry_after().is_some();
        self.by_turns = !is_denied && (self.by_turns || decision.due_in().is_some());
        self.schedule
            .delay_next(request, decision, &self.queue_ref.policies);
    }

    /// Refuses the waiter of a request, unless an earlier waiter has left it a turn.
    fn refuse(&self, request: &QueueRequest, denied: &Decision) {
        let refused = self.queue_ref.with(|queue| {
            let has_turn = match queue.first_without_turn() {
                Some(first) => request.first < first,
                None => true,
            };
            if has_turn && denied.retry_after().is_some() {
                return None;
            }
            queue.remove(request.first)
        });
        if let Some(Some(waiter)) = refused {
            waiter.answer(Err(NoPermit::Denied(denied.clone())));
        }
    }

    /// Adds the turn of a waiter, or several.
    fn granted(&self, request: &QueueRequest, decision: &Decision, mut slot: Option<Slot>) {
        let now = instant();
        let due = now + decision.due_in().unwrap_or_default();
        let count = match request.check.mode() {
            Mode::UpTo => decision.granted(),
            _ => 1,
        };
        let mut turns = vec![];
        for _ in 0..count {
            let key = self.queue_ref.id.key;
            let cost = request.cost_of_each();
            let charge = Charge::new(key, decision.clone(), cost, request.sent_at, now);
            // A list with requests in flight has no check for several waiters, so the only turn gets the slot.
            let turn = Permit::new(self.queue_ref.clone(), charge, due, slot.take());
            turns.push(turn);
        }
        self.queue_ref.with(|queue| {
            for turn in turns {
                queue.add_turn(turn);
            }
            if decision.due_in().is_some() {
                // The store has reserved the turn within the wait that was left when the request was sent.
                let took = now.saturating_duration_since(request.sent_at);
                queue.extend_wait(request.first, took);
            }
        });
    }

    /// Fails the first waiter of a request. After several failures in a row, fails each waiter without a turn.
    fn failed(&mut self, request: &QueueRequest, error: &StoreError) {
        // Requests that were sent before the last failure was known count as that failure.
        if self.failures == 0 || request.sent_at >= self.schedule.next {
            self.failures += 1;
            self.schedule.next = instant() + RETRY_INTERVAL;
        }
        self.by_turns = false;
        // So that the next attempt is for one waiter only.
        self.schedule.units = 0;
        let mut failed = vec![];
        self.queue_ref.with(|queue| {
            let mut numbers = vec![];
            if self.failures < MAX_FAILURES {
                numbers.push(request.first);
            } else {
                for (number, _) in queue.without_turn() {
                    numbers.push(*number);
                }
            }
            for number in numbers {
                failed.extend(queue.remove(number));
            }
        });
        for waiter in failed {
            waiter.answer(Err(NoPermit::Failed(error.clone())));
        }
    }

    fn is_in_flight(&self) -> bool {
        self.queue_ref.policies.in_flight().is_some()
    }
}

impl QueueRequest {
    /// The cost of each waiter that it serves.
    fn cost_of_each(&self) -> u32 {
        match self.check.mode() {
            Mode::UpTo => 1,
            _ => self.check.cost(),
        }
    }
}

impl StepWork {
    fn is_empty(&self) -> bool {
        self.answers.is_empty() && self.refunds.is_empty() && self.requests.is_empty()
    }
}

impl CheckSchedule {
    /// Records the capacity that a decision has left. The next check may follow immediately.
    fn record_decision(&mut self, decision: &Decision) {
        self.units = u32::MAX;
        self.slots = u32::MAX;
        for (policy, verdict) in decision.policies().iter().zip(&decision.verdicts().each) {
            let left = u32::try_from(verdict.remaining.max(0)).unwrap_or(u32::MAX);
            let least = if policy.is_in_flight() {
                &mut self.slots
            } else {
                &mut self.units
            };
            *least = left.min(*least);
        }
        self.next = instant();
    }

    /// Delays the next check after a decision that leaves no capacity.
    fn delay_next(&mut self, request: &QueueRequest, decision: &Decision, policies: &Policies) {
        let wait = if let Some(wait) = decision.retry_after() {
            self.denied_at = Some(request.sent_at);
            wait
        } else if policies.in_flight().is_some() {
            // Nothing reports when other instances release slots.
            if self.slots == 0 {
                self.next += RETRY_INTERVAL;
            }
            return;
        } else if decision.granted() < request.check.cost() {
            // Nothing is left, as after a denial.
            self.denied_at = Some(request.sent_at);
            time_for_unit(decision)
        } else {
            return;
        };
        self.next = retry_at(policies, request.sent_at, wait, decision);
    }
}

impl Drop for QueueTask {
    fn drop(&mut self) {
        if !self.has_ended {
            let ended = lock(&self.queue_ref.queues.shared.queues)
                .by_id
                .remove(&self.queue_ref.id);
            // Its turns are permits, whose drop takes the lock.
            drop(ended);
        }
    }
}

/// The time of the next check after one at `sent_at` whose reply promised capacity `wait` later: when that is free, or
/// earlier, since other instances may refund, plus a jitter. A fallback decides for this instance only: without a jitter.
fn retry_at(policies: &Policies, sent_at: Instant, wait: Duration, decision: &Decision) -> Instant {
    let wait = wait.min(MAX_CHECK_INTERVAL.max(wait / CHECKS_PER_WAIT));
    let next = instant().max(sent_at + wait);
    if decision.made_by() != MadeBy::There {
        return next;
    }
    // So that the jitter skips no window of a short period.
    let mut jitter = JITTER;
    for policy in policies {
        jitter = jitter.min(policy.quota().period() / 5);
    }
    next + jitter.mul_f64(random())
}
