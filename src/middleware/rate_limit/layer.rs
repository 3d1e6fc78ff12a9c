use std::sync::Arc;

use http::request::Parts;
use http::response;

use super::deadline::grpc_timeout;
use super::{Http, SettledLayer};
use crate::gate::{Gate, Holds, KeyExtractor, PolicySelector};
use crate::middleware::machine::{Config, LimitLayer};
use crate::middleware::reject::HttpReject;
use crate::settle::Settlement;
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
/// Handlers find the [`Decision`](crate::check::Decision) in the extensions of the request, unless
/// [`decision_in_request`](Self::decision_in_request) is `false`. Uncounted requests have none, so
/// extract an `Option<Extension<Decision>>` or, with the feature `axum`, an `Option<Decision>`. A
/// denial is in the extensions of its response;
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
/// Inside the authentication if the key is a user, outside if the key is an address; and inside CORS. The
/// [guide](crate::guide::pitfalls#the-order-of-layers) has the reasons, and the order of an axum `Router`.
///
/// # Naming the type
///
/// A field or a function's return type names the store, the extractor and, if it is not an [`HttpReject`], the reject. Box closures,
/// which have no name, and types that are chosen at startup: `Box::new(extractor) as Box<dyn KeyExtractor>`.
///
/// ```
/// use http::Response;
/// use tower_redis_ratelimit::extract::{ExtensionKey, KeyExtractor, Or, PeerIp};
/// use tower_redis_ratelimit::reject::Rejection;
/// use tower_redis_ratelimit::{RateLimitLayer, RedisStore, rate_limit::SettledLayer};
/// # use tower_redis_ratelimit::{Policy, extract::by_extension, reject::HttpReject};
/// # #[derive(Clone)]
/// # struct User(u64);
///
/// struct Limits {
///     by_address: RateLimitLayer<RedisStore, PeerIp>,
///     /// `by_extension(|user: &User| ..).or(PeerIp)`
///     by_user: RateLimitLayer<RedisStore, Or<ExtensionKey<User>, PeerIp>>,
///     by_choice: RateLimitLayer<RedisStore, Box<dyn KeyExtractor>>,
///     /// `.until_body_end()` or `.settle(..)`
///     settled: SettledLayer<RedisStore, PeerIp>,
///     /// `.reject(HttpReject::new().json(..))`
///     fixed: RateLimitLayer<RedisStore, PeerIp>,
///     /// `.reject_with(|rejection| ..)`, if the closure captures nothing
///     rejected: RateLimitLayer<RedisStore, PeerIp, fn(Rejection<'_>) -> Response<String>>,
/// }
/// # fn layers(store: RedisStore, policy: Policy) -> Limits {
/// #     let by_address = RateLimitLayer::new(store.clone(), PeerIp, policy.clone());
/// #     let by_user = by_extension(|user: &User| user.0);
/// #     Limits {
/// #         by_user: RateLimitLayer::new(store.clone(), by_user.or(PeerIp), policy.clone()),
/// #         by_choice: RateLimitLayer::new(store, Box::new(PeerIp) as Box<dyn KeyExtractor>, policy),
/// #         settled: by_address.clone().until_body_end(),
/// #         fixed: by_address.clone().reject(HttpReject::new().json("{}")),
/// #         rejected: by_address.clone().reject_with(|rejection| HttpReject::new().response(rejection.reason())),
/// #         by_address,
/// #     }
/// # }
/// ```
#[doc(alias("429", "throttle"))]
pub struct RateLimitLayer<S, K, R = HttpReject> {
    pub(in crate::middleware) inner: LimitLayer<S, K, Parts, Http<R>>,
}

impl<S: Store, K: KeyExtractor> RateLimitLayer<S, K> {
    /// Counts requests in `store`, under the keys that `extractor` finds and the policies that
    /// `policies` returns: a [`Policy`](crate::Policy), several [`Policies`](crate::Policies),
    /// [`Tiers`](crate::select::Tiers) of them, or another [`PolicySelector`]. The store is cloned
    /// once per processor.
    pub fn new(store: S, extractor: K, policies: impl PolicySelector) -> Self {
        // Without `until_body_end`, the layer does not see the end of a response's body.
        let mut gate = Gate::new(store, policies, Holds::Nothing);
        gate.settings.client_wait = Some(grpc_timeout);
        let config = Config {
            gate,
            protocol: Http::default(),
        };
        Self {
            inner: LimitLayer::new(Arc::new(extractor), config),
        }
    }
}

