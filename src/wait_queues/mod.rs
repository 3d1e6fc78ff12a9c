//! Requests that wait for their turn. Those that wait for one caller under the same policies are a [`Line`], first come,
//! first served, with one task. A [`Permit`] is what a waiter gets.
//!
//! **Buckets that refill gradually reserve.** The task ([`turns`]) takes ahead for each waiter as it comes: the store charges
//! it and says when it is due. So the queue over all instances is in the store, and no round trip limits the rate. What is
//! due goes to the first in line, whoever it was reserved for. Who leaves makes the last turn superfluous. The store refunds
//! that, unless a later turn of another instance stands on it. Then the next waiter who comes before it is due gets it;
//! otherwise it expires.
//!
//! **All others ask.** The task ([`questions`]) takes as much as the first ones need, and after a denial asks again when the
//! denial says so, such that the question arrives then, or when something was freed in this process.
//!
//! **Nothing is lost.** The task receives every reply, whoever has left meanwhile. A permit that is dropped unused goes to
//! the first in line, or back to the store.
//!
//! **No wait is longer than its maximum**, but for the store's calls. A waiter is refused as soon as it is known that its
//! turn comes too late.
//!
//! **A store that fails** ends one wait with each failed call, and all waits of a line when [`MAX_FAILURES`] calls have
//! failed in a row.
//!
//! **A runtime that ends** drops the tasks on it, which ends the waits: each runtime has lines of its own.

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

/// The lines of all callers. Clones share them.
#[derive(Clone)]
pub(crate) struct WaitQueues {
    shared: Arc<Shared>,
    /// Sends refunds, and charges without a wait.
    refunds: OpQueue,
    /// The slots of permits under policies of requests in flight. `None` where there are no such policies.
    in_flight: Option<InFlightTracker>,
    bounds: Bounds,
}

struct Shared {
    store: Box<dyn ErasedStore>,
    lines: Mutex<Lines>,
    /// Number of lines: while it is 0, no request looks for one.
    count: AtomicUsize,
}

/// A store of any type: a waiter has the time for a box.
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
        Store::observe(self, observer);
        op_queue(self.clone(), Some(Arc::clone(observer)))
    }

    fn waiters(&self) -> Option<Waiters> {
        Store::waiters(self)
    }
}

#[derive(Default)]
struct Lines {
    each: HashMap<LineId, Line>,
    /// Number of all waiters, and of those of each caller.
    all: usize,
    callers: HashMap<Key, usize>,
    /// The number of the last waiter.
    last: u64,
}

/// How many may wait: for one caller, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) each: usize,
    pub(crate) all: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LineId {
    runtime: Id,
    key: Key,
    /// A hash of all that the policies say: nobody waits behind those of a quota that was replaced.
    policies: u64,
    /// Whether it reserves turns; otherwise it asks.
    reserves: bool,
}

/// A request that is to wait.
#[derive(Debug, Clone)]
pub(crate) struct WaitRequest {
    pub(crate) key: Key,
    pub(crate) policies: Policies,
    pub(crate) cost: u32,
    /// Until when to wait. `None`: for as long as it takes.
    pub(crate) deadline: Option<Instant>,
}

/// Why there is no permit.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// It would take too long, or too many wait.
    Denied(Decision),
    Failed(StoreError),
}

/// A line, which may have ended.
#[derive(Clone)]
struct LineRef {
    shared: Arc<Shared>,
    refunds: OpQueue,
    id: LineId,
}

/// The line of a task, which ends with it.
struct Place {
    line: LineRef,
    policies: Policies,
    queues: WaitQueues,
    /// Whether the line has ended: another one may have its id by now.
    has_ended: AtomicBool,
}

/// Resolves to a permit when its turn has come. Dropped, it leaves the line.
pub(crate) struct Acquire {
    line: LineRef,
    number: u64,
    answer: oneshot::Receiver<Answer>,
}

type Answer = Result<Permit, Refusal>;

/// As many failed calls in a row end all waits of a line, and those that begin in the next [`PAUSE`].
const MAX_FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(250);
/// Pause of a line that asks after a failed call.
const FAILURE_PAUSE: Duration = Duration::from_millis(50);

impl Refusal {
    /// The store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, StoreError> {
        match self {
            Self::Denied(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }

    fn no_runtime() -> Self {
        Self::Failed(StoreError::new(ErrorKind::NoRuntime).of_check())
    }
}

impl Bounds {
    /// Where one key is mostly that of all.
    pub(crate) const DEFAULT: Self = Self {
        each: 10_000,
        all: 10_000,
    };

