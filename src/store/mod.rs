//! Stores of the callers' counts.
//!
//! [`RedisStore`] keeps one count for all instances, [`LocalStore`] one per process. [`Fallback`]
//! combines two stores: the second decides while the first cannot. [`AnyStore`] is any of these,
//! chosen by its settings, and [`BoxStore`] is any store at all.

mod any;
mod backend;
mod boxed;
mod config;
mod debt;
#[cfg(test)]
mod definitions;
mod fallback;
mod flush;
mod health;
mod instances;
mod joint;
mod local;
mod mock;
mod probe;
mod redis;
mod settled_cost;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

pub use self::redis::{Credentials, RedisStore, RedisStoreBuilder, Scan, Servers, StoredCount};
pub use crate::error::{ErrorKind, StoreError};
pub use any::AnyStore;
pub use backend::Backend;
pub use boxed::BoxStore;
pub use config::{ShareConfig, StoreConfig, StoreKind};
pub use fallback::{Fallback, FallbackBuilder};
pub use health::Health;
pub use instances::Instances;
pub use joint::JointFuture;
pub use local::LocalStore;
pub use mock::MockStore;

pub use crate::limit::Counts;
pub use crate::waiters::Waiters;
pub(crate) use backend::{BlocksSent, Hooks, Unreconciled, Withdraw};
pub(crate) use debt::charge_debt_of;
pub(crate) use flush::flush;
pub(crate) use settled_cost::{SettledCost, rest_of_window};

use crate::background::{OpQueue, PendingJointReply, SentCheck};
use crate::limit::{Check, Decision, JointCheck};
use crate::observe::Observer;

