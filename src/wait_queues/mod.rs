//! Wait queues: requests that would be denied wait in FIFO order, in one [`Line`] per runtime, caller and list of
//! policies. Each line has one task, which makes all store calls of the line. A waiter gets a [`Permit`].
//!
//! A line and its permits are in this process's memory; the store has counted the permits already.
//!
//! - **Strategies that refill gradually.** The task ([`turns`]) takes a turn ahead for each waiter immediately: the
//!   store charges it and reports when it is due. So the queue across all instances is in the store, and no round trip
//!   limits the rate. Due units go to the first waiter, even if they were reserved for another. If a waiter leaves, its units
//!   serve the others, and the last turn is refunded. The store rejects the refund if a later turn of another instance
//!   depends on this turn; then a waiter that joins before the turn is due gets it, or it expires.
//! - **Other strategies, and requests in flight.** The task ([`questions`]) takes what the first waiters need. After a
//!   denial it checks again after `retry_after`, or when capacity was freed in this process. A line that reserves turns
//!   becomes such a line when the store denies a turn that would be in time: it reserves none, or none so far ahead.
//! - **Dropped waiters.** The task receives every reply, also for waiters that have left. A permit that is dropped
//!   unused goes to the first waiter if that has the same cost; otherwise it is refunded.
//! - **Deadlines.** A waiter is denied as soon as its turn is certain to be too late. Only a slow store call can delay
//!   that.
//! - **Lost replies and failures.** Each failed call fails one waiter. After [`MAX_FAILURES`] consecutive failures all
//!   waiters of the line fail, and for a short time new ones too. A charge whose reply is lost is not refunded.
//! - **End of a runtime.** A runtime that shuts down drops its tasks, and the waiters of its lines fail.

mod line;
mod permit;
mod questions;
mod reserved;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::Instant;

pub(crate) use permit::{Permit, Spent};

use self::line::{Late, Line, Waiter};
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
    /// Sends refunds, and charges that need no turn.
    refunds: OpQueue,
    /// Tracks the slots of permits under policies of requests in flight. `None` without such policies.
    in_flight: Option<InFlightTracker>,
    bounds: Bounds,
}

struct Shared {
    store: Box<dyn ErasedStore>,
    lines: Mutex<Lines>,
    /// Number of lines. While it is 0, requests skip the lock.
    count: AtomicUsize,
}

/// A type-erased store. A waiter can afford the boxed future.
trait ErasedStore: Send + Sync {
    fn ask(&self, check: Check) -> Reply;
    fn observe(&self, observer: &Arc<dyn Observer>) -> OpQueue;
    fn waiters(&self) -> Option<Waiters>;
}

type Reply = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

impl<S: Store> ErasedStore for S {
    fn ask(&self, check: Check) -> Reply {
        Box::pin(self.check(check))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) -> OpQueue {
        self.backend().observe(observer);
        op_queue(self.clone(), Some(Arc::clone(observer)))
    }

    fn waiters(&self) -> Option<Waiters> {
        self.backend().waiters()
    }
}

