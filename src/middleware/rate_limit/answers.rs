//! The settings of responses, of [`RateLimitLayer`] and [`SettledLayer`].

use http::Response;

use super::http::AnswerSettings;
use super::{RateLimitLayer, SettledLayer};
use crate::middleware::headers::Headers;
use crate::middleware::machine::Config;
use crate::middleware::reject::Rejection;

/// The return type of a closure for [`reject_with`](crate::RateLimitLayer::reject_with): a
/// response.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a response",
    label = "the closure must return an `http::Response`",
    note = "with axum, end the closure by `.into_response()`, as in `(rejection.status(), \"Not so fast\").into_response()`"
)]
pub trait IsResponse {}

impl<B> IsResponse for Response<B> {}

macro_rules! answers {
    ($layer:ident) => {
        impl<S: Clone, K, R> $layer<S, K, R> {
            /// Sets how a request is rejected: by a [`Reject`](crate::reject::Reject). Defaults to
            /// [`HttpReject`](crate::reject::HttpReject). For a closure, see [`reject_with`](Self::reject_with).
            #[must_use]
            pub fn reject<R2>(self, reject: R2) -> $layer<S, K, R2> {
                $layer {
                    inner: self.inner.change_to(|Config { gate, protocol }| Config {
                        gate,
                        protocol: protocol.with_reject(reject),
                    }),
                }
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
            pub fn reject_with<F, A>(self, reject: F) -> $layer<S, K, F>
            where
                F: Fn(Rejection<'_>) -> A,
                A: IsResponse,
            {
                self.reject(reject)
            }

            /// Lets rejections have a status of success, as in JSON-RPC, where the body has the error. Otherwise the
            /// first such response of [`reject_with`](Self::reject_with) or [`reject`](Self::reject) is reported as
            /// [misconfigured](crate::observe::Event::Misconfigured), except for one over gRPC, which has a `grpc-status`.
            #[must_use]
            pub fn denied_with_success(self) -> Self {
                self.answer(|answer| answer.denies_with_success = true)
            }

            /// Sets which header fields report a decision to clients. Defaults to [`Headers::DRAFT_11`]: `RateLimit` and
            /// `RateLimit-Policy`.
            ///
            /// ```
            /// # use tower_redis_ratelimit::extract::Global;
            /// # use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
            /// use tower_redis_ratelimit::headers::Headers;
            ///
            /// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
            /// # let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
            /// // Also `X-RateLimit-Limit`, `X-RateLimit-Remaining`, and `X-RateLimit-Reset` as a Unix time.
            /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).headers(Headers::DRAFT_11.and(Headers::GITHUB));
            /// # let _ = layer;
            /// # Ok(())
            /// # }
            /// ```
            #[must_use]
            pub fn headers(self, headers: Headers) -> Self {
                self.answer(|answer| answer.headers = headers)
            }

            /// Sets whether handlers find the [`Decision`](crate::check::Decision) in the extensions of an admitted request.
            /// Defaults to `true`; `false` saves an allocation per request. Under nested layers, a handler then finds the
            /// decision of an outer layer, if any, and [`counted-twice`](crate::guide::pitfalls#counted-twice) is not reported.
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
            /// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).decision_in_request(false);
            /// let sees_decision = |request: Request<()>| async move {
            ///     let is_seen = request.extensions().get::<Decision>().is_some();
            ///     Ok::<_, std::io::Error>(Response::new(is_seen.to_string()))
            /// };
            /// let response = layer.layer(service_fn(sees_decision)).oneshot(Request::new(())).await?;
            /// assert_eq!(response.body(), "false");
            /// # Ok(())
            /// # }
            /// ```
            #[must_use]
            pub fn decision_in_request(self, is_in_request: bool) -> Self {
                self.answer(|answer| answer.decision_in_request = is_in_request)
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
                self.answer(|answer| answer.decision_in_response = true)
            }

            fn answer(self, change: impl FnOnce(&mut AnswerSettings)) -> Self {
                Self {
                    inner: self
                        .inner
                        .change(|config| change(&mut config.protocol.answer)),
                }
            }
        }
    };
}

answers! { RateLimitLayer }
answers! { SettledLayer }
