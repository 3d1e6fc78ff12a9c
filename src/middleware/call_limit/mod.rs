//! The middleware for any tower service whose requests are not HTTP: see [`CallLimitLayer`].

mod calls;
mod ending;
mod layer;

pub use calls::Calls;
pub use ending::{CallEnding, UntilAnswer};
pub use layer::CallLimitLayer;

use crate::middleware::machine::{AsIs, Limit, LimitFuture};

/// The service of a [`CallLimitLayer`].
pub type CallLimit<T, S, K, R, E = AsIs> = Limit<T, S, K, Calls<R, E>>;

/// Resolves to the response of a [`CallLimit`].
pub type CallFuture<T, S, R, E = AsIs> = LimitFuture<T, S, Calls<R, E>, R>;

/// The error type of a call, as in tower's own layers.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
