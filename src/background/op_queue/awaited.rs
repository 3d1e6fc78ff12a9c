use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::{Flight, SharedQueue};

/// A check that a request awaits, on the runtime of the request.
pub(super) struct Awaited {
    pub(super) shared: Arc<SharedQueue>,
    /// Empty after the reply.
    pub(super) asked: Vec<Flight>,
}

impl Future for Awaited {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(flight) = self.asked.last_mut() {
            let reply = ready!(flight.poll(cx));
            if let Some(Flight { op, .. }) = self.asked.pop() {
                self.shared.ended(op, reply);
            }
        }
        // The operation may have to be retried.
        self.shared.attend();
        Poll::Ready(())
    }
}

/// If the request is dropped, the sender takes over waiting for the reply.
impl Drop for Awaited {
    fn drop(&mut self) {
        if !self.asked.is_empty() {
            self.shared.keep(mem::take(&mut self.asked));
            self.shared.attend();
        }
    }
}
