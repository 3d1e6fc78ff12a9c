//! Wait queues: requests that would be denied wait in FIFO order in a [`Line`], and get a [`Permit`].
//!
//! A line has the waiters of one runtime, caller and list of policies. It serves them in one of two ways:
//!
//! - **By turns** ([`turns`]), if the policies refill gradually. All waiters of the line have the same cost. For each, a
//!   turn is taken ahead immediately: the store charges it and reports when it is due. So the queue of all instances is
//!   in the store, and no round trip limits the rate. Turns of a line are interchangeable, so the first waiter gets the
//!   next due turn. There are never fewer turns than waiters. If a waiter leaves, the last turn is refunded. The
//!   store rejects the refund if a later turn of another instance depends on it; then the turn serves the next waiter
//!   that joins before it is due, or expires.
//! - **By checks** ([`checks`]), under all other policies, and while the store reserves no turns or fails. The waiters
//!   have any cost, and one task sends checks for the first of them. After a denial it checks again at the time that the
//!   denial reports, or when capacity was freed in this process.
//!
//! Both have these rules:
//!
//! - **Replies.** Tasks receive them, also for requests that were dropped. A permit that is dropped unused goes to the
//!   first waiter of its line if that has its cost; otherwise it is refunded. A charge whose reply is lost is not refunded.
//! - **Deadlines.** A waiter is denied when its turn is certain to be too late. Only a slow store call can delay that.
//! - **End of a runtime.** It drops its tasks, and the waiters of their lines fail.

mod checks;
mod line;
mod permit;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::{Instant, Sleep, sleep_until};

pub(crate) use permit::{Permit, Spent};

use self::line::{Line, Waiter};
use crate::background::{OpQueue, PendingOp};
use crate::error::{ErrorKind, StoreError};
use crate::in_flight::InFlightTracker;
use crate::limit::{Check, Decision, Key, Policies, Source, Verdict};
use crate::observe::Observer;
use crate::store::{Store, Waiters, op_queue};
use crate::util::{instant, lock};

/// The lines of all callers. Clones share the lines.
#[derive(Clone)]
pub(crate) struct WaitQueues {
    shared: Arc<Shared>,
    /// Sends refunds, and charges that need no permit.
    ops: OpQueue,
    /// Tracks the slots of permits under policies of requests in flight. `None` without such policies.
    in_flight: Option<InFlightTracker>,
    bounds: Bounds,
}

struct Shared {
    /// The store's methods. A waiter can afford the boxed future.
    send: Box<dyn Fn(Check) -> Reply + Send + Sync>,
    observe: Box<Observe>,
    waiters: Option<Waiters>,
    lines: Mutex<Lines>,
    /// Number of lines. While it is 0, requests skip the lock.
    count: AtomicUsize,
}

/// Makes the store report to an observer, and creates an operation queue that does so too.
type Observe = dyn Fn(&Arc<dyn Observer>) -> OpQueue + Send + Sync;

type Reply = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

#[derive(Default)]
struct Lines {
    each: HashMap<LineId, Line>,
    /// Number of waiting requests, in all and of each caller.
    all: usize,
    callers: HashMap<Key, usize>,
    /// The number of the newest waiter or turn.
    last: u64,
}

/// Maximum numbers of waiters: of one caller, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) each: usize,
    pub(crate) all: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LineId {
    runtime: Id,
    key: Key,
    /// A hash of the policies with their quotas, so that a replaced quota gets a separate line.
    policies: u64,
    /// The cost of the waiters of a line by turns; also 0, which needs no turn and waits by checks. `None` in a line by
    /// checks for waiters of any cost.
    cost: Option<u32>,
}

/// A request that must wait.
#[derive(Debug, Clone)]
pub(crate) struct WaitRequest {
    pub(crate) key: Key,
    pub(crate) policies: Policies,
    pub(crate) cost: u32,
    /// `None` if it may wait forever.
    pub(crate) deadline: Option<Instant>,
}

/// The reason for a missing permit.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// The wait would be too long, or too many requests wait.
    Denied(Decision),
    Failed(StoreError),
}

/// A reference to a line, which need not exist.
#[derive(Clone)]
struct LineRef {
    queues: WaitQueues,
    policies: Policies,
    id: LineId,
}

