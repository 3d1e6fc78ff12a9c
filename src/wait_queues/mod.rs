//! The order of those who wait for their turn: a queue for each caller, first come, first served.
//!
//! A [`WaitQueue`](queue::WaitQueue) is who waits, a [`Dispatcher`](dispatcher::Dispatcher) is the task that asks the
//! store for all of them, a [`Acquire`] is the future of one of them, and a [`Permit`] is what it gets.
//!
//! **Few calls.** Only the dispatcher asks, for whoever is first, and so takes one permit ahead of time: charged at
//! once, due later. So each process has at most one permit ahead, those of several processes are due one after another,
//! and a call makes a grant. If the last answer says that there is room for more, the next call takes for as many as
//! wait, but only what is there now: another process may have been faster. Of requests in flight each takes its own, so
//! that these are as many calls at once, and fewer after some of them were denied. Where a strategy cannot owe, the
//! dispatcher asks again when the denial says so. A queue that begins takes nothing ahead that is due later than
//! [soon](dispatcher::SOON): whoever wants it may be gone by then.
//!
//! **Nothing is lost.** A permit belongs to the queue, not to who asked for it: if a request gives up, its permit passes
//! on to the next one, and from the last one back to the store. A permit that is dropped unused goes the same
//! way. Before it is due there is no permit yet: if whoever is first wants something else by then, the dispatcher
//! refunds what it took, and asks again. Only a runtime that ends keeps what it has taken ahead.
//! What goes back to the store goes through the queue of [refunds](crate::settle): what was not sent is sent again, and
//! what fails is reported.
//!
//! **Nobody waits for too long.** Whoever's time is up is refused when the store has said that there is no room for
//! them. What is released in this process [wakes](crate::store::Wake) the dispatcher, and for what others refund it
//! looks again now and then.
//!
//! **A store that fails.** A call that fails is reported to whoever is first. The others wait on, until [several in a
//! row](dispatcher::MAX_FAILURES) have failed; whoever comes then gets the same for a while, without a call.

mod acquire;
mod dispatcher;
mod permit;
mod queue;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

pub(crate) use acquire::Acquire;
pub(crate) use permit::{Permit, Spent};

use self::dispatcher::Dispatcher;
use self::queue::{WaitQueue, Waiter};
use crate::background::PendingOp;
use crate::error::{ErrorKind, StoreError};
use crate::in_flight::InFlightTracker;
use crate::limit::{Check, Decision, Key, Policies, Source, Verdict};
use crate::observe::Observer;
use crate::store::Store;
use crate::util::{instant, lock};

/// Who waits for a turn, of all callers. Clones share the queues.
#[derive(Clone)]
pub(crate) struct WaitQueues {
    shared: Arc<SharedQueues>,
    /// What permits hold in flight, and what they are given back by.
    in_flight: InFlightTracker,
    bounds: Bounds,
}

struct SharedQueues {
    store: Box<dyn ErasedStore>,
    queues: Mutex<Queues>,
    /// How many queues there are: while there are none, nobody looks for one.
    count: AtomicUsize,
}

/// A store whose type does not matter: whoever waits has the time for a box.
trait ErasedStore: Send + Sync {
    fn ask(
        &self,
        check: Check,
    ) -> Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;
    fn observe(&self, observer: &Arc<dyn Observer>) -> InFlightTracker;
    fn identity(&self) -> Option<usize>;
}

impl<S: Store> ErasedStore for S {
    fn ask(
        &self,
        check: Check,
    ) -> Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>> {
        Box::pin(self.check(check))
    }

    fn observe(&self, observer: &Arc<dyn Observer>) -> InFlightTracker {
        Store::observe(self, observer);
        InFlightTracker::new(self, Some(Arc::clone(observer)))
    }

    fn identity(&self) -> Option<usize> {
        Store::identity(self)
    }
}

struct Queues {
    each: HashMap<QueueId, WaitQueue>,
    waiting: Waiting,
    /// How many queues were ever made: each has a number.
    made: u64,
}

/// How many wait in all queues.
#[derive(Default)]
struct Waiting {
    all: usize,
    /// For each caller.
    each: HashMap<Key, usize>,
}

/// How many may wait: for one caller, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) each: usize,
    pub(crate) all: usize,
}

