//! The queue of what is charged, refunded or renewed off the request path: nobody waits for it, and many go at once. What a
//! handler reserves is asked at once, and comes here only if it stops waiting, so that the answer finds its request.

mod awaited;
mod pending_op;
mod reserved;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) use self::pending_op::PendingOp;
pub(crate) use self::reserved::Reserved;

use self::awaited::Awaited;
use self::sender::Sender;
use crate::error::{ErrorKind, StoreError};
use crate::limit::Decision;
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, Store};
use crate::util::{contain, instant, lock};

/// Sends checks that nobody waits for, each once, and reports those that it could not send. Clones share it.
///
/// - A store that answers at once, as a [`LocalStore`](crate::LocalStore) does, is asked at once. Any other is asked in
///   waves: what comes within [`GAP`] of the last wave goes with the next one, so that the store can send it together.
/// - What the store says it has not sent is tried again, first soon and then once a second, until it matters no more.
///   But not a renewal: whoever asks for it does so again, with what is in flight then. Nor a take, for which a request
///   [waits](RefundQueue::ask), or has.
/// - What was sent and is not known to be done is not sent again, or it might be done twice. The observer is notified of
///   it, and of what finds the queue full.
/// - A release of a slot is sent until it is done, or the slot has expired. The observer is not notified then, nor of
///   more than [`RELEASES`] that wait: these slots expire.
/// - It sends on the runtime of whoever came first; what is put where there is none, on the first that it has ever
///   seen. If that ends, what is left waits for the next one that [sends](RefundQueue::put) or
///   [wakes](RefundQueue::wake) it on another. A runtime that stands still is not waited for.
pub(crate) struct StoreQueue<S: Store> {
    shared: Arc<SharedQueue<S>>,
}

pub(super) struct SharedQueue<S: Store> {
    store: S,
    observer: Option<Arc<dyn Observer>>,
    work: Mutex<Work<S>>,
    /// Written under the lock.
    status: AtomicU8,
    /// Wakes the sender.
    pub(super) came: Notify,
    /// The runtime of whoever used it first.
    home: OnceLock<Handle>,
}

/// Nothing waits: `put` asks the store at once.
const IDLE: u8 = 0;
/// There is a sender: what comes goes with its next wave.
const SENDING: u8 = 1;
/// Something waits, and there is no sender.
const STALLED: u8 = 2;

struct Work<S: Store> {
    /// What has not been tried yet.
    fresh: VecDeque<PendingOp>,
    /// Operations to try again, each by its time and number.
    again: BTreeMap<(Instant, u64), PendingOp>,
    again_number: u64,
    /// What has been asked, by whoever is no sender, or by one whose runtime has ended.
    asked: Vec<Flight<S>>,
    sender: Option<ActiveSender>,
    /// How many senders there were: each has a number.
    senders: u64,
}

#[derive(Clone, Copy)]
struct ActiveSender {
    runtime: Id,
    number: u64,
}

/// A check that the store has not answered yet, and the operation that it is of.
pub(super) struct Flight<S: Store> {
    pub(super) op: PendingOp,
    pub(super) answer: Pin<Box<S::Future>>,
}

impl<S: Store> Flight<S> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, StoreError>> {
        contain(|| self.answer.as_mut().poll(cx)).unwrap_or_else(|| Poll::Ready(Err(panicked())))
    }
}

/// What a sender does next.
pub(super) enum Next {
    Send(Vec<PendingOp>),
    /// Waits for an answer, for something new, and at most until then.
    Wait(Option<Instant>),
    End,
}

/// How long a wave is gathered.
const GAP: Duration = Duration::from_millis(2);
/// How many checks are under way at once, so that live traffic is not held up.
const AT_ONCE: usize = 1_024;
/// How much may wait.
const CAPACITY: usize = 100_000;
/// How many releases may wait to be tried again.
const RELEASES: usize = 10_000;
/// Pause from the reply to a release until it is repeated.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// After how long something is tried again: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// After how long another runtime sends what waits, if the sender's runs nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// A [`StoreQueue`] of any store.
pub(crate) trait RefundQueue: Send + Sync {
    /// Sends it. Nobody needs to wait: this returns at once.
    fn put(&self, op: PendingOp);

    /// Asks it now, whatever waits, for a request that waits for this future. If it no longer does, a sender hears the
    /// answer.
    fn ask(&self, op: PendingOp) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Has what is left of a runtime that has ended sent on this one.
    fn wake(&self);