    /// The same bound for one caller and for all.
    pub(crate) const fn of(all: NonZeroUsize) -> Self {
        Self {
            each: all.get(),
            all: all.get(),
        }
    }
}

impl WaitRequest {
    /// The denial of a request for which there is no place: to come again when a unit has been freed.
    fn denial(&self) -> Decision {
        let check = Check::take(self.key, &self.policies, self.cost);
        check.decided(Source::Local, 0, |policy| {
            Verdict::denied(policy.quota().time_for(1))
        })
    }
}

impl Lines {
    /// Counts the waiters of a caller again, of whom a line had `before`, and has `now`.
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
    /// Lines for policies of which none counts requests in flight.
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

    /// The same lines, in which as many may wait.
    pub(crate) fn with_bounds(&self, bounds: Bounds) -> Self {
        Self {
            bounds,
            ..self.clone()
        }
    }

    /// The same lines, with the slots and the background queue of this tracker.
    pub(crate) fn with_tracker(&self, in_flight: InFlightTracker) -> Self {
        Self {
            refunds: in_flight.ops().clone(),
            in_flight: Some(in_flight),
            ..self.clone()
        }
    }

    /// The same lines with an observer, which the store gets too.
    pub(crate) fn observed(&self, observer: &Arc<dyn Observer>) -> Self {
        Self {
            refunds: self.shared.store.observe(observer),
            ..self.clone()
        }
    }

    /// Charges without a wait.
    pub(crate) fn charge(&self, key: Key, policies: &Policies, cost: u32) {
        self.refunds.put(PendingOp::charge(key, policies, cost));
    }

    /// Whether a request of this caller has to wait, since others do, or a turn is left for it.
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

    /// Waits for a permit. `denied` is what the store has just said, if it was asked. A cost that never fits must not wait:
    /// others would wait behind it.
    ///
    /// # Errors
    ///
    /// [`Refusal`], if it is certain already that there is no permit in time, or if too many wait.
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

    /// Puts a waiter into a line, and starts the line's task if it has none.
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
        // A store that answers immediately is asked now, for callers that poll only once.
        let mut context = Context::from_waker(Waker::noop());
        if task.as_mut().poll(&mut context).is_pending() {
            runtime.spawn(task);
        }
    }
}

impl LineRef {
    /// Calls `act` with the line, if there is one.
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let lines = &mut *lock(&self.shared.lines);
        let line = lines.each.get_mut(&self.id)?;
        let before = line.len();
        let result = act(line);
        let now = line.len();
        lines.recount(&self.id.key, before, now);
        Some(result)
    }

    /// Gives permits to those who were taken out of the line, and refunds what is left.
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

    /// Refunds turns that nobody in line needs, the last one first. If a later turn of another instance stands on one, the
    /// line keeps it for whoever comes next.
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

    /// Answers a waiter, if it still waits.
    fn refuse(&self, number: u64, refusal: Refusal) {
        if let Some(waiter) = self.with(|line| line.remove(number)).flatten() {
            waiter.answer(Err(refusal));
        }
    }

    /// A call for this waiter has failed.
    fn fail(&self, number: u64, error: &StoreError) {
        let failed = self.with(|line| line.fail(number, error, instant()));
        for waiter in failed.into_iter().flat_map(|(waiters, _)| waiters) {
            waiter.answer(Err(Refusal::Failed(error.clone())));
        }
    }

    /// Removes the line if nobody uses it, and returns whether it has.
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

/// With its runtime, the task ends before the line does.
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
            // Nothing is reserved for a cost of 0. A pause must hold those who wait already.
            reserves: reserves && cost > 0,
        }
    }

    /// The line of those for whom no turn could be reserved.
    fn that_asks(self) -> Self {
        Self {
            reserves: false,
            ..self
        }
    }
}

impl Acquire {
    /// The runtime on which its line is.
    pub(crate) fn runtime(&self) -> Id {
        self.line.id.runtime
    }
}

impl Future for Acquire {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        // A task that has used up its budget would not receive what is there.
        let answer = match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) => ready!(Pin::new(&mut self.answer).poll(cx)).ok(),
            Err(TryRecvError::Closed) => None,
        };
        // Without an answer the line has ended with its runtime.
        Poll::Ready(answer.unwrap_or_else(|| Err(Refusal::no_runtime())))
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        // A permit that is in the receiver is handed on with it.
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
