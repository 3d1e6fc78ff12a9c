//! A queue of store operations off the request path: charges, refunds, renewals, releases and leased blocks.
//!
//! | an operation | is owned by | until |
//! |---|---|---|
//! | is in flight | [`Sender`]; before the sender has taken it, and between two senders, `OpWork::new_flights` | its reply, or a panic of the store |
//! | is in flight for a request | a task on the request's runtime | its reply, or the end of that runtime |
//! | is queued, since too many are in flight | `OpWork::queued`, and `OpWork::renewals` | there is room |
//! | waits for a retry | `OpWork::retries` | its time. Then it is queued |
//!
//! [`PendingOp::after_reply`] decides whether an operation is retried, or finished by its callback. An operation that has
//! expired or finds no room is finished without being sent.

mod pending_op;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) use self::pending_op::PendingOp;

use self::pending_op::{AfterReply, Owed};
use self::sender::Sender;
use super::TaskOwner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, JointCheck, JointDecision, Key};
use crate::observe::misses::Misses;
use crate::observe::mistakes::NO_COST;
use crate::observe::{Event, Observer, or_log};
use crate::util::{OnceFlag, OwnCount, contain, instant, lock, polled_after_completion};

/// Sends operations to one store, and reports failures to the observer. Clones share the queue.
///
/// - **Order.** The store gets each operation immediately, so that no later check of the caller overtakes it there. Only if
///   [`MAX_FLIGHTS`] have no reply yet, further ones wait. Renewals use half of that room.
/// - **Retries.** An operation that was certainly not sent is retried until it has expired. If it may have been executed, only a
///   release is retried, because it may be executed twice. See [`PendingOp::after_reply`].
/// - **Reports.** The observer is notified of each operation that is given up, for one of three reasons: it is unsent and
///   has expired, its outcome is unknown, or the queue is full. It is not notified of releases that are given up, since
///   their slots expire, or of operations that are dropped with a runtime or the queue.
/// - **Runtimes.** The sender is a [background task](super). If its runtime shuts down, the operations and pending
///   replies stay in the queue until another operation is [put](Self::put) or a request [wakes](Self::wake) the queue.
///   Outside of a runtime, the sender starts on the first runtime that has used the queue. Only a reply that a request
///   [awaits](Self::send_now) is lost with its runtime.
#[derive(Clone)]
pub(crate) struct OpQueue {
    shared: OwnCount<SharedQueue>,
}

/// A check that was sent to a store.
pub(crate) enum SentCheck {
    Replied(Reply),
    Pending(PendingReply),
}

pub(super) type Reply = Result<Decision, StoreError>;

type PendingReply = Pin<Box<dyn Future<Output = Reply> + Send>>;

type SendCheck = dyn Fn(Check) -> SentCheck + Send + Sync;

/// The reply to a check of several keys.
pub(crate) type PendingJointReply =
    Pin<Box<dyn Future<Output = Result<JointDecision, StoreError>> + Send>>;

type SendJoint = dyn Fn(JointCheck) -> PendingJointReply + Send + Sync;

/// A reference that does not keep the queue alive.
#[derive(Clone)]
pub(crate) struct WeakOpQueue(Weak<SharedQueue>);

struct SharedQueue {
    send_check: Box<SendCheck>,
    /// `None` in tests.
    send_joint: Option<Box<SendJoint>>,
    observer: Option<Arc<dyn Observer>>,
    work: Mutex<OpWork>,
    /// Whether operations or replies are pending. If not, `put` takes no lock before it sends. Written under the lock.
    is_busy: AtomicBool,
    /// Number of operations that a flush waits for.
    owed: Arc<AtomicUsize>,
    /// Number of such operations that were given up.
    lost: AtomicUsize,
    /// Wakes the sender.
    new_work: Notify,
    sender: TaskOwner,
    /// The first runtime that has used the queue.
    first_runtime: OnceLock<Handle>,
    suspected: OnceFlag,
    /// The requests that ended without any cost.
    free: Misses,
}

