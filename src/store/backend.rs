use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::{Health, Waiters};
use crate::blocks::{Blocks, TakenChanges};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key};
use crate::observe::Observer;

/// The hooks of a [`Store`](super::Store) for a [`Fallback`](crate::Fallback) and the layers: opaque.
///
/// The default has no hooks. A store that wraps another one returns its
/// [`backend`](super::Store::backend). A custom store may have [`Waiters`]:
///
/// ```
/// # use std::future::Pending;
/// # use tower_redis_ratelimit::check::{Check, Decision};
/// use tower_redis_ratelimit::store::{Answer, Backend, Store, StoreError, Waiters};
///
/// # #[derive(Clone)]
/// struct MyStore {
///     waiters: Waiters,
/// }
///
/// impl Store for MyStore {
/// #   type Future = Pending<Result<Decision, StoreError>>;
/// #   fn check(&self, _: Check) -> Answer<Self::Future> {
/// #       Answer::pending(std::future::pending())
/// #   }
///     // ..
///     fn backend(&self) -> Backend<'_, Self::Future> {
///         Backend::from(&self.waiters)
///     }
/// }
/// ```
pub struct Backend<'a, F> {
    hooks: &'a dyn Hooks,
    withdraw: Option<&'a dyn Withdraw<F>>,
}

/// The services of a store for a [`Fallback`](crate::Fallback) and the layers.
pub(crate) trait Hooks {
    /// Records a decision of another store on this caller, to continue from there if that store
    /// fails. A [`Fallback`](crate::Fallback) passes the decisions of its first store to the second.
    fn warm(&self, _key: &Key, _decision: &Decision) {}

    /// Returns the number of partitions that may fail separately, as in a Redis Cluster. A
    /// [`Fallback`](crate::Fallback) has a breaker for each. Must not change.
    fn partitions(&self) -> usize {
        1
    }

    /// Returns the [partition](Self::partitions) of a caller, counted from 0; always the same for
    /// one caller.
    fn partition(&self, _key: &Key) -> usize {
        0
    }

    /// Returns the requests of this process that wait for the store's counts. `None`: waiters check
    /// again without a wake-up.
    fn waiters(&self) -> Option<Waiters> {
        None
    }

    /// Returns the blocked callers of the store. `None`: each layer has its own.
    fn blocks(&self) -> Option<Blocks> {
        None
    }

    /// Starts the task that shares the [blocks](Self::blocks) with the other instances, unless it runs.
    fn sync_blocks(&self) {}

    /// Sends changes of the [blocks](Self::blocks).
    fn send_blocks(&self, _changes: TakenChanges) -> BlocksSent {
        Box::pin(ready(Ok(())))
    }

    /// Returns the address of the server that decides a caller's checks, without user and password.
    /// A [`Fallback`](crate::Fallback) names it in the error when the deadline has passed.
    fn server(&self, _key: &Key) -> Option<String> {
        None
    }

    /// Returns `true` if the store has no connection yet to the server that decides a caller's checks.
    fn is_connecting(&self, _key: &Key) -> bool {
        false
    }

    /// Returns the time that the store allows for a check before it is decided otherwise or fails. A
    /// [`Leased`](crate::Leased) store lets no check wait longer for a block. `None`: unknown.
    fn deadline(&self) -> Option<Duration> {
        None
    }

    /// Returns `true` if another store decides a check after the [deadline](Self::deadline), instead of an error.
    fn has_fallback(&self) -> bool {
        false
    }

    /// Does what a check needs before it may be decided under a lock: calls the functions of its calendars.
    ///
    /// # Errors
    ///
    /// Returns an error if a function has returned a wrong window.
    fn prepare(&self, _check: &Check) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns the denial of a check if the store remembers it.
    fn remembered(&self, _check: &Check) -> Option<Decision> {
        None
    }

    /// Returns `true` if the store decides checks under [leased](crate::Policy::leased) policies by blocks, as
    /// [`Leased`](crate::Leased) does. A lease has no effect in another store, nor in a [`Leased`](crate::Leased) store inside
    /// of a [`Fallback`](crate::Fallback).
    fn leases(&self) -> bool {
        false
    }

