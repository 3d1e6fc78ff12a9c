use std::fmt;
use std::sync::Arc;

use http::Response;
use http::request::Parts;
use http::response;
use tower_layer::Layer;

use super::config::{Config, OnError, OnMissingKey};
use super::copies::Copies;
use super::select::Selector;
use super::settle::Rule;
use super::wait::Waiting;
use super::{
    AsIs, Ending, Headers, HttpReject, KeyExtractor, PolicySelector, RateLimit, Rejection, UntilBodyEnd, Wait,
};
use crate::limit::Policies;
use crate::settle::Settlement;
use crate::store::{Observer, Store};

/// Limits the rate of requests to the services that it wraps: one check per request, and the inner service is called only
/// after a yes.
///
/// It takes a [`Store`], a [`KeyExtractor`] and one or more policies.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50).burst(100))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy);
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// The [`Decision`](crate::Decision) is in the extensions of the response, and for the handler in those of the request. A
/// request that nobody counted has none, so a handler takes an `Option<Extension<Decision>>`.
///
/// A denied request is answered by a [`Reject`](crate::Reject), not with an error, which would close the connection. Put
/// the layer behind authentication if its key is a user, and before it if its key is an address.
///
/// A [`CallLimitLayer`](crate::CallLimitLayer) is for services whose requests are not HTTP's, and for clients that want an
/// error instead of a response.
pub struct RateLimitLayer<S, K, R = HttpReject, E = AsIs> {
    config: Copies<Config<S, K, R, E>>,
}

impl<S: Store, K: KeyExtractor> RateLimitLayer<S, K> {
    /// Counts requests in `store`, by the keys that `extractor` finds, under the policies that `policies` gives: a
    /// [`Policy`](crate::Policy), several [`Policies`], [`Tiers`](crate::Tiers) of them, or another [`PolicySelector`].
    /// The store is cloned, once for each processor.
    pub fn new(store: S, extractor: K, policies: impl PolicySelector) -> Self {
        Self::with(Config {
            store,
            extractor: Arc::new(extractor),
            policies: Selector::new(policies),
            shadows: Vec::new(),
            dry_run: false,
            skip: None,
            reject: Arc::new(HttpReject::new()),
            cost: None,
            wait: None,
            on_error: OnError::default(),
            on_missing_key: OnMissingKey::default(),
            headers: Headers::default(),
            observer: None,
            ending: AsIs,
            misconfiguration: Arc::default(),
        })
    }
}

impl<S: Clone, K, R, E: Ending> RateLimitLayer<S, K, R, E> {
    /// Sets how a request is rejected: by a [`Reject`](crate::Reject). Defaults to [`HttpReject`]. For a closure, see
    /// [`reject_with`](Self::reject_with).
    #[must_use]
    pub fn reject<R2>(self, reject: R2) -> RateLimitLayer<S, K, R2, E> {
        RateLimitLayer::with(self.config.current().copy().with_reject(reject))
    }

    /// Sets how a request is rejected: by a closure from a [`Rejection`] to a response. Like [`reject`](Self::reject), but
    /// the compiler knows the type of the closure's argument:
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
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
    pub fn reject_with<F, B>(self, reject: F) -> RateLimitLayer<S, K, F, E>
    where
        F: Fn(Rejection<'_>) -> Response<B>,
    {
        self.reject(reject)
    }

    /// Sets what a request costs. A cost of 0 is decided but not charged. Defaults to 1.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
        self.cost_under(move |request, _| cost(request))
    }