impl<S: Store, K, R> RateLimitLayer<S, K, R> {
    /// Settles requests by their responses: the cost is then a reservation, which `rule` settles by the head of the
    /// response. The response body becomes a [`TrackedBody`](crate::rate_limit::TrackedBody).
    ///
    /// Only failures count:
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_redis_ratelimit::extract::PeerIp;
    /// use tower_redis_ratelimit::settle::Settlement;
    /// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    ///
    /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
    /// let policy = Policy::new("login", Strategy::SlidingLog, Quota::per_minute(5))?;
    /// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy).settle(|response| match response.status {
    ///     StatusCode::UNAUTHORIZED => Settlement::Keep,
    ///     _ => Settlement::Refund,
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// At most five guesses can be in progress concurrently, since each reserves a failure.
    ///
    /// The rule may read the status, a header field of an upstream, or an extension that the
    /// handler has inserted. For a cost that depends on the body, use the
    /// [`RequestCost`](crate::settle::RequestCost) in the request's extensions, which settles when the body
    /// has ended: [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd). For bytes, use
    /// [`Settlement::Bytes`](crate::settle::Settlement::Bytes).
    ///
    /// ```
    /// # use tower_redis_ratelimit::extract::HeaderKey;
    /// # use tower_redis_ratelimit::settle::Settlement;
    /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let policy = Policy::new("tokens", Strategy::Gcra, Quota::per_minute(60_000))?;
    /// # let layer = RateLimitLayer::new(LocalStore::default(), HeaderKey::new("x-api-key")?, policy);
    /// let layer = layer.cost(|_| 500).settle(|response| {
    ///     let tokens = response.headers.get("x-tokens").and_then(|tokens| tokens.to_str().ok()?.parse().ok());
    ///     tokens.map_or(Settlement::AtEnd, Settlement::Cost)
    /// });
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// - **Once.** Every request settles when it ends: by its response, the end of its body, an
    ///   error, a panic, a timeout, or a client that disconnects. A request that ends without a
    ///   response keeps its reservation, so that clients gain nothing by disconnecting early. If
    ///   its `RequestCost` was used, it costs the amount that this has counted.
    /// - **All policies**, including the policies of a [dry run](Self::dry_run) and of
    ///   [shadows](Self::shadow).
    /// - **Off the request path.** No response waits for it. A local store settles immediately; for
    ///   other stores, the operation is queued before the response's end, ahead of the caller's later checks. Refunds never
    ///   give a caller more quota than if the real cost had been charged in the first place.
    /// - **In an outage** a [`Fallback`](crate::Fallback) settles in the store that decides.
    ///   Without one, unsent operations are retried until they expire. Operations that may have
    ///   been executed are not retried, so nothing is charged twice. The observer is
    ///   [notified](crate::observe::Event::Failed) of losses.
    /// - **With [waiting](Self::wait) requests** a bucket may have more than one burst reserved
    ///   ahead. Then a cost beyond the reservation charges nothing. The charge of a request that has
    ///   waited is refunded only if no later turn is reserved.
    /// - **Header fields** and the [`Decision`](crate::check::Decision) of the response report the
    ///   state when its head is sent: they include the rule's refund, but not what is settled at
    ///   the end of the body.
    #[must_use]
    pub fn settle(
        self,
        rule: impl Fn(&response::Parts) -> Settlement + Send + Sync + 'static,
    ) -> SettledLayer<S, K, R> {
        SettledLayer::new(self.inner, Some(Arc::new(rule)))
    }

    /// Keeps a request's charge and in-flight slot until the response body has ended or was
    /// dropped, and every clone of its [`RequestCost`](crate::settle::RequestCost) is dropped. The request
    /// then costs what the `RequestCost` has counted, or its reservation if the `RequestCost` was not used.
    /// Equivalent to [`settle`](Self::settle) with a rule that always returns
    /// [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd), and replaces it.
    ///
    /// The body of a response that upgrades the connection ends immediately: the connection's task
    /// must keep a clone of the `RequestCost`, as a [recipe](crate::guide::recipes) shows.
    #[doc(alias = "WebSocket")]
    #[must_use]
    pub fn until_body_end(self) -> SettledLayer<S, K, R> {
        SettledLayer::new(self.inner, None)
    }
}
