//! The task that asks the store for all who wait in one queue: when, for how much, and what becomes of the answer.

use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::permit::Times;
use super::queue::{Ask, Room, WaitQueue, Waiter};
use super::{Permit, QueueId, Refusal, SharedQueues, TICK};
use crate::error::StoreError;
use crate::in_flight::{InFlightTracker, Slot};
use crate::limit::{Check, Decision, Frees, Outcome, Policies, Policy};
use crate::store::{Listener, Wake};
use crate::util::{instant, random};

/// The task that serves a queue until nobody waits in it.
pub(super) struct Dispatcher {
    shared: Arc<SharedQueues>,
    id: QueueId,
    queue: u64,
    wake: Arc<Wake>,
    _listener: Option<Listener>,
    in_flight: InFlightTracker,
}

/// Why a rest has ended.
enum Rested {
    /// It is time.
    Due,
    /// There may be more room than the store said.
    Look,
    /// Nobody waits, or the queue has to be asked for again.
    Changed,
}

/// So long before its turn a queue that begins takes it ahead.
pub(super) const SOON: Duration = Duration::from_millis(50);
/// How often it is looked at what others may have refunded: after so long, and of a longer wait after such a part.
const LOOK: Duration = Duration::from_secs(30);
const LOOKS: u32 = 16;
/// From when the store was asked to when it is asked since something was refunded in this process.
const GAP: Duration = Duration::from_millis(10);
/// As many calls in a row may fail until all who wait are refused.
pub(super) const MAX_FAILURES: u32 = 3;
/// After how long a store that has failed is asked again: first, and when all were refused.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONG_PAUSE: Duration = Duration::from_millis(250);
/// For at most so long those wait on who came first the last times.
const STAND_BACK: Duration = Duration::from_millis(100);

impl Dispatcher {
    pub(super) fn new(
        shared: Arc<SharedQueues>,
        in_flight: InFlightTracker,
        id: QueueId,
        queue: &WaitQueue,
        policies: Policies,
    ) -> Self {
        let wake = Arc::clone(&queue.wake);
        let listener = Listener::new(shared.store.identity(), id.key, policies, Arc::clone(&wake));
        Self {
            shared,
            id,
            queue: queue.number(),
            wake,
            _listener: listener,
            in_flight,
        }
    }

    pub(super) async fn run(self) {
        let mut pace = Pace::default();
        self.sit_out_denial(&mut pace).await;
        // What was refunded until it is asked, it sees.
        while let Some(asks) = self.next(pace.room(self.wake.take_freed())) {
            let asked_at = instant();
            let mut answers: FuturesUnordered<_> = asks
                .into_iter()
                .map(|ask| self.take(ask, pace, asked_at))
                .collect();
            let (asked, mut others) = (answers.len(), Vec::new());
            while let Some((ask, answer, slot)) = answers.next().await {
                match answer {
                    // Whoever is first has it at once: the answers to the others may take longer.
                    Ok(decision) if decision.is_allowed() => {
                        self.act_on(decision, slot, ask, asked_at, &mut pace).await;
                    }
                    answer => others.push((ask, answer)),
                }
            }
            pace.shared(asked, others.len());
            match others.into_iter().min_by_key(|(ask, _)| ask.first) {
                Some((ask, Ok(decision))) => {
                    self.act_on(decision, None, ask, asked_at, &mut pace).await
                }
                Some((ask, Err(error))) => self.fail(&error, &ask, &mut pace).await,
                None => {}
            }
        }
    }

    /// Checks with the store. The slot is that of the granted request.
    fn take(
        &self,
        ask: Ask,
        pace: Pace,
        asked_at: Instant,
    ) -> impl Future<Output = (Ask, Result<Decision, StoreError>, Option<Slot>)> {
        let check = Check::take_ahead(
            self.id.key,
            &ask.policies,
            ask.total(),
            pace.within(&ask, asked_at),
        );
        let mut slot = self.in_flight.hold(&check);
        let answer = self.shared.store.ask(check);
        async move {
            let answer = answer.await;
            if let Some(slot) = &mut slot {
                slot.answered(answer.as_ref());
            }
            (ask, answer, slot)
        }
    }

    /// The store is not asked again before it helps, after the denial that the queue began with.
    async fn sit_out_denial(&self, pace: &mut Pace) {
        let denied = self
            .with_queue(|queue| queue.ask(Room::default()).pop().zip(queue.denied()))
            .flatten();
        if let Some((ask, (decision, at, wait))) = denied {
            self.sit_out(&decision, at, wait, &ask, at, pace).await;
        }
    }

