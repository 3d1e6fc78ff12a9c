//! The events of an [`Observer`](crate::observe::Observer): a struct for each of its methods, of the same name.
//!
//! Fields may be added. Use `new` to create an event, for tests of your own observer or for code
//! that calls a store itself. An added field is not an argument of `new`: it has a default, and can
//! be set afterwards.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use super::mistakes;
use crate::error::StoreError;
use crate::limit::{Decision, Key};

/// A layer or a [`Limiter`](crate::Limiter) received a decision.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Decided<'a> {
    /// The caller. `Debug` redacts it; [`Key::reveal`] returns it in clear.
    pub key: &'a Key,
    /// The decision, with its [policies](Decision::policies).
    pub decision: &'a Decision,
    /// The duration of the check.
    pub elapsed: Duration,
    /// Whether this was a dry run: a denial rejected nothing.
    pub dry_run: bool,
}

impl<'a> Decided<'a> {
    /// Creates an event outside of a dry run.
    pub const fn new(key: &'a Key, decision: &'a Decision, elapsed: Duration) -> Self {
        Self {
            key,
            decision,
            elapsed,
            dry_run: false,
        }
    }
}

/// A store could not decide a check.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Failed<'a> {
    /// The caller; `None` if the error concerns the store itself, such as when it announces the
    /// instance. `Debug` redacts the key; [`Key::reveal`] returns it in clear.
    pub key: Option<&'a Key>,
    /// The error.
    pub error: &'a StoreError,
    /// Whether no store decided the check of a request, so that a layer rejects the request or lets it pass uncounted.
    /// `false` if a [`Fallback`](crate::Fallback) decides, in a dry run, and for a settlement.
    pub unanswered: bool,
}

impl<'a> Failed<'a> {
    /// Creates an event of a failure that fails no request.
    pub const fn new(key: Option<&'a Key>, error: &'a StoreError) -> Self {
        Self {
            key,
            error,
            unanswered: false,
        }
    }
}

/// A request had no key for the first extractor of an [`or`](crate::extract::KeyExtractor::or), and the second one found a key.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SecondKey<'a> {
    /// The key of the second extractor. `Debug` redacts it; [`Key::reveal`] returns it in clear.
    pub key: &'a Key,
}

impl<'a> SecondKey<'a> {
    /// Creates an event.
    pub const fn new(key: &'a Key) -> Self {
        Self { key }
    }
}

/// A layer did not count a request.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Uncounted<'a> {
    /// Why it did not.
    pub reason: UncountedReason<'a>,
    /// Whether the request passed.
    pub allowed: bool,
}

/// Why a layer did not count a request.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum UncountedReason<'a> {
    /// The layer [skips](crate::RateLimitLayer::skip) it.
    Skipped,
    /// No policy limits it.
    Exempt,
    /// It has no key, or a malformed one. The [`MissingKey`](crate::extract::MissingKey) names the key, and may quote the client.
    NoKey(&'a (dyn Error + 'static)),
    /// No request can have a key, which is also [reported](super::Observer::misconfigured).
    Misconfigured,
    /// No store decided it, and it passed by [`OnError::Allow`](crate::reject::OnError). Also [reported](super::Observer::failed).
    Failed,
}

impl<'a> Uncounted<'a> {
    /// Creates an event of a request that passed.
    pub const fn new(reason: UncountedReason<'a>) -> Self {
        Self {
            reason,
            allowed: true,
        }
    }
}

impl UncountedReason<'_> {
    /// Returns the name, as in metrics: `skipped`, `exempt`, `no_key`, `misconfigured` or `failed`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Exempt => "exempt",
            Self::NoKey(_) => "no_key",
            Self::Misconfigured => "misconfigured",
            Self::Failed => "failed",
        }
    }
}

/// Rate limiting is misconfigured, so requests are not counted as intended.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Misconfigured<'a> {
    /// The problem and its fix.
    pub problem: &'a str,
}

impl<'a> Misconfigured<'a> {
    /// Creates an event.
    pub const fn new(problem: &'a str) -> Self {
        Self { problem }
    }

    /// Returns the [code](crate::guide::pitfalls#error-codes) at the end of the problem, such as `no-peer-address`. `None` if the
    /// problem is reported by an extractor of your own.
    pub fn code(&self) -> Option<&'static str> {
        mistakes::code(self.problem)
    }
}

/// Rate limiting may be misconfigured.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Suspected<'a> {
    /// The problem and its fix, or when to ignore it.
    pub problem: &'a str,
}

impl<'a> Suspected<'a> {
    /// Creates an event.
    pub const fn new(problem: &'a str) -> Self {
        Self { problem }
    }

    /// Returns the [code](crate::guide::pitfalls#error-codes) at the end of the problem, as [`Misconfigured::code`] does.
    pub fn code(&self) -> Option<&'static str> {
        mistakes::code(self.problem)
    }
}

/// The primary store of a [`Fallback`](crate::Fallback) has failed too often, so the fallback
/// decides.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Degraded<'a> {
    /// The last failure.
    pub error: &'a StoreError,
    /// The number of instances that [share](crate::store::FallbackBuilder::share) each limit. With 1, each instance grants the whole limit.
    pub share: NonZeroU32,
    /// Whether `share` counts [live instances](crate::store::Share::Alive), instead of being a constant.
    pub is_counted: bool,
}

