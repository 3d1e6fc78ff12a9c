//! A queue of store operations off the request path: charges, refunds, renewals, releases and leased blocks.

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
use tokio::time::Instant;

pub(crate) use self::pending_op::PendingOp;

use self::sender::Sender;
use super::TaskOwner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision};
use crate::observe::{Observer, event, or_log};
use crate::util::{contain, instant, lock};

/// Sends operations to one store, and reports failures to the observer. Clones share the queue.
///
/// - **Batches.** A store that replies immediately, such as a [`LocalStore`](crate::LocalStore), gets each operation
///   immediately. For other stores, operations are collected for [`GAP`] and sent in waves, which the store can batch.
/// - **Retries.** An operation that was certainly not sent is retried after 50 ms, then with growing pauses of up to 1
///   s, until it has expired. Renewals are not retried, because the next renewal covers all slots in flight. Takes are
///   not either: a request [awaits](Self::send_now) them, or the caller repeats them.
/// - **Lost replies.** An operation that may have been executed is never sent again, because it might be executed
///   twice. The observer is notified of it, and of each operation that finds the queue full.
/// - **Releases.** Releasing a slot twice is harmless, so a release is retried until it succeeds or the slot has
///   expired. The observer is notified neither of expired releases nor of releases beyond [`RELEASES`]: their slots
///   expire.
/// - **Runtimes.** The sender is a [background task](super). If its runtime shuts down, the operations and pending
///   replies stay in the queue until another operation is [put](Self::put) or a request [wakes](Self::wake) the queue.
///   Outside of a runtime, the sender starts on the first runtime that has used the queue.
#[derive(Clone)]
pub(crate) struct OpQueue {
    #[allow(
        clippy::redundant_allocation,
        reason = "each `copy` has an outer `Arc`, so that not all requests write one reference count"
    )]
    shared: Arc<Arc<SharedQueue>>,
}

/// A store's answer to a check: immediate, or pending.
pub(crate) enum Asked {
    Replied(Reply),
    Pending(Pin<Box<dyn Future<Output = Reply> + Send>>),
}

pub(super) type Reply = Result<Decision, StoreError>;

type Ask = dyn Fn(Check) -> Asked + Send + Sync;

struct SharedQueue {
    ask: Box<Ask>,
    observer: Option<Arc<dyn Observer>>,
    work: Mutex<Work>,
    /// Whether operations or replies are pending. If not, `put` sends immediately. Written under the lock.
    is_busy: AtomicBool,
    /// Wakes the sender: there is new work.
    came: Notify,
    sender: TaskOwner,
    /// The first runtime that has used the queue.
    home: OnceLock<Handle>,
}

#[derive(Default)]
struct Work {
    /// Operations for the next wave.
    fresh: VecDeque<PendingOp>,
    /// Operations to retry, by time and number.
    again: BTreeMap<(Instant, u64), PendingOp>,
    again_number: u64,
    /// Checks whose replies the sender must await.
    asked: Vec<Flight>,
}

/// A sent check without a reply yet, and its operation.
struct Flight {
    op: PendingOp,
    reply: Pin<Box<dyn Future<Output = Reply> + Send>>,
}

impl Flight {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Reply> {
        contain(|| self.reply.as_mut().poll(cx)).unwrap_or_else(|| Poll::Ready(Err(panicked())))
    }
}

/// The next step of the sender.
enum Next {
    Send(Vec<PendingOp>),
    /// Wait for a reply or another operation, at most until this time.
    Wait(Option<Instant>),
    End,
}