/// Resolves to a permit when it is due. Dropping it leaves the line.
pub(crate) struct Acquire {
    line: LineRef,
    cost: u32,
    /// The number of its waiter. `None` after the wait has ended.
    number: Option<u64>,
    answer: oneshot::Receiver<Answer>,
    deadline: Option<Instant>,
    /// Wakes it at the deadline, and after that while a pending reply may still serve it. `None` before the first poll.
    timer: Option<Pin<Box<Sleep>>>,
}

type Answer = Result<Permit, Refusal>;

/// If a pending reply may still serve a waiter whose deadline has passed, the first pause until the waiter checks that
/// again. Each further pause is as long as the time since the deadline.
const LATE: Duration = Duration::from_millis(10);

impl Refusal {
    /// Converts it to a store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, StoreError> {
        match self {
            Self::Denied(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }

    fn no_runtime() -> Self {
        Self::Failed(StoreError::new(ErrorKind::NoRuntime).check_only())
    }
}

impl Bounds {
    /// One bound for both, because many services use a single key.
    pub(crate) const DEFAULT: Self = Self {
        each: 10_000,
        all: 10_000,
    };

    /// One bound for each caller and in all.
    pub(crate) const fn of(all: NonZeroUsize) -> Self {
        Self {
            each: all.get(),
            all: all.get(),
        }
    }
}

impl Lines {
    /// Counts a request of this caller that waits. Returns its number.
    fn enter(&mut self, key: Key) -> u64 {
        self.all += 1;
        *self.callers.entry(key).or_default() += 1;
        self.last += 1;
        self.last
    }

    /// Counts a request of this caller out.
    fn leave(&mut self, key: &Key) {
        self.all -= 1;
        if let Some(count) = self.callers.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.callers.remove(key);
            }
        }
    }

    /// Calls `act` with each of these lines until that returns a value.
    fn find<T>(&mut self, ids: &[LineId], act: impl Fn(&mut Line) -> Option<T>) -> Option<T> {
        ids.iter().find_map(|id| act(self.each.get_mut(id)?))
    }

    /// Adds a waiter to a line by turns. Returns `true` if the line needs a turn more: [request](turns::request) it under
    /// this number.
    fn add(&mut self, id: LineId, number: u64, waiter: Waiter) -> bool {
        let line = self.each.entry(id).or_default();
        line.waiters.insert(number, waiter);
        line.lacks_turn() && line.requested.insert(number)
    }
}

impl WaitQueues {
    /// Creates lines for policies without requests in flight.
    pub(crate) fn new(store: impl Store, bounds: Bounds) -> Self {
        let (checked, observed) = (store.clone(), store.clone());
        let shared = Shared {
            send: Box::new(move |check| Box::pin(checked.check(check))),
            observe: Box::new(move |observer| {
                observed.backend().observe(observer);
                op_queue(observed.clone(), Some(Arc::clone(observer)))
            }),
            waiters: store.backend().waiters(),
            lines: Mutex::default(),
            count: AtomicUsize::new(0),
        };
        Self {
            shared: Arc::new(shared),
            ops: op_queue(store, None),
            in_flight: None,
            bounds,
        }
    }

    /// Shares the lines, with other bounds.
    pub(crate) fn with_bounds(&self, bounds: Bounds) -> Self {
        Self {
            bounds,
            ..self.clone()
        }
    }

    /// Shares the lines, and uses the slots and the queue of this tracker.
    pub(crate) fn with_tracker(&self, in_flight: InFlightTracker) -> Self {
        Self {
            ops: in_flight.ops().clone(),
            in_flight: Some(in_flight),
            ..self.clone()
        }
    }

    /// Shares the lines, and reports to this observer, as does the store.
    pub(crate) fn observed(&self, observer: &Arc<dyn Observer>) -> Self {
        Self {
            ops: (self.shared.observe)(observer),
            ..self.clone()
        }
    }

    /// Charges a cost without waiting.
    pub(crate) fn charge(&self, key: Key, policies: &Policies, cost: u32) {
        self.ops.put(PendingOp::charge(key, policies, cost));
    }

