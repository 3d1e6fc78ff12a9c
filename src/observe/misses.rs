//! Notices that requests never have what a layer reads, which usually means a wrong order of layers.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use super::{Observer, event, or_log};

/// Reports, once, if none of the first 1,000 requests has what a layer reads.
#[derive(Default)]
pub(crate) struct Misses {
    observer: OnceLock<Arc<dyn Observer>>,
    /// The number of requests without it. The count ends at [`Misses::ALL`].
    count: AtomicU32,
}

impl Misses {
    /// Number of requests after which a report is made.
    pub(crate) const ALL: u32 = 1_000;

    /// Keeps the first observer.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    pub(crate) fn observer(&self) -> Option<&Arc<dyn Observer>> {
        self.observer.get()
    }

    /// Ends the count.
    #[inline]
    pub(crate) fn end(&self) {
        if self.count.load(Relaxed) < Self::ALL {
            self.count.store(Self::ALL, Relaxed);
        }
    }

    /// Counts a request without it.
    #[inline]
    pub(crate) fn add(&self, problem: impl FnOnce() -> String) {
        if self.count.load(Relaxed) < Self::ALL && self.count.fetch_add(1, Relaxed) + 1 == Self::ALL
        {
            self.report(&problem());
        }
    }

    #[cold]
    pub(crate) fn report(&self, problem: &str) {
        or_log(self.observer()).misconfigured(&event::Misconfigured::new(problem));
    }
}