/// Minimum interval between two waves.
const GAP: Duration = Duration::from_millis(2);
/// Maximum number of unanswered checks of the sender, so that they do not delay requests.
const MAX_FLIGHTS: usize = 1_024;
/// Maximum number of queued operations.
const CAPACITY: usize = 100_000;
/// Number of waiting retries at which a release is dropped instead of retried.
const RELEASES: usize = 10_000;
/// Pause between the reply to a release and its repetition.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// First and longest pause before a retry.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl OpQueue {
    /// Creates the queue of a store. `ask` sends a check to the store. `observer` is notified of each failed operation.
    pub(crate) fn new(
        ask: impl Fn(Check) -> Asked + Send + Sync + 'static,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        Self::of(Arc::new(SharedQueue {
            ask: Box::new(ask),
            observer,
            work: Mutex::default(),
            is_busy: AtomicBool::new(false),
            came: Notify::new(),
            sender: TaskOwner::new(),
            home: OnceLock::new(),
        }))
    }

    fn of(shared: Arc<SharedQueue>) -> Self {
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Queues an operation, or sends it immediately if the queue is idle.
    pub(crate) fn put(&self, op: PendingOp) {
        if let Err(op) = self.shared.leave(op)
            && let Some(flight) = self.shared.send(op, instant())
        {
            self.shared.keep([flight]);
        }
        self.shared.attend();
    }

    /// Sends a take immediately, ahead of queued operations, for a request that awaits its callback. A task on the
    /// request's runtime awaits the reply, even if the request stops waiting.
    pub(crate) fn send_now(&self, op: PendingOp) {
        let Some(mut flight) = self.shared.send(op, instant()) else {
            return;
        };
        self.shared.remember_runtime();
        let runtime = Handle::try_current().ok();
        // The reply is not kept in the queue: the callback may hold the queue, which would then hold itself if no
        // sender followed.
        if let Some(runtime) = runtime.as_ref().or(self.shared.home.get()) {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move {
                let reply = poll_fn(|cx| flight.poll(cx)).await;
                shared.ended(flight.op, reply);
            });
        }
    }

    /// Starts the sender on this runtime if there is work and the previous sender's runtime has shut down.
    pub(crate) fn wake(&self) {
        self.shared.remember_runtime();
        // Skip the shared write on the fast path: every request calls `wake`.
        if self.shared.is_busy() && !self.shared.sender.is_running() {
            self.shared.attend();
        }
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

    /// Adds an operation for the sender.
    ///
    /// # Errors
    ///
    /// Returns the operation if the queue is idle: it can be sent immediately.
    fn leave(&self, op: PendingOp) -> Result<(), PendingOp> {
        if !self.is_busy() {
            return Err(op);
        }
        let full = {
            let work = &mut *lock(&self.work);
            if !self.is_busy() {
                return Err(op);
            }
            if work.is_full() {
                Some(op)
            } else {
                // Notify for the first operation only. The sender then sleeps until the next wave, and each further
                // notification would wake it too early.
                if work.fresh.is_empty() {
                    self.came.notify_one();
                }
                work.fresh.push_back(op);
                None
            }
        };
        if let Some(op) = full {
            self.give_up(
                op,
                StoreError::new(ErrorKind::QueueFull)
                    .check_only()
                    .not_sent(),
            );
        }
        Ok(())
    }

    /// Sends an operation to the store, unless it has expired in the queue: the store would charge a late charge to
    /// the current window. Returns the check if its reply is pending.
    fn send(&self, op: PendingOp, now: Instant) -> Option<Flight> {
        let check = op.check(now)?;
        let reply = if op.matters(now) {
            match contain(|| (self.ask)(check)) {
                Some(Asked::Pending(reply)) => return Some(Flight { op, reply }),
                Some(Asked::Replied(reply)) => reply,
                None => Err(panicked()),
            }
        } else {
            Err(StoreError::new(ErrorKind::Timeout).check_only().not_sent())
        };
        self.ended(op, reply);
        None
    }

    /// Handles a reply: retries, repeats or finishes the operation.
    fn ended(&self, mut op: PendingOp, reply: Reply) {
        match reply {
            Err(error) if error.is_not_sent() && op.is_tried_once() => op.answer(Err(error)),
            Err(_) if op.is_release() => {
                if op.matters(instant()) {
                    let pause = op.next_pause();
                    drop(self.try_again(op, pause, RELEASES));
                }
            }
            Err(error) if error.is_not_sent() && op.matters(instant()) => {
                let pause = op.next_pause();
                if let Some(op) = self.try_again(op, pause, CAPACITY) {
                    self.give_up(op, error);
                }
            }
            Err(error) => self.give_up(op, error),
            Ok(_) if op.repeats => {
                op.repeats = false;
                drop(self.try_again(op, REPEAT_AFTER, RELEASES));
            }
            Ok(decision) => op.answer(Ok(decision)),
        }
    }

    /// Schedules a retry. Returns the operation if the queue is full or already has `most` retries.
    fn try_again(&self, op: PendingOp, pause: Duration, most: usize) -> Option<PendingOp> {
        let work = &mut *lock(&self.work);
        if work.is_full() || work.again.len() >= most {
            return Some(op);
        }
        work.again_number += 1;
        work.again
            .insert((instant() + pause, work.again_number), op);
        self.came_to_work();
        None
    }

    /// Leaves sent checks to the sender, which awaits their replies.
    fn keep(&self, asked: impl IntoIterator<Item = Flight>) {
        let work = &mut *lock(&self.work);
        work.asked.extend(asked);
        self.came_to_work();
    }

    /// Marks the queue as busy and wakes the sender. Must be called under the lock.
    fn came_to_work(&self) {
        self.is_busy.store(true, Ordering::Release);
        self.came.notify_one();
    }

    fn give_up(&self, op: PendingOp, error: StoreError) {
        contain(|| {
            or_log(self.observer.as_ref()).failed(&event::Failed::new(Some(op.key()), &error))
        });
        op.answer(Err(error));
    }

    fn remember_runtime(&self) {
        if self.home.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.home.set(runtime);
        }
    }

    /// Starts the sender if there is work and it is not running.
    fn attend(self: &Arc<Self>) {
        if !self.is_busy() {
            return;
        }
        self.remember_runtime();
        self.sender.spawn(self.home.get(), |task| {
            Sender::new(Arc::clone(self), task).run()
        });
    }

    /// Returns the sender's next step. `last` is the time of its last wave. Moves the kept checks to its flights.
    fn next(&self, flights: &mut Vec<Flight>, last: Instant, now: Instant) -> Next {
        let work = &mut *lock(&self.work);
        flights.append(&mut work.asked);
        let next = last + GAP;
        while let Some(due) = work
            .again
            .first_entry()
            .filter(|first| first.key().0 <= now)
        {
            work.fresh.push_back(due.remove());
        }
        let room = MAX_FLIGHTS.saturating_sub(flights.len());
        match (work.fresh.is_empty(), work.again_at()) {
            (false, _) if now < next => Next::Wait(Some(next)),
            (false, _) if room == 0 => Next::Wait(None),
            (false, _) => Next::Send(work.fresh.drain(..room.min(work.fresh.len())).collect()),
            (true, Some(at)) => Next::Wait(Some(at)),
            (true, None) if !flights.is_empty() => Next::Wait(None),
            // Keep the sender for one more [`GAP`], so that the next operations form a wave.
            (true, None) if now < next => Next::Wait(Some(next)),
            (true, None) => {
                self.is_busy.store(false, Ordering::Release);
                Next::End
            }
        }
    }
}

/// The outcome is unknown after a panic, so this error is not marked as [`not_sent`](StoreError::not_sent).
fn panicked() -> StoreError {
    StoreError::with_source(ErrorKind::Refused, io::Error::other("the store panicked")).check_only()
}

impl Work {
    fn again_at(&self) -> Option<Instant> {
        self.again.first_key_value().map(|((at, _), _)| *at)
    }

    fn is_full(&self) -> bool {
        self.fresh.len() + self.again.len() >= CAPACITY
    }
}
