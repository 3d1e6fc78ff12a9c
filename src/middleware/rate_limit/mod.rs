//! The middleware for HTTP: see [`RateLimitLayer`].

mod answers;
mod body;
mod deadline;
mod http;
mod layer;
mod service;
mod settled;

use self::http::Http;
pub use body::TrackedBody;
pub use layer::RateLimitLayer;
pub use service::{RateLimit, ResponseFuture};
pub use settled::{Settled, SettledFuture, SettledLayer};
