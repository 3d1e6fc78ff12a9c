use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use super::mistakes;
use crate::error::StoreError;
use crate::limit::{Decision, Key};

/// An event that an [`Observer`](super::Observer) is notified of.
///
/// Variants and fields may be added. The functions create events, for tests of your own observer or for code that calls a
/// store itself. An added field is not an argument of its function: it has a default.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A layer or a [`Limiter`](crate::Limiter) received a decision.
    #[non_exhaustive]
    Decided {
        /// The caller. `Debug` redacts it; [`Key::reveal`] returns it in clear.
        key: &'a Key,
        /// The decision, with its [policies](Decision::policies).
        decision: &'a Decision,
        /// The duration of the check.
        elapsed: Duration,
        /// Whether this was a dry run: a denial rejected nothing.
        dry_run: bool,
    },
    /// A store could not decide a check. A [`Fallback`](crate::Fallback) reports this before it decides the check itself, and
    /// a layer if no store decided. Also reported if a request could not be
    /// [settled](crate::RateLimitLayer::settle).
    #[non_exhaustive]
    Failed {
        /// The caller; `None` if the error concerns the store itself, such as when it announces the instance. `Debug` redacts
        /// the key; [`Key::reveal`] returns it in clear.
        key: Option<&'a Key>,
        /// The error.
        error: &'a StoreError,
        /// Whether a request has no decision of any store, so that a layer rejects it or admits it uncounted.
        /// `false` if a [`Fallback`](crate::Fallback) decides, in a dry run, and for a settlement.
        unanswered: bool,
    },
    /// A layer or a [`Limiter`](crate::Limiter) did not count a request: it passed uncounted, or was rejected because it has
    /// no key.
    #[non_exhaustive]
    Uncounted {
        /// Why it was not counted.
        reason: UncountedReason<'a>,
        /// Whether the request passed.
        allowed: bool,
    },
    /// The first extractor of an [`or`](crate::extract::KeyExtractor::or) found no key in a request, and the second one did.
    #[non_exhaustive]
    SecondKey {
        /// The key of the second extractor. `Debug` redacts it; [`Key::reveal`] returns it in clear.
        key: &'a Key,
    },
    /// Rate limiting is misconfigured. Either a layer can count no request, and every HTTP request gets a 500. Or a layer
    /// skips a policy that it cannot enforce, a request was charged twice, a policy is leased without effect, or the Redis
    /// user lacks a right. Each layer and store reports this at most once a minute.
    #[non_exhaustive]
    Misconfigured {
        /// The problem and its fix, which end with the [code](Event::code).
        problem: &'a str,
    },
    /// Rate limiting may be misconfigured: the application may intend it, or clients may cause it, so it is no reason for an
    /// alert. Each layer and store reports a problem once.
    #[non_exhaustive]
    Suspected {
        /// The problem and its fix, or when to ignore it. It ends with the [code](Event::code).
        problem: &'a str,
    },
    /// The primary store of a [`Fallback`](crate::Fallback) has failed too often, so the fallback decides.
    #[non_exhaustive]
    Degraded {
        /// The last failure.
        error: &'a StoreError,
        /// The number of instances that [share](crate::store::FallbackBuilder::share) each limit. With 1, each instance
        /// grants the whole limit.
        share: NonZeroU32,
        /// Whether `share` counts [live instances](crate::store::Instances), instead of being a constant.
        is_counted: bool,
    },
    /// The fallback still decides: once a minute of an outage, from the second minute on.
    #[non_exhaustive]
    StillDegraded {
        /// The duration of the outage until now.
        after: Duration,
        /// The checks that the fallback has decided in the outage.
        checks: u64,
        /// As in [`Degraded`](Self::Degraded).
        share: NonZeroU32,
        /// Why the last probe failed. It may differ from the error that began the outage. `None` if the primary store
        /// replies, but the fallback's grants are not all charged to it.
        error: Option<&'a StoreError>,
    },
    /// The primary store of a [`Fallback`](crate::Fallback) decides again. Costs are in units, and
    /// include the failures just before the outage.
    #[non_exhaustive]
    Recovered {
        /// The duration of the outage.
        after: Duration,
        /// The checks that the fallback has decided.
        checks: u64,
        /// The cost that the fallback has granted. The part that is neither charged nor dropped has expired or was refunded,
        /// or the primary store may have charged it itself.
        granted: u64,
        /// The cost that was [charged](Self::Reconciled) to the primary store until now.
        charged: u64,
        /// The cost that could [not be charged](Self::Reconciled).
        dropped: u64,
    },
    /// A [`Fallback`](crate::Fallback) charged its grants of an outage, or of a single failure, to its primary store. Both
    /// numbers are units of cost, without refunded or reset ones.
    #[non_exhaustive]
    Reconciled {
        /// The cost that was charged: the part that still counted.
        charged: u64,
        /// The cost that could not be charged, because there were too many callers to record, because the primary store
        /// failed again, or because it exceeds the debt of a policy.
        dropped: u64,
    },
    /// The deadline of a check of a [`Fallback`](crate::Fallback) was noticed late: handlers keep the threads of the runtime,
    /// or the process gets too little processor time. The primary store is not the cause.
    #[non_exhaustive]
    RuntimeLate {
        /// The sum of the runtime's delays while the check waited. The check waited for at most two deadlines and this time.
        by: Duration,
        /// Whether no reply was read in the [graces](crate::store::FallbackBuilder::deadline) either, so that the fallback
        /// decides although the primary store may be well. A check that shows a failure of the store is
        /// [reported](Self::Failed) as such.
        gave_up: bool,
    },
    /// A block of a [`Leased`](crate::Leased) store has ended: it is spent, expired, refunded or reset. If Redis did not
    /// reply to the request for a block, only `lost` is above 0. All numbers are units of cost.
    #[non_exhaustive]
    LeasedBlockEnded {
        /// The cost charged in advance.
        charged: u64,
        /// The part that is refunded before it expires, because the store was shut down or dropped.
        refunded: u64,
        /// The part that expired unspent, or that a reset cleared. An expired part is refunded as far as it still counts in
        /// the shared store.
        expired: u64,
        /// The cost that may have been charged in advance and is lost because Redis did not reply: an upper bound.
        lost: u64,
    },
    /// A [`RedisStore`](crate::RedisStore) sends a script call; in a Redis Cluster, the calls of one round trip to a master.
    #[non_exhaustive]
    Sent {
        /// The number of checks sent.
        checks: usize,
        /// The number of checks that still wait in the queue.
        waiting: usize,
    },
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
    /// No request can have a key, which is also [reported](Event::Misconfigured).
    Misconfigured,
    /// No store decided it, and it passed by [`OnError::Allow`](crate::reject::OnError). Also [reported](Event::Failed).
    Failed,
}

