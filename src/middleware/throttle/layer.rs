use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::Throttle;
use super::service::ThrottleSettings;
use crate::gate::{Notifier, OnError, PolicySelector, Selector};
use crate::limit::Key;
use crate::middleware::call_limit::BoxError;
use crate::observe::{Observer, shared_observer};
use crate::store::Store;
use crate::wait_queues::{Bounds, WaitQueues};

/// Delays calls until the shared quota allows them: `poll_ready` acquires a permit.
///
/// For outbound clients and any other service whose requests share one key, such as all requests to one API from all
/// instances. If the key depends on the request, use a [`RateLimitLayer`](crate::RateLimitLayer) that
/// [waits](crate::RateLimitLayer::wait).
///
/// ```
/// use std::convert::Infallible;
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy, ThrottleLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("geocoder", Strategy::Gcra, Quota::per_second(50).burst(10))?;
/// let mut client = ServiceBuilder::new()
///     .layer(ThrottleLayer::new(LocalStore::default(), Key::new("geocoder"), policy))
///     .service_fn(async |city: &str| Ok::<_, Infallible>(city.len()));
///
/// assert_eq!(client.ready().await?.call("Oslo").await?, 4);
/// # use tower::Service;
/// # Ok(())
/// # }
/// ```
///
/// # Permits
///
/// - A permit is charged when it is acquired, and used by `call`. A service that is dropped without
///   a call passes its permit on to the next waiter of this process, or refunds it to the store.
/// - Each clone has its own permit. Clones, and all services of one layer, wait in one queue, in
///   FIFO order.
/// - Under strategies that refill gradually, each call reserves its turn in one store call, which is exact over
///   all instances. Under the others one store call makes one grant or several.
/// - The inner service is polled first, so no permit is held for a service that is not ready. It
///   stays ready while the throttle waits: to limit concurrent calls, put that limit around the
///   throttle.
/// - A permit held for more than 1 s and past its charge's expiry is charged again when used. So
///   100 ready but idle services may make 100 calls at the same moment, beyond the burst.
/// - A local store grants in the first poll if it has capacity. A store over a network replies
///   later: a [`LoadShed`](https://docs.rs/tower/latest/tower/load_shed/struct.LoadShed.html)
///   around the throttle polls only once and then sheds the call. Put a
///   [`Buffer`](https://docs.rs/tower/latest/tower/buffer/struct.Buffer.html) between them.
/// - A service that is polled on another runtime than before starts waiting again.
/// - When a runtime shuts down, the reserved turns of its waiting calls are refunded to Redis when the
///   throttle is used on another runtime.
/// - If a service is called without being ready, the call is charged and proceeds without a permit, which is
///   [reported](crate::observe::Event::Misconfigured) once. The call is not charged while more than one burst is reserved ahead.
///
/// Checks on the same count without a throttle are denied while permits are taken in advance: see
/// [`Check::take_ahead`](crate::check::Check::take_ahead).
///
/// # Errors
///
/// The layer adds no errors of its own. If the store cannot decide, the call waits and the check is
/// retried; see [`on_error`](Self::on_error). With a [`max_wait`](Self::max_wait), such
/// calls fail. A failed check affects one service; after three consecutive failures all waiters
/// without a reserved turn pause for 250 to 300 ms. With a [`Fallback`](crate::Fallback) as the
/// store, calls continue under this instance's share.
///
/// # Panics
///
/// If `poll_ready` is called outside of a Tokio runtime.
///
/// # Naming the type
///
/// `E` is the error that the layer adds to the errors of the inner service: none, or a boxed one with a
/// [`max_wait`](Self::max_wait), so `ThrottleLayer<BoxError>`.
pub struct ThrottleLayer<E = Infallible> {
    settings: ThrottleSettings,
    error: PhantomData<fn() -> E>,
}

impl ThrottleLayer {
    /// Acquires permits from `store`, on the count of `key`, under the policies that `policies`
    /// returns: a [`Policy`](crate::Policy), several [`Policies`](crate::Policies), or
    /// [`Live`](crate::select::Live) ones, whose replacement applies to later waits. Without
    /// policies, every call proceeds. Policies of requests [in flight](crate::Policy::in_flight)
    /// are ignored, and reported as [misconfigured](crate::observe::Event::Misconfigured), since a throttle does
    /// not see calls end.
    pub fn new(store: impl Store, key: Key, policies: impl PolicySelector<()>) -> Self {
        let wait_queues = WaitQueues::new(store, Bounds::DEFAULT);
        let policies = Selector::new(policies);
        let notifier = Notifier::default();
        let settings = ThrottleSettings {
            wait_queues,
            key,
            policies,
            max_wait: None,
            on_error: OnError::default(),
            notifier,
        };
        Self {
            settings,
            error: PhantomData,
        }
    }
}

