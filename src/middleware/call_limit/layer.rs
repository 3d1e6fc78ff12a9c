//! The layer for calls, and the settings that only calls have.
//!
//! These methods of [`LimitLayer`] are here, since HTTP, which has another rejection and another
//! settlement, shares only the rest.

use std::sync::Arc;

use super::{BoxError, Calls, UntilAnswer};
use crate::gate::{Gate, Holds, KeyExtractor, PolicySelector};
use crate::middleware::machine::{AsIs, Config, LimitLayer};
use crate::settle::Settlement;
use crate::store::Store;

/// Limits the rate of calls of any tower service: jobs of a queue, commands, requests of a client. One check per
/// request, and the inner service is called only if it passes.
///
/// It is the counterpart of [`RateLimitLayer`](crate::RateLimitLayer) for requests other than HTTP:
/// a closure returns the key of a request, and a denied call fails with an error.
///
/// ```
/// use tower::{ServiceBuilder, ServiceExt};
/// use tower_redis_ratelimit::check::RateLimited;
/// use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, Policy, Quota, Strategy};
///
/// #[derive(Clone)]
/// struct Job {
///     tenant: String,
///     pages: u32,
/// }
///
/// async fn print(job: Job) -> Result<String, std::io::Error> {
///     Ok(format!("{} pages for {}", job.pages, job.tenant))
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let pages = Policy::new("pages", Strategy::Gcra, Quota::per_minute(60))?;
/// let by_tenant = CallLimitLayer::new(LocalStore::default(), |job: &Job| Some(Key::new(&job.tenant)), pages);
/// let service = ServiceBuilder::new().layer(by_tenant.cost(|job| job.pages)).service_fn(print);
///
/// let job = Job { tenant: "acme".to_owned(), pages: 40 };
/// assert_eq!(service.clone().oneshot(job.clone()).await?, "40 pages for acme");
///
/// let error = service.oneshot(job).await.unwrap_err();
/// let limited = error.downcast_ref::<RateLimited>().expect("not that many pages at once");
/// assert_eq!(limited.retry_after().map(|wait| wait.as_secs()), Some(20));
/// # Ok(())
/// # }
/// ```
///
/// A closure needs the type of its argument, as `&Job` above. Your own [`KeyExtractor`] or [`PolicySelector`] is an
/// `impl KeyExtractor<Job> for ..`. [`Global`](crate::extract::Global), tuples, and fixed policies work for all types.
///
/// # Errors of a call
///
/// The error type is a boxed error, as in tower's own layers. It holds
/// - a [`RateLimited`](crate::check::RateLimited) if the call is denied,
/// - a [`StoreError`](crate::store::StoreError) if the store could not decide, unless
///   [`on_error`](Self::on_error) allows the call,
/// - a [`MissingKey`](crate::extract::MissingKey) if the request has no key, unless
///   [`on_missing_key`](Self::on_missing_key) allows the call,
/// - or the error of the inner service.
///
/// A request is [in flight](crate::Policy::in_flight) until the service returns its result, or the
/// call is dropped. The cost of a call may depend on the result: see [`settle`](Self::settle).
///
/// Inside tower's `Retry`, each attempt is counted. Inside a `Timeout`, a call that times out
/// before the decision never reaches the inner service.
pub type CallLimitLayer<S, K, R, E = AsIs> = LimitLayer<S, K, Calls<R, E>>;

impl<S: Store, K: KeyExtractor<R>, R: 'static> CallLimitLayer<S, K, R> {
    /// Counts requests in `store`, by the keys that `extractor` finds, under the policies that `policies` gives: a
    /// [`Policy`](crate::Policy), several [`Policies`](crate::Policies), or another [`PolicySelector`].
    pub fn new(store: S, extractor: K, policies: impl PolicySelector<R>) -> Self {
        let config = Config {
            // A call ends with the result of the inner service, which the layer sees.
            gate: Gate::new(store, policies, Holds::InFlight),
            protocol: Calls::new(AsIs),
        };
        Self::with_config(Arc::new(extractor), config)
    }
}

impl<S: Clone, K, R: 'static, E: Clone> CallLimitLayer<S, K, R, E> {
    /// Settles calls by their results: the cost is then a reservation, which `rule` settles by the response or the
    /// error. A call that is dropped before keeps what it has reserved. See
    /// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle).
    ///
    /// Only failures count:
    ///
    /// ```
    /// use tower_redis_ratelimit::settle::Settlement;
    /// use tower_redis_ratelimit::{CallLimitLayer, Key, LocalStore, Policy, Quota, Strategy};
    ///
    /// struct Login {
    ///     user: String,
    /// }
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// let policy = Policy::new("login", Strategy::SlidingLog, Quota::per_minute(5))?;
    /// let layer = CallLimitLayer::new(LocalStore::default(), |login: &Login| Some(Key::new(&login.user)), policy)
    ///     .settle(|answer: &Result<bool, _>| match answer {
    ///         Ok(false) => Settlement::Keep,
    ///         _ => Settlement::Refund,
    ///     });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The closure needs the type of the response, as
    /// `bool` above. A call has no body and no [`RequestCost`](crate::settle::RequestCost) that counts later:
    /// [`Settlement::AtEnd`] keeps what was reserved, and [`Settlement::Bytes`] refunds it.
    #[must_use]
    pub fn settle<Res: 'static>(
        self,
        rule: impl Fn(&Result<Res, BoxError>) -> Settlement + Send + Sync + 'static,
    ) -> CallLimitLayer<S, K, R, UntilAnswer<Res>> {
        self.change_to(|Config { mut gate, .. }| {
            gate.settle();
            Config {
                gate,
                protocol: Calls::new(UntilAnswer::new(rule)),
            }
        })
    }
}
