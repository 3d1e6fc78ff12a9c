//! Wait queues: requests that would be denied wait in FIFO order, and get a [`Permit`].
//!
//! - A [`Line`] has the waiters of one runtime, caller and list of policies. If the policies refill gradually, they also
//!   have the same cost. A waiter never changes its line. The lines are behind one lock, with the turns that no waiter has
//!   yet, and with the numbers of waiters, which are [bounded](Bounds).
//! - A line exists as long as its [`Task`], which sends checks to the store and answers the waiters. Requests only join and leave.
//! - An [`Acquire`] is the future of a waiting request. It receives the answer: a permit, a denial or an error.
//!
//! A task serves its line in one of two ways. Both give a permit that is due to the first waiter:
//!
//! - **By turns**, if the policies refill gradually. For each waiter, a turn is taken ahead immediately: the store charges
//!   it and reports when it is due. So the queue of all instances is in the store, and no round trip limits the rate.
//!   Turns of a line are interchangeable. If a waiter leaves, the last turn is refunded. The store rejects that if a later
//!   turn of another instance depends on it; then the turn serves the next waiter that joins before it is due, or expires.
//! - **By checks**, under other policies, and while the store reserves no turns or fails. One check at a time is sent for
//!   the first waiters that have no turn, and immediately in a new line. After a denial the next one follows when its wait
//!   has passed, or when capacity was freed in this process. When the store reserves turns again, the others get theirs.
//!
//! Special cases:
//!
//! - **A request is dropped.** It leaves its line, and the task gets the reply that was meant for it. A permit that
//!   is dropped unused goes to the first waiter if that has its cost; otherwise it is refunded.
//! - **A reply is lost.** The waiter that it was for fails, if it still waits, and the line is served by checks, the first
//!   one 100 ms later. After three failures in a row, each waiter without a turn fails. The charge is not refunded, since
//!   it may not have been made. An empty line stays for a second after a failure, so that requests that try again share
//!   its checks.
//! - **A deadline passes.** The task refuses the waiter, unless a pending reply may serve it. So only a slow store call
//!   delays that. It refuses earlier each waiter that is certain to be too late.
//! - **A runtime ends.** It drops its tasks. With a task its line is removed: the waiters fail, and held turns
//!   are refunded, but not charges whose reply is pending.

mod line;
mod permit;
mod task;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::Instant;

pub(crate) use permit::{Permit, Spent};

use self::line::{Line, Waiter};
use self::task::Task;
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
    /// Number of waiting requests. While it is 0, others skip the lock.
    waiting: AtomicUsize,
}

/// Makes the store report to an observer, and creates an operation queue that does so too.
type Observe = dyn Fn(&Arc<dyn Observer>) -> OpQueue + Send + Sync;

type Reply = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

#[derive(Default)]
struct Lines {
    each: HashMap<LineId, Line>,
    /// Number of waiting requests of each caller.
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
    /// The cost of all its waiters, under policies that refill gradually. Otherwise `None`: they have any cost.
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

/// A reference to a line, which exists only while its task does.
#[derive(Clone)]
struct LineRef {
    queues: WaitQueues,
    policies: Policies,
    id: LineId,
}

/// Resolves to a permit when it is due. Dropping it leaves the line.
pub(crate) struct Acquire {
    line: LineRef,
    /// The number of its waiter. `None` after the wait has ended.
    number: Option<u64>,
    answer: oneshot::Receiver<Answer>,
}

type Answer = Result<Permit, Refusal>;

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
            waiting: AtomicUsize::new(0),
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

    /// Returns `true` if a request with this check must join a line, since others wait in it.
    #[inline]
    pub(crate) fn has_line(&self, check: &Check) -> bool {
        self.shared.waiting.load(Ordering::Acquire) > 0 && self.has_waiters(check)
    }

    fn has_waiters(&self, check: &Check) -> bool {
        let (policies, cost) = (check.policies(), check.cost());
        let Ok(runtime) = Handle::try_current() else {
            return false;
        };
        let id = LineId::new(&runtime, check.key(), policies, cost);
        let never_fits = policies.iter().any(|policy| policy.never_fits(cost));
        let lines = lock(&self.shared.lines);
        let line = lines.each.get(&id);
        !never_fits && line.is_some_and(|line| !line.waiters.is_empty())
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
        let WaitRequest {
            key,
            policies,
            cost,
            deadline,
        } = wanted;
        let id = LineId::new(&runtime, &key, &policies, cost);
        let line = LineRef {
            queues: self.clone(),
            policies,
            id,
        };
        let (number, is_new, answer) = line.join(cost, deadline, denied.as_ref())?;
        let acquire = Acquire {
            line: line.clone(),
            number: Some(number),
            answer,
        };
        if is_new {
            Task::start(line, denied.as_ref());
        }
        Ok(acquire)
    }
}

