use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::time::{Instant, sleep};

use super::{Flight, Next, SharedQueue};
use crate::store::Store;
use crate::util::instant;

/// The task that sends what waits in a [`StoreQueue`](super::StoreQueue), until there is nothing.
pub(super) struct Sender<S: Store> {
    shared: Arc<SharedQueue<S>>,
    number: u64,
    flights: Vec<Flight<S>>,
}

impl<S: Store> Sender<S> {
    pub(super) fn new(shared: Arc<SharedQueue<S>>, number: u64) -> Self {
        Self {
            shared,
            number,
            flights: Vec::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let mut last = instant();
        loop {
            let now = instant();
            match self.shared.next(self.number, &mut self.flights, last, now) {
                Next::Send(ops) => {
                    last = now;
                    for op in ops {
                        self.shared.ask(op, now, &mut self.flights);
                    }
                }
                Next::Wait(until) => self.wait(until).await,
                Next::End => return,
            }
        }
    }

    /// Waits until something is answered, something has come, or it is time.
    async fn wait(&mut self, until: Option<Instant>) {
        let shared = Arc::clone(&self.shared);
        let mut came = pin!(shared.came.notified());
        let mut time = pin!(until.map(|until| sleep(until.saturating_duration_since(instant()))));
        let mut ended = Vec::new();
        poll_fn(|cx| {
            let mut i = 0;
            while let Some(flight) = self.flights.get_mut(i) {
                match flight.poll(cx) {
                    Poll::Ready(answer) => ended.push((self.flights.swap_remove(i).op, answer)),
                    Poll::Pending => i += 1,
                }
            }
            let is_time = time
                .as_mut()
                .as_pin_mut()
                .is_some_and(|time| time.poll(cx).is_ready());
            let came = came.as_mut().poll(cx).is_ready();
            if is_time || came || !ended.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        for (op, answer) in ended {
            shared.ended(op, answer);
        }
    }
}

/// If its runtime ends, what is under way is for the next one.
impl<S: Store> Drop for Sender<S> {
    fn drop(&mut self) {
        self.shared.end(self.number, &mut self.flights);
    }
}