/// Decides checks, and remembers what was charged.
///
/// The contract of an implementation:
/// - A check is atomic: no other check of the same caller is decided between its reads and its
///   writes.
/// - It is all or nothing over its policies, and a denied one charges nothing.
/// - A clone shares the counts.
/// - Every check resolves in bounded time, to a [`Decision`] on its own policies or a
///   [`StoreError`]; an error is not a verdict.
/// - A future that is dropped before the check was sent charges nothing.
///
/// Only [`check`](Self::check) is required. In a custom store, [`Counts`] implements the strategies,
/// [`Check::decided`] creates other decisions, and
/// [`Source::Other`](crate::check::Source::Other) names the store. A [`StoreError`] states whether a
/// check was [sent](StoreError::not_sent).
///
/// For tests, use a [`MockStore`]. Outside of tower, use a [`Limiter`](crate::Limiter), a store with
/// fixed policies.
///
/// A store that wraps another one and decides some checks differently:
///
/// ```
/// use tower_redis_ratelimit::Key;
/// use tower_redis_ratelimit::check::{Check, Source, Verdict};
/// use tower_redis_ratelimit::store::{Answer, Backend, Store};
///
/// /// Never denies these callers.
/// #[derive(Clone)]
/// struct Exempt<S>(S, &'static [Key]);
///
/// impl<S: Store> Store for Exempt<S> {
///     type Future = S::Future;
///
///     fn check(&self, check: Check) -> Answer<S::Future> {
///         if self.1.contains(check.key()) {
///             let granted = check.cost();
///             return Answer::ready(Ok(check.decided(Source::Other("exempt"), granted, |_| Verdict::allowed())));
///         }
///         self.0.check(check)
///     }
///
///     fn backend(&self) -> Backend<'_, S::Future> {
///         self.0.backend()
///     }
/// }
/// # fn is_store(_: impl Store) {}
/// # is_store(Exempt(tower_redis_ratelimit::store::MockStore::new(), &[Key::GLOBAL]));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not implement `Store`",
    label = "not a `Store`",
    note = "stores are `RedisStore`, `LocalStore`, and `Fallback::new(redis, local)`; `AnyStore` is any of these",
    note = "a `Result`: add `?`, as in `RedisStore::connect_lazy(url)?` or `RedisStore::connect(url).await?`",
    note = "a store that is chosen at run time: `BoxStore::new(store)`, instead of an `Arc<dyn Store>`"
)]
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of a reply that is not ready immediately. That of a store has no other name than
    /// `<RedisStore as Store>::Future`.
    type Future: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// Decides one check.
    fn check(&self, check: Check) -> Answer<Self::Future>;

    /// Decides a check over several keys: all of them are charged, or none.
    ///
    /// The default [checks](Self::check) one key after the other. After a denial it refunds what it has taken, without
    /// waiting for that, and [looks](Check::peek) at the other keys. So no limit is exceeded. Until the refund
    /// arrives, the denied request holds units of the other keys. After an error it refunds too, but the owner of the
    /// check must release its [slots](Check::slot), as layers do. So after a slot was taken, no error is marked as
    /// [not sent](StoreError::not_sent), and a [`Fallback`] does not charge its own grant to this store. If the
    /// future is dropped, the keys that were charged stay charged.
    ///
    /// A [`RedisStore`] and a [`LocalStore`] decide in one step: see [several keys](crate::guide::keys#several-keys).
    fn check_all(&self, joint: JointCheck) -> JointFuture {
        joint::one_by_one(self, joint)
    }

    /// Returns the hooks for a [`Fallback`] and the layers. Defaults to none. A store that wraps
    /// another one returns the hooks of the inner store.
    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::default()
    }

    /// Returns how checks are decided at the moment, for a health check of the service: as intended, by a [`Fallback`] while
    /// its primary store cannot, or not at all.
    ///
    /// A [`RedisStore`] is [failing](Health::Failing) from a failed check until Redis decides another. Errors that
    /// [concern one check](StoreError::is_check_only) and a full queue are no evidence once Redis has decided a check.
    /// A [`Fallback`] is [local](Health::Local) while the breaker of any partition is open, as
    /// [`is_degraded`](Fallback::is_degraded) says. Without requests, neither notices an outage: a
    /// [peek](crate::Limiter::peek) finds out, and charges nothing.
    ///
    /// A service in an outage may well be ready: with a fallback it limits, and without one the layer decides by
    /// [`OnError`](crate::reject::OnError). Restarting it does not help.
    ///
    /// The default uses the hooks of [`backend`](Self::backend), and is [`Ok`](Health::Ok) without.
    ///
    /// ```
    /// use axum::{Router, http::StatusCode, routing::get};
    /// use tower_redis_ratelimit::store::{AnyStore, Health, Store};
    ///
    /// let store = AnyStore::from_env("REDIS_URL")?;
    /// let health = async move || match store.health() {
    ///     Health::Failing => (StatusCode::SERVICE_UNAVAILABLE, "failing"),
    ///     health => (StatusCode::OK, health.as_str()),
    /// };
    /// let app: Router = Router::new().route("/health", get(health));
    /// # let _ = app;
    /// # Ok::<(), tower_redis_ratelimit::store::StoreError>(())
    /// ```
    fn health(&self) -> Health {
        self.backend().health()
    }

    /// Waits until this process owes the store nothing: until the store has replied to the queued and unanswered charges,
    /// refunds and releases of every layer, limiter, wait queue and lease over any clone, and a running reconciliation of a
    /// [`Fallback`] has ended. Call it at the end of a process, after the server has ended: what a process owes is lost with
    /// it.
    ///
    /// Returns `false` if something is left: after 1 s, immediately while a [`Fallback`] decides, and outside of a Tokio
    /// runtime. The observer of the store is then [notified](crate::observe::Event::Failed) of how much. Also returns
    /// `false` if something was given up during the flush, because its outcome is unknown. Any failed operation is reported.
    ///
    /// It does not wait for running requests and streams, which owe something only at their end, for the renewals of their
    /// slots, and for the repeated releases of a slot whose take was not answered, within a second after the first one. The
    /// blocks of a [`Leased`](crate::Leased) store return only in its [`shutdown`](crate::Leased::shutdown).
    ///
    /// The default uses the hooks of [`backend`](Self::backend): a custom store needs [`Waiters`] there. A store that owes
    /// something else, such as the content of a buffer, also writes that. The stores around it and a
    /// [`Limiter`](crate::Limiter) call this method after they have written what they owe.
    ///
    /// ```
    /// use tower_redis_ratelimit::store::Store;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = LocalStore::default();
    /// let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_day(1_000))?;
    /// let jobs = Limiter::new(store.clone(), tokens);
    /// let job = jobs.reserve(Key::new("user-42"), 600).await?;
    /// job.settle(150);
    /// assert!(store.flush().await);
    /// # Ok(())
    /// # }
    /// ```
    fn flush(&self) -> impl Future<Output = bool> + Send {
        flush(self, None)
    }
}