    /// The same queue in an `Arc` of its own, whose count of references no other processor writes to.
    fn copy(&self) -> Arc<dyn RefundQueue>;
}

impl<S: Store> StoreQueue<S> {
    /// Asks `store`, and notifies `observer` of what could not be done.
    pub(crate) fn new(store: S, observer: Option<Arc<dyn Observer>>) -> Self {
        let work = Work {
            fresh: VecDeque::new(),
            again: BTreeMap::new(),
            again_number: 0,
            asked: Vec::new(),
            sender: None,
            senders: 0,
        };
        let (work, status, came) = (Mutex::new(work), AtomicU8::new(IDLE), Notify::new());
        Self {
            shared: Arc::new(SharedQueue {
                store,
                observer,
                work,
                status,
                came,
                home: OnceLock::new(),
            }),
        }
    }

    /// The queue, as long as anybody else has it: for what waits in it, or it would never be dropped.
    pub(crate) fn downgrade(&self) -> impl Fn() -> Option<Self> + Send + use<S> {
        let shared = Arc::downgrade(&self.shared);
        move || {
            Some(Self {
                shared: shared.upgrade()?,
            })
        }
    }
}

impl<S: Store> RefundQueue for StoreQueue<S> {
    fn put(&self, op: PendingOp) {
        if let Err(op) = self.shared.leave(op) {
            let mut asked = Vec::new();
            self.shared.ask(op, instant(), &mut asked);
            if !asked.is_empty() {
                self.shared.keep(asked);
            }
        }
        self.shared.attend();
    }

    fn ask(&self, op: PendingOp) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut asked = Vec::new();
        self.shared.ask(op, instant(), &mut asked);
        Box::pin(Awaited {
            shared: Arc::clone(&self.shared),
            asked,
        })
    }

    fn copy(&self) -> Arc<dyn RefundQueue> {
        Arc::new(self.clone())
    }

    fn wake(&self) {
        self.shared.remember_runtime();
        // Or every request would wait for the lock.
        if self.shared.status() == STALLED {
            self.shared.attend();
        }
    }
}

impl<S: Store> SharedQueue<S> {
    fn status(&self) -> u8 {
        self.status.load(Ordering::Acquire)
    }

    /// Leaves it to a sender.
    ///
    /// # Errors
    ///
    /// With the same operation, if nothing waits: the store can be asked at once.
    fn leave(&self, op: PendingOp) -> Result<(), PendingOp> {
        if self.status() == IDLE {
            return Err(op);
        }
        let full = {
            let work = &mut *lock(&self.work);
            if self.status() == IDLE {
                return Err(op);
            }
            if work.is_full() {
                Some(op)
            } else {
                // Or who waits for the next wave is woken by each that comes.
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
                StoreError::new(ErrorKind::QueueFull).of_check().unsent(),
            );
        }
        Ok(())
    }

    /// Asks the store.
    pub(super) fn ask(&self, op: PendingOp, now: Instant, asked: &mut Vec<Flight<S>>) {
        let Some(check) = op.check(now) else { return };
        match contain(|| self.store.check(check)) {
            Some(Answer::Ready { answer }) => self.ended(op, answer),
            Some(Answer::Pending { future }) => asked.push(Flight {
                op,
                answer: Box::pin(future),
            }),
            None => self.ended(op, Err(panicked())),
        }
    }