#[derive(Default)]
struct Lines {
    each: HashMap<LineId, Line>,
    /// Number of waiters, in all lines and of each caller.
    all: usize,
    callers: HashMap<Key, usize>,
    /// The number of the newest waiter.
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
    /// Whether the line reserves turns until the store has denied one; otherwise it repeats checks.
    reserves: bool,
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

/// A reference to a line, which may have ended.
#[derive(Clone)]
struct LineRef {
    queues: WaitQueues,
    id: LineId,
}

/// A task's reference to its line. The line ends when this is dropped.
struct Place {
    line: LineRef,
    policies: Policies,
    /// Whether the line has ended. Another one may have its id since.
    has_ended: bool,
}

/// Resolves to a permit when it is due. Dropping it leaves the line.
pub(crate) struct Acquire {
    line: LineRef,
    number: u64,
    answer: oneshot::Receiver<Answer>,
}

type Answer = Result<Permit, Refusal>;

/// Number of consecutive failed calls after which all waiters of a line fail, and new ones during [`PAUSE`].
const MAX_FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(250);
/// Resolution of timers.
const TICK: Duration = Duration::from_millis(1);

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

impl WaitRequest {
    /// The denial for a full line: try again when a unit has been freed.
    fn denial(&self) -> Decision {
        let check = Check::take(self.key, &self.policies, self.cost);
        check.decided(Source::Local, 0, |policy| {
            Verdict::denied(policy.quota().time_for(1))
        })
    }
}

impl Lines {
    /// Updates the counts after a line of this caller went from `before` to `now` waiters.
    fn recount(&mut self, key: &Key, before: usize, now: usize) {
        self.all = self.all + now - before;
        match self.of(key) + now - before {
            0 => self.callers.remove(key),
            all => self.callers.insert(*key, all),
        };
    }

    fn of(&self, key: &Key) -> usize {
        self.callers.get(key).copied().unwrap_or(0)
    }
}

impl WaitQueues {
    /// Creates lines for policies without requests in flight.
    pub(crate) fn new(store: impl Store, bounds: Bounds) -> Self {
        let refunds = op_queue(store.clone(), None);
        let shared = Arc::new(Shared {
            store: Box::new(store),
            lines: Mutex::default(),
            count: AtomicUsize::new(0),
        });
        Self {
            shared,
            refunds,
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
            refunds: in_flight.ops().clone(),
            in_flight: Some(in_flight),
            ..self.clone()
        }
    }

    /// Shares the lines, and reports to this observer, as does the store.
    pub(crate) fn observed(&self, observer: &Arc<dyn Observer>) -> Self {
        Self {
            refunds: self.shared.store.observe(observer),
            ..self.clone()
        }
    }

    /// Charges a cost without waiting.
    pub(crate) fn charge(&self, key: Key, policies: &Policies, cost: u32) {
        self.refunds.put(PendingOp::charge(key, policies, cost));
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
        let id = LineId::of(&runtime, key, policies, cost);
        let lines = lock(&self.shared.lines);
        lines.each.get(&id).is_some_and(Line::is_used)
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
        self.refunds.wake();
        let id = LineId::of(&runtime, &wanted.key, &wanted.policies, wanted.cost);
        let (sender, answer) = oneshot::channel();
        let waiter = Waiter::new(wanted.cost, wanted.deadline, sender);
        let (number, is_new) = {
            let lines = &mut *lock(&self.shared.lines);
            let line = lines.each.get(&id);
            let now = instant();
            if lines.all >= self.bounds.all || lines.of(&id.key) >= self.bounds.each {
                let known = line.and_then(|line| line.denial(now));
                let denial = denied.or(known).unwrap_or_else(|| wanted.denial());
                return Err(Refusal::Denied(denial));
            }
            if let Some(refusal) = line.and_then(|line| line.refusal(&waiter, now)) {
                return Err(refusal);
            }
            let is_new = line.is_none();
            let new = || Line::new(!id.reserves, denied, wanted.cost);
            lines.last += 1;
            let line = lines.each.entry(id).or_insert_with(new);
            line.push(lines.last, waiter);
            lines.recount(&id.key, 0, 1);
            (lines.last, is_new)
        };
        let queues = self.clone();
        let line = LineRef { queues, id };
        if is_new {
            line.start(&runtime, wanted.policies);
        }
        Ok(Acquire {
            line,
            number,
            answer,
        })
    }
}

impl LineRef {
    /// Starts the task of a new line.
    fn start(&self, runtime: &Handle, policies: Policies) {
        self.queues.shared.count.fetch_add(1, Ordering::AcqRel);
        let place = Place {
            line: self.clone(),
            policies,
            has_ended: false,
        };
        let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async {
            let mut left = Some(place);
            while let Some(place) = left {
                left = match turns::run(place).await {
                    Some(place) => questions::run(place).await,
                    None => None,
                };
            }
        });
        // Poll once now: if the store replies immediately, callers that poll only once get their permit.
        let mut context = Context::from_waker(Waker::noop());
        if task.as_mut().poll(&mut context).is_pending() {
            runtime.spawn(task);
        }
    }

