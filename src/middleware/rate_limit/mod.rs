//! The middleware for HTTP: see [`RateLimitLayer`].

mod config;
mod future;
mod layer;
mod service;
mod settle;

pub use future::ResponseFuture;
pub use layer::RateLimitLayer;
pub use service::RateLimit;
pub use settle::{AsIs, Ending, TrackedBody, UntilBodyEnd};