    /// Returns `true` if a request of this caller must join a line: others wait, or a turn is left for it.
    pub(crate) fn has_line(&self, key: &Key, policies: &Policies, cost: u32) -> bool {
        let never_fits = || policies.iter().any(|policy| policy.never_fits(cost));
        if self.shared.count.load(Ordering::Acquire) == 0 || never_fits() {
            return false;
        }
        let Ok(runtime) = Handle::try_current() else {
            return false;
        };
        let id = LineId::new(&runtime, key, policies);
        let lines = lock(&self.shared.lines);
        let mut ids = [id, id.of_cost(cost)].into_iter();
        ids.any(|id| lines.each.get(&id).is_some_and(Line::is_used))
    }

    /// Joins a line. `denied` is the denial of the store, if the request was checked. The cost must fit the policies:
    /// otherwise the others would wait behind it forever.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the permit is certain to be too late, or if too many requests wait.
    pub(crate) fn join(
        &self,
        wanted: WaitRequest,
        denied: Option<Decision>,
    ) -> Result<Acquire, Refusal> {
        let runtime = Handle::try_current().map_err(|_| Refusal::no_runtime())?;
        self.ops.wake();
        let any_cost = LineId::new(&runtime, &wanted.key, &wanted.policies);
        let WaitRequest { cost, deadline, .. } = wanted;
        let (sender, answer) = oneshot::channel();
        let waiter = Waiter::new(cost, deadline, sender);
        let are_reserved = turns::are_reserved(&wanted.policies);
        let mut line = LineRef {
            queues: self.clone(),
            policies: wanted.policies.clone(),
            id: any_cost,
        };
        let joined = self.with(&[], |lines| {
            // A turn would overtake the waiters in a line by checks. A cost of 0 needs none, and so does not join them.
            if are_reserved && (cost == 0 || !lines.each.contains_key(&any_cost)) {
                line.id = any_cost.of_cost(cost);
            }
            let (here, now) = (lines.each.get(&line.id), instant());
            let known = || here.and_then(|line| line.denial(now));
            let of_caller = lines.callers.get(&wanted.key).copied().unwrap_or(0);
            if lines.all >= self.bounds.all || of_caller >= self.bounds.each {
                return Err(denied.clone().or_else(known));
            }
            if here.is_some_and(|line| line.is_late(deadline, now)) {
                return Err(known());
            }
            let is_by_turns = line.id.cost.is_some_and(|cost| cost > 0);
            let counts_time = !is_by_turns && wanted.policies.in_flight().is_none();
            let wait = denied.as_ref().and_then(Decision::retry_after);
            if let (true, Some(wait), Some(deadline)) = (counts_time, wait, deadline)
                && deadline.saturating_duration_since(now) < wait
            {
                return Err(denied.clone());
            }
            let number = lines.enter(wanted.key);
            let starts = if is_by_turns {
                lines.add(line.id, number, waiter)
            } else {
                checks::add(lines, &line, Some((number, waiter)), denied.as_ref())
            };
            Ok((number, is_by_turns, starts))
        });
        let (number, is_by_turns, starts) = joined
            .map_err(|denial| Refusal::Denied(denial.unwrap_or_else(|| line.unknown(cost))))?;
        let acquire = Acquire {
            line: line.clone(),
            cost,
            number: Some(number),
            answer,
            deadline,
            timer: None,
        };
        if starts && is_by_turns {
            turns::request(line, number, deadline);
        } else if starts {
            checks::start(line, 0);
        }
        Ok(acquire)
    }

    /// Calls `act` with all lines. Then removes the lines with these ids if they are empty.
    fn with<T>(&self, ids: &[LineId], act: impl FnOnce(&mut Lines) -> T) -> T {
        let lines = &mut *lock(&self.shared.lines);
        let result = act(lines);
        for id in ids {
            let has_ended = |line: &Line| !line.is_used() && line.checks.is_none();
            if lines.each.get(id).is_some_and(has_ended) {
                lines.each.remove(id);
            }
        }
        self.shared.count.store(lines.each.len(), Ordering::Release);
        result
    }
}

impl LineRef {
    fn of(&self, id: LineId) -> Self {
        Self { id, ..self.clone() }
    }

    fn any_cost(&self) -> Self {
        self.of(self.id.any_cost())
    }

