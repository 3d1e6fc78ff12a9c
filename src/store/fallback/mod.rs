//! A store made of two stores. A circuit breaker selects the store that decides, and grants of the fallback are charged
//! to the primary store afterwards.
//!
//! | file | contents |
//! |---|---|
//! | `check` | one check: the primary store's reply until the deadline, then the fallback's |
//! | `joint` | a check of several keys |
//! | `breaker` | the circuit breaker: closed, half-open, open |
//! | `accounts`, `account` | grants and resets of the fallback that the primary store lacks |
//! | `recovery` | the background task that probes the primary store, reconciles and closes the breaker |
//!
//! A caller has an account for each list of policies under which the fallback has granted or reset
//! something. Requests in flight have none: the fallback mirrors their slots, and their owners renew
//! and release them in the primary store. Accounts exist in memory only. An account has two counts of each policy, with and
//! without the grants that were not sent to the primary store, a flag for a reset, and the former
//! counts while a charge is in flight. A reconciliation charges the difference of the counts, and
//! removes the accounts with nothing left to charge. If all places are taken, a failed probe removes these too.
//!
//! - **Lost reply.** After the deadline the fallback decides. The primary store may have charged
//!   the check, so it is neither sent again nor recorded in an account, and its grant is never
//!   refunded. A reconciling charge without a reply is not repeated, but reported as dropped. A
//!   reset, of a check or of a reconciliation, is repeated until there is a reply, if there is room
//!   for an account.
//! - **Busy runtime.** If the runtime is late while a check waits, graces follow its deadline. If these pass too, the
//!   fallback decides as after a lost reply, the breaker learns nothing, and a probe is sent.
//! - **Failing store.** The breaker opens after several failures. The fallback decides and records its grants until a
//!   reconciliation has charged them.
//! - **Refund.** A decision states whether the fallback made it, and when. A grant that is in no
//!   account is never refunded. If an account has the charge, the refund is deducted there. If the
//!   charge is in flight to the primary store, the refund fails as unsent, and its owner retries
//!   it. After that, and for a charge that the primary store made, the primary store refunds it;
//!   while the breaker is open, this fails as unsent too. A refund that names no charge is deducted
//!   from the account of its policies, or else sent to the primary store. If a custom fallback
//!   fails a refund, the account has deducted it nevertheless, and it is not repeated.
//! - **End of a runtime.** The accounts stay. The next check that the fallback decides, or that succeeds while there are
//!   accounts, starts the recovery task on its own runtime. A charge or reset in flight counts as lost. When the process
//!   ends, its accounts are lost.

mod account;
mod accounts;
mod breaker;
mod check;
mod joint;
#[cfg(test)]
mod model;
mod outage;
mod recovery;
mod share;
#[cfg(test)]
mod tests;

/// The shared types of `accounts` and `breaker`. `model` compiles these with a scheduler's types.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
    pub(super) use std::sync::{Arc, Mutex, MutexGuard};

    pub(super) use crate::util::lock;
}

use std::fmt;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::accounts::Accounts;
use self::breaker::Breaker;
use self::check::{FallbackFuture, Partition};
use super::{
    Answer, Backend, BlocksSent, Health, Hooks, Instances, JointFuture, LocalStore, Observer,
    Store, StoreError, Unreconciled, Waiters, Withdraw, flush, joint::together, probe,
};
use crate::background::TaskOwner;
use crate::blocks::{Blocks, TakenChanges};
use crate::error::ConfigError;
use crate::limit::{Check, Decision, JointCheck, Key};
use crate::observe::{Event, shared_observer};
use crate::util::{Clock, OnceFlag};