#[derive(Default)]
struct OpWork {
    /// Operations without room, except renewals.
    queued: VecDeque<PendingOp>,
    /// Renewals without room.
    renewals: VecDeque<PendingOp>,
    /// Operations to retry, by time and number.
    retries: BTreeMap<(Instant, u64), PendingOp>,
    last_retry: u64,
    /// Checks whose replies the next step of the sender starts to await.
    new_flights: Vec<Flight>,
    /// Number of checks without a reply, except those for requests.
    in_flight: usize,
}

/// A sent check without a reply yet, and its operation. Resolves to both.
struct Flight {
    /// `None` after the reply.
    op: Option<PendingOp>,
    reply: PendingReply,
}

impl Future for Flight {
    type Output = (PendingOp, Reply);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // A panic of the store would end the sender, with all other operations.
        let reply = match contain(|| self.reply.as_mut().poll(cx)) {
            Some(polled) => ready!(polled),
            None => Err(panicked()),
        };
        match self.op.take() {
            Some(op) => Poll::Ready((op, reply)),
            None => polled_after_completion("Flight"),
        }
    }
}

/// A step of the sender.
enum Step {
    Send(Vec<PendingOp>),
    /// Wait for a reply or another operation, at most until this time.
    Wait(Option<Instant>),
    End,
}

/// Time for which a sender without work waits for more.
const LINGER: Duration = Duration::from_millis(2);
/// Number of unanswered checks above which operations wait, so that they do not delay requests.
const MAX_FLIGHTS: usize = 1_024;
/// Maximum number of operations that wait for room or for a retry.
const CAPACITY: usize = 100_000;
/// Maximum number of renewals that wait for room.
const MAX_RENEWALS: usize = 1_024;
/// Number of scheduled retries at which a release is dropped instead of retried.
const MAX_RELEASE_RETRIES: usize = 10_000;

impl OpQueue {
    /// Creates a queue that sends no check of several keys.
    #[cfg(test)]
    pub(crate) fn new(
        send_check: impl Fn(Check) -> SentCheck + Send + Sync + 'static,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        Self::with_joint(send_check, None, observer)
    }

    /// Creates the queue of a store. `send_check` sends a check to it, and `send_joint` one of several keys. `observer` is
    /// notified of each failed operation.
    pub(crate) fn with_joint(
        send_check: impl Fn(Check) -> SentCheck + Send + Sync + 'static,
        send_joint: Option<Box<SendJoint>>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        let free = Misses::default();
        if let Some(observer) = &observer {
            free.observe(observer);
        }
        Self::of(Arc::new(SharedQueue {
            send_check: Box::new(send_check),
            send_joint,
            observer,
            work: Mutex::default(),
            is_busy: AtomicBool::new(false),
            owed: Arc::default(),
            lost: AtomicUsize::new(0),
            new_work: Notify::new(),
            sender: TaskOwner::new(),
            first_runtime: OnceLock::new(),
            suspected: OnceFlag::new(),
            free,
        }))
    }

    fn of(shared: Arc<SharedQueue>) -> Self {
        Self {
            shared: OwnCount::new(shared),
        }
    }

    /// Sends an operation, or queues it if too many are in flight.
    pub(crate) fn put(&self, op: PendingOp) {
        if let Some(op) = self
            .shared
            .queue_without_room(op.owed_in(&self.shared.owed))
            && let Some(flight) = self.shared.send(op, instant())
        {
            self.shared.add_flights([flight]);
        }
        self.shared.ensure_sender();
    }

    /// Returns the number of renewals that the queue takes: few, so that a slow store gets the oldest ones first.
    pub(crate) fn renewal_room(&self) -> usize {
        let work = lock(&self.shared.work);
        let room = MAX_RENEWALS.saturating_sub(work.renewals.len());
        room.min(CAPACITY.saturating_sub(work.waiting()))
    }