/// Where one waits. Each runtime has queues of its own, so that nobody depends on a runtime that has ended or stands
/// still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QueueId {
    runtime: Id,
    key: Key,
    /// Tells policies from others by all that they say: nobody waits behind those of a quota that was replaced.
    policies: u64,
}

/// What one waits for.
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

impl Refusal {
    /// The store's answer.
    pub(crate) fn into_answer(self) -> Result<Decision, StoreError> {
        match self {
            Self::Denied(decision) => Ok(decision),
            Self::Failed(error) => Err(error),
        }
    }
}

impl Bounds {
    /// Where one key is mostly that of all.
    pub(crate) const DEFAULT: Self = Self {
        each: 10_000,
        all: 10_000,
    };

    /// So many, whoever they are.
    pub(crate) const fn of(all: NonZeroUsize) -> Self {
        Self {
            each: all.get(),
            all: all.get(),
        }
    }
}

impl WaitRequest {
    /// Whether it costs more than ever fits: no wait helps.
    pub(crate) fn exceeds_capacity(&self) -> bool {
        self.policies
            .iter()
            .any(|policy| policy.never_fits(self.cost))
    }

    /// What one of too many gets before the store has said anything: to come again when a unit has flowed back.
    fn denial(&self) -> Decision {
        let check = Check::take(self.key, &self.policies, self.cost);
        check.decided(Source::Local, 0, |policy| {
            Verdict::denied(policy.quota().time_for(1))
        })
    }
}

impl Waiting {
    fn of(&self, key: &Key) -> usize {
        self.each.get(key).copied().unwrap_or(0)
    }

    /// So many wait in one queue of this caller where there were `before`.
    fn change(&mut self, key: &Key, before: usize, now: usize) {
        self.all = self.all + now - before;
        match self.of(key) + now - before {
            0 => self.each.remove(key),
            all => self.each.insert(*key, all),
        };
    }
}

impl WaitQueues {
    /// `in_flight` is that of whoever asks the store.
    pub(crate) fn new(store: impl Store, in_flight: InFlightTracker, bounds: Bounds) -> Self {
        let queues = Mutex::new(Queues {
            each: HashMap::new(),
            waiting: Waiting::default(),
            made: 0,
        });
        let count = AtomicUsize::new(0);
        Self {
            shared: Arc::new(SharedQueues {
                store: Box::new(store),
                queues,
                count,
            }),
            in_flight,
            bounds,
        }
    }

    /// The same queues, in which so many may wait.
    pub(crate) fn with_bounds(&self, bounds: Bounds) -> Self {
        Self {
            bounds,
            ..self.clone()
        }
    }

