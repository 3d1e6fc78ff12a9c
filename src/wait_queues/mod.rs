//! Wait queues: requests that would be denied wait in FIFO order, and get a [`Permit`].
//!
//! - A [`Queue`] has the waiters of one runtime, caller and list of policies. If the policies refill gradually, they also
//!   have the same cost. A waiter never changes its queue. The queues are behind one lock, with the turns, and with the
//!   numbers of waiters, which are [bounded](Bounds). A turn is a granted permit that no waiter has yet.
//! - A queue exists as long as its [`QueueTask`], which sends checks to the store and answers the waiters. Requests only join and leave.
//! - An [`Acquire`] is the future of a waiting request. It receives the answer: a permit, a denial or an error.
//!
//! A task serves its queue in one of two ways. Both add turns, and each due turn goes to the first waiter:
//!
//! - **By turns**, if the policies refill gradually. For each waiter, a turn is taken ahead immediately: the store charges
//!   it and reports when it is due. So the queue of all instances is in the store, and no round trip limits the rate.
//!   Turns of a queue are interchangeable. If a waiter leaves, the last turn is refunded. The store rejects that if
//!   there is a later one; then the turn serves the next waiter that joins before it is due, or expires.
//! - **By checks**, under other policies, and while the store reserves no turns or fails. One batch of checks at a time is
//!   sent, for the first waiters that have no turn, and immediately in a new queue. After a denial the next one follows
//!   when its wait has passed, or when capacity was freed in this process. If the policies refill gradually, the checks
//!   are takes ahead: when one is granted for later, all waiters get turns again.
//!
//! Special cases:
//!
//! - **A request is dropped.** It leaves its queue, and the task gets the reply that was meant for it. A permit that
//!   is dropped unused goes to the first waiter if that has its cost; otherwise it is refunded.
//! - **A reply is lost.** The waiter that it was for fails, if it still waits, and the queue is served by checks, the first
//!   one 100 ms later. After three failures in a row, each waiter without a turn fails. The charge is not refunded, since
//!   it may not have been made. An empty queue stays for another second, so that requests that try again share its checks.
//! - **A deadline passes.** The task refuses the waiter, unless a pending reply may serve it; by checks, the last one is
//!   sent at the deadline, unless checks fail. So only slow store calls delay that. A waiter without a turn is refused
//!   earlier if its cost or a smaller one was denied for longer. The call that reserves a turn extends the wait by its
//!   own time.
//! - **A runtime ends.** It drops its tasks. With a task its queue is removed: the waiters fail, and held turns
//!   are refunded when another runtime uses the queues, but not charges whose reply is pending.

mod permit;
mod queue;
mod task;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;
use tokio::task::unconstrained;
use tokio::time::Instant;

pub(crate) use permit::{Permit, Spent};

use self::queue::{Queue, Waiter};
use self::task::QueueTask;
use crate::background::{OpQueue, PendingOp};
use crate::error::{ErrorKind, StoreError};
use crate::held_slots::InFlightTracker;
use crate::limit::{Check, Decision, Key, Policies, RateLimited, Source, Verdict};
use crate::observe::Observer;
use crate::settle::ReserveError;
use crate::store::{Store, Waiters, op_queue};
use crate::util::{instant, lock};

/// The queues of all callers. Clones share the queues.
#[derive(Clone)]
pub(crate) struct WaitQueues {
    shared: Arc<SharedQueues>,
    /// Sends refunds, and charges that need no permit.
    ops: OpQueue,
    /// Tracks the slots of permits under policies of requests in flight. `None` in a throttle, whose calls take no slots.
    in_flight: Option<InFlightTracker>,
    bounds: Bounds,
}

struct SharedQueues {
    /// The store's methods. A waiter can afford the boxed future.
    send: Box<dyn Fn(Check) -> BoxedReply + Send + Sync>,
    observe: Box<Observe>,
    waiters: Option<Waiters>,
    queues: Mutex<Queues>,
    /// Number of waiting requests. Each counts until its [`Acquire`] has received the answer or is dropped, even if the task
    /// has removed its waiter. While it is 0, others skip the lock.
    waiting: AtomicUsize,
}

