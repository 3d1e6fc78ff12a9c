//! The layer for HTTP, and the settings that only HTTP has.
//!
//! These methods of [`LimitLayer`] are here, since calls, which have no header fields and another
//! rejection, share only the rest.

use std::sync::Arc;

use super::Http;
use super::deadline::grpc_timeout;
use crate::gate::{Gate, Holds, KeyExtractor, PolicySelector};
use crate::middleware::headers::Headers;
use crate::middleware::machine::{AsIs, Config, LimitLayer};
use crate::middleware::reject::{HttpReject, IsResponse, Rejection};
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
/// Inside the authentication if the key is a user, outside if the key is an address; and inside CORS. The
/// [guide](crate::guide::pitfalls#the-order-of-layers) has the reasons, and the order of an axum `Router`.
///
/// # Naming the type
///
/// A field or a function's return type names the store, the extractor, the reject, and whether it settles. Box closures, which
/// have no name, and types that are chosen at startup: `Box::new(extractor) as Box<dyn KeyExtractor>`.
///
/// ```
/// use http::Response;
/// use tower_redis_ratelimit::extract::{ExtensionKey, KeyExtractor, Or, PeerIp};
/// use tower_redis_ratelimit::reject::{HttpReject, Rejection};
/// use tower_redis_ratelimit::{RateLimitLayer, RedisStore, rate_limit::UntilBodyEnd};
/// # use tower_redis_ratelimit::{Policy, extract::by_extension};
/// # #[derive(Clone)]
/// # struct User(u64);
///
/// struct Limits {
///     by_address: RateLimitLayer<RedisStore, PeerIp>,
///     /// `by_extension(|user: &User| ..).or(PeerIp)`
///     by_user: RateLimitLayer<RedisStore, Or<ExtensionKey<User>, PeerIp>>,
///     by_choice: RateLimitLayer<RedisStore, Box<dyn KeyExtractor>>,
///     /// `.until_body_end()` or `.settle(..)`
///     settled: RateLimitLayer<RedisStore, PeerIp, HttpReject, UntilBodyEnd>,
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
/// #         rejected: by_address.clone().reject_with(|rejection| HttpReject::new().response(rejection.reason())),
/// #         by_address,
/// #     }
/// # }
/// ```
#[doc(alias("429", "throttle"))]
pub type RateLimitLayer<S, K, R = HttpReject, E = AsIs> = LimitLayer<S, K, Http<R, E>>;

impl<S: Store, K: KeyExtractor> RateLimitLayer<S, K> {
    /// Counts requests in `store`, under the keys that `extractor` finds and the policies that
    /// `policies` returns: a [`Policy`](crate::Policy), several [`Policies`](crate::Policies),
    /// [`Tiers`](crate::select::Tiers) of them, or another [`PolicySelector`]. The store is cloned
    /// once per processor.
    pub fn new(store: S, extractor: K, policies: impl PolicySelector) -> Self {
        // Without `until_body_end`, the layer does not see the end of a response's body.
        let mut gate = Gate::new(store, policies, Holds::Nothing);
        gate.settings.patience = Some(grpc_timeout);
        let config = Config {
            gate,
            protocol: Http::default(),
        };
        Self::with_config(Arc::new(extractor), config)
    }
}

impl<S: Clone, K, R, E> RateLimitLayer<S, K, R, E> {
    /// Sets how a request is rejected: by a [`Reject`](crate::reject::Reject). Defaults to [`HttpReject`]. For a
    /// closure, see [`reject_with`](Self::reject_with).
    #[must_use]
    pub fn reject<R2>(self, reject: R2) -> RateLimitLayer<S, K, R2, E> {
        self.change_to(|Config { gate, protocol }| Config {
            gate,
            protocol: protocol.with_reject(reject),
        })
    }

    /// Sets how a request is rejected: by a closure from a [`Rejection`] to a response. Set its status: `Response::new` has
    /// 200, so the client would take a denial for a success. Like [`reject`](Self::reject), but the compiler infers the type
    /// of the closure's argument:
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

    /// Lets the responses to denials have a status of success, as in JSON-RPC, where the body tells the error. Otherwise the
    /// first such response of [`reject_with`](Self::reject_with) or [`reject`](Self::reject) is reported as
    /// [misconfigured](crate::observe::Observer::misconfigured), except for one over gRPC, which has a `grpc-status`.
    #[must_use]
    pub fn denied_with_success(self) -> Self {
        self.change(|config| config.protocol.answer.denies_with_success = true)
    }

    /// Sets which header fields report a decision to clients. Defaults to [`Headers::DRAFT_11`]: `RateLimit` and
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
    /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).headers(Headers::DRAFT_11.and(LegacyHeaders::GitHub));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(self, headers: Headers) -> Self {
        self.change(|config| config.protocol.answer.headers = headers)
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
        self.change(|config| config.protocol.answer.shows_decision = true)
    }
}
