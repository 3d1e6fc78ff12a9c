//! The common settings of [`RateLimitLayer`], [`SettledLayer`] and [`CallLimitLayer`], and the traits of
//! the layers and of their services.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use tower_layer::Layer;

use super::call_limit::{CallLimit, CallLimitLayer};
use super::rate_limit::{RateLimit, RateLimitLayer, Settled, SettledLayer};
use crate::error::ConfigError;
use crate::gate::{Enforcement, Gate, KeyExtractor, OnError, OnMissingKey, PolicySelector, Wait};
use crate::limit::{BlockAfter, Key, Policies, Quota};
use crate::observe::Observer;
use crate::store::Store;

/// A service that is `Clone`: a layer calls a clone of it once the store has decided. Implemented for every `Clone` type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not `Clone`, and a limited service is cloned for each request",
    label = "this service is not `Clone`",
    note = "derive `Clone` for the service, and share what is large in an `Arc`",
    note = "a service that cannot be cloned: put `tower::buffer::Buffer::new(service, 1_024)` around it"
)]
pub trait IsClone: Clone {}

#[diagnostic::do_not_recommend]
impl<T: Clone> IsClone for T {}

/// The cost of a request: a `u32`, the return type of a closure for [`cost`](RateLimitLayer::cost).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the cost of a request",
    label = "the closure must return a `u32`",
    note = "another integer: `u32::try_from(cost).unwrap_or(u32::MAX)`",
    note = "a cost that must be awaited: `.cost(|_| 0)`, and `RequestCost::reserve` in the handler"
)]
pub trait IsCost: Into<u32> {}

impl IsCost for u32 {}