/// Makes the store report to an observer, and creates an operation queue that does so too.
type Observe = dyn Fn(&Arc<dyn Observer>) -> OpQueue + Send + Sync;

type BoxedReply = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

#[derive(Default)]
struct Queues {
    by_id: HashMap<QueueId, Queue>,
    /// Number of waiting requests of each caller, counted in the same way.
    callers: HashMap<Key, usize>,
    /// The number of the newest waiter.
    last: u64,
}

/// Maximum numbers of waiting requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    pub(crate) per_caller: usize,
    pub(crate) total: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QueueId {
    runtime: Id,
    key: Key,
    /// A hash of the policies with their quotas, so that a replaced quota gets a separate queue.
    policies: u64,
    takes: Takes,
}

/// The takes that a task sends for single waiters. Whichever it is, a grant becomes a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Takes {
    /// [Takes ahead](Check::take_ahead), under policies that refill gradually: the store may reserve a turn for later. All
    /// waiters have this cost.
    Ahead { cost: u32 },
    /// Plain takes, which grant a turn for now or deny it. The waiters have any cost.
    Now,
}

/// The reason for a missing permit.
#[derive(Debug, Clone)]
pub(crate) enum NoPermit {
    /// The wait would be too long.
    Denied(Decision),
    /// Too many requests wait.
    Full(Decision),
    Failed(StoreError),
}

/// A reference to a queue, which exists only while its task does.
#[derive(Clone)]
struct QueueRef {
    queues: WaitQueues,
    policies: Policies,
    id: QueueId,
}

/// A waiter that has joined a queue.
struct Added {
    number: u64,
    /// Whether the queue is new, and has no [`QueueTask`] yet.
    needs_task: bool,
}

/// Resolves to a permit when it is due. Dropping it leaves the queue.
pub(crate) struct Acquire {
    queue_ref: QueueRef,
    /// The number of its waiter. `None` after the wait has ended.
    number: Option<u64>,
    answer: oneshot::Receiver<Answer>,
    /// The permit, while a [service](Self::poll_with) is not ready.
    permit: Option<Permit>,
}

type Answer = Result<Permit, NoPermit>;

impl NoPermit {
    /// Converts it to a store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, StoreError> {
        match self {
            Self::Denied(decision) | Self::Full(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }

    fn no_runtime() -> Self {
        Self::Failed(StoreError::new(ErrorKind::NoRuntime).check_only())
    }
}

impl From<NoPermit> for ReserveError {
    fn from(no_permit: NoPermit) -> Self {
        match no_permit {
            NoPermit::Denied(decision) | NoPermit::Full(decision) => {
                Self::Denied(RateLimited::new(decision))
            }
            NoPermit::Failed(error) => Self::Failed(error),
        }
    }
}

impl Bounds {
    /// One bound for both, because many services use a single key.
    pub(crate) const DEFAULT: Self = Self {
        per_caller: 10_000,
        total: 10_000,
    };

    /// One bound for each caller and in all.
    pub(crate) const fn of(max: NonZeroUsize) -> Self {
        Self {
            per_caller: max.get(),
            total: max.get(),
        }
    }
}

impl WaitQueues {
    /// Creates queues for policies without requests in flight.
    pub(crate) fn new(store: impl Store, bounds: Bounds) -> Self {
        let checked = store.clone();
        let observed = store.clone();
        let shared = SharedQueues {
            send: Box::new(move |check| Box::pin(checked.check(check))),
            observe: Box::new(move |observer| {
                observed.backend().observe(observer);
                op_queue(observed.clone(), Some(Arc::clone(observer)))
            }),
            waiters: store.backend().waiters(),
            queues: Mutex::default(),
            waiting: AtomicUsize::new(0),
        };
        Self {
            shared: Arc::new(shared),
            ops: op_queue(store, None),
            in_flight: None,
            bounds,
        }
    }