impl<S: Store> Store for Arc<S> {
    type Future = S::Future;

    fn check(&self, check: Check) -> Answer<S::Future> {
        (**self).check(check)
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        (**self).check_all(joint)
    }

    fn backend(&self) -> Backend<'_, S::Future> {
        (**self).backend()
    }

    fn health(&self) -> Health {
        (**self).health()
    }

    fn flush(&self) -> impl Future<Output = bool> + Send {
        (**self).flush()
    }
}

pin_project! {
    /// The reply of a [`Store`](crate::store::Store) to a check, or a future of it: there is no third
    /// case, so the variants are exhaustive.
    ///
    /// `Answer` is a future itself, so most callers write `store.check(check).await`. A caller that
    /// must store its state before it waits, such as a request, can match on the variants first:
    ///
    /// ```
    /// use tower_redis_ratelimit::check::Check;
    /// use tower_redis_ratelimit::store::{Answer, Store};
    /// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?.into();
    /// let check = Check::take(Key::new("user-42"), &policies, 1);
    /// let decision = match LocalStore::default().check(check) {
    ///     Answer::Ready { answer } => answer?,
    ///     Answer::Pending { future } => future.await?,
    /// };
    /// assert!(decision.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// As a future, a ready answer may be polled repeatedly and returns the same value. A pending
    /// one behaves like its future.
    #[derive(Debug, Clone)]
    #[must_use = "a check may be withdrawn when its answer is dropped"]
    #[project = AnswerProj]
    #[allow(missing_docs, reason = "the variants document their fields: the macro accepts no docs for them")]
    pub enum Answer<F> {
        /// The answer: a decision or an error.
        Ready {
            answer: Result<Decision, StoreError>,
        },
        /// The check is in progress: the future resolves to the decision or the error.
        Pending {
            #[pin]
            future: F,
        },
    }
}

impl<F> Answer<F> {
    /// A ready answer.
    pub const fn ready(answer: Result<Decision, StoreError>) -> Self {
        Self::Ready { answer }
    }

    /// A pending answer.
    pub const fn pending(future: F) -> Self {
        Self::Pending { future }
    }
}

impl<F: Future<Output = Result<Decision, StoreError>>> Future for Answer<F> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            AnswerProj::Ready { answer } => Poll::Ready(answer.clone()),
            AnswerProj::Pending { future } => future.poll(cx),
        }
    }
}

/// Creates the queue of a store's background operations. `observer` is notified of each operation that failed.
pub(crate) fn op_queue(store: impl Store, observer: Option<Arc<dyn Observer>>) -> OpQueue {
    let waiters = store.backend().waiters();
    let joint_store = store.clone();
    let send_joint =
        move |joint: JointCheck| -> PendingJointReply { Box::pin(joint_store.check_all(joint)) };
    let send_check = move |check| match store.check(check) {
        Answer::Ready { answer } => SentCheck::Replied(answer),
        Answer::Pending { future } => SentCheck::Pending(Box::pin(future)),
    };
    let queue = OpQueue::with_joint(send_check, Some(Box::new(send_joint)), observer);
    if let Some(waiters) = waiters {
        waiters.add_op_queue(&queue);
    }
    queue
}
