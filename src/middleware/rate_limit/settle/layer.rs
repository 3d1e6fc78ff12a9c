use std::sync::Arc;

use http::response::Parts;

use super::{Rule, UntilBodyEnd};
use crate::middleware::RateLimitLayer;
use crate::middleware::limit::Config;
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
    /// Five guesses may be in progress at once, since each has reserved its failure.
    ///
    /// The rule may read the status, a header field of an upstream, or an extension that the handler has set. A cost
    /// that is known only later is counted by the [`Charge`](crate::settle::Charge) in the request's extensions, and
    /// settled when the body has ended: [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd). For bytes there is
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
    /// - **Once.** Whatever ends a request settles it: its response, the end of its body, an error, a panic, a timeout,
    ///   a client that disconnects. A request that ends without a response keeps what it has reserved, so that clients
    ///   gain nothing by hanging up early; if its `Charge` was used, it costs what that has counted.
    /// - **All policies**, also those of a [dry run](Self::dry_run) and of [shadows](Self::shadow).
    /// - **Off the request path.** No response waits for it. A local store settles at once; otherwise it is sent within
    ///   a few milliseconds, in batches. Refunds do not make a caller's quota larger than if the real cost had been
    ///   charged at once.
    /// - **In an outage** a [`Fallback`](crate::Fallback) settles as it decides. Without one, what was not sent is
    ///   retried while it matters; what may have been charged already is not, so that nothing is charged twice. The
    ///   observer is [notified](crate::observe::Observer::failed) of what was lost.
    /// - **Header fields** and the [`Decision`](crate::check::Decision) of the response report the state when its head
    ///   is sent: what the rule refunds then remains, and what is settled at the end of the body is still reserved.
    #[must_use]
    pub fn settle(
        self,
        rule: impl Fn(&Parts) -> Settlement + Send + Sync + 'static,
    ) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.with_rule(Some(Arc::new(rule)))
    }

    /// Holds what a request has taken until the body of its response has ended or was dropped, and no clone of its
    /// [`Charge`](crate::settle::Charge) is left. It costs what that has counted, or what was reserved if it was not
    /// used: as [`settle`](Self::settle) with a rule that is always
    /// [`Settlement::AtEnd`](crate::settle::Settlement::AtEnd), and replaces it.
    ///
    /// The body of a response that upgrades the connection ends at once: the task of the connection has to keep a clone
    /// of the `Charge`, as a [recipe](crate::guide::recipes) shows.
    #[must_use]
    pub fn until_body_end(self) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.with_rule(None)
    }

    fn with_rule(self, rule: Option<Rule>) -> RateLimitLayer<S, K, R, UntilBodyEnd> {
        self.change_to(|Config { mut gate, protocol }| {
            gate.settle();
            Config {
                gate,
                protocol: protocol.with_rule(rule),
            }
        })
    }
}
