use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use super::config::Config;
use super::{AsIs, RateLimit};
use crate::gate::{
    Gate, Holds, KeyExtractor, OnError, OnMissingKey, PolicySelector, Selector, Wait,
};
use crate::limit::Policies;
use crate::middleware::headers::Headers;
use crate::middleware::reject::{HttpReject, IsResponse, Rejection};
use crate::middleware::settings::Settings;
use crate::observe::Observer;
use crate::store::Store;

/// Limits the rate of requests to the services that it wraps: one check per request, and the inner service is called
/// only if it passes.
///
/// It takes a [`Store`], a [`KeyExtractor`] and one or more policies.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50).burst(100))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy);
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// Handlers find the [`Decision`](crate::check::Decision) in the extensions of the request.
/// Uncounted requests have none, so extract an `Option<Extension<Decision>>` or, with the feature
/// `axum`, an `Option<Decision>`. A denial is in the extensions of its response;
/// [`decision_in_response`](Self::decision_in_response) adds the other decisions there.
///
/// A denied request gets the response of a [`Reject`](crate::reject::Reject), since an error would
/// close the connection.
///
/// Use a [`CallLimitLayer`](crate::CallLimitLayer) for services other than HTTP, and for clients
/// that need an error instead of a response.
///
/// # Order of layers
///
/// - Inside the authentication if the key is a user, outside if the key is an address. The last
///   layer that is added to an axum `Router` is the outermost.
/// - Inside CORS: a browser's preflight request has no key, so it would get a 400; and a browser
///   hides a denial without CORS fields from scripts. If the limit must be outside,
///   [`skip`](Self::skip) the method `OPTIONS`.
/// - `Router::layer` wraps the fallback too, so unknown paths (404) are counted;
///   `Router::route_layer` does not. Count them if the limit protects against scans.
///
/// # Naming the type
///
/// A field or a function's return type names the store and the extractor:
/// `RateLimitLayer<RedisStore, PeerIp>`. Box closures, which have no name, and types that are
/// chosen at startup: `RateLimitLayer<AnyStore, Box<dyn KeyExtractor>>`. A layer that settles is a
/// `RateLimitLayer<S, K, HttpReject, UntilBodyEnd>`.
pub struct RateLimitLayer<S, K, R = HttpReject, E = AsIs> {
    pub(super) settings: Settings<K, Config<S, R, E>>,
}

impl<S: Store, K: KeyExtractor> RateLimitLayer<S, K> {
    /// Counts requests in `store`, under the keys that `extractor` finds and the policies that
    /// `policies` returns: a [`Policy`](crate::Policy), several [`Policies`],
    /// [`Tiers`](crate::select::Tiers) of them, or another [`PolicySelector`]. The store is cloned
    /// once per processor.
    pub fn new(store: S, extractor: K, policies: impl PolicySelector) -> Self {
        let config = Config {
            gate: Gate::new(store, policies, Holds::Nothing),
            reject: Arc::new(HttpReject::new()),
            headers: Headers::default(),
            shows_decision: false,
            rule: None,
            ending: PhantomData,
        };
        Self {
            settings: Settings::new(Arc::new(extractor), config),
        }
    }
}

impl<S: Clone, K, R, E> RateLimitLayer<S, K, R, E> {
    /// Sets how a request is rejected: by a [`Reject`](crate::reject::Reject). Defaults to [`HttpReject`]. For a
    /// closure, see [`reject_with`](Self::reject_with).
    #[must_use]
    pub fn reject<R2>(self, reject: R2) -> RateLimitLayer<S, K, R2, E> {
        self.change_to(|config| config.with_reject(reject))
    }

