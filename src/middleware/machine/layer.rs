use std::fmt;
use std::sync::{Arc, OnceLock};

use tower_layer::Layer;

use super::protocol::Protocol;
use super::service::{IsClone, IsCost, Limit};
use crate::gate::{Gate, KeyExtractor, OnError, OnMissingKey, PolicySelector, Wait};
use crate::limit::{Key, Policies};
use crate::observe::Observer;
use crate::store::Store;
use crate::util::Copies;

/// The layer that [`RateLimitLayer`](crate::RateLimitLayer) and
/// [`CallLimitLayer`](crate::CallLimitLayer) are names of, with the settings that both have.
pub struct LimitLayer<S, K, P: Protocol> {
    shared: Arc<SharedLayer<S, K, P>>,
}

struct SharedLayer<S, K, P: Protocol> {
    extractor: Arc<K>,
    config: Config<S, P>,
    /// The settings that all services share, created for the first one.
    services: OnceLock<ServiceSettings<S, K, P>>,
}

/// The settings of a layer, without its extractor.
pub(in crate::middleware) struct Config<S, P: Protocol> {
    pub(in crate::middleware) gate: Gate<S, P::Head>,
    pub(in crate::middleware) protocol: P,
}

/// The settings of a service. The extractor has its own `Arc`, because the future of a request needs
/// the [`Config`] only.
pub(super) type ServiceSettings<S, K, P> = Copies<(Arc<K>, Arc<Config<S, P>>)>;

impl<S, K, P: Protocol> LimitLayer<S, K, P> {
    pub(in crate::middleware) fn with_config(extractor: Arc<K>, config: Config<S, P>) -> Self {
        Self {
            shared: Arc::new(SharedLayer {
                extractor,
                config,
                services: OnceLock::new(),
            }),
        }
    }
}

impl<S: Clone, K, P: Protocol + Clone> LimitLayer<S, K, P> {
    /// Sets what a request costs, as a `u32`. A cost of 0 is decided but not charged. Defaults to 1.
    #[must_use]
    pub fn cost<C: IsCost>(self, cost: impl Fn(&P::Head) -> C + Send + Sync + 'static) -> Self {
        self.cost_under(move |request, _| cost(request))
    }

