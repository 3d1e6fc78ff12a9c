//! A queue of store operations off the request path: charges, refunds, renewals, releases and leased blocks.
//!
//! | an operation | is owned by | until |
//! |---|---|---|
//! | is queued | `Work::next_wave` | the sender's next wave |
//! | is in flight | [`Sender`]; before the sender has taken it, and between two senders, `Work::new_flights` | its reply, or a panic of the store |
//! | is in flight for a request | a task on the request's runtime | its reply, or the end of that runtime |
//! | waits for a retry | `Work::retries` | its time. Then it is queued |
//!
//! [`PendingOp::after_reply`] decides whether an operation is retried, or finished by its callback. An operation that has
//! expired or finds no room is finished without being sent.

mod pending_op;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use self::pending_op::PendingOp;

use self::pending_op::AfterReply;
use self::sender::Sender;
use super::TaskOwner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision};
use crate::observe::{Observer, event, or_log};
use crate::util::{contain, instant, lock};

/// Sends operations to one store, and reports failures to the observer. Clones share the queue.
///
/// - **Batches.** A store that replies immediately, such as a [`LocalStore`](crate::LocalStore), gets each operation
///   immediately. For other stores, operations are collected for [`WAVE_INTERVAL`] and sent in waves, which the store
///   can batch.
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
    #[allow(
        clippy::redundant_allocation,
        reason = "each `copy` has an outer `Arc`, so that not all requests write one reference count"
    )]
    shared: Arc<Arc<SharedQueue>>,
}

/// A check that was sent to a store.
pub(crate) enum SentCheck {
    Replied(Reply),
    Pending(PendingReply),
}

pub(super) type Reply = Result<Decision, StoreError>;

type PendingReply = Pin<Box<dyn Future<Output = Reply> + Send>>;

type SendCheck = dyn Fn(Check) -> SentCheck + Send + Sync;

struct SharedQueue {
    send_check: Box<SendCheck>,
    observer: Option<Arc<dyn Observer>>,
    work: Mutex<Work>,
    /// Whether operations or replies are pending. If not, `put` sends immediately. Written under the lock.
    is_busy: AtomicBool,
    /// Wakes the sender.
    new_work: Notify,
    sender: TaskOwner,
    /// The first runtime that has used the queue.
    first_runtime: OnceLock<Handle>,
}

#[derive(Default)]
struct Work {
    /// Operations for the next wave.
    next_wave: VecDeque<PendingOp>,
    /// Operations to retry, by time and number.
    retries: BTreeMap<(Instant, u64), PendingOp>,
    last_retry: u64,
    /// Checks whose replies the next step of the sender starts to await.
    new_flights: Vec<Flight>,
}

/// A sent check without a reply yet, and its operation.
struct Flight {
    op: PendingOp,
    reply: PendingReply,
}

impl Flight {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Reply> {
        contain(|| self.reply.as_mut().poll(cx)).unwrap_or_else(|| Poll::Ready(Err(panicked())))
    }
}

/// A step of the sender.
enum Step {
    Send(Vec<PendingOp>),
    /// Wait for a reply or another operation, at most until this time.
    Wait(Option<Instant>),
    End,
}

/// Minimum interval between two waves.
const WAVE_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum duration of a flush. Longer than the usual deadlines of stores.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of unanswered checks of the sender, so that they do not delay requests.
const MAX_FLIGHTS: usize = 1_024;
/// Maximum number of queued operations.
const CAPACITY: usize = 100_000;
/// Number of scheduled retries at which a release is dropped instead of retried.
const MAX_RELEASE_RETRIES: usize = 10_000;