/// A store made of two stores: the second answers when the first cannot.
///
/// - **Deadline.** The fallback decides a check that the primary store has not decided in time. A
///   deadline that a busy runtime notices late is no evidence about the primary store, and opens no breaker. A
///   check that was sent to the primary store without a reply is never sent again. A check that
///   still waits to be sent is withdrawn.
/// - **Breaker.** After several consecutive failures every check goes to the fallback immediately: see
///   [`failures`](FallbackBuilder::failures). A background task probes the primary store, with one probe at a time.
///   A check that is dropped before its deadline is no failure, but starts a probe.
///   A store with partitions, like a Redis Cluster, has a breaker for each of them,
///   so that a master that is down degrades only its callers.
/// - **Warm.** The fallback follows the decisions of the primary store, so that a caller keeps its
///   count in an outage. It ignores decisions that do not include all grants of the fallback: those
///   that arrive while the breaker is open, and those on checks sent before these grants were charged.
/// - **Share.** While the fallback decides, each instance grants its share of a policy: see
///   [`share`](FallbackBuilder::share). A cost that fits the whole policy and not the share is
///   [denied](crate::check::Outcome::Denied) for 250 ms: only the primary store can grant it.
/// - **No turns.** The fallback decides a [take ahead](crate::check::Check::take_ahead) as a
///   [take](crate::check::Check::take).
/// - **Reconcile.** The unexpired grants of the fallback are charged to the primary store once, and
///   resets are repeated there. After an outage this happens before the primary store decides
///   again, beginning with the callers that have used most of their limits. With more than one
///   instance in the [share](FallbackBuilder::share), each waits until all others had the time to notice the end of the
///   outage, and then for the last of them to reconcile, up to ten seconds. With the breaker closed,
///   such as after a full queue, it happens within a second. Per caller and outage, at most one burst
///   more than the policy is granted.
/// - **Refunds** go where the charge was made: see [`Decision::refund`](crate::check::Decision::refund).
///
/// [`Decision::source`](crate::check::Decision::source) returns where a decision was made, and an [`Observer`] is
/// notified of every change.
///
/// Clones share the breaker, the grants to reconcile and both stores.
///
/// # Runtimes
///
/// The task that probes and reconciles runs on the tokio runtime of the check that noticed a failure.
/// After that runtime has shut down, the next check starts the task on its own runtime. While that
/// runtime is alive and runs nothing, no outage ends. A multi-threaded runtime always runs, and
/// so does `#[tokio::main]`. A current-thread runtime runs only inside of `block_on`: with a
/// `block_on` for each check, an outage would never end. Keep one thread in `block_on` there, or use
/// a multi-threaded runtime.
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
pub struct Fallback<P, F> {
    /// One for each partition of the primary store.
    partitions: Arc<[Arc<Partition<P, F>>]>,
}

#[derive(Debug, Clone)]
struct FallbackSettings {
    deadline: Duration,
    failures: NonZeroU32,
    share: Instances,
    observer: OnceLock<Arc<dyn Observer>>,
}

/// Builds a [`Fallback`], from [`Fallback::builder`].
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::builder(redis, LocalStore::default())
///     .deadline(Duration::from_millis(50))?
///     .share(4)
///     .build();
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug)]
#[must_use = "call `build` to create the store"]
pub struct FallbackBuilder<P, F> {
    primary: P,
    fallback: F,
    settings: FallbackSettings,
}

impl<P: Store, F: Store> FallbackBuilder<P, F> {
    /// Sets the deadline of the primary store for a check, from the call of [`check`](Store::check). Defaults to 100
    /// ms, or to the [`timeout`](crate::store::RedisStoreBuilder::timeout) of the [`RedisStore`](crate::RedisStore) if that
    /// is shorter. Over another `Fallback` it is twice the inner deadline: that one's fallback decides in the rest.
    ///
    /// If the runtime is late in that time, because handlers keep its threads, up to eight graces follow: together another
    /// deadline, and the delays of the runtime. See [a busy runtime](crate::guide::faults#a-busy-runtime).
    ///
    /// # Errors
    ///
    /// Over a `RedisStore`, if the deadline is above its timeout, which would end a call first, or below 1 ms. Over another
    /// `Fallback`, if it is not above the inner deadline.
    pub fn deadline(mut self, deadline: Duration) -> Result<Self, ConfigError> {
        let primary = self.primary.backend();
        match primary.deadline() {
            Some(inner) if primary.has_fallback() => refuse_outer_deadline(deadline, inner)?,
            Some(timeout) => refuse_deadline(deadline, timeout)?,
            None => {}
        }
        self.settings.deadline = deadline;
        Ok(self)
    }

