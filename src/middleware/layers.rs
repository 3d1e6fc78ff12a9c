//! The common settings of [`RateLimitLayer`], [`SettledLayer`] and [`CallLimitLayer`], and the traits of
//! the layers and of their services.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use super::call_limit::{CallLimit, CallLimitLayer};
use super::rate_limit::{RateLimit, RateLimitLayer, Settled, SettledLayer};
use crate::gate::{Gate, KeyExtractor, OnError, OnMissingKey, PolicySelector, Wait};
use crate::limit::{Key, Policies};
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
                self.change(|gate| gate.settings.dry_run = true)
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
            /// If it is a [`RateLimitLayer`] with a policy of requests
            /// [in flight](crate::Policy::in_flight): that needs
            /// [`until_body_end`](RateLimitLayer::until_body_end) or
            /// [`settle`](RateLimitLayer::settle). If a [`PolicySelector`] returns such a policy for
            /// a request, the layer ignores that policy and reports it as
            /// [misconfigured](Observer::misconfigured).
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