    /// Notifies the observer, once, of a possible mistake in the use of the charges.
    pub(crate) fn suspect(&self, problem: &str) {
        if self.shared.suspected.claim() {
            or_log(self.shared.observer.as_ref()).notify(&Event::Suspected { problem });
        }
    }

    /// Notifies the observer, once, if all of the first requests ended without any cost. Call it at the end of each request
    /// whose handler determines its cost.
    pub(crate) fn ended(&self, has_cost: bool) {
        let free = &self.shared.free;
        if has_cost {
            return free.found();
        }
        free.missed(|| {
            format!(
                "none of the first {} requests cost anything, so the layer limits nothing: their initial cost is 0, and no handler has \
                 counted one: let it `add`, `set` or `reserve` the cost by a `RequestCost`, or return at least 1 from `.cost(..)`{NO_COST}",
                Misses::REPORT_AT
            )
        });
    }

    /// Notifies the observer that the queue has no room for an operation of this caller.
    pub(crate) fn report_full(&self, key: &Key) {
        self.shared.report(key, &queue_full());
    }

    /// Sends a take immediately, ahead of queued operations, for a request that awaits its callback. A task on the
    /// request's runtime awaits the reply, even if the request stops waiting.
    pub(crate) fn send_now(&self, op: PendingOp) {
        let op = op.owed_in(&self.shared.owed);
        let Some(flight) = self.shared.send(op, instant()) else {
            return;
        };
        self.shared.set_first_runtime();
        let runtime = Handle::try_current().ok();
        // Keep the reply out of the queue: its callback may hold the queue, and this cycle would leak if no sender
        // followed.
        if let Some(runtime) = runtime.as_ref().or(self.shared.first_runtime.get()) {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move {
                let (op, reply) = flight.await;
                shared.handle_reply(op, reply);
            });
        }
    }

    /// Sends a check of several keys immediately, for a request that awaits the callback. A task on the request's runtime
    /// awaits the reply, even if the request stops waiting.
    pub(crate) fn send_all_now(
        &self,
        joint: JointCheck,
        callback: impl FnOnce(Result<JointDecision, StoreError>) + Send + 'static,
    ) {
        let Some(send) = &self.shared.send_joint else {
            return callback(Err(StoreError::new(ErrorKind::NotReady)));
        };
        // Until the callback has ended: the grant may be refunded there.
        let owed = Owed::new(&self.shared.owed);
        let callback = move |decided| {
            callback(decided);
            drop(owed);
        };
        let Some(mut reply) = contain(|| send(joint)) else {
            return callback(Err(panicked()));
        };
        // A local store has replied.
        if let Some(decided) = (&mut reply).now_or_never() {
            return callback(decided);
        }
        self.shared.set_first_runtime();
        let runtime = Handle::try_current().ok();
        if let Some(runtime) = runtime.as_ref().or(self.shared.first_runtime.get()) {
            runtime.spawn(async move { callback(reply.await) });
        }
    }

    /// Starts the sender on this runtime if there is work and the previous sender's runtime has shut down.
    pub(crate) fn wake(&self) {
        self.shared.set_first_runtime();
        // Skip the shared write on the fast path: every request calls `wake`.
        if self.shared.is_busy() && !self.shared.sender.is_running() {
            self.shared.ensure_sender();
        }
    }

    /// Returns the number of charges, refunds and releases that the store has neither answered nor given up. Starts the
    /// sender on this runtime if that of the last one has shut down.
    pub(crate) fn owed(&self) -> usize {
        self.wake();
        self.shared.owed.load(Ordering::Acquire)
    }

    /// Returns the number of charges, refunds and releases that were given up since the queue was created.
    pub(crate) fn lost(&self) -> usize {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// Returns `true` if both have the same operations.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Returns the same queue with a separate [reference count](OwnCount).
    pub(crate) fn copy(&self) -> Self {
        Self {
            shared: self.shared.copy(),
        }
    }

    /// Returns a weak reference, for operations in the queue, which must not keep the queue alive.
    pub(crate) fn downgrade(&self) -> WeakOpQueue {
        WeakOpQueue(Arc::downgrade(&self.shared))
    }
}

