//! The events of an [`Observer`](crate::observe::Observer): a struct for each of its methods, of the same name.
//!
//! More fields may come. Make one by its `new` for tests of your own observer, and where you ask a store yourself.

use std::time::Duration;

use crate::error::StoreError;
use crate::limit::{Decision, Key};

/// A layer got a decision.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Decided<'a> {
    /// The caller. `Debug` redacts it; [`Key::reveal`] reads it.
    pub key: &'a Key,
    /// The decision, with the [policies](Decision::policies) that it was made on.
    pub decision: &'a Decision,
    /// How long the check took.
    pub elapsed: Duration,
    /// Whether this was a dry run: a denial rejected nothing.
    pub dry_run: bool,
}

impl<'a> Decided<'a> {
    /// This caller's decision after this time, not in a dry run.
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
    /// The caller; `None` if it was the store itself, such as when it announces the instance. `Debug` redacts the key;
    /// [`Key::reveal`] reads it.
    pub key: Option<&'a Key>,
    /// Why.
    pub error: &'a StoreError,
}

impl<'a> Failed<'a> {
    /// This caller's check, with this error.
    pub const fn new(key: Option<&'a Key>, error: &'a StoreError) -> Self {
        Self { key, error }
    }
}

/// The server is misconfigured, so that a layer cannot count as it should.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Misconfigured<'a> {
    /// What is wrong, and how to fix it.
    pub problem: &'a str,
}

impl<'a> Misconfigured<'a> {
    /// With this problem.
    pub const fn new(problem: &'a str) -> Self {
        Self { problem }
    }
}

/// The primary store of a [`Fallback`](crate::Fallback) has failed too often: from here on the fallback decides.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Degraded<'a> {
    /// The last failure.
    pub error: &'a StoreError,
}

impl<'a> Degraded<'a> {
    /// With this last failure.
    pub const fn new(error: &'a StoreError) -> Self {
        Self { error }
    }
}

/// The primary store of a [`Fallback`](crate::Fallback) decides again.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Recovered {
    /// The duration of the outage.
    pub after: Duration,
}

impl Recovered {
    /// After this time.
    pub const fn new(after: Duration) -> Self {
        Self { after }
    }
}

/// A [`Fallback`](crate::Fallback) has charged to its primary store what it granted in an outage. Both numbers are
/// units of cost, without what was refunded or reset.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Reconciled {
    /// How much was charged: what still counted.
    pub charged: u64,
    /// How much could not be charged, because there were too many callers to log, or because the primary store failed
    /// again.
    pub dropped: u64,
}

impl Reconciled {
    /// So much of each.
    pub const fn new(charged: u64, dropped: u64) -> Self {
        Self { charged, dropped }
    }
}

/// A [`Leased`](crate::Leased) store spends nothing more of a block that it had charged ahead. All numbers are units of
/// cost.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Leased {
    /// How much was charged ahead.
    pub charged: u64,
    /// How much of that is refunded before it is too old: at the end of the store, or to make room for other blocks.
    pub refunded: u64,
    /// How much of that was too old to be spent, of which is refunded what still counts; or was forgotten by a reset.
    pub expired: u64,
    /// How much may have been charged ahead and is lost, since Redis did not answer: an upper bound.
    pub lost: u64,
}

impl Leased {
    /// So much of each.
    pub const fn new(charged: u64, refunded: u64, expired: u64) -> Self {
        Self {
            charged,
            refunded,
            expired,
            lost: 0,
        }
    }
}

/// A [`RedisStore`](crate::RedisStore) sends a script call; in a Redis Cluster, those of one round trip to a master.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Sends {
    /// How many checks are decided.
    pub checks: usize,
    /// How many more wait in the queue.
    pub waiting: usize,
}

impl Sends {
    /// So many of each.
    pub const fn new(checks: usize, waiting: usize) -> Self {
        Self { checks, waiting }
    }
}