    /// Returns the local grants that a [`Fallback`](crate::Fallback) still has to charge to its primary store, and starts
    /// its reconciliation on this runtime if that of the last one has shut down.
    fn unreconciled(&self) -> Unreconciled {
        Unreconciled::default()
    }

    /// See [`Store::health`](super::Store::health).
    fn health(&self) -> Health {
        Health::Ok
    }

    /// Reports an error that no check returned to the observer.
    fn failed(&self, _error: &StoreError) {}

    /// Sets the observer of the store to that of a layer or a [`Limiter`](crate::Limiter). An
    /// observer that is set is kept.
    fn observe(&self, _observer: &Arc<dyn Observer>) {}
}

/// Resolves when the store has the changes of its blocks.
pub(crate) type BlocksSent = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// The local grants that a [`Fallback`](crate::Fallback) has not charged to its primary store yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Unreconciled {
    /// Number of callers and lists of policies with such grants.
    pub(crate) accounts: usize,
    /// Whether the primary store cannot be used now.
    pub(crate) is_outage: bool,
}

/// Withdraws a check whose reply is no longer needed, as a [`Fallback`](crate::Fallback) does at its
/// deadline.
pub(crate) trait Withdraw<F> {
    /// Returns `true` if it is certain that the check was not sent, and never will be. The fallback
    /// then charges its own grant to this store later, as after an
    /// [unsent](super::StoreError::not_sent) error.
    ///
    /// The future is not polled after this call, but dropped.
    fn withdraw(&self, future: Pin<&mut F>) -> bool;
}

/// No hooks.
struct Plain;

impl Hooks for Plain {}

impl Hooks for Waiters {
    fn waiters(&self) -> Option<Waiters> {
        Some(self.clone())
    }
}

impl<'a, F> Backend<'a, F> {
    /// Creates the hooks of a store whose checks are never withdrawn.
    pub(crate) fn new(hooks: &'a dyn Hooks) -> Self {
        Self {
            hooks,
            withdraw: None,
        }
    }

    /// Creates the hooks of a store with a queue.
    pub(crate) fn withdrawable(store: &'a (impl Hooks + Withdraw<F>)) -> Self {
        Self {
            hooks: store,
            withdraw: Some(store),
        }
    }

    /// Returns the hooks for a wrapper with another future type. A wrapped check is never withdrawn
    /// from the queue of the inner store: after its deadline, a [`Fallback`](crate::Fallback)
    /// assumes that the check was sent.
    pub fn of_other_future<G>(self) -> Backend<'a, G> {
        Backend::new(self.hooks)
    }

    /// Replaces the store that withdraws futures.
    pub(crate) fn withdrawing<G>(self, withdraw: &'a dyn Withdraw<G>) -> Backend<'a, G> {
        Backend {
            hooks: self.hooks,
            withdraw: Some(withdraw),
        }
    }

    /// See [`Withdraw`].
    pub(crate) fn withdraw(self, future: Pin<&mut F>) -> bool {
        self.withdraw.is_some_and(|store| store.withdraw(future))
    }

    /// See [`Hooks::warm`].
    #[inline]
    pub(crate) fn warm(self, key: &Key, decision: &Decision) {
        self.hooks.warm(key, decision);
    }

    /// See [`Hooks::partitions`].
    pub(crate) fn partitions(self) -> usize {
        self.hooks.partitions()
    }

    /// See [`Hooks::partition`].
    #[inline]
    pub(crate) fn partition(self, key: &Key) -> usize {
        self.hooks.partition(key)
    }

    /// See [`Hooks::waiters`].
    pub(crate) fn waiters(self) -> Option<Waiters> {
        self.hooks.waiters()
    }

    /// See [`Hooks::blocks`].
    pub(crate) fn blocks(self) -> Option<Blocks> {
        self.hooks.blocks()
    }

    /// See [`Hooks::sync_blocks`].
    pub(crate) fn sync_blocks(self) {
        self.hooks.sync_blocks();
    }

    /// See [`Hooks::send_blocks`].
    pub(crate) fn send_blocks(self, changes: TakenChanges) -> BlocksSent {
        self.hooks.send_blocks(changes)
    }

    /// See [`Hooks::server`].
    pub(crate) fn server(self, key: &Key) -> Option<String> {
        self.hooks.server(key)
    }

    /// See [`Hooks::is_connecting`].
    pub(crate) fn is_connecting(self, key: &Key) -> bool {
        self.hooks.is_connecting(key)
    }

    /// See [`Hooks::deadline`].
    pub(crate) fn deadline(self) -> Option<Duration> {
        self.hooks.deadline()
    }

    /// See [`Hooks::has_fallback`].
    pub(crate) fn has_fallback(self) -> bool {
        self.hooks.has_fallback()
    }

    /// See [`Hooks::prepare`].
    pub(crate) fn prepare(self, check: &Check) -> Result<(), StoreError> {
        self.hooks.prepare(check)
    }

    /// See [`Hooks::remembered`].
    pub(crate) fn remembered(self, check: &Check) -> Option<Decision> {
        self.hooks.remembered(check)
    }

    /// See [`Hooks::leases`].
    pub(crate) fn leases(self) -> bool {
        self.hooks.leases()
    }

    /// See [`Hooks::unreconciled`].
    pub(crate) fn unreconciled(self) -> Unreconciled {
        self.hooks.unreconciled()
    }

    /// See [`Hooks::health`].
    pub(crate) fn health(self) -> Health {
        self.hooks.health()
    }

    /// See [`Hooks::failed`].
    pub(crate) fn failed(self, error: &StoreError) {
        self.hooks.failed(error);
    }

    /// See [`Hooks::observe`].
    pub(crate) fn observe(self, observer: &Arc<dyn Observer>) {
        self.hooks.observe(observer);
    }
}

