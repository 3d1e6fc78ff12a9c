//! The middleware: one check per request, and the inner service only after a yes.
//!
//! ```
//! use axum::{Router, routing::get};
//! use tower_redis_ratelimit::{Global, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
//!
//! let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50).burst(100))?;
//! let layer = RateLimitLayer::new(LocalStore::default(), Global, policy);
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//! # Ok::<(), tower_redis_ratelimit::ConfigError>(())
//! ```
//!
//! The [`Decision`](crate::Decision) is in the extensions of the response, and for the handler in those of the request;
//! a request that nobody counted has none, so a handler takes an `Option<Extension<Decision>>`.
//!
//! A denied request is answered by a [`Reject`], without an error, since an error would close the connection. Put the
//! layer behind authentication if its key is a user, and before it if its key is an address.

mod annotation;
mod config;
mod copies;
mod extract;
mod future;
mod headers;
mod layer;
mod reject;
mod service;

pub use config::{OnError, OnMissingKey};
pub use extract::{Global, HeaderKey, KeyExtractor, MissingKey, PeerIp, key_fn};
pub use future::ResponseFuture;
pub use layer::RateLimitLayer;
pub use reject::{HttpReject, Reason, Reject, Rejection};
pub use service::RateLimit;
