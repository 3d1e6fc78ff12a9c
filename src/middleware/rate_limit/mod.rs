//! The middleware for HTTP: see [`RateLimitLayer`].

mod deadline;
mod http;
mod layer;
mod settle;

pub use http::Http;
pub use layer::RateLimitLayer;
pub use settle::{Ending, TrackedBody, UntilBodyEnd};

pub use crate::middleware::limit::{
    AsIs, IsClone, IsCost, Limit, LimitFuture, LimitLayer, Protocol, Serve,
};

/// The service of a [`RateLimitLayer`].
pub type RateLimit<T, S, K, R = HttpReject, E = AsIs> = Limit<T, S, K, Http<R, E>>;

/// Resolves to the response of a [`RateLimit`].
pub type ResponseFuture<T, S, ReqBody, R = HttpReject, E = AsIs> =
    LimitFuture<T, S, Http<R, E>, Request<ReqBody>>;

use ::http::Request;

use crate::middleware::reject::HttpReject;