/// No hooks.
impl<F> Default for Backend<'_, F> {
    fn default() -> Self {
        Self::new(&Plain)
    }
}

/// Wakes these waiters only.
impl<'a, F> From<&'a Waiters> for Backend<'a, F> {
    fn from(waiters: &'a Waiters) -> Self {
        Self::new(waiters)
    }
}

impl<F> Clone for Backend<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Backend<'_, F> {}

impl<F> fmt::Debug for Backend<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backend").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::Pending;
    use std::pin::pin;
    use std::sync::Mutex;

    use super::*;
    use crate::leases::Leased;
    use crate::limit::{Check, Policies, Policy, Quota, Source, Strategy, Verdict};
    use crate::limiter::Limiter;
    use crate::store::{Answer, AnyStore, BoxStore, Fallback, LocalStore, Store, StoreError};
    use crate::util::lock;

    /// Has every hook.
    #[derive(Clone, Default)]
    struct Hooked(Arc<Mutex<Vec<&'static str>>>, Waiters);

    type Never = Pending<Result<Decision, StoreError>>;

    impl Store for Hooked {
        type Future = Never;

        fn check(&self, _: Check) -> Answer<Never> {
            Answer::pending(std::future::pending())
        }

        fn backend(&self) -> Backend<'_, Never> {
            Backend::withdrawable(self)
        }

        async fn flush(&self) -> bool {
            lock(&self.0).push("flush");
            true
        }
    }

    impl Hooks for Hooked {
        fn warm(&self, _: &Key, _: &Decision) {
            lock(&self.0).push("warm");
        }

        fn partitions(&self) -> usize {
            12
        }

        fn partition(&self, _: &Key) -> usize {
            7
        }

        fn waiters(&self) -> Option<Waiters> {
            Some(self.1.clone())
        }

        fn blocks(&self) -> Option<Blocks> {
            lock(&self.0).push("blocks");
            None
        }

        fn sync_blocks(&self) {
            lock(&self.0).push("sync");
        }

        fn send_blocks(&self, _changes: TakenChanges) -> BlocksSent {
            lock(&self.0).push("send");
            Box::pin(ready(Ok(())))
        }

        fn server(&self, _: &Key) -> Option<String> {
            Some("10.0.0.1:6379".to_owned())
        }

        fn deadline(&self) -> Option<Duration> {
            Some(Duration::from_millis(70))
        }

        fn has_fallback(&self) -> bool {
            true
        }

        fn health(&self) -> Health {
            Health::Failing
        }

        fn observe(&self, _: &Arc<dyn Observer>) {
            lock(&self.0).push("observe");
        }
    }

    impl Withdraw<Never> for Hooked {
        fn withdraw(&self, _: Pin<&mut Never>) -> bool {
            true
        }
    }

    fn take() -> Check {
        let policy = Policy::new("test", Strategy::Gcra, Quota::per_hour(10)).unwrap();
        Check::take(Key::GLOBAL, &Policies::from(policy), 1)
    }

    fn keeps_hooks<F>(backend: Backend<'_, F>, hooked: &Hooked) {
        let decision = take().decided(Source::Other("mock"), 1, |_| Verdict::allowed());
        assert_eq!(
            (backend.partitions(), backend.partition(&Key::GLOBAL)),
            (12, 7)
        );
        assert_eq!(backend.waiters(), Some(hooked.1.clone()));
        assert_eq!(
            backend.server(&Key::GLOBAL).as_deref(),
            Some("10.0.0.1:6379")
        );
        assert_eq!(backend.deadline(), Some(Duration::from_millis(70)));
        assert!(backend.has_fallback());
        assert_eq!(backend.health(), Health::Failing);
        backend.warm(&Key::GLOBAL, &decision);
        backend.observe(&(Arc::new(()) as Arc<dyn Observer>));
        drop(backend.blocks());
        backend.sync_blocks();
        drop(backend.send_blocks(Blocks::local().take_unsent(1)));
        assert_eq!(
            std::mem::take(&mut *lock(&hooked.0)),
            ["warm", "observe", "blocks", "sync", "send"]
        );
    }

    #[test]
    fn wrappers_keep_all_hooks() {
        let hooked = Hooked::default();
        keeps_hooks(hooked.backend(), &hooked);
        keeps_hooks(hooked.backend().of_other_future::<u32>(), &hooked);
        keeps_hooks(Leased::new(hooked.clone()).backend(), &hooked);
        keeps_hooks(Arc::new(hooked.clone()).backend(), &hooked);
        let boxed = BoxStore::new(hooked.clone());
        keeps_hooks(boxed.backend(), &hooked);
        keeps_hooks(AnyStore::from(boxed).backend(), &hooked);
    }

    /// It may owe more than the hooks know.
    #[tokio::test]
    async fn wrappers_flush_the_store_inside() {
        let hooked = Hooked::default();
        let own = || hooked.clone();
        let policy = Policy::new("test", Strategy::Gcra, Quota::per_hour(10)).unwrap();
        let boxed = BoxStore::new(own());
        for (flushed, wrapper) in [
            (Arc::new(own()).flush().await, "Arc"),
            (boxed.flush().await, "BoxStore"),
            (AnyStore::from(boxed).flush().await, "AnyStore"),
            (Leased::new(own()).flush().await, "Leased"),
            (Limiter::new(own(), policy).flush().await, "Limiter"),
            (
                Fallback::new(own(), LocalStore::default()).flush().await,
                "primary",
            ),
            (
                Fallback::new(LocalStore::default(), own()).flush().await,
                "fallback",
            ),
        ] {
            assert!(flushed, "{wrapper}");
        }
        assert_eq!(*lock(&hooked.0), ["flush"; 7]);
    }

    #[test]
    fn only_their_own_futures_are_withdrawn() {
        let hooked = Hooked::default();
        assert!(hooked.backend().withdraw(pin!(std::future::pending())));
        let other = hooked.backend().of_other_future::<u32>();
        assert!(!other.withdraw(pin!(7)));
        let leased = Leased::new(hooked.clone());
        let Answer::Pending { future } = leased.check(take()) else {
            panic!("the check is sent")
        };
        assert!(leased.backend().withdraw(pin!(future)));
        let waiters = Waiters::default();
        let waking = Backend::<Never>::from(&waiters);
        assert_eq!(waking.waiters(), Some(waiters.clone()));
        assert!(!waking.withdraw(pin!(std::future::pending())));
    }
}
