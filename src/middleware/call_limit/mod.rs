//! The middleware for any tower service whose requests are not HTTP: see [`CallLimitLayer`].

mod calls;
mod layer;
mod service;

use calls::Calls;
pub use layer::CallLimitLayer;
pub use service::{CallFuture, CallLimit};

/// The error type of a call, as in tower's own layers.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
