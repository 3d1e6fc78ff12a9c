use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep};

use super::{Flight, LINGER, SharedQueue, Step};
use crate::background::Task;
use crate::util::instant;

/// The task that awaits the replies to the operations of an [`OpQueue`](super::OpQueue), and sends queued ones,
/// until the queue is empty.
pub(super) struct Sender {
    shared: Arc<SharedQueue>,
    flights: FuturesUnordered<Flight>,
    /// Dropped last, so that no other sender starts before `drop` has returned the flights.
    _task: Task,
}

impl Sender {
    pub(super) fn new(shared: Arc<SharedQueue>, task: Task) -> Self {
        Self {
            shared,
            flights: FuturesUnordered::new(),
            _task: task,
        }
    }

    pub(super) async fn run(mut self) {
        let mut ends_at = instant() + LINGER;
        loop {
            let now = instant();
            match self.shared.next_step(&mut self.flights, ends_at, now) {
                Step::Send(ops) => {
                    let mut sent = Vec::with_capacity(ops.len());
                    for op in ops {
                        sent.extend(self.shared.send(op, now));
                    }
                    self.shared.add_flights(sent);
                }
                Step::Wait(until) => {
                    if self.wait(until).await {
                        ends_at = instant() + LINGER;
                    }
                }
                Step::End => break,
            }
        }
        let shared = Arc::clone(&self.shared);
        drop(self);
        // Check again: an operation that was put before the drop has started no other sender. See `TaskOwner`.
        shared.ensure_sender();
    }

    /// Waits for replies, which it handles, or for new work. Returns `false` at the time `until`.
    async fn wait(&mut self, until: Option<Instant>) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut new_work = pin!(shared.new_work.notified());
        let mut timer = pin!(until.map(|until| sleep(until.saturating_duration_since(instant()))));
        let mut replies = Vec::new();
        // Replies that are ready together share one lock.
        let is_work = poll_fn(|cx| {
            while let Poll::Ready(Some(reply)) = self.flights.poll_next_unpin(cx) {
                replies.push(reply);
            }
            let has_new_work = new_work.as_mut().poll(cx).is_ready();
            if has_new_work || !replies.is_empty() {
                return Poll::Ready(true);
            }
            if let Some(sleep) = timer.as_mut().as_pin_mut()
                && sleep.poll(cx).is_ready()
            {
                return Poll::Ready(false);
            }
            Poll::Pending
        })
        .await;
        shared.handle_replies(replies);
        is_work
    }
}

/// When the runtime shuts down, returns the flights to the queue for the next sender.
impl Drop for Sender {
    fn drop(&mut self) {
        if !self.flights.is_empty() {
            self.shared.return_flights(mem::take(&mut self.flights));
        }
    }
}
