//! Any tower service with other requests than HTTP's: see [`CallLimitLayer`].

mod ending;
mod future;
mod layer;
mod service;

pub use ending::{CallEnding, UntilAnswer};
pub use future::CallFuture;
pub use layer::CallLimitLayer;
pub use service::CallLimit;

/// Like tower's: one of several errors.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