    /// Sets how a request is rejected: by a closure from a [`Rejection`] to a response. Like
    /// [`reject`](Self::reject), but the compiler infers the type of the closure's argument:
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// use http::Response;
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).reject_with(|rejection| {
    ///     let mut response = Response::new(String::new());
    ///     *response.status_mut() = rejection.status();
    ///     response
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn reject_with<F, A>(self, reject: F) -> RateLimitLayer<S, K, F, E>
    where
        F: Fn(Rejection<'_>) -> A,
        A: IsResponse,
    {
        self.reject(reject)
    }

    /// Sets what a request costs. A cost of 0 is decided but not charged. Defaults to 1.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
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
    pub fn cost_under(
        self,
        cost: impl Fn(&Parts, &Policies) -> u32 + Send + Sync + 'static,
    ) -> Self {
        self.change(|config| config.gate.cost = Some(Arc::new(cost)))
    }

    /// Lets a request that would be denied wait for its turn, up to a [`Duration`](std::time::Duration) or by a
    /// [`Wait`]. Defaults to no wait.
    ///
    /// In this process, the requests of a caller are served in the order of their arrival. Each
    /// instance takes at most one permit in advance, so that instances take turns. A request is
    /// denied as soon as its turn is certain to be too late. The turn of a dropped request passes
    /// to the next one.
    ///
    /// The inner service is not kept ready during the wait: it is polled for readiness when the
    /// request's turn has come.
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
    #[must_use]
    pub fn skip(self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.change(|config| config.gate.skip = Some(Arc::new(skip)))
    }

    /// Decides and charges as usual, but rejects nothing: to see the effect of a limit before it is enforced.
    ///
    /// The observer is notified of each decision, and a [`DryRun`](crate::check::DryRun) in the
    /// response's extensions holds it. There are no header fields and no
    /// [`Decision`](crate::check::Decision), since nothing is limited. A request passes even if it
    /// has no key, or if the store cannot decide. The check runs concurrently with the inner call,
    /// whose response waits for the check.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.change(|config| config.gate.dry_run = true)
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
    pub fn shadow(self, policies: impl PolicySelector) -> Self {
        self.change(|config| config.gate.shadows.push(Selector::new(policies)))
    }

    /// Sets what happens to a request that the store could not decide. Defaults to [`OnError::Reject`].
    #[must_use]
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|config| config.gate.on_error = on_error)
    }

    /// Sets what happens to a request without a key. Defaults to [`OnMissingKey::Reject`]. A
    /// request is always rejected if its key is [malformed](crate::extract::MissingKey::malformed),
    /// or missing because the server is [misconfigured](crate::extract::MissingKey::misconfigured).
    #[must_use]
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.change(|config| config.gate.on_missing_key = on_missing_key)
    }

    /// Sets which header fields report a decision to clients. Defaults to [`Headers::DRAFT`]: `RateLimit` and
    /// `RateLimit-Policy`.
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::Global;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// use tower_redis_ratelimit::headers::{Headers, LegacyHeaders};
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// // Also `X-RateLimit-Limit`, `X-RateLimit-Remaining`, and `X-RateLimit-Reset` as a Unix time.
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).headers(Headers::DRAFT.and(LegacyHeaders::GitHub));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(self, headers: Headers) -> Self {
        self.change(|config| config.headers = headers)
    }

    /// Adds the [`Decision`](crate::check::Decision) to the extensions of the response of an
    /// admitted request, for outer layers and clients. If the response settles the request, it is
    /// the settled decision. With nested layers, the innermost decision is kept. Defaults to
    /// denials only, since it takes three allocations per request.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_redis_ratelimit::check::Decision;
    /// use tower_redis_ratelimit::extract::Global;
    /// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).decision_in_response();
    /// let hello = |_| async { Ok::<_, std::io::Error>(Response::new("hello".to_owned())) };
    /// let response = layer.layer(service_fn(hello)).oneshot(Request::new(())).await?;
    /// assert_eq!(response.extensions().get().map(Decision::remaining), Some(49));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn decision_in_response(self) -> Self {
        self.change(|config| config.shows_decision = true)
    }

    /// Sets the [`Observer`] of all decisions, store failures and misconfigurations. The store gets
    /// the same observer, unless one is set. Defaults to [a log of what needs attention](Observer);
    /// `()` disables it.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self
    where
        S: Store,
    {
        self.change(|config| config.gate.observe(observer))
    }

    fn change(self, change: impl FnOnce(&mut Config<S, R, E>)) -> Self {
        self.change_to(|mut config| {
            change(&mut config);
            config
        })
    }

    pub(super) fn change_to<R2, E2>(
        self,
        change: impl FnOnce(Config<S, R, E>) -> Config<S, R2, E2>,
    ) -> RateLimitLayer<S, K, R2, E2> {
        let settings = self.settings.change(|mut config| {
            config.gate.notifier = config.gate.notifier.with_fresh_limits();
            change(config)
        });
        RateLimitLayer { settings }
    }
}

impl<T, S, K, R, E> Layer<T> for RateLimitLayer<S, K, R, E> {
    type Service = RateLimit<T, S, K, R, E>;

    /// # Panics
    ///
    /// If it has a policy of requests [in flight](crate::Policy::in_flight), but neither
    /// [`until_body_end`](Self::until_body_end) nor [`settle`](Self::settle). If a
    /// [`PolicySelector`] returns such a policy for a request, the layer ignores that policy and
    /// reports it as [misconfigured](Observer::misconfigured).
    fn layer(&self, inner: T) -> Self::Service {
        let gate = &self.settings.config().gate;
        gate.assert_countable();
        gate.report_shared_count();
        RateLimit {
            inner,
            settings: self.settings.clone(),
        }
    }
}

/// Clones an `Arc`: no setting has to be `Clone`.
impl<S, K, R, E> Clone for RateLimitLayer<S, K, R, E> {
    fn clone(&self) -> Self {
        Self {
            settings: self.settings.clone(),
        }
    }
}

impl<S: fmt::Debug, K, R, E> fmt::Debug for RateLimitLayer<S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.config().gate.fmt("RateLimitLayer", f)
    }
}