    /// Waits behind those who wait on this runtime already, if anybody does, and if a wait helps.
    pub(crate) fn join_others(&self, wanted: &WaitRequest) -> Option<Result<Acquire, Refusal>> {
        if self.shared.count.load(Ordering::Acquire) == 0 || wanted.exceeds_capacity() {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let id = QueueId::of(&runtime, wanted);
        let Queues { each, waiting, .. } = &mut *lock(&self.shared.queues);
        let queue = each.get_mut(&id)?;
        Some(self.enqueue(queue, waiting, id, wanted.clone()))
    }

    /// The same queues. What they give back is reported to the observer of this tracker if it fails.
    pub(crate) fn with_tracker(&self, in_flight: InFlightTracker) -> Self {
        Self {
            in_flight,
            ..self.clone()
        }
    }

    /// The same queues with an observer, which is handed on to the store.
    pub(crate) fn observed(&self, observer: &Arc<dyn Observer>) -> Self {
        self.with_tracker(self.shared.store.observe(observer))
    }

    /// Charges without asking.
    pub(crate) fn charge(&self, key: Key, policies: &Policies, cost: u32) {
        self.in_flight
            .ops()
            .put(PendingOp::charge(key, policies, cost));
    }

    /// Waits for a permit. `denied` is what the store has just said, if it was asked. What [never
    /// fits](WaitRequest::exceeds_capacity) must not wait: others would wait behind it.
    ///
    /// # Errors
    ///
    /// [`Refusal`], if it is certain already that there is none in time, or if too many wait.
    pub(crate) fn join(
        &self,
        wanted: WaitRequest,
        denied: Option<Decision>,
    ) -> Result<Acquire, Refusal> {
        let runtime = Handle::try_current().map_err(|error| {
            Refusal::Failed(StoreError::with_source(ErrorKind::NoRuntime, error).of_check())
        })?;
        let id = QueueId::of(&runtime, &wanted);
        self.in_flight.ops().wake();
        let (turn, dispatcher) = {
            let Queues {
                each,
                waiting,
                made,
            } = &mut *lock(&self.shared.queues);
            if let Some(queue) = each.get_mut(&id) {
                return self.enqueue(queue, waiting, id, wanted);
            }
            let mut queue = WaitQueue::new(*made, &wanted, denied, instant());
            let policies = wanted.policies.clone();
            let turn = self.enqueue(&mut queue, waiting, id, wanted)?;
            let dispatcher = Dispatcher::new(
                Arc::clone(&self.shared),
                self.in_flight.clone(),
                id,
                &queue,
                policies,
            );
            *made += 1;
            each.insert(id, queue);
            self.shared.count.fetch_add(1, Ordering::AcqRel);
            (turn, dispatcher)
        };
        // What is there is taken at once, without a task. By the waker the dispatcher knows that it is not on one yet: see
        // `Dispatcher::doze`.
        let mut dispatcher = Box::pin(dispatcher.run());
        if dispatcher
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
        {
            // A runtime that has ended drops it: that answers who waits.
            runtime.spawn(dispatcher);
        }
        Ok(turn)
    }

    /// Queues up, if that is not too late and not too many wait.
    fn enqueue(
        &self,
        queue: &mut WaitQueue,
        waiting: &mut Waiting,
        id: QueueId,
        wanted: WaitRequest,
    ) -> Result<Acquire, Refusal> {
        if let Some(error) = queue.failed() {
            return Err(Refusal::Failed(error.clone()));
        }
        let is_full = waiting.all >= self.bounds.all || waiting.of(&id.key) >= self.bounds.each;
        if let Some(decision) = queue.refusal(&wanted, is_full, instant()) {
            return Err(Refusal::Denied(decision));
        }
        let (waiter, answer) = Waiter::new(wanted);
        let before = queue.len();
        let number = queue.push(waiter);
        waiting.change(&id.key, before, queue.len());
        Ok(Acquire {
            shared: Arc::clone(&self.shared),
            id,
            queue: queue.number(),
            number,
            answer,
        })
    }
}

impl QueueId {
    fn of(runtime: &Handle, wanted: &WaitRequest) -> Self {
        let mut policies = DefaultHasher::new();
        for policy in &wanted.policies {
            (policy.id(), policy.kind(), policy.quota()).hash(&mut policies);
        }
        Self {
            runtime: runtime.id(),
            key: wanted.key,
            policies: policies.finish(),
        }
    }
}

impl SharedQueues {
    /// Calls `act` with the queue of this number, if it is still there.
    fn with_queue<T>(
        &self,
        id: &QueueId,
        number: u64,
        act: impl FnOnce(&mut WaitQueue) -> T,
    ) -> Option<T> {
        let queues = &mut *lock(&self.queues);
        let queue = queues
            .each
            .get_mut(id)
            .filter(|queue| queue.number() == number)?;
        let before = queue.len();
        let result = act(queue);
        queues.waiting.change(&id.key, before, queue.len());
        Some(result)
    }

    /// Takes out whoever is first in this queue, if a permit of this cost is what it wants.
    fn pop(&self, id: &QueueId, cost: u32) -> Option<Waiter> {
        let queues = &mut *lock(&self.queues);
        let queue = queues.each.get_mut(id)?;
        let before = queue.len();
        let waiter = queue.pop(cost)?;
        queues.waiting.change(&id.key, before, queue.len());
        Some(waiter)
    }

    /// Takes away the queue of this number, if nobody waits in it or if it `must` go.
    fn remove(&self, id: &QueueId, number: u64, must: bool) -> Option<WaitQueue> {
        let queues = &mut *lock(&self.queues);
        queues
            .each
            .get(id)
            .filter(|queue| queue.number() == number && (must || queue.len() == 0))?;
        let queue = queues.each.remove(id)?;
        queues.waiting.change(&id.key, queue.len(), 0);
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(queue)
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues")
            .field("waiting", &lock(&self.shared.queues).waiting.all)
            .finish_non_exhaustive()
    }
}

/// Tokio's timers have milliseconds; a retry a little too early would be denied for the rest.
const TICK: Duration = Duration::from_millis(1);