impl<E> ThrottleLayer<E> {
    /// Sets how long a call may wait. Defaults to no limit.
    ///
    /// If the wait would be longer, `poll_ready` becomes ready as soon as that is certain, usually
    /// immediately, and the call fails without reaching the inner service: with
    /// [`RateLimited`](crate::check::RateLimited), which reports the wait, or with the
    /// [`StoreError`](crate::store::StoreError) if the store cannot decide. Errors are then boxed,
    /// as in tower's own layers. As with [`Limiter::wait`](crate::Limiter::wait), store calls do
    /// not count towards `max`.
    ///
    /// A service that is ready to fail stays so for the reported wait, or for 250 ms after a
    /// [`StoreError`](crate::store::StoreError). Then `poll_ready` waits again, and a call without that is charged
    /// and proceeds without a permit.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use std::time::Duration;
    /// use tower::{Service, ServiceBuilder, ServiceExt};
    /// use tower_redis_ratelimit::check::RateLimited;
    /// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy, ThrottleLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let policy = Policy::new("geocoder", Strategy::Gcra, Quota::per_minute(1))?;
    /// let throttle = ThrottleLayer::new(LocalStore::default(), Key::new("geocoder"), policy);
    /// let mut client = ServiceBuilder::new()
    ///     .layer(throttle.max_wait(Duration::from_secs(10)))
    ///     .service_fn(async |city: &str| Ok::<_, Infallible>(city.len()));
    ///
    /// assert_eq!(client.ready().await?.call("Oslo").await?, 4);
    /// let error = client.ready().await?.call("Bergen").await.unwrap_err();
    /// let limited = error.downcast_ref::<RateLimited>().expect("the next turn is in a minute");
    /// assert_eq!(limited.retry_after().map(|wait| wait.as_secs()), Some(60));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn max_wait(mut self, max: Duration) -> ThrottleLayer<BoxError> {
        self.settings.max_wait = Some(max);
        ThrottleLayer {
            settings: self.settings,
            error: PhantomData,
        }
    }

    /// Sets how many of its services may queue. One beyond that retries after 250 to 300 ms, or fails
    /// immediately if a [`max_wait`](Self::max_wait) is set. Defaults to 10,000.
    #[must_use]
    pub fn max_waiting(mut self, max: NonZeroUsize) -> Self {
        self.settings.wait_queues = self.settings.wait_queues.with_bounds(Bounds::of(max));
        self
    }

    /// Sets what happens to a call if the store cannot decide. Defaults to [`OnError::Reject`]: it waits, and the check is
    /// retried, or it fails if a [`max_wait`](Self::max_wait) is set. With [`OnError::Allow`] it proceeds without a permit.
    #[must_use]
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.settings.on_error = on_error;
        self
    }

    /// Sets the [`Observer`] of all permits, with their waiting time, and of store failures. The
    /// store gets the same observer, unless one is set. Defaults to [a log of what needs
    /// attention](Observer); `()` disables it.
    #[must_use]
    pub fn observer(mut self, observer: impl Observer) -> Self {
        let observer = shared_observer(observer);
        self.settings.wait_queues = self.settings.wait_queues.observed(&observer);
        self.settings.policies.observe(&observer);
        self.settings.notifier = Notifier::new(observer);
        self
    }
}

impl<T, E> Layer<T> for ThrottleLayer<E> {
    type Service = Throttle<T, E>;

    fn layer(&self, inner: T) -> Throttle<T, E> {
        Throttle::new(inner, Arc::new(self.settings.clone()))
    }
}

impl<E> Clone for ThrottleLayer<E> {
    fn clone(&self) -> Self {
        Self {
            settings: self.settings.clone(),
            error: PhantomData,
        }
    }
}

impl<E> fmt::Debug for ThrottleLayer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleLayer")
            .field("policies", &self.settings.policies)
            .field("wait_queues", &self.settings.wait_queues)
            .finish_non_exhaustive()
    }
}
