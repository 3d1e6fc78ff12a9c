use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::{Flight, SharedQueue};
use crate::store::Store;

/// What a request has asked and waits for, on its own runtime.
pub(super) struct Awaited<S: Store> {
    pub(super) shared: Arc<SharedQueue<S>>,
    /// None once it is answered.
    pub(super) asked: Vec<Flight<S>>,
}

impl<S: Store> Future for Awaited<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(flight) = self.asked.last_mut() {
            let answer = ready!(flight.poll(cx));
            if let Some(Flight { op, .. }) = self.asked.pop() {
                self.shared.ended(op, answer);
            }
        }
        Poll::Ready(())
    }
}

/// If the request no longer waits, a sender does.
impl<S: Store> Drop for Awaited<S> {
    fn drop(&mut self) {
        if !self.asked.is_empty() {
            self.shared.keep(mem::take(&mut self.asked));
            self.shared.attend();
        }
    }
}