    /// The store has answered, or panicked.
    pub(super) fn ended(&self, mut op: PendingOp, answer: Result<Decision, StoreError>) {
        match answer {
            Err(error) if error.is_unsent() && op.is_tried_once() => op.answer(Err(error)),
            Err(error) if op.is_release() && (error.is_unsent() || !error.is_of_check()) => {
                if op.matters(instant()) {
                    let pause = op.next_pause();
                    drop(self.try_again(op, pause, RELEASES));
                }
            }
            Err(error) if error.is_unsent() && op.matters(instant()) => {
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

    /// Keeps the operation for another try. Returns it if the queue is full, or if `most` others wait for another try.
    fn try_again(&self, op: PendingOp, pause: Duration, most: usize) -> Option<PendingOp> {
        let work = &mut *lock(&self.work);
        if work.is_full() || work.again.len() >= most {
            return Some(op);
        }
        work.again_number += 1;
        work.again
            .insert((instant() + pause, work.again_number), op);
        self.came_to(work);
        None
    }

    /// Something waits for a sender.
    fn came_to(&self, work: &Work<S>) {
        let status = if work.sender.is_some() {
            SENDING
        } else {
            STALLED
        };
        self.status.store(status, Ordering::Release);
        self.came.notify_one();
    }

    fn give_up(&self, op: PendingOp, error: StoreError) {
        contain(|| {
            or_log(self.observer.as_ref()).failed(&event::Failed::new(Some(op.key()), &error))
        });
        op.answer(Err(error));
    }

    /// Keeps what has been asked for a sender.
    fn keep(&self, asked: Vec<Flight<S>>) {
        let work = &mut *lock(&self.work);
        work.asked.extend(asked);
        self.came_to(work);
    }

    fn remember_runtime(&self) {
        if self.home.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.home.set(runtime);
        }
    }

    /// Starts a sender on this runtime if something waits and there is none, or if its runtime stands still.
    fn attend(self: &Arc<Self>) {
        if self.status() == IDLE {
            return;
        }
        self.remember_runtime();
        let Some(runtime) = Handle::try_current()
            .ok()
            .or_else(|| self.home.get().cloned())
        else {
            return;
        };
        let number = {
            let work = &mut *lock(&self.work);
            if self.status() == IDLE
                || work
                    .sender
                    .is_some_and(|sender| !work.is_left_by(sender, &runtime))
            {
                return;
            }
            work.senders += 1;
            work.sender = Some(ActiveSender {
                runtime: runtime.id(),
                number: work.senders,
            });
            self.status.store(SENDING, Ordering::Release);
            work.senders
        };
        // A runtime that has ended drops it at once.
        runtime.spawn(Sender::new(Arc::clone(self), number).run());
    }

    /// What the sender of this number does next, if its last wave was at the time `last`. What has been asked by others
    /// joins its flights.
    pub(super) fn next(
        &self,
        number: u64,
        flights: &mut Vec<Flight<S>>,
        last: Instant,
        now: Instant,
    ) -> Next {
        let work = &mut *lock(&self.work);
        if work.sender.is_none_or(|sender| sender.number != number) {
            return if flights.is_empty() {
                Next::End
            } else {
                Next::Wait(None)
            };
        }
        flights.append(&mut work.asked);
        let next = last + GAP;
        while let Some(due) = work
            .again
            .first_entry()
            .filter(|first| first.key().0 <= now)
        {
            work.fresh.push_back(due.remove());
        }
        let room = AT_ONCE.saturating_sub(flights.len());
        match (work.fresh.is_empty(), work.again_at()) {
            (false, _) if now < next => Next::Wait(Some(next)),
            (false, _) if room == 0 => Next::Wait(None),
            (false, _) => Next::Send(work.fresh.drain(..room.min(work.fresh.len())).collect()),
            (true, Some(at)) => Next::Wait(Some(at)),
            (true, None) if !flights.is_empty() => Next::Wait(None),
            // What comes before that makes a wave.
            (true, None) if now < next => Next::Wait(Some(next)),
            (true, None) => {
                work.sender = None;
                self.status.store(IDLE, Ordering::Release);
                Next::End
            }
        }
    }

    /// The sender of this number is dropped with its runtime, and leaves what it waits for to the next one.
    pub(super) fn end(&self, number: u64, flights: &mut Vec<Flight<S>>) {
        let work = &mut *lock(&self.work);
        work.asked.append(flights);
        work.sender = work.sender.filter(|sender| sender.number != number);
        if !work.is_empty() {
            self.came_to(work);
        } else if work.sender.is_none() {
            self.status.store(IDLE, Ordering::Release);
        }
    }
}

/// What a store does that panics is not known.
pub(super) fn panicked() -> StoreError {
    StoreError::with_source(ErrorKind::Refused, io::Error::other("the store panicked")).of_check()
}

impl<S: Store> Work<S> {
    fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.again.is_empty() && self.asked.is_empty()
    }

    fn again_at(&self) -> Option<Instant> {
        self.again.first_key_value().map(|((at, _), _)| *at)
    }

    fn is_full(&self) -> bool {
        self.fresh.len() + self.again.len() >= CAPACITY
    }

    /// Whether a sender has not sent what waits for it, and this is another runtime.
    fn is_left_by(&self, sender: ActiveSender, runtime: &Handle) -> bool {
        let mut due = self
            .fresh
            .front()
            .map(|op| op.put_at)
            .into_iter()
            .chain(self.again_at());
        sender.runtime != runtime.id() && due.any(|at| at + PATIENCE < instant())
    }
}

impl<S: Store> Clone for StoreQueue<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}
