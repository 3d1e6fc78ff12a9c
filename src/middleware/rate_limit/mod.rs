//! The middleware for HTTP: see [`RateLimitLayer`].

mod body_end;
mod deadline;
mod http;
mod layer;

pub use body_end::{Ending, TrackedBody, UntilBodyEnd};
pub use http::Http;
pub use layer::RateLimitLayer;

pub use crate::middleware::machine::{
    AsIs, IsClone, IsCost, Limit, LimitFuture, LimitLayer, Protocol, Serve,
};

/// The service of a [`RateLimitLayer`].
pub type RateLimit<T, S, K, R = HttpReject, E = AsIs> = Limit<T, S, K, Http<R, E>>;

/// Resolves to the response of a [`RateLimit`].
pub type ResponseFuture<T, S, ReqBody, R = HttpReject, E = AsIs> =
    LimitFuture<T, S, Http<R, E>, Request<ReqBody>>;

use ::http::Request;

use crate::middleware::reject::HttpReject;