    /// Rests until it helps to ask again after what was decided at the time `at`: to wait for so long.
    async fn sit_out(
        &self,
        decision: &Decision,
        at: Instant,
        wait: Duration,
        ask: &Ask,
        asked_at: Instant,
        pace: &mut Pace,
    ) {
        let several = self.with_queue(|queue| queue.len() > 1).unwrap_or_default();
        // A request that has ended makes room for one: to wait would be to leave it empty.
        let gap = if decision.policy().is_in_flight() {
            Duration::ZERO
        } else {
            GAP
        };
        let (wait, pause) = pace.retry_in(decision, wait, ask, several);
        if let Rested::Due = self.rest(at + wait, pause, ask, asked_at, gap).await {
            pace.denied(decision);
        }
    }

    /// What to ask for next, if anybody waits; else the queue is gone.
    fn next(&self, room: Room) -> Option<Vec<Ask>> {
        loop {
            self.refuse_overdue();
            let (asks, late) = self.with_queue(|queue| {
                let asks = queue.ask(room);
                let late = queue.left_over(&asks, instant());
                (asks, late)
            })?;
            refuse_all(late);
            if !asks.is_empty() {
                return Some(asks);
            }
            // Somebody may have come since.
            if self.shared.remove(&self.id, self.queue, false).is_some() {
                return None;
            }
        }
    }