    /// Shares the queues, with other bounds.
    pub(crate) fn with_bounds(&self, bounds: Bounds) -> Self {
        Self {
            bounds,
            ..self.clone()
        }
    }

    /// Shares the queues, and uses the slots and the operation queue of this tracker.
    pub(crate) fn with_tracker(&self, in_flight: InFlightTracker) -> Self {
        Self {
            ops: in_flight.ops().clone(),
            in_flight: Some(in_flight),
            ..self.clone()
        }
    }

    /// Shares the queues, and reports to this observer, as does the store.
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

    /// Returns `true` if a request with this check must join a queue, since others wait in it.
    #[inline]
    pub(crate) fn has_queue(&self, check: &Check) -> bool {
        self.shared.waiting.load(Ordering::Acquire) > 0 && self.has_waiters(check)
    }

    fn has_waiters(&self, check: &Check) -> bool {
        let Ok(runtime) = Handle::try_current() else {
            return false;
        };
        let mut policies = check.policies().iter();
        if policies.any(|policy| policy.never_fits(check.cost())) {
            return false;
        }
        let queues = lock(&self.shared.queues);
        match queues.by_id.get(&QueueId::new(&runtime, check)) {
            Some(queue) => !queue.waiters.is_empty(),
            None => false,
        }
    }

    /// Joins the queue of this take, until the deadline or forever. `denied` is the denial of the store, if the request
    /// was checked. The cost must fit the policies: otherwise the others would wait behind it forever.
    ///
    /// # Errors
    ///
    /// [`NoPermit`] if the permit is certain to be too late, or if too many requests wait.
    pub(crate) fn join(
        &self,
        take: &Check,
        deadline: Option<Instant>,
        denied: Option<Decision>,
    ) -> Result<Acquire, NoPermit> {
        let Ok(runtime) = Handle::try_current() else {
            return Err(NoPermit::no_runtime());
        };
        // Restart the sender if its runtime has shut down.
        self.ops.wake();
        let queue_ref = QueueRef {
            queues: self.clone(),
            policies: take.policies().clone(),
            id: QueueId::new(&runtime, take),
        };
        let (sender, answer) = oneshot::channel();
        let waiter = Waiter {
            cost: take.cost(),
            deadline,
            answer: sender,
        };
        let added = queue_ref.add(waiter, denied)?;
        let acquire = Acquire {
            queue_ref: queue_ref.clone(),
            number: Some(added.number),
            answer,
            permit: None,
        };
        if added.needs_task {
            // A denied request is checked again, since capacity freed after the denial may not have woken the queue.
            QueueTask::start(queue_ref);
        }
        Ok(acquire)
    }
}

impl QueueRef {
    /// Adds a waiter.
    fn add(&self, waiter: Waiter, denied: Option<Decision>) -> Result<Added, NoPermit> {
        let WaitQueues { shared, bounds, .. } = &self.queues;
        let queues = &mut *lock(&shared.queues);
        let now = instant();
        let existing = queues.by_id.get(&self.id);
        let needs_task = existing.is_none();
        let of_caller = match queues.callers.get(&self.id.key) {
            Some(waiting) => *waiting,
            None => 0,
        };
        let waiting = shared.waiting.load(Ordering::Acquire);
        let is_full = waiting >= bounds.total || of_caller >= bounds.per_caller;
        // In an existing queue, a turn may be left for it.
        if is_full || needs_task && waiter.is_late_after(denied.as_ref(), now) {
            let denied = match denied {
                Some(denied) => denied,
                None => self.denial(existing, waiter.cost, now),
            };
            return Err(if is_full {
                NoPermit::Full(denied)
            } else {
                NoPermit::Denied(denied)
            });
        }
        // Written under the lock only, so no count is lost between the load and this.
        shared.waiting.store(waiting + 1, Ordering::Release);
        *queues.callers.entry(self.id.key).or_default() += 1;
        queues.last += 1;
        let queue = queues.by_id.entry(self.id).or_default();
        queue.add(queues.last, waiter);
        queue.wake.notify.notify_one();
        Ok(Added {
            number: queues.last,
            needs_task,
        })
    }