impl OpQueue {
    /// Creates the queue of a store. `send_check` sends a check to it. `observer` is notified of each failed operation.
    pub(crate) fn new(
        send_check: impl Fn(Check) -> SentCheck + Send + Sync + 'static,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        Self::of(Arc::new(SharedQueue {
            send_check: Box::new(send_check),
            observer,
            work: Mutex::default(),
            is_busy: AtomicBool::new(false),
            new_work: Notify::new(),
            sender: TaskOwner::new(),
            first_runtime: OnceLock::new(),
        }))
    }

    fn of(shared: Arc<SharedQueue>) -> Self {
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Queues an operation, or sends it immediately if the queue is idle.
    pub(crate) fn put(&self, op: PendingOp) {
        if let Err(op) = self.shared.push_if_busy(op)
            && let Some(flight) = self.shared.send(op, instant())
        {
            self.shared.add_flights([flight]);
        }
        self.shared.ensure_sender();
    }

    /// Sends a take immediately, ahead of queued operations, for a request that awaits its callback. A task on the
    /// request's runtime awaits the reply, even if the request stops waiting.
    pub(crate) fn send_now(&self, op: PendingOp) {
        let Some(mut flight) = self.shared.send(op, instant()) else {
            return;
        };
        self.shared.set_first_runtime();
        let runtime = Handle::try_current().ok();
        // Keep the reply out of the queue: its callback may hold the queue, and this cycle would leak if no sender
        // followed.
        if let Some(runtime) = runtime.as_ref().or(self.shared.first_runtime.get()) {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move {
                let reply = poll_fn(|cx| flight.poll(cx)).await;
                shared.handle_reply(flight.op, reply);
            });
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

    /// Waits until no operation and no reply is pending, for at most [`FLUSH_TIMEOUT`]. Returns `false` if some still
    /// are.
    pub(crate) async fn flush(&self) -> bool {
        self.wake();
        let flushed = async {
            while self.shared.is_busy() {
                sleep(WAVE_INTERVAL).await;
            }
        };
        timeout(FLUSH_TIMEOUT, flushed).await.is_ok()
    }

    /// Clones into a new `Arc`, so that processors do not contend for its reference count.
    pub(crate) fn copy(&self) -> Self {
        Self::of(Arc::clone(&self.shared))
    }

    /// Returns a weak reference, for operations in the queue, which must not keep the queue alive.
    pub(crate) fn downgrade(&self) -> impl Fn() -> Option<Self> + Send + use<> {
        let shared = Arc::downgrade(&*self.shared);
        move || Some(Self::of(shared.upgrade()?))
    }
}

impl SharedQueue {
    fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::Acquire)
    }

    /// Adds an operation to the next wave.
    ///
    /// # Errors
    ///
    /// Returns the operation if the queue is idle: it can be sent immediately.
    fn push_if_busy(&self, op: PendingOp) -> Result<(), PendingOp> {
        if !self.is_busy() {
            return Err(op);
        }
        let rejected = {
            let work = &mut *lock(&self.work);
            if !self.is_busy() {
                return Err(op);
            }
            if work.is_full() {
                Some(op)
            } else {
                // Notify for the first operation only. The sender then sleeps until the next wave, and each further
                // notification would wake it too early.
                if work.next_wave.is_empty() {
                    self.new_work.notify_one();
                }
                work.next_wave.push_back(op);
                None
            }
        };
        if let Some(op) = rejected {
            self.give_up(op, queue_full());
        }
        Ok(())
    }

    /// Sends an operation to the store, unless it has expired in the queue: the store would charge a late charge to
    /// the current window. Returns the check if its reply is pending.
    fn send(&self, op: PendingOp, now: Instant) -> Option<Flight> {
        // A refund of an expired charge is dropped.
        let check = op.check(now)?;
        let reply = if op.still_counts(now) {
            match contain(|| (self.send_check)(check)) {
                Some(SentCheck::Pending(reply)) => return Some(Flight { op, reply }),
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
        work.new_flights.extend(flights);
        self.mark_busy();
    }

    /// Marks the queue as busy, and wakes the sender. Must be called under the lock.
    fn mark_busy(&self) {
        self.is_busy.store(true, Ordering::Release);
        self.new_work.notify_one();
    }

    fn give_up(&self, op: PendingOp, error: StoreError) {
        contain(|| {
            or_log(self.observer.as_ref()).failed(&event::Failed::new(Some(op.key()), &error))
        });
        op.finish(Err(error));
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

    /// Returns the sender's next step, and moves the new flights to `flights`.
    fn next_step(&self, flights: &mut Vec<Flight>, last_wave: Instant, now: Instant) -> Step {
        let work = &mut *lock(&self.work);
        flights.append(&mut work.new_flights);
        let wave_at = last_wave + WAVE_INTERVAL;
        while let Some(due) = work
            .retries
            .first_entry()
            .filter(|first| first.key().0 <= now)
        {
            work.next_wave.push_back(due.remove());
        }
        let capacity = MAX_FLIGHTS.saturating_sub(flights.len());
        match (work.next_wave.is_empty(), work.next_retry()) {
            (false, _) if now < wave_at => Step::Wait(Some(wave_at)),
            (false, _) if capacity == 0 => Step::Wait(None),
            (false, _) => {
                let count = capacity.min(work.next_wave.len());
                Step::Send(work.next_wave.drain(..count).collect())
            }
            (true, Some(at)) => Step::Wait(Some(at)),
            (true, None) if !flights.is_empty() => Step::Wait(None),
            // Keep the sender for one more [`WAVE_INTERVAL`], so that the next operations form a wave.
            (true, None) if now < wave_at => Step::Wait(Some(wave_at)),
            (true, None) => {
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

impl Work {
    fn next_retry(&self) -> Option<Instant> {
        self.retries.first_key_value().map(|((at, _), _)| *at)
    }

    fn is_full(&self) -> bool {
        self.next_wave.len() + self.retries.len() >= CAPACITY
    }
}