    /// Calls `act` with the line.
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> T {
        let of_lines = |lines: &mut Lines| act(lines.each.entry(self.id).or_default());
        self.queues.with(&[self.id], of_lines)
    }

    fn send(&self, check: Check) -> Reply {
        (self.queues.shared.send)(check)
    }

    /// The denial before the store has replied: try again when a unit has been freed.
    fn unknown(&self, cost: u32) -> Decision {
        let check = Check::take(self.id.key, &self.policies, cost);
        check.decided(Source::Local, 0, |policy| {
            Verdict::denied(policy.quota().time_for(1))
        })
    }
}

/// Starts a task of a line. It is polled once now: if the store replies immediately, callers that poll only once get
/// their permit. If the runtime drops the task before its end, the waiters of the line fail.
fn spawn(line: LineRef, task: impl Future<Output = ()> + Send + 'static) {
    struct Unfinished(Option<LineRef>);

    impl Drop for Unfinished {
        fn drop(&mut self) {
            let ended = self.0.take().map(|line| line.with(mem::take));
            drop(ended);
        }
    }

    let unfinished = Unfinished(Some(line));
    let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let mut unfinished = unfinished;
        task.await;
        unfinished.0 = None;
    });
    let mut context = Context::from_waker(Waker::noop());
    if task.as_mut().poll(&mut context).is_pending() {
        tokio::spawn(task);
    }
}

impl LineId {
    /// The line by checks.
    fn new(runtime: &Handle, key: &Key, policies: &Policies) -> Self {
        let mut hasher = DefaultHasher::new();
        for policy in policies {
            (policy.id(), policy.kind(), policy.quota()).hash(&mut hasher);
        }
        Self {
            runtime: runtime.id(),
            key: *key,
            policies: hasher.finish(),
            cost: None,
        }
    }

    fn of_cost(self, cost: u32) -> Self {
        let cost = Some(cost);
        Self { cost, ..self }
    }

    fn any_cost(self) -> Self {
        let cost = None;
        Self { cost, ..self }
    }
}

impl Acquire {
    /// The runtime of its line.
    pub(crate) fn runtime(&self) -> Id {
        self.line.id.runtime
    }

    /// The lines in which it may wait. A waiter may have moved to another line.
    fn ids(&self) -> [LineId; 2] {
        let id = self.line.id;
        [id.of_cost(self.cost), id.any_cost()]
    }

    /// Leaves the line, if that has not happened.
    fn leave(&mut self) {
        let Some(number) = self.number.take() else {
            return;
        };
        let ids = self.ids();
        let left = self.line.queues.with(&ids, |lines| {
            lines.leave(&self.line.id.key);
            lines.find(&ids, |line| line.remove(number))
        });
        drop(left);
    }

    /// Returns the denial when it is certain that the permit is too late.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<Decision> {
        loop {
            let (Some(deadline), Some(number)) = (self.deadline, self.number) else {
                return Poll::Pending;
            };
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            ready!(timer.as_mut().poll(cx));
            let now = instant();
            let late = now.saturating_duration_since(deadline);
            timer.as_mut().reset(now + late.max(LATE));
            let ids = self.ids();
            let expire = |line: &mut Line| Some((line.expire(number, now)?, line.denial(now)));
            let expired = self
                .line
                .queues
                .with(&ids, |lines| lines.find(&ids, expire));
            if let Some((_, denial)) = expired {
                let unknown = || self.line.unknown(self.cost);
                return Poll::Ready(denial.unwrap_or_else(unknown));
            }
        }
    }
}

impl Future for Acquire {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        // `poll` would not return a received answer if the task has used up its budget.
        let answer = match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Closed) => None,
            Err(TryRecvError::Empty) => match Pin::new(&mut self.answer).poll(cx) {
                Poll::Ready(answer) => answer.ok(),
                Poll::Pending => Some(Err(Refusal::Denied(ready!(self.poll_deadline(cx))))),
            },
        };
        self.leave();
        // Without an answer, the runtime of its line has ended.
        Poll::Ready(answer.unwrap_or_else(|| Err(Refusal::no_runtime())))
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        // Dropping the receiver drops a received permit, which passes to the next waiter.
        self.leave();
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues")
            .field("waiting", &lock(&self.shared.lines).all)
            .finish_non_exhaustive()
    }
}