/// Writes the settings and the traits of a layer for requests with this head.
macro_rules! layer {
    ($layer:ident<S, K $(, $param:ident $(: $bound:lifetime)?)+>, $head:ty, $service:ident) => {
        impl<S: Clone, K $(, $param $(: $bound)?)+> $layer<S, K $(, $param)+> {
            /// Sets what a request costs, as a `u32`. A cost of 0 is decided but not charged. Defaults to 1.
            #[must_use]
            pub fn cost<C: IsCost>(self, cost: impl Fn(&$head) -> C + Send + Sync + 'static) -> Self {
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
                cost: impl Fn(&$head, &Policies) -> C + Send + Sync + 'static,
            ) -> Self {
                self.change(|gate| {
                    gate.settings.cost = Some(Arc::new(move |request: &$head, policies| {
                        cost(request, policies).into()
                    }));
                })
            }

            /// Adds a key with its own policies: a request passes only if all keys allow it, and a request that one of
            /// them denies takes nothing from the others.
            ///
            /// ```
            /// # use tower_redis_ratelimit::extract::{Global, by_extension};
            /// # use tower_redis_ratelimit::{LocalStore, Policy, RateLimitLayer, Strategy};
            /// # #[derive(Clone)]
            /// # struct User { id: u64, org: u64 }
            /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
            /// let by_user = by_extension(|user: &User| user.id);
            /// let by_org = by_extension(|user: &User| user.org);
            /// let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota);
            /// let layer = RateLimitLayer::new(LocalStore::default(), by_user, policy("user", "10/s")?)
            ///     .and(by_org, policy("org", "50/s")?)
            ///     .and(Global, policy("service", "1000/s")?);
            /// # let _ = layer;
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// - **At most 4 keys** and 16 policies in all, whose names must differ. Two keys may be the same.
            /// - **The cost** of a request is the same for all keys. [`cost_under`](Self::cost_under) gets the policies of
            ///   the first one.
            /// - **A key without policies** for a request is left out. A key that the request lacks is left out under
            ///   [`OnMissingKey::Allow`], and rejects the request otherwise.
            /// - **Blocks and shadows** are of the layer's first key, and only its denials are strikes. A
            ///   [dry run](Self::dry_run) checks all keys.
            /// - **Settlements, reservations and requests in flight** act on all keys. [Leases](crate::Policy::leased) have
            ///   no effect.
            /// - **No waiting.** The layer panics if it also [waits](Self::wait).
            ///
            /// The guarantees depend on the store: see [several keys](crate::guide::keys#several-keys).
            #[doc(alias("hierarchy", "organization", "global"))]
            #[must_use]
            pub fn and(
                self,
                extractor: impl KeyExtractor<$head>,
                policies: impl PolicySelector<$head>,
            ) -> Self {
                self.change(|gate| gate.and(extractor, policies))
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
            pub fn id(self, id: impl Fn(&$head) -> Option<Key> + Send + Sync + 'static) -> Self {
                self.change(|gate| gate.settings.id = Some(Arc::new(id)))
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
                self.change(|gate| gate.wait(wait.into()))
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
            pub fn skip(self, skip: impl Fn(&$head) -> bool + Send + Sync + 'static) -> Self {
                self.change(|gate| gate.settings.skip = Some(Arc::new(skip)))
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
                self.change(|gate| gate.settings.enforcement = Enforcement::DryRun)
            }

            /// Adds policies in dry-run mode, in addition to the enforced ones. May be called repeatedly.
            ///
            /// Only requests that pass are checked under them, one check per list of policies, at the
            /// request's [cost](Self::cost). Their counts are separate from the counts of enforced policies,
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
            pub fn shadow(self, policies: impl PolicySelector<$head>) -> Self {
                self.change(|gate| gate.shadow(policies))
            }

            /// Blocks a caller who is denied too often: after the `strikes`, such as 20 per minute, every request is denied for
            /// `time`, 1 second to 366 days, by every instance within a second.
            ///
            /// ```
            /// use std::time::Duration;
            /// # use tower_redis_ratelimit::extract::Global;
            /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
            ///
            /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
            /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
            /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
            ///     .block_after("20/min", Duration::from_secs(600))?;
            /// # let _ = layer;
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// - **A strike** is a request that this layer denies, also from memory. No strikes are
            ///   denials while the caller is blocked, which do not [extend](Self::extend_blocks) the block, dry runs, shadows, requests whose cost
            ///   exceeds the burst, and requests that the store could not decide.
            /// - **Each instance adds up the strikes of a caller**, sends them every 200 ms, and begins the block when the store
            ///   has counted enough of them: at most 300 ms after the last strike, if the store is healthy. The strikes of
            ///   the last 200 ms are lost with the process. The count is a sliding log: it forgets each strike after the period. If a
            ///   block ends earlier than that, the next denial may begin another one.
            /// - **A blocked request** is denied in memory, without a check of policies, leases and queues. The decision's source
            ///   is [`Source::Blocked`](crate::check::Source::Blocked), and its wait is the rest of the block. Over HTTP it is a 429, or
            ///   [a 403](Self::forbid_blocked). A request that waits already keeps its place.
            /// - **The caller is the layer's key under the layer's first policy.** Layers and [limiters](crate::Limiter::block) with a first policy
            ///   of that name share the blocks of a store. If clients choose the key, such as a login's user name, anyone can get
            ///   anyone blocked: use [`block_after_by`](Self::block_after_by).
            /// - **In an outage** the known blocks hold. New ones hold in their own instance, and are sent afterwards. Under a
            ///   [share](crate::store::Instances) of the strikes, an instance blocks after its share of them.
            /// - **Memory.** At most 65,536 callers are blocked; beyond that, the block that ends first is dropped. A
            ///   [`RedisStore`](crate::RedisStore) keeps all blocks of its prefix in memory, and reads the changes twice a
            ///   second, in a task on the runtime that first needed it. A custom store has blocks per layer.
            /// - **The Redis user** needs `+zadd +zrem +zcard +zscore +zpopmin +zrangebyscore +zrevrange +pexpireat` for it.
            ///
            /// Replaces an earlier [`block_after_by`](Self::block_after_by) and [`with_blocks`](Self::with_blocks). Defaults to no
            /// blocks.
            ///
            /// # Errors
            ///
            /// As [`BlockAfter::new`](crate::reject::BlockAfter::new).
            #[doc(alias("ban", "fail2ban", "penalty"))]
            pub fn block_after(
                self,
                strikes: impl TryInto<Quota, Error: Into<ConfigError>>,
                time: Duration,
            ) -> Result<Self, ConfigError>
            where
                S: Store,
            {
                let rule = BlockAfter::new(strikes, time)?;
                Ok(self.change(|gate| gate.block(Some(rule), None)))
            }

            /// Like [`block_after`](Self::block_after), but blocks by a separate key, which callers cannot choose: their verified address,
            /// or the id of the user after a login. A request without such a key is never
            /// blocked, and its denial is no strike.
            ///
            /// ```
            /// use std::time::Duration;
            /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, Strategy};
            /// use tower_redis_ratelimit::extract::{HeaderKey, PeerIp};
            /// use tower_redis_ratelimit::RateLimitLayer;
            ///
            /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
            /// # let policy = Policy::new("login", Strategy::SlidingLog, Quota::per_minute(5))?;
            /// // Five attempts per user name. A client with 20 denials is blocked by its address, under any user name.
            /// let layer = RateLimitLayer::new(LocalStore::default(), HeaderKey::new("x-user-name")?, policy)
            ///     .block_after_by(PeerIp, "20/min", Duration::from_secs(600))?;
            /// # let _ = layer;
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// # Errors
            ///
            /// As [`block_after`](Self::block_after).
            pub fn block_after_by(
                self,
                extractor: impl KeyExtractor<$head>,
                strikes: impl TryInto<Quota, Error: Into<ConfigError>>,
                time: Duration,
            ) -> Result<Self, ConfigError>
            where
                S: Store,
            {
                let rule = BlockAfter::new(strikes, time)?;
                let key_of = Arc::new(move |request: &$head| extractor.extract(request).ok());
                Ok(self.change(|gate| gate.block(Some(rule), Some(key_of))))
            }

            /// Enforces the blocks of [`Limiter::block`](crate::Limiter::block) and of other layers. Denials by this layer begin
            /// no block. Included in [`block_after`](Self::block_after).
            #[must_use]
            pub fn with_blocks(self) -> Self
            where
                S: Store,
            {
                self.change(|gate| gate.block(None, None))
            }

            /// Sets whether denials of a caller that [`block_after`](Self::block_after) has blocked extend the block: it then ends when
            /// the caller has sent nothing for its time. To spare Redis, a denial extends it only if 1 % of the time, and half a
            /// second, have passed since it began or was extended, so it may end that much earlier. It extends a
            /// shorter block by an operator too, and does not shorten a longer one. Defaults to `false`.
            #[must_use]
            pub fn extend_blocks(self, extend: bool) -> Self {
                self.change(|gate| gate.settings.extends_blocks = extend)
            }

            /// Rejects blocked callers by a 403 without `Retry-After` instead of a 429, and gRPC calls by `PERMISSION_DENIED` without
            /// `RetryInfo`. The decision's source is [`Source::Forbidden`](crate::check::Source::Forbidden).
            #[must_use]
            pub fn forbid_blocked(self) -> Self {
                self.change(|gate| gate.settings.forbids_blocked = true)
            }

            /// Sets what happens to a request that the store could not decide. Defaults to [`OnError::Reject`]:
            /// a 503 over HTTP, and the [`StoreError`](crate::store::StoreError) as the error of other calls.
            #[must_use]
            pub fn on_error(self, on_error: OnError) -> Self {
                self.change(|gate| gate.settings.on_error = on_error)
            }

            /// Sets what happens to a request without a key. Defaults to [`OnMissingKey::Reject`]: a
            /// 400 or 401 over HTTP, and the [`MissingKey`](crate::extract::MissingKey) as the error of other
            /// calls. A request is always rejected if its key is [malformed](crate::extract::MissingKey::malformed),
            /// or missing because the server is [misconfigured](crate::extract::MissingKey::misconfigured).
            #[must_use]
            pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
                self.change(|gate| gate.settings.on_missing_key = on_missing_key)
            }

            /// Sets the [`Observer`] of this layer's decisions, store failures and misconfigurations. The store gets
            /// this observer too, unless one is set. Defaults to [a log of problems](Observer);
            /// `()` disables it.
            #[must_use]
            pub fn observer(self, observer: impl Observer) -> Self
            where
                S: Store,
                K: KeyExtractor<$head>,
            {
                Self {
                    inner: self.inner.observer(observer),
                }
            }

            fn change(self, change: impl FnOnce(&mut Gate<S, $head>)) -> Self {
                Self {
                    inner: self.inner.change(|config| change(&mut config.gate)),
                }
            }
        }

        impl<T: IsClone, S: Clone, K $(, $param $(: $bound)?)+> Layer<T> for $layer<S, K $(, $param)+> {
            type Service = $service<T, S, K $(, $param)+>;

            /// # Panics
            ///
            /// If it has [several keys](RateLimitLayer::and), and also [waits](RateLimitLayer::wait), or exceeds 4 keys or 16
            /// policies, or has two policies of one name. If it is a [`RateLimitLayer`] with a policy of requests
            /// [in flight](crate::Policy::in_flight): that needs
            /// [`until_body_end`](RateLimitLayer::until_body_end) or
            /// [`settle`](RateLimitLayer::settle). If a [`PolicySelector`] returns such a policy for
            /// a request, the layer ignores that policy and reports it as
            /// [misconfigured](crate::observe::Event::Misconfigured).
            fn layer(&self, inner: T) -> Self::Service {
                $service {
                    inner: self.inner.layer(inner),
                }
            }
        }

        /// Shares the settings, so that no part of them has to be `Clone`.
        impl<S, K $(, $param)+> Clone for $layer<S, K $(, $param)+> {
            fn clone(&self) -> Self {
                Self {
                    inner: self.inner.clone(),
                }
            }
        }

        impl<S: fmt::Debug, K $(, $param)+> fmt::Debug for $layer<S, K $(, $param)+> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.inner.fmt(stringify!($layer), f)
            }
        }
    };
}