    /// Counts a request out whose wait has ended, and removes its waiter if the task has not.
    fn count_out(&self, number: u64) {
        let left = {
            let shared = &self.queues.shared;
            let queues = &mut *lock(&shared.queues);
            shared.waiting.fetch_sub(1, Ordering::AcqRel);
            if let Entry::Occupied(mut count) = queues.callers.entry(self.id.key) {
                *count.get_mut() -= 1;
                // Otherwise the map would keep each caller that has ever waited.
                if *count.get() == 0 {
                    count.remove();
                }
            }
            match queues.by_id.get_mut(&self.id) {
                Some(queue) => queue.leave(number),
                None => None,
            }
        };
        // It may have a permit, whose drop takes the lock.
        drop(left);
    }

    /// Calls `act` with the queue, if it exists: while its task does.
    fn with<T>(&self, act: impl FnOnce(&mut Queue) -> T) -> Option<T> {
        let queues = &mut *lock(&self.queues.shared.queues);
        let queue = queues.by_id.get_mut(&self.id)?;
        Some(act(queue))
    }

    /// The denial of a waiter. Before a reply of the store: try again when its cost has been refilled.
    fn denial(&self, queue: Option<&Queue>, cost: u32, now: Instant) -> Decision {
        if let Some(queue) = queue
            && let Some(denial) = queue.denial(cost, now)
        {
            return denial;
        }
        let check = Check::take(self.id.key, &self.policies, cost);
        check.decided(Source::Local, 0, |policy| {
            // A slot in flight may be free at any time.
            let units = if policy.is_in_flight() { 0 } else { cost };
            Verdict::denied(policy.quota().time_for(units.into()))
        })
    }
}

impl QueueId {
    fn new(runtime: &Handle, take: &Check) -> Self {
        // A pause must also hold the requests that wait already, so no turns are reserved under it.
        let mut each = take.policies().iter();
        let takes = if each.all(|policy| policy.frees().is_gradual() && !policy.is_pause()) {
            Takes::Ahead { cost: take.cost() }
        } else {
            Takes::Now
        };
        Self {
            runtime: runtime.id(),
            key: *take.key(),
            policies: take.policies().id(),
            takes,
        }
    }
}

impl Acquire {
    /// The runtime of its queue.
    pub(crate) fn runtime(&self) -> Id {
        self.queue_ref.id.runtime
    }

    /// Waits for the answer. If it is a permit, keeps that until the service is ready.
    pub(crate) fn poll_with<E>(
        &mut self,
        cx: &mut Context<'_>,
        poll_ready: impl FnOnce(&mut Context<'_>) -> Poll<Result<(), E>>,
    ) -> Poll<Result<Answer, E>> {
        let permit = match self.permit.take() {
            Some(permit) => permit,
            None => match ready!(Pin::new(&mut *self).poll(cx)) {
                Ok(permit) => permit,
                Err(no_permit) => return Poll::Ready(Ok(Err(no_permit))),
            },
        };
        match poll_ready(cx)? {
            Poll::Ready(()) => Poll::Ready(Ok(Ok(permit))),
            Poll::Pending => {
                self.permit = Some(permit);
                Poll::Pending
            }
        }
    }

    fn leave(&mut self) {
        if let Some(number) = self.number.take() {
            self.queue_ref.count_out(number);
        }
    }
}

impl Future for Acquire {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        // A received answer is returned even if the task has used up its budget.
        let answer = ready!(Pin::new(&mut unconstrained(&mut self.answer)).poll(cx));
        self.leave();
        match answer {
            Ok(answer) => Poll::Ready(answer),
            // The runtime of its queue has ended.
            Err(_) => Poll::Ready(Err(NoPermit::no_runtime())),
        }
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
