//! The middleware for any tower service whose requests are not HTTP: see [`CallLimitLayer`].

mod ending;
mod future;
mod layer;
mod service;

pub use ending::{CallEnding, UntilAnswer};
pub use future::CallFuture;
pub use layer::CallLimitLayer;
pub use service::CallLimit;

/// The error type of a call, as in tower's own layers.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
