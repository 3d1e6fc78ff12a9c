//! Notices that requests never have what a layer reads, which usually means a wrong order of layers.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use super::{Event, Observer, or_log};
use crate::util::instant;

/// Reports, once, if none of the first 1,000 requests has what a layer reads. Any client can send these requests, so this is
/// only [suspected](Event::Suspected).
#[derive(Default)]
pub(crate) struct Misses {
    observer: OnceLock<Arc<dyn Observer>>,
    /// Number of requests without it, up to [`Misses::REPORT_AT`], or [`ENDED`].
    count: AtomicU32,
    /// Time of the first request without it.
    since: OnceLock<Instant>,
}

/// Ends the count.
const ENDED: u32 = u32::MAX;

impl Misses {
    /// Number of requests without it at which the problem is reported.
    pub(crate) const REPORT_AT: u32 = 1_000;
    /// Time after which the problem [lasts](Self::lasts), if no request has ended the count.
    pub(crate) const LASTS_AFTER: Duration = Duration::from_secs(600);

    /// Keeps the first observer.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    pub(crate) fn observer(&self) -> Option<&Arc<dyn Observer>> {
        self.observer.get()
    }

    /// Returns `true` until the count ends.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.count.load(Relaxed) < Self::REPORT_AT
    }

    /// Returns `true` after the first request without it, until the count ends.
    #[inline]
    pub(crate) fn is_counting(&self) -> bool {
        (1..Self::REPORT_AT).contains(&self.count.load(Relaxed))
    }

    /// Ends the count, since a request includes what the layer reads.
    #[inline]
    pub(crate) fn found(&self) {
        // Without a write per request, for which processors would contend.
        if self.count.load(Relaxed) != ENDED {
            self.count.store(ENDED, Relaxed);
        }
    }

    /// Counts a request without it.
    #[inline]
    pub(crate) fn missed(&self, problem: impl FnOnce() -> String) {
        if self.count.load(Relaxed) < Self::REPORT_AT && self.add() == Self::REPORT_AT {
            self.suspect(&problem());
        }
    }

    /// Returns the new count, or 0 if another request has ended it.
    fn add(&self) -> u32 {
        let former = self.count.fetch_update(Relaxed, Relaxed, |count| {
            if count < Self::REPORT_AT {
                Some(count + 1)
            } else {
                None
            }
        });
        let Ok(former) = former else {
            return 0;
        };
        if former == 0 {
            let _ = self.since.set(instant());
        }
        former + 1
    }

    /// Reports, once, as misconfigured that no request has had it for ten minutes, after the report of the first 1,000. Call
    /// it for a request without it.
    #[inline]
    pub(crate) fn lasts(&self, problem: impl FnOnce() -> String) {
        if self.count.load(Relaxed) == Self::REPORT_AT && self.end_when_it_lasts() {
            self.report(&problem());
        }
    }

    /// Ends the count after ten minutes. Returns `true` if this request has ended it.
    fn end_when_it_lasts(&self) -> bool {
        let Some(since) = self.since.get() else {
            return false;
        };
        if instant() - *since < Self::LASTS_AFTER {
            return false;
        }
        // If several requests get here concurrently, only one exchanges the value, and reports.
        let end = self
            .count
            .compare_exchange(Self::REPORT_AT, ENDED, Relaxed, Relaxed);
        end.is_ok()
    }

    #[cold]
    pub(crate) fn suspect(&self, problem: &str) {
        or_log(self.observer()).notify(&Event::Suspected { problem });
    }

    #[cold]
    pub(crate) fn report(&self, problem: &str) {
        or_log(self.observer()).notify(&Event::Misconfigured { problem });
    }
}