impl LineRef {
    /// Adds a waiter. Returns its number, whether the line is new and needs a [`Task`], and the receiver of the answer.
    fn join(
        &self,
        cost: u32,
        deadline: Option<Instant>,
        denied: Option<&Decision>,
    ) -> Result<(u64, bool, oneshot::Receiver<Answer>), Refusal> {
        let WaitQueues { shared, bounds, .. } = &self.queues;
        let lines = &mut *lock(&shared.lines);
        let (here, now) = (lines.each.get(&self.id), instant());
        let free_at = denied.and_then(|denied| line::free_at(denied, now));
        let is_late = free_at.zip(deadline).is_some_and(|(at, deadline)| {
            deadline < at && !here.is_some_and(|here| here.has_spare_turn(deadline))
        });
        let of_caller = lines.callers.get(&self.id.key).copied().unwrap_or(0);
        let waiting = shared.waiting.load(Ordering::Acquire);
        if is_late || waiting >= bounds.all || of_caller >= bounds.each {
            let denial = denied.cloned();
            let denial = denial.unwrap_or_else(|| self.denial(here, cost, now));
            return Err(Refusal::Denied(denial));
        }
        shared.waiting.store(waiting + 1, Ordering::Release);
        *lines.callers.entry(self.id.key).or_default() += 1;
        lines.last += 1;
        let is_new = here.is_none();
        let (sender, answer) = oneshot::channel();
        let waiter = Waiter {
            cost,
            deadline,
            answer: sender,
        };
        let line = lines.each.entry(self.id).or_default();
        line.join(lines.last, waiter);
        line.wake.notify.notify_one();
        Ok((lines.last, is_new, answer))
    }

    /// Counts a waiter out, and removes it if it has no answer.
    fn leave(&self, number: u64) {
        let left = {
            let shared = &self.queues.shared;
            let lines = &mut *lock(&shared.lines);
            shared.waiting.fetch_sub(1, Ordering::AcqRel);
            if let Entry::Occupied(mut count) = lines.callers.entry(self.id.key) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
            let line = lines.each.get_mut(&self.id);
            line.and_then(|line| {
                let left = line.remove(number)?;
                line.wake.notify.notify_one();
                Some(left)
            })
        };
        drop(left);
    }

    /// Calls `act` with the line, if it exists: while its task does.
    fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let lines = &mut *lock(&self.queues.shared.lines);
        lines.each.get_mut(&self.id).map(act)
    }

    /// The denial of a waiter. Before a reply of the store: try again when a unit has been freed.
    fn denial(&self, line: Option<&Line>, cost: u32, now: Instant) -> Decision {
        let known = line.and_then(|line| line.denial(now));
        known.unwrap_or_else(|| {
            let check = Check::take(self.id.key, &self.policies, cost);
            check.decided(Source::Local, 0, |policy| {
                Verdict::denied(policy.quota().time_for(1))
            })
        })
    }
}

impl LineId {
    fn new(runtime: &Handle, key: &Key, policies: &Policies, cost: u32) -> Self {
        let mut hasher = DefaultHasher::new();
        for policy in policies {
            (policy.id(), policy.kind(), policy.quota()).hash(&mut hasher);
        }
        // A pause must also hold the requests that wait already, so no turns are reserved under it.
        let mut each = policies.iter();
        let by_turns = each.all(|policy| policy.frees().is_gradual() && !policy.is_pause());
        Self {
            runtime: runtime.id(),
            key: *key,
            policies: hasher.finish(),
            cost: by_turns.then_some(cost),
        }
    }
}

impl Acquire {
    /// The runtime of its line.
    pub(crate) fn runtime(&self) -> Id {
        self.line.id.runtime
    }

    fn leave(&mut self) {
        if let Some(number) = self.number.take() {
            self.line.leave(number);
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
            Err(TryRecvError::Empty) => ready!(Pin::new(&mut self.answer).poll(cx)).ok(),
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
            .field("waiting", &self.shared.waiting.load(Ordering::Acquire))
            .finish_non_exhaustive()
    }
}