impl<'a> Degraded<'a> {
    /// Creates an event with a constant share of 1.
    pub const fn new(error: &'a StoreError) -> Self {
        Self {
            error,
            share: NonZeroU32::MIN,
            is_counted: false,
        }
    }

    /// Returns the end of the log line, which explains a share of 1.
    pub(super) fn hint(&self) -> &'static str {
        match (self.share, self.is_counted) {
            (NonZeroU32::MIN, false) => {
                "; every instance grants the whole limit: set `FallbackBuilder::share` if there are several"
            }
            (NonZeroU32::MIN, true) => {
                "; no other instance was found, so this one grants the whole limit"
            }
            _ => "",
        }
    }
}

/// The deadline of a check of a [`Fallback`](crate::Fallback) was noticed late: handlers keep the threads of the runtime,
/// or the process gets too little processor time.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RuntimeLate {
    /// The sum of the runtime's delays while the check waited. The check waited for at most two deadlines and this time.
    pub by: Duration,
    /// Whether no reply was read in the [graces](crate::store::FallbackBuilder::deadline) either, so that the fallback decides although the
    /// primary store may be well. A check that shows a failure of the store is [reported](Failed) as such.
    pub gave_up: bool,
}

impl RuntimeLate {
    /// Creates an event.
    pub const fn new(by: Duration, gave_up: bool) -> Self {
        Self { by, gave_up }
    }
}

/// The fallback of a [`Fallback`](crate::Fallback) still decides, a minute after the previous report.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct StillDegraded<'a> {
    /// The duration of the outage until now.
    pub after: Duration,
    /// The checks that the fallback has decided in the outage.
    pub checks: u64,
    /// As in [`Degraded`].
    pub share: NonZeroU32,
    /// Why the last probe failed. It may differ from the error that began the outage. `None` if the primary store replies,
    /// but the fallback's grants are not all charged to it.
    pub error: Option<&'a StoreError>,
}

impl StillDegraded<'_> {
    /// Creates an event without an error.
    pub const fn new(after: Duration, checks: u64, share: NonZeroU32) -> Self {
        Self {
            after,
            checks,
            share,
            error: None,
        }
    }
}

/// The primary store of a [`Fallback`](crate::Fallback) decides again. Costs are in units. Those of failures just before
/// the outage are included.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Recovered {
    /// The duration of the outage.
    pub after: Duration,
    /// The checks that the fallback has decided.
    pub checks: u64,
    /// The cost that the fallback has granted. The part that is neither charged nor dropped has expired or was refunded,
    /// or the primary store may have charged it itself.
    pub granted: u64,
    /// The cost that was [charged](Reconciled::charged) to the primary store until now.
    pub charged: u64,
    /// The cost that could [not be charged](Reconciled::dropped).
    pub dropped: u64,
}

impl Recovered {
    /// Creates an event of an outage without checks.
    pub const fn new(after: Duration) -> Self {
        Self {
            after,
            checks: 0,
            granted: 0,
            charged: 0,
            dropped: 0,
        }
    }
}

/// A [`Fallback`](crate::Fallback) charged its grants of an outage to its primary store. Both
/// numbers are units of cost, without refunded or reset ones.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Reconciled {
    /// The cost that was charged: the part that still counted.
    pub charged: u64,
    /// The cost that could not be charged, because there were too many callers to record, because
    /// the primary store failed again, or because it exceeds the debt of a policy.
    pub dropped: u64,
}

impl Reconciled {
    /// Creates an event.
    pub const fn new(charged: u64, dropped: u64) -> Self {
        Self { charged, dropped }
    }
}

/// A block of a [`Leased`](crate::Leased) store has ended: nothing more is spent from it. If Redis
/// did not reply to the request for a block, only [`lost`](Self::lost) is above 0. All numbers are
/// units of cost.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct EndedBlock {
    /// The cost charged in advance.
    pub charged: u64,
    /// The part that is refunded before it expires, because the store was shut down or dropped.
    pub refunded: u64,
    /// The part that expired unspent, or that a reset cleared. An expired part is refunded as far
    /// as it still counts in the shared store.
    pub expired: u64,
    /// The cost that may have been charged in advance and is lost because Redis did not reply: an
    /// upper bound.
    pub lost: u64,
}

impl EndedBlock {
    /// Creates an event, with nothing lost.
    pub const fn new(charged: u64, refunded: u64, expired: u64) -> Self {
        Self {
            charged,
            refunded,
            expired,
            lost: 0,
        }
    }
}

/// A [`RedisStore`](crate::RedisStore) sends a script call; in a Redis Cluster, the calls of one
/// round trip to a master.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Sent {
    /// The number of checks sent.
    pub checks: usize,
    /// The number of checks that still wait in the queue.
    pub waiting: usize,
}

impl Sent {
    /// Creates an event.
    pub const fn new(checks: usize, waiting: usize) -> Self {
        Self { checks, waiting }
    }
}