    /// Sets what a request costs under its policies. Replaces [`cost`](Self::cost).
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::select::Tiers;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let tiers = Tiers::new(Policy::new("free", Strategy::Gcra, Quota::per_second(50))?);
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, tiers).cost_under(|request, policies| {
    ///     match request.uri.path() {
    ///         "/export" if policies[0].name() == "free" => 10,
    ///         _ => 1,
    ///     }
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn cost_under<C: IsCost>(
        self,
        cost: impl Fn(&P::Head, &Policies) -> C + Send + Sync + 'static,
    ) -> Self {
        self.change(|config| {
            config.gate.settings.cost = Some(Arc::new(move |request: &P::Head, policies| {
                cost(request, policies).into()
            }));
        })
    }

    /// Sets an id, so that a repeated request is charged once: an `Idempotency-Key`, or the id of a
    /// message that a queue delivers again. Requests without an id are charged each time. Defaults
    /// to none.
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// use tower_redis_ratelimit::Key;
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
    ///     .id(|request| request.headers.get("idempotency-key").map(Key::new));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// - **The store keeps an id** of a granted request for the longest period of the policies, for
    ///   all instances; under a [`FixedWindow`](crate::Strategy::FixedWindow) until the window ends, so a
    ///   retry after that is charged in the next window. A denial is not stored, so a denied request may
    ///   be repeated.
    /// - **A caller that chooses its ids can repeat one with every request** and is charged once.
    ///   Use such an id only if the service behind the layer answers a known one without new work.
    /// - **A repeated request reserves nothing.** The first one settles the charge. If that refunds
    ///   it, repetitions are free.
    /// - **A request that [waits](Self::wait)** gets its id stored when it passes. Its repetition then passes
    ///   without waiting. A repetition that arrives earlier, or before the store has replied to that, waits too and
    ///   is charged.
    /// - **In an outage** each instance charges an id once: a [`Fallback`](crate::Fallback) does not
    ///   carry ids from or to Redis.
    /// - **Under policies with requests [in flight](crate::Policy::in_flight)** an id has no effect:
    ///   each request needs its own slot, so each is charged.
    #[doc(alias("idempotency", "Idempotency-Key"))]
    #[must_use]
    pub fn id(self, id: impl Fn(&P::Head) -> Option<Key> + Send + Sync + 'static) -> Self {
        self.change(|config| config.gate.settings.id = Some(Arc::new(id)))
    }

    /// Lets a request that would be denied wait for its turn, up to a [`Duration`](std::time::Duration) or by a
    /// [`Wait`]. Defaults to no wait.
    ///
    /// In this process, the requests of a caller are served in the order of their arrival. A request
    /// is denied as soon as its turn is certain to be too late. The turn of a dropped request passes
    /// to the next one.
    ///
    /// In a [`RateLimitLayer`](crate::RateLimitLayer), a gRPC call waits no longer than its deadline, `grpc-timeout`: a call
    /// whose turn comes later is denied immediately.
    ///
    /// The inner service is not kept ready during the wait: it is polled for readiness when the
    /// request's turn has come.
    ///
    /// Under strategies that refill gradually, a request reserves its turn when it arrives. While turns are
    /// reserved, requests of the caller that do not wait are denied, in every instance.
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// use std::time::Duration;
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).wait(Duration::from_secs(2));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn wait(self, wait: impl Into<Wait>) -> Self
    where
        S: Store,
    {
        self.change(|config| config.gate.wait(wait.into()))
    }

    /// Exempts matching requests, such as health checks: they pass without a key, a check or header
    /// fields. Defaults to none.
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// let layer =
    ///     RateLimitLayer::new(LocalStore::default(), Global, policy).skip(|request| request.uri.path() == "/health");
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "allowlist")]
    #[must_use]
    pub fn skip(self, skip: impl Fn(&P::Head) -> bool + Send + Sync + 'static) -> Self {
        self.change(|config| config.gate.settings.skip = Some(Arc::new(skip)))
    }

    /// Decides and charges as usual, but rejects nothing: to see the effect of a limit before it is enforced.
    ///
    /// The observer is notified of each decision. Over HTTP, a [`DryRun`](crate::check::DryRun) in
    /// the response's extensions holds it; there are no header fields and no
    /// [`Decision`](crate::check::Decision), since nothing is limited. A request passes even if it
    /// has no key, or if the store cannot decide. The check runs concurrently with the inner call,
    /// whose response waits for the check. An error of the inner service does not wait.
    ///
    /// It charges the same counts as an enforced layer. If another layer enforces the same policy for these requests,
    /// each request is charged twice, and no observer is notified: use [`shadow`](Self::shadow) instead.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.change(|config| config.gate.settings.dry_run = true)
    }

    /// Adds policies in dry-run mode, in addition to the enforced ones. May be called repeatedly.
    ///
    /// Only requests that pass are checked under them, one check per list of policies, at the
    /// request's [cost](Self::cost). Their counts are separate from those of enforced policies,
    /// even of the same name. The policies of several shadows need different names, or they share a
    /// count.
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_second(limit));
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy("api", 50)?).shadow(policy("api", 20)?);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn shadow(self, policies: impl PolicySelector<P::Head>) -> Self {
        self.change(|config| config.gate.shadow(policies))
    }

    /// Sets what happens to a request that the store could not decide. Defaults to [`OnError::Reject`]:
    /// a 503 over HTTP, and the [`StoreError`](crate::store::StoreError) as the error of other calls.
    #[must_use]
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|config| config.gate.settings.on_error = on_error)
    }

    /// Sets what happens to a request without a key. Defaults to [`OnMissingKey::Reject`]: a
    /// 400 or 401 over HTTP, and the [`MissingKey`](crate::extract::MissingKey) as the error of other
    /// calls. A request is always rejected if its key is [malformed](crate::extract::MissingKey::malformed),
    /// or missing because the server is [misconfigured](crate::extract::MissingKey::misconfigured).
    #[must_use]
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.change(|config| config.gate.settings.on_missing_key = on_missing_key)
    }

    /// Sets the [`Observer`] of this layer's decisions, store failures and misconfigurations. The store gets
    /// the same observer, unless one is set. Defaults to [a log of what needs attention](Observer);
    /// `()` disables it.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self
    where
        S: Store,
        K: KeyExtractor<P::Head>,
    {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.shared.extractor.observe(&observer);
        self.change(|config| config.gate.observe(observer))
    }

    pub(in crate::middleware) fn change(self, change: impl FnOnce(&mut Config<S, P>)) -> Self {
        self.change_to(|mut config| {
            change(&mut config);
            config
        })
    }

    pub(in crate::middleware) fn change_to<P2: Protocol>(
        self,
        change: impl FnOnce(Config<S, P>) -> Config<S, P2>,
    ) -> LimitLayer<S, K, P2> {
        let extractor = Arc::clone(&self.shared.extractor);
        let mut config = match Arc::try_unwrap(self.shared) {
            Ok(shared) => shared.config,
            // Clones of the layer keep their settings.
            Err(shared) => shared.config.clone(),
        };
        // Another layer with its own mistakes: reports of the former one must not silence these.
        config.gate.notifier = config.gate.notifier.with_fresh_limits();
        LimitLayer::with_config(extractor, change(config))
    }
}

impl<T: IsClone, S: Clone, K, P: Protocol + Clone> Layer<T> for LimitLayer<S, K, P> {
    type Service = Limit<T, S, K, P>;

    /// # Panics
    ///
    /// If it is a [`RateLimitLayer`](crate::RateLimitLayer) with a policy of requests
    /// [in flight](crate::Policy::in_flight), and with neither
    /// [`until_body_end`](crate::RateLimitLayer::until_body_end) nor
    /// [`settle`](crate::RateLimitLayer::settle). If a [`PolicySelector`] returns such a policy for
    /// a request, the layer ignores that policy and reports it as
    /// [misconfigured](Observer::misconfigured).
    fn layer(&self, inner: T) -> Self::Service {
        let SharedLayer {
            extractor,
            config,
            services,
        } = &*self.shared;
        config.gate.assert_countable();
        config.gate.report_shared_count();
        // Once for all services: a router calls this for each of its routes.
        let settings = services
            .get_or_init(|| Copies::new(|| (Arc::clone(extractor), Arc::new(config.clone()))));
        Limit::new(inner, settings.clone())
    }
}

/// By hand, since deriving it requires that the head of a request is `Clone`.
impl<S: Clone, P: Protocol + Clone> Clone for Config<S, P> {
    fn clone(&self) -> Self {
        Self {
            gate: self.gate.clone(),
            protocol: self.protocol.clone(),
        }
    }
}

/// Shares the settings, so that no part of them has to be `Clone`.
impl<S, K, P: Protocol> Clone for LimitLayer<S, K, P> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<S: fmt::Debug, K, P: Protocol> fmt::Debug for LimitLayer<S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.config.gate.fmt(P::LAYER, f)
    }
}
