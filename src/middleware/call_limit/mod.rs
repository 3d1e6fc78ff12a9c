//! Any other tower service, whose requests are not HTTP's. [`CallLimitLayer`] tells the story.

mod ending;
mod future;
mod layer;
mod service;

pub use ending::{CallEnding, UntilAnswer};
pub use future::CallFuture;
pub use layer::CallLimitLayer;
pub use service::CallLimit;

/// As tower's: what a call fails with is one of several errors.
type BoxError = Box<dyn std::error::Error + Send + Sync>;
