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
