//! The settings that settle charges.
//!
//! They are apart from the other settings of a [`RateLimitLayer`], beside the endings that they choose.

use std::sync::Arc;

use http::response::Parts;

use super::{HeadRule, UntilBodyEnd};
use crate::middleware::RateLimitLayer;
use crate::middleware::machine::Config;
use crate::settle::Settlement;
use crate::store::Store;

impl<S: Store, K, R, E> RateLimitLayer<S, K, R, E> {
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
    /// handler has inserted. For a cost that is known only later, use the
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
    /// - **All policies**, including those of a [dry run](Self::dry_run) and of
    ///   [shadows](Self::shadow).
    /// - **Off the request path.** No response waits for it. A local store settles immediately; for
    ///   other stores, the operation is queued before the response's end, ahead of the caller's later checks. Refunds never
    ///   give a caller more quota than if the real cost had been charged in the first place.
    /// - **In an outage** a [`Fallback`](crate::Fallback) settles in the store that decides.
    ///   Without one, unsent operations are retried until they expire. Operations that may have
    ///   been executed are not retried, so nothing is charged twice. The observer is
    ///   [notified](crate::observe::Observer::failed) of losses.
    /// - **With [waiting](Self::wait) requests** a bucket may have more than one burst reserved
    ///   ahead. Then a cost beyond the reservation charges nothing. The charge of a request that has
    ///   waited is refunded only if no later turn is reserved.
    /// - **Header fields** and the [`Decision`](crate::check::Decision) of the response report the
    ///   state when its head is sent: they include the rule's refund, but not what is settled at
    ///   the end of the body.
    #[must_use]
    pub fn settle(
        self,
        rule: impl Fn(&Parts) -> Settlement + Send + Sync + 'static,
    ) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.with_rule(Some(Arc::new(rule)))
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
    pub fn until_body_end(self) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.with_rule(None)
    }

    fn with_rule(self, rule: Option<HeadRule>) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.change_to(|Config { mut gate, protocol }| {
            gate.settle();
            Config {
                gate,
                protocol: protocol.with_rule(rule),
            }
        })
    }
}