impl<'a> Event<'a> {
    /// Creates an [`Event::Decided`].
    pub const fn decided(
        key: &'a Key,
        decision: &'a Decision,
        elapsed: Duration,
        dry_run: bool,
    ) -> Self {
        Self::Decided {
            key,
            decision,
            elapsed,
            dry_run,
        }
    }

    /// Creates an [`Event::Failed`].
    pub const fn failed(key: Option<&'a Key>, error: &'a StoreError, unanswered: bool) -> Self {
        Self::Failed {
            key,
            error,
            unanswered,
        }
    }

    /// Creates an [`Event::Uncounted`].
    pub const fn uncounted(reason: UncountedReason<'a>, allowed: bool) -> Self {
        Self::Uncounted { reason, allowed }
    }

    /// Creates an [`Event::SecondKey`].
    pub const fn second_key(key: &'a Key) -> Self {
        Self::SecondKey { key }
    }

    /// Creates an [`Event::Misconfigured`].
    pub const fn misconfigured(problem: &'a str) -> Self {
        Self::Misconfigured { problem }
    }

    /// Creates an [`Event::Suspected`].
    pub const fn suspected(problem: &'a str) -> Self {
        Self::Suspected { problem }
    }

    /// Creates an [`Event::Degraded`].
    pub const fn degraded(error: &'a StoreError, share: NonZeroU32, is_counted: bool) -> Self {
        Self::Degraded {
            error,
            share,
            is_counted,
        }
    }

    /// Creates an [`Event::StillDegraded`].
    pub const fn still_degraded(
        after: Duration,
        checks: u64,
        share: NonZeroU32,
        error: Option<&'a StoreError>,
    ) -> Self {
        Self::StillDegraded {
            after,
            checks,
            share,
            error,
        }
    }

    /// Creates an [`Event::Recovered`].
    pub const fn recovered(
        after: Duration,
        checks: u64,
        granted: u64,
        charged: u64,
        dropped: u64,
    ) -> Self {
        Self::Recovered {
            after,
            checks,
            granted,
            charged,
            dropped,
        }
    }

    /// Creates an [`Event::Reconciled`].
    pub const fn reconciled(charged: u64, dropped: u64) -> Self {
        Self::Reconciled { charged, dropped }
    }

    /// Creates an [`Event::RuntimeLate`].
    pub const fn runtime_late(by: Duration, gave_up: bool) -> Self {
        Self::RuntimeLate { by, gave_up }
    }

    /// Creates an [`Event::LeasedBlockEnded`].
    pub const fn leased_block_ended(charged: u64, refunded: u64, expired: u64, lost: u64) -> Self {
        Self::LeasedBlockEnded {
            charged,
            refunded,
            expired,
            lost,
        }
    }

    /// Creates an [`Event::Sent`].
    pub const fn sent(checks: usize, waiting: usize) -> Self {
        Self::Sent { checks, waiting }
    }

    /// Returns the [code](crate::guide::pitfalls#error-codes) at the end of the problem of a
    /// [misconfiguration](Self::Misconfigured), also of a [suspected](Self::Suspected) one, such as `no-peer-address`. `None` for
    /// other events, and if the problem is reported by an extractor of your own.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            Self::Misconfigured { problem } | Self::Suspected { problem } => {
                mistakes::code(problem)
            }
            _ => None,
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

/// Returns the end of the report of an [`Event::Degraded`], which explains a share of 1.
pub(super) fn share_hint(share: NonZeroU32, is_counted: bool) -> &'static str {
    match (share, is_counted) {
        (NonZeroU32::MIN, false) => {
            "; every instance grants the whole limit: set `FallbackBuilder::share` if there are several"
        }
        (NonZeroU32::MIN, true) => {
            "; no other instance was found, so this one grants the whole limit"
        }
        _ => "",
    }
}