/// Writes the accessors and the traits of a service.
macro_rules! service {
    ($service:ident<T, S, K $(, $param:ident)+>) => {
        impl<T, S, K $(, $param)+> $service<T, S, K $(, $param)+> {
            /// The inner service.
            pub fn get_ref(&self) -> &T {
                self.inner.get_ref()
            }

            /// The inner service. Requests sent to it directly are not counted.
            pub fn get_mut(&mut self) -> &mut T {
                self.inner.get_mut()
            }

            /// Returns the inner service.
            pub fn into_inner(self) -> T {
                self.inner.into_inner()
            }
        }

        impl<T: Clone, S, K $(, $param)+> Clone for $service<T, S, K $(, $param)+> {
            fn clone(&self) -> Self {
                Self {
                    inner: self.inner.clone(),
                }
            }
        }

        impl<T, S: fmt::Debug, K $(, $param)+> fmt::Debug for $service<T, S, K $(, $param)+> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.inner.fmt(stringify!($service), f)
            }
        }
    };
}

layer! { RateLimitLayer<S, K, R>, Parts, RateLimit }
layer! { SettledLayer<S, K, R>, Parts, Settled }
layer! { CallLimitLayer<S, K, Req: 'static, A>, Req, CallLimit }

service! { RateLimit<T, S, K, R> }
service! { Settled<T, S, K, R> }
service! { CallLimit<T, S, K, Req, A> }