    /// Does what the decision says.
    async fn act_on(
        &self,
        decision: Decision,
        mut slot: Option<Slot>,
        ask: Ask,
        asked_at: Instant,
        pace: &mut Pace,
    ) {
        let now = instant();
        let room = mem::take(&mut pace.room);
        match decision.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => {
                let mut due_at = now + decision.due_in().unwrap_or_default();
                self.with_queue(|queue| queue.learn(&ask, &decision, now, due_at, ask.costs.len()));
                pace.granted(&ask, Room::after(&decision));
                let permits = |due| {
                    let times = Times {
                        asked: asked_at,
                        answered: now,
                        due,
                    };
                    let permit = |&cost: &u32| {
                        let decision = decision.clone().due(cost);
                        Permit::new(
                            &self.shared,
                            &self.in_flight,
                            self.id,
                            &ask.policies,
                            cost,
                            decision,
                            times,
                        )
                    };
                    ask.costs.iter().map(permit).collect::<Vec<_>>()
                };
                let mut looked_at = asked_at;
                loop {
                    match self
                        .rest(due_at, Duration::ZERO, &ask, looked_at, GAP)
                        .await
                    {
                        Rested::Due => break,
                        Rested::Look => {
                            looked_at = instant();
                            self.wake.take_freed();
                            due_at = self.look(&decision, &ask, due_at).await;
                        }
                        Rested::Changed => {
                            // Nobody may have it before it is due. What is asked for next is due the sooner.
                            return self.refund(permits(due_at)).await;
                        }
                    }
                }
                for permit in permits(due_at) {
                    // Under a policy that has one, a check is for one.
                    permit.with_slot(slot.take()).hand_on();
                }
                self.with_queue(WaitQueue::all_served);
            }
            // There is less room than there was; if not less than it said, one is asked for.
            Outcome::Denied { .. } if ask.costs.len() > 1 => {
                let room = Room {
                    units: room
                        .units
                        .saturating_sub(ask.cost())
                        .min(decision.remaining()),
                    ..room
                };
                *pace = Pace {
                    room,
                    failures: 0,
                    ..*pace
                };
            }
            Outcome::Denied { retry_after } => {
                pace.failures = 0;
                let passes_at = now.checked_add(retry_after);
                self.with_queue(|queue| {
                    queue.learn(&ask, &decision, now, passes_at.unwrap_or(now), 0)
                });
                match passes_at {
                    Some(passes_at)
                        if ask.deadline.is_none_or(|deadline| passes_at <= deadline) =>
                    {
                        self.sit_out(&decision, now, retry_after, &ask, asked_at, pace)
                            .await;
                    }
                    _ => self.refuse(ask.first, decision),
                }
            }
            Outcome::ExceedsCapacity => self.refuse(ask.first, decision),
        }
    }

    /// Gives back what was taken, before the store is asked again: or that would not know of it. It is not waited for for
    /// long, as it may be sent again and again.
    async fn refund(&self, permits: Vec<Permit>) {
        let (refunded, mut all_refunded) = mpsc::channel::<()>(1);
        for op in permits.into_iter().flat_map(Permit::refund) {
            let refunded = refunded.clone();
            self.in_flight.ops().put(op.then(move |_| drop(refunded)));
        }
        drop(refunded);
        let _ = timeout(LONG_PAUSE, all_refunded.recv()).await;
    }

    /// When what was taken ahead by this decision is due, by what the store says now: sooner, if something was refunded.
    async fn look(&self, decision: &Decision, ask: &Ask, due_at: Instant) -> Instant {
        let peek = self
            .shared
            .store
            .ask(Check::peek(self.id.key, &ask.policies, 0))
            .await;
        let Ok(peek) = peek else { return due_at };
        // Another store does not know of it.
        if peek.source() != decision.source() {
            return due_at;
        }
        // When nothing is owed: it is a part of that, with what others took ahead after it.
        let due_at = due_at.min(instant() + peek.retry_after().unwrap_or_default());
        self.with_queue(|queue| queue.is_due_at(due_at));
        due_at
    }

    /// Rests until its turn, and for a `pause` that is left to others; meanwhile refuses those whose time is up. The store
    /// was asked at the time `asked_at`, and since something was refunded it is asked after such a `gap`.
    async fn rest(
        &self,
        turn: Instant,
        pause: Duration,
        ask: &Ask,
        asked_at: Instant,
        gap: Duration,
    ) -> Rested {
        let until = turn + pause;
        let look = (turn.saturating_duration_since(asked_at) / LOOKS).max(LOOK);
        // Hardly before its turn it does not help, and in the pause it would end that.
        let mut looks_at = if asked_at + look + SOON < turn {
            asked_at + look
        } else {
            until
        };
        loop {
            let now = instant();
            if self.wake.is_freed() {
                looks_at = looks_at.min(asked_at + gap);
            }
            if now >= until {
                return Rested::Due;
            }
            if now >= looks_at {
                return Rested::Look;
            }
            if !self.doze(until.min(looks_at), Some(ask)).await {
                return Rested::Changed;
            }
        }
    }

    /// Sleeps until then or until it is woken, after it has refused those whose time is up. Returns at once, and `false`, if
    /// the queue has to be asked for again.
    async fn doze(&self, until: Instant, ask: Option<&Ask>) -> bool {
        self.refuse_overdue();
        let Some(wakes_at) = self
            .with_queue(|queue| queue.rest(until, ask, instant()))
            .flatten()
        else {
            return false;
        };
        // On its task: where a queue is joined, it is polled only for what is there at once.
        poll_fn(|cx| {
            if cx.waker().will_wake(Waker::noop()) {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
        let _ = timeout(
            wakes_at.saturating_duration_since(instant()),
            self.wake.notify.notified(),
        )
        .await;
        true
    }

    fn refuse_overdue(&self) {
        refuse_all(
            self.with_queue(|queue| queue.overdue(instant()))
                .unwrap_or_default(),
        );
    }

    /// Refuses the one of this number, if it still waits.
    fn refuse(&self, number: u64, decision: Decision) {
        if let Some(waiter) = self.with_queue(|queue| queue.leave(number)).flatten() {
            let _ = waiter.answer(Err(Refusal::Denied(decision)));
        }
    }

    /// Reports to the first that the store cannot decide, or to all if it could not for several times; and leaves it alone for a
    /// while.
    async fn fail(&self, error: &StoreError, ask: &Ask, pace: &mut Pace) {
        *pace = Pace {
            room: Room::default(),
            failures: pace.failures + 1,
            ..*pace
        };
        let (only, pause) = match pace.failures {
            MAX_FAILURES.. => (None, LONG_PAUSE),
            failures => (Some(ask.first), FIRST_PAUSE * failures),
        };
        let until = instant() + pause;
        let refused = self.with_queue(|queue| queue.fail(error, only, until));
        for waiter in refused.into_iter().flat_map(|(waiters, _)| waiters) {
            let _ = waiter.answer(Err(Refusal::Failed(error.clone())));
        }
        while instant() < until && self.doze(until, None).await {}
        self.with_queue(WaitQueue::try_again);
    }

    fn with_queue<T>(&self, act: impl FnOnce(&mut WaitQueue) -> T) -> Option<T> {
        self.shared.with_queue(&self.id, self.queue, act)
    }
}

/// If its runtime ends it takes the queue away, which answers those who wait.
impl Drop for Dispatcher {
    fn drop(&mut self) {
        drop(self.shared.remove(&self.id, self.queue, true));
    }
}

/// Whether what is taken ahead may be owed under these policies.
fn can_owe(policies: &Policies) -> bool {
    policies.iter().all(|policy| policy.frees().is_gradual())
}

/// Answers those who were taken out of the queue.
fn refuse_all(refused: Vec<(Waiter, Refusal)>) {
    for (waiter, refusal) in refused {
        let _ = waiter.answer(Err(refusal));
    }
}

/// How much to ask for next, and when.
#[derive(Debug, Default, Clone, Copy)]
struct Pace {
    /// After the last answer.
    room: Room,
    /// How many requests in flight to ask for at once, at most, since others have taken what was there.
    most: Option<u32>,
    /// For how much there was room when the queue last had its turn, if it had one.
    found: Option<u32>,
    /// Whether the queue has waited for its turn: then it takes ahead whatever is in time.
    has_waited: bool,
    /// How often in a row others came first.
    losses: u32,
    /// How often in a row the store has failed.
    failures: u32,
}

impl Pace {
    /// For how much there is room, since so many requests in flight were `freed` here.
    fn room(&self, freed: u32) -> Room {
        let known = self.room.places;
        Room {
            places: self.most.map_or(known.max(freed), |most| known.min(most)),
            ..self.room
        }
    }

    /// After so many checks at once. If all instances asked for all that comes free, most of them would ask in vain.
    fn shared(&mut self, asked: usize, denied: usize) {
        self.most = match denied {
            0 => self.most.and_then(|most| most.checked_mul(2)),
            _ if asked > 1 => Some((asked - denied).max(1) as u32),
            _ => self.most,
        };
    }

    /// After a grant that has left so much room.
    fn granted(&mut self, ask: &Ask, room: Room) {
        let found = ask.total().saturating_add(room.units);
        let before = self.found.filter(|_| self.losses == 0);
        *self = Self {
            room,
            found: before.max(Some(found)),
            has_waited: true,
            losses: 0,
            failures: 0,
            ..*self
        };
    }

    /// The wait of this denial is over.
    fn denied(&mut self, decision: &Decision) {
        (self.has_waited, self.losses) = (true, (self.losses + 1).min(4));
        // Whoever asks for one first may find the rest taken. A window may have room for all, and a log for as much as it
        // had: what is charged at once comes free at once.
        let units = match decision.policy().frees() {
            Frees::OneByOne => self.found.unwrap_or(decision.capacity()),
            Frees::WithWindow | Frees::InBatches => decision.capacity(),
            Frees::Gradually | Frees::Fading | Frees::OnRelease => return,
        };
        self.room = Room {
            units,
            ..Room::after(decision)
        };
    }

    /// Within how long what is asked for has to be due.
    fn within(&self, ask: &Ask, now: Instant) -> Duration {
        let max = ask.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(now)
        });
        match (ask.costs.len(), self.has_waited) {
            (1, true) if can_owe(&ask.policies) => max,
            (1, _) => max.min(SOON),
            // What others have taken since, they would owe together.
            _ => Duration::ZERO,
        }
    }

    /// When to ask again after a denial of what would be in time: it passes after `retry_after`. Also for how long to leave
    /// it to others then.
    fn retry_in(
        &self,
        decision: &Decision,
        retry_after: Duration,
        ask: &Ask,
        several: bool,
    ) -> (Duration, Duration) {
        let policy = decision.policy();
        let (spacing, period) = (policy.quota().time_for(1), policy.quota().period());
        if can_owe(decision.policies()) && !self.has_waited && ask.cost() > 0 {
            return (retry_after.saturating_sub(SOON), Duration::ZERO);
        }
        if let Some(wait) = until_more_may_be_owed(decision) {
            // Whoever is ahead takes it then. Who comes again and again in vain stays away for longer, so that each turn is
            // not asked for by all.
            let pause = spacing
                .saturating_mul(2 << self.losses)
                .min(Duration::from_secs(1))
                .mul_f64(random());
            return (wait.max(TICK), pause);
        }
        // What comes free one by one is left to gather a little, so that a call gets several; for a random time, or one
        // instance would always come before the others.
        let gathering = 2 * spacing.min(period / 50);
        // Whoever comes first takes what comes free at once, as a window does, and in a log what was charged at once. So
        // those stand back who did, or the nearest would each time.
        let stand_back = (period / 20).min(STAND_BACK);
        let in_turn = (0.5 + 0.5 * random()) / f64::from(1 << self.losses);
        let pause = match policy.frees() {
            _ if !several => Duration::ZERO,
            Frees::Fading => gathering.mul_f64(random()),
            Frees::OneByOne => gathering.max(stand_back).mul_f64(in_turn),
            Frees::WithWindow | Frees::InBatches => stand_back.mul_f64(in_turn),
            Frees::Gradually | Frees::OnRelease => Duration::ZERO,
        };
        (retry_after + TICK, pause)
    }
}

/// When a full count less is owed, if others have taken ahead as much as may be owed. A denial for less than that is of a
/// store that knows no debt, or of what costs nothing.
fn until_more_may_be_owed(decision: &Decision) -> Option<Duration> {
    let longer = decision.verdicts().map(|(policy, verdict)| {
        let wait = Duration::from_micros(u64::try_from(verdict.wait).unwrap_or_default());
        wait.saturating_sub(full_debt(policy))
    });
    longer
        .max()
        .filter(|wait| can_owe(decision.policies()) && !wait.is_zero())
}

/// How long it takes to pay as much as may be owed; rounded up to microseconds, as the waits of decisions are.
fn full_debt(policy: &Policy) -> Duration {
    let quota = policy.quota();
    let nanos = quota.time_for(quota.capacity().into()).as_nanos();
    u64::try_from(nanos.div_ceil(1_000)).map_or(Duration::MAX, Duration::from_micros)
}
