//! Permits in `poll_ready`, for services whose requests share one count; and a [`Pause`] for all
//! instances, such as for the `Retry-After` of a server's 429.

mod future;
mod layer;
mod pause;
mod service;

pub use future::ThrottleFuture;
pub use layer::ThrottleLayer;
pub use pause::{Pause, retry_after};
pub use service::Throttle;

/// The type of a [`ThrottleLayer`] whose calls wait without a limit, the default.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Unbounded;

/// The type of a [`ThrottleLayer`] whose calls fail instead of waiting longer than
/// [`max_wait`](ThrottleLayer::max_wait).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Bounded;