    /// Sets the number of consecutive failures that open the breaker. Defaults to 3.
    ///
    /// The unit is a call, not a check: all checks that fail together with the first one, such as those on a broken
    /// connection, count as one failure. After that, each check that is sent to the primary store counts. Errors that
    /// concern one check only, such as a missing permission for its strategy, do not count, nor does a full queue. An
    /// error from a [node of a cluster](crate::store::ErrorKind::ClusterNode) opens the breaker immediately.
    ///
    /// Between the first failure and the next success, checks are sent to the primary store one at a time, and the
    /// fallback decides all others. So if the server stops replying, only the checks in flight, and at most `failures`
    /// more, wait for the deadline.
    pub fn failures(mut self, failures: NonZeroU32) -> Self {
        self.settings.failures = failures;
        self
    }

    /// Sets how many instances share a policy during an outage: a number, or the
    /// [`Instances`](crate::store::Instances) of an announcement. Defaults to 1: each instance grants the whole policy.
    ///
    /// A cost above the share is denied in an outage. The first one under each policy is reported as
    /// [misconfigured](Event::Misconfigured), unless the whole policy does not allow it either.
    pub fn share(mut self, share: impl Into<Instances>) -> Self {
        self.settings.share = share.into();
        self
    }

    /// Sets the observer of failures and state changes, for this store and for both inner stores unless they have one.
    /// Defaults to the [observer](crate::RateLimitLayer::observer) of the first layer over the store, or else to [a log
    /// of problems](Observer).
    pub fn observer(mut self, observer: impl Observer) -> Self {
        let observer = shared_observer(observer);
        self.settings.observer = OnceLock::from(observer);
        self
    }

    /// Creates the store, with a closed breaker.
    #[must_use]
    pub fn build(self) -> Fallback<P, F> {
        let observer = self.settings.observer.get().cloned();
        let store = Fallback::with_settings(self.primary, self.fallback, self.settings);
        if let Some(observer) = observer {
            store.backend().observe(&observer);
        }
        store
    }
}

impl<P: Store, F: Store> Fallback<P, F> {
    /// The default deadline of a check.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
    /// The default number of failures in a row that open the breaker.
    pub const DEFAULT_FAILURES: NonZeroU32 = NonZeroU32::MIN.saturating_add(2);

    /// Creates a store in which `primary` decides, or `fallback` if it cannot, with the default settings. For others, use
    /// the [`builder`](Self::builder).
    ///
    /// The fallback should be a [`LocalStore`] itself, not a wrapper around one: wrap the `Fallback` instead. Another store
    /// may run user code, so it decides without the lock of the caller. A concurrent reply of the primary store may then
    /// remove a grant from its count, so that more than one burst beyond the policy is granted to a caller in an outage.
    /// The first check [reports](Event::Misconfigured) such a store.
    pub fn new(primary: P, fallback: F) -> Self {
        Self::builder(primary, fallback).build()
    }

    /// Returns a builder of a store in which `primary` decides, or `fallback` if it cannot: see [`new`](Self::new).
    pub fn builder(primary: P, fallback: F) -> FallbackBuilder<P, F> {
        let has_fallback = primary.backend().has_fallback();
        let deadline = match primary.backend().deadline() {
            Some(inner) if has_fallback => inner.saturating_mul(2),
            Some(timeout) => timeout.min(Self::DEFAULT_DEADLINE),
            None => Self::DEFAULT_DEADLINE,
        };
        FallbackBuilder {
            primary,
            fallback,
            settings: FallbackSettings {
                deadline,
                failures: Self::DEFAULT_FAILURES,
                share: Instances::from(1),
                observer: OnceLock::new(),
            },
        }
    }

