//! A permit in `poll_ready`, for services whose requests are all counted together; and a [`Pause`] for all of them, when the
//! server has asked for one.

mod future;
mod layer;
mod pause;
mod service;

pub use future::ThrottleFuture;
pub use layer::ThrottleLayer;
pub use pause::{Pause, retry_after};
pub use service::Throttle;

/// A throttle whose calls wait for as long as it takes: the type of a [`ThrottleLayer`] at first.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Forever;

/// A throttle whose calls fail rather than wait for longer than [`max_wait`](ThrottleLayer::max_wait).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AtMost;
