//! Wait queues: requests that would be denied wait in FIFO order, in one [`Line`] per runtime, caller and list of
//! policies. Each line has one task, which makes all store calls of the line. A waiter gets a [`Permit`].
//!
//! A line and its permits are in this process's memory; the store has counted the permits already.
//!
//! - **Strategies that refill gradually.** The task ([`turns`]) takes a turn ahead for each waiter immediately: the
//!   store charges it and reports when it is due. So the queue across all instances is in the store, and no round trip
//!   limits the rate. Each due turn goes to the first waiter, also if it was reserved for another. If a waiter leaves,
//!   the last turn is refunded. The store rejects the refund if a later turn of another instance depends on this turn;
//!   then a waiter that joins before the turn is due gets it, or it expires.
//! - **Other strategies, and requests in flight.** The task ([`questions`]) takes what the first waiters need. After a
//!   denial it checks again after `retry_after`, or when capacity was freed in this process.
//! - **Dropped waiters.** The task receives every reply, also for waiters that have left. A permit that is dropped
//!   unused goes to the first waiter, or is refunded.
//! - **Deadlines.** A waiter is denied as soon as its turn is certain to be too late. Only a slow store call can delay
//!   that.
//! - **Lost replies and failures.** Each failed call fails one waiter. After [`MAX_FAILURES`] consecutive failures all
//!   waiters of the line fail, and for a short time new ones too. A charge whose reply is lost is not refunded.
//! - **End of a runtime.** A runtime that shuts down drops its tasks, and the waiters of its lines fail.

mod line;
mod permit;
mod questions;
mod turns;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::Instant;

pub(crate) use permit::{Permit, Spent};

use self::line::{Given, Line, Waiter};
use self::questions::Questions;
use self::turns::Turns;
use crate::background::{OpQueue, PendingOp};
use crate::error::{ErrorKind, StoreError};
use crate::in_flight::{InFlightTracker, Slot};
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
    /// Whether the line reserves turns ([`Turns`]); otherwise it repeats checks ([`Questions`]).
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
    shared: Arc<Shared>,
    refunds: OpQueue,
    id: LineId,
}

/// A task's reference to its line. The line ends when this is dropped.
struct Place {
    line: LineRef,
    policies: Policies,
    queues: WaitQueues,
    /// Whether the line has ended. Another one may have its id since.
    has_ended: AtomicBool,
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
/// Pause of a [`Questions`] line after a failed call.
const FAILURE_PAUSE: Duration = Duration::from_millis(50);

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
        let number = {
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
            lines.last += 1;
            lines.last
        };
        self.enter(&runtime, id, wanted.policies, number, waiter, denied);
        Ok(Acquire {
            line: self.line(id),
            number,
            answer,
        })
    }

    fn line(&self, id: LineId) -> LineRef {
        LineRef {
            shared: Arc::clone(&self.shared),
            refunds: self.refunds.clone(),
            id,
        }
    }

    /// Adds a waiter to a line, and starts the line's task if the line is new.
    fn enter(
        &self,
        runtime: &Handle,
        id: LineId,
        policies: Policies,
        number: u64,
        waiter: Waiter,
        denied: Option<Decision>,
    ) {
        let is_new = {
            let lines = &mut *lock(&self.shared.lines);
            let is_new = !lines.each.contains_key(&id);
            let line = lines.each.entry(id).or_insert_with(|| Line::new(denied));
            line.push(number, waiter);
            lines.recount(&id.key, 0, 1);
            is_new
        };
        if !is_new {
            return;
        }
        self.shared.count.fetch_add(1, Ordering::AcqRel);
        let place = Place {
            line: self.line(id),
            policies,
            queues: self.clone(),
            has_ended: AtomicBool::new(false),
        };
        let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = if id.reserves {
            Box::pin(Turns::new(place).run())
        } else {
            Box::pin(Questions::new(place).run())
        };
        // Poll once now: if the store replies immediately, callers that poll only once get their permit.
        let mut context = Context::from_waker(Waker::noop());
        if task.as_mut().poll(&mut context).is_pending() {
            runtime.spawn(task);
        }
    }
}

impl LineRef {
    /// Calls `act` with the line, or returns `None` if the line has ended.
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let lines = &mut *lock(&self.shared.lines);
        let line = lines.each.get_mut(&self.id)?;
        let before = line.len();
        let result = act(line);
        let now = line.len();
        lines.recount(&self.id.key, before, now);
        Some(result)
    }

    /// Sends permits to waiters that were removed from the line, and refunds the rest.
    fn deliver(&self, Given { to, left }: Given, mut slot: Option<Slot>) {
        for (waiter, charge) in to {
            let permit = Permit::new(self.clone(), charge, slot.take());
            waiter.answer(Ok(permit));
        }
        if let Some(left) = left {
            self.refunds.put(left.refund());
        }
        self.refund_superfluous();
    }

    /// Refunds turns that no waiter needs, the last one first. If a later turn of another instance depends on one, the
    /// line keeps it for the next waiter.
    fn refund_superfluous(&self) {
        while let Some((number, charge)) = self.with(Line::superfluous).flatten() {
            let (line, kept) = (self.clone(), charge.clone());
            self.refunds.put(charge.refund().then(move |answer| {
                let stays = answer.is_ok_and(|decision| decision.granted() == 0);
                line.with(|line| line.refunded(number, kept, stays));
                line.refund_superfluous();
            }));
        }
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

    /// Removes the line if it is idle. Returns `true` if it did.
    fn ends(&self) -> bool {
        let ended = {
            let lines = &mut *lock(&self.line.shared.lines);
            match lines.each.get(&self.line.id) {
                Some(line) if line.is_idle(instant()) => lines.each.remove(&self.line.id),
                _ => return false,
            }
        };
        self.has_ended.store(true, Ordering::Relaxed);
        self.line.shared.count.fetch_sub(1, Ordering::AcqRel);
        drop(ended);
        true
    }
}

/// If the runtime drops the task, the line ends too, which fails its waiters.
impl Drop for Place {
    fn drop(&mut self) {
        if *self.has_ended.get_mut() {
            return;
        }
        let line = {
            let lines = &mut *lock(&self.line.shared.lines);
            let line = lines.each.remove(&self.line.id);
            if let Some(line) = &line {
                lines.recount(&self.line.id.key, line.len(), 0);
            }
            line
        };
        if line.is_some() {
            self.line.shared.count.fetch_sub(1, Ordering::AcqRel);
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

    /// The line for waiters that could not reserve a turn.
    fn that_asks(self) -> Self {
        Self {
            reserves: false,
            ..self
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
        let asks = LineRef {
            id: self.line.id.that_asks(),
            ..self.line.clone()
        };
        for line in [&self.line, &asks] {
            if let Some(Some(_)) = line.with(|line| line.remove(self.number)) {
                return line.refund_superfluous();
            }
        }
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues")
            .field("waiting", &lock(&self.shared.lines).all)
            .finish_non_exhaustive()
    }
}