    fn with_settings(primary: P, fallback: F, settings: FallbackSettings) -> Self {
        let count = primary.backend().partitions().max(1);
        let outage = Arc::default();
        let examined = Arc::new(OnceFlag::new());
        let small_shares = Arc::default();
        // One account for each caller that a local store holds, in all partitions together.
        let free = Arc::new(LocalStore::DEFAULT_KEYS.get().into());
        let settings = Arc::new(settings);
        let partition = |probe| {
            Arc::new(Partition {
                primary: primary.clone(),
                fallback: fallback.clone(),
                settings: Arc::clone(&settings),
                probe,
                breaker: Breaker::new(settings.failures.get()),
                outage: Arc::clone(&outage),
                examined: Arc::clone(&examined),
                small_shares: Arc::clone(&small_shares),
                abandoned: AtomicBool::new(false),
                recovery: TaskOwner::new(),
                accounts: Accounts::new(Arc::clone(&free)),
                clock: Clock::new(),
            })
        };
        Self {
            partitions: probes(&primary, count).into_iter().map(partition).collect(),
        }
    }

    /// The partition of a caller.
    fn partition(&self, key: &Key) -> &Arc<Partition<P, F>> {
        match &*self.partitions {
            [one] => one,
            partitions => {
                &partitions[partitions[0].primary.backend().partition(key) % partitions.len()]
            }
        }
    }
}

impl<P, F> Fallback<P, F> {
    /// Returns the number of instances of the [share](FallbackBuilder::share).
    pub(super) fn instances(&self) -> Instances {
        self.partitions[0].settings.share.clone()
    }

    /// Returns `true` if the breaker is open, so that the fallback decides: see [`health`](Store::health). With
    /// partitions, `true` if any breaker is open. `false` until enough checks have failed, so a service
    /// without requests does not notice an outage. A peek finds out, and charges nothing:
    ///
    /// ```
    /// use tower_redis_ratelimit::check::Source;
    /// use tower_redis_ratelimit::{Fallback, Key, Limiter, LocalStore, Policy, Quota, RedisStore, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Nothing listens there.
    /// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1:1/")?, LocalStore::default());
    /// assert!(!store.is_degraded());
    ///
    /// let probe = Limiter::new(store.clone(), Policy::new("probe", Strategy::Gcra, Quota::per_second(1))?);
    /// for _ in 0..3 {
    ///     let decision = probe.peek(Key::new("probe"), 1).await?;
    ///     assert_eq!(decision.source(), Source::Local);
    /// }
    /// assert!(store.is_degraded());
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_degraded(&self) -> bool {
        let mut partitions = self.partitions.iter();
        partitions.any(|partition| partition.breaker.is_open())
    }
}

/// Refuses a deadline of checks that no reply meets, if the primary store ends them after `timeout`.
fn refuse_deadline(deadline: Duration, timeout: Duration) -> Result<(), ConfigError> {
    // With less, every reply of Redis would be too late: each instance would count separately
    // although Redis works.
    if deadline < Duration::from_millis(1) {
        return Err(ConfigError::new(format!(
            "a deadline of {deadline:?} for Redis: use at least 1 ms, such as 100 ms"
        )));
    }
    if deadline <= timeout {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "a deadline of {deadline:?} above the timeout of {timeout:?}, which ends a call to Redis first: use a timeout above two \
         deadlines, such as {:?}",
        deadline.saturating_mul(5) / 2
    )))
}

/// Refuses a deadline of checks that passes before the fallback of the primary store has decided.
fn refuse_outer_deadline(deadline: Duration, inner: Duration) -> Result<(), ConfigError> {
    if deadline > inner {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "a deadline of {deadline:?} over a `Fallback` with a deadline of {inner:?}, whose own fallback would never decide in time: \
         use a longer one, such as {:?}",
        inner.saturating_mul(2)
    )))
}

/// Returns a caller of each partition, for probes.
fn probes(primary: &impl Store, count: usize) -> Vec<Key> {
    let mut probes = vec![probe::KEY; count];
    if count > 1 {
        // Partitions are of similar size, so this many keys reach all of them.
        for key in (0..count.saturating_mul(64)).map(probe::key) {
            probes[primary.backend().partition(&key) % count] = key;
        }
    }
    probes
}

