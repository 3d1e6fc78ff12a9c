use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use super::{BoxError, CallLimit, UntilAnswer};
use crate::gate::{
    Gate, Holds, KeyExtractor, OnError, OnMissingKey, PolicySelector, Selector, Wait,
};
use crate::limit::Policies;
use crate::middleware::rate_limit::AsIs;
use crate::middleware::settings::Settings;
use crate::observe::Observer;
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
pub struct CallLimitLayer<S, K, R, E = AsIs> {
    settings: Settings<K, Config<S, R, E>>,
}

/// The settings of a layer: its gate, and the rule that settles its calls.
pub(super) struct Config<S, R, E> {
    pub(super) gate: Gate<S, R>,
    pub(super) ending: E,
}

impl<S: Clone, R: 'static, E: Clone> Clone for Config<S, R, E> {
    fn clone(&self) -> Self {
        Self {
            gate: self.gate.clone(),
            ending: self.ending.clone(),
        }
    }
}

impl<S: Store, K: KeyExtractor<R>, R: 'static> CallLimitLayer<S, K, R> {
    /// Counts requests in `store`, by the keys that `extractor` finds, under the policies that `policies` gives: a
    /// [`Policy`](crate::Policy), several [`Policies`], or another [`PolicySelector`].
    pub fn new(store: S, extractor: K, policies: impl PolicySelector<R>) -> Self {
        let config = Config {
            gate: Gate::new(store, policies, Holds::InFlight),
            ending: AsIs,
        };
        Self {
            settings: Settings::new(Arc::new(extractor), config),
        }
    }
}

impl<S: Clone, K, R: 'static, E: Clone> CallLimitLayer<S, K, R, E> {
    /// Sets what a request costs. A cost of 0 is decided but not charged. Defaults to 1.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&R) -> u32 + Send + Sync + 'static) -> Self {
        self.cost_under(move |request, _| cost(request))
    }

    /// Sets what a request costs under its policies. Replaces [`cost`](Self::cost).
    #[must_use]
    pub fn cost_under(self, cost: impl Fn(&R, &Policies) -> u32 + Send + Sync + 'static) -> Self {
        self.change(|gate| gate.cost = Some(Arc::new(cost)))
    }

    /// Lets a request that would be denied wait for its turn, up to a [`Duration`](std::time::Duration) or by a
    /// [`Wait`]. Defaults to no wait. See [`RateLimitLayer::wait`](crate::RateLimitLayer::wait).
    #[must_use]
    pub fn wait(self, wait: impl Into<Wait>) -> Self
    where
        S: Store,
    {
        self.change(|gate| gate.wait(wait.into()))
    }

    /// Exempts matching requests: they pass without a key or a check. Defaults to none.
    #[must_use]
    pub fn skip(self, skip: impl Fn(&R) -> bool + Send + Sync + 'static) -> Self {
        self.change(|gate| gate.skip = Some(Arc::new(skip)))
    }

    /// Decides and charges as usual, but rejects nothing: to see the effect of a limit before it is enforced.
    ///
    /// The observer is notified of each decision. A request passes even if it has no key, or if the
    /// store cannot decide. The check runs concurrently with the inner call, whose result waits for
    /// the check.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.change(|gate| gate.dry_run = true)
    }

    /// Adds policies in dry-run mode, in addition to the enforced ones. May be called repeatedly.
    /// See [`RateLimitLayer::shadow`](crate::RateLimitLayer::shadow).
    #[must_use]
    pub fn shadow(self, policies: impl PolicySelector<R>) -> Self {
        self.change(|gate| gate.shadows.push(Selector::new(policies)))
    }

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
    /// `bool` above. A call has no body and no [`Charge`](crate::settle::Charge) that counts later:
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
                ending: UntilAnswer::new(rule),
            }
        })
    }

    /// Sets what happens to a request that the store could not decide. Defaults to [`OnError::Reject`]: the call fails
    /// with the store's [`StoreError`](crate::store::StoreError).
    #[must_use]
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|gate| gate.on_error = on_error)
    }

    /// Sets what happens to a request without a key. Defaults to [`OnMissingKey::Reject`]: the call
    /// fails with the [`MissingKey`](crate::extract::MissingKey). A call always fails if its key is
    /// [malformed](crate::extract::MissingKey::malformed), or missing because the program is
    /// [misconfigured](crate::extract::MissingKey::misconfigured).
    #[must_use]
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.change(|gate| gate.on_missing_key = on_missing_key)
    }

    /// Sets the [`Observer`] of all decisions, store failures and misconfigurations. The store gets
    /// the same observer, unless one is set. Defaults to [a log of what needs attention](Observer);
    /// `()` disables it.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self
    where
        S: Store,
    {
        self.change(|gate| gate.observe(observer))
    }

    fn change(self, change: impl FnOnce(&mut Gate<S, R>)) -> Self {
        self.change_to(|mut config| {
            change(&mut config.gate);
            config
        })
    }

    fn change_to<E2: Clone>(
        self,
        change: impl FnOnce(Config<S, R, E>) -> Config<S, R, E2>,
    ) -> CallLimitLayer<S, K, R, E2> {
        let settings = self.settings.change(|mut config| {
            config.gate.notifier = config.gate.notifier.with_fresh_limits();
            change(config)
        });
        CallLimitLayer { settings }
    }
}

impl<T, S, K, R, E> Layer<T> for CallLimitLayer<S, K, R, E> {
    type Service = CallLimit<T, S, K, R, E>;

    fn layer(&self, inner: T) -> Self::Service {
        self.settings.config().gate.report_shared_count();
        CallLimit {
            inner,
            settings: self.settings.clone(),
        }
    }
}

/// Clones an `Arc`: no setting has to be `Clone`.
impl<S, K, R, E> Clone for CallLimitLayer<S, K, R, E> {
    fn clone(&self) -> Self {
        Self {
            settings: self.settings.clone(),
        }
    }
}

impl<S: fmt::Debug, K, R, E> fmt::Debug for CallLimitLayer<S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.config().gate.fmt("CallLimitLayer", f)
    }
}
