use std::sync::{Arc, Weak};

use tokio::time::{Instant, sleep};

use super::inner::{Asked, Inner};
use crate::store::Store;
use crate::util::instant;

/// Has what is left of a block refunded when nothing is spent of it, and at the latest when it is dropped: when the block is
/// too old, and with its runtime.
pub(super) struct Watch<S: Store> {
    inner: Weak<Inner<S>>,
    asked: Asked,
    looks: [Instant; 2],
}

impl<S: Store> Watch<S> {
    pub(super) fn new(inner: &Arc<Inner<S>>, asked: Asked, looks: [Instant; 2]) -> Self {
        Self { inner: Arc::downgrade(inner), asked, looks }
    }

    pub(super) async fn run(self) {
        let mut left = self.left();
        for at in self.looks {
            sleep(at.saturating_duration_since(instant())).await;
            if left.is_some() && self.left() == left {
                return;
            }
            left = self.left();
        }
    }

    fn left(&self) -> Option<u32> {
        self.inner.upgrade()?.left(&self.asked)
    }
}

impl<S: Store> Drop for Watch<S> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            inner.give_up(&self.asked);
        }
    }
}