impl<P: Store, F: Store> Store for Fallback<P, F> {
    type Future = FallbackFuture<P, F>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.partition(check.key()).check(check)
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        let partition = self.partition(joint.first().key());
        for part in joint.parts() {
            if !Arc::ptr_eq(self.partition(part.key()), partition) {
                return together(self, joint);
            }
        }
        partition.check_all(joint)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::withdrawable(self)
    }

    async fn flush(&self) -> bool {
        let Partition {
            primary, fallback, ..
        } = &*self.partitions[0];
        // Both stores may be the application's, and owe more than their hooks know.
        let is_flushed = flush(self, None).await;
        let is_fallback_flushed = fallback.flush().await;
        // An outage ends the flush of the primary store.
        is_flushed && primary.flush().await && is_fallback_flushed
    }
}

impl<P: Store, F: Store> Hooks for Fallback<P, F> {
    fn waiters(&self) -> Option<Waiters> {
        self.partitions[0].primary.backend().waiters()
    }

    fn blocks(&self) -> Option<Blocks> {
        self.partitions[0].primary.backend().blocks()
    }

    fn sync_blocks(&self) {
        self.partitions[0].primary.backend().sync_blocks();
    }

    fn send_blocks(&self, changes: TakenChanges) -> BlocksSent {
        self.partitions[0].primary.backend().send_blocks(changes)
    }

    fn server(&self, key: &Key) -> Option<String> {
        let partition = self.partition(key);
        if partition.breaker.is_open() {
            partition.fallback.backend().server(key)
        } else {
            partition.primary.backend().server(key)
        }
    }

    fn is_connecting(&self, key: &Key) -> bool {
        let partition = self.partition(key);
        if partition.breaker.is_open() {
            partition.fallback.backend().is_connecting(key)
        } else {
            partition.primary.backend().is_connecting(key)
        }
    }

    fn remembered(&self, check: &Check) -> Option<Decision> {
        let partition = self.partition(check.key());
        if partition.breaker.is_open() {
            return None;
        }
        partition.primary.backend().remembered(check)
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.partitions[0].settings.deadline)
    }

    fn has_fallback(&self) -> bool {
        true
    }

    fn unreconciled(&self) -> Unreconciled {
        let mut all = Unreconciled::default();
        for partition in &*self.partitions {
            all.accounts += partition.accounts.len();
            all.is_outage |= partition.breaker.is_open();
            if !partition.accounts.is_empty() {
                partition.start_recovery();
            }
        }
        all
    }

    fn health(&self) -> Health {
        let Partition {
            primary, fallback, ..
        } = &*self.partitions[0];
        if !self.is_degraded() {
            // The primary store may have a fallback too.
            return match primary.health() {
                Health::Local => Health::Local,
                Health::Ok | Health::Failing => Health::Ok,
            };
        }
        match fallback.health() {
            Health::Failing => Health::Failing,
            Health::Ok | Health::Local => Health::Local,
        }
    }

    fn failed(&self, error: &StoreError) {
        self.partitions[0].observe(|observer| {
            observer.notify(&Event::Failed {
                key: None,
                error,
                unanswered: false,
            })
        });
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        let Partition {
            primary,
            fallback,
            settings,
            ..
        } = &*self.partitions[0];
        settings.observer.get_or_init(|| Arc::clone(observer));
        primary.backend().observe(observer);
        fallback.backend().observe(observer);
    }
}

impl<P: Store, F: Store> Withdraw<FallbackFuture<P, F>> for Fallback<P, F> {
    fn withdraw(&self, future: Pin<&mut FallbackFuture<P, F>>) -> bool {
        future.withdraw()
    }
}

impl<P, F> Clone for Fallback<P, F> {
    fn clone(&self) -> Self {
        Self {
            partitions: Arc::clone(&self.partitions),
        }
    }
}

impl<P: fmt::Debug, F: fmt::Debug> fmt::Debug for Fallback<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Partition {
            primary,
            fallback,
            settings,
            ..
        } = &*self.partitions[0];
        f.debug_struct("Fallback")
            .field("primary", primary)
            .field("fallback", fallback)
            .field("settings", settings)
            .field("degraded", &self.is_degraded())
            .finish_non_exhaustive()
    }
}