    /// Calls `act` with the line, or returns `None` if the line has ended.
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let lines = &mut *lock(&self.queues.shared.lines);
        let line = lines.each.get_mut(&self.id)?;
        let before = line.len();
        let result = act(line);
        let now = line.len();
        lines.recount(&self.id.key, before, now);
        Some(result)
    }
}

impl Place {
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        self.line.with(act)
    }

    /// Denies or fails a waiter, if it still waits.
    fn refuse(&self, number: u64, refusal: Refusal) {
        if let Some(waiter) = self.with(|line| line.remove(number)).flatten() {
            waiter.answer(Err(refusal));
        }
    }

    /// Handles a failed call for this waiter.
    fn fail(&self, number: u64, error: &StoreError) {
        let failed = self.with(|line| line.fail(number, error, instant()));
        for waiter in failed.into_iter().flat_map(|(waiters, _)| waiters) {
            waiter.answer(Err(Refusal::Failed(error.clone())));
        }
    }

    /// Refuses waiters that were removed from the line.
    fn refuse_late(&self, late: Option<Late>) {
        if let Some((waiters, refusal)) = late {
            for waiter in waiters {
                waiter.answer(Err(refusal.clone()));
            }
        }
    }

    /// Removes the line if it is idle. Returns `true` if it did.
    fn ends(&mut self) -> bool {
        let ended = {
            let lines = &mut *lock(&self.line.queues.shared.lines);
            match lines.each.get(&self.line.id) {
                Some(line) if line.is_idle(instant()) => lines.each.remove(&self.line.id),
                _ => return false,
            }
        };
        self.has_ended = true;
        self.line.queues.shared.count.fetch_sub(1, Ordering::AcqRel);
        drop(ended);
        true
    }
}

/// If the runtime drops the task, the line ends too, which fails its waiters.
impl Drop for Place {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let Shared { lines, count, .. } = &*self.line.queues.shared;
        let line = {
            let lines = &mut *lock(lines);
            let line = lines.each.remove(&self.line.id);
            if let Some(line) = &line {
                lines.recount(&self.line.id.key, line.len(), 0);
            }
            line
        };
        if line.is_some() {
            count.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl LineId {
    fn of(runtime: &Handle, key: &Key, policies: &Policies, cost: u32) -> Self {
        let mut hasher = DefaultHasher::new();
        for policy in policies {
            (policy.id(), policy.kind(), policy.quota()).hash(&mut hasher);
        }
        let reserves = policies
            .iter()
            .all(|policy| policy.frees().is_gradual() && !policy.is_pause());
        Self {
            runtime: runtime.id(),
            key: *key,
            policies: hasher.finish(),
            // A cost of 0 needs no turn. A pause must also hold the requests that wait already, so no turn may be
            // reserved under it.
            reserves: reserves && cost > 0,
        }
    }
}

impl Acquire {
    /// The runtime of its line.
    pub(crate) fn runtime(&self) -> Id {
        self.line.id.runtime
    }
}

impl Future for Acquire {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        // `poll` would not return a received answer if the task has used up its budget.
        let answer = match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) => ready!(Pin::new(&mut self.answer).poll(cx)).ok(),
            Err(TryRecvError::Closed) => None,
        };
        // Without an answer, the line has ended with its runtime.
        Poll::Ready(answer.unwrap_or_else(|| Err(Refusal::no_runtime())))
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        // Dropping the receiver drops a received permit, which passes to the next waiter.
        self.line.with(|line| line.remove(self.number));
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues")
            .field("waiting", &lock(&self.shared.lines).all)
            .finish_non_exhaustive()
    }
}