    /// Sets what a request costs under the policies that were found for it. Like [`cost`](Self::cost), and in its place.
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy, Tiers};
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
    pub fn cost_under(self, cost: impl Fn(&Parts, &Policies) -> u32 + Send + Sync + 'static) -> Self {
        self.change(|config| config.cost = Some(Arc::new(cost)))
    }

    /// Has a request that would be denied wait for its turn, up to a [`Duration`](std::time::Duration) or what a [`Wait`]
    /// says. Defaults to no wait.
    ///
    /// The requests of a caller take turns in the order in which they came to this process, and each instance takes at most
    /// one permit ahead, so that the instances take turns too. A request is denied as soon as it is known that its turn
    /// would come too late. One that is dropped leaves its turn to the next.
    ///
    /// The inner service is not kept ready meanwhile: it is polled ready when the turn has come.
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
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
        self.change(|config| config.wait = Some(Waiting::new(config.store.clone(), wait.into())))
    }

    /// Sets which requests pass at once, uncounted and without header fields, such as health checks. They need no key.
    /// Defaults to none.
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
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
        self.change(|config| config.skip = Some(Arc::new(skip)))
    }

    /// Decides and charges as usual, and rejects nothing: to see what a limit would do before it does.
    ///
    /// The observer is told each decision, and a [`DryRun`](crate::DryRun) in the response's extensions holds it. There
    /// are no header fields and no [`Decision`](crate::Decision), since nothing is limited; and a request without a key,
    /// or one that the store cannot decide, passes. The check is made beside the inner call, and only an answer that is
    /// later than the response keeps it waiting.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.change(|config| config.dry_run = true)
    }

    /// Tries policies that reject nothing beside those that do: what [`dry_run`](Self::dry_run) does with all, for these
    /// alone. May be called again for more.
    ///
    /// Only requests that pass are decided and charged under them, each list of policies by itself, at what the request
    /// [costs](Self::cost). What they count is apart from all that is enforced, also from a policy of the same name. Policies
    /// of several shadows need names that differ, or they are one count.
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_second(limit));
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy("api", 50)?).shadow(policy("api", 20)?);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn shadow(self, policies: impl PolicySelector) -> Self {
        self.change(|config| config.shadows.push(Selector::new(policies)))
    }

    /// Sets what becomes of what a request has taken when its response is there: the cost is then a reservation, which `rule`
    /// settles by the head of the response. The body of responses is a [`TrackedBody`](crate::TrackedBody) from then on.
    ///
    /// Only failures count:
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_redis_ratelimit::{LocalStore, PeerIp, Policy, Quota, RateLimitLayer, Settlement, Strategy};
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// let policy = Policy::new("login", Strategy::SlidingLog, Quota::per_minute(5))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy).settle(|response| match response.status {
    ///     StatusCode::UNAUTHORIZED => Settlement::Keep,
    ///     _ => Settlement::GiveBack,
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// At most five guesses run at the same time, since each has reserved its failure.
    ///
    /// The rule may read the status, a header field of an upstream, or an extension that the handler has set. What is known
    /// only later is counted by the [`Charge`](crate::Charge) in the request's extensions, and settled when the body has ended:
    /// [`Settlement::AtEnd`](crate::Settlement::AtEnd). For bytes there is
    /// [`Settlement::Bytes`](crate::Settlement::Bytes).
    ///
    /// ```
    /// # use tower_redis_ratelimit::{HeaderKey, LocalStore, Policy, Quota, RateLimitLayer, Settlement, Strategy};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let policy = Policy::new("tokens", Strategy::Gcra, Quota::per_minute(60_000))?;
    /// # let layer = RateLimitLayer::new(LocalStore::default(), HeaderKey::new("x-api-key".parse()?), policy);
    /// let layer = layer.cost(|_| 500).settle(|response| {
    ///     let tokens = response.headers.get("x-tokens").and_then(|tokens| tokens.to_str().ok()?.parse().ok());
    ///     tokens.map_or(Settlement::AtEnd, Settlement::Cost)
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// - **Once.** Whatever ends a request settles it: its response, the end of its body, an error, a panic, a time-out, a client
    ///   that goes away. A request that ends without a response keeps what it has reserved, or else a client would hang up
    ///   before each answer, unless its `Charge` was used: then it costs what that has counted.
    /// - **All policies** alike, also those of a [dry run](Self::dry_run) and of [shadows](Self::shadow).
    /// - **Off the request path.** No response waits for it. A store that answers at once is asked at once; otherwise what is to
    ///   be settled is sent within a few milliseconds, many together. What has been given back does not make a caller's
    ///   quota larger than if the real cost had been charged at once.
    /// - **In an outage** a [`Fallback`](crate::Fallback) settles as it decides. Without one, what was not sent is sent again
    ///   until it matters no more; what may have been charged already is not, so that nothing is charged twice. The observer
    ///   is [told](Observer::failed) what was lost.
    /// - **Header fields** and the [`Decision`](crate::Decision) of the response tell the state by what is known when its head is
    ///   sent: what the rule gives back then remains, and what is settled only at the end of the body is still reserved.
    #[must_use]
    pub fn settle(
        self,
        rule: impl Fn(&response::Parts) -> Settlement + Send + Sync + 'static,
    ) -> RateLimitLayer<S, K, R, UntilBodyEnd>
    where
        S: Store,
    {
        self.until(Rule::new(rule))
    }

    /// Holds what a request has taken until the body of its response has ended or was dropped, and no clone of its
    /// [`Charge`](crate::Charge) is left. It costs what that has counted, or what was reserved if it was not used: as
    /// [`settle`](Self::settle) with a rule that is always [`Settlement::AtEnd`](crate::Settlement::AtEnd), and in its place.
    #[must_use]
    pub fn until_body_end(self) -> RateLimitLayer<S, K, R, UntilBodyEnd>
    where
        S: Store,
    {
        self.until(Rule::AT_END)
    }

    fn until(self, rule: Rule) -> RateLimitLayer<S, K, R, UntilBodyEnd>
    where
        S: Store,
    {
        let config = self.config.current().copy();
        let desk = config.desk();
        RateLimitLayer::with(config.with_ending(UntilBodyEnd::new(rule, desk)))
    }

    /// Sets what becomes of a request that the store could not decide. Defaults to [`OnError::Reject`].
    #[must_use]
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|config| config.on_error = on_error)
    }

    /// Sets what becomes of a request that has no key. One whose key is [malformed](crate::MissingKey::malformed), or can
    /// never be found since the server is [misconfigured](crate::MissingKey::misconfigured), is rejected all the same.
    /// Defaults to [`OnMissingKey::Reject`].
    #[must_use]
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.change(|config| config.on_missing_key = on_missing_key)
    }

    /// Sets which header fields tell clients of a decision. Defaults to [`Headers::DRAFT`]: `RateLimit` and
    /// `RateLimit-Policy`.
    ///
    /// ```
    /// # use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// use tower_redis_ratelimit::{Headers, Trio};
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
    /// // Also `X-RateLimit-Limit`, `X-RateLimit-Remaining`, and `X-RateLimit-Reset` as a Unix time.
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).headers(Headers::DRAFT.and(Trio::GitHub));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(self, headers: Headers) -> Self {
        self.change(|config| config.headers = headers)
    }

    /// Sets who is told of every decision, of what no store could decide, and of a server that is misconfigured; and of what
    /// happens in the store, if that has no observer yet. See [`Observer`]. Defaults to nobody; only of a misconfigured server
    /// the log is told, with the feature `tracing`.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self
    where
        S: Store,
    {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.change(|config| {
            config.store.observe(&observer);
            config.observer = Some(observer);
            let (post, leases) = config.desk();
            config.ending.set_desk(post, leases);
        })
    }

    fn change(self, change: impl FnOnce(&mut Config<S, K, R, E>)) -> Self {
        let mut config = self.config.current().copy();
        change(&mut config);
        Self::with(config)
    }

    fn with(mut config: Config<S, K, R, E>) -> Self {
        // Whatever the layer has told that this one is made from.
        config.misconfiguration = Arc::default();
        Self { config: Copies::new(|| config.copy()) }
    }
}

impl<T, S, K, R, E> Layer<T> for RateLimitLayer<S, K, R, E> {
    type Service = RateLimit<T, S, K, R, E>;

    fn layer(&self, inner: T) -> Self::Service {
        RateLimit { inner, config: self.config.clone() }
    }
}

/// Shared, so that no part of it has to be `Clone`.
impl<S, K, R, E> Clone for RateLimitLayer<S, K, R, E> {
    fn clone(&self) -> Self {
        Self { config: self.config.clone() }
    }
}

impl<S: fmt::Debug, K, R, E> fmt::Debug for RateLimitLayer<S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.current().fmt("RateLimitLayer", f)
    }
}