impl WeakOpQueue {
    /// Returns `None` if the queue was dropped.
    pub(crate) fn upgrade(&self) -> Option<OpQueue> {
        Some(OpQueue::of(self.0.upgrade()?))
    }

    /// Returns `true` if the queue was dropped.
    pub(crate) fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl SharedQueue {
    fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::Acquire)
    }

    /// Returns the operation if there is room to send it. Otherwise queues it, and the sender sends it after a reply.
    fn queue_without_room(&self, op: PendingOp) -> Option<PendingOp> {
        if !self.is_busy() {
            return Some(op);
        }
        let rejected = {
            let work = &mut *lock(&self.work);
            if work.in_flight < max_flights(op.is_renewal()) {
                return Some(op);
            }
            if work.is_full() {
                op
            } else {
                work.queue(op);
                return None;
            }
        };
        // Without the lock: this notifies the observer, and calls the callback.
        self.give_up(rejected, queue_full());
        None
    }

    /// Sends an operation to the store, unless it has expired in the queue: the store would charge a late charge to
    /// the current window. Returns the check if its reply is pending.
    fn send(&self, op: PendingOp, now: Instant) -> Option<Flight> {
        // A refund of an expired charge is dropped.
        let check = op.check(now)?;
        let reply = if op.still_counts(now) {
            // A store may need a runtime, and any thread may drop a request or a reservation.
            let _entered = match Handle::try_current() {
                Ok(_) => None,
                Err(_) => self.first_runtime.get().map(Handle::enter),
            };
            match contain(|| (self.send_check)(check)) {
                Some(SentCheck::Pending(reply)) => {
                    return Some(Flight {
                        op: Some(op),
                        reply,
                    });
                }
                Some(SentCheck::Replied(reply)) => reply,
                None => Err(panicked()),
            }
        } else {
            Err(StoreError::new(ErrorKind::Timeout).check_only().not_sent())
        };
        self.handle_reply(op, reply);
        None
    }

    fn handle_reply(&self, mut op: PendingOp, reply: Reply) {
        match op.after_reply(reply, instant()) {
            AfterReply::Finish(reply) => op.finish(reply),
            AfterReply::Report(error) => self.give_up(op, error),
            AfterReply::Retry(delay) => {
                // The slot of a release without room expires.
                if let Err(op) = self.retry(op, delay)
                    && !op.is_release()
                {
                    self.give_up(op, queue_full());
                }
            }
        }
    }

    /// Schedules a retry.
    ///
    /// # Errors
    ///
    /// Returns the operation if there is no room for it.
    fn retry(&self, op: PendingOp, delay: Duration) -> Result<(), PendingOp> {
        let work = &mut *lock(&self.work);
        if work.is_full() || op.is_release() && work.retries.len() >= MAX_RELEASE_RETRIES {
            return Err(op);
        }
        work.last_retry += 1;
        work.retries
            .insert((instant() + delay, work.last_retry), op);
        self.mark_busy();
        Ok(())
    }

    /// Makes the sender await the replies to sent checks.
    fn add_flights(&self, flights: impl IntoIterator<Item = Flight>) {
        let work = &mut *lock(&self.work);
        let before = work.new_flights.len();
        work.new_flights.extend(flights);
        work.in_flight += work.new_flights.len() - before;
        self.mark_busy();
    }

    /// Makes the next sender await the replies that the last one cannot.
    fn return_flights(&self, flights: impl IntoIterator<Item = Flight>) {
        let work = &mut *lock(&self.work);
        work.new_flights.extend(flights);
        self.mark_busy();
    }

    /// Handles replies that the sender has received.
    fn handle_replies(&self, replies: Vec<(PendingOp, Reply)>) {
        lock(&self.work).in_flight -= replies.len();
        for (op, reply) in replies {
            self.handle_reply(op, reply);
        }
    }

    /// Marks the queue as busy, and wakes the sender. Must be called under the lock.
    fn mark_busy(&self) {
        self.is_busy.store(true, Ordering::Release);
        self.new_work.notify_one();
    }

    fn give_up(&self, op: PendingOp, error: StoreError) {
        if op.is_owed() {
            self.lost.fetch_add(1, Ordering::AcqRel);
        }
        self.report(op.key(), &error);
        op.finish(Err(error));
    }

    fn report(&self, key: &Key, error: &StoreError) {
        contain(|| {
            or_log(self.observer.as_ref()).notify(&Event::Failed {
                key: Some(key),
                error,
                unanswered: false,
            })
        });
    }

    fn set_first_runtime(&self) {
        if self.first_runtime.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.first_runtime.set(runtime);
        }
    }

    /// Starts the sender unless it is running or there is no work.
    fn ensure_sender(self: &Arc<Self>) {
        if !self.is_busy() {
            return;
        }
        self.set_first_runtime();
        self.sender.spawn(self.first_runtime.get(), |task| {
            Sender::new(Arc::clone(self), task).run()
        });
    }

    /// Returns the sender's next step, and moves the new flights to `flights`. Without work, the sender ends at `ends_at`.
    fn next_step(
        &self,
        flights: &mut FuturesUnordered<Flight>,
        ends_at: Instant,
        now: Instant,
    ) -> Step {
        let work = &mut *lock(&self.work);
        flights.extend(work.new_flights.drain(..));
        while let Some(first) = work.retries.first_entry()
            && first.key().0 <= now
        {
            let op = first.remove();
            work.queue(op);
        }
        let ops = work.take_queued();
        match work.next_retry() {
            _ if !ops.is_empty() => Step::Send(ops),
            Some(at) => Step::Wait(Some(at)),
            None if !flights.is_empty() => Step::Wait(None),
            None if now < ends_at => Step::Wait(Some(ends_at)),
            None => {
                // Under the lock, as all writes: an operation that is queued later sets it again, and starts a sender.
                self.is_busy.store(false, Ordering::Release);
                Step::End
            }
        }
    }
}

