//! Any tower service with other requests than HTTP's: see [`CallLimitLayer`].

mod calls;
mod ending;
mod layer;

pub use calls::Calls;
pub use ending::{CallEnding, UntilAnswer};
pub use layer::CallLimitLayer;

use crate::middleware::limit::{AsIs, Limit, LimitFuture};

/// The service of a [`CallLimitLayer`].
pub type CallLimit<T, S, K, R, E = AsIs> = Limit<T, S, K, Calls<R, E>>;

/// Resolves to the response of a [`CallLimit`].
pub type CallFuture<T, S, R, E = AsIs> = LimitFuture<T, S, Calls<R, E>, R>;

/// Like tower's: one of several errors.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
