//! Notices that requests never have what a layer reads, which usually means a wrong order of layers.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use super::{Observer, event, or_log};

/// Reports, once, if none of the first 1,000 requests has what a layer reads.
#[derive(Default)]
pub(crate) struct Misses {
    observer: OnceLock<Arc<dyn Observer>>,
    /// Number of requests without it. [`Misses::REPORT_AT`] ends the count.
    count: AtomicU32,
}

impl Misses {
    /// Number of requests without it at which the problem is reported.
    pub(crate) const REPORT_AT: u32 = 1_000;

    /// Keeps the first observer.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    pub(crate) fn observer(&self) -> Option<&Arc<dyn Observer>> {
        self.observer.get()
    }

    /// Ends the count, since a request includes what the layer reads.
    #[inline]
    pub(crate) fn found(&self) {
        if self.count.load(Relaxed) < Self::REPORT_AT {
            self.count.store(Self::REPORT_AT, Relaxed);
        }
    }

    /// Counts a request without it.
    #[inline]
    pub(crate) fn missed(&self, problem: impl FnOnce() -> String) {
        if self.count.load(Relaxed) < Self::REPORT_AT
            && self.count.fetch_add(1, Relaxed) + 1 == Self::REPORT_AT
        {
            self.report(&problem());
        }
    }

    #[cold]
    pub(crate) fn report(&self, problem: &str) {
        or_log(self.observer()).misconfigured(&event::Misconfigured::new(problem));
    }
}