fn queue_full() -> StoreError {
    StoreError::new(ErrorKind::QueueFull)
        .check_only()
        .not_sent()
}

/// The outcome is unknown after a panic, so this error is not marked as [`not_sent`](StoreError::not_sent).
pub(crate) fn panicked() -> StoreError {
    StoreError::with_source(ErrorKind::Refused, io::Error::other("the store panicked")).check_only()
}

impl OpWork {
    fn next_retry(&self) -> Option<Instant> {
        let (first, _) = self.retries.first_key_value()?;
        Some(first.0)
    }

    /// The number of operations that wait for room or for a retry.
    fn waiting(&self) -> usize {
        self.queued.len() + self.renewals.len() + self.retries.len()
    }

    fn is_full(&self) -> bool {
        self.waiting() >= CAPACITY
    }

    fn queue(&mut self, op: PendingOp) {
        if op.is_renewal() {
            self.renewals.push_back(op);
        } else {
            self.queued.push_back(op);
        }
    }

    /// Takes the operations for which there is room: renewals after the others.
    fn take_queued(&mut self) -> Vec<PendingOp> {
        let room = max_flights(false).saturating_sub(self.in_flight);
        let mut ops: Vec<_> = self.queued.drain(..room.min(self.queued.len())).collect();
        let for_renewals = max_flights(true).saturating_sub(self.in_flight + ops.len());
        ops.extend(self.renewals.drain(..for_renewals.min(self.renewals.len())));
        ops
    }
}

/// The number of unanswered checks up to which an operation is sent.
fn max_flights(is_renewal: bool) -> usize {
    if is_renewal {
        MAX_FLIGHTS / 2
    } else {
        MAX_FLIGHTS
    }
}
