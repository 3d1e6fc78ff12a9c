use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::time::{Instant, sleep};

use super::{Flight, SharedQueue, Step};
use crate::background::Task;
use crate::util::instant;

/// The task that sends the operations of an [`OpQueue`](super::OpQueue) until the queue is empty.
pub(super) struct Sender {
    shared: Arc<SharedQueue>,
    flights: Vec<Flight>,
    /// Dropped last, so that no other sender starts before `drop` has returned the flights.
    _task: Task,
}

impl Sender {
    pub(super) fn new(shared: Arc<SharedQueue>, task: Task) -> Self {
        Self {
            shared,
            flights: Vec::new(),
            _task: task,
        }
    }

    pub(super) async fn run(mut self) {
        let mut last_wave = instant();
        loop {
            let now = instant();
            match self.shared.next_step(&mut self.flights, last_wave, now) {
                Step::Send(ops) => {
                    last_wave = now;
                    let pending = ops.into_iter().filter_map(|op| self.shared.send(op, now));
                    self.flights.extend(pending);
                }
                Step::Wait(until) => self.wait(until).await,
                Step::End => break,
            }
        }
        let shared = Arc::clone(&self.shared);
        drop(self);
        // Check again: an operation that was put before the drop has started no other sender. See `TaskOwner`.
        shared.ensure_sender();
    }

    /// Waits for a reply, new work, or the time `until`.
    async fn wait(&mut self, until: Option<Instant>) {
        let shared = Arc::clone(&self.shared);
        let mut new_work = pin!(shared.new_work.notified());
        let mut time = pin!(until.map(|until| sleep(until.saturating_duration_since(instant()))));
        let mut replies = Vec::new();
        poll_fn(|cx| {
            let mut i = 0;
            while let Some(flight) = self.flights.get_mut(i) {
                match flight.poll(cx) {
                    Poll::Ready(reply) => replies.push((self.flights.swap_remove(i).op, reply)),
                    Poll::Pending => i += 1,
                }
            }
            let is_time = time
                .as_mut()
                .as_pin_mut()
                .is_some_and(|time| time.poll(cx).is_ready());
            let has_new_work = new_work.as_mut().poll(cx).is_ready();
            if is_time || has_new_work || !replies.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        for (op, reply) in replies {
            shared.handle_reply(op, reply);
        }
    }
}

/// When the runtime shuts down, returns the flights to the queue for the next sender.
impl Drop for Sender {
    fn drop(&mut self) {
        if !self.flights.is_empty() {
            self.shared.add_flights(mem::take(&mut self.flights));
        }
    }
}
