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
/// For the handler the [`Decision`](crate::check::Decision) is in the extensions of the request. An uncounted request has
/// none, so a handler takes an `Option<Extension<Decision>>`, or with the feature `axum` an `Option<Decision>`. A denial
/// is in the extensions of its response; [`decision_in_response`](Self::decision_in_response) has the others there too.
///
/// A denied request is answered by a [`Reject`](crate::reject::Reject); an error would close the connection.
///
/// A [`CallLimitLayer`](crate::CallLimitLayer) is for services other than HTTP, and for clients that need an error
/// instead of a response.
///
/// # Where it stands
///
/// - Inside the authentication if its key is a user, and outside if its key is an address. Of the layers of an axum
///   `Router`, the last one is the outermost.
/// - Inside CORS: a browser asks first, without any key, and would be answered with 400; and it shows a script no denial
///   without CORS fields. If the limit has to be outside, [`skip`](Self::skip) the method `OPTIONS`.
/// - `Router::layer` is around the fallback too, so that unknown paths (404) are counted; `Router::route_layer` is not.
///   Count them where the limit protects against scans.
///
/// # Its type
///
/// A field or a function's return type names the store and the extractor: `RateLimitLayer<RedisStore, PeerIp>`. Closures
/// have no name, so box them, and whatever is chosen when the program starts:
/// `RateLimitLayer<AnyStore, Box<dyn KeyExtractor>>`. One that settles is a
/// `RateLimitLayer<S, K, HttpReject, UntilBodyEnd>`.
pub struct RateLimitLayer<S, K, R = HttpReject, E = AsIs> {
    pub(super) settings: Settings<K, Config<S, R, E>>,
}

impl<S: Store, K: KeyExtractor> RateLimitLayer<S, K> {
    /// Counts requests in `store`, by the keys that `extractor` finds, under the policies that
    /// `policies` gives: a [`Policy`](crate::Policy), several [`Policies`], [`Tiers`](crate::select::Tiers) of them, or
    /// another [`PolicySelector`]. The store is cloned, once for each processor.
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

    /// Sets how a request is rejected: by a closure from a [`Rejection`] to a response. Like [`reject`](Self::reject),
    /// but the compiler knows the type of the closure's argument:
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
    /// The requests of a caller are served in the order in which they came to this process, and each instance takes at
    /// most one permit ahead, so that the instances take turns. A request is denied as soon as it is known that its
    /// turn would come too late. A dropped request leaves its turn to the next.
    ///
    /// Meanwhile the inner service is not kept ready: it is polled for readiness when the turn has come.
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

    /// Sets which requests pass at once, uncounted and without header fields, such as health checks. They need no key.
    /// Defaults to none.
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
    /// The observer is notified of each decision, and a [`DryRun`](crate::check::DryRun) in the response's extensions
    /// holds it. There are no header fields and no [`Decision`](crate::check::Decision), since nothing is limited; a
    /// request without a key, or one that the store cannot decide, passes. The check runs in parallel to the inner
    /// call; the response waits for it if it takes longer.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.change(|config| config.gate.dry_run = true)
    }

    /// Adds policies that reject nothing to those that do, like a [`dry_run`](Self::dry_run) of these alone. May be
    /// called again for more.
    ///
    /// Only requests that pass are decided and charged under them, each list of policies separately, at the request's
    /// [cost](Self::cost). Their counts are separate from enforced ones, also from a policy of the same name. Policies
    /// of several shadows need different names, or they share a count.
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

    /// Sets what happens to a request without a key. One whose key is
    /// [malformed](crate::extract::MissingKey::malformed), or missing since the server is
    /// [misconfigured](crate::extract::MissingKey::misconfigured), is always rejected. Defaults to
    /// [`OnMissingKey::Reject`].
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

    /// Puts the [`Decision`](crate::check::Decision) on a request that passes into the extensions of its response, for
    /// layers and clients around this layer; where it is settled by the response, as it is then. Of layers that wrap
    /// each other, the innermost one's stays. Defaults to denials alone, since it is three allocations for each
    /// request.
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

    /// Sets the [`Observer`] of every decision, of what no store could decide, and of a misconfigured server; and of
    /// the store, if that has none yet. Defaults to [a log of what needs attention](Observer); `()` turns that off.
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
            config.gate.notifier = config.gate.notifier.anew();
            change(config)
        });
        RateLimitLayer { settings }
    }
}

impl<T, S, K, R, E> Layer<T> for RateLimitLayer<S, K, R, E> {
    type Service = RateLimit<T, S, K, R, E>;

    /// # Panics
    ///
    /// If it was given a policy of requests [in flight](crate::Policy::in_flight), and neither
    /// [`until_body_end`](Self::until_body_end) nor [`settle`](Self::settle). One that a [`PolicySelector`] finds for a
    /// request is left out instead, and reported as [misconfigured](Observer::misconfigured).
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

/// Shared, so that no part of it has to be `Clone`.
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
